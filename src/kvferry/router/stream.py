"""Decode's answer to the client: bytes as they come, and an end that is never mistaken."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import aiohttp
import msgspec
from aiohttp import web

from kvferry.errors import PeerLostError
from kvferry.router.config import RouterConfig
from kvferry.router.legs import answer_headers
from kvferry.router.upstream import Leg, upstream_errors

_FAREWELL_S = 1.0
_DONE = b"data: [DONE]"


class ClientLeftError(Exception):
    """The client closed its connection. Nothing is left to be told to it."""


class Relay:
    """Passes one answer on. ``response`` is None as long as the client has been sent nothing."""

    def __init__(
        self, request: web.Request, config: RouterConfig, on_first: Callable[[], None]
    ) -> None:
        self.response: web.StreamResponse | None = None
        self.bytes_done = 0
        self._request = request
        self._config = config
        self._on_first = on_first

    async def run(
        self, upstream: aiohttp.ClientResponse, leg: Leg, extra: Mapping[str, str]
    ) -> web.StreamResponse:
        """Relay head and body. The head waits for the first byte of the body.

        So a worker that dies between the two is still answered with a status that says so.
        Raises PeerLostError or DeadlineError when the worker's side ends early, ClientLeftError.
        """
        with upstream_errors(leg):
            chunk = await upstream.content.readany()
        self._on_first()
        headers = answer_headers(upstream.headers)
        headers.update(extra)
        response = web.StreamResponse(
            status=upstream.status, reason=upstream.reason, headers=headers
        )
        tail = b""
        with _client_errors():
            await response.prepare(self._request)
        self.response = response
        while chunk:
            leg.allow(self._config.between_bytes_s, "the client to take more bytes")
            with _client_errors():
                await response.write(chunk)
            self.bytes_done += len(chunk)
            tail = (tail + chunk)[-64:]
            leg.allow(self._config.between_bytes_s, "more bytes of the answer")
            with upstream_errors(leg):
                chunk = await upstream.content.readany()
        if _ends_by_close(upstream) and _is_events(upstream.headers) and _DONE not in tail:
            raise PeerLostError("the decode worker's stream ended before [DONE]")
        leg.allow(self._config.between_bytes_s, "the client to take the last bytes")
        with _client_errors():
            await response.write_eof()
        return response

    async def cut(self, body: dict[str, object]) -> web.StreamResponse:
        """End an answer that has begun, visibly: an error event if it is events, then no ending.

        The connection is closed without the mark that ends a body, so that no client can take
        what it has for the whole.
        """
        response = self.response
        assert response is not None
        transport = self._request.transport
        if transport is None:
            return response
        is_told = (
            _is_events(response.headers)
            and "Content-Length" not in response.headers
            and "Content-Encoding" not in response.headers
            and await self._say(response, body)
        )
        if is_told:
            self._request.protocol.force_close()
        else:
            _reset(transport)
        return response

    @staticmethod
    async def _say(response: web.StreamResponse, body: dict[str, object]) -> bool:
        # The blank line ends an event that the worker had left unfinished.
        event = b"\n\ndata: " + msgspec.json.encode(body) + b"\n\n"
        try:
            async with asyncio.timeout(_FAREWELL_S):
                await response.write(event)
        except (TimeoutError, ConnectionError):
            return False
        return True


def _reset(transport: asyncio.Transport) -> None:
    """Close with a reset: to a client that reads until the end, a plain close is a clean end."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _is_events(headers: Mapping[str, str]) -> bool:
    return headers.get("Content-Type", "").lower().startswith("text/event-stream")


def _ends_by_close(upstream: aiohttp.ClientResponse) -> bool:
    headers = upstream.headers
    is_chunked = "chunked" in headers.get("Transfer-Encoding", "").lower()
    return "Content-Length" not in headers and not is_chunked


@contextmanager
def _client_errors() -> Iterator[None]:
    """Name the client's disappearance, which the HTTP library reports like the worker's."""
    try:
        yield
    except ConnectionError as problem:
        raise ClientLeftError from problem
