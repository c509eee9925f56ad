"""The streamed family: bytes flow through a channel in order; each end uses its own memory.

A *lane* is one long-lived connection to a peer, opened at first use and kept. Its caller sends a
Move that names spans of the callee's region; the callee checks them and answers Ready or Failure;
then the bytes flow, in the order of the spans, from whichever side sends. One transfer at a time
uses a lane; each side has one thread per lane, which blocks in calls that release the interpreter
lock. A subclass supplies the channel alone.

A lane whose stream lost its place (deadline, abort, error in the middle) is closed and a new one is
opened for the next transfer. A lane that died while idle is noticed before use, and a transfer that
finds it dead before its Ready tries once more on a fresh one.
"""

from __future__ import annotations

import logging
import socket
import threading
from abc import abstractmethod
from collections.abc import Callable

import numpy as np

from kvferry.errors import AbortedError, BusyError, KVFerryError, PeerLostError, ProtocolError
from kvferry.memory.places import lend
from kvferry.protocol import messages
from kvferry.protocol.messages import Done, Failure, Move, Ready
from kvferry.regions import Spans
from kvferry.transports.base import Operation, PeerView, Services, Transport
from kvferry.transports.channel import Channel, Watch
from kvferry.transports.pool import LanePool

log = logging.getLogger(__name__)

SERVED_MAX = 256
"""Lanes that one peer may have here: each takes a thread, and a staged one a ring as well."""

_Key = tuple[bytes, bool]
"""A peer, and whether its lanes carry device memory, which wants larger rings."""


def _key(op: Operation) -> _Key:
    return op.peer.incarnation, "cuda" in (op.local.kind, op.remote.kind)


class StreamedTransport(Transport):
    """Lanes to peers, and the serving of lanes that peers opened."""

    def __init__(self) -> None:
        self._services: Services | None = None
        self._lock = threading.Lock()
        self._clients: dict[_Key, LanePool] = {}
        self._leaving: list[LanePool] = []
        self._servers: set[_Server] = set()
        self._closed = False

    @abstractmethod
    def dial(
        self,
        services: Services,
        peer: PeerView,
        deadline: float,
        check: Callable[[], None],
        *,
        for_device: bool,
    ) -> Channel:
        """Open a channel to a peer. Blocks; ``check`` is for :meth:`Services.open_lane`.

        for_device: whether device memory will be moved through it, on either side.
        """

    @abstractmethod
    def serve(self, sock: socket.socket, fd: int, hello: messages.Hello) -> Channel:
        """The callee's half of :meth:`dial`. Must not block. Owns ``fd``, not ``sock``."""

    def open(self, services: Services) -> None:
        self._services = services

    def submit(self, op: Operation) -> None:
        with self._lock:
            if self._closed:
                raise AbortedError("the engine is closing")
            if op.stop is not None:
                # Its peer may be gone: a pool made now would stay for ever.
                raise op.stop
            key = _key(op)
            pool = self._clients.get(key)
            if pool is None:
                pool = self._clients[key] = LanePool(self, op.peer, for_device=key[1])
        pool.submit(op)

    def abort(self, op: Operation, error: KVFerryError) -> None:
        super().abort(op, error)
        with self._lock:
            pools = [self._clients.get(_key(op)), *self._leaving]
        for pool in pools:
            if pool is not None:
                pool.interrupt(op)

    def accept(self, sock: socket.socket, fd: int, hello: messages.Hello) -> None:
        try:
            channel = self.serve(sock, fd, hello)
        except BaseException:
            sock.close()
            raise
        with self._lock:
            served = sum(server.incarnation == hello.incarnation for server in self._servers)
            if not self._closed and served < SERVED_MAX:
                server = _Server(self, channel, hello.incarnation, hello.name)
                try:
                    server.thread.start()
                except RuntimeError:
                    channel.close()
                    raise
                self._servers.add(server)
                return
        channel.close()
        if served >= SERVED_MAX:
            raise BusyError(f"{served} lanes of this peer are served", fix="lower lanes_max there")

    def disconnect(self, incarnation: bytes) -> None:
        with self._lock:
            pools = [self._clients.pop((incarnation, kind), None) for kind in (False, True)]
            gone = [pool for pool in pools if pool is not None]
            self._leaving = [pool for pool in self._leaving if pool.is_alive()] + gone
            servers = [s for s in self._servers if s.incarnation == incarnation]
        for server in servers:
            server.stop()
        for pool in gone:
            pool.stop(PeerLostError("the peer is gone"))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            pools = [*self._clients.values(), *self._leaving]
            servers = list(self._servers)
            self._clients.clear()
        for pool in pools:
            pool.stop(AbortedError("the engine is closing"))
        for server in servers:
            server.stop()
        for pool in pools:
            pool.join()
        for server in servers:
            server.thread.join(10.0)
        with self._lock:
            self._leaving.clear()

    def statistics(self) -> dict[str, int]:
        with self._lock:
            pools = list(self._clients.values())
            served = len(self._servers)
        lanes = sum(len(pool.lanes) for pool in pools)
        waiting = sum(len(pool.waiting) for pool in pools)
        return {"lanes": lanes, "lanes_served": served, "operations_waiting": waiting}


