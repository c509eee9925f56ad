"""The wrapper does to a transport what each fault's name says, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry.errors import AbortedError, PeerLostError, RegistrationError, UsageError
from kvferry.regions import Region
from kvferry.testing import FAULTS, FakeClock, FaultyTransport
from kvferry.testing.fault_checks import FAULT_CHECKS
from kvferry.testing.faulty import SLOW_PIECES, share
from kvferry.transports.base import Capabilities, Export, Operation, PeerView, RemoteRegion
from kvferry.transports.base import Transport as TransportBase

NBYTES = 1000
PEER = PeerView(b"p" * 16, "peer", b"", "", "", "", b"")


class Instant(TransportBase):
    """Moves bytes at once, into and from an array that stands for the peer's memory."""

    name = "instant"

    def __init__(self) -> None:
        self.there = np.arange(NBYTES, dtype=np.uint64).astype(np.uint8)
        self.here = np.zeros(NBYTES, np.uint8)
        self.ops: list[Operation] = []
        self.gone: list[bytes] = []
        self.waiting: list[Operation] = []
        self.aborted: list[Operation] = []
        self.is_paused = False
        self._services: Any = None

    def capabilities(self) -> Capabilities:
        return Capabilities(family="remote", latency_s=0.125)

    def open(self, services: Any) -> None:
        self._services = services

    def close(self) -> None:
        return None

    def export(self, region: Region, fd: int) -> Export | None:
        return Export(b"instant")

    def disconnect(self, incarnation: bytes) -> None:
        self.gone.append(incarnation)

    def submit(self, op: Operation) -> None:
        self.ops.append(op)
        if self.is_paused:
            self.waiting.append(op)
        else:
            self.move(op)

    def abort(self, op: Operation, error: Any) -> None:
        super().abort(op, error)
        if op in self.waiting:
            self.waiting.remove(op)
            self.aborted.append(op)
            self._services.complete(op, 0, error)

    def move(self, op: Operation) -> None:
        for a, b, n in zip(op.local_offsets, op.remote_offsets, op.lengths, strict=True):
            if op.write and op.local.nbytes == 1:  # A byte that is not in the region.
                self.there[b] ^= 0xFF
            elif op.write:
                self.there[b : b + n] = self.here[a : a + n]
            else:
                self.here[a : a + n] = self.there[b : b + n]
        self._services.complete(op, op.nbytes, None)


