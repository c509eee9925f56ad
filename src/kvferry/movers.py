"""A few threads for copies that are too long for their caller's thread."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from kvferry.errors import BusyError, ClosedError

log = logging.getLogger(__name__)


class Movers:
    """At most ``threads`` threads, started with work or before it, fed from one bounded queue.

    A queue of our own instead of concurrent.futures, whose hand-over costs three times as much.
    """

    def __init__(self, name: str, *, threads: int, waiting_max: int) -> None:
        self._name = name
        self._threads_max = threads
        self._waiting_max = waiting_max
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def start(self) -> None:
        """Start all threads now, so that their number does not depend on what happened before.

        Those that the system refuses are started when there is work, or refused then.
        """
        with self._lock, suppress(BusyError):
            while len(self._threads) < self._threads_max:
                before = len(self._threads)
                self._start_thread()
                if len(self._threads) == before:
                    return

    def run(self, work: Callable[[], None]) -> None:
        """Do ``work`` soon. Never blocks. Raises BusyError when too much waits."""
        with self._lock:
            if self._closed:
                raise ClosedError("the engine is closed")
            waiting = self._queue.qsize()
            if waiting >= self._waiting_max:
                raise BusyError(f"{waiting} copies wait already", fix="retry later")
            if self._idle <= waiting and len(self._threads) < self._threads_max:
                self._start_thread()
            self._queue.put(work)

    def _start_thread(self) -> None:
        number = len(self._threads)
        thread = threading.Thread(
            target=self._loop, name=f"kvferry-{self._name}-mover{number}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            if not self._threads:
                raise BusyError(
                    f"no thread can be started for a long copy: {error}",
                    fix="raise the limit of processes and threads (ulimit -u, pids.max)",
                ) from error
            return  # Those that run will do.
        self._threads.append(thread)

    def close(self) -> None:
        """Finish what waits and end the threads. Blocks until they have."""
        with self._lock:
            self._closed = True
            threads = list(self._threads)
        for _ in threads:
            self._queue.put(None)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(10.0)

    def _loop(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            work = self._queue.get()
            with self._lock:
                self._idle -= 1
            if work is None:
                return
            try:
                work()
            except Exception:
                log.exception("a mover's work failed; this is a bug in kvferry")
