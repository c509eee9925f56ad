"""The caller's half of opening a lane: connect, say hello, hear one. Blocking, without any lock."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable

from kvferry import sockets
from kvferry.errors import AuthError, PeerLostError, UnreachableError
from kvferry.protocol import framing, messages
from kvferry.protocol.auth import CallerGreeting
from kvferry.protocol.messages import Reject
from kvferry.sockets import Address
from kvferry.tls import TlsSocket, Tunnel

SLICE_S = 0.1
"""Blocking calls on a lane return at least this often, to look at deadlines and aborts."""


def connect(
    where: Address,
    greeting: CallerGreeting,
    tunnel: Tunnel | None,
    fd: int,
    now: Callable[[], float],
    deadline: float,
    check: Callable[[], None],
) -> socket.socket:
    """A connected socket whose hellos are exchanged; ``fd`` goes with ours unless it is -1.

    With a ``tunnel`` the socket is a TlsSocket. ``check`` is called every SLICE_S and gives up by
    raising. Raises UnreachableError, PeerLostError, ProtocolError, AuthError.
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
        if tunnel is not None:
            sock = TlsSocket(sock, tunnel)
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
    greeting: CallerGreeting,
    fd: int,
    now: Callable[[], float],
    deadline: float,
    check: Callable[[], None],
) -> None:
    """Say hello and hear one. A peer that is gone by now was there a moment ago: it is lost."""
    try:
        _say(sock, greeting.payload, fd)
        while greeting.hello is None:
            payload = _hear(sock, check, now, deadline)
            message = messages.unpack(payload)
            if isinstance(message, Reject) and message.code != AuthError.code:
                raise UnreachableError(
                    f"the peer refused a lane: {message.message}",
                    stage="connect",
                    fix="look at the peer's log",
                )
            answer = greeting.take(message, payload)
            if answer is not None:
                _say(sock, messages.pack(answer), -1)
    except ConnectionError as error:
        raise PeerLostError(
            f"a new lane broke: {error.strerror}", stage="connect", fix="see the peer's log"
        ) from error


def _say(sock: socket.socket, payload: bytes, fd: int) -> None:
    """Send one short frame, for which a new connection has room."""
    frame = framing.encode(payload, descriptors=1 if fd >= 0 else 0)
    if sockets.send(sock, frame, (fd,) if fd >= 0 else ()) != len(frame):
        raise PeerLostError("the peer did not take the hello of a lane", stage="connect")


def set_timeouts(sock: socket.socket) -> None:
    """Blocking, but each call returns with EAGAIN after SLICE_S without progress."""
    sock.setblocking(True)
    packed = struct.pack("ll", int(SLICE_S), int(SLICE_S % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, packed)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, packed)


def _hear(
    sock: socket.socket, check: Callable[[], None], now: Callable[[], float], deadline: float
) -> bytes:
    """Exactly the payload of the next message; what follows belongs to the transport."""
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
    return bytes(data[framing.HEADER.size :])


def _inet(address: Address) -> tuple[str, int]:
    return (address.host, address.port)
