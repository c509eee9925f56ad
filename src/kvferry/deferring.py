"""A lock under which callbacks are noted, and after which they run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class DeferringLock:
    """A re-entrant lock for tables whose changes have consequences outside.

    Whoever changes them puts the consequences off by :meth:`later`; they run, in order and in the
    same thread, when the lock is free. So no foreign code ever runs under the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._after: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        """Hold the lock. Not a generator: this runs several times for each message."""
        self._lock.acquire()
        self._depth += 1

    def __exit__(self, *_error: object) -> None:
        """Let go. What fails in a deferred action is logged, and the others still run."""
        self._depth -= 1
        if self._depth or not self._after:
            self._lock.release()
            return
        todo, self._after = self._after, []
        self._lock.release()
        for action in todo:
            try:
                action()
            except Exception:
                log.exception("a callback failed")

    def later(self, action: Callable[[], None]) -> None:
        """Run ``action`` after the lock is free. Only while it is held."""
        self._after.append(action)
