"""What peers say to each other. Every message is a tagged msgspec struct.

Rules of change: a field is never removed, renamed or moved; a new field goes last and has a
default; a new message gets a new tag. Anything else is a new protocol version. Block tables and
spans travel as raw little-endian array bytes, never as lists, and never as addresses.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvferry.errors import KVFerryError, ProtocolError

Id = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Short = Annotated[str, msgspec.Meta(max_length=256)]
Text = Annotated[str, msgspec.Meta(max_length=2000)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]

NOTIFY_BYTES_MAX = 64 << 10
NONCE_BYTES = 32

Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
"""An HMAC-SHA256, or a nonce as long."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=False):
    """One message; the concrete class is its tag on the wire."""


# -- sessions ----------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First message of both sides on every connection.

    incarnation: minted when the engine started; the peer's only identity.
    expected: incarnation that the caller wants to reach, or empty; a mismatch is refused.
    purpose: ``"control"``, or the name of a streamed transport for a lane.
    key: in a callee's control hello, what the caller must show on its lanes; on a lane, just that;
    else zeros.
    process, host: equal when both engines share a process, or a kernel.
    transports: names that the sender can use.
    addresses: where the sender listens, best first.
    nonce: of a caller that has a cluster key, 32 fresh random bytes; see protocol.auth.
    """

    incarnation: Id
    name: Short
    purpose: Short
    key: Id
    expected: Annotated[bytes, msgspec.Meta(max_length=16)] = b""
    process: Id = bytes(16)
    host: Short = ""
    software: Short = ""
    transports: Annotated[list[Short], msgspec.Meta(max_length=32)] = []
    addresses: Annotated[list[Short], msgspec.Meta(max_length=16)] = []
    ring_bytes: Count = 0
    ring_slots: Count = 0
    nonce: Annotated[bytes, msgspec.Meta(max_length=NONCE_BYTES)] = b""


class Challenge(Message, frozen=True):
    """The callee's answer to a hello while a cluster key is set: prove that you have it."""

    incarnation: Id
    nonce: Digest


class Proof(Message, frozen=True):
    """Of the cluster key: the caller's after Challenge, the callee's after its hello."""

    mac: Digest


class Reject(Message, frozen=True):
    """Instead of a hello: why the connection is refused. The sender closes after it."""

    code: Short
    message: Text


class Ping(Message, frozen=True):
    """Heart-beat, and the probe of the control round trip."""

    request_id: Count


class Pong(Message, frozen=True):
    request_id: Count


class Failure(Message, frozen=True):
    """The request failed; ``code`` is an error code of kvferry.errors."""

    request_id: Count
    code: Short
    message: Text


class Notify(Message, frozen=True):
    """A message of the engines' owners; kvferry does not look into it."""

    body: Annotated[bytes, msgspec.Meta(max_length=NOTIFY_BYTES_MAX)]


# -- regions -----------------------------------------------------------------------------------


class Describe(Message, frozen=True):
    """Asks how to reach a region. Answered by Description or Failure."""

    request_id: Count
    region_id: Count
    token: Id


class Description(Message, frozen=True):
    """How to reach a region: an export per transport, descriptors in the order of ``fd_owners``."""

    request_id: Count
    region_id: Count
    kind: Short
    device: Short
    nbytes: Count
    generation: Count
    access: Short
    exports: Annotated[dict[Short, bytes], msgspec.Meta(max_length=32)]
    fd_owners: Annotated[list[Short], msgspec.Meta(max_length=16)] = []


class RegionGone(Message, frozen=True):
    """The region was deregistered: drop what you cached of it."""

    region_id: Count


class Verify(Message, frozen=True):
    """Asks for digests of spans of the callee's region. Answered by Digests or Failure.

    offsets, lengths: int64 arrays as bytes. kind: how the digests are computed.
    """

    request_id: Count
    region_id: Count
    token: Id
    generation: Count
    offsets: bytes
    lengths: bytes
    kind: Short


class Digests(Message, frozen=True):
    """One digest per span, as little-endian uint64 array bytes."""

    request_id: Count
    values: bytes


# -- streamed transfers, on a lane -------------------------------------------------------------


class Move(Message, frozen=True):
    """Opens one streamed transfer. ``write`` is seen from the caller: it sends the bytes.

    offsets, lengths: int64 arrays as bytes; they name spans of the callee's region.
    """

    transfer_id: Count
    write: bool
    region_id: Count
    token: Id
    generation: Count
    offsets: bytes
    lengths: bytes
    deadline_s: Seconds


class Ready(Message, frozen=True):
    """The spans are good. After it come the bytes, from whichever side sends."""

    transfer_id: Count
    nbytes: Count


class Done(Message, frozen=True):
    """A write arrived whole."""

    transfer_id: Count
    nbytes: Count


# -- hand-off ----------------------------------------------------------------------------------


class Claim(Message, frozen=True):
    """Decode wants the KV of an offer."""

    claim_id: Id
    offer_id: Id


class Granted(Message, frozen=True):
    """The offer is yours for ``lease_s`` seconds at a time; ``payload`` says what lies where."""

    claim_id: Id
    offer_id: Id
    lease_s: Seconds
    payload: bytes


class Refused(Message, frozen=True):
    """No: ``code`` is one of the refusal codes of protocol.handoff."""

    claim_id: Id
    offer_id: Id
    code: Short
    message: Text


class Renew(Message, frozen=True):
    """Decode is still reading these."""

    offer_ids: Annotated[list[Id], msgspec.Meta(max_length=8192)]


class Confirm(Message, frozen=True):
    """Decode has every byte and asks for leave to use them."""

    claim_id: Id
    offer_id: Id


class Confirmed(Message, frozen=True):
    """The bytes were good until now: use them. The offer is delivered."""

    claim_id: Id
    offer_id: Id


class Stopped(Message, frozen=True):
    """Decode gave up and its reading has stopped: the blocks can be freed."""

    claim_id: Id
    offer_id: Id
    reason: Text


class Withdrawn(Message, frozen=True):
    """Prefill ended the offer: stop reading, throw away what was read."""

    claim_id: Id
    offer_id: Id
    code: Short
    message: Text


AnyMessage = (
    Hello
    | Challenge
    | Proof
    | Reject
    | Ping
    | Pong
    | Failure
    | Notify
    | Describe
    | Description
    | RegionGone
    | Verify
    | Digests
    | Move
    | Ready
    | Done
    | Claim
    | Granted
    | Refused
    | Renew
    | Confirm
    | Confirmed
    | Stopped
    | Withdrawn
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def pack(message: Message) -> bytes:
    """Message to payload bytes."""
    return _encoder.encode(message)


def unpack(payload: bytes) -> Any:
    """Payload bytes to a message. Raises ProtocolError for anything malformed."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed message: {error}") from error


def explain(error: KVFerryError) -> str:
    """What failed and what to do, for a message that tells a peer of an error."""
    return clip(f"{error.message}; {error.fix}" if error.fix else error.message)


def clip(text: str) -> str:
    """Text cut to what a message may carry."""
    return text if len(text) <= 2000 else text[:1990] + " [cut]"
