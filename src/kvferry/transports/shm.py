"""shm: the peer's memfd, passed over the Unix socket, is mapped here; one copy moves everything.

Reading maps the descriptor read-only, and a region that is not registered for writing is exported
by a descriptor that can only be read, so a broken peer cannot damage a KV pool. The descriptor
must be sealed against shrinking, otherwise its owner could kill us with SIGBUS; the receiver
checks that.
"""

from __future__ import annotations

import os

from kvferry.errors import RegistrationError
from kvferry.memory.host import map_shared, readonly_fd
from kvferry.regions import READ, Region
from kvferry.transports.base import Capabilities, Export, PeerView, RemoteRegion
from kvferry.transports.mapped import MappedTransport, Mapping, refuse_missing


class ShmTransport(MappedTransport):
    """Copies between local memory and a peer's shared memory."""

    name = "shm"

    def __init__(self) -> None:
        super().__init__()
        self._fds: dict[int, int] = {}

    def capabilities(self) -> Capabilities:
        return Capabilities(
            family="mapped",
            same_host=True,
            needs_export=True,
            needs_unix=True,
            latency_s=8e-6,
            bytes_per_s=9e9,
            span_s=1e-7,
        )

    def unavailable(self) -> str:
        return "" if hasattr(os, "memfd_create") else "this system has no memfd_create"

    def export(self, region: Region, fd: int) -> Export | None:
        if fd < 0 or region.kind != "host":
            return None
        try:
            shared = readonly_fd(fd) if region.access == READ else os.dup(fd)
        except OSError as error:
            raise RegistrationError(
                f"cannot share region {region.region_id}: {error.strerror}",
                fix="raise the limit of open files (ulimit -n)",
            ) from error
        self._fds[region.region_id] = shared
        return Export(b"", shared)

    def deregister(self, region: Region) -> None:
        fd = self._fds.pop(region.region_id, -1)
        if fd >= 0:
            os.close(fd)

    def close(self) -> None:
        super().close()
        while self._fds:
            os.close(self._fds.popitem()[1])

    def blocked(self, local: Region, remote: RemoteRegion, peer: PeerView) -> str:
        if self.name in remote.exports:
            return ""
        return "the peer's region is not in shareable memory (engine.allocate makes such memory)"

    def map(self, remote: RemoteRegion, *, writable: bool) -> Mapping:
        export = remote.exports.get(self.name)
        if export is None or export.fd < 0:
            raise refuse_missing(remote, self.name)
        try:
            buffer = map_shared(export.fd, remote.nbytes, writable=writable)
        except OSError as error:
            raise RegistrationError(
                f"cannot map {remote.nbytes} bytes of the peer: {error.strerror}", stage="map"
            ) from error
        return Mapping(buffer.address, buffer.close)
