"""The one interface that every transport implements.

A transport moves bytes between a local and a remote region. It takes *operations*: paired span
lists that the engine has already checked and merged. It never retries, never chooses and never
waits for the engine; it reports each operation's end exactly once through
:meth:`Services.complete`.

Three families implement it. A *mapped* transport (``mapped.py``) makes the peer's memory appear
here and copies. A *streamed* one (``stream.py``) sends bytes through a channel. A *remote* one
lets the kernel or a card fetch them. Most transports subclass one of the families and stay short.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvferry.clock import Clock
from kvferry.config import EngineConfig
from kvferry.errors import KVFerryError
from kvferry.memory.cuda import ResidentSpans
from kvferry.memory.devices import Devices
from kvferry.protocol.messages import Hello
from kvferry.regions import I64, U64, Region, Spans


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do, and what follows from it.

    family: ``"mapped"``, ``"streamed"`` or ``"remote"``.
    kinds: memory kinds it can touch on the local side.
    pull, push: whether the target's side, or the source's side, can move the bytes.
    same_process, same_host: whether both engines must share a process, or a kernel.
    needs_export: the remote region must carry this transport's export.
    needs_unix: the peers must share a Unix socket, because descriptors are passed.
    latency_s, bytes_per_s, span_s: what to expect before anything was measured.
    note: what people should know of the path beside its speed, for explanations.
    """

    family: str
    kinds: frozenset[str] = frozenset({"host"})
    pull: bool = True
    push: bool = True
    same_process: bool = False
    same_host: bool = False
    needs_export: bool = False
    needs_unix: bool = False
    latency_s: float = 1e-4
    bytes_per_s: float = 1e9
    span_s: float = 1e-7
    note: str = ""


@dataclass(frozen=True, slots=True)
class Export:
    """What lets a peer reach a region by one transport.

    data: opaque bytes for the same transport on the other side.
    fd: a descriptor that must travel with them, or -1. It belongs to the exporting transport.
    """

    data: bytes = b""
    fd: int = -1


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """A peer's region as this side knows it. ``key`` names it for caches."""

    peer: bytes
    region_id: int
    kind: str
    device: str
    nbytes: int
    generation: int
    token: bytes = field(repr=False)
    access: str
    exports: dict[str, Export] = field(repr=False)

    @property
    def key(self) -> tuple[bytes, int, int]:
        return (self.peer, self.region_id, self.generation)


@dataclass(frozen=True, slots=True)
class PeerView:
    """What a transport may know about a connected peer.

    incarnation: its identity. name: for errors.
    process, host: compare with one's own. unix_address, tcp_address: "" if there is none.
    key: the secret that a lane must show to this peer.
    transports: names that it has.
    """

    incarnation: bytes
    name: str
    process: bytes
    host: str
    unix_address: str
    tcp_address: str
    key: bytes = field(repr=False)
    transports: frozenset[str] = frozenset()


@dataclass(slots=True)
class Operation:
    """One transfer by one path.

    ``write`` is seen from here: local bytes go to the peer. The three arrays are int64[n], paired,
    inside their regions, all lengths positive. ``deadline`` is in the engine's clock. ``stop`` is
    set when the operation should end early; whoever moves bytes looks at it between pieces.
    ``began_at`` is set by the transport when bytes begin to move: waiting is not slowness.
    ``moved_at`` is set, in the engine's clock, when the peer or the hardware is asked to move
    bytes, and again whenever some have moved: an operation on which it stays the same for too long
    is aborted with a StallError. While it is 0, as on paths that cannot stall, nobody looks.
    ``bytes_done`` is what has moved so far, where the transport counts it; for people only.
    """

    op_id: int
    write: bool
    local: Region
    remote: RemoteRegion
    peer: PeerView
    local_offsets: I64
    remote_offsets: I64
    lengths: I64
    nbytes: int
    deadline: float
    stop: KVFerryError | None = None
    began_at: float = 0.0
    moved_at: float = 0.0
    length: int = 0
    resident: ResidentSpans | None = None
    bytes_done: int = 0

    def local_addresses(self) -> U64:
        return self.local_offsets.view("u8") + self.local.address

    @property
    def path(self) -> str:
        return "push" if self.write else "pull"


