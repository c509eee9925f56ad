"""The mapped family: the peer's memory appears in this address space, and one copy moves
everything.

A subclass supplies :meth:`MappedTransport.map` alone. Mappings are made at first use, once per
region of a peer, and dropped when the region or the peer goes and no copy uses them any more.
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvferry.errors import (
    AbortedError,
    DeadlineError,
    DeviceError,
    KVFerryError,
    PeerLostError,
    RegistrationError,
    StaleRegionError,
)
from kvferry.memory.copy import copy_spans
from kvferry.memory.cuda import CudaQueue, Flight
from kvferry.regions import I64, U64
from kvferry.transports.base import Operation, RemoteRegion, Services, Transport
from kvferry.transports.flights import Airborne, Flights

log = logging.getLogger(__name__)

PIECE_BYTES = 64 << 20
"""An abort or a deadline is noticed after so many bytes at the latest: about 6 ms. Smaller pieces
cost the second thread of a copy a tenth of its use, since each piece starts it anew.
"""
INLINE_SPANS_MAX = 1 << 12
"""Longer lists are written out for a device by a mover: that takes 0.1 ms and more."""
THREADS_FROM_BYTES = 8 << 20
"""From here on a second thread is worth its start."""

_Key = tuple[tuple[bytes, int, int], bool]
"""A peer's region, and whether it is mapped for writing."""


def _nothing() -> None:
    return None


@dataclass(slots=True)
class Mapping:
    """A peer's region in this address space.

    address: its first byte here. release: gives the address space back.
    enter, exit: called around each copy, for memory whose owner must wait for copies to end before
    it frees; ``enter`` raises StaleRegionError when the memory is gone.
    """

    address: int
    release: Callable[[], None] = _nothing
    enter: Callable[[], None] = _nothing
    exit: Callable[[], None] = _nothing
    users: int = 0
    doomed: bool = False


