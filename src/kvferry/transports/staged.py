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
from collections.abc import Callable
from typing import Protocol

import numpy as np

from kvferry.errors import ProtocolError, RegistrationError
from kvferry.memory.copy import gather, scatter
from kvferry.memory.host import allocate_shared, map_shared
from kvferry.protocol.messages import Hello
from kvferry.regions import I64, U64, Region
from kvferry.transports.base import Capabilities, Export, PeerView, Services
from kvferry.transports.channel import Channel, Watch
from kvferry.transports.stream import StreamedTransport

_BELL = struct.Struct("<IIQ")
_FULL, _FREE = 1, 2
RING_BYTES_MAX = 1 << 30


class StagedTransport(StreamedTransport):
    """Streams through a ring in shared memory, between any two engines of one host."""

    name = "staged"

    def capabilities(self) -> Capabilities:
        return Capabilities(
            family="streamed",
            same_host=True,
            needs_unix=True,
            latency_s=1.5e-4,
            bytes_per_s=5e9,
            span_s=1e-7,
        )

    def export(self, region: Region, fd: int) -> Export | None:
        return Export() if region.kind == "host" else None

    def dial(
        self, services: Services, peer: PeerView, deadline: float, check: Callable[[], None]
    ) -> Channel:
        slots, nbytes = services.config.ring_slots, services.config.ring_bytes
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

    def send_spans(self, addresses: U64, lengths: I64, watch: Watch) -> None:
        busy = 0
        for number, (part, sizes, nbytes) in enumerate(cut(addresses, lengths, self._nbytes)):
            watch.check()
            slot = number % self._slots
            if busy == self._slots:
                self._await(_FREE, slot, watch)
                busy -= 1
            gather(self._slot(slot), part, sizes)
            self._ring_bell(_FULL, slot, nbytes, watch)
            watch.bytes_done += nbytes
            busy += 1
        last = -(-int(lengths.sum()) // self._nbytes)
        for number in range(last - busy, last):
            self._await(_FREE, number % self._slots, watch)

    def receive_spans(self, addresses: U64, lengths: I64, watch: Watch) -> None:
        for number, (part, sizes, nbytes) in enumerate(cut(addresses, lengths, self._nbytes)):
            slot = number % self._slots
            if self._await(_FULL, slot, watch) != nbytes:
                raise ProtocolError("the peer filled a slot with another number of bytes")
            scatter(self._slot(slot), part, sizes)
            watch.bytes_done += nbytes
            self._ring_bell(_FREE, slot, nbytes, watch)
            watch.check()

    def close(self) -> None:
        super().close()
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


def cut(addresses: U64, lengths: I64, nbytes: int) -> list[tuple[U64, I64, int]]:
    """The spans in runs of exactly ``nbytes`` bytes, the last one shorter."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if ends.size else 0
    out = []
    for begin in range(0, total, nbytes):
        end = min(begin + nbytes, total)
        i = int(np.searchsorted(ends, begin, side="right"))
        j = int(np.searchsorted(ends, end, side="left")) + 1
        part, sizes = addresses[i:j].copy(), lengths[i:j].copy()
        skip = begin - int(ends[i] - lengths[i])
        part[0] += np.uint64(skip)
        sizes[0] -= skip
        sizes[-1] -= int(ends[j - 1]) - end
        out.append((part, sizes, end - begin))
    return out
