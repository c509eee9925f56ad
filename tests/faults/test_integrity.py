"""End-to-end checksums: a wrong byte is found over whichever path, named, and read once more."""

from __future__ import annotations

import ctypes
import threading
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from kvferry import digests
from kvferry.errors import CorruptError, DeadlineError, PeerLostError, UsageError
from kvferry.handoff import HandOff
from kvferry.layout import KVGeometry
from kvferry.protocol.messages import Verify
from kvferry.regions import Spans
from kvferry.testing.conformance import wait_until
from kvferry.transports.base import Capabilities
from kvferry.transports.inproc import InprocTransport

from .helpers import Ends, Held

BLOCK = 4096
NBYTES = 64 * BLOCK


class Garbling(InprocTransport):
    """Copies well, and then changes single bytes on the local side."""

    name = "garbling"
    first = True
    at = (5 * BLOCK + 17, 9 * BLOCK)

    def capabilities(self):
        return Capabilities(family="mapped", bytes_per_s=1e12, latency_s=1e-9, span_s=0.0)

    def _leave(self, op):
        super()._leave(op)
        if self.first:
            view = (ctypes.c_ubyte * op.local.nbytes).from_address(op.local.address)
            for offset in self.at:
                view[offset] ^= 1


class Twice(Garbling):
    """A second path that is as bad."""

    name = "twice"

    def capabilities(self):
        return Capabilities(family="mapped", bytes_per_s=9e11, latency_s=2e-9, span_s=0.0)


