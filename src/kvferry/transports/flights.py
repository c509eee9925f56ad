"""Device copies under way: begun in any thread, seen to their end by one thread that polls.

A thread per copy that polls would take the interpreter lock from all the others; one does not, and
a copy needs no hand-over to a mover before it is begun.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.errors import BusyError, DeviceError
from kvferry.memory.cuda import (
    PATIENT_AFTER_S,
    PAUSE_MAX_S,
    PAUSE_S,
    SPIN_S,
    CudaDevice,
    CudaQueue,
    Flight,
)

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Airborne:
    """A copy that the device has been given.

    landed: called once, in the polling thread, when the device touches its memory no more; with
    the error if it failed.
    """

    device: CudaDevice
    queue: CudaQueue
    flight: Flight
    landed: Callable[[DeviceError | None], None]
    began: float = 0.0


class Flights:
    """The copies of one transport. Thread-safe; its thread runs while it has something to do."""

    def __init__(self, name: str) -> None:
        self._name = f"kvferry-{name}-flights"
        self._changed = threading.Condition()
        self._new: list[Airborne] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self) -> None:
        """Have the thread. Before a copy is begun: one that nobody watches would never end.

        Raises BusyError when no thread can be started.
        """
        with self._changed:
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise BusyError(
                    f"no thread can be started to watch device copies: {error}",
                    fix="raise the limit of processes and threads (ulimit -u, pids.max)",
                ) from error
            self._thread = thread

    def add(self, item: Airborne) -> None:
        """Watch a copy. Its queue belongs to the polling thread from now on."""
        item.began = time.perf_counter()
        with self._changed:
            self._new.append(item)
            self._changed.notify()

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread. What has not landed by then never reports."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _run(self) -> None:
        flying: list[Airborne] = []
        while True:
            with self._changed:
                if not flying:
                    self._changed.wait_for(lambda: self._new or self._closed)
                if self._closed and not self._new:
                    return
                flying += self._new
                self._new = []
            left = [item for item in flying if not self._ask(item)]
            if len(left) == len(flying):
                time.sleep(_pause(time.perf_counter() - flying[-1].began))
            flying = left

    def _ask(self, item: Airborne) -> bool:
        """Whether it has landed; then everyone has been told."""
        error: DeviceError | None = None
        try:
            item.device.use()
            if not item.flight.is_done():
                return False
        except DeviceError as failure:
            error = failure
        try:
            item.device.give(item.queue)
        except DeviceError as failure:
            error = error or failure
        try:
            item.landed(error)
        except Exception:
            log.exception("the end of a device copy was not taken; this is a bug in kvferry")
        return True


def _pause(age_s: float) -> float:
    """How long to leave the interpreter to others, by the age of the youngest copy."""
    if age_s < SPIN_S:
        return 0.0
    return PAUSE_S if age_s < PATIENT_AFTER_S else PAUSE_MAX_S
