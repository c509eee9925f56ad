"""Active health checks: one task a worker, for as long as the router runs."""

from __future__ import annotations

import asyncio
import logging
import time

import aiohttp

from kvferry.router.config import RouterConfig
from kvferry.router.upstream import Legs, is_refused
from kvferry.router.workers import Sign, Worker, WorkerTable

log = logging.getLogger(__name__)

# A worker that asks for a key, even here, is alive and can judge for itself.
_ASKS_FOR_KEY = (401, 403)

# A check must show that new connections are accepted, and must leave none for requests to reuse.
_OWN_CONNECTION = {"Connection": "close"}


class HealthChecks:
    """Asks each worker's /health, tells the table, and ends the legs of a worker that is lost."""

    def __init__(
        self,
        config: RouterConfig,
        table: WorkerTable,
        legs: Legs,
        session: aiohttp.ClientSession,
    ) -> None:
        self._config = config
        self._table = table
        self._legs = legs
        self._session = session
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Check every worker once, at the same time, then go on in the background."""
        await asyncio.gather(*(self._check(worker) for worker in self._table.workers))
        self._tasks = [
            asyncio.create_task(self._watch(worker), name=f"health {worker.name}")
            for worker in self._table.workers
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    def note(self, worker: Worker, sign: Sign, detail: str) -> None:
        """Take a sign into account, from a health check or from a request's own attempt."""
        change = self._table.observe(worker, sign, detail, time.monotonic())
        if change.came_up:
            log.info("%s worker %s is up", worker.role, worker.name)
        if change.went_down:
            log.warning("%s worker %s is down: %s", worker.role, worker.name, detail)
        if change.lost and (ended := self._legs.lose(worker, detail)):
            log.warning("gave up %d requests on %s worker %s", ended, worker.role, worker.name)

    async def _watch(self, worker: Worker) -> None:
        while True:
            await asyncio.sleep(self._config.health_interval_s)
            try:
                await self._check(worker)
            except Exception:
                # The loop outlives its own bugs: without it a worker would never come back.
                log.exception("health check of %s failed by a bug", worker.name)

    async def _check(self, worker: Worker) -> None:
        config = self._config
        limit_s = self._table.patience_s(worker, time.monotonic(), config.health_timeout_s)
        try:
            async with asyncio.timeout(limit_s):
                async with self._session.get(
                    f"{worker.url}/health", headers=_OWN_CONNECTION, allow_redirects=False
                ) as response:
                    status = response.status
        except TimeoutError:
            sign, detail = Sign.SILENT, f"no answer to health checks for {config.worker_lost_s:g} s"
        except aiohttp.ClientConnectorError as problem:
            sign = Sign.REFUSED if is_refused(problem) else Sign.SILENT
            detail = f"could not connect: {problem.os_error.strerror or problem}"
        except aiohttp.ClientError as problem:
            sign, detail = Sign.UNWELL, f"/health failed: {problem}"
        else:
            is_good = 200 <= status < 300 or status in _ASKS_FOR_KEY
            sign, detail = Sign.GOOD if is_good else Sign.UNWELL, f"/health answers {status}"
        self.note(worker, sign, detail)
