"""TLS for TCP connections: mutual, version 1.3, by the standard library.

:class:`Tunnel` is sans-IO, for the control thread, which must never wait. :class:`TlsSocket` is a
blocking socket around one, for lanes: it is used like any other, and never sends a plain byte.
"""

from __future__ import annotations

import socket
import ssl
from typing import Any

from kvferry.errors import AuthError, ConfigError, KVFerryError

CHUNK_BYTES = 256 << 10
"""Plain bytes that are sealed, or opened, at once."""
_FIX = "set tls_cert, tls_key and tls_ca on both sides, with certificates of the same authority"


class Contexts:
    """The two roles of one engine: its certificate, and whose certificates it believes.

    Raises ConfigError that names the setting.
    """

    def __init__(self, cert: str, key: str, ca: str) -> None:
        self._server = _context(ssl.PROTOCOL_TLS_SERVER, cert, key, ca)
        # A ticket would lie unread on an idle lane, which then looks as if the peer had spoken.
        self._server.num_tickets = 0
        self._client = _context(ssl.PROTOCOL_TLS_CLIENT, cert, key, ca)

    def tunnel(self, *, caller: bool) -> Tunnel:
        return Tunnel(self._client if caller else self._server, caller=caller)


def _context(protocol: int, cert: str, key: str, ca: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Peers are known by numeric addresses that change; who has a certificate of this authority
    # belongs to the cluster, whatever its name is.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls_ca={ca!r}: {_reason(error)}") from error
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except (OSError, ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"tls_cert={cert!r}, tls_key={key!r}: {_reason(error)}",
            fix="both must be readable PEM files that belong together; the key without a password",
        ) from error
    return context


def _no_password() -> str:
    raise ValueError("the key has a password")


def _reason(error: Exception) -> str:
    """What went wrong in the words of the library, without its file and line."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    return getattr(error, "strerror", None) or str(error)


class Tunnel:
    """One TLS connection: plain bytes in, sealed bytes out, and back. Never blocks."""

    def __init__(self, context: ssl.SSLContext, *, caller: bool) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=not caller)
        self._is_ready = self._is_broken = False
        self._waiting = bytearray()

    def __repr__(self) -> str:
        return f"<Tunnel {self._tls.version() if self._is_ready else 'shaking hands'}>"

    def seal(self, data: Any) -> bytes:
        """Sealed bytes to send now. Plain ones wait until both sides have proved who they are.

        After an AuthError, what the library wants to tell the peer of it, and nothing else.
        """
        if self._is_broken:
            return self._out.read()
        if not self._is_ready:
            self._waiting += data
            self._shake_hands()
        elif data:
            self._tls.write(data)
        return self._out.read()

    def open(self, data: bytes) -> bytes:
        """The plain bytes in what came. :meth:`seal` of nothing gives what must be answered.

        Raises AuthError for what is not from a trusted peer, or was changed on its way.
        """
        self._in.write(data)
        self._shake_hands()
        plain = bytearray()
        while self._is_ready:
            piece = self._read(CHUNK_BYTES)
            if not piece:
                break
            plain += piece
        return bytes(plain)

    def feed(self, data: bytes | memoryview) -> None:
        """Take bytes that came, for :meth:`read_into`."""
        self._in.write(data)
        self._shake_hands()

    def read_into(self, view: memoryview) -> int:
        """Fill the front of ``view`` with plain bytes that are there; returns how many."""
        if not self._is_ready:
            return 0
        try:
            got: Any = self._tls.read(len(view), view)  # With a buffer it returns a number.
            return int(got)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            return 0
        except ssl.SSLError as error:
            raise self._broken(error) from error

    def is_empty(self) -> bool:
        """Whether nothing that came is left to read."""
        return not self._in.pending and not self._tls.pending()

    def _read(self, nbytes: int) -> bytes:
        try:
            return self._tls.read(nbytes)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            return b""
        except ssl.SSLError as error:
            raise self._broken(error) from error

    def _shake_hands(self) -> None:
        if self._is_ready:
            return
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLError as error:
            raise self._broken(error) from error
        self._is_ready = True
        if self._waiting:
            self._tls.write(self._waiting)
            self._waiting = bytearray()

    def _broken(self, error: ssl.SSLError) -> KVFerryError:
        self._is_broken = True
        return refusal(f"TLS: {_reason(error)}")


def refusal(what: str) -> AuthError:
    """The error for a side without TLS, or whose certificate is not good here."""
    return AuthError(what, stage="connect", fix=_FIX)


class TlsSocket(socket.socket):
    """A connected TCP socket whose calls go through a tunnel; takes ``sock`` over.

    Blocks as the socket did, with its timeouts; a call that raised BlockingIOError must be made
    again with the same bytes. One thread sends and receives, another may shut it down.
    """

    def __init__(self, sock: socket.socket, tunnel: Tunnel) -> None:
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self._tunnel = tunnel
        # Kept, because a new one for each call would be mapped anew.
        self._raw = memoryview(bytearray(CHUNK_BYTES))
        self._sealed = memoryview(b"")
        self._taken = 0

    def send(self, data: Any, flags: int = 0) -> int:
        if not self._taken:
            self._flush()
            view = memoryview(data).cast("B")[:CHUNK_BYTES]
            self._sealed = memoryview(self._tunnel.seal(view))
            self._taken = len(view)
        self._flush()
        taken, self._taken = self._taken, 0
        return taken

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        view = memoryview(buffer).cast("B")
        if nbytes:
            view = view[:nbytes]
        while True:
            got = self._tunnel.read_into(view)
            if got or not len(view):
                return got
            self._flush()
            came = super().recv_into(self._raw)
            if not came:
                return 0
            try:
                self._tunnel.feed(self._raw[:came])
            finally:
                answer = self._tunnel.seal(b"")
                if answer:
                    self._sealed = memoryview(answer)
                    self._flush()

    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        if flags:
            # A look at whether anything came: sealed bytes will do.
            if not self._tunnel.is_empty():
                return b"\0"
            return super().recv(bufsize, flags)
        data = bytearray(bufsize)
        return bytes(data[: self.recv_into(data)])

    def _flush(self) -> None:
        while self._sealed:
            sent = super().send(self._sealed, socket.MSG_NOSIGNAL)
            self._sealed = self._sealed[sent:]
