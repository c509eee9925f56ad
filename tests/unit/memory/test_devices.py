"""Devices are found by UUID, opened once, and their absence has a reason."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.errors import DeviceError, RegistrationError
from kvferry.memory.devices import Devices
from kvferry.testing.cuda import FakeCuda


@pytest.fixture
def fake():
    return FakeCuda(2)


@pytest.fixture
def devices(fake):
    devices = Devices(lambda: fake)
    yield devices
    devices.close()
    assert not any(fake.held().values()), fake.held()


def test_a_device_has_many_names_and_is_opened_once(devices, fake):
    second = devices.device(fake.facts[1].uuid)
    assert devices.named("cuda:1") is second
    assert devices.named(fake.facts[1].uuid) is second
    assert devices.named("cuda") is devices.device(fake.facts[0].uuid)
    assert devices.uuids() == tuple(facts.uuid for facts in fake.facts)
    assert devices.missing() == ""


@pytest.mark.parametrize("name", ["cuda:2", "tpu:0", "GPU-0"])
def test_a_name_that_means_nothing_is_refused_with_those_that_do(devices, name):
    with pytest.raises(DeviceError, match="this process sees GPU-"):
        devices.named(name)


def test_an_unseen_device_is_named(devices):
    with pytest.raises(DeviceError, match="cannot see GPU-elsewhere"):
        devices.device("GPU-elsewhere")


def test_an_address_tells_its_device(devices, fake):
    fake.use(1)
    address = fake.alloc(4096)
    device, facts = devices.around(address + 100)
    assert device.facts is fake.facts[1]
    assert (facts.base, facts.nbytes) == (address, 4096)
    with pytest.raises(DeviceError, match="not device memory"):
        devices.around(1)
    fake.free(address)


def test_peer_access_is_what_the_driver_says(devices, fake):
    a, b = (facts.uuid for facts in fake.facts)
    assert devices.can_reach(a, b) == ""
    assert "cannot see GPU-x" in devices.can_reach(a, "GPU-x")
    fake.peers = False
    assert "no peer access" in devices.can_reach(a, b)
    assert devices.can_reach(a, a) == ""


def test_without_a_driver_everything_says_why_and_it_is_asked_once():
    asked = []

    def load():
        asked.append(1)
        raise DeviceError("no driver")

    devices = Devices(load)
    assert devices.missing() == "no driver"
    assert devices.uuids() == ()
    for call in (lambda: devices.device("x"), lambda: devices.named("cuda"), devices._known):
        with pytest.raises(DeviceError, match="no driver"):
            call()
    assert len(asked) == 1
    devices.close()


def test_a_driver_without_devices_is_a_reason_too():
    devices = Devices(lambda: FakeCuda(0))
    assert "sees no GPU" in devices.missing()
    with pytest.raises(DeviceError, match="sees no GPU"):
        devices.around(4096)


def test_kernels_reach_another_device_only_when_they_were_let(devices, fake):
    a, b = (facts.uuid for facts in fake.facts)
    fake.use(1)
    there = fake.alloc(4096)
    fake.use(0)
    here = fake.alloc(4096)
    one = np.array([100])

    def copy():
        with devices.device(a).queue() as queue:
            lists = np.array([here], np.uint64), np.array([there], np.uint64), one
            queue.copy_spans(*lists).wait(lambda: None)

    with pytest.raises(DeviceError, match="illegal address"):
        copy()
    devices.allow(a, b)
    devices.allow(a, a)
    copy()
    fake.peers = False
    with pytest.raises(RegistrationError, match="is not let at the memory"):
        devices.allow(b, a)
    fake.free(here)
    fake.free(there)
