"""The caller's side of a streamed path: its lanes to one peer, and the queue before them."""

from __future__ import annotations

import errno
import itertools
import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from kvferry.errors import (
    AbortedError,
    BusyError,
    KVFerryError,
    PeerLostError,
    ProtocolError,
    TransferError,
    UnreachableError,
    from_code,
)
from kvferry.memory.places import lend
from kvferry.protocol.messages import Done, Failure, Move, Ready
from kvferry.transports.base import Operation, PeerView, Services
from kvferry.transports.channel import Channel, Watch

if TYPE_CHECKING:
    from kvferry.transports.stream import StreamedTransport

log = logging.getLogger(__name__)

SPLIT_FROM_BYTES = 16 << 20
"""Larger transfers are cut over all lanes of the peer."""


class Part:
    """A share of an operation that one lane moves."""

    def __init__(self, whole: Whole, begin: int, end: int) -> None:
        self.whole = whole
        self.begin, self.end = begin, end


class Whole:
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

    def moved(self, nbytes: int = 0) -> None:
        self.op.bytes_done += nbytes
        self.op.moved_at = self._services.clock.now()

    def cut(self, lanes: int) -> list[Part]:
        op = self.op
        if lanes < 2 or op.nbytes < SPLIT_FROM_BYTES or op.lengths.size < lanes:
            return [Part(self, 0, op.lengths.size)]
        ends = np.cumsum(op.lengths)
        marks = [op.nbytes * i // lanes for i in range(1, lanes)]
        cuts = sorted({0, op.lengths.size, *(np.searchsorted(ends, marks) + 1).tolist()})
        self._left = len(cuts) - 1
        return [Part(self, a, b) for a, b in itertools.pairwise(cuts)]

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


class LanePool:
    """This side's lanes to one peer: a bounded queue and a thread per lane."""

    def __init__(
        self, transport: StreamedTransport, peer: PeerView, *, for_device: bool = False
    ) -> None:
        services = transport._services
        assert services is not None
        self.transport = transport
        self.services = services
        self.peer = peer
        self.for_device = for_device
        self.waiting: deque[Part] = deque()
        self.lanes: list[_Lane] = []
        self.ready = threading.Condition()
        self.idle = 0
        self.stopped: KVFerryError | None = None

    def submit(self, op: Operation) -> None:
        config = self.services.config
        whole = Whole(op, self.services)
        with self.ready:
            if self.stopped is not None:
                raise type(self.stopped)(self.stopped.message, stage="move")
            if op.stop is not None:
                # Whoever stopped it found nothing to interrupt here, and will not come again.
                raise op.stop
            if len(self.waiting) >= config.lane_queue_max:
                raise BusyError(
                    f"{len(self.waiting)} transfers wait for {self.transport.name} lanes to "
                    f"{self.peer.name}",
                    fix="retry later, or raise lane_queue_max",
                )
            parts = whole.cut(min(config.split_lanes, config.lanes_max))
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

    def next(self) -> Part | None:
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

    def __init__(self, pool: LanePool, number: int) -> None:
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

    def _carry(self, part: Part) -> None:
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
            error = broken(failure)
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

    def _move(self, part: Part, watch: Watch) -> None:
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
        with lend(self.pool.services.devices, op.local.kind, op.local.device) as place:
            channel = self._begin(head, nbytes, part.whole, watch)
            op.began_at = op.began_at or self.pool.services.clock.now()
            addresses = op.local_addresses()[span]
            if op.write:
                channel.send_from(place, addresses, lengths, watch)
                check_answer(channel.receive_message(watch), Done, op.op_id, nbytes)
            else:
                channel.receive_into(place, addresses, lengths, watch)

    def _begin(self, head: Move, nbytes: int, whole: Whole, watch: Watch) -> Channel:
        """Send the head and get its Ready, on a fresh lane if the kept one turns out dead."""
        for last in (False, True):
            kept = self.channel is not None
            channel = self._open(watch)
            whole.moved()
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
                pool = self.pool
                channel = pool.transport.dial(
                    services, pool.peer, deadline, watch.check, for_device=pool.for_device
                )
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


_CUT = frozenset({errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED, errno.ENOTCONN})
_SHORT = frozenset({errno.ENOBUFS, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
_LOST = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN})


def broken(failure: OSError) -> KVFerryError:
    """What a system call's failure on a lane means. Only a cut can mean that the peer is gone."""
    text = f"the lane broke: {failure.strerror or failure}"
    if failure.errno in _CUT:
        fix = "if the peer's process lives, something between the two cut this connection"
        return PeerLostError(text, fix=fix)
    if failure.errno in _SHORT:
        fix = "this machine is short of memory or descriptors; the peer is not to blame"
    elif failure.errno in _LOST:
        fix = "packets do not get through: look at routes, cables and firewalls between the two"
    else:
        fix = "the system refused it here: look at its log and at local firewall rules"
    return TransferError(text, fix=fix, retryable=True)


def check_answer(
    message: object, kind: type[Ready] | type[Done], transfer_id: int, nbytes: int
) -> None:
    """Raise unless the message is the expected answer to this transfer, for as many bytes."""
    if not isinstance(message, kind) or message.transfer_id != transfer_id:
        raise ProtocolError(f"expected {kind.__name__}, got {type(message).__name__}")
    if message.nbytes != nbytes:
        raise ProtocolError(f"the peer counts {message.nbytes} bytes where {nbytes} were asked")
