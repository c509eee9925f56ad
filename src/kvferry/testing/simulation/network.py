"""A virtual network of streams: what a TCP or Unix stream can do to its two ends, and no more.

A stream delays, cuts messages anywhere and joins them, fills up, breaks, and loses what was under
way when it breaks. Between two hosts either direction can be black: then bytes wait, as for a
retransmission, and both ends hear nothing. A host that loses its power says nothing; the other end
is half open until it is answered by a reset, or nobody is patient any more. A stream never loses,
doubles or swaps bytes in its middle; what does that is the router's HTTP (``router.py``) and
one-sided reading (``reads.py``).
"""

from __future__ import annotations

import errno
import random
import socket
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kvferry.errors import UnreachableError
from kvferry.loop import READ, WRITE
from kvferry.sockets import Address
from kvferry.testing.simulation.schedule import Schedule

BUFFER_BYTES = 4096
"""What a stream holds on its way; more waits at the sender. Small, so that it happens."""
FIN = b""
RESET = None


class Waker(Protocol):
    """The process at one end, as far as the network knows it."""

    host: str

    def wake(self, fd: int) -> None: ...


class Link:
    """The way from one host to another: how long it takes, and whether it is black."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.black = 0
        self.slow = 0
        self.disturbed_at = -1e9
        self.streams: dict[VirtualSocket, None] = {}

    def delay_s(self) -> float:
        if self.slow:
            return self.rng.uniform(0.05, 0.4)
        return 0.0002 + self.rng.random() ** 4 * 0.01


class VirtualSocket:
    """One end of a stream, with the part of a socket's interface that kvferry uses."""

    family = socket.AF_INET

    def __init__(self, network: Network, owner: Waker, fd: int, remote: str) -> None:
        self.owner = owner
        self.remote = remote
        self.other: VirtualSocket | None = None
        self.is_connected = False
        self.is_closed = False
        self.is_silent = False
        self.error = 0
        self._network = network
        self._fd = fd
        self._inbox = bytearray()
        self._ended = False
        self._broken = False
        self._sent_end = False
        self._way: deque[bytes | None] = deque()
        self._way_bytes = 0
        self._moving = False

    # -- what kvferry calls -------------------------------------------------------------------

    def fileno(self) -> int:
        return self._fd

    def setblocking(self, _flag: bool) -> None:
        """It never blocks."""

    def setsockopt(self, *_option: int) -> None:
        """Nothing to set."""

    def getsockopt(self, _level: int, _option: int) -> int:
        error, self.error = self.error, 0
        return error

    def getpeername(self) -> tuple[str, int]:
        if not self.is_connected:
            raise OSError(errno.ENOTCONN, "not connected")
        return self.remote, 1

    def send(self, data: bytes | memoryview, _flags: int = 0) -> int:
        if self.is_closed or self._broken:
            raise ConnectionResetError(errno.ECONNRESET, "reset by the peer")
        room = self._room()
        if not self.is_connected or room <= 0:
            raise BlockingIOError
        taken = bytes(data[:room])
        self._push(taken)
        return len(taken)

    def recv(self, nbytes: int) -> bytes:
        if self._inbox:
            # Sometimes less comes out than is there, so that messages are cut anywhere.
            rng = self._network.rng
            size = min(nbytes, len(self._inbox))
            size = rng.randint(1, size) if rng.random() < 0.1 else size
            data = bytes(self._inbox[:size])
            del self._inbox[:size]
            if self.other is not None and not self.other.is_closed:
                self.other.owner.wake(self.other.fileno())
            return data
        if self._broken:
            raise ConnectionResetError(errno.ECONNRESET, "reset by the peer")
        if self._ended:
            return b""
        raise BlockingIOError

    def shutdown(self, _how: int) -> None:
        if not self.is_connected:
            raise OSError(errno.ENOTCONN, "not connected")
        self._end(FIN)

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        # As a kernel does it: bytes that nobody read make it a reset.
        self._end(RESET if self._inbox else FIN)
        self._network.forget(self)

    def ready(self) -> int:
        """READ and WRITE, as a selector would find it."""
        readable = self._inbox or self._ended or self._broken
        writable = self.error or self._broken or (self.is_connected and self._room() > 0)
        return (READ if readable else 0) | (WRITE if writable else 0)

    # -- what the network does ------------------------------------------------------------------

    def vanish(self) -> None:
        """Its host lost power: nothing is said any more, and nothing is heard."""
        self.is_closed = self.is_silent = True
        self._way.clear()
        self._way_bytes = 0
        self._network.forget(self)

    def reset(self) -> None:
        """The stream broke, and this end sees it now. What is on its way is lost."""
        if self.is_closed:
            return
        self._broken = True
        self._way.clear()
        self._way_bytes = 0
        self.owner.wake(self._fd)

    def move(self) -> None:
        """Send the next piece on its way, unless that is black."""
        link = self._network.link(self.owner.host, self.remote)
        if self._moving or link.black or not self._way:
            return
        self._moving = True
        self._network.schedule.after(link.delay_s(), self._arrive)

    def _arrive(self) -> None:
        self._moving = False
        link = self._network.link(self.owner.host, self.remote)
        if link.black or not self._way:
            return
        # All that waits arrives together, as it would in one segment.
        while self._way:
            piece = self._way.popleft()
            self._way_bytes -= len(piece or b"")
            assert self.other is not None
            self.other.take(piece)

    def take(self, piece: bytes | None) -> None:
        """Something arrived from the other end."""
        if self.is_silent and not self._network.is_up(self.owner.host):
            return
        if self.is_closed or self._broken:
            # Nobody is here any more for this stream: the kernel says so to who still sends.
            if piece and self.other is not None:
                self.other.reset()
            return
        if piece is RESET:
            self.reset()
            return
        if piece == FIN:
            self._ended = True
        else:
            self._inbox += piece
        self.owner.wake(self._fd)

    def _end(self, how: bytes | None) -> None:
        if self.is_connected and not self._broken and not self._sent_end:
            self._sent_end = True
            self._push(how)

    def _push(self, piece: bytes | None) -> None:
        self._way.append(piece)
        self._way_bytes += len(piece or b"")
        self.move()

    def _room(self) -> int:
        unread = len(self.other._inbox) if self.other is not None else 0
        return BUFFER_BYTES - self._way_bytes - unread


