"""tcp: scattered spans straight from and into memory by sendmsg and recvmsg on numpy iovec arrays.

No span is copied in user space, no list of Python objects is built: one array of (address, length)
pairs serves the whole transfer, and each system call takes a slice of it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from collections.abc import Callable

import numpy as np

from kvferry.errors import PeerLostError, ProtocolError, RegistrationError
from kvferry.protocol.messages import Hello
from kvferry.regions import I64, U64, Region
from kvferry.tls import TlsSocket
from kvferry.transports.base import Capabilities, Export, PeerView, RemoteRegion, Services
from kvferry.transports.channel import Channel, Watch
from kvferry.transports.sealed import TlsChannel
from kvferry.transports.stream import StreamedTransport

IOVECS_MAX = 1024
"""IOV_MAX of Linux."""
CALL_BYTES = 4 << 20
"""Bytes per system call. Socket buffers are left to the kernel: sizes set by hand were slower at
every value that was tried, on loopback too.
"""
WAKE_BYTES = 512 << 10
"""The receiver of a large transfer is woken for so many bytes at once (SO_RCVLOWAT), not for each
segment: on loopback that is up to twice as fast.
"""


class _MsgHdr(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_void_p),
        ("namelen", ctypes.c_uint32),
        ("iov", ctypes.c_void_p),
        ("iovlen", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("controllen", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    ]


_libc = ctypes.CDLL(None, use_errno=True)
for _name in ("sendmsg", "recvmsg"):
    _function = getattr(_libc, _name)
    _function.argtypes = [ctypes.c_int, ctypes.POINTER(_MsgHdr), ctypes.c_int]
    _function.restype = ctypes.c_ssize_t


class TcpTransport(StreamedTransport):
    """Streams over TCP lanes: the path between machines without RDMA."""

    name = "tcp"

    def capabilities(self) -> Capabilities:
        if self._services is not None and self._services.config.tls_cert:
            note = "encrypted by TLS"
            return Capabilities(
                family="streamed",
                kinds=frozenset({"host", "cuda"}),
                latency_s=3e-4,
                bytes_per_s=4e8,
                note=note,
            )
        return Capabilities(
            family="streamed",
            kinds=frozenset({"host", "cuda"}),
            latency_s=2e-4,
            bytes_per_s=3e9,
            span_s=1e-7,
        )

    def export(self, region: Region, fd: int) -> Export | None:
        return Export()

    def blocked(self, local: Region, remote: RemoteRegion, peer: PeerView) -> str:
        return "" if peer.tcp_address else "the peer does not listen on TCP"

    def dial(
        self,
        services: Services,
        peer: PeerView,
        deadline: float,
        check: Callable[[], None],
        *,
        for_device: bool,
    ) -> Channel:
        hello = {"purpose": self.name}
        sock = services.open_lane(peer, peer.tcp_address, deadline, hello, check=check)
        return _channel(sock)

    def serve(self, sock: socket.socket, fd: int, hello: Hello) -> Channel:
        if fd >= 0:
            os.close(fd)
        if sock.family == socket.AF_UNIX:
            raise ProtocolError("a tcp lane over a Unix socket")
        return _channel(sock)


def _channel(sock: socket.socket) -> Channel:
    return TlsChannel(sock) if isinstance(sock, TlsSocket) else TcpChannel(sock)


class TcpChannel(Channel):
    """One TCP connection."""

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._wakes_for = 1

    def send_spans(self, addresses: U64, lengths: I64, watch: Watch) -> None:
        self._move(_libc.sendmsg, socket.MSG_NOSIGNAL, addresses, lengths, watch)

    def receive_spans(self, addresses: U64, lengths: I64, watch: Watch) -> None:
        try:
            self._move(_libc.recvmsg, socket.MSG_WAITALL, addresses, lengths, watch)
        finally:
            self._wake_for(1)

    def _wake_for(self, nbytes: int) -> None:
        """Let receiving calls sleep until so many bytes are there, or the stream ends."""
        if nbytes != self._wakes_for:
            self._wakes_for = nbytes
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def _move(
        self, call: ctypes._NamedFuncPointer, flags: int, addresses: U64, lengths: I64, watch: Watch
    ) -> None:
        iovecs = make_iovecs(addresses, lengths)
        ends = np.cumsum(iovecs[:, 1].view("i8"))
        total = int(ends[-1]) if ends.size else 0
        header = _MsgHdr()
        reference = ctypes.byref(header)
        base, fd, first, done = iovecs.ctypes.data, self.sock.fileno(), 0, 0
        while done < total:
            last = int(np.searchsorted(ends, done + CALL_BYTES, side="right"))
            last = min(max(last, first + 1), first + IOVECS_MAX)
            header.iov, header.iovlen = base + 16 * first, last - first
            if call is _libc.recvmsg:
                # Behind the last bytes nothing follows that would make up the number.
                self._wake_for(WAKE_BYTES if total - done > 2 * CALL_BYTES else 1)
            moved = call(fd, reference, flags)
            if moved <= 0:
                self._explain(moved, watch)
                continue
            done += moved
            watch.bytes_done += moved
            if done == ends[last - 1]:
                first = last
            else:
                # A call that stopped short waited for a whole slice: a slow drip, or the end.
                watch.check()
                first = int(np.searchsorted(ends, done, side="right"))
                left = int(ends[first]) - done
                iovecs[first, 0] += iovecs[first, 1] - np.uint64(left)
                iovecs[first, 1] = left
            # Bytes that keep coming must not hide a deadline or an abort.
            watch.check_sometimes(done)

    def _explain(self, moved: int, watch: Watch) -> None:
        """Return to try again, or raise why the stream is over."""
        if moved == 0:
            raise PeerLostError("the lane was closed by the peer in the middle of a transfer")
        number = ctypes.get_errno()
        if number in (errno.EAGAIN, errno.EINTR):
            watch.check()
            return
        if number == errno.EFAULT:
            raise RegistrationError(
                "the kernel cannot reach the registered memory (bad address)",
                fix="the memory was freed, or it is device memory registered as host memory",
            )
        raise OSError(number, os.strerror(number))


def make_iovecs(addresses: U64, lengths: I64) -> U64:
    """struct iovec[n] as uint64[n, 2]; spans over CALL_BYTES are cut."""
    if lengths.size and int(lengths.max()) > CALL_BYTES:
        count = -(-lengths // CALL_BYTES)
        which = np.repeat(np.arange(lengths.size), count)
        step = np.arange(which.size) - np.repeat(np.cumsum(count) - count, count)
        addresses = addresses[which] + step.astype(np.uint64) * np.uint64(CALL_BYTES)
        lengths = np.minimum(lengths[which] - step * CALL_BYTES, CALL_BYTES)
    iovecs = np.empty((lengths.size, 2), np.uint64)
    iovecs[:, 0] = addresses
    iovecs[:, 1] = lengths
    return iovecs
