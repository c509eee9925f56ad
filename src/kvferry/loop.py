"""One thread for everything that waits on control sockets, and for timers. Bulk bytes never pass
here.

Handlers are called in the loop's thread and must not block. The thread sleeps until a socket is
ready, a timer is due or somebody calls :meth:`ControlLoop.wake`; it looks at the clock at least
every ``TICK_S``, so a caller that adds a deadline farther away than that need not wake it.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
from collections.abc import Callable

from kvferry.clock import Clock

log = logging.getLogger(__name__)

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE
TICK_S = 0.1

Handler = Callable[[int], None]


class ControlLoop:
    """The control thread of one engine.

    tick: called when it is due, with nothing held; returns when it wants to be called next.
    """

    def __init__(self, name: str, clock: Clock, tick: Callable[[], float]) -> None:
        self._clock = clock
        self._tick = tick
        self._selector = selectors.DefaultSelector()
        self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_r, READ, None)
        self._lock = threading.Lock()
        self._wake_lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"kvferry-{name}", daemon=True)
        clock.on_jump(self.wake)

    def start(self) -> None:
        self._thread.start()

    def is_here(self) -> bool:
        """Whether the caller is the loop's own thread."""
        return threading.current_thread() is self._thread

    def add(self, fd: int, events: int, handler: Handler) -> None:
        """Call ``handler(ready)`` when ``fd`` is ready. Any thread."""
        with self._lock:
            self._selector.register(fd, events, handler)

    def change(self, fd: int, events: int) -> None:
        """Wait for other events from now on. Unknown descriptors are ignored."""
        with self._lock:
            try:
                key = self._selector.get_key(fd)
                self._selector.modify(fd, events, key.data)
            except KeyError:
                pass

    def remove(self, fd: int) -> None:
        """Stop watching, before the descriptor is closed. Unknown descriptors are ignored."""
        with self._lock:
            try:
                self._selector.unregister(fd)
            except KeyError:
                pass

    def wake(self) -> None:
        """Make the thread look around now. Any thread; never blocks."""
        with self._wake_lock:
            # After close the number may belong to another file.
            if self._wake_w < 0:
                return
            try:
                os.write(self._wake_w, b"w")
            except BlockingIOError:
                pass

    def close(self) -> None:
        """End the thread and wait for it. Safe to call twice, not from the loop itself."""
        if self._closing:
            return
        self._closing = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join()
        with self._wake_lock:
            wake_w, self._wake_w = self._wake_w, -1
        self._selector.close()
        os.close(self._wake_r)
        os.close(wake_w)

    def _run(self) -> None:
        due = 0.0
        while not self._closing:
            if self._clock.now() >= due:
                # What peers said while this process was frozen counts before their silence does.
                self._handle(self._selector.select(0))
                # Between ticks only messages are handled: whoever waits for one of them gets the
                # interpreter lock the sooner.
                now = self._clock.now()
                due = min(self._call_tick(now), now + TICK_S)
            timeout = min(max(due - self._clock.now(), 0.0), TICK_S)
            if self._handle(self._selector.select(timeout)):
                due = 0.0

    def _handle(self, events: list[tuple[selectors.SelectorKey, int]]) -> bool:
        """Call the handlers of what is ready; whether somebody woke the loop."""
        woken = False
        for key, ready in events:
            if key.data is None:
                self._drain()
                woken = True
            else:
                self._call(key.data, ready)
        return woken

    def _call_tick(self, now: float) -> float:
        try:
            return self._tick()
        except Exception:
            log.exception("the control loop's tick failed; this is a bug in kvferry")
            return now + TICK_S

    def _drain(self) -> None:
        try:
            while os.read(self._wake_r, 4096):
                pass
        except BlockingIOError:
            pass

    def _call(self, handler: Handler, ready: int) -> None:
        try:
            handler(ready)
        except Exception:
            log.exception("a control handler failed; this is a bug in kvferry")
