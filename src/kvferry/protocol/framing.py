"""Frames: how messages lie in a byte stream.

A frame is a 12-byte header and a msgpack payload::

    4s magic "KVFY" | u8 version | u8 descriptors | u16 zero | u32 payload bytes   (little endian)

``descriptors`` counts the file descriptors that travel with the frame's first byte (SCM_RIGHTS;
Unix sockets only). The header is checked before any payload is kept, so that a stranger's bytes
cost nothing, and a peer of another version is told apart from noise.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from kvferry.errors import AuthError, ProtocolError, VersionError

VERSION = 1
MAGIC = b"KVFY"
HEADER = struct.Struct("<4sBBHI")

TLS_BEGINNINGS = (b"\x15\x03", b"\x16\x03")
"""How alerts and handshakes of TLS begin."""

HELLO_BYTES_MAX = 64 << 10
"""Limit until the hello is accepted: nobody unknown can make us keep more."""
CONTROL_BYTES_MAX = 4 << 20
"""Limit for control messages: a block table of half a million blocks."""
LANE_BYTES_MAX = 20 << 20
"""Limit for the head of one streamed transfer: SPANS_MAX offsets and lengths, and change."""
DESCRIPTORS_MAX = 16
"""Most file descriptors with one frame."""


class Frame(NamedTuple):
    """One message as it lay in the stream: its payload and how many descriptors came with it."""

    payload: bytes
    descriptors: int


def encode(payload: bytes, *, descriptors: int = 0, limit: int = CONTROL_BYTES_MAX) -> bytes:
    """Header and payload. Raises ProtocolError when our own message is over a limit."""
    if not 0 <= descriptors <= DESCRIPTORS_MAX:
        raise ProtocolError(
            f"{descriptors} descriptors with one message; at most {DESCRIPTORS_MAX} are allowed",
            fix="describe a region by fewer transports at once",
        )
    if len(payload) > limit:
        raise ProtocolError(
            f"message of {len(payload)} bytes is over the limit of {limit}",
            fix="send fewer blocks or spans at once",
        )
    return HEADER.pack(MAGIC, VERSION, descriptors, 0, len(payload)) + payload


def check_header(header: bytes | bytearray, limit: int) -> tuple[int, int]:
    """(payload bytes, descriptors) of a 12-byte header.

    Raises ProtocolError for anything that is not ours, VersionError for another version, AuthError
    for the first bytes of TLS.
    """
    magic, version, descriptors, zero, nbytes = HEADER.unpack_from(header)
    if magic[:2] in TLS_BEGINNINGS:
        raise AuthError(
            "the other side speaks TLS and this one does not",
            stage="connect",
            fix="set tls_cert, tls_key and tls_ca on both sides or on none",
        )
    if magic != MAGIC:
        raise ProtocolError(
            f"not a kvferry peer: the stream begins with {bytes(header[:8])!r}",
            fix="check that the port belongs to kvferry and that nothing else connects to it",
        )
    if version != VERSION:
        raise VersionError(
            f"the peer speaks protocol version {version}, this side {VERSION}",
            fix="run the same kvferry release on both sides",
        )
    if zero or descriptors > DESCRIPTORS_MAX:
        raise ProtocolError(f"malformed frame header {bytes(header[: HEADER.size])!r}")
    if nbytes > limit:
        raise ProtocolError(
            f"the peer announced a message of {nbytes} bytes; the limit is {limit}",
            fix="nothing was read; check that both sides run the same release",
        )
    return nbytes, descriptors


class FrameDecoder:
    """Cuts a stream into frames; feed it bytes as they come, in any pieces.

    ``limit`` may be changed between two frames, even of one piece. After an exception the decoder
    is dead: the stream has no known boundary any more.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def __len__(self) -> int:
        """Bytes kept of an incomplete frame."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Frames that are complete after ``data``, each cut when it is asked for.

        So what precedes bad bytes is delivered before they raise, however the stream was cut, and
        the first frame can raise the limit for the second.
        """
        return self._frames(data)

    def _frames(self, data: bytes) -> Iterator[Frame]:
        if not self._buffer and len(data) >= HEADER.size:
            # Nearly always one whole message arrives, and need not be kept first.
            nbytes, descriptors = check_header(data, self.limit)
            if len(data) == HEADER.size + nbytes:
                yield Frame(data[HEADER.size :], descriptors)
                return
        self._buffer += data
        while True:
            if len(self._buffer) < HEADER.size:
                # Noise is refused at its fourth byte, not when twelve have trickled in.
                head = bytes(self._buffer[: len(MAGIC)])
                if not MAGIC.startswith(head):
                    check_header(head.ljust(HEADER.size, b"\0"), self.limit)
                return
            nbytes, descriptors = check_header(self._buffer, self.limit)
            end = HEADER.size + nbytes
            if len(self._buffer) < end:
                return
            frame = Frame(bytes(self._buffer[HEADER.size : end]), descriptors)
            del self._buffer[:end]
            yield frame
