"""Deterministic simulation: real code on a simulated event loop, clock, source of chance and faulty store.

The same seed gives the same run, event for event. `python -m holdfast.testing.simulation --seed 7` replays one.
"""

from holdfast.testing.simulation.campaign import Found, run_campaign
from holdfast.testing.simulation.scenario import Report, simulate
from holdfast.testing.simulation.swarm import Engine

__all__ = ["Engine", "Found", "Report", "run_campaign", "simulate"]
