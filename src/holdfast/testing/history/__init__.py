"""Histories: what happened in a run, noted as events, and the invariants that every run must keep.

The simulation, the random tests and the fault runs note the same events and are judged by the same checks.
"""

from holdfast.testing.history.checks import check, compare_endings
from holdfast.testing.history.events import History
from holdfast.testing.history.recording import read_ending, read_events, recorded
from holdfast.testing.history.verdict import Violation

__all__ = ["History", "Violation", "check", "compare_endings", "read_ending", "read_events", "recorded"]
