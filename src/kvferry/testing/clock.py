"""A clock that tests move by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable


class FakeClock:
    """A :class:`kvferry.clock.Clock` that stands still until it is told to move. Any thread.

    start: the first time that it shows, in seconds.
    """

    def __init__(self, start: float = 1000.0) -> None:
        self._now = start
        self._lock = threading.Lock()
        self._wakes: list[Callable[[], None]] = []

    def now(self) -> float:
        """Seconds; the same until :meth:`advance`."""
        with self._lock:
            return self._now

    def advance(self, seconds: float) -> float:
        """Move the time forward, wake everybody who asked for it, and return the new time.

        seconds: 0 or more; with 0 the time stays and everybody is woken all the same. Raises
        ValueError for a negative number, because a clock never goes back. Blocks only as long as
        the wakes do.
        """
        if not seconds >= 0:
            raise ValueError(f"a clock never goes back, not even by {seconds!r} s")
        with self._lock:
            self._now += seconds
            now = self._now
            wakes = list(self._wakes)
        for wake in wakes:
            wake()
        return now

    def on_jump(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` at each :meth:`advance`, in its thread, with nothing held."""
        with self._lock:
            self._wakes.append(wake)