@dataclass(frozen=True, slots=True)
class Access:
    """Spans of a region of ours that a peer's transfer may touch while this is open.

    kind, device: as in Region.
    """

    addresses: U64
    lengths: I64
    nbytes: int
    kind: str = "host"
    device: str = ""


def _nothing() -> None:
    return None


class Services(Protocol):
    """What the engine does for transports."""

    config: EngineConfig
    clock: Clock
    devices: Devices
    process: bytes
    host: str

    def complete(self, op: Operation, bytes_done: int, error: KVFerryError | None) -> None:
        """The operation has stopped. Called once per operation, any thread, nothing held.

        With an error, ``bytes_done`` of its bytes had arrived and nothing more will.
        """
        ...

    def access(
        self, region_id: int, token: bytes, generation: int, spans: Spans, *, write: bool
    ) -> AbstractContextManager[Access]:
        """A peer's right to touch a region of ours, checked; held open, it delays deregistering.

        Raises StaleRegionError or BoundsError.
        """
        ...

    def open_lane(
        self,
        peer: PeerView,
        address: str,
        deadline: float,
        hello: dict[str, Any],
        fd: int = -1,
        check: Callable[[], None] = _nothing,
    ) -> socket.socket:
        """A socket to the peer at one of its addresses, handed to the same transport there. Blocks.

        hello: fields for the lane's hello, ``purpose`` (the transport's name) among them. ``fd``
        travels with it over a Unix socket. ``check`` is called every 0.1 s while it blocks, and
        gives up by raising. Raises UnreachableError and its kin.
        """
        ...

    def run(self, work: Callable[[], None]) -> None:
        """Run ``work`` soon on one of the engine's few mover threads. Raises BusyError."""
        ...


class Transport(ABC):
    """One way to move bytes. Constructed without effects; ``open`` gives it an engine.

    Methods are called from any thread unless they say otherwise, and none may block for longer than
    a copy of ``inline_bytes_max``. After ``close`` only ``close`` may be called.
    """

    name: str = ""

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What it can do; constant."""

    def unavailable(self) -> str:
        """Why it cannot work on this machine at all, in a sentence; empty if it can."""
        return ""

    @abstractmethod
    def open(self, services: Services) -> None:
        """Start using an engine. Raises RegistrationError or ConfigError; then it stays closed."""

    @abstractmethod
    def close(self) -> None:
        """Stop everything: operations end, threads and descriptors go. Blocks until they have."""

    @abstractmethod
    def export(self, region: Region, fd: int) -> Export | None:
        """How a peer could reach ``region``; None if not by this transport.

        ``fd``: the shareable descriptor behind the region, or -1. Called once per region.
        """

    def deregister(self, region: Region) -> None:
        """The region goes away: drop what belongs to it. Its export is not used again."""
        return None

    def forget(self, remote: RemoteRegion) -> None:
        """The peer's region is gone: drop what is cached of it."""
        return None

    def disconnect(self, incarnation: bytes) -> None:
        """The peer is gone: end its operations and lanes, drop its mappings."""
        return None

    def blocked(self, local: Region, remote: RemoteRegion, peer: PeerView) -> str:
        """Why this pair cannot be served, beyond what the capabilities say; empty if it can."""
        return ""

    @abstractmethod
    def submit(self, op: Operation) -> None:
        """Start an operation. It may be complete on return. After BusyError it never began."""

    def abort(self, op: Operation, error: KVFerryError) -> None:
        """Ask an operation to end with ``error``. Its completion comes when it has stopped."""
        op.stop = op.stop or error

    def accept(self, sock: socket.socket, fd: int, hello: Hello) -> None:
        """Serve a lane that a peer opened; owns ``sock`` and ``fd``, also when it raises.

        Streamed transports only. Must not block. The hello was read and answered.
        """
        raise NotImplementedError(f"{self.name} has no lanes")

    def statistics(self) -> dict[str, int]:
        """Numbers for people: open mappings, lanes, operations under way."""
        return {}
