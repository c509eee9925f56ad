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

import itertools
import logging
import socket
import struct
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from kvferry.errors import (
    AbortedError,
    BusyError,
    DeadlineError,
    KVFerryError,
    PeerLostError,
    ProtocolError,
    UnreachableError,
    from_code,
)
from kvferry.protocol import framing, messages
from kvferry.protocol.messages import Done, Failure, Move, Ready
from kvferry.regions import I64, U64, Spans
from kvferry.sockets import hang_up
from kvferry.transports.base import Operation, PeerView, Services, Transport

log = logging.getLogger(__name__)

SLICE_S = 0.1
"""Blocking calls return at least this often to look at deadlines and aborts."""
CHECK_BYTES = 16 << 20
"""Loops that make progress look at the clock after so many bytes."""
SPLIT_FROM_BYTES = 16 << 20
"""Larger transfers are cut over all lanes of the peer."""


class Stoppable(Protocol):
    """What a watch looks at; ``stop`` says why the move should end."""

    @property
    def stop(self) -> KVFerryError | None: ...


class Watch:
    """What a blocking move looks at between system calls: may it go on?"""

    def __init__(self, services: Services, deadline: float, op: Stoppable | None = None) -> None:
        self._services = services
        self._op = op
        self.deadline = deadline
        self.closing = False
        self.bytes_done = 0
        self._checked = 0

    def check(self) -> None:
        """Raise what should end the move: a stop, the closing of the lane, the deadline."""
        stop = self._op.stop if self._op is not None else None
        if stop is not None:
            raise stop
        if self.closing:
            raise AbortedError("the lane is closing")
        if self._services.clock.now() >= self.deadline:
            raise DeadlineError(
                "the deadline passed",
                fix="raise the deadline if the path is only slow; else look at the peer's log",
            )

    def check_sometimes(self, done: int) -> None:
        """A check for loops that make progress: every CHECK_BYTES bytes."""
        if done - self._checked >= CHECK_BYTES:
            self._checked = done
            self.check()


