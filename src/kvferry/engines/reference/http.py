"""The OpenAI-compatible HTTP side of the engine: routes, streams, errors, disconnects.

A request's sequences are aborted as soon as its handler ends without having written the whole
response, whatever the reason: the client left, the write failed, one of several answers failed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from kvferry.engines.reference.api import Generation, Served, parse
from kvferry.engines.reference.connector import KVConnector
from kvferry.engines.reference.loop import EngineLoop
from kvferry.engines.reference.metrics import Metrics
from kvferry.engines.reference.replies import Reply, error_body, error_reply
from kvferry.engines.reference.sequence import Output, Sequence, TextStream
from kvferry.engines.reference.tokenizer import StreamDecoder
from kvferry.errors import AbortedError, ClosedError, KVFerryError

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Queue = asyncio.Queue[Output]

ATTEMPT_HEADER = "x-kvferry-attempt"
HANDOFF_HEADER = "x-kvferry-handoff"
ATTEMPTS_MAX = 1024
"""Latest requests with an offer that a router may still abandon by the name of its attempt."""
RETRY_AFTER_S = 1
READ_S = 30.0
"""How long a client may take to send its body."""
WRITE_S = 60.0
"""How long a client may read nothing of a stream before it counts as gone."""
DONE = b"data: [DONE]\n\n"
SEED_BITS = 63
NAME_CHARS_MAX = 200
"""Longest name of a request that is looked for."""
LABEL_CHARS_MAX = 128
"""Of an id that a client gives, so much is kept."""
CLIENT_GONE = 499
"""Status under which responses are counted that nobody was there to read."""


class Api:
    """The application of one engine. It answers 503 until :meth:`attach`.

    body_bytes_max: a larger request is refused with 413.
    """

    def __init__(self, *, body_bytes_max: int) -> None:
        self.metrics = Metrics(self._statistics)
        self.is_draining = False
        self._engine: EngineLoop | None = None
        self._served: Served | None = None
        self._connector: KVConnector | None = None
        self._attempts: OrderedDict[str, list[Sequence]] = OrderedDict()
        self._abandoned: OrderedDict[str, None] = OrderedDict()
        self._created = int(time.time())
        self.app = web.Application(client_max_size=body_bytes_max, middlewares=[self._with_errors])
        self.app.add_routes(
            [
                web.post("/v1/completions", partial(self._generate, is_chat=False)),
                web.post("/v1/chat/completions", partial(self._generate, is_chat=True)),
                web.post("/kvferry/abandon", self._abandon),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
                web.get("/debug/state", self._state),
                web.get("/debug/why", self._why),
            ]
        )

    def attach(self, engine: EngineLoop, served: Served, connector: KVConnector) -> None:
        """Serve from now on."""
        self._engine, self._served, self._connector = engine, served, connector

    def health(self) -> str:
        """``ok``, or why requests are refused: ``loading``, ``draining`` or ``crashed``."""
        if self._engine is None:
            return "loading"
        if self._engine.failure is not None:
            return "crashed"
        return "draining" if self.is_draining else "ok"

    def _statistics(self) -> dict[str, Any]:
        return {} if self._engine is None else self._engine.scheduler.statistics()

    # Small answers.

    async def _health(self, request: web.Request) -> web.Response:
        health = self.health()
        body: dict[str, Any] = {"status": health}
        if self._engine is not None and self._engine.failure is not None:
            body["error"] = self._engine.failure.as_dict()
        return _json(body, status=200 if health == "ok" else 503)

    async def _models(self, request: web.Request) -> web.Response:
        names = () if self._served is None else self._served.models
        card = {"object": "model", "created": self._created, "owned_by": "kvferry"}
        return _json({"object": "list", "data": [{"id": name, **card} for name in names]})

    async def _metrics(self, request: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self.metrics.render(), headers=headers)

    async def _state(self, request: web.Request) -> web.Response:
        body = {"status": self.health(), **self._statistics()}
        statistics = getattr(self._connector, "statistics", None)
        if statistics is not None:
            try:
                body["connector"] = statistics()
            except Exception as error:
                body["connector"] = {"error": str(error)}
        return _json(body)

    async def _why(self, request: web.Request) -> web.Response:
        """GET /debug/why?id=: what the connector's flight recorder has of one request."""
        why = getattr(self._connector, "why", None)
        text = request.query.get("id", "")[:NAME_CHARS_MAX]
        empty: dict[str, Any] = {"kind": "engine", "name": "", "found": 0, "trails": []}
        return _json(empty if why is None else why(text))

    def dump(self) -> None:
        """Have the connector write its flight recorder to a file, and log where. Blocks."""
        dump = getattr(self._connector, "dump", None)
        if dump is None:
            log.warning("there is no flight recorder to dump")
            return
        try:
            log.warning("the flight recorder is in %s", dump())
        except KVFerryError as error:
            log.error("%s", error)

    # Generation.

    async def _generate(self, request: web.Request, *, is_chat: bool) -> web.StreamResponse:
        engine, served = self._engine, self._served
        if engine is None or served is None:
            raise ClosedError("the model is still loading", fix="wait for /health to say ok")
        if self.is_draining:
            raise ClosedError("the engine is shutting down and takes no more requests")
        generation = parse(await _read(request), served, is_chat=is_chat)
        if self._abandoned.pop(request.headers.get(ATTEMPT_HEADER, "")[:128], False) is None:
            raise AbortedError("the router has given this attempt up before it arrived")
        id = f"{'chatcmpl' if is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        reply = Reply(generation, served.tokenizer, id, int(time.time()))
        outputs: Queue = asyncio.Queue()  # bounded by max_tokens of each of the n answers
        sequences = _sequences(generation, served, id, outputs, _labels(request))
        is_written = False
        engine.submit(sequences)
        self._remember(request, sequences)
        try:
            respond = _stream if generation.is_stream else _whole
            response = await respond(request, reply, outputs)
            is_written = reply.is_complete
        finally:
            if not is_written:
                engine.abort(sequences)
        return response

    def _remember(self, request: web.Request, sequences: list[Sequence]) -> None:
        attempt = request.headers.get(ATTEMPT_HEADER, "")[:128]
        if attempt and sequences[0].is_remote_decode:
            self._attempts[attempt] = sequences
            while len(self._attempts) > ATTEMPTS_MAX:
                self._attempts.popitem(last=False)

    async def _abandon(self, request: web.Request) -> web.Response:
        """The router says that nobody will claim what an attempt offered.

        The answer may have been written and never read, or read for a client that had left.
        """
        attempt = request.headers.get(ATTEMPT_HEADER, "")[:128]
        sequences = self._attempts.pop(attempt, [])
        if attempt and not sequences:
            # A frozen process may find this message before the request that it is about.
            self._abandoned[attempt] = None
            while len(self._abandoned) > ATTEMPTS_MAX:
                self._abandoned.popitem(last=False)
        log.debug("attempt %s is abandoned with %d sequences", attempt, len(sequences))
        if self._engine is not None:
            self._engine.abort(sequences)
        return _json({"abandoned": len(sequences)})

    @web.middleware
    async def _with_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every error that comes before the first byte, in the shape that clients expect."""
        try:
            response = await handler(request)
        except KVFerryError as error:
            status, body = error_reply(error)
            response = _json(body, status=status)
            if status in (429, 503) or error.retryable:
                response.headers["Retry-After"] = str(RETRY_AFTER_S)
        except web.HTTPException as error:
            response = _http_error(error)
        except ConnectionError:
            # The client is gone. There is nobody to answer; the status is for the metrics.
            response = web.Response(status=CLIENT_GONE)
        except Exception:
            log.exception("%s %s failed; this is a bug", request.method, request.path)
            body = error_body("the server failed; see its log", "server_error", "internal")
            response = _json(body, status=500)
        resource = request.match_info.route.resource
        route = "unknown" if resource is None else resource.canonical
        self.metrics.responded(route, response.status)
        return response


def _labels(request: web.Request) -> tuple[str, ...]:
    """What the router and the client call this request."""
    names = (request.headers.get(name, "") for name in (ATTEMPT_HEADER, "x-request-id"))
    return tuple(name[:LABEL_CHARS_MAX] for name in names if name)


def _sequences(
    generation: Generation, served: Served, id: str, outputs: Queue, labels: tuple[str, ...]
) -> list[Sequence]:
    seed = secrets.randbits(SEED_BITS)
    sequences = []
    for index in range(generation.n):
        params = generation.choice_params(index)
        sequences.append(
            Sequence(
                f"{id}-{index}",
                generation.prompt,
                params,
                index=index,
                request_seed=seed + index,
                transfer=generation.transfer,
                text=TextStream(StreamDecoder(served.tokenizer), params.stop),
                labels=labels,
                sink=outputs.put_nowait,
            )
        )
    return sequences


async def _read(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(READ_S):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(reason=f"no whole body within {READ_S:g} s") from None


async def _write(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Write, but not for ever: a client that reads nothing counts as gone."""
    try:
        async with asyncio.timeout(WRITE_S):
            await response.write(data)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionAbortedError(f"the client read nothing for {WRITE_S:g} s") from None


