"""Kinds of fault in which a copy reports success and the bytes are not those of their owner."""

from __future__ import annotations

import ctypes

import pytest

from faults.helpers import MIB, WHOLE, Held, wait_until
from kvferry import Engine, EngineConfig
from kvferry.engine import PROCESS
from kvferry.errors import CorruptError
from kvferry.testing.cuda import FakeCuda


class Early(Held):
    """Reads at once what is there, and reports the end when the test says so."""

    name = "early"

    def submit(self, op):
        super().submit(op)
        ctypes.memmove(op.local.address, self.source, op.nbytes)


@pytest.mark.parametrize("paths", [("early", "tcp"), ("early",)], ids="+".join)
def test_a_source_that_is_still_being_written_is_not_taken_for_whole(make_engine, paths):
    early, theirs = Early(), Early()
    near = make_engine("near", *paths, extra={"early": early})
    far = make_engine("far", *paths, extra={"early": theirs})
    local, owned = near.allocate(MIB), far.allocate(MIB)
    owned.array[: MIB // 2] = 8
    early.source = owned.region.address
    remote = near.connect(far.addresses[0]).region(owned.ref)
    transfer = near.read(local, WHOLE, remote, WHOLE, checksum="full")
    owned.array[MIB // 2 :] = 8  # The second half comes after the copy.
    wait_until(lambda: early.ops, "nothing was read")
    early.end(early.ops[0])
    if len(paths) == 1:
        with pytest.raises(CorruptError):
            transfer.wait(5.0)
        return
    assert transfer.wait(5.0) == MIB
    assert transfer.path == "tcp/pull"
    assert int(local.array.min()) == 8
    assert near.statistics()["demotions"] == 1


@pytest.fixture
def cards(engine_directory):
    """Two engines, as of two processes, on a fake machine with two cards that claim to reach each
    other."""
    fake, engines = FakeCuda(2), []
    for name in ("near", "far"):
        PROCESS.renew()
        config = EngineConfig(
            name=name,
            directory=engine_directory,
            transports=("cuda_ipc", "staged"),
            device_ring_bytes=256 << 10,
            device_ring_slots=2,
        )
        engines.append(Engine(config, cuda=lambda: fake))
    yield fake, *engines
    for engine in engines:
        engine.close()
    assert not any(fake.held().values()), fake.held()


def test_cards_that_copy_zeros_to_each_other_are_served_through_host_memory(cards):
    fake, near, far = cards
    fake.zeros = True
    local = near.allocate(MIB, device="cuda:0")
    owned = far.allocate(MIB, access="read-write", device="cuda:1")
    fake.view(owned.region.address, MIB)[:] = 5
    remote = near.connect(far.addresses[0]).region(owned.ref)
    for _ in range(2):
        transfer = near.read(local, WHOLE, remote, WHOLE, checksum="full")
        assert transfer.wait(5.0) == MIB
        assert transfer.path == "staged/pull"
        assert (fake.view(local.region.address, MIB) == 5).all()
    # The second one did not even try the cards, and says why.
    assert near.statistics()["demotions"] == 1
    assert "cuda_ipc" in transfer.plan.explain()
    assert "differ" in transfer.plan.explain()
