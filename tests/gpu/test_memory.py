"""Device memory on a real device: the checks of the fake one, and what only hardware can show."""

from __future__ import annotations

import pytest
from tests.unit.memory.cuda_checks import KINDS, check_copies, check_gather_and_scatter

from kvferry.memory.cuda import device_address
from kvferry.memory.cuda_driver import GRANULARITY_BYTES

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
