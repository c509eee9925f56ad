"""Deterministic simulation: the hand-off of real code in a world of virtual time and faults."""

from kvferry.testing.simulation.plan import Action, Plan, make_plan
from kvferry.testing.simulation.world import Report, World

__all__ = ["Action", "Plan", "Report", "World", "make_plan"]
