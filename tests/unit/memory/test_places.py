"""Host and device memory behind one interface."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvferry.errors import DeviceError
from kvferry.memory.devices import Devices
from kvferry.memory.places import lend, settle
from kvferry.testing.cuda import FakeCuda


@pytest.fixture
def fake():
    return FakeCuda()


@pytest.fixture
def devices(fake):
    devices = Devices(lambda: fake)
    yield devices
    devices.close()
    assert not any(fake.held().values()), fake.held()


def memory(fake, kind):
    """(UUID, address, the bytes) of 64 KiB of a kind."""
    if kind == "host":
        array = np.zeros(1 << 16, np.uint8)
        return "", array.ctypes.data, array
    fake.use(0)
    address = fake.alloc(1 << 16)
    return fake.facts[0].uuid, address, fake.view(address, 1 << 16)


@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_a_place_gathers_and_scatters(devices, fake, kind):
    uuid, address, array = memory(fake, kind)
    array[:] = np.random.default_rng(0).integers(0, 256, array.size)
    offsets, lengths = np.array([5000, 100, 60000]), np.array([300, 4000, 7])
    spans = offsets.astype(np.uint64) + np.uint64(address)
    with lend(devices, kind, uuid) as place:
        assert place.is_host == (kind == "host")
        buffer = place.pinned(4307)
        landing = place.gather(buffer.ctypes.data, spans, lengths)
        landing.wait(lambda: None)
        assert landing.is_done()
        pieces = [array[a : a + n] for a, n in zip(offsets, lengths, strict=True)]
        np.testing.assert_array_equal(buffer[:4307], np.concatenate(pieces))
        buffer[:] = 9
        settle([place.scatter(buffer.ctypes.data, spans, lengths)])
        assert all((piece == 9).all() for piece in pieces)
        assert array[99] != 9 or array[98] != 9
        undo = place.pin(buffer.ctypes.data, 4096)
        assert fake.held()["registered"] == (kind == "cuda")
        undo()
    if kind == "cuda":
        fake.use(0)
        fake.free(address)


def test_pinned_memory_is_used_again(devices, fake):
    uuid = fake.facts[0].uuid
    with lend(devices, "cuda", uuid) as place:
        first = place.pinned(1 << 20).ctypes.data
        assert place.pinned(1 << 20).ctypes.data != first
    held = fake.held()["pinned"]
    with lend(devices, "cuda", uuid) as place:
        assert place.pinned(1 << 19).ctypes.data
        assert fake.held()["pinned"] == held


def test_settling_outlasts_a_device_that_fails_and_not_one_that_hangs(devices, fake):
    uuid, address, _ = memory(fake, "cuda")
    one = np.array([address], np.uint64)
    with lend(devices, "cuda", uuid) as place:
        buffer = place.pinned(4096)
        landing = place.gather(buffer.ctypes.data, one, np.array([10]))
        fake.fail.add("done")
        settle([landing])
        fake.fail.clear()
        fake.late = 1 << 60
        with pytest.raises(DeviceError, match=r"has not ended after 0\.01 s"):
            landing.settle(0.01)
        fake.late = 0
        landing.settle(1.0)
    fake.free(address)


def test_a_device_that_is_not_here_is_refused(devices):
    with pytest.raises(DeviceError, match="cannot see"), lend(devices, "cuda", "GPU-x"):
        pass


def test_settling_waits_for_a_busy_device_and_its_buffers_are_not_lent_meanwhile(
    devices, fake, monkeypatch
):
    """A device that another process keeps busy lands a copy at last, wherever that is."""
    monkeypatch.setattr("kvferry.memory.places.SETTLE_S", 0.01)
    uuid, address, _ = memory(fake, "cuda")
    one = np.array([address], np.uint64)
    settled = threading.Event()
    with lend(devices, "cuda", uuid) as place:
        buffer = place.pinned(4096)
        fake.late = 1 << 60
        landing = place.gather(buffer.ctypes.data, one, np.array([10]))

        def wait():
            fake.use(0)
            settle([landing])
            settled.set()

        thread = threading.Thread(target=wait)
        thread.start()
        assert not settled.wait(0.05)
    with lend(devices, "cuda", uuid) as other:
        assert other.pinned(4096).ctypes.data != buffer.ctypes.data
    fake.late = 0
    assert settled.wait(5.0)
    thread.join()
    fake.free(address)
