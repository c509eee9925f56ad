"""Kinds of fault around registering memory: twice, in part, nothing at all, and too much."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvferry import Engine, EngineConfig
from kvferry.errors import DeviceError, KVFerryError, StaleRegionError
from kvferry.regions import Spans
from kvferry.testing.conformance import wait_until
from kvferry.testing.cuda import FakeCuda

SIZE = 4096


def read_all(near, peer, registration, expected):
    """Whether a peer gets the bytes of a registration."""
    region = peer.region(registration.ref)
    target = np.zeros(region.nbytes, np.uint8)
    local, whole = near.register(target), Spans.whole(region.nbytes)
    near.read(local, whole, region, whole).wait(5.0)
    local.close()
    np.testing.assert_array_equal(target, expected)


@pytest.fixture
def world(make_engine):
    near, far = make_engine("near", "inproc"), make_engine("far", "inproc")
    return near, far, near.connect(far.addresses[0])


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 0, 4, 1, 3)])
def test_overlapping_regions_live_and_go_by_themselves(world, order):
    near, far, peer = world
    memory = np.random.default_rng(1).integers(0, 256, 4 * SIZE, dtype=np.uint8)
    parts = [
        memory[SIZE : 2 * SIZE],
        memory[SIZE + 100 : SIZE + 200],  # within it
        memory,  # around it
        memory[2 * SIZE : 3 * SIZE],  # beside it
        memory[SIZE // 2 : SIZE + SIZE // 2],  # across its edge
    ]
    made = [far.register(part) for part in parts]
    assert len({item.region.region_id for item in made}) == len(parts)
    for place, number in enumerate(order):
        made[number].close()
        region_id = made[number].region.region_id
        wait_until(lambda gone=region_id: gone not in peer.regions, "the peer was not told")
        with pytest.raises(StaleRegionError):
            peer.region(made[number].ref)
        for other in order[place + 1 :]:
            read_all(near, peer, made[other], parts[other])
    assert far.statistics()["regions"] == 0


@pytest.mark.slow
def test_threads_that_register_the_same_memory_share_one_registration(make_engine):
    engine, memory = make_engine(), np.zeros(SIZE, np.uint8)
    for _ in range(20):
        barrier, made = threading.Barrier(8), []

        def work(barrier=barrier, made=made):
            barrier.wait(5.0)
            made.append(engine.register(memory))

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (only,) = {id(item): item for item in made}.values()
        assert only.count == len(made) == 8
        for _ in range(8):
            assert engine.registry.has(only.region.region_id)
            only.close()
        assert engine.statistics()["regions"] == 0


def test_the_loser_of_two_that_register_at_once_leaves_nothing(make_engine):
    """The other thread comes in between looking and adding, every time."""
    engine, memory = make_engine("engine", "inproc"), np.zeros(SIZE, np.uint8)
    transport, first = engine.transports["inproc"], []
    export = transport.export

    def slow(region, fd):
        if not first:
            first.append(None)
            first[0] = engine.register(memory)
        return export(region, fd)

    transport.export = slow
    second = engine.register(memory)
    assert second is first[0]
    assert second.count == 2
    assert engine.statistics()["regions"] == 1
    second.close()
    second.close()
    assert engine.statistics()["regions"] == 0


def test_lists_that_share_a_part_are_let_go_one_after_the_other(world):
    near, far, peer = world
    whole = np.random.default_rng(2).integers(0, 256, 5 * SIZE, dtype=np.uint8)
    parts = whole.reshape(5, SIZE)
    first = [far.register(parts[i]) for i in (0, 1, 2)]
    second = [far.register(parts[i]) for i in (2, 3, 4)]
    assert first[2] is second[0]
    for item in first:
        item.close()
    for item, number in zip(second, (2, 3, 4), strict=True):
        read_all(near, peer, item, parts[number])
    for item in second:
        item.close()
    assert far.statistics()["regions"] == 0


def test_memory_of_no_bytes_is_refused_and_harms_no_other(world):
    near, far, peer = world
    good = far.register(np.full(SIZE, 7, np.uint8))
    empty = np.zeros(0, np.uint8)
    for attempt in (
        lambda: far.register(empty),
        lambda: far.register((good.region.address, 0)),
        lambda: far.allocate(0),
    ):
        with pytest.raises(KVFerryError):
            attempt()
    region, local = peer.region(good.ref), near.allocate(SIZE)
    nothing = [Spans.of([], []), Spans.of([5], [0]), Spans.of([0, 9, SIZE], 0)]
    for spans in nothing:
        assert near.read(local, spans, region, spans).wait(1.0) == 0
    read_all(near, peer, good, np.full(SIZE, 7, np.uint8))


def test_more_than_a_device_has_names_the_device_and_the_size(engine_directory):
    fake = FakeCuda(1, device_bytes=1 << 20)
    config = EngineConfig(directory=engine_directory, transports=("tcp",))
    with Engine(config, cuda=lambda: fake) as engine:
        with pytest.raises(DeviceError) as caught:
            engine.allocate(2 << 20, device="cuda")
        assert caught.value.fix
        engine.allocate(1 << 20, device="cuda").close()
    assert not any(fake.held().values())
