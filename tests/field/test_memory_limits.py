"""Kinds of fault around limits: rings smaller than what they carry, locked memory, device rings."""

from __future__ import annotations

import pytest

from faults.helpers import MIB, WHOLE
from kvferry import Engine, EngineConfig
from kvferry.regions import Spans
from kvferry.testing.cuda import FakeCuda


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_transfers_larger_than_all_buffers_together_pass_through_them(make_engine, write):
    limits = {"ring_bytes": 4096, "ring_slots": 2, "lanes_max": 1}
    near, far = (make_engine(name, "staged", **limits) for name in ("near", "far"))
    nbytes = 96 << 10
    local = near.allocate(3 * nbytes)
    owned = far.allocate(3 * nbytes, access="read-write")
    source, target = (local, owned) if write else (owned, local)
    source.array[:] = 9
    remote = near.connect(far.addresses[0]).region(owned.ref)
    thirds = [Spans.of([i * nbytes], nbytes) for i in range(3)]
    move = near.write if write else near.read
    transfers = [move(local, third, remote, third, deadline_s=5.0) for third in thirds]
    for transfer in transfers:
        assert transfer.wait(5.0) == nbytes
    assert int(target.array.min()) == 9


def locked_bytes():
    with open("/proc/self/status", encoding="ascii") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["VmLck"].split()[0]) << 10


@pytest.mark.parametrize("transport", ["shm", "staged", "tcp"])
def test_host_memory_is_never_locked(make_engine, transport):
    before = locked_bytes()
    near, far = make_engine("near", transport), make_engine("far", transport)
    local, owned = near.allocate(MIB), far.allocate(MIB)
    remote = near.connect(far.addresses[0]).region(owned.ref)
    near.read(local, WHOLE, remote, WHOLE).wait(5.0)
    assert locked_bytes() == before


def test_a_ring_that_the_driver_cannot_pin_is_left_for_the_next_path(engine_directory):
    fake = FakeCuda(2)
    fake.fail.add("host_register")
    config = {
        "directory": engine_directory,
        "transports": ("staged", "tcp"),
        "device_ring_bytes": 256 << 10,
        "device_ring_slots": 2,
    }
    with (
        Engine(EngineConfig(name="near", **config), cuda=lambda: fake) as near,
        Engine(EngineConfig(name="far", **config), cuda=lambda: fake) as far,
    ):
        local = near.allocate(MIB, device="cuda:0")
        owned = far.allocate(MIB, device="cuda:1")
        fake.view(owned.region.address, MIB)[:] = 2
        remote = near.connect(far.addresses[0]).region(owned.ref)
        transfer = near.read(local, WHOLE, remote, WHOLE)
        assert transfer.wait(5.0) == MIB
        assert transfer.path == "tcp/pull"
        assert (fake.view(local.region.address, MIB) == 2).all()
        assert "host_register" in near.plan(local, remote).explain()
    assert not any(fake.held().values())