@pytest.fixture
def pair(make_engine):
    """``make(*paths, transports=, **settings)`` gives a world with two engines."""

    class World:
        def __init__(self, *paths, transports=("tcp",), **settings):
            names = [*(path.name for path in paths), *transports]
            self.near = make_engine(
                "near", *names, extra={path.name: path() for path in paths}, **settings
            )
            self.far = make_engine("far", *names, extra={path.name: path() for path in paths})
            self.local = self.near.allocate(NBYTES)
            self.owned = self.far.allocate(NBYTES, access="read-write")
            self.owned.array[:] = np.random.default_rng(3).integers(0, 256, NBYTES, np.uint8)
            self.peer = self.near.connect(self.far.addresses[0])
            self.remote = self.peer.region(self.owned.ref)
            # In another order on the two sides, so that nothing is merged.
            order = np.random.default_rng(4).permutation(NBYTES // BLOCK)
            self.mine = Spans.blocks(order, BLOCK)
            self.theirs = Spans.blocks(order[::-1].copy(), BLOCK)

        def read(self, **options):
            return self.near.read(self.local, self.mine, self.remote, self.theirs, **options)

        def write(self, **options):
            return self.near.write(self.local, self.mine, self.remote, self.theirs, **options)

        def is_whole(self):
            a = self.local.array.reshape(-1, BLOCK)[self.mine.offsets // BLOCK]
            b = self.owned.array.reshape(-1, BLOCK)[self.theirs.offsets // BLOCK]
            return bool((a == b).all())

    return World


@pytest.mark.parametrize("transport", ["inproc", "shm", "staged", "tcp"])
@pytest.mark.parametrize("level", ["sampled", "full"])
def test_good_bytes_pass_over_each_transport(pair, transport, level):
    world = pair(transports=(transport,), checksum=level)
    assert world.read().wait(5.0) == NBYTES
    assert world.is_whole()
    world.local.array[:] = 9
    assert world.write().wait(5.0) == NBYTES
    assert world.is_whole()
    figures = world.near.statistics()
    assert (figures["verified"], figures["corrupt"]) == (2, 0)


def test_nothing_is_compared_unless_it_is_asked_for(pair):
    world = pair(Garbling)
    assert world.read().wait(5.0) == NBYTES
    assert not world.is_whole()
    assert world.near.statistics()["verified"] == 0
    with pytest.raises(UsageError, match="one of off, sampled, full"):
        world.read(checksum="some")


def test_wrong_bytes_are_read_again_by_the_next_path(pair, caplog):
    world = pair(Garbling)
    transfer = world.read(checksum="full")
    assert transfer.wait(5.0) == NBYTES
    assert (transfer.path, world.is_whole()) == ("tcp/pull", True)
    figures = world.near.statistics()
    assert (figures["verified"], figures["corrupt"], figures["demotions"]) == (1, 1, 1)
    assert "2 of 64 compared spans differ" in caplog.text
    assert world.read().path == "tcp/pull"


def test_the_second_mismatch_ends_the_transfer_and_names_the_place(pair):
    world = pair(Garbling, Twice)
    transfer = world.read(checksum="full")
    with pytest.raises(CorruptError) as caught:
        transfer.wait(5.0)
    error = caught.value
    assert (error.peer, error.path, error.stage) == ("far", "twice/pull", "verify")
    assert error.attempts[0].startswith("garbling/pull: 2 of 64 compared spans differ")
    places = [
        (int(a), int(b))
        for a, b in zip(world.mine.offsets, world.theirs.offsets, strict=True)
        if a // BLOCK in (5, 9)
    ]
    assert f"4096 bytes at local offset {places[0][0]}, remote offset {places[0][1]}" in str(error)
    assert error.fix
    # The third path was not tried: whoever finds two bad ones has another fault than the path's.
    assert world.near.statistics()["bytes_by_path"] == {}


def test_a_write_is_not_repeated(pair):
    world = pair(Garbling)
    with pytest.raises(CorruptError, match=r"\d of 64 compared spans differ"):
        world.write(checksum="full").wait(5.0)
    assert world.near.statistics()["demotions"] == 1


def test_many_batches_are_compared_one_after_the_other(pair, monkeypatch):
    monkeypatch.setattr(digests, "BATCH_PIECES_MAX", 5)
    world = pair(Garbling, checksum="full")
    transfer = world.read()
    assert transfer.wait(5.0) == NBYTES
    assert transfer.path == "tcp/pull"
    assert world.near.statistics()["corrupt"] == 1


@contextmanager
def silent_owner(world, monkeypatch):
    """The owner takes requests for digests and does not answer before the end of the block."""
    asked, go = threading.Event(), threading.Event()
    answers = world.far._answers
    real = answers._digests

    def slowly(peer, message):
        asked.set()
        go.wait(10.0)
        return real(peer, message)

    monkeypatch.setattr(answers, "_digests", slowly)
    try:
        yield asked
    finally:
        go.set()


def test_the_deadline_holds_while_bytes_are_compared(pair, monkeypatch):
    world = pair()
    with silent_owner(world, monkeypatch) as asked:
        transfer = world.read(checksum="full", deadline_s=0.5)
        with pytest.raises(DeadlineError):
            transfer.wait(5.0)
        assert asked.is_set()
        assert transfer.seconds < 2.0
    assert world.near.statistics()["demotions"] == 0


def test_a_comparison_is_cancelled_at_once(pair, monkeypatch):
    world = pair()
    with silent_owner(world, monkeypatch) as asked:
        transfer = world.read(checksum="full")
        assert asked.wait(5.0)
        transfer.cancel()
        wait_until(transfer.is_done, "the cancel did nothing")
        assert transfer.error.code == "aborted"
        assert transfer.is_quiet()


def test_a_peer_that_goes_while_bytes_are_compared(pair, monkeypatch):
    world = pair()
    with silent_owner(world, monkeypatch) as asked:
        transfer = world.read(checksum="full")
        assert asked.wait(5.0)
        with world.far.locked():
            for peer in world.far.connections.open_peers():
                world.far.connections.drop(peer, "for this test")
        with pytest.raises(PeerLostError):
            transfer.wait(5.0)


def ask(world, **fields):
    """Send one request for digests as a peer would, and return (answer, error)."""
    region = world.remote
    one = np.array([BLOCK], np.int64).tobytes()
    fields = {
        "region_id": region.region_id,
        "token": region.token,
        "generation": region.generation,
        "offsets": np.array([0], np.int64).tobytes(),
        "lengths": one,
        "kind": digests.KIND,
        **fields,
    }
    box, came = [], threading.Event()

    def reply(answer, error):
        box.extend((answer, error))
        came.set()

    with world.near.locked():
        deadline = world.near.clock.now() + 5.0
        world.peer.request(lambda number: Verify(number, **fields), deadline, reply)
    assert came.wait(5.0)
    return box


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"token": bytes(16)}, "stale_region"),
        ({"generation": 99}, "stale_region"),
        ({"offsets": np.array([NBYTES], np.int64).tobytes()}, "bounds"),
        ({"offsets": np.array([-1], np.int64).tobytes()}, "usage"),
        ({"offsets": b"odd"}, "protocol"),
        ({"kind": "md5"}, "protocol"),
        (
            {
                "offsets": np.zeros(1100, np.int64).tobytes(),
                "lengths": np.full(1100, NBYTES, np.int64).tobytes(),
            },
            "bounds",
        ),
    ],
)
def test_the_owner_checks_what_it_is_asked(pair, fields, code):
    world = pair()
    _, error = ask(world, **fields)
    assert error.code == code
    answer, error = ask(world)
    assert (error, len(answer.values)) == (None, 8)


