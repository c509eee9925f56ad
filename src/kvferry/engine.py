"""The engine: regions, peers, transfers and deadlines. The one place that joins the pieces.

One lock guards the tables; it is held for microseconds, never while bytes move and never while user
code runs. One thread (``loop``) waits for control sockets and timers; copies run in their caller's
thread when they are short, in a mover or a lane's thread when they are long.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

from kvferry import transports
from kvferry.clock import Clock, SystemClock
from kvferry.config import EngineConfig
from kvferry.connections import Connections
from kvferry.deferring import DeferringLock
from kvferry.errors import (
    AbortedError,
    BusyError,
    ClosedError,
    DeadlineError,
    KVFerryError,
    NoPathError,
    PeerLostError,
    RegistrationError,
    StaleRegionError,
    UsageError,
)
from kvferry.loop import TICK_S, ControlLoop
from kvferry.memory.host import address_of, allocate_shared
from kvferry.movers import Movers
from kvferry.paths import Paths
from kvferry.peers import REF, Peer
from kvferry.planner import Plan
from kvferry.protocol.messages import Describe, Notify, RegionGone
from kvferry.regions import READ, READ_WRITE, Region, Spans, check_bounds, pair
from kvferry.registry import Registration, Registry
from kvferry.sockets import Address
from kvferry.transfer import Transfer
from kvferry.transports.base import Operation, PeerView, RemoteRegion, Transport

log = logging.getLogger(__name__)

TICK_MIN_S = 0.002
"""The loop looks at timers no more often than this."""
RATE_FROM_BYTES = 1 << 20
"""Smaller transfers say nothing about a path's speed."""


def _nothing() -> None:
    return None


class _Running:
    """A transfer and the path it is on."""

    def __init__(self, transfer: Transfer, op: Operation, plan: Plan, began: float) -> None:
        self.transfer = transfer
        self.op = op
        self.plan = plan
        self.began = began
        self.place = 0


