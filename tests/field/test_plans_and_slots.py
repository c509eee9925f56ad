"""Kinds of fault around transfers in parts: plans that differ, slots that are kept, queues that
are full, and what the system's refusals are called."""

from __future__ import annotations

import errno
import os
import threading

import numpy as np
import pytest

from kvferry.errors import BusyError, KVFerryError, PeerLostError, TransferError
from kvferry.handoff import HandOff
from kvferry.layout import KVGeometry
from kvferry.regions import Spans
from kvferry.testing.conformance import failure, wait_until
from kvferry.transports import pool as pool_module
from kvferry.transports.staged import RingChannel
from kvferry.transports.tcp import TcpChannel

MIB = 1 << 20
WHOLE = Spans.whole(MIB)


def random_bytes(array, seed):
    array[:] = np.random.default_rng(seed).integers(0, 256, array.size, dtype=np.uint8)


# -- parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("refused", [0, 1, 2], ids=["first", "middle", "last"])
def test_a_push_of_which_one_part_is_refused_ends_as_failed_once(make_engine, monkeypatch, refused):
    near = make_engine("near", "tcp", lanes_max=3, split_lanes=3)
    far = make_engine("far", "tcp")
    nbytes = 18 * MIB
    owned = far.allocate(nbytes, access="read-write")
    remote = near.connect(far.addresses[0]).region(owned.ref)
    local, spans = near.allocate(nbytes), Spans.blocks(np.arange(18), MIB)
    held, others_run, begun = threading.Event(), threading.Event(), threading.Semaphore(0)
    running, ends = [], []
    move = pool_module._Lane._move

    def broken(self, part, watch):
        if part.begin == refused * 6:
            for _ in range(2):
                assert begun.acquire(timeout=5.0)
            others_run.set()
            raise OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS))
        running.append(part)
        begun.release()
        held.wait(5.0)
        try:
            move(self, part, watch)
        finally:
            running.remove(part)

    monkeypatch.setattr(pool_module._Lane, "_move", broken)
    # All spans swapped, so that neighbours do not become one.
    transfer = near.write(local, spans, remote, Spans.blocks(np.arange(18)[::-1].copy(), MIB))
    transfer.add_done_callback(lambda _: ends.append(len(running)))
    assert others_run.wait(5.0)
    assert not transfer.is_done(), "it ended while other parts were still moving"
    held.set()
    error = failure(transfer.wait, 5.0)
    assert isinstance(error, TransferError)
    wait_until(lambda: ends, "the callback never came")
    assert ends == [0]
    assert error.bytes_done <= 12 * MIB


