"""A transfer: what ``engine.read`` and ``engine.write`` return."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Generator
from typing import Any

from kvferry.errors import DeadlineError, KVFerryError
from kvferry.planner import Plan

log = logging.getLogger(__name__)


class Transfer:
    """Bytes under way between local and remote spans, to one end.

    It ends exactly once, not later than its deadline plus the time that stopping takes (mostly well
    under a second, at most ``moves.STOP_S``). With an ``error`` the target's bytes are undefined.
    After the end nothing touches its memory any more, but for one case: its transport did not say
    in time that it had stopped. Then the memory is quarantined until it does, see :meth:`is_quiet`.

    transfer_id: unique in the engine. write: whether local bytes go to the peer.
    nbytes: what it should move. bytes_done: what it has moved, known at the end.
    path: ``"shm/pull"`` and the like, "" until one was chosen. seconds: from submit to end.
    plan: the planner's ranking behind that choice, with its reasons; None if there was nothing to
    move.
    """

    __slots__ = (
        "_callbacks",
        "_cancel",
        "_event",
        "_lock",
        "_over",
        "_quiet",
        "_waiting_for_quiet",
        "bytes_done",
        "error",
        "nbytes",
        "path",
        "peer_name",
        "plan",
        "seconds",
        "transfer_id",
        "write",
    )

    def __init__(
        self,
        transfer_id: int,
        nbytes: int,
        *,
        write: bool,
        peer_name: str,
        cancel: Callable[[Transfer], None],
    ) -> None:
        self.transfer_id = transfer_id
        self.nbytes = nbytes
        self.write = write
        self.peer_name = peer_name
        self.path = ""
        self.plan: Plan | None = None
        self.bytes_done = 0
        self.seconds = 0.0
        self.error: KVFerryError | None = None
        self._cancel = cancel
        self._over = False
        self._quiet = False
        self._waiting_for_quiet: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._event: threading.Event | None = None
        self._callbacks: list[Callable[[Transfer], None]] = []

    def is_done(self) -> bool:
        """Whether it has ended. Never blocks."""
        return self._over

    def wait(self, timeout_s: float | None = None) -> int:
        """Block until the end; returns the bytes moved.

        Without ``timeout_s`` the transfer's own deadline bounds the wait. Raises the transfer's
        error, or DeadlineError when ``timeout_s`` passed first; then the transfer is still
        running.
        """
        if not self._over:
            with self._lock:
                if self._event is None:
                    self._event = threading.Event()
                    if self._over:
                        self._event.set()
            if not self._event.wait(timeout_s):
                raise DeadlineError(
                    f"transfer {self.transfer_id} still runs after {timeout_s:g} s",
                    peer=self.peer_name,
                    path=self.path,
                    stage="wait",
                    fix="wait longer, or cancel() it",
                )
        return self.result()

    def result(self) -> int:
        """Bytes moved, or the error raised. Only after the end."""
        if self.error is not None:
            raise self.error
        return self.bytes_done

    def cancel(self) -> None:
        """Ask it to stop. It ends by itself soon, usually with AbortedError. Never blocks."""
        if not self._over:
            self._cancel(self)

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Call ``callback(transfer)`` at the end, from whichever thread ends it, or now if over."""
        with self._lock:
            if not self._over:
                self._callbacks.append(callback)
                return
        callback(self)

    def is_quiet(self) -> bool:
        """Whether nothing touches its memory any more, and never will. Never blocks.

        True from the end on, unless the transport has not yet said that it stopped.
        """
        return self._quiet

    def when_quiet(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` once nothing touches its memory any more, or now if that is so."""
        with self._lock:
            if not self._quiet:
                self._waiting_for_quiet.append(callback)
                return
        callback()

    def __await__(self) -> Generator[Any, None, int]:
        """Await the end in an event loop; one wake-up of the loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        def ended(_: Transfer) -> None:
            try:
                loop.call_soon_threadsafe(wake)
            except RuntimeError:
                pass  # The loop has closed: nobody waits any more.

        self.add_done_callback(ended)
        try:
            yield from future
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.result()

    def _finish(
        self, bytes_done: int, error: KVFerryError | None, seconds: float, *, quiet: bool = True
    ) -> None:
        """Called by the engine, once."""
        self.bytes_done, self.error, self.seconds = bytes_done, error, seconds
        with self._lock:
            self._over = True
            self._quiet = quiet  # Before anybody can see the end.
            callbacks, self._callbacks = self._callbacks, []
            if self._event is not None:
                self._event.set()
        for callback in callbacks:
            try:
                callback(self)
            except Exception:
                log.exception("a callback of %r failed", self)
        if quiet:
            self._fall_quiet()

    def _fall_quiet(self) -> None:
        """Called by the engine, once, when nothing touches the memory any more."""
        with self._lock:
            self._quiet = True
            waiting, self._waiting_for_quiet = self._waiting_for_quiet, []
        for callback in waiting:
            try:
                callback()
            except Exception:
                log.exception("a callback of %r failed", self)

    def __repr__(self) -> str:
        state = "running" if not self._over else ("failed" if self.error else "done")
        return f"<Transfer {self.transfer_id} {state} {self.path} {self.nbytes} bytes>"
