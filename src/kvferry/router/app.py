"""The router's handlers: prefill leg, decode leg, and what surrounds them.

Rules: a request is run at most once on each side; it is sent to another worker only while nothing
has accepted it. A client that leaves takes both legs with it: the server cancels its handler, and
the cancelled handler closes the connection to the worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable

import aiohttp
import msgspec
from aiohttp import web

from kvferry.errors import (
    KVFerryError,
    PeerLostError,
    ProtocolError,
    UnreachableError,
    UsageError,
)
from kvferry.router.abandon import Abandoner
from kvferry.router.config import RouterConfig
from kvferry.router.exchange import Exchange, error_body, error_response, status_of
from kvferry.router.health import HealthChecks
from kvferry.router.legs import (
    ATTEMPT_HEADER,
    DECODE_HEADER,
    HANDOFF_HEADER,
    PREFILL_HEADER,
    Fields,
    answer_headers,
    decode_body,
    local_reason,
    offered_params,
    parse_fields,
    prefill_body,
    request_headers,
)
from kvferry.router.metrics import RouterMetrics
from kvferry.router.models import list_models
from kvferry.router.stream import ClientLeftError, Relay
from kvferry.router.upstream import Leg, Legs, is_refused, make_session, send, upstream_errors
from kvferry.router.workers import Role, Sign, Worker, WorkerTable

log = logging.getLogger(__name__)

_PREFILL_TRIES = 2
_HISTORY = 64
_FOUND_MAX = 16
_NAME_CHARS_MAX = 200
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Router:
    """One router. ``start`` serves until ``stop``; both belong to one running event loop."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.metrics = RouterMetrics()
        self.table = WorkerTable(
            config.prefill, config.decode, lost_s=config.worker_lost_s, now=time.monotonic()
        )
        self._legs = Legs()
        self._running: set[Exchange] = set()
        self._ended: deque[Exchange] = deque(maxlen=_HISTORY)
        self._failed: deque[Exchange] = deque(maxlen=_HISTORY)
        self._abandoner: Abandoner
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession
        self._health: HealthChecks

    async def start(self) -> str:
        """Check every worker once, then listen. Returns the base URL. OSError if it cannot bind."""
        self._session = make_session(self.config)
        self._abandoner = Abandoner(self._session)
        self._health = HealthChecks(self.config, self.table, self._legs, self._session)
        self._runner = web.AppRunner(
            self._application(),
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=self.config.drain_s,
        )
        try:
            await self._health.start()
            await self._runner.setup()
            site = web.TCPSite(self._runner, self.config.host, self.config.port)
            await site.start()
        except BaseException:
            await self.stop()
            raise
        host, port = self._runner.addresses[0][:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def stop(self) -> None:
        """Stop listening, give requests in flight ``drain_s``, cancel the rest, close all."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
            await self._health.stop()
            await self._abandoner.stop()
            await self._session.close()

    def _application(self) -> web.Application:
        application = web.Application(
            client_max_size=self.config.body_bytes_max, middlewares=[_errors_as_json]
        )
        application.router.add_post("/v1/completions", self.generate)
        application.router.add_post("/v1/chat/completions", self.generate)
        application.router.add_get("/v1/models", self.models)
        application.router.add_get("/health", self.health)
        application.router.add_get("/metrics", self.show_metrics)
        application.router.add_get("/debug/requests", self.show_requests)
        application.router.add_get("/debug/why", self.show_why)
        return application

    # One request

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions and /v1/chat/completions."""
        if len(self._running) >= self.config.inflight_max:
            self.metrics.requests.labels("too_many").inc()
            return error_response(
                429,
                f"{len(self._running)} requests are in flight, which is the limit",
                "inflight_max",
                **{"Retry-After": "1"},
            )
        exchange = Exchange(request.path, request.headers.get("x-request-id", "")[:128])
        self._running.add(exchange)
        self.metrics.inflight.inc()
        try:
            return await self._answer(request, exchange)
        except ClientLeftError:
            exchange.outcome = "client_left"
            request.protocol.force_close()
            return web.Response(status=499)
        except asyncio.CancelledError:
            exchange.outcome = "client_left"
            raise
        except web.HTTPRequestEntityTooLarge:
            exchange.outcome = "rejected"
            limit = self.config.body_bytes_max
            return error_response(413, f"the body is above {limit} bytes", "body_bytes_max")
        except UsageError as problem:
            exchange.outcome = "rejected"
            return error_response(400, problem.message, problem.code)
        except KVFerryError as problem:
            exchange.outcome, exchange.error = "failed", str(problem)
            return self._named(exchange, error_response(*_described(problem)))
        finally:
            self._running.discard(exchange)
            exchange.ended = time.monotonic()
            exchange.note("answered", outcome=exchange.outcome or "bug")
            self._ended.append(exchange)
            if exchange.outcome not in ("ok", "client_left"):
                self._failed.append(exchange)
            if exchange.is_unclaimed:
                assert exchange.asked is not None
                self._abandoner.tell(*exchange.asked)
            self.metrics.inflight.dec()
            self.metrics.requests.labels(exchange.outcome or "bug").inc()

    async def _answer(self, request: web.Request, exchange: Exchange) -> web.StreamResponse:
        try:
            async with asyncio.timeout(self.config.request_body_s):
                fields = parse_fields(await request.read())
        except TimeoutError:
            exchange.outcome = "rejected"
            return error_response(408, "the request body did not arrive in time", "request_body_s")
        if not any(worker.up for worker in self.table.of("decode")):
            raise self._nobody("decode")
        exchange.phase = "prefill"
        outcome = await self._prefill(request, exchange, fields)
        if isinstance(outcome, web.Response):
            exchange.outcome = "client_error"
            return self._named(exchange, outcome)
        exchange.phase = "decode"
        exchange.handoff = "local" if outcome is None else "remote"
        return await self._decode(request, exchange, decode_body(fields, outcome))

    # The prefill leg

    async def _prefill(
        self, request: web.Request, exchange: Exchange, fields: Fields
    ) -> msgspec.Raw | web.Response | None:
        """What decode is to be given, or prefill's own refusal, or None: decode does it all."""
        reason = local_reason(fields) if self.config.prefill else "none_configured"
        if reason:
            self.metrics.skipped.labels(reason).inc()
            return None
        body = prefill_body(fields)
        tried: list[Worker] = []
        problem: KVFerryError = self._nobody("prefill")
        while len(tried) < _PREFILL_TRIES and (worker := self.table.choose("prefill", tried)):
            if tried:
                exchange.tries += 1
            tried.append(worker)
            exchange.prefill = worker.name
            try:
                return await self._prefill_once(request, exchange, worker, body)
            except UnreachableError as unreachable:
                problem = unreachable
            except KVFerryError as failure:
                # Accepted, so it may have been run: it is not sent to anybody else.
                problem = failure
                break
        log.warning("request %s has no prefill: %s", exchange.id, problem)
        if self.config.on_no_prefill == "error":
            raise UnreachableError(f"no prefill: {problem}", stage="prefill") from problem
        self.metrics.skipped.labels("failed" if tried else "no_worker").inc()
        return None

    async def _prefill_once(
        self, request: web.Request, exchange: Exchange, worker: Worker, body: bytes
    ) -> msgspec.Raw | web.Response | None:
        started = time.monotonic()
        headers = request_headers(request.headers, exchange.attempt)
        headers["Accept-Encoding"] = "identity"
        exchange.asked = (worker, exchange.attempt)
        exchange.note("prefill_asked", worker=worker.name)
        status = "cancelled"
        try:
            async with self._legs.start(worker) as leg:
                leg.allow(self.config.first_byte_s, "prefill to answer")
                upstream = await send(self._session, leg, request.path, headers, body)
                try:
                    status = str(upstream.status)
                    answer = await self._whole_answer(upstream, leg)
                finally:
                    upstream.close()
            exchange.note("prefill_answered", worker=worker.name, status=upstream.status)
        except KVFerryError as problem:
            status = problem.code
            exchange.note("prefill_failed", worker=worker.name, reason=problem.message)
            self._note_refusal(worker, problem)
            raise
        finally:
            self.metrics.legs.labels("prefill", status).inc()
            self.metrics.prefill.observe(time.monotonic() - started)
        if 400 <= upstream.status < 500:
            refusal = answer_headers(upstream.headers)
            refusal.popall("Content-Length", None)
            return web.Response(status=upstream.status, body=answer, headers=refusal)
        if upstream.status != 200:
            raise PeerLostError(
                f"prefill answered {upstream.status}", peer=worker.name, stage="prefill"
            )
        params = offered_params(answer)
        if params is None:
            exchange.asked = None
            self.metrics.skipped.labels("no_params").inc()
        return params

    async def _whole_answer(self, upstream: aiohttp.ClientResponse, leg: Leg) -> bytes:
        answer = bytearray()
        with upstream_errors(leg):
            while chunk := await upstream.content.readany():
                answer += chunk
                leg.allow(self.config.between_bytes_s, "the rest of prefill's answer")
                if len(answer) > self.config.body_bytes_max:
                    raise ProtocolError(
                        f"prefill's answer is above {self.config.body_bytes_max} bytes",
                        peer=leg.worker.name,
                        stage="prefill",
                    )
        return bytes(answer)

    # The decode leg

    async def _decode(
        self, request: web.Request, exchange: Exchange, body: bytes
    ) -> web.StreamResponse:
        tried: list[Worker] = []
        problem: KVFerryError = self._nobody("decode")
        while worker := self.table.choose("decode", tried):
            if tried:
                exchange.tries += 1
            tried.append(worker)
            exchange.decode = worker.name
            try:
                return await self._decode_once(request, exchange, worker, body)
            except UnreachableError as unreachable:
                problem = unreachable
        raise problem

    async def _decode_once(
        self, request: web.Request, exchange: Exchange, worker: Worker, body: bytes
    ) -> web.StreamResponse:
        def note_first() -> None:
            self.metrics.first_byte.observe(time.monotonic() - exchange.started)
            exchange.phase = "answering"
            exchange.note("first_byte", worker=worker.name)

        exchange.note("decode_asked", worker=worker.name)
        relay = Relay(request, self.config, note_first)
        headers = request_headers(request.headers, exchange.attempt)
        status = "cancelled"
        try:
            async with self._legs.start(worker) as leg:
                leg.allow(self.config.first_byte_s, "decode to answer")
                upstream = await send(self._session, leg, request.path, headers, body)
                try:
                    status = str(upstream.status)
                    self._note_recomputed(upstream, exchange)
                    response = await relay.run(upstream, leg, self._names(exchange))
                finally:
                    upstream.close()
        except KVFerryError as problem:
            status = problem.code
            exchange.note("decode_failed", worker=worker.name, reason=problem.message)
            self._note_refusal(worker, problem)
            if relay.response is None:
                raise
            exchange.outcome, exchange.error = "cut", str(problem)
            log.warning("request %s was cut: %s", exchange.id, problem)
            return await relay.cut(error_body(*_described(problem)))
        finally:
            exchange.bytes_done = relay.bytes_done
            self.metrics.legs.labels("decode", status).inc()
        kinds = {4: "client_error", 5: "upstream_error"}
        exchange.outcome = kinds.get(upstream.status // 100, "ok")
        return response

    def _note_recomputed(self, upstream: aiohttp.ClientResponse, exchange: Exchange) -> None:
        """Let prefill have back what decode could not load: where the two do not hear each other,
        prefill would keep it until it expires, and soon have no blocks left for anybody.
        """
        if upstream.headers.get(HANDOFF_HEADER) != "recomputed" or exchange.asked is None:
            return
        exchange.handoff = "recomputed"
        self._abandoner.tell(*exchange.asked)
        exchange.asked = None

    # What both legs share

    def _note_refusal(self, worker: Worker, problem: KVFerryError) -> None:
        if is_refused(problem):
            self._health.note(worker, Sign.REFUSED, "it refused a connection")

    def _nobody(self, role: Role) -> UnreachableError:
        reasons = "; ".join(f"{each.name}: {each.reason}" for each in self.table.of(role))
        return UnreachableError(f"no {role} worker is up ({reasons})", stage=role)

    @staticmethod
    def _names(exchange: Exchange) -> dict[str, str]:
        names = {
            ATTEMPT_HEADER: exchange.attempt,
            PREFILL_HEADER: exchange.prefill,
            DECODE_HEADER: exchange.decode,
            HANDOFF_HEADER: exchange.handoff,
        }
        return {header: value for header, value in names.items() if value}

    def _named(self, exchange: Exchange, response: web.Response) -> web.Response:
        response.headers.update(self._names(exchange))
        return response

    # Everything but requests

    async def models(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/models: what the healthy workers offer, each name once."""
        headers = request_headers(request.headers, "models")
        return await list_models(self._session, self.config, self.table.workers, headers)

    async def health(self, _request: web.Request) -> web.Response:
        """GET /health: 200 while at least one decode worker takes requests."""
        is_up = any(worker.up for worker in self.table.of("decode"))
        workers = [
            {
                "role": worker.role,
                "worker": worker.name,
                "up": worker.up,
                "reason": worker.reason,
                "inflight": worker.inflight,
            }
            for worker in self.table.workers
        ]
        body = {"status": "ok" if is_up else "no decode worker is up", "workers": workers}
        return web.json_response(body, status=200 if is_up else 503)

    async def show_metrics(self, _request: web.Request) -> web.Response:
        """GET /metrics: Prometheus text."""
        text, content_type = self.metrics.render(self.table.workers)
        return web.Response(body=text, headers={"Content-Type": content_type})

    async def show_requests(self, _request: web.Request) -> web.Response:
        """GET /debug/requests: those in flight, oldest first, and the last that ended."""
        running = sorted(self._running, key=lambda each: each.started)
        return web.json_response(
            {
                "running": [exchange.as_dict() for exchange in running],
                "ended": [exchange.as_dict() for exchange in reversed(self._ended)],
            }
        )

    async def show_why(self, request: web.Request) -> web.Response:
        """GET /debug/why?id=: the router's view of a request, and whom to ask for the rest."""
        text = request.query.get("id", "")[:_NAME_CHARS_MAX]
        known = dict.fromkeys([*self._failed, *self._ended, *self._running])
        if text == "last-failure":
            found = list(self._failed)[-1:]
        else:
            whole = [each for each in known if text in (each.id, *each.names())]
            found = whole or [each for each in known if each.answers_to(text)]
        return web.json_response(
            {
                "kind": "router",
                "found": len(found),
                "trails": [each.as_trail() for each in found[-_FOUND_MAX:]],
                "workers": [worker.url for worker in self.table.workers],
            }
        )


def _described(problem: KVFerryError) -> tuple[int, str, str]:
    return status_of(problem), str(problem), problem.code


@web.middleware
async def _errors_as_json(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as problem:
        if problem.status < 400:
            raise
        return error_response(problem.status, f"{request.path}: {problem.reason}", "http")
