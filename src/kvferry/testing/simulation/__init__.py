"""Deterministic simulation: the hand-off of real code in a world of virtual time and faults."""

from kvferry.testing.simulation.plan import Action, Plan, make_plan
from kvferry.testing.simulation.shrink import shrink
from kvferry.testing.simulation.story import facts, story
from kvferry.testing.simulation.world import Report, World

__all__ = ["Action", "Plan", "Report", "World", "facts", "make_plan", "shrink", "story"]
