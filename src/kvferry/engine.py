"""The engine: regions, peers, transfers and deadlines. The one place that joins the pieces.

One lock guards the tables; it is held for microseconds, never while bytes move and never while user
code runs. One thread (``loop``) waits for control sockets and timers; copies run in their caller's
thread when they are short, in a mover or a lane's thread when they are long.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

from kvferry import transports
from kvferry.clock import Clock, SystemClock
from kvferry.config import CHECKSUMS, EngineConfig
from kvferry.connections import Connections
from kvferry.deferring import DeferringLock
from kvferry.errors import (
    ClosedError,
    KVFerryError,
    PeerLostError,
    UsageError,
)
from kvferry.integrity import Answers
from kvferry.loop import TICK_S, ControlLoop
from kvferry.memory.cuda import DeviceBlock, ResidentSpans, device_address
from kvferry.memory.cuda_driver import CudaDriver, driver
from kvferry.memory.devices import Devices
from kvferry.memory.host import address_of, allocate_shared
from kvferry.movers import Movers
from kvferry.moves import Moves
from kvferry.paths import Paths
from kvferry.peers import REF, Peer
from kvferry.planner import Plan
from kvferry.prepared import Prepared
from kvferry.protocol.messages import Describe, Notify, RegionGone, Verify
from kvferry.regions import READ, READ_WRITE, PairedSpans, Region, Spans, check_bounds
from kvferry.registry import Registration, Registry
from kvferry.sockets import Address
from kvferry.telemetry.recorder import Recorder
from kvferry.telemetry.trail import Trail
from kvferry.transfer import Transfer
from kvferry.transports.base import Operation, PeerView, RemoteRegion, Transport
from kvferry.trials import cache
from kvferry.trials.records import TrialBook

log = logging.getLogger(__name__)

TICK_MIN_S = 0.002
"""The loop looks at timers no more often than this."""


def _nothing() -> None:
    return None


class Engine:
    """Moves bytes between its own regions and those of peers.

    config: settings; default is EngineConfig.from_environment().
    clock: where time comes from; tests pass a fake one.
    extra: transports that are not in the registry, by name, such as a FaultyTransport.
    cuda: gives the driver for device memory; tests pass one that returns a FakeCuda.
    trials: what is known of paths from trials; default is what is kept in ``cache_dir``.

    Usable as a context manager. All methods may be called from any thread unless they say
    otherwise. After :meth:`close`, or in a forked child, they raise ClosedError.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        clock: Clock | None = None,
        extra: dict[str, Transport] | None = None,
        cuda: Callable[[], CudaDriver] = driver,
        trials: TrialBook | None = None,
    ) -> None:
        self.config = (config or EngineConfig.from_environment()).with_defaults()
        self.clock: Clock = clock or SystemClock()
        self.process = PROCESS.id
        self.incarnation = os.urandom(16)
        self.on_notify: Callable[[Peer, bytes], None] | None = None
        self.handoff: Any = None
        self.recorder = Recorder(self.clock, self.config.name, dump_dir=self.config.dump_dir)
        self._pid = os.getpid()
        self._lock = DeferringLock()
        self._closed = False
        self._transports, self.unusable = transports.choose(self.config.transports, extra or {})
        self.devices = Devices(cuda, blocks=self.config.device_blocks)
        self._registry = Registry(self._transports)
        self.loop = ControlLoop(self.config.name, self.clock, self._tick)
        movers_max = max(2, min(4, os.cpu_count() or 1))
        self._movers = Movers(
            self.config.name, threads=movers_max, waiting_max=self.config.transfers_max
        )
        try:
            self.connections = Connections(self, self._transports)
        except BaseException:
            self.loop.close()
            raise
        self.host = self.connections.host
        paths = Paths(
            self._transports,
            self.clock,
            process=self.process,
            host=self.host,
            trials=cache.load(self.config.cache_dir) if trials is None else trials,
        )
        self._answers = Answers(self)
        self.moves = Moves(self, self._transports, paths, self.clock)
        opened: list[Transport] = []
        try:
            self.connections.listen()
            for transport in self._transports.values():
                transport.open(self)
                opened.append(transport)
            self._movers.start()
            self.loop.start()
        except BaseException:
            self._closed = True
            self._movers.close()
            self.connections.close()
            for transport in opened:
                transport.close()
            self.loop.close()
            raise

    # -- life -------------------------------------------------------------------------------

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def addresses(self) -> list[str]:
        """Where peers reach this engine, best first."""
        return list(self.connections.addresses)

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` has begun."""
        return self._closed

    @property
    def transports(self) -> dict[str, Transport]:
        """The open transports by name."""
        return dict(self._transports)

    def close(self) -> None:
        """End every transfer, leave all peers, stop all threads, unmap all regions. Idempotent.

        Blocks until nothing of the engine runs or touches memory, mostly for the system to take
        allocated pages back. Raises UsageError in a callback of the control thread. In a forked
        child it does nothing.
        """
        if self._pid != os.getpid():
            return
        if self.loop.is_here():
            raise UsageError(
                "an engine cannot be closed by one of its own callbacks",
                fix="set an event in the callback and close the engine in the thread that made it",
            )
        with self.locked():
            if self._closed:
                return
            self._closed = True
        with self.devices.undisturbed():
            self._close()

    def _close(self) -> None:
        if self.handoff is not None:
            self.handoff.close()
        with self.locked():
            self.moves.abort_all()
        self.connections.close()
        for transport in self._transports.values():
            transport.close()
        self._movers.close()
        self.loop.close()
        with self.locked():
            self.moves.end_left()
        self._registry.close()
        self.devices.close()

    def check_open(self) -> None:
        """Raise ClosedError when this engine cannot be used any more."""
        if self._pid != os.getpid():
            raise ClosedError(
                "this engine was made before a fork and cannot be used in the child",
                fix="make the engine after forking, or start processes with 'spawn'",
            )
        if self._closed:
            raise ClosedError("the engine is closed")

    # -- regions ----------------------------------------------------------------------------

    def allocate(self, nbytes: int, *, access: str = READ, device: str = "") -> Registration:
        """New memory that peers on this host can map. Blocks while pages are reserved.

        access: ``"read"`` lets peers read only, ``"read-write"`` lets them write too.
        device: ``""`` for host memory; for device memory a UUID, or ``"cuda"`` or ``"cuda:1"`` as
        this process counts devices. Its registration has no ``array``.
        Raises RegistrationError when there is not enough memory, DeviceError.
        """
        self.check_open()
        _check_access(access)
        if device:
            with self.devices.undisturbed(load=True):
                block = DeviceBlock(self.devices.named(device), nbytes)
                uuid = block.device.facts.uuid
                return self._add(block.address, nbytes, access, memory=block, device=uuid)
        memory = allocate_shared(nbytes)
        return self._add(
            memory.address, nbytes, access, fd=memory.fd, array=memory.array(), memory=memory
        )

    def register(self, buffer: Any, *, access: str = READ, kind: str = "") -> Registration:
        """Make existing memory reachable for peers.

        buffer: host memory as a C-contiguous array, a writable buffer, a CPU tensor; device memory
        as a CUDA tensor or array (torch, ``__cuda_array_interface__``, DLPack); or (address,
        nbytes), with kind ``"cuda"`` if it is device memory. It must stay alive until the
        registration is closed. Registering the very same memory again returns the same
        registration, counted. Such host memory cannot be mapped by peers: use :meth:`allocate`
        where there is a choice. Raises UsageError, RegistrationError, DeviceError.
        """
        self.check_open()
        _check_access(access)
        found = buffer if kind == "cuda" else device_address(buffer)
        if found is None:
            address, nbytes = address_of(buffer)
            return self._add(address, nbytes, access, keep=buffer)
        address, nbytes = found
        with self.devices.undisturbed(load=True):
            device, _ = self.devices.around(address)
            return self._add(address, nbytes, access, keep=buffer, device=device.facts.uuid)

    def _add(self, address: int, nbytes: int, access: str, **facts: Any) -> Registration:
        return self._registry.add(self, address, nbytes, access, **facts)

    def deregister(self, registration: Registration) -> None:
        """What Registration.close does; blocks until no transfer uses the region."""
        if self._pid != os.getpid():
            return
        region_id = registration.region.region_id
        if not self._registry.withdraw(registration):
            return
        # Nobody gets a description any more. Taking the lock also waits for one that is just being
        # sent, whose descriptors are closed below.
        self._tell_peers_gone(region_id)

        def running() -> bool:
            with self.locked():
                return self.moves.uses(region_id)

        with self.devices.undisturbed():
            self._registry.remove(registration, running)

    def renew(self, registration: Registration) -> None:
        """What Registration.renew does."""
        self._registry.renew(registration)
        self._tell_peers_gone(registration.region.region_id)

    def _tell_peers_gone(self, region_id: int) -> None:
        with self.locked():
            for peer in self.connections.open_peers():
                peer.send(RegionGone(region_id))

    # -- peers ------------------------------------------------------------------------------

    def connect(self, address: str, timeout_s: float | None = None) -> Peer:
        """The engine that listens at ``address`` (``tcp://host:port`` or ``unix:/path``). Blocks.

        A connection that is open already is used again; when the engine there is on this host, its
        Unix socket is preferred. Raises UnreachableError with the likely fix, VersionError,
        ProtocolError, ConfigError for a malformed address.
        """
        self.check_open()
        if self.loop.is_here():
            raise UsageError("a callback of kvferry must not wait for a connection")
        return self.connections.connect(address, timeout_s or self.config.connect_s)

    def connect_nowait(
        self,
        addresses: list[Address],
        incarnation: bytes,
        reply: Callable[[Peer | None, KVFerryError | None], None],
        deadline: float,
    ) -> None:
        """Reach one incarnation at any of its (numeric) addresses; ``reply`` comes exactly once."""
        self.check_open()
        self.connections.dial(addresses, incarnation, reply, deadline)

    def describe(
        self,
        peer: Peer,
        ref: bytes,
        deadline: float,
        reply: Callable[[Any, KVFerryError | None], None],
    ) -> None:
        """:meth:`Peer.region` without blocking, under the lock. ``reply`` comes once, after it."""
        region_id, token = REF.unpack(ref)
        known = peer.regions.get(region_id)
        if known is not None and known.token == token:
            self.later(lambda: reply(known, None))
        else:
            peer.request(lambda number: Describe(number, region_id, token), deadline, reply)

    def notify(self, peer: Peer, body: bytes) -> None:
        """Send up to 64 KiB to the peer's ``on_notify``. Never blocks; delivery is not confirmed.

        Raises PeerLostError when the connection is over, UsageError when the body is too long.
        """
        if len(body) > 64 << 10:
            raise UsageError(f"a notification of {len(body)} bytes; at most {64 << 10} fit")
        self.check_open()
        with self.locked():
            if peer.lost is not None:
                raise PeerLostError("the connection is over", peer=peer.name)
            peer.send(Notify(body))

    # -- transfers --------------------------------------------------------------------------

    def read(
        self,
        local: Registration | Region,
        local_spans: Spans,
        remote: RemoteRegion,
        remote_spans: Spans,
        *,
        deadline_s: float | None = None,
        checksum: str | None = None,
        trail: Trail | None = None,
    ) -> Transfer:
        """Fill local spans with the bytes of the peer's remote spans, in order.

        Both lists must cover the same number of bytes; they may be cut differently. checksum:
        "off", "sampled" or "full", default is the engine's; then bytes that differ from the
        owner's are read once more by the next path, and are a CorruptError after that, and no local
        byte may be named twice. trail: where its events are kept, if it is a part of something;
        else it has a trail of its own. Returns at once, or after the copy when it is short. Raises
        BoundsError, NoPathError (with the reasons), BusyError, PeerLostError; what fails later is
        in the transfer.
        """
        return self._start(
            local, local_spans, remote, remote_spans, False, deadline_s, checksum, trail
        )

    def write(
        self,
        local: Registration | Region,
        local_spans: Spans,
        remote: RemoteRegion,
        remote_spans: Spans,
        *,
        deadline_s: float | None = None,
        checksum: str | None = None,
    ) -> Transfer:
        """Fill the peer's remote spans with local bytes; the counterpart of :meth:`read`.

        The remote region must be registered ``"read-write"``. After a failure the peer's bytes are
        undefined. With a checksum, bytes that differ are a CorruptError.
        """
        return self._start(local, local_spans, remote, remote_spans, True, deadline_s, checksum)

    def prepare(
        self,
        local: Registration | Region,
        local_spans: Spans,
        remote: RemoteRegion,
        remote_spans: Spans,
    ) -> Prepared:
        """Check and pair spans once, for transfers that are made again and again.

        For device memory the lists also stay on the device, which spares what a transfer of very
        many small blocks spends most of its time with. Raises BoundsError.
        """
        self.check_open()
        region = local.region if isinstance(local, Registration) else local
        spans = _paired(region, local_spans, remote, remote_spans)
        return Prepared(self._start_paired, region, remote, spans)

    def plan(
        self,
        local: Registration | Region,
        remote: RemoteRegion,
        *,
        write: bool = False,
        nbytes: int = 1 << 20,
        spans: int = 16,
    ) -> Plan:
        """Which paths would serve this pair for this size, best first, and why not the others."""
        self.check_open()
        region = local.region if isinstance(local, Registration) else local
        with self.locked():
            view = self.connections.view_for(remote)
            return self.moves.plan(region, remote, view, write, nbytes, spans)

    def statistics(self) -> dict[str, Any]:
        """Numbers for people and metrics, JSON types only."""
        with self.locked():
            stats: dict[str, Any] = {
                **self.moves.counts,
                "running": len(self.moves),
                "quarantined": len(self.moves.quarantine),
                "peers": self.connections.count(),
                "regions": len(self._registry),
                "bytes_by_path": dict(self.moves.bytes_by_path),
                "unusable": dict(self.unusable),
            }
        stats["transports"] = {n: t.statistics() for n, t in self._transports.items()}
        if self.handoff is not None:
            stats["handoff"] = self.handoff.statistics()
        return stats

    def _start(
        self,
        local: Registration | Region,
        local_spans: Spans,
        remote: RemoteRegion,
        remote_spans: Spans,
        write: bool,
        deadline_s: float | None,
        checksum: str | None,
        trail: Trail | None = None,
    ) -> Transfer:
        self.check_open()
        region = local.region if isinstance(local, Registration) else local
        spans = _paired(region, local_spans, remote, remote_spans)
        return self._start_paired(region, remote, spans, write, deadline_s, checksum, trail)

    def _start_paired(
        self,
        region: Region,
        remote: RemoteRegion,
        spans: PairedSpans,
        write: bool,
        deadline_s: float | None,
        checksum: str | None,
        trail: Trail | None = None,
        resident: ResidentSpans | None = None,
    ) -> Transfer:
        self.check_open()
        checksum = self.config.checksum if checksum is None else checksum
        if checksum not in CHECKSUMS:
            raise UsageError(f"checksum={checksum!r}: must be one of {', '.join(CHECKSUMS)}")
        limit_s = self.config.transfer_s if deadline_s is None else deadline_s
        if limit_s != limit_s:
            raise UsageError("deadline_s is not a number")
        deadline = self.clock.now() + limit_s
        return self.moves.start(region, remote, spans, write, deadline, checksum, trail, resident)

    # -- what transports call ----------------------------------------------------------------

    def complete(self, op: Operation, bytes_done: int, error: KVFerryError | None) -> None:
        """See transports.base.Services."""
        self.moves.complete(op, bytes_done, error)

    def access(
        self, region_id: int, token: bytes, generation: int, spans: Spans, *, write: bool
    ) -> Any:
        """See transports.base.Services."""
        return self._registry.access(region_id, token, generation, spans, write=write)

    def open_lane(
        self,
        peer: PeerView,
        address: str,
        deadline: float,
        hello: dict[str, Any],
        fd: int = -1,
        check: Callable[[], None] = _nothing,
    ) -> Any:
        """See transports.base.Services."""
        return self.connections.open_lane(peer, address, deadline, hello, fd, check)

    def run(self, work: Callable[[], None]) -> None:
        """See transports.base.Services."""
        self._movers.run(work)

    def set_aside(self, work: Callable[[], None]) -> None:
        """Do ``work`` in a mover, or here if none takes it.

        For the end of mappings: it waits for one in the making, which takes long, and the control
        thread must hear other peers meanwhile.
        """
        try:
            self._movers.run(work)
        except KVFerryError:
            work()

    # -- time -------------------------------------------------------------------------------

    def _tick(self) -> float:
        """Deadlines and heart-beats; called by the loop."""
        now = self.clock.now()
        with self.locked():
            self.connections.tick(now)
            if self.handoff is not None:
                self.handoff.tick(now)
            self.moves.tick(now)
            due = min(self.moves.due(), now + TICK_S)
            if self.handoff is not None:
                due = min(due, self.handoff.due())
        # What is overdue and cannot end yet must not keep the thread busy.
        return max(due, now + TICK_MIN_S)

    # -- the lock ---------------------------------------------------------------------------

    def locked(self) -> DeferringLock:
        """Hold the engine's lock; what was put off by :meth:`later` runs when it is free again."""
        return self._lock

    def later(self, action: Callable[[], None]) -> None:
        """Run ``action`` after the lock is free. Only while it is held."""
        self._lock.later(action)

    # -- what connections call, under the lock -------------------------------------------------

    def on_message(self, peer: Peer, message: Any) -> None:
        """A message that is not about the connection itself."""
        if isinstance(message, Notify):
            callback = self.on_notify
            if callback is not None:
                self.later(lambda: callback(peer, message.body))
        elif isinstance(message, Verify):
            self._answers.asked(peer, message)
        elif not self.connections.on_message(peer, message) and self.handoff is not None:
            self.handoff.on_message(peer, message)

    def on_peer_lost(self, peer: Peer, *, last: bool) -> None:
        """A connection is over; ``last`` if none to this incarnation is left."""
        if self.handoff is not None:
            self.handoff.on_peer_lost(peer)
        if not last:
            return
        self.moves.on_peer_lost(peer, peer.lost or PeerLostError("the peer is gone"))
        for transport in self._transports.values():
            leave = partial(transport.disconnect, peer.incarnation)
            is_mapped = transport.capabilities().family == "mapped"
            self.later(partial(self.set_aside, leave) if is_mapped else leave)

    @property
    def registry(self) -> Registry:
        """The regions of this engine; for the connections."""
        return self._registry


def _paired(
    local: Region, local_spans: Spans, remote: RemoteRegion, remote_spans: Spans
) -> PairedSpans:
    check_bounds(local_spans, local.nbytes, what="local")
    check_bounds(remote_spans, remote.nbytes, what="remote")
    return PairedSpans.of(local_spans, remote_spans)


class _Process:
    """The identity of this process: a random number that a forked child does not keep."""

    def __init__(self) -> None:
        self.id = os.urandom(16)

    def renew(self) -> None:
        self.id = os.urandom(16)


PROCESS = _Process()
os.register_at_fork(after_in_child=PROCESS.renew)


def _check_access(access: str) -> None:
    if access not in (READ, READ_WRITE):
        raise UsageError(f"access={access!r}: must be {READ!r} or {READ_WRITE!r}")
