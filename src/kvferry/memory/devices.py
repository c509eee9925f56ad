"""The devices of this process, by UUID, opened at first use.

Ordinals never leave this file's callers: CUDA_VISIBLE_DEVICES gives one device another number in
every process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from kvferry.errors import DeviceError, RegistrationError
from kvferry.memory.cuda import CudaDevice
from kvferry.memory.cuda_driver import CudaDriver, DeviceFacts, PointerFacts


class Devices:
    """The devices that one engine uses. Thread-safe.

    load: gives the driver, or raises DeviceError that says what is missing; called at first use.
    blocks: see CudaDevice.
    """

    def __init__(self, load: Callable[[], CudaDriver], *, blocks: int = 0) -> None:
        self._load = load
        self._blocks = blocks
        self._lock = threading.Lock()
        self._driver: CudaDriver | None = None
        self._facts: dict[str, DeviceFacts] = {}
        self._open: dict[str, CudaDevice] = {}
        self._allowed: set[tuple[str, str]] = set()
        self._why = ""

    def missing(self) -> str:
        """Why no device can be used here, in a sentence; empty if one can."""
        try:
            return "" if self._known() else "this process sees no GPU"
        except DeviceError as error:
            return error.message

    def uuids(self) -> tuple[str, ...]:
        """The devices that this process can see; none is not an error."""
        try:
            return tuple(self._known())
        except DeviceError:
            return ()

    def device(self, uuid: str) -> CudaDevice:
        """One device, opened. Blocks at first use, while its kernel compiles. Raises DeviceError
        for one that this process cannot see."""
        facts = self._known().get(uuid)
        if facts is None:
            raise DeviceError(
                f"this process cannot see {uuid}",
                fix="look at CUDA_VISIBLE_DEVICES, or at --gpus of the container",
            )
        with self._lock:
            found = self._open.get(uuid)
            if found is None:
                assert self._driver is not None
                found = self._open[uuid] = CudaDevice(self._driver, facts, blocks=self._blocks)
            return found

    def named(self, name: str) -> CudaDevice:
        """By UUID, or by ``"cuda"`` or ``"cuda:1"`` as this process counts them."""
        known = self._known()
        if name in known:
            return self.device(name)
        head, _, number = name.partition(":")
        ordinal = int(number) if number.isdecimal() else 0
        for facts in known.values():
            if head == "cuda" and facts.ordinal == ordinal:
                return self.device(facts.uuid)
        raise DeviceError(
            f"there is no device {name!r} here; this process sees {', '.join(known) or 'none'}"
        )

    def around(self, address: int) -> tuple[CudaDevice, PointerFacts]:
        """The device that holds an address, and its allocation. Raises DeviceError."""
        known = list(self._known().values())
        if not known:
            raise DeviceError(self.missing())
        assert self._driver is not None
        self._driver.use(known[0].ordinal)
        facts = self._driver.pointer(address)
        uuid = next(item.uuid for item in known if item.ordinal == facts.ordinal)
        return self.device(uuid), facts

    def can_reach(self, uuid: str, other: str) -> str:
        """Why the first device cannot read memory of the other one directly; empty if the driver
        says that it can, which is not a proof."""
        known = self._known()
        for name in (uuid, other):
            if name not in known:
                return f"this process cannot see {name} (CUDA_VISIBLE_DEVICES)"
        a, b = known[uuid].ordinal, known[other].ordinal
        assert self._driver is not None
        if a != b and not self._driver.can_access_peer(a, b):
            return f"the driver allows no peer access from {uuid} to {other}"
        return ""

    def allow(self, uuid: str, other: str) -> None:
        """Let kernels on the first device touch memory of the other one, once per pair.

        Raises RegistrationError where the driver refuses, DeviceError for a device not seen here.
        """
        if uuid == other or (uuid, other) in self._allowed:
            return
        here, there = self.device(uuid), self.device(other)
        there.use()
        here.use()
        try:
            here.driver.enable_peer(there.facts.ordinal)
        except DeviceError as error:
            raise RegistrationError(
                f"{uuid} is not let at the memory of {other}: {error.message}",
                stage="map",
                fix="allow 'staged' as well, which needs no peer access",
            ) from error
        self._allowed.add((uuid, other))

    @contextmanager
    def undisturbed(self, *, load: bool = False) -> Iterator[None]:
        """Around work in a thread of the caller's: afterwards it has the current device that it
        had, since frameworks allocate on whatever is current. load: whether a driver is needed, or
        nothing is done while none was. Raises DeviceError with ``load``."""
        if load:
            self._known()
        driver = self._driver
        if driver is None:
            yield
            return
        current = driver.current()
        try:
            yield
        finally:
            # A context that was destroyed meanwhile cannot come back.
            with suppress(DeviceError):
                driver.restore(current)

    def close(self) -> None:
        with self._lock:
            opened, self._open = list(self._open.values()), {}
        for device in opened:
            device.close()

    def _known(self) -> dict[str, DeviceFacts]:
        with self._lock:
            if self._driver is None:
                if self._why:
                    raise DeviceError(self._why)
                try:
                    self._driver = self._load()
                    self._facts = {facts.uuid: facts for facts in self._driver.devices()}
                except DeviceError as error:
                    # Asked for often; what is missing now will not appear in this process.
                    self._why = str(error)
                    raise
            return self._facts
