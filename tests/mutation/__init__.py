"""Mutation testing: small defects put into the code on purpose, one at a time, to see whether any test notices.

`python -m tests.mutation` tries every mutant of the modules in `plan.py`, each in a process of its own.
"""
