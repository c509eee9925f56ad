"""One engine process of the simulation: the real control plane over a virtual kernel.

Sessions, peers, dials, connections, the hand-off and its tables are the ones that run in
production. Virtual are the sockets and the loop that watches them, time, the moving of bytes, and
what happens to a process: it is frozen, killed, or started again at the same address.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvferry.config import EngineConfig
from kvferry.connections import Connections
from kvferry.deferring import DeferringLock
from kvferry.engine import Engine
from kvferry.handoff import Claim, HandOff
from kvferry.peers import Peer
from kvferry.protocol.handoff import AbortRead, OfferEnded, Send
from kvferry.regions import Spans
from kvferry.registry import Registration, Registry
from kvferry.sockets import Address
from kvferry.telemetry.recorder import Recorder
from kvferry.telemetry.trail import Trail
from kvferry.testing.simulation.invariants import LOST_S
from kvferry.testing.simulation.pool import BlockPool
from kvferry.testing.simulation.reads import Reads
from kvferry.testing.simulation.schedule import ProcessClock
from kvferry.testing.simulation.serving import Serving
from kvferry.transfer import Transfer
from kvferry.transports.base import RemoteRegion

if TYPE_CHECKING:
    from kvferry.testing.simulation.world import World

TICK_S = 0.1
TICK_MIN_S = 0.002
PORT = 7000


class VirtualLoop:
    """Which sockets a process watches, and which of them are ready; in the place of the loop."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.watched: dict[int, tuple[int, Callable[[int], None]]] = {}
        self._maybe: dict[int, None] = {}

    def add(self, fd: int, events: int, handler: Callable[[int], None]) -> None:
        self.watched[fd] = (events, handler)
        self.look_at(fd)

    def change(self, fd: int, events: int) -> None:
        if fd in self.watched:
            self.watched[fd] = (events, self.watched[fd][1])
            self.look_at(fd)

    def remove(self, fd: int) -> None:
        self.watched.pop(fd, None)

    def wake(self) -> None:
        self._process.poll_soon()

    def is_here(self) -> bool:
        return False

    def look_at(self, fd: int) -> None:
        """Something may have happened at a socket."""
        self._maybe[fd] = None
        self._process.poll_soon()

    def handle(self) -> None:
        """Call the handlers of what is ready."""
        maybe, self._maybe = self._maybe, {}
        for fd in maybe:
            sock = self._process.world.network.files.get(fd)
            if fd not in self.watched or sock is None:
                continue
            events, handler = self.watched[fd]
            ready = sock.ready() & events
            if ready:
                handler(ready)
                if fd in self.watched and sock.ready() & self.watched[fd][0]:
                    self.look_at(fd)


