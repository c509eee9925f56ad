"""A wrapper that makes a real transport fail on purpose, by named faults.

::

    path = FaultyTransport(TcpTransport(), "stall", times=1)
    engine = Engine(EngineConfig(transports=("tcp",)), extra={"tcp": path})

The first operation then moves half of its bytes and stops; all later ones are sound. The bytes that
move do so over the real transport, so what it keeps (lanes, mappings, threads) is real as well. The
wrapper has its transport's name: peers, exports and lanes cannot tell the difference.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np

from kvferry.errors import (
    AbortedError,
    KVFerryError,
    PeerLostError,
    RegistrationError,
    UsageError,
)
from kvferry.protocol.messages import Hello
from kvferry.regions import Region
from kvferry.transports.base import (
    Capabilities,
    Export,
    Operation,
    PeerView,
    RemoteRegion,
    Services,
    Transport,
)

FAULTS = {
    "stall": "half of the bytes move, then none, until it is told to stop",
    "slow": "the bytes move in eight pieces with a pause after each",
    "drop_completion": "all bytes move, and the end is never reported, not after an abort either",
    "duplicate_completion": "all bytes move, and the end is reported twice",
    "corrupt": "all bytes move, one of them is changed, and success is reported",
    "truncate": "half of the bytes move, and success is reported with their number",
    "close_midflight": "half of the bytes move, then lanes and mappings of the peer are closed",
    "fail_at_submit": "submit raises RegistrationError; nothing moves",
    "late_completion": "half of the bytes move; it ignores an abort; at release() the others are "
    "moved and the end is reported",
}
"""Every fault, and what the wrapper does to an operation that has it."""

SLOW_PIECES = 8
_SILENT = ("drop_completion", "late_completion")
"""Faults that do not answer an abort."""


class FaultyTransport(Transport):
    """``inner`` with a fault.

    inner: a transport that no engine has opened. fault: a key of FAULTS, or "" for none.
    times: how many operations have it, 0 or more; None for all. pause_s: of "slow", per piece.
    hits: how many operations had a fault so far. ``fault`` and ``times`` may be set at any time and
    hold for operations that begin later. Raises ValueError for a fault that does not exist.

    Faults act on the side that moves the bytes; a peer may have the plain transport.
    """

    def __init__(
        self,
        inner: Transport,
        fault: str = "",
        *,
        times: int | None = None,
        pause_s: float = 0.005,
    ) -> None:
        self.inner = inner
        self.name = inner.name
        self.times = times
        self.pause_s = pause_s
        self.hits = 0
        self._fault = ""
        self.fault = fault
        self._lock = threading.Lock()
        self._cases: dict[int, _Case] = {}
        self._services: Services | None = None
        self._closed = False

    @property
    def fault(self) -> str:
        return self._fault

    @fault.setter
    def fault(self, name: str) -> None:
        if name and name not in FAULTS:
            raise ValueError(f"there is no fault {name!r}; known are: {', '.join(FAULTS)}")
        self._fault = name

    @property
    def held(self) -> int:
        """Operations of which the engine has not heard the end."""
        with self._lock:
            return len(self._cases)

    @property
    def silent(self) -> int:
        """Held operations whose bytes have moved as far as they will before :meth:`release`."""
        with self._lock:
            return sum(case.is_silent and case.part is None for case in self._cases.values())

    def release(self) -> int:
        """Let the silent operations report at last; returns how many. Blocks for short copies.

        "late_completion" moves the rest of its bytes first. After ``close`` there are none.
        """
        with self._lock:
            late = [case for case in self._cases.values() if case.is_silent and case.part is None]
        for case in late:
            case.is_silent = False
            self._go_on(case)
        return len(late)

    # -- what the engine calls ------------------------------------------------------------------

    def open(self, services: Services) -> None:
        self._services = services
        self.inner.open(cast(Services, _Services(services, self._completed)))

    def submit(self, op: Operation) -> None:
        fault = self._next_fault()
        if fault == "fail_at_submit":
            raise RegistrationError(
                "the transport was made to fail at submit", fix="take the fault away"
            )
        if not fault:
            self.inner.submit(op)
            return
        if fault == "corrupt" and op.local.kind != "host":
            raise UsageError("the fault 'corrupt' can only change host memory")
        case = _Case(op, fault)
        with self._lock:
            if self._closed:
                raise AbortedError("the engine is closing")
            self._cases[op.op_id] = case
        try:
            self._go_on(case)
        except BaseException:
            with self._lock:
                self._cases.pop(op.op_id, None)
            raise

    def abort(self, op: Operation, error: KVFerryError) -> None:
        super().abort(op, error)
        with self._lock:
            case = self._cases.get(op.op_id)
            part = case.part if case is not None else None
        if case is None:
            self.inner.abort(op, error)
        elif part is not None:
            self.inner.abort(part, error)
        elif not case.is_silent:
            self._end(case, op.stop)

    def disconnect(self, incarnation: bytes) -> None:
        self.inner.disconnect(incarnation)
        with self._lock:
            cases = [c for c in self._cases.values() if c.op.remote.peer == incarnation]
        for case in cases:
            self.abort(case.op, PeerLostError("the peer is gone", stage="move"))

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self.inner.close()
        with self._lock:
            cases = list(self._cases.values())
        for case in cases:
            if case.is_silent:
                with self._lock:
                    self._cases.pop(case.op.op_id, None)
            else:
                self._end(case, case.op.stop or AbortedError("the engine is closing"))
            if case.timer is not None:
                case.timer.cancel()

    def capabilities(self) -> Capabilities:
        return self.inner.capabilities()

    def unavailable(self) -> str:
        return self.inner.unavailable()

    def export(self, region: Region, fd: int) -> Export | None:
        return self.inner.export(region, fd)

    def deregister(self, region: Region) -> None:
        self.inner.deregister(region)

    def forget(self, remote: RemoteRegion) -> None:
        self.inner.forget(remote)

    def blocked(self, local: Region, remote: RemoteRegion, peer: PeerView) -> str:
        return self.inner.blocked(local, remote, peer)

    def accept(self, sock: socket.socket, fd: int, hello: Hello) -> None:
        self.inner.accept(sock, fd, hello)

    def statistics(self) -> dict[str, int]:
        return {**self.inner.statistics(), "faults": self.hits}

    # -- inside -----------------------------------------------------------------------------

    def _next_fault(self) -> str:
        """The fault of the operation that begins now."""
        with self._lock:
            if not self._fault or self.times == 0:
                return ""
            if self.times is not None:
                self.times -= 1
            self.hits += 1
            return self._fault

    def _go_on(self, case: _Case) -> None:
        """Give the next piece to the real transport, or do what comes after the last one."""
        services = self._services
        assert services is not None
        with self._lock:
            if self._closed or self._cases.get(case.op.op_id) is not case:
                return
            part = case.part = case.next_part()
        if part is not None:
            # The caller's submit may still be running: what it may raise is what this raises.
            self.inner.submit(part)
        else:
            self._after_last(case, services)

    def _after_last(self, case: _Case, services: Services) -> None:
        """What the fault does once all bytes have moved that should."""
        op, fault = case.op, case.fault
        if fault == "close_midflight":
            self.inner.disconnect(op.remote.peer)
            self._end(case, PeerLostError("the path was closed in the middle of a transfer"))
        elif fault == "duplicate_completion":
            self._end(case, None)
            services.complete(op, case.bytes_done, None)
        elif case.is_silent or (fault == "stall" and op.stop is None):
            op.moved_at = services.clock.now()  # From now on it stands still.
        elif fault == "stall" or (fault in _SILENT and case.bytes_done < op.nbytes):
            self._end(case, op.stop)
        else:
            self._end(case, None)

    def _completed(self, op: Operation, bytes_done: int, error: KVFerryError | None) -> None:
        """The real transport reports an end."""
        services = self._services
        assert services is not None
        with self._lock:
            case = self._cases.get(op.op_id)
            if case is not None and case.part is op:
                case.part = None
                case.bytes_done += bytes_done if case.spoiler is not op else 0
                case.op.began_at = case.op.began_at or op.began_at
            else:
                case = None
        if case is None:
            services.complete(op, bytes_done, error)
            return
        case.op.moved_at = services.clock.now()
        stop = error or case.op.stop
        if case.fault in _SILENT:
            if error is not None:
                case.sizes.clear()
            self._continue(case)
        elif stop is not None:
            self._end(case, stop)
        elif case.fault == "slow" and case.sizes:
            self._after_pause(case)
        else:
            self._continue(case)

    def _after_pause(self, case: _Case) -> None:
        """Go on with a slow operation later, in a thread of its own."""
        timer = threading.Timer(self.pause_s, self._continue, (case,))
        timer.daemon = True
        with self._lock:
            if self._closed:
                return  # close() ends it.
            case.timer = timer
            timer.start()

    def _continue(self, case: _Case) -> None:
        try:
            self._go_on(case)
        except KVFerryError as error:
            self._end(case, error)

    def _end(self, case: _Case, error: KVFerryError | None) -> None:
        """Report the end of an operation, unless that was done."""
        with self._lock:
            if self._cases.get(case.op.op_id) is not case:
                return
            del self._cases[case.op.op_id]
        assert self._services is not None
        self._services.complete(case.op, case.bytes_done, error)


class _Case:
    """An operation with a fault, and how far it is.

    sizes: of the pieces that are still to be moved. part: the piece that moves now.
    spoiler: the piece that spoils a byte of the peer's memory.
    """

    def __init__(self, op: Operation, fault: str) -> None:
        self.op = op
        self.fault = fault
        self.is_silent = fault in _SILENT
        self.part: Operation | None = None
        self.spoiler: Operation | None = None
        self.timer: threading.Timer | None = None
        self.bytes_done = 0
        self._keep: Any = None
        half = op.nbytes // 2
        if fault == "slow":
            marks = [op.nbytes * i // SLOW_PIECES for i in range(SLOW_PIECES + 1)]
            self.sizes = [b - a for a, b in itertools.pairwise(marks)]
        elif fault in ("drop_completion", "duplicate_completion", "corrupt"):
            self.sizes = [op.nbytes]
        elif fault == "late_completion":
            self.sizes = [half, op.nbytes - half]
        else:
            self.sizes = [half]

    def next_part(self) -> Operation | None:
        """What the real transport should do now; None when it is nothing."""
        if self.fault == "late_completion" and self.is_silent and len(self.sizes) == 1:
            return None  # The rest comes late.
        while self.sizes:
            size = self.sizes.pop(0)
            if size:
                begin = self.op.nbytes - size - sum(self.sizes) if self._covers_all else 0
                part = share(self.op, begin, begin + size)
                if self.fault == "late_completion" and not self.is_silent:
                    # Long after its abort and its deadline: that is what is late about it.
                    part.stop, part.deadline = None, math.inf
                return part
        if self.fault == "corrupt" and self.spoiler is None:
            return self._spoil()
        return None

    @property
    def _covers_all(self) -> bool:
        """Whether the pieces together are the whole operation."""
        return self.fault not in ("stall", "truncate", "close_midflight")

    def _spoil(self) -> Operation | None:
        """Change the target's byte in the middle: here, or by another write to the peer."""
        middle = self.op.nbytes // 2
        one = share(self.op, middle, middle + 1)
        byte = ctypes.c_ubyte.from_address(int(one.local_addresses()[0]))
        self.spoiler = one
        if not self.op.write:
            byte.value ^= 0xFF
            return None
        wrong = self._keep = ctypes.c_ubyte(byte.value ^ 0xFF)
        scratch = replace(self.op.local, address=ctypes.addressof(wrong), nbytes=1)
        self.spoiler = replace(one, local=scratch, local_offsets=np.zeros(1, np.int64))
        return self.spoiler


class _Services:
    """The engine's services, with the ends of operations going to the wrapper first."""

    def __init__(
        self, services: Services, complete: Callable[[Operation, int, KVFerryError | None], None]
    ) -> None:
        self._services = services
        self.complete = complete

    def __getattr__(self, name: str) -> Any:
        return getattr(self._services, name)


def share(op: Operation, begin: int, end: int) -> Operation:
    """An operation for the bytes ``begin`` to ``end`` of another, counted over all its spans."""
    ends = np.cumsum(op.lengths)
    first = int(np.searchsorted(ends, begin, side="right"))
    last = int(np.searchsorted(ends, end, side="left")) + 1
    local, remote, lengths = (
        array[first:last].copy() for array in (op.local_offsets, op.remote_offsets, op.lengths)
    )
    skip = begin - int(ends[first] - op.lengths[first])
    local[0] += skip
    remote[0] += skip
    lengths[0] -= skip
    lengths[-1] -= int(ends[last - 1]) - end
    return replace(
        op, local_offsets=local, remote_offsets=remote, lengths=lengths, nbytes=end - begin
    )
