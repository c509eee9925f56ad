"""Transfers between two processes on a real device: bytes, deaths, and what is left afterwards."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from pathlib import Path

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
SLACK_BYTES = 32 << 20
"""What the driver may keep for itself between two looks at its free memory."""
KILLS = int(os.environ.get("KILLS", "2"))
FAR = """
import ctypes
import numpy as np
from kvferry import Engine, EngineConfig

def start(directory, transport, kind, seed):
    global engine, owned
    engine = Engine(EngineConfig(name="far", directory=directory, transports=(transport,)))
    if kind == "virtual":
        cuda = engine.devices.named("cuda")
        cuda.use()
        address = cuda.driver.vmm_alloc(0, {nbytes})
        owned = engine.register((address, {nbytes}), access="read-write", kind="cuda")
    else:
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
        self.directory = directory
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
        # It was killed: the next engine that starts here would take its socket away.
        for path in Path(self.directory).glob("*.sock"):
            path.unlink()


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
        ("cuda_ipc", "cuda", "virtual"),
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
@pytest.mark.parametrize("turn", range(KILLS))
def test_a_killed_owner_ends_the_transfers_and_gives_its_memory_back(pair, cuda, transport, turn):
    cuda.use(0)
    before = cuda.free_bytes()
    both = pair(transport, "cuda")
    owned = both.near.allocate(NBYTES, device="cuda")
    whole = Spans.of(np.random.default_rng(1).permutation(NBYTES // 4096) * 4096, 4096)
    both.near.read(owned, whole, both.remote, whole).wait(20.0)
    ends, began = [], threading.Barrier(5)

    def load():
        began.wait()
        while True:
            try:
                both.near.read(owned, whole, both.remote, whole, deadline_s=5.0).wait(6.0)
            except KVFerryError as error:
                ends.append((error, time.monotonic()))
                return

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    began.wait()
    threading.Event().wait(0.002 * turn)
    both.child.kill()
    killed = time.monotonic()
    for thread in threads:
        thread.join(8.0)
    assert len(ends) == 4
    assert max(at for _, at in ends) - killed < 1.0
    assert all(error.code in ("peer_lost", "stale_region", "unreachable") for error, _ in ends)
    owned.close()
    both.near.close()
    cuda.use(0)
    wait_until(lambda: cuda.free_bytes() >= before - SLACK_BYTES, "memory is not free again")


@pytest.mark.parametrize("turn", range(KILLS))
def test_a_killed_reader_leaves_the_owner_as_it_was(engine_directory, cuda, turn):
    cuda.use(0)
    before = cuda.free_bytes()
    directory = str(engine_directory)
    owner = Engine(EngineConfig(name="owner", directory=directory, transports=("cuda_ipc",)))
    owned = owner.allocate(NBYTES, device="cuda")
    child = Child(FAR)
    child.run(f"start({directory!r}, 'cuda_ipc', 'cuda', 5)", timeout_s=60.0)
    child.run(
        f"""
from kvferry.regions import Spans
whole = Spans.blocks(np.random.default_rng(1).permutation({NBYTES} // 4096), 4096)
peer = engine.connect({owner.addresses[0]!r})
remote = peer.region(bytes.fromhex({owned.ref.hex()!r}))
engine.read(owned, whole, remote, whole).wait(20.0)
"""
    )
    assert owner.statistics()["peers"] == 1
    child.send("while True: engine.read(owned, whole, remote, whole).wait(20.0)")
    threading.Event().wait(0.002 * turn)
    child.kill()
    killed = time.monotonic()
    wait_until(lambda: owner.statistics()["peers"] == 0, "the reader is still known")
    assert time.monotonic() - killed < 1.0
    child.close()
    owned.close()
    owner.close()
    for path in Path(directory).glob("*.sock"):
        path.unlink()
    wait_until(lambda: cuda.free_bytes() >= before - SLACK_BYTES, "memory is not free again")