class MappedTransport(Transport):
    """Copies between local memory and mappings of a peer's memory.

    maps_quickly: whether :meth:`map` takes no time, so that even the caller's thread may do it.
    """

    maps_quickly = False

    def __init__(self) -> None:
        self._services: Services | None = None
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._mappings: dict[_Key, Mapping] = {}
        self._making: set[_Key] = set()
        self._waiting: dict[int, Operation] = {}
        self._ops: dict[int, Operation] = {}
        self._closed = False
        self._flights = Flights(self.name)

    @abstractmethod
    def map(self, remote: RemoteRegion, *, writable: bool) -> Mapping:
        """Make the region visible here. Raises RegistrationError or StaleRegionError."""

    def open(self, services: Services) -> None:
        self._services = services

    def submit(self, op: Operation) -> None:
        services = self._services
        assert services is not None
        with self._lock:
            if self._closed:
                raise AbortedError("the engine is closing")
            self._ops[op.op_id] = op
            self._waiting[op.op_id] = op
            # Mapping a large pool takes long, and the caller may be the control thread.
            is_mapped = self.maps_quickly or (op.remote.key, op.write) in self._mappings
        if op.local.kind == "host":
            move, is_short = self._move, op.nbytes <= services.config.inline_bytes_max
        else:
            # The device does the work, so that beginning it takes no longer than a hand-over.
            move = self._take_off
            is_short = op.lengths.size <= INLINE_SPANS_MAX
            if op.resident is not None:
                is_short = op.resident.is_on(op.local.device)
        if is_short and is_mapped:
            move(op)
            return
        try:
            services.run(lambda: move(op))
        except KVFerryError:
            if self._begin(op):
                self._leave(op)
                raise

    def abort(self, op: Operation, error: KVFerryError) -> None:
        super().abort(op, error)
        services = self._services
        if services is not None and self._begin(op):
            # Nobody has touched it yet: no need to wait until the copies before it are done.
            self._leave(op)
            services.complete(op, 0, op.stop)

    def _begin(self, op: Operation) -> bool:
        """Whether the caller, and nobody else, has the operation from now on."""
        with self._lock:
            return self._waiting.pop(op.op_id, None) is not None

    def forget(self, remote: RemoteRegion) -> None:
        self._doom(lambda key: key == remote.key)

    def disconnect(self, incarnation: bytes) -> None:
        error = PeerLostError("the peer is gone", stage="move")
        with self._lock:
            victims = [op for op in self._ops.values() if op.remote.peer == incarnation]
        for op in victims:
            self.abort(op, error)
        self._doom(lambda key: key[0] == incarnation)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            ops = list(self._ops.values())
        for op in ops:
            self.abort(op, AbortedError("the engine is closing", stage="move"))
        with self._lock:
            self._idle.wait_for(lambda: not self._ops, timeout=10.0)
        self._flights.close()
        self._doom(lambda _key: True)

    def statistics(self) -> dict[str, int]:
        with self._lock:
            return {"mappings": len(self._mappings), "operations": len(self._ops)}

    # -- inside -----------------------------------------------------------------------------

    def _move(self, op: Operation) -> None:
        services = self._services
        assert services is not None
        if not self._begin(op):
            return
        done, error = 0, None
        mapping = None
        try:
            mapping = self._enter(op, services)
            op.began_at = services.clock.now()
            check = partial(self._check, op, services)
            for nbytes in copy_on_host(op, mapping.address, services, check):
                done += nbytes
        except KVFerryError as failure:
            # A region that is gone because its peer died: what matters is that the peer died.
            error = (op.stop or failure).located(
                peer=op.peer.name, path=f"{self.name}/{op.path}", stage="move", bytes_done=done
            )
        except Exception as failure:
            # Whatever it is, the transfer ends: nobody may wait for a thread that has given up.
            log.exception("a copy failed; this is a bug in kvferry or in a transport")
            error = AbortedError(f"internal error: {failure}", stage="move", bytes_done=done)
        finally:
            if mapping is not None:
                self._exit(mapping)
            self._leave(op)
        services.complete(op, done, error)

    def _take_off(self, op: Operation) -> None:
        """Give an operation on device memory to the device; :meth:`_landed` sees its end."""
        services = self._services
        assert services is not None
        if not self._begin(op):
            return
        mapping: Mapping | None = None
        error: KVFerryError | None = None
        try:
            mapping = self._enter(op, services)
            self._check(op, services)
            self._flights.start()
            with services.devices.undisturbed():
                services.devices.allow(op.local.device, op.remote.device)
                device = services.devices.device(op.local.device)
                queue = device.take()
                op.began_at = services.clock.now()
                failed: DeviceError | None = None
                try:
                    try:
                        flight = begin_on_device(op, mapping.address, queue)
                    except DeviceError as failure:
                        # A part of it may have been begun, which writes until it lands.
                        failed, flight = failure, queue.mark()
                except BaseException:
                    device.give(queue)
                    raise
            landed = partial(self._landed, op, mapping, failed)
            self._flights.add(Airborne(device, queue, flight, landed))
            return
        except KVFerryError as failure:
            error = op.stop or failure
        except Exception as failure:
            log.exception("a copy was not begun; this is a bug in kvferry or in a transport")
            error = AbortedError(f"internal error: {failure}")
        self._landed(op, mapping, error, None)

    def _landed(
        self,
        op: Operation,
        mapping: Mapping | None,
        failed: KVFerryError | None,
        later: KVFerryError | None,
    ) -> None:
        """A device touches the memory of an operation no more. ``failed``: why it was not begun,
        ``later``: why it did not end well."""
        services = self._services
        assert services is not None
        error = failed or later
        if error is not None:
            error.located(peer=op.peer.name, path=f"{self.name}/{op.path}", stage="move")
        if mapping is not None:
            self._exit(mapping)
        self._leave(op)
        services.complete(op, 0 if error else op.nbytes, error)

    def _check(self, op: Operation, services: Services) -> None:
        if op.stop is not None:
            raise op.stop
        if services.clock.now() >= op.deadline:
            raise DeadlineError("the deadline passed while copying")

    def _enter(self, op: Operation, services: Services) -> Mapping:
        """The mapping for an operation, made if missing, pinned until :meth:`_exit`."""
        key = (op.remote.key, op.write)
        with self._lock:
            while key in self._making:
                self._idle.wait(0.1)
                self._check(op, services)
            mapping = self._mappings.get(key)
            if mapping is not None:
                return self._pin(mapping)
            if not op.remote.exports:
                raise StaleRegionError(
                    f"region {op.remote.region_id} of the peer is gone",
                    fix="ask its owner for a reference that is still good",
                )
            self._making.add(key)
        # Without the lock: mapping fills page tables, which takes long for a large pool.
        try:
            mapping = self.map(op.remote, writable=op.write)
        except BaseException:
            self._made(key, None)
            raise
        with self._lock:
            self._made(key, mapping)
            return self._pin(mapping)

    def _made(self, key: _Key, mapping: Mapping | None) -> None:
        """The attempt to map is over."""
        with self._lock:
            self._making.discard(key)
            if mapping is not None:
                self._mappings[key] = mapping
            self._idle.notify_all()

    def _pin(self, mapping: Mapping) -> Mapping:
        if self._closed:
            raise AbortedError("the engine is closing")
        mapping.enter()
        mapping.users += 1
        return mapping

    def _exit(self, mapping: Mapping) -> None:
        """The end of :meth:`_enter`. Never raises: the operation must end whatever happens here."""
        self._guarded(mapping.exit)
        with self._lock:
            mapping.users -= 1
            gone = mapping.doomed and mapping.users == 0
        if gone:
            self._guarded(mapping.release)

    @staticmethod
    def _guarded(let_go: Callable[[], None]) -> None:
        try:
            let_go()
        except Exception:
            log.exception("a mapping was not let go; this is a bug in kvferry or in a transport")

    def _leave(self, op: Operation) -> None:
        with self._lock:
            self._ops.pop(op.op_id, None)
            self._idle.notify_all()

    def _doom(self, chosen: Callable[[tuple[bytes, int, int]], bool]) -> None:
        """Drop mappings: now if unused, else when their last copy ends."""
        free = []
        with self._lock:
            # What is being mapped right now must not appear after this.
            self._idle.wait_for(lambda: not any(chosen(key[0]) for key in self._making))
            for key in [key for key in self._mappings if chosen(key[0])]:
                mapping = self._mappings.pop(key)
                mapping.doomed = True
                if mapping.users == 0:
                    free.append(mapping)
        for mapping in free:
            mapping.release()


