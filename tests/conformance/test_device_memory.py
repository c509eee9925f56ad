"""Transfers between device memory, and between host and device memory, over every transport.

On the fake driver; ``make test-gpu`` runs tests/gpu/test_transfers.py on a real one.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvferry import Engine, EngineConfig
from kvferry.engine import PROCESS
from kvferry.errors import CorruptError, DeviceError, KVFerryError, NoPathError, RegistrationError
from kvferry.regions import Spans
from kvferry.testing.conformance import wait_until
from kvferry.testing.cuda import FakeCuda

NBYTES = 3 << 20
RINGS = {"device_ring_bytes": 256 << 10, "device_ring_slots": 2}


class World:
    """Two engines on one fake machine with two devices; the near one uses the first device."""

    def __init__(self, directory, transport):
        self.fake = FakeCuda(2)
        self.engines = [self._engine(name, directory, transport) for name in ("near", "far")]
        self.near, self.far = self.engines
        self.peer = self.near.connect(self.far.addresses[0])

    def _engine(self, name, directory, transport):
        if transport == "cuda_ipc":
            PROCESS.renew()  # As if each engine had a process of its own.
        config = EngineConfig(
            name=name, directory=directory, transports=(transport,), transfer_s=10.0, **RINGS
        )
        return Engine(config, cuda=lambda: self.fake)

    def memory(self, engine, kind, nbytes=NBYTES):
        """(registration, its bytes). Kinds are host, cuda:0, cuda:1."""
        if kind == "host":
            owned = engine.allocate(nbytes, access="read-write")
            return owned, owned.array
        owned = engine.allocate(nbytes, access="read-write", device=kind)
        return owned, self.fake.view(owned.region.address, nbytes)

    def close(self):
        for engine in self.engines:
            engine.close()
        assert not any(self.fake.held().values()), self.fake.held()


@pytest.fixture
def world(engine_directory):
    worlds = []

    def make(transport):
        worlds.append(World(str(engine_directory), transport))
        return worlds[-1]

    yield make
    for item in worlds:
        item.close()


def scattered(nbytes, count, seed):
    """Blocks in random order, with the rest of the region as it is."""
    size = nbytes // count // 2
    order = np.random.default_rng(seed).permutation(count)
    return Spans.of(order * (nbytes // count), size)


PAIRS = [("cuda:0", "cuda:0"), ("cuda:0", "cuda:1"), ("host", "cuda:1"), ("cuda:0", "host")]


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize("kinds", PAIRS, ids="-".join)
@pytest.mark.parametrize("transport", ["inproc", "cuda_ipc", "staged", "tcp"])
def test_bytes_arrive(world, transport, kinds, write):
    pair = world(transport)
    local, mine = pair.memory(pair.near, kinds[0])
    owned, theirs = pair.memory(pair.far, kinds[1])
    remote = pair.peer.region(owned.ref)
    rng = np.random.default_rng(1)
    mine[:] = rng.integers(0, 256, NBYTES, dtype=np.uint8)
    theirs[:] = rng.integers(0, 256, NBYTES, dtype=np.uint8)
    here, there = scattered(NBYTES, 96, 2), scattered(NBYTES, 64, 3)
    call = pair.near.write if write else pair.near.read
    mixed = "host" in kinds
    if mixed and transport in ("inproc", "cuda_ipc"):
        with pytest.raises(NoPathError, match="host"):
            call(local, here, remote, there)
        return
    expected = mine.copy(), theirs.copy()
    source, target = (expected[0], expected[1]) if write else (expected[1], expected[0])
    from_spans, to_spans = (here, there) if write else (there, here)
    flat = np.concatenate(
        [source[a : a + n] for a, n in zip(from_spans.offsets, from_spans.lengths, strict=True)]
    )
    at = 0
    for a, n in zip(to_spans.offsets, to_spans.lengths, strict=True):
        target[a : a + n] = flat[at : at + n]
        at += n
    for _ in range(2):
        assert call(local, here, remote, there).wait(10.0) == here.nbytes
    np.testing.assert_array_equal(mine, expected[0])
    np.testing.assert_array_equal(theirs, expected[1])


@pytest.mark.parametrize("transport", ["cuda_ipc", "staged", "tcp"])
def test_checksums_cover_device_memory(world, transport):
    pair = world(transport)
    (local, mine), (owned, theirs) = pair.memory(pair.near, "cuda:0"), pair.memory(pair.far, "cuda")
    theirs[:] = 5
    remote, whole = pair.peer.region(owned.ref), Spans.whole(NBYTES)
    pair.near.read(local, whole, remote, whole, checksum="full").wait(10.0)
    assert (mine == 5).all()


def test_a_path_that_brings_zeros_is_seen_by_checksums(world):
    pair = world("cuda_ipc")
    (local, _), (owned, theirs) = pair.memory(pair.near, "cuda:0"), pair.memory(pair.far, "cuda:1")
    theirs[:] = 5
    pair.fake.zeros = True
    remote, whole = pair.peer.region(owned.ref), Spans.whole(NBYTES)
    with pytest.raises(CorruptError):
        pair.near.read(local, whole, remote, whole, checksum="full").wait(10.0)


@pytest.mark.parametrize("transport", ["cuda_ipc", "staged", "tcp"])
def test_late_devices_are_waited_for(world, transport):
    pair = world(transport)
    pair.fake.late = 5
    (local, mine), (owned, theirs) = pair.memory(pair.near, "cuda:0"), pair.memory(pair.far, "cuda")
    theirs[:] = 7
    remote, whole = pair.peer.region(owned.ref), Spans.whole(NBYTES)
    pair.near.read(local, whole, remote, whole).wait(10.0)
    assert (mine == 7).all()


@pytest.mark.parametrize("transport", ["cuda_ipc", "staged", "tcp"])
@pytest.mark.parametrize("call", ["launch", "copy", "alloc", "host_alloc", "done"])
def test_a_device_that_fails_ends_the_transfer_and_the_next_one_works(world, transport, call):
    pair = world(transport)
    (local, mine), (owned, theirs) = pair.memory(pair.near, "cuda:0"), pair.memory(pair.far, "cuda")
    remote = pair.peer.region(owned.ref)
    here, there = scattered(NBYTES, 512, 2), scattered(NBYTES, 512, 3)
    pair.fake.fail.add(call)
    with pytest.raises(KVFerryError) as caught:
        pair.near.read(local, here, remote, there).wait(10.0)
    assert caught.value.path or transport != "cuda_ipc"
    pair.fake.fail.clear()
    theirs[:] = 3
    pair.near.read(local, here, remote, there).wait(10.0)
    assert int(mine.sum()) == 3 * here.nbytes


def test_memory_is_mapped_once_and_let_go_with_its_region(world):
    pair = world("cuda_ipc")
    local, _ = pair.memory(pair.near, "cuda:0")
    owned, _ = pair.memory(pair.far, "cuda:0")
    remote, whole = pair.peer.region(owned.ref), Spans.whole(NBYTES)
    for _ in range(3):
        pair.near.read(local, whole, remote, whole).wait(10.0)
    assert pair.fake.held()["opened"] == 1
    owned.close()
    wait_until(lambda: pair.fake.held()["opened"] == 0, "still mapped")


def test_a_dead_peer_leaves_no_mapping(world):
    pair = world("cuda_ipc")
    (local, _), (owned, _) = pair.memory(pair.near, "cuda:0"), pair.memory(pair.far, "cuda:0")
    remote, whole = pair.peer.region(owned.ref), Spans.whole(NBYTES)
    pair.near.read(local, whole, remote, whole).wait(10.0)
    pair.far.close()
    wait_until(lambda: pair.fake.held()["opened"] == 0, "still mapped")


def test_virtual_memory_travels_as_a_descriptor(world):
    pair = world("cuda_ipc")
    address = pair.fake.vmm_alloc(0, NBYTES)
    owned = pair.far.register((address, NBYTES), kind="cuda")
    local, mine = pair.memory(pair.near, "cuda:0")
    pair.fake.view(address, NBYTES)[:] = 8
    remote, whole = pair.peer.region(owned.ref), Spans.whole(NBYTES)
    pair.near.read(local, whole, remote, whole).wait(10.0)
    assert (mine == 8).all()
    owned.close()
    wait_until(lambda: pair.fake.held()["opened"] == 0, "still mapped")
    pair.fake.vmm_free(address, NBYTES)


def test_no_peer_access_is_a_reason(world):
    pair = world("cuda_ipc")
    pair.fake.peers = False
    (local, _), (owned, _) = pair.memory(pair.near, "cuda:0"), pair.memory(pair.far, "cuda:1")
    remote, whole = pair.peer.region(owned.ref), Spans.whole(NBYTES)
    with pytest.raises(NoPathError, match="no peer access"):
        pair.near.read(local, whole, remote, whole)


def test_a_handle_that_cannot_be_opened_is_a_reason(world):
    pair = world("cuda_ipc")
    (local, _), (owned, _) = pair.memory(pair.near, "cuda:0"), pair.memory(pair.far, "cuda:0")
    remote, whole = pair.peer.region(owned.ref), Spans.whole(NBYTES)
    pair.fake.fail.add("ipc_open")
    with pytest.raises(RegistrationError, match="cannot map the peer's device memory"):
        pair.near.read(local, whole, remote, whole).wait(10.0)


def test_a_region_must_lie_in_one_allocation(world):
    pair = world("cuda_ipc")
    pair.fake.use(0)
    address = pair.fake.alloc(4096)
    with pytest.raises(RegistrationError, match="beyond their allocation"):
        pair.near.register((address, 8192), kind="cuda")
    with pytest.raises(DeviceError, match="not device memory"):
        pair.near.register((16, 8192), kind="cuda")
    pair.fake.free(address)


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
@pytest.mark.parametrize("count", [3, 96], ids=["for the copy engine", "for the kernel"])
@pytest.mark.parametrize(
    ("transport", "kind"), [("cuda_ipc", "cuda:0"), ("staged", "cuda:0"), ("tcp", "host")]
)
def test_a_prepared_transfer_is_made_again(world, transport, kind, count, write):
    pair = world(transport)
    nbytes = 6 << 20 if count == 3 else NBYTES
    local, mine = pair.memory(pair.near, kind, nbytes)
    owned, theirs = pair.memory(pair.far, kind, nbytes)
    remote = pair.peer.region(owned.ref)
    here, there = scattered(nbytes, count, 2), scattered(nbytes, count, 3)
    with pair.near.prepare(local, here, remote, there) as prepared:
        for value in (3, 4):
            mine[:], theirs[:] = (value, 0) if write else (0, value)
            transfer = prepared.write() if write else prepared.read()
            assert transfer.wait(10.0) == prepared.nbytes == here.nbytes
            target = theirs if write else mine
            assert int(target.sum(dtype=np.int64)) == value * here.nbytes
        prepared.close()
        mine[:], theirs[:] = 5, 5
        prepared.read().wait(10.0)
