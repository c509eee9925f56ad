"""CUDA without a GPU: a driver whose device memory is host memory and whose stream can be told to
fail, to lie or to take its time.

Everything that kvferry does with devices can be tested on it in one process: IPC handles and
exported descriptors name memory of the same :class:`FakeCuda`. Work is done when its event is
asked for, so a test decides how late that is.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvferry.errors import DeviceError
from kvferry.memory.copy import copy_spans
from kvferry.memory.cuda import KERNEL_NAME
from kvferry.memory.cuda_driver import DeviceFacts, PointerFacts

_ALIGNED_BYTES = 512


@dataclass
class _Allocation:
    ordinal: int
    memory: np.ndarray[Any, np.dtype[np.uint8]]
    address: int
    nbytes: int
    kind: str
    maps: int = 1


@dataclass
class _Stream:
    ordinal: int
    work: deque[Callable[[], None]] = field(default_factory=deque)


@dataclass(eq=False)
class _Event:
    stream: _Stream | None = None
    asked: int = 0


class FakeCuda:
    """A machine with ``count`` devices, shared by all engines of a test.

    multiprocessors, device_bytes: what each device has. peers: whether devices say that they can
    reach each other. zeros: a lie seen in the field: peer copies report success and bring zeros.
    late: how many times an event is asked before its work is done. fail: names of calls, such as
    ``"alloc"`` or ``"ipc_open"``, that raise DeviceError; ``"done"`` fails events.
    """

    def __init__(
        self, count: int = 1, *, device_bytes: int = 1 << 30, multiprocessors: int = 4
    ) -> None:
        self.peers = True
        self.zeros = False
        self.late = 0
        self.fail: set[str] = set()
        self.launches = 0
        self.engine_copies = 0
        self.facts = tuple(
            DeviceFacts(
                i,
                f"GPU-00000000-0000-0000-0000-{i:012d}",
                f"Fake {i}",
                device_bytes,
                multiprocessors,
                f"0000:{i + 1:02x}:00.0",
            )
            for i in range(count)
        )
        self._enabled: set[tuple[int, int]] = set()
        self._lock = threading.RLock()
        self._current = threading.local()
        self._allocations: dict[int, _Allocation] = {}
        self._pinned: dict[int, Any] = {}
        self._registered: dict[int, int] = {}
        self._streams = 0

    # -- what a test asks -------------------------------------------------------------------

    def held(self) -> dict[str, int]:
        """What is allocated, opened, registered or made and not yet given back."""
        return {
            "allocations": len(self._allocations),
            "pinned": len(self._pinned),
            "registered": len(self._registered),
            "opened": sum(item.maps - 1 for item in self._allocations.values()),
            "streams": self._streams,
        }

    def view(self, address: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of device memory, as an array of the test."""
        item = self._around(address)
        begin = address - item.address
        return item.memory[begin : begin + nbytes]

    # -- devices ----------------------------------------------------------------------------

    def devices(self) -> tuple[DeviceFacts, ...]:
        return self.facts

    def use(self, ordinal: int) -> None:
        if not 0 <= ordinal < len(self.facts):
            raise DeviceError(f"there is no device {ordinal}")
        self._current.ordinal = ordinal

    def current(self) -> int | None:
        return getattr(self._current, "ordinal", None)

    def restore(self, current: int | None) -> None:
        self._current.ordinal = current

    def version(self) -> str:
        return "0.0"

    def free_bytes(self) -> int:
        used = sum(i.nbytes for i in self._allocations.values() if i.ordinal == self._here())
        return self.facts[self._here()].nbytes - used

    def can_access_peer(self, ordinal: int, peer: int) -> bool:
        return self.peers and ordinal != peer

    def enable_peer(self, peer: int) -> None:
        self._may("enable_peer")
        if not self.peers:
            raise DeviceError("peer access is not supported between these devices")
        self._enabled.add((self._here(), peer))

    # -- memory -----------------------------------------------------------------------------

    def alloc(self, nbytes: int) -> int:
        self._may("alloc")
        return self._new(self._here(), nbytes, "ipc")

    def free(self, address: int) -> None:
        with self._lock:
            item = self._allocations.get(address)
            if item is None:
                raise DeviceError(f"{address:#x} was not allocated")
            self._drop(item)

    def pointer(self, address: int) -> PointerFacts:
        item = self._around(address)
        return PointerFacts(
            item.ordinal, item.address, item.nbytes, item.kind == "ipc", item.kind == "vmm"
        )

    def ipc_handle(self, address: int) -> bytes:
        self._may("ipc_handle")
        item = self._around(address)
        if item.kind != "ipc":
            raise DeviceError("this memory has no legacy handle")
        return item.address.to_bytes(8, "little") + bytes(56)

    def ipc_open(self, handle: bytes) -> int:
        self._may("ipc_open")
        return self._open(int.from_bytes(handle[:8], "little"))

    def ipc_close(self, address: int) -> None:
        self._close(address)

    def vmm_alloc(self, ordinal: int, nbytes: int) -> int:
        self._may("alloc")
        return self._new(ordinal, nbytes, "vmm")

    def vmm_export(self, address: int) -> int:
        self._may("vmm_export")
        item = self._around(address)
        fd = os.memfd_create("fake-device-memory", os.MFD_CLOEXEC)
        os.write(fd, item.address.to_bytes(8, "little"))
        return fd

    def vmm_import(self, ordinal: int, fd: int, nbytes: int) -> int:
        self._may("vmm_import")
        return self._open(int.from_bytes(os.pread(fd, 8, 0), "little"))

    def vmm_free(self, address: int, nbytes: int) -> None:
        self._close(address)

    def host_alloc(self, nbytes: int) -> int:
        self._may("host_alloc")
        memory = np.zeros(nbytes + _ALIGNED_BYTES, np.uint8)
        address = -(-memory.ctypes.data // _ALIGNED_BYTES) * _ALIGNED_BYTES
        self._pinned[address] = memory
        return int(address)

    def host_free(self, address: int) -> None:
        del self._pinned[address]

    def host_register(self, address: int, nbytes: int) -> None:
        self._may("host_register")
        if address in self._registered:
            raise DeviceError("this memory is registered already")
        self._registered[address] = nbytes

    def host_unregister(self, address: int) -> None:
        del self._registered[address]

    # -- work -------------------------------------------------------------------------------

    def stream(self) -> Any:
        with self._lock:
            self._streams += 1
        return _Stream(self._here())

    def free_stream(self, stream: Any) -> None:
        with self._lock:
            self._streams -= 1

    def event(self) -> Any:
        return _Event()

    def free_event(self, event: Any) -> None:
        return None

    def record(self, event: Any, stream: Any) -> None:
        event.stream, event.asked = stream, 0

    def is_done(self, event: Any) -> bool:
        if "done" in self.fail:
            raise DeviceError("the device failed while copying: CUDA_ERROR_ILLEGAL_ADDRESS")
        event.asked += 1
        if event.asked <= self.late:
            return False
        # Everything that the stream was given by now; more than real hardware promises, never less.
        with self._lock:
            while event.stream.work:
                event.stream.work.popleft()()
        return True

    def copy(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        self._may("copy")
        with self._lock:
            self.engine_copies += 1
        sizes = np.array([nbytes], np.int64)
        self._later(stream, np.array([target], np.uint64), np.array([source], np.uint64), sizes)

    def kernel(self, source: str, name: str) -> Any:
        self._may("kernel")
        assert name == KERNEL_NAME
        return name

    def launch(
        self, kernel: Any, blocks: int, threads: int, arguments: tuple[int, ...], stream: Any
    ) -> None:
        self._may("launch")
        assert blocks >= 1
        assert threads % 32 == 0
        targets, sources, sizes, count, parts, part, to, by, length = arguments

        def work() -> None:
            target = self.view(targets, 8 * count).view(np.uint64) + np.uint64(to)
            source = self.view(sources, 8 * count).view(np.uint64) + np.uint64(by)
            lengths = np.full(count, length)
            if sizes:
                lengths = self.view(sizes, 8 * count).view(np.int64)
            for address in (int(target[0]), int(source[0])):
                owner = self._owner(address)
                if owner not in (None, stream.ordinal, *self._reachable(stream.ordinal)):
                    raise DeviceError("the device failed while copying: illegal address")
            # What a kernel would leave out, because it was launched for too few parts.
            self._move(stream, target, source, np.minimum(lengths, parts * part))

        with self._lock:
            self.launches += 1
            stream.work.append(work)

    # -- inside -----------------------------------------------------------------------------

    def _later(self, stream: _Stream, *lists: Any) -> None:
        stream.work.append(lambda: self._move(stream, *lists))

    def _move(self, stream: _Stream, targets: Any, sources: Any, lengths: Any) -> None:
        copy_spans(targets, sources, lengths)
        if self.zeros:
            for target, source, nbytes in zip(targets, sources, lengths, strict=True):
                owners = {self._owner(int(source)), self._owner(int(target))}
                if owners - {None, stream.ordinal}:
                    self.view(int(target), int(nbytes))[:] = 0

    def _owner(self, address: int) -> int | None:
        """The device whose memory it is; None for host memory."""
        for item in self._allocations.values():
            if item.address <= address < item.address + item.nbytes:
                return item.ordinal
        return None

    def _reachable(self, ordinal: int) -> list[int]:
        return [peer for here, peer in self._enabled if here == ordinal]

    def _here(self) -> int:
        ordinal = self.current()
        if ordinal is None:
            raise DeviceError("no device is current in this thread")
        return ordinal

    def _may(self, name: str) -> None:
        if name in self.fail:
            raise DeviceError(f"{name}: refused by the test")

    def _new(self, ordinal: int, nbytes: int, kind: str) -> int:
        if nbytes > self.facts[ordinal].nbytes:
            raise DeviceError("alloc: out of memory", fix="free device memory")
        memory = np.zeros(nbytes + _ALIGNED_BYTES, np.uint8)
        skip = -memory.ctypes.data % _ALIGNED_BYTES
        memory = memory[skip : skip + nbytes]
        address = memory.ctypes.data
        with self._lock:
            self._allocations[address] = _Allocation(ordinal, memory, address, nbytes, kind)
        return int(address)

    def _open(self, address: int) -> int:
        with self._lock:
            item = self._allocations.get(address)
            if item is None:
                raise DeviceError("the handle names memory that is gone")
            item.maps += 1
            return address

    def _close(self, address: int) -> None:
        with self._lock:
            self._drop(self._allocations[address])

    def _drop(self, item: _Allocation) -> None:
        item.maps -= 1
        if item.maps == 0:
            del self._allocations[item.address]

    def _around(self, address: int) -> _Allocation:
        with self._lock:
            for item in self._allocations.values():
                if item.address <= address < item.address + item.nbytes:
                    return item
        raise DeviceError(f"{address:#x} is not device memory")