class VirtualListener:
    """A listening socket; the kernel takes connections for it also while its process is frozen."""

    def __init__(self, fd: int, owner: Waker) -> None:
        self.owner = owner
        self.is_closed = False
        self.backlog: deque[VirtualSocket] = deque()
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def accept(self) -> tuple[VirtualSocket, tuple[str, int]]:
        if not self.backlog:
            raise BlockingIOError
        sock = self.backlog.popleft()
        return sock, (sock.remote, 1)

    def ready(self) -> int:
        return READ if self.backlog else 0

    def shutdown(self, _how: int) -> None:
        """Whoever was not accepted yet is sent away by :meth:`close`."""

    def close(self) -> None:
        self.is_closed = True
        while self.backlog:
            self.backlog.popleft().close()


class Network:
    """All hosts, and the streams between them. An address is a host's number and a port."""

    def __init__(self, schedule: Schedule, seed: str) -> None:
        self.schedule = schedule
        self.rng = random.Random(f"{seed}/network")
        self.listeners: dict[str, VirtualListener] = {}
        self.down: set[str] = set()
        self.open: dict[VirtualSocket, None] = {}
        self.files: dict[int, VirtualSocket | VirtualListener] = {}
        self._seed = seed
        self._links: dict[tuple[str, str], Link] = {}
        self._fd = 100

    def link(self, source: str, target: str) -> Link:
        """The way from ``source`` to ``target``; the other way is another link."""
        found = self._links.get((source, target))
        if found is None:
            rng = random.Random(f"{self._seed}/{source}>{target}")
            found = self._links[source, target] = Link(rng)
        return found

    def is_up(self, host: str) -> bool:
        return host not in self.down

    def _socket(self, owner: Waker, remote: str) -> VirtualSocket:
        self._fd += 1
        sock = VirtualSocket(self, owner, self._fd, remote)
        self.files[self._fd] = sock
        self.open[sock] = None
        return sock

    def listen(self, owner: Waker) -> VirtualListener:
        """Listen at the host's one port, which a process before may have had."""
        self._fd += 1
        listener = self.files[self._fd] = VirtualListener(self._fd, owner)
        self.listeners[owner.host] = listener
        return listener

    def connect(self, owner: Waker, address: Address) -> VirtualSocket:
        """Begin to connect; the socket becomes writable when that has ended, well or not."""
        if address.scheme != "tcp":
            raise UnreachableError(f"{address} is not of this network")
        sock = self._socket(owner, address.host)
        self._try(sock)
        return sock

    def _try(self, sock: VirtualSocket) -> None:
        there = self.link(sock.owner.host, sock.remote)
        back = self.link(sock.remote, sock.owner.host)
        self.schedule.after(there.delay_s() + back.delay_s(), lambda: self._established(sock))

    def _established(self, sock: VirtualSocket) -> None:
        if sock.is_closed:
            return
        there = self.link(sock.owner.host, sock.remote)
        back = self.link(sock.remote, sock.owner.host)
        if there.black or back.black or not self.is_up(sock.remote):
            # The first packet is sent again, as kernels do.
            self.schedule.after(0.25, lambda: self._try(sock) if not sock.is_closed else None)
            return
        listener = self.listeners.get(sock.remote)
        if listener is None or listener.is_closed:
            sock.error = errno.ECONNREFUSED
            sock.owner.wake(sock.fileno())
            return
        far = self._socket(listener.owner, sock.owner.host)
        far.other, sock.other = sock, far
        far.is_connected = sock.is_connected = True
        for end in (sock, far):
            self.link(end.owner.host, end.remote).streams[end] = None
        listener.backlog.append(far)
        listener.owner.wake(listener.fileno())
        sock.owner.wake(sock.fileno())

    def forget(self, sock: VirtualSocket) -> None:
        """An end was closed. What it sent last still arrives."""
        self.open.pop(sock, None)
        self.files.pop(sock.fileno(), None)
        self.link(sock.owner.host, sock.remote).streams.pop(sock, None)

    def sockets_of(self, owner: Waker) -> list[VirtualSocket]:
        return [sock for sock in self.open if sock.owner is owner]

    # -- faults ---------------------------------------------------------------------------------

    def both(self, one: str, two: str) -> tuple[Link, Link]:
        return self.link(one, two), self.link(two, one)

    def cut(self, one: str, two: str, *, half: bool) -> int:
        """Break every stream between two hosts; with ``half`` only ``one`` sees it now."""
        ends = [*self.link(one, two).streams]
        for end in ends:
            far = end.other
            end.reset()
            if far is not None and not half:
                far.reset()
        return len(ends)

    def blacken(self, source: str, target: str) -> Callable[[], None]:
        """Let nothing pass from ``source`` to ``target``, until what is returned is called."""
        link = self.link(source, target)
        link.black += 1

        def heal() -> None:
            link.black -= 1
            link.disturbed_at = self.schedule.now
            for sock in [*link.streams]:
                sock.move()

        return heal
