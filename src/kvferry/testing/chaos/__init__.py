"""Chaos: a fleet of real processes under load, faults done to it, and a verdict on every promise.

``kvferry chaos --processes`` is this package on the command line.
"""

from kvferry.testing.chaos.kit import Options, run
from kvferry.testing.chaos.report import Report
from kvferry.testing.chaos.scenarios import SCENARIOS

__all__ = ["SCENARIOS", "Options", "Report", "run"]
