"""Where spans can lie: host memory and device memory behind one interface, for streamed paths.

A :class:`Place` gathers scattered spans into one piece of host memory and scatters them from it.
Host memory does so at once; a device takes its time, so both return a :class:`Landing`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvferry.errors import DeviceError
from kvferry.memory import copy
from kvferry.memory.cuda import CudaDevice, CudaQueue
from kvferry.memory.devices import Devices
from kvferry.regions import I64, U64

SETTLE_S = 10.0
"""How long digests wait for a device before they are given up."""


class Landing(Protocol):
    """A copy that was begun."""

    def is_done(self) -> bool: ...

    def wait(self, check: Callable[[], None]) -> None:
        """Block until it is done; ``check`` is called in between and gives up by raising."""

    def settle(self, limit_s: float) -> None:
        """Block until it is done, whatever else. Raises DeviceError after ``limit_s``."""


class Place(Protocol):
    """Memory of one kind, lent to one thread for one transfer."""

    is_host: bool

    def gather(self, target: int, sources: U64, lengths: I64) -> Landing:
        """Begin to copy spans, in order, into host memory at ``target``, which is pinned."""

    def scatter(self, source: int, targets: U64, lengths: I64) -> Landing:
        """Begin to copy host memory at ``source``, which is pinned, to spans, in order."""

    def pin(self, address: int, nbytes: int) -> Callable[[], None]:
        """Make host memory fit for this place; the result undoes it, from any thread."""

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Host memory that is fit for this place, valid while it is lent."""


class _Done:
    def is_done(self) -> bool:
        return True

    def wait(self, check: Callable[[], None]) -> None:
        return None

    def settle(self, limit_s: float) -> None:
        return None


_DONE = _Done()


def _nothing() -> None:
    return None


class HostPlace:
    """Plain memory: a copy is done when the call returns."""

    is_host = True

    def gather(self, target: int, sources: U64, lengths: I64) -> Landing:
        copy.gather(target, sources, lengths)
        return _DONE

    def scatter(self, source: int, targets: U64, lengths: I64) -> Landing:
        copy.scatter(source, targets, lengths)
        return _DONE

    def pin(self, address: int, nbytes: int) -> Callable[[], None]:
        return _nothing

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return np.empty(nbytes, np.uint8)


HOST = HostPlace()


class DevicePlace:
    """Memory of one device, through one of its queues."""

    is_host = False

    def __init__(self, device: CudaDevice, queue: CudaQueue) -> None:
        self._device = device
        self._queue = queue

    def gather(self, target: int, sources: U64, lengths: I64) -> Landing:
        return self._queue.gather(target, sources, lengths)

    def scatter(self, source: int, targets: U64, lengths: I64) -> Landing:
        return self._queue.scatter(source, targets, lengths)

    def pin(self, address: int, nbytes: int) -> Callable[[], None]:
        self._device.driver.host_register(address, nbytes)

        def unpin() -> None:
            self._device.use()
            self._device.driver.host_unregister(address)

        return unpin

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        address = self._device.pinned(nbytes)
        # They go back with the queue: a late copy may still land in them.
        self._queue.buffers.append(address)
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


@contextmanager
def lend(devices: Devices, kind: str, device: str) -> Iterator[Place]:
    """The place of a region, for the calling thread. Raises DeviceError."""
    if kind == "host":
        yield HOST
        return
    opened = devices.device(device)
    with opened.queue() as queue:
        yield DevicePlace(opened, queue)


def settle(landings: list[Landing]) -> None:
    """Wait for copies that must not go on when their memory is given back, however long it takes: a
    device that is busy with somebody else's work lands them at last, and until then their memory
    is in quarantine. Errors are ignored, since a device that fails copies nothing more."""
    for landing in landings:
        with suppress(DeviceError):
            landing.wait(_nothing)
