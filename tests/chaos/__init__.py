"""Real faults on real engines: processes that are killed and paused, servers that die, wires that break, disks that are
full. Every run notes its history, and one checker judges it: `holdfast.testing.history`.

`cell.py` says what a fault is, `cells_*.py` have them all, `rig.py` is where one is run, `program.py` what the worker
processes run there. `python -m tests.chaos --list` names the cells, `python -m tests.chaos` runs them.
"""