def copy_on_host(
    op: Operation, address: int, services: Services, check: Callable[[], None]
) -> Iterator[int]:
    """Move an operation's bytes between host memory here and a mapping at ``address``.

    Yields the size of each piece that was copied. ``check`` raises what ends the operation early.
    """
    remote = op.remote_offsets.view("u8") + address
    local, remote, lengths = cut_long(op.local_addresses(), remote, op.lengths)
    target, source = (remote, local) if op.write else (local, remote)
    threads = services.config.copy_threads if op.nbytes >= THREADS_FROM_BYTES else 1
    for begin, end, nbytes in pieces(lengths, op.nbytes):
        check()
        copy_pieces(target, source, lengths, begin, end, threads)
        yield nbytes


def begin_on_device(op: Operation, address: int, queue: CudaQueue) -> Flight:
    """The same for device memory: all of it at once, since a device moves a gigabyte within a
    millisecond. Raises DeviceError."""
    if op.resident is not None:
        lists = op.resident.on(queue.device)
        return queue.copy_resident(lists, op.local.address, address, to_first=not op.write)
    local = op.local_offsets.view("u8"), op.local.address
    remote = op.remote_offsets.view("u8"), address
    target, source = (remote, local) if op.write else (local, remote)
    return queue.copy_spans(
        target[0],
        source[0],
        op.lengths,
        target_base=target[1],
        source_base=source[1],
        length=op.length,
    )


def cut_long(local: U64, remote: U64, lengths: I64) -> tuple[U64, U64, I64]:
    """The same bytes in spans of at most PIECE_BYTES."""
    if not lengths.size or int(lengths.max()) <= PIECE_BYTES:
        return local, remote, lengths
    count = -(-lengths // PIECE_BYTES)
    which = np.repeat(np.arange(lengths.size), count)
    step = (np.arange(which.size) - np.repeat(np.cumsum(count) - count, count)) * PIECE_BYTES
    cut = np.minimum(lengths[which] - step, PIECE_BYTES)
    return local[which] + step.view("u8"), remote[which] + step.view("u8"), cut


def pieces(lengths: I64, nbytes: int) -> list[tuple[int, int, int]]:
    """Cut a span list into runs of about PIECE_BYTES: (first span, end span, bytes)."""
    if nbytes <= PIECE_BYTES:
        return [(0, lengths.size, nbytes)] if nbytes else []
    ends = np.cumsum(lengths)
    marks = np.arange(PIECE_BYTES, nbytes, PIECE_BYTES)
    cuts = np.unique(np.concatenate((np.searchsorted(ends, marks) + 1, [lengths.size])))
    out, begin = [], 0
    for end in cuts.tolist():
        out.append((begin, end, int(ends[end - 1] - (ends[begin - 1] if begin else 0))))
        begin = end
    return out


def copy_pieces(target: U64, source: U64, lengths: I64, begin: int, end: int, threads: int) -> None:
    """Copy spans ``begin`` to ``end``."""
    if begin == 0 and end == lengths.size:
        copy_spans(target, source, lengths, threads=threads)
    else:
        part = slice(begin, end)
        copy_spans(target[part], source[part], lengths[part], threads=threads)


def refuse_missing(remote: RemoteRegion, transport: str) -> RegistrationError:
    """The error for a region whose description lacks what the transport needs."""
    return RegistrationError(
        f"region {remote.region_id} of the peer has no {transport} export",
        fix="allocate it with engine.allocate(), which makes memory that can be shared",
    )
