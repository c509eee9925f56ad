"""Virtual time: what happens next, and nothing else moves the clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Schedule:
    """Events in the order of their time, and of their making when the times are equal."""

    def __init__(self) -> None:
        self.now = 0.0
        self.count = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        """Let ``event`` happen ``seconds`` from now, at least 0."""
        self.count += 1
        heapq.heappush(self._events, (self.now + seconds, self.count, event))

    def step(self, until: float) -> bool:
        """Move to the next event and let it happen; False if there is none before ``until``."""
        if not self._events or self._events[0][0] >= until:
            self.now = max(self.now, until)
            return False
        self.now, _, event = heapq.heappop(self._events)
        event()
        return True


class ProcessClock:
    """What one process sees of the time: its own epoch, as two machines share none."""

    def __init__(self, schedule: Schedule, ahead_s: float) -> None:
        self._schedule = schedule
        self._ahead_s = ahead_s

    def now(self) -> float:
        return self._schedule.now + self._ahead_s

    def on_jump(self, wake: Callable[[], None]) -> None:
        """Nobody is woken: virtual time moves only from event to event."""
