"""A real device: only ``make test-gpu`` runs these tests, and without a GPU it fails."""

from __future__ import annotations

import multiprocessing
import multiprocessing.resource_tracker

import pytest
from tests.unit.memory.cuda_checks import check_copies

from kvferry.memory.cuda import CudaDevice
from kvferry.memory.cuda_driver import driver


@pytest.fixture(scope="session")
def cuda():
    """The driver, after the first work: what it opens then stays open until the process ends."""
    cuda = driver()
    device = CudaDevice(cuda, cuda.devices()[0])
    check_copies(device, "mixture", 1)
    device.close()
    multiprocessing.resource_tracker.ensure_running()
    return cuda


@pytest.fixture
def device(cuda):
    device = CudaDevice(cuda, cuda.devices()[0])
    yield device
    device.close()
