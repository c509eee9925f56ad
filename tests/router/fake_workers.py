"""Fake OpenAI workers that run in the test's own event loop and misbehave on request."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from kvferry.router.app import Router
from kvferry.router.config import RouterConfig

DEADLINE_S = 5.0
# Odd spacing, a number no float holds and an unknown field: whatever re-encodes it changes it.
PARAMS = b'{ "remote_block_ids":[3, 1,2],"big":123456789012345678901234567890, "x":{"y":1e2}}'

Script = Callable[["FakeWorker", web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Seen:
    """One request as a worker got it."""

    path: str
    headers: CIMultiDict[str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value


@dataclass
class FakeWorker:
    """A worker whose answer is ``script``; counts what it got and what was cancelled."""

    script: Script
    seen: list[Seen] = field(default_factory=list)
    health_status: int = 200
    health_freezes: bool = False
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    models: tuple[str, ...] = ("tiny",)
    abandoned: list[str] = field(default_factory=list)
    deaf_to: int = 0
    port: int = 0
    url: str = ""
    _runner: web.AppRunner | None = None

    async def start(self) -> None:
        application = web.Application(client_max_size=64 << 20)
        application.router.add_post("/v1/{kind:.*}", self._generate)
        application.router.add_post("/kvferry/abandon", self._abandon)
        application.router.add_get("/health", self._health)
        application.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(
            application, handler_cancellation=True, shutdown_timeout=0.1, access_log=None
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        self.go_on.set()
        self.health_freezes = False
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(Seen(request.path, CIMultiDict(request.headers), await request.read()))
        self.arrived.set()
        try:
            return await self.script(self, request)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def _health(self, _request: web.Request) -> web.Response:
        if self.health_freezes:
            await asyncio.Event().wait()
        return web.Response(status=self.health_status)

    async def _abandon(self, request: web.Request) -> web.Response:
        self.abandoned.append(request.headers["x-kvferry-attempt"])
        if len(self.abandoned) <= self.deaf_to:
            assert request.transport is not None
            request.transport.abort()
        return web.json_response({"abandoned": 1})

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in self.models]})


# What a worker may do


async def offers(_worker: FakeWorker, _request: web.Request) -> web.StreamResponse:
    return web.Response(
        body=b'{"id":"p","kv_transfer_params":' + PARAMS + b"}", content_type="application/json"
    )


async def offers_nothing(_worker: FakeWorker, _request: web.Request) -> web.StreamResponse:
    return web.json_response({"id": "p", "kv_transfer_params": None})


async def recomputes(_worker: FakeWorker, _request: web.Request) -> web.StreamResponse:
    return web.json_response({"text": "whole"}, headers={"x-kvferry-handoff": "recomputed"})


async def answers(_worker: FakeWorker, _request: web.Request) -> web.StreamResponse:
    return web.json_response({"text": "whole"}, headers={"x-worker": "kept"})


def rejects(status: int) -> Script:
    async def script(_worker: FakeWorker, _request: web.Request) -> web.StreamResponse:
        body = json.dumps({"error": {"message": f"no: {status}"}}).encode()
        return web.Response(
            status=status,
            body=body,
            headers={"Content-Type": "application/problem+json", "Retry-After": "7"},
        )

    return script


async def stalls(worker: FakeWorker, _request: web.Request) -> web.StreamResponse:
    """Answers nothing until told to go on."""
    await worker.go_on.wait()
    return await answers(worker, _request)


async def ignores_cancel(worker: FakeWorker, request: web.Request) -> web.StreamResponse:
    """Keeps running after its client left, as an engine in the middle of a step does."""
    waiting = asyncio.ensure_future(worker.go_on.wait())
    while not waiting.done():
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            worker.cancelled.set()
    return await answers(worker, request)


async def resets(_worker: FakeWorker, request: web.Request) -> web.StreamResponse:
    """Closes before the first byte of an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def dies_after_head(_worker: FakeWorker, request: web.Request) -> web.StreamResponse:
    response = await _begin_events(request)
    assert request.transport is not None
    request.transport.close()
    return response


async def streams(worker: FakeWorker, request: web.Request) -> web.StreamResponse:
    """One event, then, once told to go on, another and the end."""
    response = await _begin_events(request)
    await response.write(b'data: {"text":"one"}\n\n')
    await worker.go_on.wait()
    await response.write(b'data: {"text":"tw\xc3')
    await response.write(b'\xa9"}\n\ndata: [DONE]\n\n')
    await response.write_eof()
    return response


async def dies_in_stream(worker: FakeWorker, request: web.Request) -> web.StreamResponse:
    response = await _begin_events(request)
    await response.write(b'data: {"text":"one"}\n\ndata: {"te')
    await worker.go_on.wait()
    assert request.transport is not None
    request.transport.close()
    return response


async def dies_in_body(worker: FakeWorker, request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={"Content-Type": "application/json", "Content-Length": "1000"}
    )
    await response.prepare(request)
    await response.write(b'{"text":')
    await worker.go_on.wait()
    assert request.transport is not None
    request.transport.close()
    return response


async def _begin_events(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    response.enable_chunked_encoding()
    await response.prepare(request)
    return response


# A router with workers around it


@dataclass
class Site:
    """A running router, its workers and a client."""

    url: str
    router: Router
    prefill: list[FakeWorker]
    decode: list[FakeWorker]
    client: aiohttp.ClientSession

    def post(
        self,
        body: dict[str, Any] | bytes | None = None,
        path: str = "/v1/completions",
        **options: Any,
    ) -> Any:
        if not isinstance(body, bytes):
            body = json.dumps(body or {"prompt": "a", "max_tokens": 9}).encode()
        return self.client.post(self.url + path, data=body, **options)

    async def metric(self, line: str) -> float:
        """The value of the metric written as ``name{label="value"}``; 0.0 if there is none."""
        async with self.client.get(f"{self.url}/metrics") as response:
            for each in (await response.text()).splitlines():
                if each.startswith(f"{line} "):
                    return float(each.rsplit(" ", 1)[1])
        return 0.0


@contextlib.asynccontextmanager
async def site(prefill: list[Script], decode: list[Script], **settings: Any) -> AsyncIterator[Site]:
    """Workers with these scripts, a router over them, and a client without kept connections."""
    workers = [FakeWorker(script) for script in (*prefill, *decode)]
    for worker in workers:
        await worker.start()
    first, second = workers[: len(prefill)], workers[len(prefill) :]
    config = RouterConfig(
        prefill=tuple(each.url for each in first),
        decode=tuple(each.url for each in second),
        port=0,
        **{"health_interval_s": 0.02, "drain_s": 0.1, **settings},
    )
    router = Router(config)
    url = await router.start()
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as client:
        try:
            yield Site(url, router, first, second, client)
        finally:
            for worker in workers:
                worker.go_on.set()
            await router.stop()
            for worker in workers:
                await worker.stop()


def run(body: Coroutine[Any, Any, None]) -> None:
    """Run one asynchronous test; fails when it outlives its deadline or leaves a task behind."""

    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await body
        for _ in range(20):
            # Closed connections need a few turns of the loop to finish their own tasks.
            others = asyncio.all_tasks() - {asyncio.current_task()}
            if not others:
                return
            await asyncio.wait(others, timeout=0.05)
        raise AssertionError(f"tasks are left over: {others}")

    asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    """Wait until ``condition()`` holds; the test's own deadline bounds it."""
    while not condition():
        await asyncio.sleep(0.005)
