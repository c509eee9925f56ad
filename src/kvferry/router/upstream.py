"""One request to one worker: sent at most once, given up at once when the worker is lost.

Every failure becomes one of three errors, because they allow different things:
UnreachableError: nothing was accepted, another worker may be tried; PeerLostError: the worker may
have run the request; DeadlineError: it may still be running it.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import aiohttp
from multidict import CIMultiDict

from kvferry.errors import DeadlineError, PeerLostError, ProtocolError, UnreachableError
from kvferry.router.config import RouterConfig
from kvferry.router.workers import Worker

# A kept-alive connection that the worker had already closed fails at once. One that fails later
# than this was closed in answer to the request, which may have been run.
_STALE_S = 0.25


class Leg:
    """One request that is running on one worker. Made by ``Legs.start``."""

    def __init__(self, worker: Worker, timeout: asyncio.Timeout) -> None:
        self.worker = worker
        self.answered = False
        self._timeout = timeout
        self._waiting_for = ""
        self._limit_s = 0.0
        self._lost = ""

    def allow(self, limit_s: float, waiting_for: str) -> None:
        """From now on the leg may wait ``limit_s`` seconds for ``waiting_for``."""
        self._waiting_for, self._limit_s = waiting_for, limit_s
        if not self._lost and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time() + limit_s)

    def lose(self, reason: str) -> None:
        """End the leg now with PeerLostError, wherever it waits."""
        if not self._lost and not self._timeout.expired():
            self._lost = reason
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def error(self) -> PeerLostError | DeadlineError:
        """What an expired leg ended with."""
        role = self.worker.role
        if self._lost:
            return PeerLostError(
                f"the {role} worker is lost: {self._lost}", peer=self.worker.name, stage="health"
            )
        return DeadlineError(
            f"waited {self._limit_s:g} s for {self._waiting_for}", peer=self.worker.name, stage=role
        )


@dataclass
class Legs:
    """All legs that are running, by worker."""

    _running: dict[Worker, set[Leg]] = field(default_factory=dict)

    @asynccontextmanager
    async def start(self, worker: Worker) -> AsyncIterator[Leg]:
        """Count a leg on ``worker`` for the length of the block.

        Raises PeerLostError when the worker is lost meanwhile, DeadlineError when a limit given to
        ``Leg.allow`` passes. A cancelled caller stays cancelled.
        """
        timeout = asyncio.timeout(None)
        leg = Leg(worker, timeout)
        running = self._running.setdefault(worker, set())
        running.add(leg)
        worker.inflight += 1
        try:
            async with timeout:
                yield leg
        except TimeoutError:
            if timeout.expired():
                raise leg.error() from None
            raise
        finally:
            worker.inflight -= 1
            running.discard(leg)

    def lose(self, worker: Worker, reason: str) -> int:
        """End every leg on ``worker``; returns how many there were."""
        legs = list(self._running.get(worker, ()))
        for leg in legs:
            leg.lose(reason)
        return len(legs)


def make_session(config: RouterConfig) -> aiohttp.ClientSession:
    """The one client session of a router: bounded, no cookies, no proxies, no total time limit."""
    workers = len(config.prefill) + len(config.decode)
    trace = aiohttp.TraceConfig()

    async def note_reuse(_session: object, context: SimpleNamespace, _params: object) -> None:
        if context.trace_request_ctx is not None:
            context.trace_request_ctx.reused = True

    trace.on_connection_reuseconn.append(note_reuse)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=config.inflight_max + 4 * workers,  # health checks never queue behind requests
            keepalive_timeout=config.keepalive_s,
        ),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.connect_s),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
        trace_configs=[trace],
    )


async def send(
    session: aiohttp.ClientSession, leg: Leg, path: str, headers: CIMultiDict[str], body: bytes
) -> aiohttp.ClientResponse:
    """Send a request and wait for the head of its answer. The caller closes the answer.

    Sent again, once, only if a kept-alive connection turned out to be closed already.
    """
    for is_last in (False, True):
        context = SimpleNamespace(reused=False)
        started = time.monotonic()
        with upstream_errors(leg):
            try:
                response = await session.post(
                    leg.worker.url + path,
                    data=body,
                    headers=headers,
                    allow_redirects=False,
                    trace_request_ctx=context,
                )
                leg.answered = True
                return response
            except aiohttp.ClientConnectorError:
                raise
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if is_last or not context.reused or time.monotonic() - started > _STALE_S:
                    raise
    raise AssertionError("unreachable")


@contextmanager
def upstream_errors(leg: Leg) -> Iterator[None]:
    """Turn the HTTP client's errors into kvferry's."""
    role, name = leg.worker.role, leg.worker.name
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as problem:
        raise UnreachableError(
            f"could not connect to the {role} worker: {problem}", peer=name, stage=role
        ) from problem
    except (
        aiohttp.ServerDisconnectedError,
        aiohttp.ClientOSError,
        aiohttp.ClientPayloadError,
        ConnectionError,
    ) as problem:
        where = "in the middle of its answer" if leg.answered else "before it answered"
        raise PeerLostError(
            f"the {role} worker closed the connection {where}: {problem}", peer=name, stage=role
        ) from problem
    except aiohttp.ClientError as problem:
        raise ProtocolError(
            f"the {role} worker did not answer in HTTP: {problem}", peer=name, stage=role
        ) from problem


def is_refused(problem: BaseException) -> bool:
    """Whether the host said that nobody listens there, as opposed to saying nothing."""
    cause = problem.__cause__ if isinstance(problem, UnreachableError) else problem
    return (
        isinstance(cause, aiohttp.ClientConnectorError)
        and cause.os_error.errno == errno.ECONNREFUSED
    )
