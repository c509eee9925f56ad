"""The few calls of the CUDA driver that kvferry needs, as one narrow interface.

Everything above talks to :class:`CudaDriver`; :class:`BoundDriver` is the real one, over NVIDIA's
``cuda-bindings`` (the extra ``cuda``), and :mod:`kvferry.testing.cuda` has one that needs no GPU.
Streams, events, modules and kernels are opaque values of the driver. Addresses are integers.

A call works on the device that :meth:`CudaDriver.use` made current in the calling thread. The
primary context is used, so that memory of torch, cupy and others in this process is reachable.
Source for every call: NVIDIA, CUDA Driver API reference.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from dataclasses import dataclass
from typing import Any, Protocol

from kvferry.errors import DeviceError

GRANULARITY_BYTES = 2 << 20
"""Sizes of virtual memory allocations are multiples of this on every device so far."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A device as the driver describes it.

    ordinal: its number in this process only; CUDA_VISIBLE_DEVICES renumbers devices.
    uuid: ``"GPU-..."``, the same in every process of the machine.
    bus: PCI address such as ``"0000:17:00.0"``.
    """

    ordinal: int
    uuid: str
    name: str
    nbytes: int
    multiprocessors: int
    bus: str = ""


@dataclass(frozen=True, slots=True)
class PointerFacts:
    """What the driver knows about an address.

    base, nbytes: the allocation around it. is_ipc: whether a legacy IPC handle can name it.
    has_fd: whether it is virtual memory that was made to be exported as a file descriptor.
    """

    ordinal: int
    base: int
    nbytes: int
    is_ipc: bool
    has_fd: bool


class CudaDriver(Protocol):
    """What is used of a driver. Every call may raise DeviceError; none waits for the device but
    :meth:`free` and :meth:`ipc_close`, which may."""

    def devices(self) -> tuple[DeviceFacts, ...]: ...
    def use(self, ordinal: int) -> None: ...
    def current(self) -> Any: ...
    def restore(self, current: Any) -> None: ...
    def version(self) -> str: ...
    def free_bytes(self) -> int: ...
    def can_access_peer(self, ordinal: int, peer: int) -> bool: ...
    def enable_peer(self, peer: int) -> None: ...

    def alloc(self, nbytes: int) -> int: ...
    def free(self, address: int) -> None: ...
    def pointer(self, address: int) -> PointerFacts: ...

    def ipc_handle(self, address: int) -> bytes: ...
    def ipc_open(self, handle: bytes) -> int: ...
    def ipc_close(self, address: int) -> None: ...

    def vmm_alloc(self, ordinal: int, nbytes: int) -> int: ...
    def vmm_export(self, address: int) -> int: ...
    def vmm_import(self, ordinal: int, fd: int, nbytes: int) -> int: ...
    def vmm_free(self, address: int, nbytes: int) -> None: ...

    def host_alloc(self, nbytes: int) -> int: ...
    def host_free(self, address: int) -> None: ...
    def host_register(self, address: int, nbytes: int) -> None: ...
    def host_unregister(self, address: int) -> None: ...

    def stream(self) -> Any: ...
    def free_stream(self, stream: Any) -> None: ...
    def event(self) -> Any: ...
    def free_event(self, event: Any) -> None: ...
    def record(self, event: Any, stream: Any) -> None: ...
    def is_done(self, event: Any) -> bool: ...

    def copy(self, target: int, source: int, nbytes: int, stream: Any) -> None: ...
    def kernel(self, source: str, name: str) -> Any: ...
    def launch(
        self, kernel: Any, blocks: int, threads: int, arguments: tuple[int, ...], stream: Any
    ) -> None: ...


@functools.cache
def driver() -> CudaDriver:
    """The real driver. Raises DeviceError that says what is missing; then it is asked anew."""
    return BoundDriver()


class BoundDriver:
    """NVIDIA's driver through ``cuda-bindings``. Thread-safe."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver as cu
            from cuda.bindings import nvrtc
        except ImportError as error:
            raise DeviceError(
                f"cuda-bindings cannot be imported: {error}",
                fix="pip install 'kvferry[cuda]'",
            ) from error
        self._cu, self._nvrtc = cu, nvrtc
        self._lock = threading.Lock()
        self._contexts: dict[int, Any] = {}
        self._kernels: dict[tuple[int, str, str], Any] = {}
        try:
            self._call("cuInit", 0)
        except (RuntimeError, OSError) as error:
            raise DeviceError(
                f"there is no usable NVIDIA driver: {error}",
                fix="install the driver; in a container, start it with --gpus all",
            ) from error

    def _call(self, name: str, *arguments: Any) -> Any:
        """One call; its values without the status. Raises DeviceError."""
        status, *values = getattr(self._cu, name)(*arguments)
        if status != self._cu.CUresult.CUDA_SUCCESS:
            _, text = self._cu.cuGetErrorString(status)
            words = text.decode() if text else str(status)
            raise DeviceError(f"{name}: {words}", fix=_FIXES.get(status.name, ""))
        return values[0] if len(values) == 1 else tuple(values)

    # -- devices ----------------------------------------------------------------------------

    def devices(self) -> tuple[DeviceFacts, ...]:
        cu, found = self._cu, []
        for ordinal in range(self._call("cuDeviceGetCount")):
            device = self._call("cuDeviceGet", ordinal)
            raw = bytes(self._call("cuDeviceGetUuid", device).bytes)
            text = raw.hex()
            parts = (text[:8], text[8:12], text[12:16], text[16:20], text[20:])
            count = cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
            name = self._call("cuDeviceGetName", 96, device)
            bus = self._call("cuDeviceGetPCIBusId", 32, device)
            found.append(
                DeviceFacts(
                    ordinal,
                    "GPU-" + "-".join(parts),
                    name.split(b"\0")[0].decode(errors="replace"),
                    self._call("cuDeviceTotalMem", device),
                    self._call("cuDeviceGetAttribute", count, device),
                    bus.split(b"\0")[0].decode(errors="replace"),
                )
            )
        return tuple(found)

    def use(self, ordinal: int) -> None:
        context = self._contexts.get(ordinal)
        if context is None:
            with self._lock:
                context = self._contexts.get(ordinal)
                if context is None:
                    device = self._call("cuDeviceGet", ordinal)
                    context = self._call("cuDevicePrimaryCtxRetain", device)
                    self._contexts[ordinal] = context
        self._call("cuCtxSetCurrent", context)

    def current(self) -> Any:
        return self._call("cuCtxGetCurrent")

    def restore(self, current: Any) -> None:
        self._call("cuCtxSetCurrent", current)

    def version(self) -> str:
        number = self._call("cuDriverGetVersion")
        return f"{number // 1000}.{number % 1000 // 10}"

    def free_bytes(self) -> int:
        free, _ = self._call("cuMemGetInfo")
        return int(free)

    def can_access_peer(self, ordinal: int, peer: int) -> bool:
        return bool(self._call("cuDeviceCanAccessPeer", ordinal, peer))

    def enable_peer(self, peer: int) -> None:
        status, *_ = self._cu.cuCtxEnablePeerAccess(self._contexts[peer], 0)
        good = ("CUDA_SUCCESS", "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED")
        if status.name not in good:
            raise DeviceError(f"cuCtxEnablePeerAccess: {status.name}")

    # -- memory -----------------------------------------------------------------------------

    def alloc(self, nbytes: int) -> int:
        return int(self._call("cuMemAlloc", nbytes))

    def free(self, address: int) -> None:
        self._call("cuMemFree", address)

    def pointer(self, address: int) -> PointerFacts:
        kind = self._cu.CUpointer_attribute
        wanted = [
            kind.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            kind.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            kind.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            kind.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            kind.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
            kind.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
        ]
        memory, ordinal, base, nbytes, is_ipc, handles = self._call(
            "cuPointerGetAttributes", len(wanted), wanted, address
        )
        if int(memory) != int(self._cu.CUmemorytype.CU_MEMORYTYPE_DEVICE):
            raise DeviceError(f"{address:#x} is not device memory")
        fd = self._cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        return PointerFacts(
            int(ordinal), int(base), int(nbytes), bool(is_ipc), bool(int(handles) & int(fd))
        )

    def ipc_handle(self, address: int) -> bytes:
        handle = self._call("cuIpcGetMemHandle", address)
        return ctypes.string_at(handle.getPtr(), 64)

    def ipc_open(self, handle: bytes) -> int:
        opaque = self._cu.CUipcMemHandle()
        ctypes.memmove(opaque.getPtr(), handle, 64)
        lazy = self._cu.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
        return int(self._call("cuIpcOpenMemHandle", opaque, lazy))

    def ipc_close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", address)

    def vmm_alloc(self, ordinal: int, nbytes: int) -> int:
        cu = self._cu
        what = cu.CUmemAllocationProp()
        what.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        what.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        what.location.id = ordinal
        what.requestedHandleTypes = (
            cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        )
        handle = self._call("cuMemCreate", nbytes, what, 0)
        try:
            return self._vmm_map(ordinal, handle, nbytes)
        finally:
            # The mapping keeps the memory; nobody needs the handle any more.
            self._call("cuMemRelease", handle)

    def vmm_export(self, address: int) -> int:
        kind = self._cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = self._call("cuMemRetainAllocationHandle", address)
        try:
            return int(self._call("cuMemExportToShareableHandle", handle, kind, 0))
        finally:
            self._call("cuMemRelease", handle)

    def vmm_import(self, ordinal: int, fd: int, nbytes: int) -> int:
        kind = self._cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = self._call("cuMemImportFromShareableHandle", fd, kind)
        try:
            return self._vmm_map(ordinal, handle, nbytes)
        finally:
            self._call("cuMemRelease", handle)

    def _vmm_map(self, ordinal: int, handle: Any, nbytes: int) -> int:
        cu = self._cu
        address = self._call("cuMemAddressReserve", nbytes, 0, 0, 0)
        try:
            self._call("cuMemMap", address, nbytes, 0, handle, 0)
            allowed = []
            for other in range(self._call("cuDeviceGetCount")):
                # Virtual memory knows no peer contexts: each device is let at it by name.
                if other == ordinal or self.can_access_peer(other, ordinal):
                    access = cu.CUmemAccessDesc()
                    access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
                    access.location.id = other
                    access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                    allowed.append(access)
            try:
                self._call("cuMemSetAccess", address, nbytes, allowed, len(allowed))
            except DeviceError:
                self._call("cuMemUnmap", address, nbytes)
                raise
        except DeviceError:
            self._call("cuMemAddressFree", address, nbytes)
            raise
        return int(address)

    def vmm_free(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", address, nbytes)
        self._call("cuMemAddressFree", address, nbytes)

    def host_alloc(self, nbytes: int) -> int:
        return int(self._call("cuMemHostAlloc", nbytes, 0x01))  # CU_MEMHOSTALLOC_PORTABLE

    def host_free(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    def host_register(self, address: int, nbytes: int) -> None:
        self._call("cuMemHostRegister", address, nbytes, 0x01)  # CU_MEMHOSTREGISTER_PORTABLE

    def host_unregister(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    # -- work -------------------------------------------------------------------------------

    def stream(self) -> Any:
        # The least urgent stream: a running model goes first.
        least, _ = self._call("cuCtxGetStreamPriorityRange")
        flags = self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING.value
        return self._call("cuStreamCreateWithPriority", flags, least)

    def free_stream(self, stream: Any) -> None:
        self._call("cuStreamDestroy", stream)

    def event(self) -> Any:
        flags = self._cu.CUevent_flags.CU_EVENT_DISABLE_TIMING.value
        return self._call("cuEventCreate", flags)

    def free_event(self, event: Any) -> None:
        self._call("cuEventDestroy", event)

    def record(self, event: Any, stream: Any) -> None:
        self._call("cuEventRecord", event, stream)

    def is_done(self, event: Any) -> bool:
        (status,) = self._cu.cuEventQuery(event)
        if status == self._cu.CUresult.CUDA_SUCCESS:
            return True
        if status == self._cu.CUresult.CUDA_ERROR_NOT_READY:
            return False
        raise DeviceError(f"the device failed while copying: {status.name}")

    def copy(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        self._call("cuMemcpyAsync", target, source, nbytes, stream)

    def kernel(self, source: str, name: str) -> Any:
        """A kernel for the current device, compiled at first use. Blocks for a few 100 ms."""
        device = self._call("cuCtxGetDevice")
        key = (int(device), source, name)
        with self._lock:
            if key not in self._kernels:
                module = self._call("cuModuleLoadData", self._compile(source, device))
                self._kernels[key] = self._call("cuModuleGetFunction", module, name.encode())
            return self._kernels[key]

    def _compile(self, source: str, device: Any) -> bytes:
        kind = self._cu.CUdevice_attribute
        major, minor = (
            self._call("cuDeviceGetAttribute", item, device)
            for item in (
                kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                kind.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        nvrtc = self._nvrtc
        try:
            _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"spans.cu", 0, [], [])
        except (RuntimeError, OSError) as error:
            raise DeviceError(
                f"the CUDA compiler library cannot be loaded: {error}",
                fix="pip install nvidia-cuda-nvrtc",
            ) from error
        try:
            options = [f"--gpu-architecture=sm_{major}{minor}".encode(), b"--std=c++17"]
            (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
            if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
                _, size = nvrtc.nvrtcGetProgramLogSize(program)
                text = bytes(int(size))
                nvrtc.nvrtcGetProgramLog(program, text)
                raise DeviceError(
                    f"a kernel does not compile here: {text.decode(errors='replace').strip()[:400]}"
                )
            _, size = nvrtc.nvrtcGetCUBINSize(program)
            image = bytes(int(size))
            nvrtc.nvrtcGetCUBIN(program, image)
            return image
        finally:
            nvrtc.nvrtcDestroyProgram(program)

    def launch(
        self, kernel: Any, blocks: int, threads: int, arguments: tuple[int, ...], stream: Any
    ) -> None:
        values = tuple(arguments)
        types = (ctypes.c_uint64,) * len(values)
        self._call(
            "cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, 0, stream, (values, types), 0
        )


_FIXES = {
    "CUDA_ERROR_OUT_OF_MEMORY": "free device memory, or leave the model a smaller share of it",
    "CUDA_ERROR_NO_DEVICE": "look at CUDA_VISIBLE_DEVICES; in a container, start it with --gpus",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "the device's context is lost: restart this process",
    "CUDA_ERROR_INVALID_CONTEXT": "the device was reset by another library: restart this process",
}
