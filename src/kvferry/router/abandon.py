"""Telling prefill that nobody will claim what it offered, also when it does not listen just now."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import aiohttp

from kvferry.router.legs import ABANDON_PATH, ATTEMPT_HEADER
from kvferry.router.workers import Worker

log = logging.getLogger(__name__)

TELL_S = 2.0
"""Limit for one message."""
PAUSE_S = 1.0
LIFE_S = 60.0
"""After so long an offer has expired by itself."""
WAITING_MAX = 4096
AT_ONCE = 2
"""So many messages are on their way to one worker: all of those to a frozen one would take the
connections that requests and health checks of the others need.
"""


class Abandoner:
    """Sends each message until the worker has heard it, is dead, or the offer has expired.

    A worker that is frozen hears it when it goes on: it may be about to make the offer.
    """

    def __init__(self, session: aiohttp.ClientSession, *, pause_s: float = PAUSE_S) -> None:
        self._session = session
        self._pause_s = pause_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: dict[str, asyncio.Semaphore] = {}

    def tell(self, worker: Worker, attempt: str) -> None:
        """Start telling ``worker`` that ``attempt`` is over. Does not wait."""
        if len(self._tasks) >= WAITING_MAX:
            log.warning("prefill %s is not told to abandon %s: too many wait", worker.name, attempt)
            return
        task = asyncio.create_task(self._tell(worker, attempt))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Give messages on their way a moment, and end the rest."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=TELL_S)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _tell(self, worker: Worker, attempt: str) -> None:
        turns = self._turns.setdefault(worker.url, asyncio.Semaphore(AT_ONCE))
        with suppress(TimeoutError):
            async with asyncio.timeout(LIFE_S):
                while not await self._tell_once(worker, attempt, turns):
                    await asyncio.sleep(self._pause_s)

    async def _tell_once(self, worker: Worker, attempt: str, turns: asyncio.Semaphore) -> bool:
        """Whether nothing more is to be told."""
        timeout = aiohttp.ClientTimeout(total=TELL_S)
        headers = {ATTEMPT_HEADER: attempt}
        url = worker.url + ABANDON_PATH
        async with turns:
            try:
                async with self._session.post(url, headers=headers, timeout=timeout):
                    return True
            except aiohttp.ClientConnectorError as problem:
                # Its process is gone, and what it offered with it.
                log.debug(
                    "prefill %s was not told to abandon %s: %s", worker.name, attempt, problem
                )
                return True
            except (aiohttp.ClientError, TimeoutError):
                return False
