"""What streamed paths are made of: a byte channel over one socket, and the watch over a move."""

from __future__ import annotations

import select
import socket
from abc import ABC, abstractmethod
from collections import deque
from typing import Protocol

import numpy as np

from kvferry.errors import AbortedError, DeadlineError, KVFerryError, PeerLostError
from kvferry.lanes import set_timeouts
from kvferry.memory.places import Landing, Place, settle
from kvferry.protocol import framing, messages
from kvferry.regions import I64, U64
from kvferry.sockets import hang_up
from kvferry.transports.base import Services

STAGE_BYTES = 4 << 20
"""Device memory passes through pinned memory in pieces of this size, two at a time."""
CHECK_BYTES = 16 << 20
"""Loops that make progress look at the clock after so many bytes."""


class Watched(Protocol):
    """What a watch looks after: ``stop`` says why the move should end."""

    @property
    def stop(self) -> KVFerryError | None: ...

    def moved(self, nbytes: int = 0) -> None:
        """``nbytes`` more have moved. A path on which this is not heard for long has stalled."""


class Watch:
    """What a blocking move looks at between system calls: may it go on?

    bytes_done: counted up by whoever moves bytes, which is also the sign that the path is alive.
    """

    def __init__(self, services: Services, deadline: float, op: Watched | None = None) -> None:
        self._services = services
        self._op = op
        self.deadline = deadline
        self.closing = False
        self._bytes_done = 0
        self._checked = 0

    @property
    def bytes_done(self) -> int:
        return self._bytes_done

    @bytes_done.setter
    def bytes_done(self, nbytes: int) -> None:
        more, self._bytes_done = nbytes - self._bytes_done, nbytes
        if self._op is not None:
            self._op.moved(more)

    def check(self) -> None:
        """Raise what should end the move: a stop, the closing of the lane, the deadline."""
        stop = self._op.stop if self._op is not None else None
        if stop is not None:
            raise stop
        if self.closing:
            raise AbortedError("the lane is closing")
        if self._services.clock.now() >= self.deadline:
            raise DeadlineError(
                "the deadline passed",
                fix="raise the deadline if the path is only slow; else look at the peer's log",
            )

    def check_sometimes(self, done: int) -> None:
        """A check for loops that make progress: every CHECK_BYTES bytes."""
        if done - self._checked >= CHECK_BYTES:
            self._checked = done
            self.check()


class Channel(ABC):
    """A byte channel over one connected, blocking socket with timeouts of SLICE_S."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        set_timeouts(sock)

    def send_message(self, message: messages.Message, watch: Watch) -> None:
        """Send one message. Blocks; the watch bounds it."""
        self._send_all(framing.encode(messages.pack(message), limit=framing.LANE_BYTES_MAX), watch)

    def _send_all(self, data: bytes, watch: Watch) -> None:
        view = memoryview(data)
        while view:
            try:
                sent = self.sock.send(view, socket.MSG_NOSIGNAL)
                view = view[sent:]
            except BlockingIOError:
                watch.check()

    def receive_message(self, watch: Watch) -> object:
        """The next message. Blocks; the watch bounds it."""
        header = self._receive_exactly(framing.HEADER.size, watch)
        nbytes, _ = framing.check_header(header, framing.LANE_BYTES_MAX)
        return messages.unpack(bytes(self._receive_exactly(nbytes, watch)))

    def await_message(self) -> None:
        """Sleep until bytes arrive, the stream ends or :meth:`interrupt` is called.

        No timeout wakes an idle lane: hundreds of them would keep a core busy for nothing.
        """
        # Otherwise something came already, perhaps into a buffer of the socket's own.
        if self.is_fresh():
            poller = select.poll()
            poller.register(self.sock, select.POLLIN)
            poller.poll()

    def is_fresh(self) -> bool:
        """Whether an idle lane is still usable: nothing unexpected has arrived, no end was seen."""
        try:
            self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return False
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _receive_exactly(self, nbytes: int, watch: Watch) -> bytearray:
        data = bytearray(nbytes)
        view = memoryview(data)
        while view:
            try:
                got = self.sock.recv_into(view)
            except BlockingIOError:
                watch.check()
                continue
            if got == 0:
                raise PeerLostError("the lane was closed by the peer")
            view = view[got:]
        return data

    def send_from(self, place: Place, addresses: U64, lengths: I64, watch: Watch) -> None:
        """Send the bytes at these addresses of a place, in order. Blocks."""
        if place.is_host:
            self.send_spans(addresses, lengths, watch)
            return
        buffers = [place.pinned(STAGE_BYTES) for _ in range(2)]
        flying: deque[tuple[Landing, U64, I64]] = deque()
        try:
            for number, (part, sizes, nbytes) in enumerate(cut(addresses, lengths, STAGE_BYTES)):
                at = np.array([buffers[number % 2].ctypes.data], np.uint64)
                landing = place.gather(int(at[0]), part, sizes)
                flying.append((landing, at, np.array([nbytes], np.int64)))
                if len(flying) == 2:
                    self._send_landed(flying, watch)
            while flying:
                self._send_landed(flying, watch)
        finally:
            settle([landing for landing, _, _ in flying])

    def _send_landed(self, flying: deque[tuple[Landing, U64, I64]], watch: Watch) -> None:
        landing, at, nbytes = flying[0]
        landing.wait(watch.check)
        flying.popleft()
        self.send_spans(at, nbytes, watch)

    def receive_into(self, place: Place, addresses: U64, lengths: I64, watch: Watch) -> None:
        """Fill these addresses of a place, in order; they are filled on return. Blocks."""
        if place.is_host:
            self.receive_spans(addresses, lengths, watch)
            return
        buffers = [place.pinned(STAGE_BYTES) for _ in range(2)]
        flying: deque[Landing] = deque()
        try:
            for number, (part, sizes, nbytes) in enumerate(cut(addresses, lengths, STAGE_BYTES)):
                if len(flying) == 2:
                    flying[0].wait(watch.check)
                    flying.popleft()
                at = np.array([buffers[number % 2].ctypes.data], np.uint64)
                self.receive_spans(at, np.array([nbytes], np.int64), watch)
                flying.append(place.scatter(int(at[0]), part, sizes))
            for landing in flying:
                landing.wait(watch.check)
        finally:
            settle(list(flying))

    @abstractmethod
    def send_spans(self, addresses: U64, lengths: I64, watch: Watch) -> None:
        """Send the bytes at these addresses, in order. Blocks; counts ``watch.bytes_done``."""

    @abstractmethod
    def receive_spans(self, addresses: U64, lengths: I64, watch: Watch) -> None:
        """Fill these addresses, in order. Blocks; counts ``watch.bytes_done``."""

    def interrupt(self) -> None:
        """Make whoever blocks on the channel return soon. Any thread."""
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> None:
        """Give the socket and whatever belongs to the channel back."""
        hang_up(self.sock)


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
