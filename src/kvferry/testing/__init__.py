"""For tests of code that uses kvferry, and of transports that others write."""

from kvferry.testing.child import Child, ChildError
from kvferry.testing.clock import FakeClock
from kvferry.testing.conformance import ConformanceError, Report, check_transport
from kvferry.testing.faulty import FAULTS, FaultyTransport
from kvferry.testing.leaks import Snapshot

__all__ = [
    "FAULTS",
    "Child",
    "ChildError",
    "ConformanceError",
    "FakeClock",
    "FaultyTransport",
    "Report",
    "Snapshot",
    "check_transport",
]