class Channel(ABC):
    """A byte channel over one connected, blocking socket with timeouts of SLICE_S."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        set_timeouts(sock)

    def send_message(self, message: messages.Message, watch: Watch) -> None:
        """Send one message. Blocks; the watch bounds it."""
        self._send_all(framing.encode(messages.pack(message), limit=framing.LANE_BYTES_MAX), watch)

    def _send_all(self, data: bytes, watch: Watch) -> None:
        view = memoryview(data)
        while view:
            try:
                sent = self.sock.send(view, socket.MSG_NOSIGNAL)
                view = view[sent:]
            except BlockingIOError:
                watch.check()

    def receive_message(self, watch: Watch) -> object:
        """The next message. Blocks; the watch bounds it."""
        header = self._receive_exactly(framing.HEADER.size, watch)
        nbytes, _ = framing.check_header(header, framing.LANE_BYTES_MAX)
        return messages.unpack(bytes(self._receive_exactly(nbytes, watch)))

    def is_fresh(self) -> bool:
        """Whether an idle lane is still usable: nothing unexpected has arrived, no end was seen."""
        try:
            self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return False
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _receive_exactly(self, nbytes: int, watch: Watch) -> bytearray:
        data = bytearray(nbytes)
        view = memoryview(data)
        while view:
            try:
                got = self.sock.recv_into(view)
            except BlockingIOError:
                watch.check()
                continue
            if got == 0:
                raise PeerLostError("the lane was closed by the peer")
            view = view[got:]
        return data

    @abstractmethod
    def send_spans(self, addresses: U64, lengths: I64, watch: Watch) -> None:
        """Send the bytes at these addresses, in order. Blocks; counts ``watch.bytes_done``."""

    @abstractmethod
    def receive_spans(self, addresses: U64, lengths: I64, watch: Watch) -> None:
        """Fill these addresses, in order. Blocks; counts ``watch.bytes_done``."""

    def interrupt(self) -> None:
        """Make whoever blocks on the channel return soon. Any thread."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        """Give the socket and whatever belongs to the channel back."""
        hang_up(self.sock)


class StreamedTransport(Transport):
    """Lanes to peers, and the serving of lanes that peers opened."""

    def __init__(self) -> None:
        self._services: Services | None = None
        self._lock = threading.Lock()
        self._clients: dict[bytes, _LanePool] = {}
        self._leaving: list[_LanePool] = []
        self._servers: set[_Server] = set()
        self._closed = False

    @abstractmethod
    def dial(
        self, services: Services, peer: PeerView, deadline: float, check: Callable[[], None]
    ) -> Channel:
        """Open a channel to a peer. Blocks; ``check`` is for :meth:`Services.open_lane`."""

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
            pool = self._clients.get(op.peer.incarnation)
            if pool is None:
                pool = self._clients[op.peer.incarnation] = _LanePool(self, op.peer)
        pool.submit(op)

    def abort(self, op: Operation, error: KVFerryError) -> None:
        super().abort(op, error)
        with self._lock:
            pools = [self._clients.get(op.peer.incarnation), *self._leaving]
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
            if not self._closed:
                server = _Server(self, channel, hello.incarnation, hello.name)
                try:
                    server.thread.start()
                except RuntimeError:
                    channel.close()
                    raise
                self._servers.add(server)
                return
        channel.close()

    def disconnect(self, incarnation: bytes) -> None:
        with self._lock:
            pool = self._clients.pop(incarnation, None)
            self._leaving = [pool for pool in self._leaving if pool.is_alive()]
            if pool is not None:
                self._leaving.append(pool)
            servers = [s for s in self._servers if s.incarnation == incarnation]
        for server in servers:
            server.stop()
        if pool is not None:
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


class _Part:
    """A share of an operation that one lane moves."""

    def __init__(self, whole: _Whole, begin: int, end: int) -> None:
        self.whole = whole
        self.begin, self.end = begin, end


class _Whole:
    """An operation and the parts it was cut into; complete when all of them have stopped."""

    def __init__(self, op: Operation, services: Services) -> None:
        self.op = op
        self._services = services
        self._lock = threading.Lock()
        self._done = 0
        self._error: KVFerryError | None = None
        self._left = 1

    @property
    def stop(self) -> KVFerryError | None:
        """Why its parts should end: the operation was stopped, or another part has failed."""
        return self.op.stop or self._error

    def cut(self, lanes: int) -> list[_Part]:
        op = self.op
        if lanes < 2 or op.nbytes < SPLIT_FROM_BYTES or op.lengths.size < lanes:
            return [_Part(self, 0, op.lengths.size)]
        ends = np.cumsum(op.lengths)
        marks = [op.nbytes * i // lanes for i in range(1, lanes)]
        cuts = sorted({0, op.lengths.size, *(np.searchsorted(ends, marks) + 1).tolist()})
        self._left = len(cuts) - 1
        return [_Part(self, a, b) for a, b in itertools.pairwise(cuts)]

    def ended(self, nbytes: int, error: KVFerryError | None) -> None:
        with self._lock:
            self._done += nbytes
            self._left -= 1
            if error is not None and self._error is None:
                self._error = error
            if self._left:
                return
            if self._error is not None:
                self._error.bytes_done = self._done
        self._services.complete(self.op, self._done, self._error)


class _LanePool:
    """This side's lanes to one peer: a bounded queue and a thread per lane."""

    def __init__(self, transport: StreamedTransport, peer: PeerView) -> None:
        services = transport._services
        assert services is not None
        self.transport = transport
        self.services = services
        self.peer = peer
        self.waiting: deque[_Part] = deque()
        self.lanes: list[_Lane] = []
        self.ready = threading.Condition()
        self.idle = 0
        self.stopped: KVFerryError | None = None

    def submit(self, op: Operation) -> None:
        config = self.services.config
        whole = _Whole(op, self.services)
        with self.ready:
            if self.stopped is not None:
                raise type(self.stopped)(self.stopped.message, stage="move")
            if len(self.waiting) >= config.lane_queue_max:
                raise BusyError(
                    f"{len(self.waiting)} transfers wait for {self.transport.name} lanes to "
                    f"{self.peer.name}",
                    fix="retry later, or raise lane_queue_max",
                )
            parts = whole.cut(config.lanes_max)
            wanted = len(self.waiting) + len(parts) - self.idle
            while wanted > 0 and len(self.lanes) < config.lanes_max:
                self._start_lane()
                wanted -= 1
            self.waiting.extend(parts)
            self.ready.notify(len(self.waiting))

    def _start_lane(self) -> None:
        lane = _Lane(self, len(self.lanes))
        try:
            lane.thread.start()
        except RuntimeError as error:
            if not self.lanes:
                raise BusyError(
                    f"no thread can be started for a lane: {error}",
                    fix="raise the limit of processes and threads (ulimit -u, pids.max)",
                ) from error
            return  # Those that run will do.
        self.lanes.append(lane)

    def next(self) -> _Part | None:
        """The next part for a lane; None when the pool is stopped. Blocks while idle."""
        with self.ready:
            self.idle += 1
            try:
                self.ready.wait_for(lambda: self.waiting or self.stopped is not None)
            finally:
                self.idle -= 1
            return self.waiting.popleft() if self.waiting else None

    def interrupt(self, op: Operation) -> None:
        """End an operation that has a stop: at once what waits, soon what runs."""
        with self.ready:
            mine = [part for part in self.waiting if part.whole.op is op]
            for part in mine:
                self.waiting.remove(part)
        for part in mine:
            part.whole.ended(0, op.stop)
        for lane in list(self.lanes):
            lane.interrupt(op)

    def stop(self, error: KVFerryError) -> None:
        """End everything with ``error``. The threads end soon; see :meth:`join`."""
        with self.ready:
            self.stopped = self.stopped or error
            for part in self.waiting:
                part.whole.op.stop = part.whole.op.stop or error
            self.ready.notify_all()
        for lane in list(self.lanes):
            lane.stop(error)

    def join(self) -> None:
        for lane in list(self.lanes):
            if lane.thread is not threading.current_thread():
                lane.thread.join(10.0)

    def is_alive(self) -> bool:
        return any(lane.thread.is_alive() for lane in self.lanes)


