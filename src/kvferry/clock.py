"""Time comes from here, so that tests can move it by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Where an engine gets the time.

    Only durations are ever compared, and never across machines.
    """

    def now(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""
        ...

    def on_jump(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` whenever the time moved by hand. A real clock never calls it."""
        ...


class SystemClock:
    """The monotonic clock of the machine. It goes on while a process is stopped."""

    now = staticmethod(time.monotonic)

    def on_jump(self, wake: Callable[[], None]) -> None:
        return None
