"""inproc: both engines live in one process, so the peer's address is already valid here.

The smallest whole transport; read this one first. The export is a number in this process's own
directory of exported memory; nothing that a peer sends is used as an address. It is looked at only
when the process id of its maker, a random number that a fork does not inherit, is our own.
"""

from __future__ import annotations

import struct
import threading

from kvferry.errors import RegistrationError, StaleRegionError
from kvferry.regions import Region
from kvferry.transports.base import Capabilities, Export, PeerView, RemoteRegion
from kvferry.transports.mapped import MappedTransport, Mapping, refuse_missing

_FORMAT = struct.Struct("<Q")
DEREGISTER_S = 5.0


class _Directory:
    """Exported memory of all engines of this process, with the copies that use it right now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._next = 1
        self._regions: dict[int, Region] = {}
        self._users: dict[int, int] = {}
        self._leaving: dict[int, int] = {}

    def add(self, region: Region) -> int:
        with self._lock:
            number = self._next
            self._next += 1
            self._regions[number] = region
            self._users[number] = 0
            return number

    def address(self, number: int, remote: RemoteRegion) -> int:
        """Where the region is, if it is the one that the peer described."""
        with self._lock:
            region = self._regions.get(number)
        if region is None or (region.token, region.nbytes) != (remote.token, remote.nbytes):
            raise StaleRegionError(
                f"region {remote.region_id} is not, or no longer, in this process",
                fix="ask for it again: peer.region(ref), with a reference that is still good",
            )
        return region.address

    def enter(self, number: int) -> None:
        with self._lock:
            if number not in self._users:
                raise StaleRegionError(
                    "the region was deregistered",
                    fix="ask its owner for a reference that is still good",
                )
            self._users[number] += 1

    def exit(self, number: int) -> None:
        with self._lock:
            for counts in (self._users, self._leaving):
                if number in counts:
                    counts[number] -= 1
            self._idle.notify_all()

    def remove(self, number: int, timeout_s: float) -> bool:
        """Let no further copy begin and wait for those under way; whether they ended in time."""
        with self._lock:
            self._regions.pop(number, None)
            users = self._users.pop(number, 0)
            users += self._leaving.pop(number, 0)
            self._leaving[number] = users
            ended = self._idle.wait_for(lambda: self._leaving[number] == 0, timeout_s)
            if ended:
                del self._leaving[number]
            return ended


_directory = _Directory()


class InprocTransport(MappedTransport):
    """Plain copies inside one process."""

    name = "inproc"
    maps_quickly = True

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[int, int] = {}

    def capabilities(self) -> Capabilities:
        return Capabilities(
            family="mapped",
            kinds=frozenset({"host", "cuda"}),
            same_process=True,
            needs_export=True,
            latency_s=5e-6,
            bytes_per_s=10e9,
            span_s=5e-8,
        )

    def export(self, region: Region, fd: int) -> Export | None:
        number = self._numbers[region.region_id] = _directory.add(region)
        return Export(_FORMAT.pack(number))

    def deregister(self, region: Region) -> None:
        number = self._numbers.get(region.region_id)
        if number is None:
            return
        if not _directory.remove(number, DEREGISTER_S):
            raise RegistrationError(
                f"region {region.region_id} is still being copied after {DEREGISTER_S:g} s",
                fix="do not free its memory; abort the transfers that use it first",
            )
        del self._numbers[region.region_id]

    def blocked(self, local: Region, remote: RemoteRegion, peer: PeerView) -> str:
        if self.name not in remote.exports:
            return "the region was not exported for it"
        if local.kind != remote.kind:
            return f"it does not copy between {local.kind} and {remote.kind} memory"
        if local.kind == "cuda":
            assert self._services is not None
            return self._services.devices.can_reach(local.device, remote.device)
        return ""

    def map(self, remote: RemoteRegion, *, writable: bool) -> Mapping:
        export = remote.exports.get(self.name)
        if export is None or len(export.data) != _FORMAT.size:
            raise refuse_missing(remote, self.name)
        (number,) = _FORMAT.unpack(export.data)
        return Mapping(
            _directory.address(number, remote),
            enter=lambda: _directory.enter(number),
            exit=lambda: _directory.exit(number),
        )
