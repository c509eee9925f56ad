"""staged: bytes flow through a small ring in shared memory, for memory that cannot itself be
shared.

The caller of a lane makes the ring (a sealed memfd) and passes it with the hello. The sender
gathers into a slot and rings: 16 bytes on the lane's Unix socket that name slot and size. The
receiver scatters the slot and rings back. Several slots let both copies run at once. The socket
also tells each side at once when the other dies.
"""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kvferry.errors import DeviceError, ProtocolError, RegistrationError
from kvferry.memory.host import allocate_shared, map_shared
from kvferry.memory.places import HOST, Landing, Place, settle
from kvferry.protocol.messages import Hello
from kvferry.regions import I64, U64, Region
from kvferry.transports.base import Capabilities, Export, PeerView, Services
from kvferry.transports.channel import Channel, Watch, cut
from kvferry.transports.stream import StreamedTransport

_BELL = struct.Struct("<IIQ")
_FULL, _FREE = 1, 2
RING_BYTES_MAX = 1 << 30
IN_FLIGHT = 2
"""So many slots may be filling, by a device, while the next one is begun."""


class StagedTransport(StreamedTransport):
    """Streams through a ring in shared memory, between any two engines of one host."""

    name = "staged"

    def capabilities(self) -> Capabilities:
        return Capabilities(
            family="streamed",
            kinds=frozenset({"host", "cuda"}),
            same_host=True,
            needs_unix=True,
            latency_s=1.5e-4,
            bytes_per_s=5e9,
            span_s=1e-7,
        )

    def export(self, region: Region, fd: int) -> Export | None:
        return Export()

    def dial(
        self,
        services: Services,
        peer: PeerView,
        deadline: float,
        check: Callable[[], None],
        *,
        for_device: bool,
    ) -> Channel:
        config = services.config
        slots, nbytes = config.ring_slots, config.ring_bytes
        if for_device:
            slots, nbytes = config.device_ring_slots, config.device_ring_bytes
        ring = allocate_shared(slots * nbytes, name="kvferry-ring")
        try:
            hello = {"purpose": self.name, "ring_bytes": nbytes, "ring_slots": slots}
            sock = services.open_lane(peer, peer.unix_address, deadline, hello, ring.fd, check)
        except BaseException:
            ring.close()
            raise
        return RingChannel(sock, ring, slots, nbytes)

    def serve(self, sock: socket.socket, fd: int, hello: Hello) -> Channel:
        try:
            size = hello.ring_bytes * hello.ring_slots
            good = 4096 <= hello.ring_bytes <= size <= RING_BYTES_MAX and hello.ring_slots >= 2
            if fd < 0 or not good:
                raise ProtocolError("a staged lane without a usable ring")
            ring = map_shared(fd, size, writable=True)
        except OSError as error:
            raise RegistrationError(f"cannot map the peer's ring: {error.strerror}") from error
        finally:
            if fd >= 0:
                os.close(fd)
        return RingChannel(sock, ring, hello.ring_slots, hello.ring_bytes)


@dataclass
class _Filled:
    """A slot with a copy that was begun from or to it."""

    landing: Landing
    slot: int
    nbytes: int


class Ring(Protocol):
    """Shared memory, made here or mapped from the peer."""

    @property
    def address(self) -> int: ...

    def close(self) -> None: ...