class Engine:
    """Moves bytes between its own regions and those of peers.

    config: settings; default is EngineConfig.from_environment().
    clock: where time comes from; tests pass a fake one.
    extra: transports that are not in the registry, by name, such as a FaultyTransport.

    Usable as a context manager. All methods may be called from any thread unless they say
    otherwise. After :meth:`close`, or in a forked child, they raise ClosedError.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        clock: Clock | None = None,
        extra: dict[str, Transport] | None = None,
    ) -> None:
        self.config = (config or EngineConfig.from_environment()).with_defaults()
        self.clock: Clock = clock or SystemClock()
        self.process = PROCESS.id
        self.incarnation = os.urandom(16)
        self.on_notify: Callable[[Peer, bytes], None] | None = None
        self.handoff: Any = None
        self._pid = os.getpid()
        self._lock = DeferringLock()
        self._closed = False
        self._running: dict[int, _Running] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._numbers = itertools.count(1)
        self._counts = {"transfers": 0, "failed": 0, "bytes": 0, "demotions": 0}
        self._bytes_by_path: dict[str, int] = {}
        self._transports, self._unusable = transports.choose(self.config.transports, extra or {})
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
        self._paths = Paths(self._transports, self.clock, process=self.process, host=self.host)
        opened: list[Transport] = []
        try:
            self.connections.listen()
            for transport in self._transports.values():
                transport.open(self)
                opened.append(transport)
            self.loop.start()
        except BaseException:
            self._closed = True
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
        if self.handoff is not None:
            self.handoff.close()
        self._abort_all()
        self.connections.close()
        for transport in self._transports.values():
            transport.close()
        self._movers.close()
        self.loop.close()
        self._registry.close()

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

    def allocate(self, nbytes: int, *, access: str = READ) -> Registration:
        """New host memory that peers on this host can map. Blocks while pages are reserved.

        access: ``"read"`` lets peers read only, ``"read-write"`` lets them write too.
        Raises RegistrationError when there is not enough memory.
        """
        self.check_open()
        _check_access(access)
        memory = allocate_shared(nbytes)
        return self._registry.add(
            self, memory.address, nbytes, access, fd=memory.fd, array=memory.array(), memory=memory
        )

    def register(self, buffer: Any, *, access: str = READ) -> Registration:
        """Make existing host memory reachable for peers.

        buffer: a C-contiguous array, a writable buffer, a CPU tensor, or (address, nbytes). It must
        stay alive until the registration is closed. Registering the very same memory again returns
        the same registration, counted. Such memory cannot be mapped by peers: use
        :meth:`allocate` where there is a choice.
        """
        self.check_open()
        _check_access(access)
        address, nbytes = address_of(buffer)
        return self._registry.add(self, address, nbytes, access, keep=buffer)

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
                return any(r.op.local.region_id == region_id for r in self._running.values())

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
    ) -> Transfer:
        """Fill local spans with the bytes of the peer's remote spans, in order.

        Both lists must cover the same number of bytes; they may be cut differently. Returns at
        once, or after the copy when it is short. Raises BoundsError, NoPathError (with the
        reasons), BusyError, PeerLostError; what fails later is in the transfer.
        """
        return self._start(local, local_spans, remote, remote_spans, False, deadline_s)

    def write(
        self,
        local: Registration | Region,
        local_spans: Spans,
        remote: RemoteRegion,
        remote_spans: Spans,
        *,
        deadline_s: float | None = None,
    ) -> Transfer:
        """Fill the peer's remote spans with local bytes; the counterpart of :meth:`read`.

        The remote region must be registered ``"read-write"``. After a failure the peer's bytes are
        undefined.
        """
        return self._start(local, local_spans, remote, remote_spans, True, deadline_s)

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
            return self._plan(region, remote, view, write, nbytes, spans)

    def statistics(self) -> dict[str, Any]:
        """Numbers for people and metrics, JSON types only."""
        with self.locked():
            stats: dict[str, Any] = {
                **self._counts,
                "running": len(self._running),
                "peers": self.connections.count(),
                "regions": len(self._registry),
                "bytes_by_path": dict(self._bytes_by_path),
                "unusable": dict(self._unusable),
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
    ) -> Transfer:
        self.check_open()
        region = local.region if isinstance(local, Registration) else local
        check_bounds(local_spans, region.nbytes, what="local")
        check_bounds(remote_spans, remote.nbytes, what="remote")
        a, b, lengths = pair(local_spans, remote_spans)
        nbytes = int(lengths.sum())
        now = self.clock.now()
        deadline = now + (self.config.transfer_s if deadline_s is None else deadline_s)
        if deadline != deadline:
            raise UsageError("deadline_s is not a number")
        with self.locked():
            self.check_open()
            view = self.connections.view_for(remote)
            if not self._registry.has(region.region_id):
                raise StaleRegionError(
                    f"local region {region.region_id} was deregistered", fix="register it again"
                )
            number = next(self._numbers)
            transfer = Transfer(
                number, nbytes, write=write, peer_name=view.name, cancel=self._cancel
            )
            if nbytes == 0:
                self._counts["transfers"] += 1
                self.later(lambda: transfer._finish(0, None, 0.0))
                return transfer
            if len(self._running) >= self.config.transfers_max:
                raise BusyError(
                    f"{len(self._running)} transfers are in flight",
                    fix="wait for some to end, or raise transfers_max",
                )
            plan = self._plan(region, remote, view, write, nbytes, lengths.size)
            if not plan.paths:
                raise _no_path(plan, view.name)
            transfer.plan = plan
            op = Operation(number, write, region, remote, view, a, b, lengths, nbytes, deadline)
            self._counts["transfers"] += 1
            self._running[number] = _Running(transfer, op, plan, now)
            self._add_deadline(deadline, number)
        self._submit(number)
        return transfer

    def _plan(
        self,
        local: Region,
        remote: RemoteRegion,
        view: PeerView,
        write: bool,
        nbytes: int,
        spans: int,
    ) -> Plan:
        plan = self._paths.plan(local, remote, view, write=write, nbytes=nbytes, spans=spans)
        plan.rejected.update(self._unusable)
        return plan

    def _add_deadline(self, deadline: float, number: int) -> None:
        if len(self._deadlines) > 1024 + 2 * len(self._running):
            # Most of these have ended: with far deadlines they would stay for ever.
            self._deadlines = [item for item in self._deadlines if item[1] in self._running]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline, number))

    def _submit(self, number: int) -> None:
        """Start a transfer on its current path, or on the next that takes it."""
        with self.locked():
            running = self._running.get(number)
        if running is None:
            return
        path = running.plan.paths[running.place]
        running.transfer.path = path.name
        try:
            self._transports[path.transport].submit(running.op)
        except KVFerryError as error:
            error.located(peer=running.op.peer.name, path=path.name, stage="submit")
            self.complete(running.op, 0, error)
        except Exception as failure:
            log.exception("%s did not start; this is a bug in its transport", path.name)
            self.complete(running.op, 0, AbortedError(f"internal error: {failure}"))

    # -- what transports call ----------------------------------------------------------------

    def complete(self, op: Operation, bytes_done: int, error: KVFerryError | None) -> None:
        """See transports.base.Services."""
        again = False
        with self.locked():
            running = self._running.get(op.op_id)
            if running is None or running.op is not op:
                log.error("transfer %d ended twice; this is a bug in its transport", op.op_id)
                return
            if error is not None:
                again = self._fall_back(running, error)
            if not again:
                self._settle(running, bytes_done, error)
        if again:
            self._submit(op.op_id)

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

    def _fall_back(self, running: _Running, error: KVFerryError) -> bool:
        """Whether another path takes over. Only for faults of the path, not of the request."""
        op = running.op
        path = running.plan.paths[running.place]
        fault = isinstance(error, (PeerLostError, RegistrationError)) or error.code in (
            "unreachable",
            "protocol",
            "corrupt",
        )
        if not fault or op.stop is not None or self._closed:
            return False
        if not self.connections.has(op.remote.peer):
            return False
        self._counts["demotions"] += 1
        is_news = self._paths.demote(
            op.peer.incarnation, path.transport, path.direction, error.message
        )
        log.log(
            logging.WARNING if is_news else logging.DEBUG,
            "%s to %s failed and is tried last now: %s",
            path.name,
            op.peer.name,
            str(error),  # The error itself would keep its frames alive with the record.
        )
        if running.place + 1 >= len(running.plan.paths) or self.clock.now() >= op.deadline:
            return False
        running.place += 1
        op.began_at = 0.0
        return True

    def _settle(self, running: _Running, bytes_done: int, error: KVFerryError | None) -> None:
        """The end of a transfer, under the lock."""
        op, transfer = running.op, running.transfer
        del self._running[op.op_id]
        seconds = self.clock.now() - running.began
        if error is None:
            path = running.plan.paths[running.place]
            self._counts["bytes"] += op.nbytes
            self._bytes_by_path[path.name] = self._bytes_by_path.get(path.name, 0) + op.nbytes
            moving_s = self.clock.now() - (op.began_at or running.began)
            if op.nbytes >= RATE_FROM_BYTES and moving_s > 0:
                key = (op.peer.incarnation, path.transport, path.direction)
                self._paths.measured(*key, op.nbytes / moving_s)
        else:
            self._counts["failed"] += 1
            error.located(
                peer=op.peer.name, path=transfer.path, stage="move", bytes_done=bytes_done
            )
        self.later(lambda: transfer._finish(bytes_done, error, seconds))

    # -- aborts and time ----------------------------------------------------------------------

    def _cancel(self, transfer: Transfer) -> None:
        with self.locked():
            running = self._running.get(transfer.transfer_id)
            if running is not None:
                self._abort(running, AbortedError("the transfer was cancelled", stage="move"))

    def _abort(self, running: _Running, error: KVFerryError) -> None:
        transport = self._transports[running.plan.paths[running.place].transport]
        op = running.op
        op.stop = op.stop or error
        self.later(lambda: transport.abort(op, error))

    def _abort_all(self) -> None:
        with self.locked():
            for running in list(self._running.values()):
                self._abort(running, AbortedError("the engine is closing", stage="move"))

    def _tick(self) -> float:
        """Deadlines and heart-beats; called by the loop."""
        now = self.clock.now()
        with self.locked():
            self.connections.tick(now)
            if self.handoff is not None:
                self.handoff.tick(now)
            while self._deadlines and self._deadlines[0][0] <= now:
                _, number = heapq.heappop(self._deadlines)
                running = self._running.get(number)
                if running is not None:
                    took = now - running.began
                    self._abort(
                        running, DeadlineError(f"not complete after {took:.2f} s", stage="move")
                    )
            due = self._deadlines[0][0] if self._deadlines else now + TICK_S
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
        elif not self.connections.on_message(peer, message) and self.handoff is not None:
            self.handoff.on_message(peer, message)

    def on_peer_lost(self, peer: Peer, *, last: bool) -> None:
        """A connection is over; ``last`` if none to this incarnation is left."""
        if self.handoff is not None:
            self.handoff.on_peer_lost(peer)
        if not last:
            return
        for running in list(self._running.values()):
            if running.op.remote.peer == peer.incarnation:
                lost = peer.lost or PeerLostError("the peer is gone")
                self._abort(
                    running, PeerLostError(lost.message, peer=peer.name, stage="move", fix=lost.fix)
                )
        self._paths.forget(peer.incarnation)
        for transport in self._transports.values():
            self.later(partial(transport.disconnect, peer.incarnation))

    @property
    def registry(self) -> Registry:
        """The regions of this engine; for the connections."""
        return self._registry


class _Process:
    """The identity of this process: a random number that a forked child does not keep."""

    def __init__(self) -> None:
        self.id = os.urandom(16)

    def renew(self) -> None:
        self.id = os.urandom(16)


PROCESS = _Process()
os.register_at_fork(after_in_child=PROCESS.renew)


def _no_path(plan: Plan, peer_name: str) -> NoPathError:
    reasons = "; ".join(f"{name}: {why}" for name, why in plan.rejected.items())
    return NoPathError(
        f"no transport can serve this pair: {reasons}",
        reasons=plan.rejected,
        peer=peer_name,
        stage="plan",
        fix="make one of the reasons go away; 'tcp' needs the least",
    )


def _check_access(access: str) -> None:
    if access not in (READ, READ_WRITE):
        raise UsageError(f"access={access!r}: must be {READ!r} or {READ_WRITE!r}")
