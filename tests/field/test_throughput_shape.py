"""Kinds of fault in the shape of the cost: what grows with pieces, waiting, or other peers."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from kvferry.layout import KVGeometry, transfer_spans
from kvferry.memory.copy import copy_spans
from kvferry.regions import Spans
from kvferry.testing.conformance import wait_until
from kvferry.transports.base import Capabilities, Export, Transport
from kvferry.transports.tcp import TcpChannel

MIB = 1 << 20
SIZES = [0, 1, 7, 8, 511, 512, 513, 4095, 4096, 4097, 65535, 65536, 65537, MIB - 1, MIB, MIB + 1]


class Waiting(Transport):
    """A path on which operations wait, as they came, until it is closed or they are aborted."""

    name = "waiting"

    def __init__(self) -> None:
        self.ops = []
        self._services = None

    def capabilities(self):
        return Capabilities(family="remote", latency_s=1e-9, bytes_per_s=1e12)

    def open(self, services):
        self._services = services

    def close(self):
        for op in list(self.ops):
            self.end(op, op.stop)

    def export(self, region, fd):
        return Export()

    def submit(self, op):
        op.moved_at = self._services.clock.now()
        self.ops.append(op)

    def abort(self, op, error):
        super().abort(op, error)
        self.end(op, op.stop)

    def end(self, op, error=None):
        if op in self.ops:
            self.ops.remove(op)
            self._services.complete(op, 0 if error else op.nbytes, error)


def waiting_pair(make_engine, nbytes, **settings):
    """An engine, its memory, a peer's region, and the transport where operations wait."""
    transport = Waiting()
    near = make_engine("near", "waiting", extra={"waiting": transport}, **settings)
    far = make_engine("far", "waiting", extra={"waiting": Waiting()})
    remote = near.connect(far.addresses[0]).region(far.allocate(nbytes, access="read-write").ref)
    return near, near.allocate(nbytes), remote, transport