class VirtualLock(DeferringLock):
    """Callbacks run when the lock is free; sometimes other threads were faster, and did more."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process
        self._late: list[Callable[[], None]] = []
        self._running = False

    def __exit__(self, *error: object) -> None:
        outermost = self._depth == 1 and self._after and not self._running
        if outermost and (self._late or self._process.rng.random() < 0.15):
            if not self._late:
                self._process.after(self._process.rng.random() * 0.002, self._run_late)
            self._late += self._after
            self._after = []
        super().__exit__(*error)

    def _run_late(self) -> None:
        self._running = True
        with self:
            self._after, self._late = self._late + self._after, []
        self._running = False


class VirtualConnections(Connections):
    """The real connections, with sockets of the virtual network."""

    def __init__(self, engine: VirtualEngine, process: Process) -> None:
        super().__init__(engine, {})
        # No descriptor of this machine is held for a process that does not exist.
        os.close(self._spare)
        self._spare = -1
        self._process = process
        self.host = process.host

    def listen(self) -> None:
        listener = self._process.world.network.listen(self._process)
        self._add_listener(listener)  # type: ignore[arg-type]
        self.addresses.append(str(Address("tcp", self.host, PORT)))

    def start_connect(self, address: Address) -> Any:
        return self._process.world.network.connect(self._process, address)

    def _take_spare(self) -> None:
        """There is none; see above."""


class VirtualEngine(Engine):
    """The real engine without threads, files and transports."""

    def __init__(self, config: EngineConfig, process: Process) -> None:
        self.config = config
        self.clock = process.clock
        self.process = process.incarnation
        self.incarnation = process.incarnation
        self.on_notify = None
        self.handoff = None
        self.recorder = Recorder(process.clock, config.name)
        self.unusable = {}
        self._pid = os.getpid()
        self._closed = False
        self._transports = {}
        self._virtual = process
        self._lock = VirtualLock(process)
        self._registry = Registry({})
        self.loop = VirtualLoop(process)  # type: ignore[assignment]
        self.moves = process.reads  # type: ignore[assignment]
        self.connections = VirtualConnections(self, process)
        self.connections.listen()

    def read(
        self,
        local: Any,
        local_spans: Spans,
        remote: RemoteRegion,
        remote_spans: Spans,
        *,
        deadline_s: float | None = None,
        checksum: str | None = None,
        trail: Trail | None = None,
    ) -> Transfer:
        with self.locked():
            self.connections.view_for(remote)
        limit_s = self.config.transfer_s if deadline_s is None else deadline_s
        return self._virtual.reads.start(local_spans, remote, remote_spans, limit_s)

    def set_aside(self, work: Callable[[], None]) -> None:
        """There is one thread only."""
        work()

    def on_message(self, peer: Peer, message: Any) -> None:
        self._virtual.world.note(self._virtual.name, "hears", message)
        super().on_message(peer, message)

    def turn(self) -> float:
        """One turn of the control thread: what peers said first, then time. When to tick next."""
        now = self.clock.now()
        with self.locked():
            self.connections.tick(now)
            self.handoff.tick(now)
            self.moves.tick(now)
            due = min(self.handoff.due(), self.moves.due(), now + TICK_S)
        return float(max(due, now + TICK_MIN_S))

    def close(self) -> None:
        """The steps of the real close that can be seen from outside."""
        with self.locked():
            if self._closed:
                return
            self._closed = True
        self.handoff.close()
        with self.locked():
            self.moves.abort_all()
        self.connections.close()


class WatchedHandOff(HandOff):
    """The real hand-off. Its ids come from the seed, and what it is told to do is watched."""

    def __init__(self, engine: VirtualEngine, pool: Registration, process: Process) -> None:
        self.process = process
        super().__init__(engine, pool, process.pool.geometry)

    def _new_id(self) -> bytes:
        made = self.process.new_id()
        self.process.world.watch.named(self.process, made)
        return made

    def on_peer_lost(self, peer: Peer) -> None:
        super().on_peer_lost(peer)
        self.process.world.watch.session_lost(self.process, peer)

    def _read(self, claim: Claim, *place: Any) -> Any:
        self.process.reads.claim_id = claim.claim_id
        return super()._read(claim, *place)

    def _do(self, actions: list[Any]) -> None:
        watch = self.process.world.watch
        for action in actions:
            if isinstance(action, OfferEnded):
                watch.offer_released(self.process, action)
            elif isinstance(action, AbortRead):
                watch.read_stopping(self.process, action.claim_id)
            elif isinstance(action, Send):
                watch.said(self.process, action.session, action.message)
        super()._do(actions)


class Process:
    """One incarnation at one address. ``name``: such as ``D1``, or ``D1'2`` after a restart."""

    def __init__(self, world: World, host: str, name: str, number: int, pool: BlockPool) -> None:
        self.world = world
        self.host = host
        self.name = name
        self.number = number
        self.pool = pool
        self.seed = f"{world.seed}/{name}"
        self.rng = random.Random(self.seed)
        self.clock = ProcessClock(world.schedule, 1e4 * (1 + number))
        self.incarnation = self.rng.randbytes(16)
        self.is_gone = False
        self.is_frozen = False
        self.frozen_s = 0.0
        self.disturbed_at = -1e9
        self._frozen_at = 0.0
        self._put_off: list[Callable[[], None]] = []
        self._polling = False
        self._due = 0.0
        self._ids = 0
        self.reads = Reads(self)
        self.serving = Serving(self)
        self.engine = VirtualEngine(self._config(), self)
        memory = self.engine.registry.add(self.engine, 4096, len(pool.memory), "read")
        world.memories[memory.region.token] = (self, pool)
        self.ferry = WatchedHandOff(self.engine, memory, self)
        world.spoil(self)
        self.after(0.0, self._turn)

    def _config(self) -> EngineConfig:
        return EngineConfig(
            name=self.name,
            directory="/",
            heartbeat_s=0.4,
            lost_s=LOST_S,
            connect_s=1.5,
            lease_s=self.world.lease_s,
            offer_s=3.0,
            transfer_s=4.0,
        )

    def new_id(self) -> bytes:
        self._ids += 1
        # What tells two incarnations apart is random, as in production; the rest is for people.
        return self.incarnation[:11] + self.number.to_bytes(2, "big") + self._ids.to_bytes(3, "big")

    # -- running --------------------------------------------------------------------------------

    def after(self, seconds: float, work: Callable[[], None]) -> None:
        """Let this process do something, unless it is dead by then, or as soon as it thaws."""
        self.world.schedule.after(seconds, lambda: self._run(work))

    def _run(self, work: Callable[[], None]) -> None:
        if self.is_gone:
            return
        if self.is_frozen:
            self._put_off.append(work)
            return
        work()
        self.world.watch.after_step(self)

    def wake(self, fd: int) -> None:
        """The kernel: a socket has changed."""
        if not self.is_gone:
            self.engine.loop.look_at(fd)  # type: ignore[attr-defined]

    def poll_soon(self) -> None:
        if not self._polling:
            self._polling = True
            self.after(self.rng.random() * 0.0003, self._poll)

    def _poll(self) -> None:
        self._polling = False
        self._turn()

    def _turn(self) -> None:
        """What the control thread does: sockets first, then time if that is due."""
        self.engine.loop.handle()  # type: ignore[attr-defined]
        now = self.clock.now()
        if now >= self._due - 1e-9 and not self.is_gone:
            self._due = self.engine.turn()
            self.after(self._due - now, self._turn)

    # -- what happens to it ---------------------------------------------------------------------

    def freeze(self) -> None:
        self.is_frozen = True
        self._frozen_at = self.world.schedule.now

    def thaw(self) -> None:
        """Go on. Its threads run in any order, so what was put off does too."""
        if not self.is_frozen or self.is_gone:
            return
        self.is_frozen = False
        self.frozen_s += self.world.schedule.now - self._frozen_at
        self.disturbed_at = self.world.schedule.now
        work, self._put_off = self._put_off, []
        self.rng.shuffle(work)
        for piece in work:
            self.after(self.rng.random() * 0.002, piece)

    def frozen_total_s(self) -> float:
        now = self.world.schedule.now
        return self.frozen_s + (now - self._frozen_at if self.is_frozen else 0.0)

    def die(self, *, power: bool) -> None:
        """It is killed and its kernel says so, or its host loses power and nobody says anything."""
        self.is_gone = True
        for sock in self.world.network.sockets_of(self):
            sock.vanish() if power else sock.close()
        listener = self.world.network.listeners.get(self.host)
        if listener is not None and listener.owner is self:
            backlog, listener.backlog = list(listener.backlog), type(listener.backlog)()
            for sock in backlog:
                sock.vanish() if power else sock.close()
            listener.is_closed = True
