"""What the fault tests share: fakes at the edge of the engine, and raw sockets beside it."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

from kvferry.errors import KVFerryError, RegistrationError
from kvferry.protocol import framing, messages
from kvferry.regions import Spans
from kvferry.sockets import Address
from kvferry.testing.conformance import wait_until
from kvferry.transports.base import (
    Capabilities,
    Export,
    Operation,
    PeerView,
    RemoteRegion,
    Transport,
)
from kvferry.transports.mapped import MappedTransport, Mapping

MIB = 1 << 20
WHOLE = Spans.whole(MIB)

__all__ = ["MIB", "WHOLE", "Ends", "Held", "Unmappable", "raw_hello", "wait_until"]


class Held(Transport):
    """A path on which nothing moves until the test says how it ends."""

    name = "held"

    def __init__(self) -> None:
        self.ops: list[Operation] = []
        self.aborted: list[Operation] = []
        self.ends_on_abort = True
        self._services: Any = None

    def capabilities(self) -> Capabilities:
        return Capabilities(family="remote", bytes_per_s=1e12, latency_s=1e-9)

    def open(self, services: Any) -> None:
        self._services = services

    def close(self) -> None:
        for op in list(self.ops):
            self.end(op, op.stop)

    def export(self, region: Any, fd: int) -> Export | None:
        return Export()

    def submit(self, op: Operation) -> None:
        self.ops.append(op)

    def abort(self, op: Operation, error: KVFerryError) -> None:
        super().abort(op, error)
        self.aborted.append(op)
        if self.ends_on_abort:
            self.end(op, op.stop)

    def end(self, op: Operation, error: KVFerryError | None = None) -> None:
        """Let an operation end."""
        if op in self.ops:
            self.ops.remove(op)
            self._services.complete(op, 0 if error else op.nbytes, error)


class Unmappable(MappedTransport):
    """A mapped path, the fastest by its own account, whose mapping fails while ``broken``."""

    name = "unmappable"
    broken = True
    tried = 0

    def capabilities(self) -> Capabilities:
        return Capabilities(family="mapped", bytes_per_s=1e12, latency_s=1e-9, span_s=0.0)

    def export(self, region: Any, fd: int) -> Export | None:
        return Export(region.address.to_bytes(8, "little"))

    def blocked(self, local: Any, remote: RemoteRegion, peer: PeerView) -> str:
        return ""

    def map(self, remote: RemoteRegion, *, writable: bool) -> Mapping:
        self.tried += 1
        if self.broken:
            raise RegistrationError("no address space is left", fix="restart")
        return Mapping(int.from_bytes(remote.exports[self.name].data, "little"))


class Ends:
    """An ``on_end`` that keeps what it was called with."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._came = threading.Semaphore(0)

    def __call__(self, end: Any) -> None:
        self.all.append(end)
        self._came.release()

    def one(self, timeout_s: float = 5.0) -> Any:
        """The next end. Raises AssertionError when none comes."""
        assert self._came.acquire(timeout=timeout_s), "on_end was never called"
        return self.all[-1]


def raw_connect(address: str, timeout_s: float = 5.0) -> socket.socket:
    """A plain socket to an engine."""
    where = Address.parse(address)
    if where.scheme == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(timeout_s)
        sock.connect(where.host)
        return sock
    return socket.create_connection((where.host, where.port), timeout_s)


def raw_hello(**fields: Any) -> bytes:
    """A hello as an engine would send it, as a frame."""
    made_up: dict[str, Any] = {
        "incarnation": os.urandom(16),
        "name": "raw",
        "purpose": "control",
        "key": os.urandom(16),
    }
    return frame(messages.Hello(**{**made_up, **fields}))


def frame(message: Any, descriptors: int = 0) -> bytes:
    return framing.encode(messages.pack(message), descriptors=descriptors, limit=1 << 30)


def read_message(sock: socket.socket) -> Any:
    """The next message, or None at the end of the stream."""
    header = _exactly(sock, framing.HEADER.size)
    if header is None:
        return None
    nbytes, _ = framing.check_header(header, 1 << 30)
    payload = _exactly(sock, nbytes)
    return None if payload is None else messages.unpack(payload)


def _exactly(sock: socket.socket, nbytes: int) -> bytes | None:
    data = b""
    while len(data) < nbytes:
        try:
            piece = sock.recv(nbytes - len(data))
        except ConnectionError:
            return None
        if not piece:
            return None
        data += piece
    return data
