"""The engine's thread: steps while there is work, and sleeps until something happens.

Requests come from asyncio, connector callbacks from any thread; both go through the inbox, which
wakes the thread at once. What a step brings goes back to asyncio in one call for all sequences.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections.abc import Callable
from functools import partial

from kvferry.engines.reference.inbox import Event
from kvferry.engines.reference.scheduler import Scheduler
from kvferry.engines.reference.sequence import Output, Sequence
from kvferry.errors import BusyError, ClosedError, KVFerryError

log = logging.getLogger(__name__)

CLOSE_S = 10.0
"""How long ``close`` waits for the thread: one step of the model, at most."""


class EngineLoop:
    """Runs a scheduler in a thread of its own, for consumers in one asyncio loop.

    ``failure`` is the error that ended the engine, or None while it is healthy.
    """

    def __init__(self, scheduler: Scheduler, consumers: asyncio.AbstractEventLoop) -> None:
        self._scheduler = scheduler
        self._consumers = consumers
        self._lock = threading.Lock()
        self._arriving_count = 0
        self._refusal: KVFerryError | None = None
        self._is_closing = False
        self._idle: list[Event] = []
        self._thread = threading.Thread(target=self._run, name="kvferry-engine", daemon=True)
        self.failure: KVFerryError | None = None

    @property
    def scheduler(self) -> Scheduler:
        """For its statistics and its configuration; the rest belongs to the thread."""
        return self._scheduler

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, sequences: list[Sequence]) -> None:
        """Start these sequences together; their sinks get the outputs, in the asyncio loop.

        Any thread; does not block. Raises UsageError for what can never run, BusyError when too
        many are on their way, ClosedError while draining and after the end; then none was started.
        A full queue may also show as a BusyError in the outputs.
        """
        for sequence in sequences:
            self._scheduler.config.check(sequence)
        with self._lock:
            if self._refusal is not None:
                raise copy.copy(self._refusal)
            if self._arriving_count + len(sequences) > self._scheduler.config.waiting_max:
                raise BusyError(
                    f"{self._arriving_count} sequences are arriving already",
                    stage="submit",
                    fix="retry later",
                )
            self._arriving_count += len(sequences)
        self._scheduler.inbox.post(partial(self._arrived, sequences))

    def abort(self, sequences: list[Sequence]) -> None:
        """End these sequences, at once and without further outputs. Any thread; does not block.

        Also withdraws their offers. Does nothing for those that have ended.
        """
        for sequence in sequences:
            self._scheduler.inbox.post(partial(self._scheduler.abort, sequence))

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new sequences and wait until none is left, offers included.

        Returns: whether that was so before the time was over.
        """
        self._refuse(ClosedError("the engine is shutting down and takes no more requests"))
        idle = asyncio.Event()
        self._scheduler.inbox.post(partial(self._call_when_idle, idle.set))
        try:
            await asyncio.wait_for(idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Fail what is left with ClosedError, withdraw offers, end the thread. Blocks for a step.

        Blocks that the connector still holds stay pinned: close the connector before the KV goes.
        Safe to call twice.
        """
        error = ClosedError("the engine was closed before the request was complete")
        self._refuse(error)
        if self._is_closing:
            return
        self._scheduler.inbox.post(partial(self._end, error))
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                log.error("the engine's thread is still in a step after %g s", CLOSE_S)

    # The engine's thread.

    def _run(self) -> None:
        scheduler = self._scheduler
        while not self._is_closing:
            if self.failure is not None or not scheduler.is_runnable:
                scheduler.inbox.wait(scheduler.next_deadline_s())
            for event in scheduler.inbox.take():
                self._call(event)
            self._call(scheduler.step if self.failure is None else scheduler.expire)
            self._deliver()

    def _call(self, event: Event) -> None:
        try:
            event()
        except Exception as error:
            self._crash(error)

    def _arrived(self, sequences: list[Sequence]) -> None:
        with self._lock:
            self._arriving_count -= len(sequences)
        self._scheduler.add(sequences)
        if self.failure is not None:
            self._scheduler.fail_all(self.failure)

    def _call_when_idle(self, call: Event) -> None:
        self._idle.append(call)

    def _end(self, error: KVFerryError) -> None:
        self._is_closing = True
        self._scheduler.fail_all(error)

    def _crash(self, error: Exception) -> None:
        log.error("the engine crashed", exc_info=error)
        self.failure = KVFerryError(
            f"the engine crashed: {type(error).__name__}: {error}",
            stage="step",
            fix="see its log, and restart it",
        )
        self._refuse(self.failure)
        self._scheduler.fail_all(self.failure)

    def _refuse(self, error: KVFerryError) -> None:
        with self._lock:
            self._refusal = self._refusal or error

    def _deliver(self) -> None:
        """Hand everything new to asyncio with one wake-up."""
        outputs = self._scheduler.take_outputs()
        idle: list[Event] = []
        if self._idle and self._scheduler.is_empty:
            idle, self._idle = self._idle, []
        if not outputs and not idle:
            return
        try:
            self._consumers.call_soon_threadsafe(_hand_over, outputs, idle)
        except RuntimeError:
            log.debug("%d outputs are lost: their asyncio loop is closed", len(outputs))


def _hand_over(outputs: list[Output], then: list[Callable[[], None]]) -> None:
    for output in outputs:
        if output.sequence.sink is not None:
            output.sequence.sink(output)
    for call in then:
        call()