def calls_of(work: Callable[[], object]) -> int:
    """How many calls the interpreter makes in this thread while it does ``work``."""
    count = 0

    def counted(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


# -- pieces --------------------------------------------------------------------------------------


def test_calls_do_not_grow_with_the_number_of_pieces(make_engine):
    near, local, remote, transport = waiting_pair(make_engine, 16384 * 128)
    rng = np.random.default_rng(1)
    counts = {}
    for pieces in (64, 64, 16384):  # The first one is for what is made once.
        spans = [Spans.blocks(rng.permutation(16384)[:pieces], 128) for _ in range(2)]
        counts[pieces] = calls_of(partial(near.read, local, spans[0], remote, spans[1]))
        assert transport.ops[-1].lengths.size == pieces
    assert counts[16384] <= counts[64] + 20, counts
    assert counts[64] < 400


def test_calls_of_the_layout_do_not_grow_with_the_number_of_blocks():
    def spans_of(blocks):
        geometry = KVGeometry("m", 32, 8, 128, "bfloat16", 16, 4096)
        rng = np.random.default_rng(2)
        tables = [rng.permutation(4096)[:blocks] for _ in range(2)]
        return lambda: transfer_spans(geometry, tables[0], geometry, tables[1], 16 * blocks)

    counts = [calls_of(spans_of(blocks)) for blocks in (16, 16, 2048)]
    assert counts[2] <= counts[1] + 20, counts


@pytest.mark.parametrize("kind", ["contiguous", "half", "random"])
def test_runs_are_merged_where_both_sides_have_them(make_engine, kind):
    near, local, remote, transport = waiting_pair(make_engine, 4096 * 512)
    rng = np.random.default_rng(3)
    table = np.arange(512)
    if kind == "half":
        table = np.concatenate([np.arange(256), 256 + rng.permutation(256)])
    elif kind == "random":
        table = rng.permutation(512)
    spans = Spans.blocks(table, 4096)
    near.read(local, spans, remote, spans)
    runs = 1 + int((np.diff(table) != 1).sum())
    assert transport.ops[-1].lengths.size == runs
    assert transport.ops[-1].nbytes == 512 * 4096


def test_reading_and_writing_are_cut_alike(make_engine):
    near, local, remote, transport = waiting_pair(make_engine, 8 << 20)
    geometry = KVGeometry("m", 4, 2, 64, "float16", 16, 64, layout="BLKTHD")
    other = KVGeometry("m", 4, 2, 64, "float16", 16, 64)
    rng = np.random.default_rng(4)
    ours, theirs = rng.permutation(64)[:20], rng.permutation(64)[:20]
    for source, target in ((geometry, geometry), (geometry, other), (other, geometry)):
        there, here = transfer_spans(source, theirs, target, ours, 320)
        near.read(local, here, remote, there)
        back = transfer_spans(target, ours, source, theirs, 320)
        near.write(local, back[0], remote, back[1])
        read, written = transport.ops[-2:]
        assert sorted(read.lengths.tolist()) == sorted(written.lengths.tolist())
        assert read.nbytes == written.nbytes == 320 * geometry.token_bytes
    # A block that lies in one piece on both sides is moved in one piece, whatever the layers.
    assert transport.ops[0].lengths.tolist() == [16 * geometry.token_bytes] * 20


@pytest.mark.slow
def test_many_small_pieces_cost_little_more_than_the_same_bytes_at_once():
    """A bound with room for a busy machine: 1 us per piece beside ten times the copy itself."""
    pieces, size = 20_000, 1024
    source, target = (np.ones(pieces * size, np.uint8) for _ in range(2))
    rng = np.random.default_rng(5)
    addresses = [
        (array.ctypes.data + rng.permutation(pieces) * size).astype(np.uint64)
        for array in (target, source)
    ]
    whole = [np.array([array.ctypes.data], np.uint64) for array in (target, source)]

    def best(*arguments):
        times = []
        for _ in range(7):
            began = time.perf_counter()
            copy_spans(*arguments)
            times.append(time.perf_counter() - began)
        return min(times)

    at_once = best(*whole, np.array([pieces * size]))
    in_pieces = best(*addresses, np.full(pieces, size))
    assert in_pieces < 10 * at_once + 1e-6 * pieces, (in_pieces, at_once)


# -- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["inproc", "shm", "staged", "tcp"])
def test_every_size_arrives_at_any_offset(make_engine, transport):
    near, far = make_engine("near", transport), make_engine("far", transport)
    room = MIB + 64
    source, local = far.allocate(room, access="read-write"), near.allocate(room)
    pattern = np.random.default_rng(6).integers(0, 256, room, dtype=np.uint8)
    remote = near.connect(far.addresses[0]).region(source.ref)
    for number, size in enumerate(SIZES):
        here, there = 1 + number % 7, 13 + number % 5
        for write in (False, True):
            mine, theirs = local.array, source.array
            mine[:], theirs[:] = (pattern, 0) if write else (0, pattern)
            call = near.write if write else near.read
            moved = call(local, Spans.of([here], [size]), remote, Spans.of([there], [size]))
            assert moved.wait(5.0) == size
            target, at, begin = (theirs, there, here) if write else (mine, here, there)
            assert np.array_equal(target[at : at + size], pattern[begin : begin + size]), size
            assert not target[:at].any(), size
            assert not target[at + size :].any(), size


# -- waiting -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 64])
def test_waiting_costs_almost_no_processor_time(make_engine, count):
    near, local, remote, _ = waiting_pair(make_engine, 64 * 4096, stall_s=60.0)
    for i in range(count):
        block = Spans.blocks([i], 4096)
        near.read(local, block, remote, block)
    shares = []
    for _ in range(3):
        began, used = time.perf_counter(), time.process_time()
        threading.Event().wait(0.3)
        shares.append((time.process_time() - used) / (time.perf_counter() - began))
    assert near.statistics()["running"] == count
    # Two engines; what other work of this process leaves behind is in the other samples.
    assert min(shares) < 0.04, shares


def test_a_peer_that_is_slow_holds_up_no_other(make_engine, monkeypatch):
    near = make_engine("near", "tcp")
    slow, quick = make_engine("slow", "tcp"), make_engine("quick", "tcp")
    remotes = {}
    for owner in (slow, quick):
        owned = owner.allocate(MIB)
        remotes[owner] = near.connect(owner.addresses[0]).region(owned.ref)
    local, whole = near.allocate(MIB), Spans.whole(MIB)
    held, begun = threading.Event(), threading.Semaphore(0)
    receive = TcpChannel.receive_spans

    def slowly(self, *arguments):
        if not quick_turn.is_set():
            begun.release()
            held.wait(10.0)
        receive(self, *arguments)

    quick_turn = threading.Event()
    monkeypatch.setattr(TcpChannel, "receive_spans", slowly)
    stuck = [near.read(local, whole, remotes[slow], whole) for _ in range(32)]
    for _ in range(near.config.lanes_max):
        assert begun.acquire(timeout=5.0)
    quick_turn.set()
    for _ in range(50):
        assert near.read(local, whole, remotes[quick], whole).wait(5.0) == MIB
    assert not any(transfer.is_done() for transfer in stuck)
    figures = near.transports["tcp"].statistics()
    assert figures["operations_waiting"] == 32 - near.config.lanes_max
    held.set()
    assert [transfer.wait(5.0) for transfer in stuck] == [MIB] * 32


def test_transfers_to_one_peer_are_served_in_the_order_they_came(make_engine, monkeypatch):
    near, far = make_engine("near", "tcp", lanes_max=1), make_engine("far", "tcp")
    remote = near.connect(far.addresses[0]).region(far.allocate(MIB).ref)
    local, whole, order = near.allocate(MIB), Spans.whole(MIB), []
    held, begun = threading.Event(), threading.Event()
    receive = TcpChannel.receive_spans

    def slowly(self, *arguments):
        begun.set()
        held.wait(5.0)
        receive(self, *arguments)

    monkeypatch.setattr(TcpChannel, "receive_spans", slowly)
    transfers = [near.read(local, whole, remote, whole) for _ in range(20)]
    for number, transfer in enumerate(transfers):
        transfer.add_done_callback(lambda _, n=number: order.append(n))
    assert begun.wait(5.0)
    held.set()
    for transfer in transfers:
        transfer.wait(5.0)
    wait_until(lambda: len(order) == 20, "a callback is missing")
    assert order == sorted(order)
