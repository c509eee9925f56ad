"""cuda_ipc: the peer's device memory is mapped, and one kernel copies between both.

Two ways to name memory to another process of the same host. A *legacy handle* names an allocation
of cudaMalloc, as torch makes them; it travels as 64 bytes, with the region's place inside the
allocation. Virtual memory (torch's expandable segments, vLLM's pools, ``Engine.allocate``) is
exported as a *file descriptor*, which the Unix socket carries, when it was made for that.
Source: NVIDIA, CUDA Driver API, "Memory Management" and "Virtual Memory Management".

Allocations are opened once per peer, however many regions lie in them: the driver refuses to open
a legacy handle twice. A peer that dies leaves mappings whose bytes stay readable until they are
closed, so a copy that races with its death ends well or in an error, and the process lives.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass

import msgspec

from kvferry.errors import DeviceError, RegistrationError
from kvferry.memory.cuda import CudaDevice
from kvferry.regions import Region
from kvferry.transports.base import Capabilities, Export, PeerView, RemoteRegion
from kvferry.transports.mapped import MappedTransport, Mapping, refuse_missing

log = logging.getLogger(__name__)

HANDLE_BYTES = 64


class _Export(msgspec.Struct, array_like=True, frozen=True):
    """handle: a legacy handle, or b"" when a descriptor travels instead. allocation: size of the
    whole allocation. offset: where the region begins in it."""

    handle: bytes
    allocation_bytes: int
    offset: int


@dataclass
class _Opened:
    """An allocation of a peer in this process, and how many regions use it."""

    device: CudaDevice
    address: int
    nbytes: int
    is_virtual: bool
    users: int = 1

    def close(self) -> None:
        self.device.use()
        if self.is_virtual:
            self.device.driver.vmm_free(self.address, self.nbytes)
        else:
            self.device.driver.ipc_close(self.address)


class CudaIpcTransport(MappedTransport):
    """Copies within one device, or between devices that reach each other."""

    name = "cuda_ipc"

    def __init__(self) -> None:
        super().__init__()
        self._handles = threading.Lock()
        self._opened: dict[tuple[bytes, str, bytes], _Opened] = {}
        self._fds: dict[int, int] = {}

    def capabilities(self) -> Capabilities:
        return Capabilities(
            family="mapped",
            kinds=frozenset({"cuda"}),
            same_host=True,
            needs_export=True,
            needs_unix=True,
            latency_s=1e-4,
            bytes_per_s=2e11,
            span_s=2e-9,
        )

    def export(self, region: Region, fd: int) -> Export | None:
        if region.kind != "cuda":
            return None
        assert self._services is not None
        device, facts = self._services.devices.around(region.address)
        inside = (facts.nbytes, region.address - facts.base)
        if inside[1] + region.nbytes > facts.nbytes:
            raise RegistrationError(
                f"{region.nbytes} bytes at {region.address:#x} reach beyond their allocation of "
                f"{facts.nbytes} bytes",
                fix="register each allocation by itself",
            )
        device.use()
        if facts.is_ipc:
            handle = device.driver.ipc_handle(facts.base)
            return Export(msgspec.msgpack.encode(_Export(handle, *inside)))
        if facts.has_fd:
            shared = self._fds[region.region_id] = device.driver.vmm_export(facts.base)
            return Export(msgspec.msgpack.encode(_Export(b"", *inside)), shared)
        return None

    def deregister(self, region: Region) -> None:
        fd = self._fds.pop(region.region_id, -1)
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        super().close()
        while self._fds:
            os.close(self._fds.popitem()[1])

    def blocked(self, local: Region, remote: RemoteRegion, peer: PeerView) -> str:
        if self.name not in remote.exports:
            return (
                "the peer's memory can be named to no other process: it is neither from cudaMalloc "
                "nor virtual memory made with an exportable handle"
            )
        assert self._services is not None
        if peer.process == self._services.process:
            return "the engines share a process, where the driver opens no handle of its own memory"
        devices = self._services.devices
        if remote.device not in devices.uuids():
            return (
                f"this process cannot see the peer's device {remote.device} "
                "(CUDA_VISIBLE_DEVICES, or the container's --gpus)"
            )
        return devices.can_reach(local.device, remote.device)

    def map(self, remote: RemoteRegion, *, writable: bool) -> Mapping:
        export = remote.exports.get(self.name)
        if export is None:
            raise refuse_missing(remote, self.name)
        try:
            facts = msgspec.msgpack.decode(export.data, type=_Export)
        except msgspec.DecodeError as error:
            raise RegistrationError(f"the peer's export is malformed: {error}") from error
        good = 0 <= facts.offset <= facts.allocation_bytes - remote.nbytes
        if not good or (len(facts.handle) != HANDLE_BYTES and export.fd < 0):
            raise _unfit()
        key = (remote.peer, remote.device, facts.handle or remote.region_id.to_bytes(8, "little"))
        try:
            opened = self._open(key, facts, export.fd)
        except DeviceError as error:
            raise RegistrationError(
                f"the driver cannot map the peer's device memory: {error.message}",
                stage="map",
                fix="containers need the same driver and one IPC namespace; other paths do not",
            ) from error
        if facts.offset + remote.nbytes > opened.nbytes:
            self._release(key)
            raise _unfit()
        return Mapping(opened.address + facts.offset, release=lambda: self._release(key))

    def _open(self, key: tuple[bytes, str, bytes], facts: _Export, fd: int) -> _Opened:
        assert self._services is not None
        with self._handles:
            opened = self._opened.get(key)
            if opened is not None:
                opened.users += 1
                return opened
            device = self._services.devices.device(key[1])
            device.use()
            nbytes = facts.allocation_bytes
            if facts.handle:
                address = device.driver.ipc_open(facts.handle)
                # What the peer says of a handle is not checked by the driver: see map().
                try:
                    nbytes = device.driver.pointer(address).nbytes
                except DeviceError:
                    device.driver.ipc_close(address)
                    raise
            else:
                address = device.driver.vmm_import(device.facts.ordinal, fd, nbytes)
            opened = self._opened[key] = _Opened(device, address, nbytes, not facts.handle)
            return opened

    def _release(self, key: tuple[bytes, str, bytes]) -> None:
        with self._handles:
            opened = self._opened[key]
            opened.users -= 1
            if opened.users:
                return
            del self._opened[key]
            try:
                opened.close()
            except DeviceError as error:
                log.warning("a mapping of a peer's device memory was not closed: %s", error)


def _unfit() -> RegistrationError:
    return RegistrationError("the peer's export does not fit its region", stage="map")
