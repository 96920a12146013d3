"""Bare loops: how fast an engine can be driven from Python with nothing around it.

Each claims batches, runs a task per job on the event loop and with the collector settings that our worker has, compares
a version when it settles, keeps a history, and writes rows or records of the size that ours have. No sessions, no
retries, no priorities to choose among, no deadlines, no errors. Their `enqueue_one` is one INSERT or one script call.
"""
