"""Device memory on a real device: the checks of the fake one, and what only hardware can show."""

from __future__ import annotations

import multiprocessing
import os

import numpy as np
import pytest
from tests.unit.memory.cuda_checks import (
    KINDS,
    POOL_BYTES,
    Pool,
    addresses,
    check_copies,
    check_gather_and_scatter,
    forever,
)

from kvferry.memory.cuda import device_address
from kvferry.memory.cuda_driver import GRANULARITY_BYTES, driver

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("alignment", [1, 4, 8, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_copies(device, kind, alignment):
    check_copies(device, kind, alignment)


@pytest.mark.parametrize("kind", KINDS)
def test_gather_and_scatter(device, kind):
    check_gather_and_scatter(device, kind)


def test_facts(cuda):
    facts = cuda.devices()[0]
    assert facts.uuid.startswith("GPU-")
    assert len(facts.uuid) == 40
    assert facts.nbytes > 1 << 30
    cuda.use(0)
    assert 0 < cuda.free_bytes() <= facts.nbytes


def test_pointers_tell_their_allocation(cuda):
    cuda.use(0)
    address = cuda.alloc(1 << 20)
    facts = cuda.pointer(address + 4096)
    assert (facts.ordinal, facts.base, facts.is_ipc, facts.has_fd) == (0, address, True, False)
    assert facts.nbytes >= 1 << 20
    cuda.free(address)
    virtual = cuda.vmm_alloc(0, GRANULARITY_BYTES)
    facts = cuda.pointer(virtual)
    assert (facts.base, facts.is_ipc, facts.has_fd) == (virtual, False, True)
    cuda.vmm_free(virtual, GRANULARITY_BYTES)


def _reader(connection, fd_or_handle, nbytes):
    cuda = driver()
    cuda.use(0)
    from kvferry.memory.cuda import CudaDevice

    device = CudaDevice(cuda, cuda.devices()[0])
    if isinstance(fd_or_handle, bytes):
        address = cuda.ipc_open(fd_or_handle)
    else:
        fd = fd_or_handle.detach()
        address = cuda.vmm_import(0, fd, nbytes)
        os.close(fd)
    pool = Pool(device, nbytes)
    with device.queue() as queue:
        one = np.array([nbytes])
        queue.copy_spans(addresses(pool.address, one * 0), addresses(address, one * 0), one).wait(
            forever
        )
    connection.send_bytes(pool.read().tobytes())
    cuda.ipc_close(address) if isinstance(fd_or_handle, bytes) else cuda.vmm_free(address, nbytes)


@pytest.mark.parametrize("kind", ["ipc", "vmm"])
def test_another_process_reads(device, cuda, kind):
    from multiprocessing import reduction

    spawn = multiprocessing.get_context("spawn")
    values = np.random.default_rng(3).integers(0, 256, POOL_BYTES, dtype=np.uint8)
    pool = Pool(device)
    if kind == "vmm":
        plain, pool.address = pool.address, cuda.vmm_alloc(0, POOL_BYTES)
        fd = cuda.vmm_export(pool.address)
        what = reduction.DupFd(fd)
    else:
        what = cuda.ipc_handle(pool.address)
    pool.fill(values)
    here, there = spawn.Pipe()
    process = spawn.Process(target=_reader, args=(there, what, POOL_BYTES))
    process.start()
    there.close()
    assert here.poll(60)
    assert here.recv_bytes() == values.tobytes()
    process.join(30)
    assert process.exitcode == 0
    process.close()
    here.close()
    if kind == "vmm":
        os.close(fd)
        cuda.vmm_free(pool.address, POOL_BYTES)
        pool.address = plain
    pool.close()


def test_memory_of_others_is_found():
    torch = pytest.importorskip("torch")
    cupy = pytest.importorskip("cupy")
    tensor = torch.zeros(10, 20, dtype=torch.bfloat16, device="cuda")
    assert device_address(tensor) == (tensor.data_ptr(), 400)
    array = cupy.zeros((3, 5), cupy.float32)
    assert device_address(array) == (array.data.ptr, 60)

    class OnlyDlpack:
        def __dlpack__(self, **options):
            return array.__dlpack__(**options)

        def __dlpack_device__(self):
            return array.__dlpack_device__()

    assert device_address(OnlyDlpack()) == (array.data.ptr, 60)
