"""Connections to other engines: a session and its socket, and how one comes about.

Everything here runs under the engine's lock and never blocks, but for :meth:`Peer.ping` and
:meth:`Peer.region`, which wait for an answer and must be called without it.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvferry import sockets, tls
from kvferry.errors import (
    AuthError,
    BusyError,
    DeadlineError,
    KVFerryError,
    PeerLostError,
    ProtocolError,
    RegistrationError,
    UsageError,
    from_code,
)
from kvferry.loop import READ, WRITE
from kvferry.protocol import framing
from kvferry.protocol.messages import (
    Describe,
    Description,
    Digests,
    Failure,
    Hello,
    Message,
    Ping,
    Pong,
)
from kvferry.protocol.session import Closed, Event, Opened, Received, Session
from kvferry.sockets import Address
from kvferry.transports.base import Export, PeerView, RemoteRegion

if TYPE_CHECKING:
    from kvferry.engine import Engine

log = logging.getLogger(__name__)

OUTBOX_BYTES_MAX = 16 << 20
"""Control bytes that may wait for a peer that does not read; then it counts as lost."""
PENDING_MAX = 8192
"""Requests to one peer that may wait for their answers."""
HEAR_OUT_MAX = 256
"""Reads from a broken connection before it is closed."""
DESCRIPTORS_HELD_MAX = 256
"""Descriptors that a peer may send ahead of the messages they belong to."""

STOPPED_HEARTBEATS = 1.5
"""After so many heart-beats of silence it is asked whether the peer's process is stopped."""

REF = struct.Struct("<Q16s")
"""A region's reference, as owners hand it around: id and token."""

Reply = Callable[[Any, KVFerryError | None], None]