async def _whole(request: web.Request, reply: Reply, outputs: Queue) -> web.StreamResponse:
    """Wait for all answers, then write them. Written here, so that a failure to write is seen."""
    while True:
        output = await outputs.get()
        if output.error is not None:
            raise output.error
        reply.add(output)
        if reply.is_complete:
            break
    response = _json(reply.body())
    response.headers.update(_handoff_headers(output.sequence))
    await response.prepare(request)
    await response.write_eof()
    return response


async def _stream(request: web.Request, reply: Reply, outputs: Queue) -> web.StreamResponse:
    """Write server-sent events as outputs come; all that is there goes out in one write."""
    output = await outputs.get()
    if output.error is not None:
        raise output.error
    response = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream",
            "Cache-Control": "no-cache",
            **_handoff_headers(output.sequence),
        }
    )
    await response.prepare(request)
    events = [_event(chunk) for chunk in reply.opening()]
    while True:
        if output.error is not None:
            return await _end_with_error(request, response, events, output.error)
        events += [_event(chunk) for chunk in reply.chunks(output)]
        if reply.is_complete:
            break
        if outputs.empty() and events:
            await _write(request, response, b"".join(events))
            events = []
        output = await outputs.get()
    events += [_event(chunk) for chunk in reply.closing()]
    await _write(request, response, b"".join([*events, DONE]))
    await response.write_eof()
    return response


def _handoff_headers(sequence: Sequence) -> dict[str, str]:
    """Tells a router that an offer was not used, and that prefill may not know of it."""
    return {HANDOFF_HEADER: "recomputed"} if sequence.is_recomputed else {}


async def _end_with_error(
    request: web.Request, response: web.StreamResponse, events: list[bytes], error: KVFerryError
) -> web.StreamResponse:
    """The status is out already: say what happened in an event, and close the connection."""
    events.append(_event(error_reply(error)[1]))
    await _write(request, response, b"".join(events))
    await response.write_eof()
    if request.transport is not None:
        request.transport.close()
    return response


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _json(value: Any, *, status: int = 200) -> web.Response:
    body = msgspec.json.encode(value)
    return web.Response(body=body, status=status, content_type="application/json")


def _http_error(error: web.HTTPException) -> web.Response:
    text, code = error.reason, "http"
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        text, code = "the request body is larger than this server takes", "body_too_large"
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    response = _json(error_body(text, kind, code), status=error.status)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response
