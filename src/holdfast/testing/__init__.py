"""What tests of programs and of stores need: a clock that is moved by hand, and the conformance suite for stores."""

from holdfast.testing.clock import ManualClock

__all__ = ["ManualClock"]