class Peer:
    """One connection to another engine, which is known by its incarnation.

    Attributes: ``incarnation`` (16 bytes), ``name``, ``address``, ``view`` (facts for transports).
    """

    def __init__(
        self,
        engine: Engine,
        sock: socket.socket,
        session: Session,
        *,
        caller: bool,
        address: str,
        tunnel: tls.Tunnel | None = None,
    ) -> None:
        self.engine = engine
        self._tunnel = tunnel
        self.caller = caller
        self.address = address
        self.incarnation = b""
        self.name = address
        self.view: PeerView | None = None
        self.lost: KVFerryError | None = None
        self.sock = sock
        self.session = session
        self.fd = sock.fileno()
        self.is_unix = sock.family == socket.AF_UNIX
        self.regions: dict[int, RemoteRegion] = {}
        self.offered_addresses: list[str] = []
        self.reached_at: set[Address] = set()
        self._outbox: deque[_Outgoing] = deque()
        self._outbox_bytes = 0
        self._waits_for = READ
        self._broken = ""
        self._is_handling = False
        self._fds: deque[int] = deque()
        self._pending: dict[int, tuple[float, Reply, Message]] = {}
        self._next_id = 1

    def __repr__(self) -> str:
        state = "lost" if self.lost else self.session.state.value
        return f"<Peer {self.name} {self.incarnation.hex()[:8]} {state} {self.address}>"

    # -- for users ---------------------------------------------------------------------------

    def is_open(self) -> bool:
        """Whether the peer can be reached now, as far as is known. Never blocks."""
        return self.lost is None and self.view is not None

    def ping(self, timeout_s: float = 5.0) -> float:
        """Control round trip in seconds. Blocks. Raises DeadlineError or PeerLostError."""
        begin = self.engine.clock.now()
        self._ask(Ping, timeout_s, "ping")
        return self.engine.clock.now() - begin

    def region(self, ref: bytes, timeout_s: float = 5.0) -> RemoteRegion:
        """The peer's region behind a reference that its owner handed out.

        Cached per connection: only the first call for a region asks the peer, and blocks. Raises
        StaleRegionError when the peer does not know it (any more), DeadlineError, PeerLostError.
        """
        if len(ref) != REF.size:
            raise UsageError(f"a region reference has {REF.size} bytes, not {len(ref)}")
        self.engine.check_open()
        region_id, token = REF.unpack(ref)
        known = self.regions.get(region_id)
        if known is not None and known.token == token:
            return known
        found = self._ask(lambda number: Describe(number, region_id, token), timeout_s, "describe")
        assert isinstance(found, RemoteRegion)
        return found

    def _ask(self, make: Callable[[int], Message], timeout_s: float, stage: str) -> Any:
        """Send a request and block for the answer."""
        self.engine.check_open()
        if self.engine.loop.is_here():
            raise UsageError("a callback of kvferry must not wait for an answer of a peer")
        # A bare lock wakes its waiter with a fifth of an Event's work.
        answered = threading.Lock()
        answered.acquire()
        box: list[Any] = [None, None]

        def reply(answer: Any, error: KVFerryError | None) -> None:
            box[:] = answer, error
            answered.release()

        with self.engine.locked():
            self.request(make, self.engine.clock.now() + timeout_s, reply)
        answered.acquire()
        if box[1] is not None:
            raise box[1].located(peer=self.name, stage=stage)
        return box[0]

    # -- requests, under the lock -------------------------------------------------------------

    def request(self, make: Callable[[int], Message], deadline: float, reply: Reply) -> None:
        """Send a request; ``reply(answer, error)`` comes exactly once, after the lock is free."""
        if self.lost is not None:
            error = self.lost
            self.engine.later(lambda: reply(None, error))
            return
        if len(self._pending) >= PENDING_MAX:
            raise BusyError(
                f"{PENDING_MAX} requests wait for answers",
                peer=self.name,
                fix="wait for some of them; the peer may be frozen",
            )
        number = self._next_id
        self._next_id += 1
        message = make(number)
        self._pending[number] = (deadline, reply, message)
        self.send(message)

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        """Queue a message and send what fits. What goes wrong ends the session, not the caller."""
        if self.lost is not None:
            return
        try:
            self.session.send(message, self.engine.clock.now(), fds)
        except PeerLostError:
            return
        self.flush()

    def flush(self) -> None:
        """Send what is queued as far as the socket takes it."""
        if self._broken:
            self.session.data_to_send()
            return
        try:
            for data, fds in self._data_to_send():
                # Nearly always the socket takes a message whole, and nothing need be kept.
                sent = 0 if self._outbox or fds else sockets.send(self.sock, data, ())
                if sent < len(data):
                    self._outbox.append(_Outgoing(memoryview(data)[sent:], fds))
                    self._outbox_bytes += len(data) - sent
            while self._outbox:
                first = self._outbox[0]
                sent = sockets.send(self.sock, first.data, first.fds)
                if sent == 0:
                    break
                self._outbox_bytes -= sent
                first.data = first.data[sent:]
                first.drop()
                if not first.data:
                    self._outbox.popleft()
            for waiting in self._outbox:
                waiting.keep()
        except OSError as error:
            self._broken = f"the connection broke: {error.strerror}"
            # The messages that are being handled come first: some may be left.
            if not self._is_handling:
                self._end_broken()
            return
        if self._outbox_bytes > OUTBOX_BYTES_MAX:
            self.end(self.session.receive_eof(f"the peer left {self._outbox_bytes} bytes unread"))
            return
        wanted = READ | WRITE if self._outbox else READ
        if wanted != self._waits_for:
            self._waits_for = wanted
            self.engine.loop.change(self.fd, wanted)

    def _data_to_send(self) -> list[tuple[bytes, tuple[int, ...]]]:
        """What the session says, sealed where there is TLS."""
        queued = self.session.data_to_send()
        if self._tunnel is None:
            return queued
        # Also without anything to say: shaking hands has words of its own.
        sealed = self._tunnel.seal(b"".join(data for data, _ in queued))
        return [(sealed, ())] if sealed else []

    def _end_broken(self) -> None:
        """Take what the peer said before it hung up, then end.

        It may have said why it did. And a claim that waits here, unread since this process was
        frozen, must reach its offer: then the end of the session releases the offer, which would
        wait for its time otherwise.
        """
        for _ in range(HEAR_OUT_MAX):
            if self.lost is not None or not self._read():
                break
        self.end(self.session.receive_eof(self._broken))

    # -- what the loop saw, under the lock ------------------------------------------------------

    def on_ready(self, ready: int) -> None:
        """The socket is ready. Called by the loop."""
        with self.engine.locked():
            if self.lost is not None:
                return
            if ready & WRITE:
                self.flush()
            if ready & READ and self.lost is None:
                self._read()
                if self._broken and self.lost is None:
                    self._end_broken()

    def tick(self, now: float) -> None:
        if self._is_stopped(now):
            self.end(self.session.suspended(now))
            return
        self._handle(self.session.tick(now))
        if self.lost is None:
            self.flush()
        late = [n for n, (deadline, _, _) in self._pending.items() if now >= deadline]
        for number in late:
            reply = self._pending.pop(number)[1]
            error = DeadlineError(
                "the peer did not answer in time",
                peer=self.name,
                fix="it is overloaded, frozen or cut off; its log may say more",
            )
            self.engine.later(call_later(reply, None, error))

    def _is_stopped(self, now: float) -> bool:
        """Whether the silent process at the other end is stopped, as far as the system tells.

        Silence alone is no proof: it may compute for long and hold its interpreter lock.
        """
        patience_s = STOPPED_HEARTBEATS * self.engine.config.heartbeat_s
        if not self.is_unix or self.session.silence_s(now) < patience_s:
            return False
        return sockets.is_stopped(sockets.peer_pid(self.sock))

    def _read(self) -> bool:
        """Take what is there; whether there may be more."""
        try:
            data, fds = sockets.receive(self.sock, is_unix=self.is_unix)
        except BlockingIOError:
            return False
        except KVFerryError as error:
            self.end([Closed(error.located(peer=self.name))])
            return False
        except OSError as error:
            self.end(self.session.receive_eof(f"the connection broke: {error.strerror}"))
            return False
        self._fds.extend(fds)
        if len(self._fds) > DESCRIPTORS_HELD_MAX:
            self.end([Closed(ProtocolError("too many descriptors", peer=self.name))])
        elif not data:
            self.end(self.session.receive_eof())
        else:
            self._is_handling = True
            try:
                self._handle(self._receive(data))
            finally:
                self._is_handling = False
            if self.lost is None:
                self.flush()
            return True
        return False

    def _receive(self, data: bytes) -> list[Event]:
        """What bytes from the socket mean, opened where there is TLS."""
        if self._tunnel is not None:
            try:
                plain = self._tunnel.open(data)
            except AuthError as error:
                if self.caller or not data.startswith(framing.MAGIC):
                    return [Closed(error.located(peer=self.name))]
                # A caller without TLS understands plain words only.
                self._tunnel = None
                return self.session.reject(tls.refusal("TLS is on where the call arrived only"))
            data = plain
        return self.session.receive(data, self.engine.clock.now())

    def _handle(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Opened):
                self.engine.connections.on_opened(self, event.hello)
            elif isinstance(event, Received):
                self._take(event)
            else:
                self.end([event])

    def _take(self, event: Received) -> None:
        """Handle one message; its descriptors are closed unless somebody asked for them."""
        message = event.message
        fds = [self._fds.popleft() for _ in range(min(event.descriptors, len(self._fds)))]
        if isinstance(message, Description):
            self._described(message, fds)
            return
        for fd in fds:
            os.close(fd)
        if isinstance(message, (Pong, Digests, Failure)):
            pending = self._pending.pop(message.request_id, None)
            if pending is not None:
                error = None
                if isinstance(message, Failure):
                    error = from_code(message.code, message.message, peer=self.name)
                self.engine.later(call_later(pending[1], message, error))
        elif self.lost is None:
            self.engine.on_message(self, message)

    def opened(self, hello: Hello) -> None:
        """Take the peer's identity from its hello."""
        scheme = {address.partition(":")[0]: address for address in reversed(hello.addresses)}
        unix = self.is_unix
        self.incarnation = hello.incarnation
        self.name = hello.name
        self.offered_addresses = hello.addresses
        self.view = PeerView(
            incarnation=hello.incarnation,
            name=hello.name,
            process=hello.process,
            host=hello.host,
            unix_address=(self.address if self.caller else scheme.get("unix", "")) if unix else "",
            tcp_address=scheme.get("tcp", ""),
            key=hello.key,
            transports=frozenset(hello.transports),
        )

    # -- regions ----------------------------------------------------------------------------

    def _described(self, message: Description, fds: list[int]) -> None:
        """Answer to a Describe: keep the region and its descriptors."""
        pending = self._pending.pop(message.request_id, None)
        asked = pending[2] if pending else None
        sound = len(fds) == len(message.fd_owners) and message.nbytes > 0
        if (
            not isinstance(asked, Describe)
            or asked.region_id != message.region_id
            or pending is None
            or not sound
        ):
            for fd in fds:
                os.close(fd)
            if pending is not None:
                error = RegistrationError(
                    "the peer's description of a region is incomplete",
                    peer=self.name,
                    fix="run the same kvferry release on both sides",
                )
                self.engine.later(call_later(pending[1], None, error))
            return
        known = self.regions.get(message.region_id)
        if (known and (known.token, known.generation)) == (asked.token, message.generation):
            # Two requests at once: whoever has the first answer may be using its descriptors.
            for fd in fds:
                os.close(fd)
            self.engine.later(call_later(pending[1], known, None))
            return
        owners = dict(zip(message.fd_owners, fds, strict=True))
        region = RemoteRegion(
            peer=self.incarnation,
            region_id=message.region_id,
            kind=message.kind,
            device=message.device,
            nbytes=message.nbytes,
            generation=message.generation,
            token=asked.token,
            access=message.access,
            exports={
                name: Export(data, owners.get(name, -1)) for name, data in message.exports.items()
            },
        )
        self.forget_region(message.region_id)
        self.regions[message.region_id] = region
        self.engine.later(call_later(pending[1], region, None))

    def forget_region(self, region_id: int) -> None:
        """The peer deregistered it, or described it anew."""
        region = self.regions.pop(region_id, None)
        if region is None:
            return
        # In this order no transport can map a descriptor that was closed, or is another file by
        # now: first nobody finds it any more, then transports let go, then it is closed.
        fds = [export.fd for export in region.exports.values() if export.fd >= 0]
        region.exports.clear()
        self.engine.later(partial(self.engine.set_aside, partial(self._let_go, region, fds)))

    def _let_go(self, region: RemoteRegion, fds: list[int]) -> None:
        self.engine.connections.forget(region)
        for fd in fds:
            os.close(fd)

    # -- the end ----------------------------------------------------------------------------

    def release(self) -> tuple[socket.socket, int]:
        """Give socket and descriptor (or -1) away, as a lane; what is queued is sent first."""
        self.flush()
        if self.lost is not None:
            raise self.lost
        self.lost = PeerLostError("the connection became a lane")
        self.engine.loop.remove(self.fd)
        fds, self._fds = list(self._fds), deque()
        for fd in fds[1:]:
            os.close(fd)
        sock = self.sock if self._tunnel is None else tls.TlsSocket(self.sock, self._tunnel)
        return sock, fds[0] if fds else -1

    def end(self, events: list[Event]) -> None:
        """The session is over: close everything that belongs to it and tell the engine, once."""
        if self.lost is not None or not events:
            return
        last = events[-1]
        assert isinstance(last, Closed)
        self.lost = last.error.located(peer=self.name)
        self._send_last()
        self.engine.loop.remove(self.fd)
        sockets.hang_up(self.sock)
        while self._fds:
            os.close(self._fds.popleft())
        while self._outbox:
            self._outbox.popleft().drop()
        pending, self._pending = self._pending, {}
        for _, reply, _ in pending.values():
            self.engine.later(call_later(reply, None, self.lost))
        self.engine.connections.on_lost(self)

    def _send_last(self) -> None:
        """A refusal that is still queued, if the socket takes it."""
        if self._outbox:
            return  # In the middle of a frame the peer would take it for a part of that.
        try:
            for data, fds in self._data_to_send():
                sockets.send(self.sock, data, fds)
        except OSError:
            pass


@dataclass(slots=True)
class _Outgoing:
    """Bytes that the socket has not taken yet, and the descriptors that go with the first."""

    data: memoryview
    fds: tuple[int, ...]
    is_owner: bool = False

    def keep(self) -> None:
        """Hold copies of the descriptors: their owner may close them before they are sent."""
        if self.fds and not self.is_owner:
            self.fds = tuple(os.dup(fd) for fd in self.fds)
            self.is_owner = True

    def drop(self) -> None:
        """They were sent, or never will be."""
        if self.is_owner:
            for fd in self.fds:
                os.close(fd)
        self.fds, self.is_owner = (), False


def call_later(function: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    return lambda: function(*arguments)