def test_memory_of_a_device_that_is_not_here_is_never_read(pair):
    world = pair()
    owner = world.far.registry.find(world.remote.region_id, world.remote.token)
    owner.region = replace(owner.region, kind="cuda", device="GPU-none")
    _, error = ask(world)
    assert error.code == "device"
    owner.region = replace(owner.region, kind="host", device="")


def test_a_peer_keeps_one_mover_busy_at_most(pair, monkeypatch):
    world = pair()
    at_work, most = [], []
    real = world.far._answers._digests

    def counted(peer, message):
        at_work.append(1)
        most.append(len(at_work))
        try:
            return real(peer, message)
        finally:
            at_work.pop()

    monkeypatch.setattr(world.far._answers, "_digests", counted)
    transfers = [world.read(checksum="full") for _ in range(8)]
    assert all(transfer.wait(5.0) for transfer in transfers)
    assert (len(most), max(most)) == (8, 1)


def test_too_many_questions_are_refused(pair, monkeypatch):
    monkeypatch.setattr("kvferry.integrity.ASKED_MAX", 0)
    world = pair()
    with silent_owner(world, monkeypatch) as asked:
        first = world.read(checksum="full")
        assert asked.wait(5.0)
        _, error = ask(world)
        assert error.code == "busy"
    assert first.wait(5.0) == NBYTES


def test_a_claim_of_wrong_bytes_fails_and_prefill_gets_its_blocks_back(make_engine):
    geometry = KVGeometry("m", 2, 2, 8, "float16", 4, 16)
    sides = []
    for name in ("prefill", "decode"):
        engine = make_engine(
            name, "garbling", extra={"garbling": Garbling()}, checksum="full", lease_s=5.0
        )
        pool = engine.allocate(max(geometry.pool_nbytes, NBYTES))
        sides.append((engine, HandOff(engine, pool, geometry), pool))
    (_, prefill, source), (engine, decode, _) = sides
    source.array[:] = 7
    engine.transports["garbling"].at = (128, 300)
    offered, claimed = Ends(), Ends()
    # Blocks of 64 bytes: block 2 of the first layer's keys lies at 128.
    offer = prefill.offer([5, 6], 8, on_end=offered, extra={"first_token": 42})
    decode.claim(offer.params, [2, 3], 8, on_end=claimed)
    end = claimed.one()
    assert isinstance(end.error, CorruptError)
    assert (end.error.stage, end.extra) == ("verify", {})
    assert offered.one().code == "released"
    assert decode.statistics()["ended"] == {"claim_corrupt": 1}


def test_a_path_that_succeeds_after_its_peer_was_lost_is_not_compared_and_ends_once(make_engine):
    near = make_engine("near", "held", extra={"held": (held := Held())})
    far = make_engine("far", "held", extra={"held": Held()})
    held.ends_on_abort = False
    local, owned = near.allocate(NBYTES), far.allocate(NBYTES)
    whole = Spans.whole(NBYTES)
    remote = near.connect(far.addresses[0]).region(owned.ref)
    transfer = near.read(local, whole, remote, whole, checksum="full")
    far.close()
    wait_until(lambda: held.aborted, "the loss was not noticed")
    held.end(held.ops[0])
    with pytest.raises(PeerLostError):
        transfer.wait(5.0)
    assert near.statistics()["running"] == near.statistics()["verified"] == 0