@pytest.mark.parametrize("share", [0.0, 0.5, 0.75, 1.0])
def test_a_prefix_that_is_there_already_changes_the_plan_of_both_sides(make_engine, share):
    """Decode claims what is left after its hit; the owner's table says what moves."""
    geometry = KVGeometry(
        model="m", layers=2, kv_heads=2, head_dim=8, dtype="float16", block_tokens=4, blocks=64
    )
    left = int(48 * (1 - share))
    settings = {"ring_bytes": 4096, "ring_slots": 2}
    sides = []
    for name in ("prefill", "decode"):
        engine = make_engine(name, "staged", **settings)
        pool = engine.allocate(geometry.pool_nbytes)
        random_bytes(pool.array, len(name))
        sides.append((engine, HandOff(engine, pool, geometry), pool))
    prefill, decode = sides
    blocks = np.random.default_rng(3).permutation(64)[: -(-left // 4)]
    for _ in range(6):
        ends, done = [], threading.Semaphore(0)

        def ended(end, ends=ends, done=done):
            ends.append(end)
            done.release()

        offer = prefill[1].offer(blocks, left, on_end=ended)
        decode[1].claim(offer.params, blocks[::-1].copy(), left, on_end=ended)
        for _ in range(2):
            assert done.acquire(timeout=5.0)
        assert not [end for end in ends if getattr(end, "error", None)]
    for engine, handoff, _ in sides:
        figures = handoff.statistics()
        assert not sum(figures["offers"].values()) + sum(figures["claims"].values())
        assert engine.statistics()["running"] == 0
    source, target = (side[2].array[: geometry.pool_nbytes].reshape(4, 64, -1) for side in sides)
    assert np.array_equal(source[:, blocks], target[:, blocks[::-1]])


def test_a_ring_has_all_its_slots_again_after_transfers_of_any_size(make_engine, monkeypatch):
    near = make_engine("near", "staged", ring_bytes=4096, ring_slots=2, lanes_max=1)
    far = make_engine("far", "staged")
    source = far.allocate(MIB)
    random_bytes(source.array, 1)
    remote, local = near.connect(far.addresses[0]).region(source.ref), near.allocate(MIB)
    sizes = [1, 4095, 4096, 4097, 8192, 8193, 3 * 4096, 100_000]
    for size in sizes * 3:
        spans = Spans.of([MIB - size], [size])
        near.read(local, Spans.whole(size), remote, spans).wait(5.0)
        assert np.array_equal(local.array[:size], source.array[MIB - size :])
    await_bell, given_up = RingChannel._await, []

    def gives_up(self, kind, slot, watch):
        if len(given_up) < 3 and threading.current_thread().name.endswith("lane0"):
            given_up.append(slot)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return await_bell(self, kind, slot, watch)

    monkeypatch.setattr(RingChannel, "_await", gives_up)
    while len(given_up) < 3:
        assert isinstance(failure(near.read(local, WHOLE, remote, WHOLE).wait, 5.0), KVFerryError)
    assert near.read(local, WHOLE, remote, WHOLE).wait(5.0) == MIB
    assert np.array_equal(local.array, source.array)
    assert near.transports["staged"].statistics()["lanes"] == 1


# -- one source, two destinations ------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["staged", "tcp"])
def test_a_slow_destination_gets_its_own_bytes_beside_a_fast_one(
    make_engine, monkeypatch, transport
):
    far = make_engine("far", transport)
    sources = [far.allocate(4 * MIB) for _ in range(2)]
    whole = Spans.whole(4 * MIB)
    for seed, source in enumerate(sources):
        random_bytes(source.array, seed)
    nears = [make_engine(name, transport, ring_bytes=65536) for name in ("slow", "fast")]
    held, begun = threading.Event(), threading.Event()
    channel = {"staged": RingChannel, "tcp": TcpChannel}[transport]
    receive, slow_ones = channel.receive_into, []

    def slowly(self, *arguments):
        if not slow_ones:
            slow_ones.append(self)
            begun.set()
            held.wait(5.0)
        receive(self, *arguments)

    monkeypatch.setattr(channel, "receive_into", slowly)
    targets = [near.allocate(4 * MIB) for near in nears]
    transfers = []
    for near, source, target in zip(nears, sources, targets, strict=True):
        remote = near.connect(far.addresses[0]).region(source.ref)
        transfers.append(near.read(target, whole, remote, whole))
        assert begun.wait(5.0)
    assert transfers[1].wait(5.0) == 4 * MIB
    assert not transfers[0].is_done()
    held.set()
    assert transfers[0].wait(5.0) == 4 * MIB
    for source, target in zip(sources, targets, strict=True):
        assert np.array_equal(source.array, target.array)


# -- full queues -----------------------------------------------------------------------------------


def test_a_full_queue_says_so_at_once_and_takes_more_when_there_is_room(make_engine, monkeypatch):
    near = make_engine("near", "tcp", lanes_max=1, lane_queue_max=2)
    far = make_engine("far", "tcp")
    remote = near.connect(far.addresses[0]).region(far.allocate(MIB).ref)
    local, held, begun = near.allocate(MIB), threading.Event(), threading.Event()
    receive = TcpChannel.receive_spans

    def slowly(*arguments):
        begun.set()
        held.wait(5.0)
        receive(*arguments)

    monkeypatch.setattr(TcpChannel, "receive_spans", slowly)
    first = near.read(local, WHOLE, remote, WHOLE)
    assert begun.wait(5.0)
    waiting = [near.read(local, WHOLE, remote, WHOLE) for _ in range(2)]
    refused = failure(near.read(local, WHOLE, remote, WHOLE).wait, 1.0)
    assert isinstance(refused, BusyError)
    assert "raise lane_queue_max" in str(refused)
    assert refused.retryable
    held.set()
    assert [transfer.wait(5.0) for transfer in (first, *waiting)] == [MIB] * 3
    assert near.read(local, WHOLE, remote, WHOLE).wait(5.0) == MIB


# -- what the system says ------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [
        (errno.ECONNRESET, PeerLostError, "something between the two"),
        (errno.EPIPE, PeerLostError, "Broken pipe"),
        (errno.ENOBUFS, TransferError, "the peer is not to blame"),
        (errno.ENOMEM, TransferError, "short of memory"),
        (errno.ETIMEDOUT, TransferError, "look at routes"),
        (errno.EHOSTUNREACH, TransferError, "look at routes"),
        (errno.EPERM, TransferError, "local firewall rules"),
        (errno.EIO, TransferError, "look at its log"),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else "",
)
@pytest.mark.parametrize("spare", [False, True], ids=["alone", "with a second path"])
def test_a_refusal_of_the_system_is_named_and_blames_no_live_peer(
    make_engine, monkeypatch, number, kind, said, spare
):
    transports = ("tcp", "staged") if spare else ("tcp",)
    near, far = make_engine("near", *transports), make_engine("far", *transports)
    source = far.allocate(MIB)
    source.array[:] = 3
    peer, local = near.connect(far.addresses[0]), near.allocate(MIB)
    remote = peer.region(source.ref)

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(TcpChannel, "receive_spans", refuse)
    near.moves._paths.demote(far.incarnation, "staged", "pull", "tried last in this test")
    transfer = near.read(local, WHOLE, remote, WHOLE)
    if spare:
        assert transfer.wait(5.0) == MIB
        assert transfer.path == "staged/pull"
        assert local.array.min() == 3
        return
    error = failure(transfer.wait, 5.0)
    assert type(error) is kind
    assert os.strerror(number) in error.message
    assert said in str(error)
    assert (error.peer, error.path, error.stage) == ("far", "tcp/pull", "move")
    assert peer.lost is None
    peer.ping()
