"""Events for the engine's thread, from any other thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvferry.clock import Clock

Event = Callable[[], None]


class Inbox:
    """A queue of calls to make in the engine's thread; posting wakes it at once.

    It needs no bound of its own: each request posts at most its arrival, its abort and the ends of
    the connector's calls, and the number of requests is bounded by those who post them.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._condition = threading.Condition()
        self._events: list[Event] = []
        self._is_woken = False
        clock.on_jump(self.wake)

    def post(self, event: Event) -> None:
        """Have ``event`` called in the engine's thread. Any thread; never blocks."""
        with self._condition:
            self._events.append(event)
            self._condition.notify()

    def wake(self) -> None:
        """End a wait, so that the engine looks at the clock again. Any thread."""
        with self._condition:
            self._is_woken = True
            self._condition.notify()

    def take(self) -> list[Event]:
        """All events so far, oldest first; they are no longer in the inbox. Does not block."""
        with self._condition:
            events, self._events = self._events, []
            self._is_woken = False
        return events

    def wait(self, deadline_s: float | None) -> None:
        """Block until there is an event, a wake or the deadline; None waits without one."""
        with self._condition:
            if self._events or self._is_woken:
                return
            timeout = None if deadline_s is None else deadline_s - self._clock.now()
            if timeout is None or timeout > 0:
                self._condition.wait(timeout)