class RingChannel(Channel):
    """A ring and its bell. One transfer at a time; between transfers all slots are free."""

    def __init__(self, sock: socket.socket, ring: Ring, slots: int, nbytes: int) -> None:
        super().__init__(sock)
        self._ring = ring
        self._slots = slots
        self._nbytes = nbytes
        self._unpin: Callable[[], None] | None = None

    def send_spans(self, addresses: U64, lengths: I64, watch: Watch) -> None:
        self.send_from(HOST, addresses, lengths, watch)

    def receive_spans(self, addresses: U64, lengths: I64, watch: Watch) -> None:
        self.receive_into(HOST, addresses, lengths, watch)

    def send_from(self, place: Place, addresses: U64, lengths: I64, watch: Watch) -> None:
        self._pin(place)
        busy, flying = 0, deque[_Filled]()
        parts = cut(addresses, lengths, self._nbytes)
        try:
            for number, (part, sizes, nbytes) in enumerate(parts):
                watch.check()
                slot = number % self._slots
                if busy == self._slots:
                    # Whoever waits for the peer must have told it everything.
                    self._ring_filled(flying, 0, watch)
                    self._await(_FREE, slot, watch)
                    busy -= 1
                flying.append(_Filled(place.gather(self._slot(slot), part, sizes), slot, nbytes))
                busy += 1
                self._ring_filled(flying, IN_FLIGHT, watch)
            self._ring_filled(flying, 0, watch)
        finally:
            settle([item.landing for item in flying])
        for number in range(len(parts) - busy, len(parts)):
            self._await(_FREE, number % self._slots, watch)

    def _ring_filled(self, flying: deque[_Filled], keep: int, watch: Watch) -> None:
        """Tell the peer which slots are full, in order; up to ``keep`` may go on filling."""
        while flying and (len(flying) > keep or flying[0].landing.is_done()):
            flying[0].landing.wait(watch.check)
            item = flying.popleft()
            self._ring_bell(_FULL, item.slot, item.nbytes, watch)
            watch.bytes_done += item.nbytes

    def receive_into(self, place: Place, addresses: U64, lengths: I64, watch: Watch) -> None:
        self._pin(place)
        flying = deque[_Filled]()
        try:
            for number, (part, sizes, nbytes) in enumerate(cut(addresses, lengths, self._nbytes)):
                slot = number % self._slots
                if self._await(_FULL, slot, watch) != nbytes:
                    raise ProtocolError("the peer filled a slot with another number of bytes")
                flying.append(_Filled(place.scatter(self._slot(slot), part, sizes), slot, nbytes))
                # One slot may stay unread: the peer has at least one more to fill meanwhile.
                self._ring_emptied(flying, 1, watch)
                watch.check()
            self._ring_emptied(flying, 0, watch)
        finally:
            settle([item.landing for item in flying])

    def _ring_emptied(self, flying: deque[_Filled], keep: int, watch: Watch) -> None:
        """Tell the peer which slots are free again, in order."""
        while flying and (len(flying) > keep or flying[0].landing.is_done()):
            flying[0].landing.wait(watch.check)
            item = flying.popleft()
            watch.bytes_done += item.nbytes
            self._ring_bell(_FREE, item.slot, item.nbytes, watch)

    def _pin(self, place: Place) -> None:
        """Make the ring fit for a device, once: then its copy engines reach it at full speed."""
        if not place.is_host and self._unpin is None:
            nbytes = self._slots * self._nbytes
            try:
                self._unpin = place.pin(self._ring.address, nbytes)
            except DeviceError as error:
                # A fault of this path: one that brings pinned memory of its own may still work.
                raise RegistrationError(
                    f"the driver cannot pin a ring of {nbytes} bytes: {error.message}",
                    stage="map",
                    fix="raise the limit of locked memory (ulimit -l), or lower device_ring_bytes",
                ) from error

    def close(self) -> None:
        super().close()
        if self._unpin is not None:
            self._unpin()
        self._ring.close()

    def _slot(self, slot: int) -> int:
        return self._ring.address + slot * self._nbytes

    def _ring_bell(self, kind: int, slot: int, nbytes: int, watch: Watch) -> None:
        self._send_all(_BELL.pack(kind, slot, nbytes), watch)

    def _await(self, kind: int, slot: int, watch: Watch) -> int:
        """The size that the peer rang for ``slot``."""
        got = _BELL.unpack(self._receive_exactly(_BELL.size, watch))
        if got[:2] != (kind, slot):
            raise ProtocolError("the peer rang out of turn")
        return int(got[2])
