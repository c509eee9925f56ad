"""Device memory on a fake driver; tests/gpu runs the same checks on a real one."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from tests.unit.memory.cuda_checks import (
    KINDS,
    Pool,
    addresses,
    check_copies,
    check_gather_and_scatter,
    forever,
)

from kvferry.errors import DeviceError, UsageError
from kvferry.memory import cuda
from kvferry.memory.cuda import CudaDevice, cut_parts, device_address
from kvferry.testing.cuda import FakeCuda


@pytest.fixture
def fake():
    return FakeCuda()


@pytest.fixture
def device(fake):
    device = CudaDevice(fake, fake.facts[0])
    yield device
    fake.fail.clear()
    device.close()
    assert not any(fake.held().values()), fake.held()


@pytest.mark.parametrize("alignment", [1, 4, 8, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_copies(device, kind, alignment):
    check_copies(device, kind, alignment)


@pytest.mark.parametrize("kind", KINDS)
def test_gather_and_scatter(device, kind):
    check_gather_and_scatter(device, kind)


def test_few_large_spans_go_to_the_copy_engine_and_many_small_to_one_launch(device, fake):
    pool = Pool(device)
    before, launches = fake.engine_copies, fake.launches
    with device.queue() as queue:
        large = np.array([0, 2 << 20])
        sizes = np.full(2, 1 << 20)
        queue.copy_spans(
            addresses(pool.address, large + (1 << 20)), addresses(pool.address, large), sizes
        ).wait(forever)
        assert (fake.engine_copies - before, fake.launches - launches) == (2, 0)
        small = np.arange(0, 1 << 20, 8192)
        queue.copy_spans(
            addresses(pool.address, small + 4096),
            addresses(pool.address, small),
            np.full(small.size, 4096),
        ).wait(forever)
        # One upload of the lists, one kernel.
        assert (fake.engine_copies - before, fake.launches - launches) == (3, 1)
    pool.close()


def test_a_long_list_goes_in_several_launches(device, fake, monkeypatch):
    monkeypatch.setattr(cuda, "LAUNCH_SPANS_MIN", 10)
    monkeypatch.setattr(cuda, "LAUNCH_BYTES", 10 << 12)
    pool = Pool(device)
    values = np.random.default_rng(0).integers(0, 256, pool.nbytes, dtype=np.uint8)
    pool.fill(values)
    half = pool.nbytes // 2
    spans = np.random.default_rng(1).permutation(25) * 4096
    before = fake.launches
    with device.queue() as queue:
        lists = spans.astype(np.uint64), spans.astype(np.uint64), np.full(25, 4096)
        bases = {"target_base": pool.address + half, "source_base": pool.address}
        queue.copy_spans(*lists, **bases).wait(forever)
    assert fake.launches - before == 3
    values[half : half + 25 * 4096] = values[: 25 * 4096]
    np.testing.assert_array_equal(pool.read(), values)
    pool.close()


def test_arenas_are_used_again_when_a_flight_has_landed_and_not_before(device, fake):
    pool = Pool(device)
    spans = np.arange(0, 1 << 16, 2048)
    lists = (
        addresses(pool.address, spans + 1024),
        addresses(pool.address, spans),
        np.full(spans.size, 1024),
    )
    fake.late = 3
    with device.queue() as queue:
        first, second = queue.copy_spans(*lists), queue.copy_spans(*lists)
        assert not first.is_done()
        held = fake.held()["pinned"]
        first.wait(forever)
        second.wait(forever)
        queue.copy_spans(*lists).wait(forever)
        assert fake.held()["pinned"] == held
    pool.close()


def test_a_wait_can_be_given_up_and_the_queue_is_not_lent_again_until_it_landed(device, fake):
    pool = Pool(device)
    one = np.array([100])
    fake.late = 1 << 30

    def give_up():
        raise TimeoutError

    queue = device.take()
    flight = queue.copy_spans(addresses(pool.address, one + 500), addresses(pool.address, one), one)
    with pytest.raises(TimeoutError):
        flight.wait(give_up)
    device.give(queue)
    other = device.take()
    assert other is not queue
    device.give(other)
    fake.late = 0
    flight.wait(forever)
    found = [device.take(), device.take()]
    assert queue in found
    for item in found:
        device.give(item)
    pool.close()


def test_a_device_that_fails_says_so(device, fake):
    pool = Pool(device)
    one = np.array([1])
    with device.queue() as queue:
        flight = queue.copy_spans(
            addresses(pool.address, one + 500), addresses(pool.address, one), one
        )
        fake.fail.add("done")
        with pytest.raises(DeviceError, match="failed while copying"):
            flight.wait(forever)
        fake.fail.clear()
        flight.wait(forever)
    pool.close()


@pytest.mark.parametrize("call", ["alloc", "host_alloc", "launch", "copy"])
def test_a_refused_call_leaves_the_queue_usable(device, fake, call):
    pool = Pool(device)
    spans = np.arange(0, 1 << 16, 2048)
    lists = (
        addresses(pool.address, spans + 1024),
        addresses(pool.address, spans),
        np.full(spans.size, 1024),
    )
    with device.queue() as queue:
        fake.fail.add(call)
        with pytest.raises(DeviceError, match=call):
            queue.copy_spans(*lists)
        fake.fail.clear()
        queue.copy_spans(*lists).wait(forever)
    pool.close()


def test_a_closed_device_lends_nothing(fake):
    device = CudaDevice(fake, fake.facts[0])
    device.close()
    with pytest.raises(DeviceError, match="closed"):
        device.take()


def test_lists_must_fit(device):
    with device.queue() as queue, pytest.raises(UsageError, match="same number"):
        queue.copy_spans(np.zeros(2, np.uint64), np.zeros(2, np.uint64), np.zeros(1, np.int64))


def test_long_spans_are_cut_here_only_in_a_mixture():
    at = np.arange(3, dtype=np.uint64) * np.uint64(1 << 20)
    part = cuda.PART_BYTES
    *same, parts, length = cut_parts(at, at, np.full(3, 3 * part))
    assert (parts, length) == (3, 3 * part)
    assert same[0] is at
    target, source, lengths, *rest = cut_parts(at, at + np.uint64(5), np.array([1, 3 * part, 2]))
    assert rest == [1, 0]
    assert lengths.tolist() == [1, part, part, part, 2]
    assert (source - target).tolist() == [5] * 5
    assert (target - np.uint64(1 << 20)).tolist()[1:4] == [0, part, 2 * part]


class Interface:
    def __init__(self, shape, strides=None, typestr="<f2"):
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": shape,
            "strides": strides,
            "typestr": typestr,
            "data": (4096, False),
        }


class Tensor:
    device = SimpleNamespace(type="cuda")

    def __init__(self, dense=True):
        self.dense = dense

    def data_ptr(self):
        return 512

    def numel(self):
        return 10

    def element_size(self):
        return 2

    def is_contiguous(self):
        return self.dense


def test_device_memory_is_found_behind_what_people_have():
    assert device_address(Interface((3, 4))) == (4096, 24)
    assert device_address(Interface((3, 4), (8, 2))) == (4096, 24)
    assert device_address(Interface((1, 4), (99, 2))) == (4096, 8)
    assert device_address(Tensor()) == (512, 20)
    assert device_address(np.zeros(3)) is None
    assert device_address(b"abc") is None


@pytest.mark.parametrize(
    ("buffer", "why"),
    [
        (Interface((3, 4), (16, 2)), "not contiguous"),
        (Interface((0, 4)), "0 bytes"),
        (Tensor(dense=False), "not contiguous"),
    ],
)
def test_device_memory_that_cannot_be_registered(buffer, why):
    with pytest.raises(UsageError, match=why):
        device_address(buffer)