class _Lane:
    """One thread that carries transfers over one connection, opened again when it broke."""

    def __init__(self, pool: _LanePool, number: int) -> None:
        self.pool = pool
        self.channel: Channel | None = None
        self.op: Operation | None = None
        self.lock = threading.Lock()
        name = f"kvferry-{pool.transport.name}-lane{number}"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def interrupt(self, op: Operation) -> None:
        with self.lock:
            if self.op is op and self.channel is not None:
                self.channel.interrupt()

    def stop(self, error: KVFerryError) -> None:
        with self.lock:
            if self.op is not None:
                self.op.stop = self.op.stop or error
            if self.channel is not None:
                self.channel.interrupt()

    def _run(self) -> None:
        try:
            while (part := self.pool.next()) is not None:
                self._carry(part)
        finally:
            self._drop()

    def _carry(self, part: _Part) -> None:
        op = part.whole.op
        watch = Watch(self.pool.services, op.deadline, part.whole)
        error: KVFerryError | None = None
        with self.lock:
            self.op = op
        try:
            watch.check()
            self._move(part, watch)
        except KVFerryError as failure:
            error = failure
        except OSError as failure:
            error = PeerLostError(f"the lane broke: {failure.strerror or failure}")
        except Exception as failure:
            log.exception("a lane failed; this is a bug in kvferry")
            error = AbortedError(f"internal error: {failure}")
        with self.lock:
            self.op = None
        if error is not None:
            # An abort wakes the thread by cutting the socket; what matters is why.
            error = op.stop or error
            path = f"{self.pool.transport.name}/{op.path}"
            if isinstance(error, _Refusal):
                error = error.cause
            else:
                self._drop()
            error.located(peer=op.peer.name, path=path, stage="move")
        part.whole.ended(watch.bytes_done, error)

    def _move(self, part: _Part, watch: Watch) -> None:
        op = part.whole.op
        span = slice(part.begin, part.end)
        lengths = op.lengths[span]
        nbytes = int(lengths.sum())
        head = Move(
            transfer_id=op.op_id,
            write=op.write,
            region_id=op.remote.region_id,
            token=op.remote.token,
            generation=op.remote.generation,
            offsets=op.remote_offsets[span].tobytes(),
            lengths=lengths.tobytes(),
            deadline_s=min(max(op.deadline - self.pool.services.clock.now(), 0.0), 1e6),
        )
        channel = self._begin(head, nbytes, watch)
        op.began_at = op.began_at or self.pool.services.clock.now()
        addresses = op.local_addresses()[span]
        if op.write:
            channel.send_spans(addresses, lengths, watch)
            check_answer(channel.receive_message(watch), Done, op.op_id, nbytes)
        else:
            channel.receive_spans(addresses, lengths, watch)

    def _begin(self, head: Move, nbytes: int, watch: Watch) -> Channel:
        """Send the head and get its Ready, on a fresh lane if the kept one turns out dead."""
        for last in (False, True):
            kept = self.channel is not None
            channel = self._open(watch)
            try:
                channel.send_message(head, watch)
                reply = channel.receive_message(watch)
            except (OSError, PeerLostError):
                self._drop()
                watch.check()
                if last or not kept:
                    raise
                continue
            if isinstance(reply, Failure):
                raise _Refusal(from_code(reply.code, reply.message))
            check_answer(reply, Ready, head.transfer_id, nbytes)
            return channel
        raise AssertionError("unreachable")

    def _open(self, watch: Watch) -> Channel:
        if self.channel is not None and not self.channel.is_fresh():
            self._drop()
        if self.channel is None:
            services = self.pool.services
            limit = services.clock.now() + services.config.connect_s
            deadline = min(watch.deadline, limit)
            try:
                channel = self.pool.transport.dial(services, self.pool.peer, deadline, watch.check)
            except UnreachableError:
                watch.check()  # If the deadline has passed, that is the reason to give.
                raise
            with self.lock:
                self.channel = channel
            # A stop that came while dialling had no channel to interrupt.
            watch.check()
        assert self.channel is not None
        return self.channel

    def _drop(self) -> None:
        with self.lock:
            channel, self.channel = self.channel, None
        if channel is not None:
            channel.close()


class _Refusal(KVFerryError):
    """The callee said no before any byte moved: the lane itself is still good."""

    def __init__(self, cause: KVFerryError) -> None:
        super().__init__(cause.message)
        self.cause = cause


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
            with access as memory:
                self.channel.send_message(Ready(head.transfer_id, memory.nbytes), watch)
                agreed = True
                if head.write:
                    self.channel.receive_spans(memory.addresses, memory.lengths, watch)
                else:
                    self.channel.send_spans(memory.addresses, memory.lengths, watch)
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


def check_answer(
    message: object, kind: type[Ready] | type[Done], transfer_id: int, nbytes: int
) -> None:
    """Raise unless the message is the expected answer to this transfer, for as many bytes."""
    if not isinstance(message, kind) or message.transfer_id != transfer_id:
        raise ProtocolError(f"expected {kind.__name__}, got {type(message).__name__}")
    if message.nbytes != nbytes:
        raise ProtocolError(f"the peer counts {message.nbytes} bytes where {nbytes} were asked")


def set_timeouts(sock: socket.socket) -> None:
    """Blocking, but each call returns with EAGAIN after SLICE_S without progress."""
    sock.setblocking(True)
    packed = struct.pack("ll", int(SLICE_S), int(SLICE_S % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)
