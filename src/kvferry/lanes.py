"""The caller's half of opening a lane: connect, say hello, hear one. Blocking, without any lock."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable

from kvferry import sockets
from kvferry.errors import PeerLostError, ProtocolError, UnreachableError
from kvferry.protocol import framing, messages
from kvferry.protocol.messages import Hello, Reject
from kvferry.sockets import Address

SLICE_S = 0.1
"""Blocking calls on a lane return at least this often, to look at deadlines and aborts."""


def connect(
    where: Address,
    greeting: Hello,
    fd: int,
    now: Callable[[], float],
    deadline: float,
    check: Callable[[], None],
) -> socket.socket:
    """A connected socket whose hellos are exchanged; ``fd`` goes with ours unless it is -1.

    ``check`` is called every SLICE_S and gives up by raising. Raises UnreachableError,
    PeerLostError, ProtocolError.
    """
    sock = sockets.start_connect(where, max(deadline - now(), 0.1))
    try:
        set_timeouts(sock)
        while True:
            number = sock.connect_ex(where.host if where.scheme == "unix" else _inet(where))
            # The connect began without blocking: EISCONN says that it is done.
            if number in (0, errno.EISCONN):
                break
            if number not in (errno.EAGAIN, errno.EINPROGRESS, errno.EALREADY):
                raise sockets.unreachable(where, OSError(number, os.strerror(number)))
            check()
            if now() >= deadline:
                raise UnreachableError(
                    f"no connection to {where} in time",
                    stage="connect",
                    fix="packets are dropped, or the peer's process is frozen",
                )
        _greet(sock, greeting, fd, now, deadline, check)
    except OSError as error:
        sock.close()
        raise sockets.unreachable(where, error) from error
    except BaseException:
        sock.close()
        raise
    return sock


def _greet(
    sock: socket.socket,
    greeting: Hello,
    fd: int,
    now: Callable[[], float],
    deadline: float,
    check: Callable[[], None],
) -> None:
    """Say hello and hear one. A peer that is gone by now was there a moment ago: it is lost."""
    frame = framing.encode(messages.pack(greeting), descriptors=1 if fd >= 0 else 0)
    try:
        if sockets.send(sock, frame, (fd,) if fd >= 0 else ()) != len(frame):
            raise PeerLostError("the peer did not take the hello of a lane", stage="connect")
        _await_hello(sock, check, now, deadline)
    except ConnectionError as error:
        raise PeerLostError(
            f"a new lane broke: {error.strerror}", stage="connect", fix="see the peer's log"
        ) from error


def set_timeouts(sock: socket.socket) -> None:
    """Blocking, but each call returns with EAGAIN after SLICE_S without progress."""
    sock.setblocking(True)
    packed = struct.pack("ll", int(SLICE_S), int(SLICE_S % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)


def _await_hello(
    sock: socket.socket, check: Callable[[], None], now: Callable[[], float], deadline: float
) -> None:
    """Read exactly the callee's hello on a new lane; what follows belongs to the transport."""
    data = bytearray()
    wanted = framing.HEADER.size
    header_done = False
    while len(data) < wanted:
        try:
            got = sock.recv(wanted - len(data))
        except BlockingIOError:
            check()
            if now() >= deadline:
                raise UnreachableError(
                    "no hello on a new lane in time",
                    stage="connect",
                    fix="the peer's process is frozen or overloaded",
                ) from None
            continue
        if not got:
            raise PeerLostError("the peer closed a new lane", stage="connect")
        data += got
        if len(data) == framing.HEADER.size and not header_done:
            header_done = True
            wanted += framing.check_header(data, framing.HELLO_BYTES_MAX)[0]
    message = messages.unpack(bytes(data[framing.HEADER.size :]))
    if isinstance(message, Reject):
        raise UnreachableError(
            f"the peer refused a lane: {message.message}",
            stage="connect",
            fix="look at the peer's log",
        )
    if not isinstance(message, Hello):
        raise ProtocolError("expected a hello on a new lane")


def _inet(address: Address) -> tuple[str, int]:
    return (address.host, address.port)