class _Server:
    """One thread that serves one lane of a peer."""

    def __init__(
        self, transport: StreamedTransport, channel: Channel, incarnation: bytes, name: str
    ) -> None:
        self.transport = transport
        self.channel = channel
        self.incarnation = incarnation
        self.peer_name = name
        self.closing = threading.Event()
        self.watch: Watch | None = None
        thread_name = f"kvferry-{transport.name}-serve"
        self.thread = threading.Thread(target=self._run, name=thread_name, daemon=True)

    def stop(self) -> None:
        self.closing.set()
        watch = self.watch
        if watch is not None:
            watch.closing = True
        self.channel.interrupt()

    def _run(self) -> None:
        services = self.transport._services
        assert services is not None
        try:
            while not self.closing.is_set():
                idle = self.watch = Watch(services, float("inf"))
                self.channel.await_message()
                idle.closing = self.closing.is_set()
                head = self.channel.receive_message(idle)
                if not isinstance(head, Move):
                    raise ProtocolError(f"expected a move, got {type(head).__name__}")
                self._serve(services, head)
        except (KVFerryError, OSError) as error:
            if not self.closing.is_set() and not isinstance(error, PeerLostError):
                log.debug("lane of %s ended: %s", self.peer_name, error)
        except Exception:
            log.exception("serving a lane failed; this is a bug in kvferry")
        finally:
            self.channel.close()
            with self.transport._lock:
                self.transport._servers.discard(self)

    def _serve(self, services: Services, head: Move) -> None:
        watch = self.watch = Watch(services, services.clock.now() + head.deadline_s)
        watch.closing = self.closing.is_set()
        agreed = False
        try:
            spans = _spans(head)
            access = services.access(
                head.region_id, head.token, head.generation, spans, write=head.write
            )
            with access as memory, lend(services.devices, memory.kind, memory.device) as place:
                self.channel.send_message(Ready(head.transfer_id, memory.nbytes), watch)
                agreed = True
                if head.write:
                    self.channel.receive_into(place, memory.addresses, memory.lengths, watch)
                else:
                    self.channel.send_from(place, memory.addresses, memory.lengths, watch)
        except KVFerryError as error:
            # After Ready the stream carries bytes: a message would be taken for some of them.
            if agreed or isinstance(error, (ProtocolError, PeerLostError)):
                raise
            text = messages.explain(error)
            self.channel.send_message(Failure(head.transfer_id, error.code, text), watch)
            return
        if head.write:
            self.channel.send_message(Done(head.transfer_id, watch.bytes_done), watch)


def _spans(head: Move) -> Spans:
    """The spans of a head, checked as far as the region does not matter."""
    if len(head.offsets) % 8 or len(head.offsets) != len(head.lengths):
        raise ProtocolError("a move with broken span arrays")
    return Spans.of(np.frombuffer(head.offsets, "<i8"), np.frombuffer(head.lengths, "<i8"))
