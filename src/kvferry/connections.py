"""All connections of one engine: listening, accepting, dialling, lanes, and who is who.

A connection is a session in one direction: requests go from the caller to the callee, and each
engine dials the peers it wants something from. So two engines may hold two sessions, and no race
between simultaneous dials has to be settled. Everything runs under the engine's lock unless it
says so.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from kvferry import __version__, lanes, sockets
from kvferry.dials import Dial
from kvferry.errors import (
    BusyError,
    ClosedError,
    KVFerryError,
    PeerLostError,
    ProtocolError,
    StaleRegionError,
    UnreachableError,
)
from kvferry.loop import READ
from kvferry.peers import Peer
from kvferry.protocol import framing, messages
from kvferry.protocol.auth import CallerGreeting
from kvferry.protocol.messages import Describe, Description, Failure, Hello, RegionGone, Reject
from kvferry.protocol.session import Closed, Session, Timing
from kvferry.security import Security, Sparing
from kvferry.sockets import Address
from kvferry.transports.base import PeerView, RemoteRegion, Transport

if TYPE_CHECKING:
    from kvferry.engine import Engine

log = logging.getLogger(__name__)

STRANGERS_MAX = 128
"""Accepted connections whose hello is still awaited."""
ENDINGS_MAX = 256
"""Peers that are gone, and of which it is still known why."""
SESSIONS_PER_PEER_MAX = 16
"""Control connections of one incarnation."""
ACCEPT_PAUSE_S = 0.5
"""How long nothing is accepted when not even the spare descriptor is left."""


class Connections:
    """See the module. One per engine."""

    def __init__(self, engine: Engine, transports: dict[str, Transport]) -> None:
        self._engine = engine
        self._transports = transports
        self.host = sockets.host_id()
        self.addresses: list[str] = []
        self.security = Security(engine.config)
        self._refusals = Sparing()
        self._listeners: list[socket.socket] = []
        self._paused_until = 0.0
        self._unix_path = ""
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._peers: dict[bytes, list[Peer]] = {}
        self._strangers: dict[int, Peer] = {}
        self._dials: dict[int, Dial] = {}
        self._dialling: list[Dial] = []
        self._endings: dict[bytes, tuple[str, str]] = {}
        self._closed = False

    # -- listening --------------------------------------------------------------------------

    def listen(self) -> None:
        """Open the Unix socket and the TCP port. Raises ConfigError."""
        config = self._engine.config
        sock, path = sockets.listen_unix(config.directory, self._engine.incarnation.hex()[:16])
        self._unix_path = path
        self._add_listener(sock)
        self.addresses.append(str(Address("unix", path)))
        if not config.listen:
            return
        host, port = sockets.split_host_port(config.listen)
        self.security.check_listen(config, host)
        advertised = sockets.advertised_host(host, config.advertise, config.connect_s)
        tcp = sockets.listen_tcp(host, port)
        self._add_listener(tcp)
        self.addresses.append(str(Address("tcp", advertised, tcp.getsockname()[1])))

    def _add_listener(self, sock: socket.socket) -> None:
        self._listeners.append(sock)
        self._watch(sock)

    def _watch(self, listener: socket.socket) -> None:
        self._engine.loop.add(listener.fileno(), READ, lambda _ready: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        """Take one connection. Called by the loop."""
        with self._engine.locked():
            if self._closed:
                return
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError as error:
                self._refuse_without_descriptor(listener, error)
                return
            try:
                sock.setblocking(False)
                if sock.family != socket.AF_UNIX:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                where = _where(sock)
            except OSError:
                # Who called has hung up already.
                sock.close()
                return
            is_unix = sock.family == socket.AF_UNIX
            session = self.new_session(self.hello("control"), caller=False)
            tunnel = self.security.tunnel(is_unix=is_unix, caller=False)
            stranger = Peer(self._engine, sock, session, caller=False, address=where, tunnel=tunnel)
            objection = sockets.stranger(sock)
            if objection is not None:
                stranger.end(session.reject(objection))
                return
            self._make_room()
            self._strangers[stranger.fd] = stranger
            self._engine.loop.add(stranger.fd, READ, stranger.on_ready)

    def _make_room(self) -> None:
        """Send away who has said nothing for longest when there are too many.

        A peer says hello within a moment. So connections that idle, as those of a port scanner do,
        cannot keep it out.
        """
        if len(self._strangers) < STRANGERS_MAX:
            return
        oldest = next(iter(self._strangers.values()))
        error = BusyError(
            f"{STRANGERS_MAX} connections came after this one, and it has not said hello",
            fix="try again in a moment",
        )
        oldest.end(oldest.session.reject(error))

    def _refuse_without_descriptor(self, listener: socket.socket, error: OSError) -> None:
        """No descriptor is free: use the spare one to tell the caller, instead of spinning."""
        log.error(
            "%s: cannot accept a connection: %s; raise the limit of open files (ulimit -n)",
            self._engine.config.name,
            error.strerror,
        )
        if self._spare < 0:
            self._pause()
            return
        os.close(self._spare)
        try:
            sock, _ = listener.accept()
            with sock:
                why = "no free file descriptor; raise its limit of open files (ulimit -n)"
                payload = messages.pack(Reject(BusyError.code, why))
                sock.setblocking(False)
                sock.send(framing.encode(payload), socket.MSG_NOSIGNAL)
        except OSError:
            pass
        finally:
            self._take_spare()

    def _take_spare(self) -> None:
        try:
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._spare = -1

    def _pause(self) -> None:
        """Stop listening for a while: a queue that nobody can empty would keep the loop busy."""
        self._paused_until = self._engine.clock.now() + ACCEPT_PAUSE_S
        for listener in self._listeners:
            self._engine.loop.remove(listener.fileno())

    def _resume(self, now: float) -> None:
        if self._closed:
            return
        if self._spare < 0:
            self._take_spare()
        if self._paused_until and now >= self._paused_until:
            self._paused_until = 0.0
            for listener in self._listeners:
                self._watch(listener)

    # -- hellos -----------------------------------------------------------------------------

    def hello(self, purpose: str, **fields: Any) -> Hello:
        """What this engine says of itself."""
        return Hello(
            incarnation=self._engine.incarnation,
            name=self._engine.config.name[:256],
            purpose=purpose,
            key=fields.pop("key", bytes(16)),
            process=self._engine.process,
            host=self.host,
            software=__version__,
            transports=list(self._transports),
            addresses=self.addresses,
            **fields,
        )

    def new_session(self, hello: Hello, *, caller: bool) -> Session:
        config = self._engine.config
        timing = Timing(config.heartbeat_s, config.lost_s, config.connect_s)
        now, keys = self._engine.clock.now(), self.security.keys
        return Session(hello, caller=caller, timing=timing, now=now, keys=keys)

    def on_opened(self, peer: Peer, hello: Hello) -> None:
        """A hello was accepted by the session: decide what the connection is for."""
        if peer.caller:
            peer.opened(hello)
            self._keep(peer)
            dial = self._dials.pop(peer.fd, None)
            if dial is not None:
                dial.opened(peer)
        elif hello.purpose == "control":
            self._strangers.pop(peer.fd, None)
            full = self._full(hello.incarnation)
            if full is not None:
                peer.end(peer.session.reject(full))
                return
            peer.opened(hello)
            self._keep(peer)
            key = self.security.lane_key(hello.incarnation)
            peer.session.accept(self._engine.clock.now(), self.hello("control", key=key))
        else:
            self._strangers.pop(peer.fd, None)
            self._take_lane(peer, hello)

    def _full(self, incarnation: bytes) -> KVFerryError | None:
        """Why no further session is accepted. Lanes do not count: they belong to sessions."""
        if len(self._peers.get(incarnation, [])) >= SESSIONS_PER_PEER_MAX:
            return BusyError(
                f"this peer holds {SESSIONS_PER_PEER_MAX} sessions already",
                fix="connect once and share the peer between threads",
            )
        if incarnation not in self._peers and len(self._peers) >= self._engine.config.peers_max:
            return BusyError(
                f"{len(self._peers)} peers are connected",
                fix="raise peers_max there, or add engines",
            )
        return None

    def _keep(self, peer: Peer) -> None:
        self._peers.setdefault(peer.incarnation, []).append(peer)
        # A restarted peer has another Unix socket, but mostly the same port.
        place = (peer.view.tcp_address if peer.view else "") or peer.address
        self._engine.recorder.peer_up(peer.incarnation, peer.name, place, peer.caller)
        log.info("%s: peer %s is up (%s)", self._engine.config.name, peer.name, peer.address)

    def _take_lane(self, peer: Peer, hello: Hello) -> None:
        """Hand the socket of a lane to its transport."""
        transport = self._transports.get(hello.purpose)
        error: KVFerryError | None = None
        if transport is None or transport.capabilities().family != "streamed":
            error = ProtocolError(f"there is no transport {hello.purpose!r} with lanes here")
        elif (
            not self.security.is_lane_key(hello.incarnation, hello.key)
            or hello.incarnation not in self._peers
        ):
            error = ProtocolError("a lane needs an open session of the same peer")
        if error is not None or transport is None:
            assert error is not None
            peer.end(peer.session.reject(error))
            return
        peer.session.accept(self._engine.clock.now())
        try:
            sock, fd = peer.release()
        except KVFerryError:
            return  # The caller has hung up.
        self._engine.later(lambda: self._serve_lane(transport, sock, fd, hello))

    def _serve_lane(self, transport: Transport, sock: socket.socket, fd: int, hello: Hello) -> None:
        try:
            lanes.set_timeouts(sock)
            transport.accept(sock, fd, hello)
        except (KVFerryError, OSError, ValueError, RuntimeError) as error:
            log.warning("a %s lane of %s was not opened: %s", transport.name, hello.name, error)
            sock.close()

    # -- dialling ---------------------------------------------------------------------------

    def connect(self, text: str, timeout_s: float) -> Peer:
        """See Engine.connect. Blocks; without the lock."""
        address = Address.parse(text)
        addresses = [address]
        if address.scheme == "tcp":
            found = sockets.resolve(address.host, address.port, timeout_s)
            addresses = [Address("tcp", str(where[0]), address.port) for _, where in found]
            addresses = list(dict.fromkeys(addresses))
        done = threading.Event()
        box: list[Any] = [None, None]

        def reply(peer: Peer | None, error: KVFerryError | None) -> None:
            box[:] = peer, error
            done.set()

        with self._engine.locked():
            for peer in self.open_peers():
                if self._may_use(peer) and not peer.reached_at.isdisjoint(addresses):
                    return peer
            deadline = self._engine.clock.now() + timeout_s
            self.dial(addresses, b"", reply, deadline)
        done.wait()
        if box[1] is not None:
            raise _explain_loopback(box[1], address, addresses)
        found_peer: Peer = box[0]
        return found_peer

    def dial(
        self,
        addresses: list[Address],
        expected: bytes,
        reply: Callable[[Peer | None, KVFerryError | None], None],
        deadline: float,
    ) -> None:
        """Reach a peer at any address; ``reply`` comes once, without the lock."""
        with self._engine.locked():
            for peer in self._peers.get(expected, []) if expected else []:
                if self._may_use(peer):
                    self._engine.later(partial(reply, peer, None))
                    return
            for dial in self._dialling:
                if expected and dial.expected == expected:
                    dial.waiters.append(reply)
                    dial.deadline = max(dial.deadline, deadline)
                    return
            if self._closed:
                closed = ClosedError("the engine is closed")
                self._engine.later(lambda: reply(None, closed))
                return
            if len(self._dialling) >= self._engine.config.peers_max:
                error = BusyError(
                    f"{len(self._dialling)} connections are being made",
                    fix="wait for some to end, or raise peers_max",
                )
                self._engine.later(lambda: reply(None, error))
                return
            addresses = sorted(addresses, key=lambda a: a.scheme != "unix")
            dial = Dial(self._engine, addresses, expected, deadline)
            dial.waiters.append(reply)
            self._dialling.append(dial)
            dial.start()

    def start_connect(self, address: Address) -> socket.socket:
        """A socket that is connecting; the simulator gives one of its own network."""
        return sockets.start_connect(address, 2.0)

    def adopt(self, peer: Peer, dial: Dial) -> None:
        self._dials[peer.fd] = dial

    def dialled(self, dial: Dial) -> None:
        if dial in self._dialling:
            self._dialling.remove(dial)

    def unix_address_of(self, peer: Peer) -> Address | None:
        """The Unix socket of a peer that was reached by TCP, if it lies on this host."""
        view = peer.view
        if view is None or view.host != self.host:
            return None
        for text in peer.offered_addresses:
            if text.startswith("unix:") and os.path.exists(text.removeprefix("unix:")):
                return Address.parse(text)
        return None

    def open_lane(
        self,
        peer: PeerView,
        address: str,
        deadline: float,
        hello: dict[str, Any],
        fd: int,
        check: Callable[[], None],
    ) -> socket.socket:
        """See transports.base.Services.open_lane. Blocks; without the lock."""
        where = Address.parse(address)
        greeting = CallerGreeting(
            self.hello(key=peer.key, expected=peer.incarnation, **hello), self.security.keys
        )
        tunnel = self.security.tunnel(is_unix=where.scheme == "unix", caller=True)
        now = self._engine.clock.now
        asked_at, what = now(), str(hello.get("purpose", ""))
        note = partial(self._engine.recorder.peer, peer.incarnation)
        try:
            lane = lanes.connect(where, greeting, tunnel, fd, now, deadline, check)
        except KVFerryError as error:
            note("lane_failed", what, str(error))
            raise
        note("lane_opened", what, now() - asked_at)
        return lane

    # -- who is who -------------------------------------------------------------------------

    def open_peers(self) -> list[Peer]:
        return [peer for peers in self._peers.values() for peer in peers if peer.is_open()]

    def count(self) -> int:
        return sum(len(peers) for peers in self._peers.values())

    def has(self, incarnation: bytes) -> bool:
        return any(peer.is_open() for peer in self._peers.get(incarnation, []))

    def heard_at(self, incarnation: bytes) -> float:
        """When any connection to an incarnation last heard it; minus infinity if there is none."""
        peers = self._peers.get(incarnation, [])
        return max((peer.session.heard_at for peer in peers), default=float("-inf"))

    def find(self, incarnation: bytes) -> Peer:
        """The connection to use for an incarnation. Raises PeerLostError."""
        for peer in self._peers.get(incarnation, []):
            if peer.is_open() and peer.caller:
                return peer
        name, why = self._endings.get(incarnation, ("", ""))
        raise PeerLostError(
            "there is no connection to the peer that owns this region"
            + (f"; the last one ended because: {why}" if why else ""),
            peer=name,
            stage="plan",
            fix="connect again; if its process was restarted, its regions are new ones",
        )

    def caller_of(self, incarnation: bytes, other: Peer) -> Peer | None:
        """An open connection that we made to an incarnation, but for ``other``."""
        for peer in self._peers.get(incarnation, []):
            if peer is not other and peer.caller and peer.is_open():
                return peer
        return None

    def _may_use(self, peer: Peer) -> bool:
        """Whether we made this connection, and it is not about to be replaced."""
        return peer.caller and peer.is_open() and self.upgrading(peer) is None

    def upgrading(self, peer: Peer) -> Dial | None:
        """The dial that is about to replace this connection by a better one."""
        return next((dial for dial in self._dialling if dial.replaces(peer)), None)

    def view_for(self, remote: RemoteRegion) -> PeerView:
        """The connection's facts for a transfer with a peer's region.

        Raises PeerLostError when there is no connection, StaleRegionError when the region's
        description is not from this connection or was taken back: its descriptors are closed.
        """
        view = self.find(remote.peer).view
        assert view is not None
        known = (peer.regions.get(remote.region_id) for peer in self._peers[remote.peer])
        if not any(region is remote for region in known):
            raise StaleRegionError(
                f"region {remote.region_id} of {view.name} is gone, or the connection is a new one",
                peer=view.name,
                fix="ask for it again: peer.region(ref), with a reference that is still good",
            )
        return view

    # -- messages ---------------------------------------------------------------------------

    def on_message(self, peer: Peer, message: Any) -> bool:
        """Handle what is about regions; False if it is not."""
        if isinstance(message, Describe):
            self._describe(peer, message)
        elif isinstance(message, RegionGone):
            peer.forget_region(message.region_id)
        else:
            return False
        return True

    def _describe(self, peer: Peer, message: Describe) -> None:
        try:
            registration = self._engine.registry.find(message.region_id, message.token)
        except StaleRegionError as error:
            peer.send(Failure(message.request_id, error.code, messages.explain(error)))
            return
        region = registration.region
        unix = peer.sock.family == socket.AF_UNIX
        exports = {n: e for n, e in registration.exports.items() if e.fd < 0 or unix}
        owners = [name for name, export in exports.items() if export.fd >= 0]
        description = Description(
            request_id=message.request_id,
            region_id=region.region_id,
            kind=region.kind,
            device=region.device,
            nbytes=region.nbytes,
            generation=region.generation,
            access=region.access,
            exports={name: export.data for name, export in exports.items()},
            fd_owners=owners,
        )
        peer.send(description, tuple(exports[name].fd for name in owners))

    # -- time and ends ------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        self._resume(now)
        for peer in [*self.all_peers(), *self._strangers.values(), *self._adopted()]:
            if peer.lost is None:
                peer.tick(now)
        for dial in list(self._dialling):
            dial.tick(now)

    def all_peers(self) -> list[Peer]:
        return [peer for peers in self._peers.values() for peer in peers]

    def _adopted(self) -> list[Peer]:
        return [dial.peer for dial in self._dials.values() if dial.peer is not None]

    def on_lost(self, peer: Peer) -> None:
        """A connection has ended."""
        self._strangers.pop(peer.fd, None)
        dial = self._dials.pop(peer.fd, None)
        known = self._peers.get(peer.incarnation, [])
        if peer in known:
            known.remove(peer)
            if not known:
                del self._peers[peer.incarnation]
            last = not self.has(peer.incarnation)
            assert peer.lost is not None
            if peer.caller:
                self._endings.pop(peer.incarnation, None)
                self._endings[peer.incarnation] = (peer.name, peer.lost.message)
                if len(self._endings) > ENDINGS_MAX:
                    del self._endings[next(iter(self._endings))]
            why = str(peer.lost)
            self._engine.recorder.peer(peer.incarnation, "peer_gone", peer.name, why)
            if not self._closed:
                log.info("%s: peer %s is gone: %s", self._engine.config.name, peer.name, why)
            # What still runs hears that the peer is lost before it finds its regions gone.
            self._engine.on_peer_lost(peer, last=last)
            for region_id in list(peer.regions):
                peer.forget_region(region_id)
        elif not peer.caller and not self._closed:
            self._log_refusal(peer)
        if dial is not None:
            assert peer.lost is not None
            dial.lost(peer, peer.lost)

    def _log_refusal(self, peer: Peer) -> None:
        name, why = self._engine.config.name, str(peer.lost)
        if isinstance(peer.lost, UnreachableError):
            # Who hangs up without a word is a port scanner or an engine that sweeps its directory.
            log.debug("%s: refused a connection from %s: %s", name, peer.address, why)
            return
        passes, left_out = self._refusals.passes(self._engine.clock.now())
        if passes:
            more = f" ({left_out} more were refused and not logged)" if left_out else ""
            log.warning("%s: refused a connection from %s: %s%s", name, peer.address, why, more)

    def drop(self, peer: Peer, why: str) -> None:
        """End a connection from this side."""
        peer.end([Closed(PeerLostError(why, peer=peer.name))])

    def forget(self, region: RemoteRegion) -> None:
        for transport in self._transports.values():
            transport.forget(region)

    def close(self) -> None:
        """Stop listening and leave every peer."""
        with self._engine.locked():
            self._closed = True
            for sock in self._listeners:
                self._engine.loop.remove(sock.fileno())
                # A forked child may hold a copy: without this, callers would go on being queued.
                sockets.hang_up(sock)
            self._listeners.clear()
            if self._unix_path:
                try:
                    os.unlink(self._unix_path)
                except OSError:
                    pass
            for dial in list(self._dialling):
                dial.stop()
            for peer in [*self.all_peers(), *self._strangers.values(), *self._adopted()]:
                self.drop(peer, "the engine was closed")
            if self._spare >= 0:
                os.close(self._spare)
                self._spare = -1


def _where(sock: socket.socket) -> str:
    if sock.family == socket.AF_UNIX:
        return "unix:(incoming)"
    host, port = sock.getpeername()[:2]
    return str(Address("tcp", host, port))


def _explain_loopback(error: KVFerryError, address: Address, tried: list[Address]) -> KVFerryError:
    """Name the classic trap: the own name maps to 127.0.1.1, where nobody listens."""
    hosts = {item.host for item in tried if item.scheme == "tcp"} - {address.host}
    loopback = sorted(host for host in hosts if sockets.is_loopback(host))
    if loopback and isinstance(error, UnreachableError):
        error.fix = (
            f"the name {address.host!r} resolves to {', '.join(loopback)} on this machine: use the "
            "address that the peer prints at its start"
        )
    return error
