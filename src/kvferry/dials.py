"""Reaching an engine: one attempt at all of its addresses.

Everything here runs under the engine's lock and never blocks.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvferry import sockets
from kvferry.errors import KVFerryError, PeerLostError, UnreachableError
from kvferry.loop import READ, WRITE
from kvferry.peers import Peer, call_later
from kvferry.protocol.session import Closed
from kvferry.sockets import Address

if TYPE_CHECKING:
    from kvferry.engine import Engine


class Dial:
    """One attempt to reach an engine at any of its addresses. Ends by calling each waiter once.

    When a TCP address leads to an engine of this host, its Unix socket is tried too: only there can
    descriptors be passed. The TCP connection is kept if that fails.
    """

    def __init__(
        self, engine: Engine, addresses: list[Address], expected: bytes, deadline: float
    ) -> None:
        self.engine = engine
        self.expected = expected
        self.deadline = deadline
        self.waiters: list[Callable[[Peer | None, KVFerryError | None], None]] = []
        self._reached_at: set[Address] = set()
        self._left = deque(addresses)
        self._tried: list[KVFerryError] = []
        self.peer: Peer | None = None
        self._fallback: Peer | None = None
        self._turn_began_at = 0.0
        self.over = False

    def start(self) -> None:
        """Try the next address, or give up."""
        while self._left:
            address = self._left.popleft()
            try:
                sock = self.engine.connections.start_connect(address)
            except KVFerryError as error:
                self._tried.append(error)
                continue
            hello = self.engine.connections.hello("control", expected=self.expected)
            connections = self.engine.connections
            session = connections.new_session(hello, caller=True)
            is_unix = address.scheme == "unix"
            tunnel = connections.security.tunnel(is_unix=is_unix, caller=True)
            where = str(address)
            peer = Peer(self.engine, sock, session, caller=True, address=where, tunnel=tunnel)
            peer.reached_at.add(address)
            self.peer = peer
            self._turn_began_at = self.engine.clock.now()
            self.engine.loop.add(peer.fd, WRITE, self._connected)
            return
        self._finish()

    def _connected(self, ready: int) -> None:
        """The connect has ended one way or the other. Called by the loop."""
        with self.engine.locked():
            peer = self.peer
            if peer is None or self.over:
                return
            number = peer.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if not number and not _is_connected(peer.sock):
                if peer.sock.family != socket.AF_UNIX:
                    return  # Woken too early.
                # A Unix socket connects at once, or its queue is full and it never will.
                number = errno.EAGAIN
            if number:
                error = OSError(number, os.strerror(number))
                self._failed(sockets.unreachable(peer.address, error))
                return
            self.engine.loop.remove(peer.fd)
            self.engine.loop.add(peer.fd, READ, peer.on_ready)
            self.engine.connections.adopt(peer, self)
            peer.flush()

    def opened(self, peer: Peer) -> None:
        """The peer's hello was accepted."""
        view = peer.view
        assert view is not None
        self.peer = None
        self._reached_at |= peer.reached_at
        known = self.engine.connections.caller_of(peer.incarnation, peer)
        if known is not None and known is not self._fallback:
            # Another address of a peer that we have, or two threads dialled it at once.
            self.engine.connections.drop(peer, "there is a connection to this peer already")
            other = self.engine.connections.upgrading(known)
            if other is not None:
                other.waiters += self.waiters
                self.waiters = []
            self._finish(known)
            return
        if self._fallback is None and peer.sock.family != socket.AF_UNIX:
            unix = self.engine.connections.unix_address_of(peer)
            if unix is not None:
                self._fallback = peer
                self.expected = peer.incarnation
                self._left = deque([unix])
                self.start()
                return
        if self._fallback is not None and self._fallback is not peer:
            self.engine.connections.drop(
                self._fallback, "the same peer was reached by a Unix socket"
            )
            self._fallback = None
        self._finish(peer)

    def replaces(self, peer: Peer) -> bool:
        """Whether ``peer`` goes when this dial succeeds."""
        return self._fallback is peer

    def lost(self, peer: Peer, error: KVFerryError) -> None:
        """The connection ended before its hello."""
        if peer is not self.peer:
            return
        self.peer = None
        self._tried.append(error)
        self.start()

    def tick(self, now: float) -> None:
        if self.over or now < min(self._turn_ends_at(), self.deadline):
            return
        text = f"no connection to {self.peer.address if self.peer else 'any address'} in time"
        if now >= self.deadline:
            self._left.clear()
        fix = "packets are dropped, or the host or the process is frozen"
        error = UnreachableError(text, stage="connect", fix=fix)
        if self.peer is not None:
            self._failed(error)
        else:
            self._tried.append(error)
            self._finish()

    def _turn_ends_at(self) -> float:
        """When the next address is tried: each one left gets an equal share of the time, so that
        one which swallows packets does not use up all of it."""
        if self.peer is None or not self._left:
            return self.deadline
        share_s = (self.deadline - self._turn_began_at) / (len(self._left) + 1)
        return self._turn_began_at + share_s

    def stop(self) -> None:
        """The engine is closing."""
        self._left.clear()
        peer, self.peer = self.peer, None
        if peer is not None:
            peer.end([Closed(PeerLostError("the engine was closed"))])
        self._tried = [UnreachableError("the engine was closed", stage="connect")]
        self._finish()

    def _failed(self, error: KVFerryError) -> None:
        peer, self.peer = self.peer, None
        if peer is not None:
            peer.end([Closed(error)])
        self._tried.append(error)
        self.start()

    def _finish(self, peer: Peer | None = None) -> None:
        if self.over:
            return
        self.over = True
        peer = peer or (self._fallback if self._fallback and self._fallback.is_open() else None)
        error: KVFerryError | None = None
        if peer is None:
            error = _most_telling(self._tried)
        else:
            peer.reached_at |= self._reached_at
        self.engine.connections.dialled(self)
        for waiter in self.waiters:
            self.engine.later(call_later(waiter, peer, error))


def _most_telling(errors: list[KVFerryError]) -> KVFerryError:
    """One error for all addresses: a refusal by an engine says more than silence."""
    if not errors:
        return UnreachableError("the peer has no address", stage="connect")
    spoken = [error for error in errors if not isinstance(error, UnreachableError)]
    chosen = (spoken or errors)[-1]
    if len(errors) > 1 and not spoken:
        chosen.message = "; ".join(dict.fromkeys(error.message for error in errors))
    return chosen


def _is_connected(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
    except OSError:
        return False
    return True
