"""A real device: only ``make test-gpu`` runs these tests, and without a GPU it fails."""

from __future__ import annotations

import pytest

from kvferry.memory.cuda import CudaDevice
from kvferry.memory.cuda_driver import driver


@pytest.fixture(scope="session")
def cuda():
    return driver()


@pytest.fixture
def device(cuda):
    device = CudaDevice(cuda, cuda.devices()[0])
    yield device
    device.close()
