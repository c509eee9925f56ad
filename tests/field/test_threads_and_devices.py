"""Kinds of fault around devices: whose context is current, and who opens whose memory how often."""

from __future__ import annotations

import threading

import msgspec
import numpy as np
import pytest

from kvferry import Engine, EngineConfig
from kvferry.engine import PROCESS
from kvferry.errors import DeviceError
from kvferry.regions import Spans
from kvferry.testing.conformance import wait_until
from kvferry.testing.cuda import FakeCuda
from kvferry.transports.base import Export

NBYTES = 1 << 20
WHOLE = Spans.whole(NBYTES)


class StrictCuda(FakeCuda):
    """A driver that opens a handle once only, and counts what it opens."""

    def __init__(self, count: int = 1) -> None:
        super().__init__(count)
        self.open_handles: set[int] = set()
        self.opens = 0

    def ipc_open(self, handle: bytes) -> int:
        address = super().ipc_open(handle)
        self.opens += 1
        if address in self.open_handles:
            raise DeviceError("this handle is open in this process already")
        self.open_handles.add(address)
        return address

    def ipc_close(self, address: int) -> None:
        self.open_handles.discard(address)
        super().ipc_close(address)


class World:
    """Two engines on one fake machine, each in a process of its own, as far as it knows,
    unless inproc is among the transports."""

    def __init__(self, directory: str, fake: FakeCuda, *transports: str) -> None:
        self.fake = fake
        self.engines = []
        for name in ("near", "far"):
            if "inproc" not in transports:
                PROCESS.renew()
            config = EngineConfig(name=name, directory=directory, transports=transports)
            self.engines.append(Engine(config, cuda=lambda: fake))
        self.near, self.far = self.engines
        self.peer = self.near.connect(self.far.addresses[0])

    def close(self) -> None:
        self.near.close()
        self.far.close()


