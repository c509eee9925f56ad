import asyncio
import os
import threading

import numpy as np
import pytest

from kvferry.config import EngineConfig
from kvferry.engine import Engine
from kvferry.errors import ClosedError, ConfigError, NoPathError, UsageError
from kvferry.regions import Spans
from kvferry.testing.conformance import wait_until

WHOLE = Spans.whole(4096)


@pytest.fixture
def pair(make_engine):
    """(engine, its memory, a peer's region as it knows it, the peer's memory)."""
    near, far = make_engine("near"), make_engine("far")
    local, owned = near.allocate(4096), far.allocate(4096, access="read-write")
    owned.array[:] = 1
    return near, local, near.connect(far.addresses[0]).region(owned.ref), owned


def test_a_read_and_a_write(pair):
    near, local, remote, owned = pair
    transfer = near.read(local, WHOLE, remote, WHOLE)
    assert transfer.wait(5.0) == transfer.bytes_done == 4096
    assert local.array.min() == 1
    local.array[:] = 2
    assert near.write(local, WHOLE, remote, WHOLE).wait(5.0) == 4096
    assert owned.array.max() == 2
    figures = near.statistics()
    assert (figures["transfers"], figures["failed"], figures["running"]) == (2, 0, 0)
    assert sum(figures["bytes_by_path"].values()) == figures["bytes"] == 8192


def test_a_transfer_can_be_awaited(pair):
    near, local, remote, _ = pair

    async def move():
        return await near.read(local, WHOLE, remote, WHOLE)

    assert asyncio.run(move()) == 4096


def test_explaining_names_every_transport(pair):
    near, local, remote, _ = pair
    plan = near.plan(local, remote)
    named = {path.transport for path in plan.paths} | set(plan.rejected)
    assert set(near.transports) <= named
    assert near.read(local, WHOLE, remote, WHOLE).plan.paths


def test_no_path_tells_all_reasons(make_engine):
    near, far = make_engine("near", "tcp"), make_engine("far", "shm")
    local = near.allocate(4096)
    remote = near.connect(far.addresses[0]).region(far.allocate(4096).ref)
    with pytest.raises(NoPathError, match="the peer has not enabled it") as caught:
        near.read(local, WHOLE, remote, WHOLE)
    assert set(caught.value.reasons) >= {"tcp", "shm", "staged", "inproc"}


def test_a_write_to_a_region_for_reading_has_no_path(make_engine):
    near, far = make_engine("near"), make_engine("far")
    remote = near.connect(far.addresses[0]).region(far.allocate(4096).ref)
    with pytest.raises(NoPathError, match="registered for reading only"):
        near.write(near.allocate(4096), WHOLE, remote, WHOLE)


def test_notifications_arrive_in_order(make_engine):
    near, far = make_engine("near"), make_engine("far")
    seen, came = [], threading.Semaphore(0)
    far.on_notify = lambda peer, body: (seen.append((peer.name, body)), came.release())
    peer = near.connect(far.addresses[0])
    for number in range(5):
        near.notify(peer, bytes([number]))
    assert all(came.acquire(timeout=5.0) for _ in range(5))
    assert seen == [("near", bytes([number])) for number in range(5)]
    with pytest.raises(UsageError, match="at most 65536"):
        near.notify(peer, bytes(65537))


def test_after_closing_everything_is_refused(pair):
    near, local, remote, owned = pair
    peer = near.connect(next(iter(near.connections.open_peers())).address)
    near.close()
    near.close()
    for call in (
        lambda: near.allocate(1),
        lambda: near.register(bytearray(8)),
        lambda: near.read(local, WHOLE, remote, WHOLE),
        lambda: near.plan(local, remote),
        lambda: near.connect("unix:/x"),
        lambda: near.notify(peer, b""),
        lambda: peer.ping(),
        lambda: peer.region(owned.ref),
    ):
        with pytest.raises(ClosedError):
            call()
    local.close()


def test_the_socket_lies_in_the_directory_while_it_is_open(make_engine, engine_directory):
    engine = make_engine()
    path = engine.addresses[0].removeprefix("unix:")
    assert os.path.dirname(path) == engine_directory
    engine.close()
    assert not os.path.exists(path)


def test_an_engine_that_cannot_start_leaves_nothing(engine_directory):
    for settings in (
        {"listen": "nonsense"},
        {"listen": "0.0.0.0:0"},
        {"transports": ("no-such-thing",)},
        {"directory": "/dev/null/x"},
        {"directory": engine_directory + "/" + "x" * 120},
    ):
        with pytest.raises(ConfigError) as caught:
            Engine(EngineConfig(**{"directory": engine_directory, **settings}))
        assert str(caught.value)


def test_no_tcp_at_all(make_engine):
    engine = make_engine(listen="")
    assert [address.partition(":")[0] for address in engine.addresses] == ["unix"]


def test_regions_that_go_are_told_to_peers(pair):
    near, local, remote, owned = pair
    near.read(local, WHOLE, remote, WHOLE).wait(5.0)
    (peer,) = near.connections.open_peers()
    owned.close()
    wait_until(lambda: not peer.regions, "the peer was not told")
    assert not remote.exports

    def mappings():
        return sum(t.get("mappings", 0) for t in near.statistics()["transports"].values())

    wait_until(lambda: mappings() == 0, "a mapping was kept")


def test_registered_memory_keeps_its_owner_alive(make_engine):
    engine = make_engine()
    registration = engine.register(np.zeros(64, np.uint8))
    assert registration.array is None
    assert registration.region.nbytes == 64