class Ends:
    """The engine's side: what was reported, in order."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.reports: list[tuple[int, Any]] = []
        self.came = threading.Event()

    def complete(self, op: Operation, bytes_done: int, error: Any) -> None:
        self.reports.append((bytes_done, error))
        self.came.set()


class World:
    """A wrapper around an instant transport."""

    def __init__(self, fault: str, **how: Any) -> None:
        self.inner = Instant()
        self.path = FaultyTransport(self.inner, fault, **how)
        self.ends = Ends()
        self.path.open(self.ends)  # type: ignore[arg-type]
        self.remote = RemoteRegion(PEER.incarnation, 1, "host", "", NBYTES, 1, b"", "read", {})
        address = self.inner.here.ctypes.data
        self.local = Region(1, "host", "", address, NBYTES, 1, b"")

    def start(self, number: int = 1, *, write: bool = False) -> Operation:
        """An operation over all bytes, in two spans."""
        offsets, lengths = np.array([0, 300]), np.array([300, 700])
        op = Operation(
            number, write, self.local, self.remote, PEER, offsets, offsets, lengths, NBYTES, 5.0
        )
        self.path.submit(op)
        return op

    @property
    def arrived(self) -> int:
        """Bytes that are as they should be, from the first on."""
        different = np.flatnonzero(self.inner.here != self.inner.there)
        return int(different[0]) if different.size else NBYTES


@pytest.fixture
def world() -> Iterator[Any]:
    """``world(fault, ...)``; what was made is closed at the end."""
    made: list[World] = []

    def make(fault: str, **how: Any) -> World:
        made.append(World(fault, **how))
        made[-1].inner.here[:] = ~made[-1].inner.there
        return made[-1]

    yield make
    for each in made:
        each.path.close()


def test_without_a_fault_nothing_is_changed(world):
    w = world("")
    op = w.start()
    assert w.ends.reports == [(NBYTES, None)]
    assert w.inner.ops == [op]
    assert w.inner.ops[0] is op
    assert w.path.capabilities().latency_s == 0.125
    assert w.path.name == "instant"
    assert w.path.export(w.local, -1) == Export(b"instant")
    assert w.path.statistics() == {"faults": 0}


def test_a_fault_that_does_not_exist_is_refused(world):
    with pytest.raises(ValueError, match=r"hiccup.*stall"):
        FaultyTransport(Instant(), "hiccup")
    w = world("")
    with pytest.raises(ValueError, match="hiccup"):
        w.path.fault = "hiccup"
    assert all(FAULTS.values())


def test_so_many_operations_have_it(world):
    w = world("truncate", times=2)
    for number in range(4):
        w.start(number)
    assert [done for done, _ in w.ends.reports] == [500, 500, NBYTES, NBYTES]
    assert w.path.hits == 2


def test_stall_moves_half_until_it_is_stopped(world):
    w = world("stall")
    op = w.start()
    assert w.arrived == 500
    assert not w.ends.reports
    assert w.path.held == 1
    assert op.moved_at == w.ends.clock.now()
    error = AbortedError("stop")
    w.path.abort(op, error)
    w.path.abort(op, error)
    assert w.ends.reports == [(500, error)]
    assert w.path.held == 0


def test_slow_moves_all_in_pieces(world):
    w = world("slow", pause_s=0.0001)
    w.start()
    assert w.ends.came.wait(5.0)
    assert w.ends.reports == [(NBYTES, None)]
    assert len(w.inner.ops) == SLOW_PIECES
    assert w.arrived == NBYTES


def test_slow_can_be_stopped_in_a_pause(world):
    w = world("slow", pause_s=60.0)
    op = w.start()
    error = AbortedError("stop")
    w.path.abort(op, error)
    assert w.ends.reports == [(NBYTES // SLOW_PIECES, error)]


def test_a_piece_that_moves_is_what_is_aborted(world):
    w = world("slow")
    w.inner.is_paused = True
    op = w.start()
    error = AbortedError("stop")
    w.path.abort(op, error)
    assert w.inner.aborted == w.inner.ops
    assert w.ends.reports == [(0, error)]


def test_dropped_completions_come_with_the_release(world):
    w = world("drop_completion")
    op = w.start()
    assert w.arrived == NBYTES
    w.path.abort(op, AbortedError("stop"))
    assert not w.ends.reports
    assert w.path.silent == w.path.held == 1
    assert w.path.release() == 1
    assert w.ends.reports == [(NBYTES, None)]
    assert w.path.release() == 0


def test_duplicates_come_twice(world):
    w = world("duplicate_completion")
    w.start()
    assert w.ends.reports == [(NBYTES, None)] * 2


@pytest.mark.parametrize("write", [False, True])
def test_corrupt_changes_one_byte_of_the_target(world, write):
    w = world("corrupt")
    source = (w.inner.here if write else w.inner.there).copy()
    w.start(write=write)
    assert w.ends.reports == [(NBYTES, None)]
    target, kept = (w.inner.there, w.inner.here) if write else (w.inner.here, w.inner.there)
    assert np.flatnonzero(target != source).tolist() == [500]
    assert np.array_equal(kept, source)


def test_corrupt_leaves_the_memory_of_a_device_alone(world):
    w = world("corrupt")
    w.local = replace(w.local, kind="cuda")
    with pytest.raises(UsageError, match="host memory"):
        w.start()
    assert not w.inner.ops


def test_truncate_tells_how_many_came(world):
    w = world("truncate")
    w.start()
    assert w.ends.reports == [(500, None)]
    assert w.arrived == 500


def test_close_midflight_closes_what_belongs_to_the_peer(world):
    w = world("close_midflight")
    w.start()
    ((done, error),) = w.ends.reports
    assert done == w.arrived == 500
    assert isinstance(error, PeerLostError)
    assert w.inner.gone == [PEER.incarnation]


def test_fail_at_submit_moves_nothing(world):
    w = world("fail_at_submit")
    with pytest.raises(RegistrationError, match="; take the fault away"):
        w.start()
    assert not w.inner.ops
    assert not w.ends.reports
    assert w.path.held == 0


def test_the_late_half_comes_after_abort_and_deadline(world):
    w = world("late_completion")
    op = w.start()
    w.path.abort(op, AbortedError("stop"))
    assert w.arrived == 500
    assert not w.ends.reports
    assert w.path.release() == 1
    assert w.arrived == NBYTES
    assert w.ends.reports == [(NBYTES, None)]
    late = w.inner.ops[-1]
    assert late.stop is None
    assert late.deadline > op.deadline


def test_an_abort_that_stops_the_first_half_leaves_nothing_to_come(world):
    w = world("late_completion")
    w.inner.is_paused = True
    op = w.start()
    error = AbortedError("stop")
    w.path.abort(op, error)
    assert not w.ends.reports
    w.path.release()
    assert w.ends.reports == [(0, error)]


@pytest.mark.parametrize(("fault", "reports"), [("stall", 1), ("drop_completion", 0)])
def test_a_peer_that_is_gone_ends_what_can_be_ended(world, fault, reports):
    w = world(fault)
    w.start()
    w.path.disconnect(b"somebody else")
    assert not w.ends.reports
    w.path.disconnect(PEER.incarnation)
    assert len(w.ends.reports) == reports


@pytest.mark.parametrize(("fault", "reports"), [("stall", 1), ("late_completion", 0)])
def test_closing_ends_what_can_be_ended(world, fault, reports):
    w = world(fault)
    w.start()
    w.path.close()
    assert len(w.ends.reports) == reports
    assert w.path.held == 0
    assert w.path.release() == 0
    with pytest.raises(AbortedError):
        w.start(2)


@pytest.mark.parametrize(
    ("begin", "end", "spans"),
    [
        (0, 1000, [(0, 300), (300, 700)]),
        (0, 300, [(0, 300)]),
        (300, 301, [(300, 1)]),
        (299, 301, [(299, 1), (300, 1)]),
        (999, 1000, [(999, 1)]),
        (100, 200, [(100, 100)]),
    ],
)
def test_a_share_of_an_operation(world, begin, end, spans):
    w = world("")
    part = share(w.start(), begin, end)
    assert list(zip(part.local_offsets, part.lengths, strict=True)) == spans
    assert part.remote_offsets.tolist() == part.local_offsets.tolist()
    assert part.nbytes == end - begin == part.lengths.sum()


def test_the_page_says_what_the_tables_say():
    page = (Path(__file__).parents[3] / "docs/reference/faults.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert [row for row in rows if len(row) == 2] == [
        [f"`{n}`", what] for n, what in FAULTS.items()
    ]
    outcomes = [[f"`{row.fault}`", row.when, row.outcome] for row in FAULT_CHECKS]
    assert [row for row in rows if len(row) == 3] == outcomes
