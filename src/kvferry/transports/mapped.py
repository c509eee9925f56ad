"""The mapped family: the peer's memory appears in this address space, and one copy moves
everything.

A subclass supplies :meth:`MappedTransport.map` alone. Mappings are made at first use, once per
region of a peer, and dropped when the region or the peer goes and no copy uses them any more.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvferry.errors import (
    AbortedError,
    DeadlineError,
    KVFerryError,
    PeerLostError,
    RegistrationError,
)
from kvferry.memory.copy import copy_spans
from kvferry.regions import I64, U64
from kvferry.transports.base import Operation, RemoteRegion, Services, Transport

PIECE_BYTES = 16 << 20
"""An abort or a deadline is noticed after so many bytes at the latest: about 2 ms."""
THREADS_FROM_BYTES = 8 << 20
"""From here on a second thread is worth its start."""


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
    """Copies between local memory and mappings of a peer's memory."""

    def __init__(self) -> None:
        self._services: Services | None = None
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._mappings: dict[tuple[tuple[bytes, int, int], bool], Mapping] = {}
        self._running: set[int] = set()
        self._ops: dict[int, Operation] = {}
        self._closed = False

    @abstractmethod
    def map(self, remote: RemoteRegion, *, writable: bool) -> Mapping:
        """Make the region visible here. Raises RegistrationError or StaleRegionError."""

    def open(self, services: Services) -> None:
        self._services = services

    def submit(self, op: Operation) -> None:
        services = self._services
        assert services is not None
        with self._lock:
            self._ops[op.op_id] = op
        try:
            if op.nbytes <= services.config.inline_bytes_max:
                self._move(op)
            else:
                services.run(lambda: self._move(op))
        except KVFerryError:
            self._leave(op)
            raise

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
        self._doom(lambda _key: True)

    def statistics(self) -> dict[str, int]:
        with self._lock:
            return {"mappings": len(self._mappings), "operations": len(self._ops)}

    # -- inside -----------------------------------------------------------------------------

    def _move(self, op: Operation) -> None:
        services = self._services
        assert services is not None
        done, error = 0, None
        key = (op.remote.key, op.write)
        mapping = None
        try:
            mapping = self._enter(op, key)
            op.began_at = services.clock.now()
            remote = op.remote_offsets.view("u8") + mapping.address
            local = op.local_addresses()
            target, source = (remote, local) if op.write else (local, remote)
            threads = services.config.copy_threads if op.nbytes >= THREADS_FROM_BYTES else 1
            for begin, end, nbytes in pieces(op.lengths, op.nbytes):
                self._check(op, services)
                copy_pieces(target, source, op.lengths, begin, end, threads)
                done += nbytes
        except KVFerryError as failure:
            error = failure.located(
                peer=op.peer.name, path=f"{self.name}/{op.path}", stage="move", bytes_done=done
            )
        finally:
            if mapping is not None:
                self._exit(mapping)
            self._leave(op)
        services.complete(op, done, error)

    def _check(self, op: Operation, services: Services) -> None:
        if op.stop is not None:
            raise op.stop
        if services.clock.now() >= op.deadline:
            raise DeadlineError("the deadline passed while copying")

    def _enter(self, op: Operation, key: tuple[tuple[bytes, int, int], bool]) -> Mapping:
        """The mapping for an operation, made if missing, pinned until :meth:`_exit`."""
        with self._lock:
            if self._closed:
                raise AbortedError("the engine is closing")
            mapping = self._mappings.get(key)
            if mapping is None:
                # Mapping takes the lock's time once per region of a peer, and never twice at once.
                mapping = self.map(op.remote, writable=op.write)
                self._mappings[key] = mapping
            mapping.enter()
            mapping.users += 1
            return mapping

    def _exit(self, mapping: Mapping) -> None:
        mapping.exit()
        with self._lock:
            mapping.users -= 1
            gone = mapping.doomed and mapping.users == 0
        if gone:
            mapping.release()

    def _leave(self, op: Operation) -> None:
        with self._lock:
            self._ops.pop(op.op_id, None)
            self._idle.notify_all()

    def _doom(self, chosen: Callable[[tuple[bytes, int, int]], bool]) -> None:
        """Drop mappings: now if unused, else when their last copy ends."""
        free = []
        with self._lock:
            for key in [key for key in self._mappings if chosen(key[0])]:
                mapping = self._mappings.pop(key)
                mapping.doomed = True
                if mapping.users == 0:
                    free.append(mapping)
        for mapping in free:
            mapping.release()


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
