"""Transfers between two processes on a real device: bytes, deaths, and what is left afterwards."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import pytest
from tests.unit.memory.cuda_checks import addresses, forever

from kvferry import Engine, EngineConfig
from kvferry.errors import KVFerryError
from kvferry.regions import Spans
from kvferry.testing import Child
from kvferry.testing.conformance import wait_until

pytestmark = pytest.mark.gpu

NBYTES = 64 << 20
FAR = """
import ctypes
import numpy as np
from kvferry import Engine, EngineConfig

def start(directory, transport, kind, seed):
    global engine, owned
    engine = Engine(EngineConfig(name="far", directory=directory, transports=(transport,)))
    device = "cuda" if kind == "cuda" else ""
    owned = engine.allocate({nbytes}, access="read-write", device=device)
    put(seed)
    return engine.addresses[0], owned.ref.hex()

def pinned():
    global host, array
    cuda = engine.devices.named("cuda")
    cuda.use()
    host = cuda.driver.host_alloc({nbytes})
    array = np.ctypeslib.as_array((ctypes.c_uint8 * {nbytes}).from_address(host))
    return cuda

def move(target, source):
    cuda = engine.devices.named("cuda")
    with cuda.queue() as queue:
        one = np.array([{nbytes}])
        t, s = (np.array([at], np.uint64) for at in (target, source))
        queue.copy_spans(t, s, one).wait(lambda: None)

def put(seed):
    values = np.random.default_rng(seed).integers(0, 256, {nbytes}, dtype=np.uint8)
    if owned.array is not None:
        owned.array[:] = values
        return
    pinned()
    array[:] = values
    move(owned.region.address, host)

def get(seed):
    values = np.random.default_rng(seed).integers(0, 256, {nbytes}, dtype=np.uint8)
    if owned.array is not None:
        return bool((owned.array == values).all())
    move(host, owned.region.address)
    return bool((array == values).all())
""".replace("{nbytes}", str(NBYTES))


class Pair:
    def __init__(self, directory, transport, kind):
        self.child = Child(FAR)
        address, ref = self.child.run(
            f"result = start({directory!r}, {transport!r}, {kind!r}, 5)", timeout_s=60.0
        )
        self.near = Engine(EngineConfig(name="near", directory=directory, transports=(transport,)))
        self.peer = self.near.connect(address)
        self.remote = self.peer.region(bytes.fromhex(ref))

    def close(self):
        self.near.close()
        self.child.close()


@pytest.fixture
def pair(engine_directory, cuda):
    cuda.use(0)
    made = []

    def make(transport, kind):
        made.append(Pair(str(engine_directory), transport, kind))
        return made[-1]

    yield make
    for item in made:
        item.close()


def fetch(engine, owned):
    if owned.array is not None:
        return owned.array.copy()
    device = engine.devices.named("cuda")
    with device.queue() as queue:
        host = device.pinned(NBYTES)
        zero = np.zeros(1, np.int64)
        queue.copy_spans(
            addresses(host, zero), addresses(owned.region.address, zero), np.array([NBYTES])
        ).wait(forever)
        out = np.ctypeslib.as_array((ctypes.c_uint8 * NBYTES).from_address(host)).copy()
        device.give_pinned(host)
    return out


@pytest.mark.parametrize(
    ("transport", "near", "far"),
    [
        ("cuda_ipc", "cuda", "cuda"),
        ("staged", "cuda", "cuda"),
        ("staged", "host", "cuda"),
        ("staged", "cuda", "host"),
        ("tcp", "cuda", "cuda"),
        ("tcp", "host", "cuda"),
        ("tcp", "cuda", "host"),
    ],
)
@pytest.mark.parametrize("block", [4096, 1 << 20])
def test_bytes_arrive(pair, transport, near, far, block):
    both = pair(transport, far)
    owned = both.near.allocate(NBYTES, device="cuda" if near == "cuda" else "")
    rng = np.random.default_rng(6)
    here = Spans.of(rng.permutation(NBYTES // block) * block, block)
    there = Spans.of(rng.permutation(NBYTES // block) * block, block)
    for _ in range(2):
        both.near.read(owned, here, both.remote, there).wait(20.0)
    values = np.random.default_rng(5).integers(0, 256, NBYTES, dtype=np.uint8).reshape(-1, block)
    expected = np.empty_like(values)
    expected[here.offsets // block] = values[there.offsets // block]
    np.testing.assert_array_equal(fetch(both.near, owned).reshape(-1, block), expected)
    both.near.write(owned, here, both.remote, there).wait(20.0)
    assert both.child.run("result = get(5)")
    owned.close()


@pytest.mark.parametrize("transport", ["cuda_ipc", "staged", "tcp"])
def test_a_killed_owner_ends_the_transfers_and_gives_its_memory_back(pair, cuda, transport):
    both = pair(transport, "cuda")
    owned = both.near.allocate(NBYTES, device="cuda")
    whole = Spans.of(np.random.default_rng(1).permutation(NBYTES // 4096) * 4096, 4096)
    both.near.read(owned, whole, both.remote, whole).wait(20.0)
    cuda.use(0)
    before = cuda.free_bytes()
    ends, stop = [], threading.Event()

    def load():
        while not stop.is_set():
            try:
                both.near.read(owned, whole, both.remote, whole, deadline_s=5.0).wait(6.0)
            except KVFerryError as error:
                ends.append(error)
                return

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    both.child.kill()
    for thread in threads:
        thread.join(8.0)
    stop.set()
    assert len(ends) == 4
    wait_until(lambda: not both.near.statistics()["transports"][transport].get("mappings"), "kept")
    cuda.use(0)
    wait_until(lambda: cuda.free_bytes() >= before + NBYTES // 2, "the owner's memory is not free")
    owned.close()