@pytest.fixture
def make_world(engine_directory, no_leaks):  # noqa: ARG001
    worlds = []

    def make(fake, *transports):
        worlds.append(World(engine_directory, fake, *transports))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def in_fresh_thread(work):
    """What ``work`` returns in a thread that never used a device."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join(10.0)
    assert results, "it raised"
    return results[0]


@pytest.mark.parametrize("transport", ["inproc", "cuda_ipc", "staged", "tcp"])
def test_threads_that_never_used_a_device_can_call_everything(make_world, transport):
    world = make_world(FakeCuda(2), transport)
    target = in_fresh_thread(lambda: world.near.allocate(NBYTES, device="cuda:1"))
    world.fake.use(0)
    address = world.fake.alloc(NBYTES)
    owned = in_fresh_thread(lambda: world.far.register((address, NBYTES), kind="cuda"))
    world.fake.view(address, NBYTES)[:] = 6
    remote = in_fresh_thread(lambda: world.peer.region(owned.ref))
    moved = in_fresh_thread(lambda: world.near.read(target, WHOLE, remote, WHOLE).wait(5.0))
    assert moved == NBYTES
    assert (world.fake.view(target.region.address, NBYTES) == 6).all()
    in_fresh_thread(lambda: (target.close(), owned.close()))
    world.fake.free(address)


@pytest.mark.parametrize("current", [0, None], ids=["another device", "no device"])
@pytest.mark.parametrize("transport", ["inproc", "cuda_ipc", "staged", "tcp"])
def test_the_callers_current_device_stays_what_it_was(make_world, transport, current):
    world = make_world(FakeCuda(2), transport)
    seen = []

    def work():
        if current is not None:
            world.fake.use(current)
        target = world.near.allocate(NBYTES, device="cuda:1")
        seen.append(world.fake.current())
        source = world.far.allocate(NBYTES, device="cuda:1")
        view = (source.region.address, NBYTES)
        again = world.far.register(view, access="read-write", kind="cuda")
        seen.append(world.fake.current())
        remote = world.peer.region(again.ref)
        world.near.plan(target, remote)
        seen.append(world.fake.current())
        for spans in (WHOLE, Spans.whole(64)):
            world.near.read(target, spans, remote, spans).wait(5.0)
            world.near.write(target, spans, remote, spans).wait(5.0)
            seen.append(world.fake.current())
        for registration in (target, again, source):
            registration.close()
        seen.append(world.fake.current())
        world.near.close()
        seen.append(world.fake.current())

    in_fresh_thread(lambda: work() or True)
    assert seen == [current] * len(seen)


def test_engines_of_one_process_copy_directly_and_open_no_handle(make_world):
    world = make_world(StrictCuda(), "inproc", "cuda_ipc", "staged", "tcp")
    target = world.near.allocate(NBYTES, device="cuda")
    remote = world.peer.region(world.far.allocate(NBYTES, device="cuda").ref)
    for nbytes in (64, NBYTES, 1 << 30):
        plan = world.near.plan(target, remote, nbytes=nbytes)
        assert plan.paths[0].transport == "inproc", plan.explain()
    assert world.near.read(target, WHOLE, remote, WHOLE).wait(5.0) == NBYTES
    assert world.fake.opens == 0


def test_an_allocation_is_opened_once_by_many_threads_and_regions(make_world):
    fake = StrictCuda()
    world = make_world(fake, "cuda_ipc")
    fake.use(0)
    address, part = fake.alloc(8 * NBYTES), NBYTES
    fake.view(address, 8 * NBYTES)[:] = np.repeat(np.arange(1, 9, dtype=np.uint8), part)
    owned = [world.far.register((address + i * part, part), kind="cuda") for i in range(8)]
    remotes = [world.peer.region(item.ref) for item in owned]
    targets = [world.near.allocate(part, device="cuda") for _ in range(8)]
    barrier, failures = threading.Barrier(8), []

    def work(i):
        barrier.wait(5.0)
        try:
            for _ in range(4):
                world.near.read(targets[i], WHOLE, remotes[i], WHOLE).wait(5.0)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    for i, target in enumerate(targets):
        assert (fake.view(target.region.address, part) == i + 1).all()
    assert fake.opens == 1
    for item in owned[1:]:
        item.close()
    assert world.near.read(targets[0], WHOLE, remotes[0], WHOLE).wait(5.0) == NBYTES
    owned[0].close()
    wait_until(lambda: not fake.open_handles, "still open")
    fake.free(address)


def test_a_pool_is_imported_once_however_many_blocks_are_read(make_world):
    fake = StrictCuda()
    world = make_world(fake, "cuda_ipc")
    pool = world.far.allocate(400 * 4096, device="cuda")
    target = world.near.allocate(4096, device="cuda")
    remote, whole = world.peer.region(pool.ref), Spans.whole(4096)
    for block in range(400):
        world.near.read(target, whole, remote, Spans.blocks([block], 4096)).wait(5.0)
    assert fake.opens == 1
    assert fake.held()["opened"] == 1


def test_a_handle_that_is_refused_leads_to_another_path(make_world):
    world = make_world(FakeCuda(), "cuda_ipc", "staged")
    source = world.far.allocate(NBYTES, device="cuda")
    target = world.near.allocate(NBYTES, device="cuda")
    world.fake.view(source.region.address, NBYTES)[:] = 4
    world.fake.fail.add("ipc_open")
    transfer = world.near.read(target, WHOLE, world.peer.region(source.ref), WHOLE)
    assert transfer.wait(5.0) == NBYTES
    assert transfer.path == "staged/pull"
    assert (world.fake.view(target.region.address, NBYTES) == 4).all()


@pytest.mark.parametrize("which", ["first", "second"])
def test_a_handle_of_less_memory_than_the_peer_says_is_never_read(make_world, which):
    """The owner's description is the only word on the size, and a copy beyond it loses the device.

    The second region finds the allocation open already, and is no more to be believed.
    """
    fake = FakeCuda()
    world = make_world(fake, "cuda_ipc", "staged")
    fake.use(0)
    address = fake.alloc(NBYTES)
    halves = [
        world.far.register((address + at, NBYTES // 2), kind="cuda") for at in (0, NBYTES // 2)
    ]
    wrong = world.far.registry.find(halves[1].region.region_id, halves[1].region.token)
    data = wrong.exports["cuda_ipc"].data
    handle, nbytes, offset = msgspec.msgpack.decode(data)
    lie = msgspec.msgpack.encode((handle, 2 * nbytes, offset + 1))
    wrong.exports["cuda_ipc"] = Export(lie)
    target = world.near.allocate(NBYTES // 2, device="cuda")
    whole = Spans.whole(NBYTES // 2)
    if which == "second":
        remote = world.peer.region(halves[0].ref)
        assert world.near.read(target, whole, remote, whole).wait(5.0) == NBYTES // 2
    remote = world.peer.region(halves[1].ref)
    transfer = world.near.read(target, whole, remote, whole)
    assert transfer.wait(5.0) == NBYTES // 2
    assert transfer.path == "staged/pull"
    assert fake.held()["opened"] == (which == "second")
    for half in halves:
        half.close()
    wait_until(lambda: not fake.held()["opened"], "still open")
    fake.free(address)
