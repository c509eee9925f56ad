"""Messages: what is packed comes back, what a newer peer adds is skipped, the rest is refused."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import ProtocolError
from kvferry.protocol import messages
from kvferry.protocol.messages import AnyMessage, Message

KINDS: tuple[type[Message], ...] = typing.get_args(AnyMessage)
A, B = b"a" * 16, b"b" * 16

EXAMPLES: list[Message] = [
    messages.Hello(
        A, "me", "control", B, A, B, "h", "0.1", ["tcp"], ["unix:/x", "tcp://h:1"], 4096, 2, B
    ),
    messages.Challenge(A, bytes(32)),
    messages.Proof(bytes(32)),
    messages.Reject("busy", "full"),
    messages.Ping(7),
    messages.Pong(7),
    messages.Failure(7, "stale_region", "gone"),
    messages.Notify(b"\0\xff"),
    messages.Describe(1, 2, A),
    messages.Description(1, 2, "cuda", "GPU-1", 1 << 40, 3, "read", {"shm": b"x"}, ["shm"]),
    messages.RegionGone(2),
    messages.Verify(1, 2, A, 3, bytes(16), bytes(16), "xxh3-64"),
    messages.Digests(1, bytes(16)),
    messages.Move(1, True, 2, A, 0, bytes(8), bytes(8), 1.5),
    messages.Ready(1, 8),
    messages.Done(1, 8),
    messages.Claim(A, B),
    messages.Granted(A, B, 5.0, b"where"),
    messages.Refused(A, B, "expired", "late"),
    messages.Renew([A, B]),
    messages.Confirm(A, B),
    messages.Confirmed(A, B),
    messages.Stopped(A, B, "gave up"),
    messages.Withdrawn(A, B, "cancelled", "why"),
]

each_example = pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)


def raw(message: Message) -> list[Any]:
    """A message as the plain list that it is on the wire."""
    value = msgspec.msgpack.decode(messages.pack(message))
    assert isinstance(value, list)
    return value


def repack(fields: list[Any]) -> bytes:
    return msgspec.msgpack.encode(fields)


def defaults(kind: type[Message]) -> int:
    """How many fields may be missing at the end."""
    return sum(not f.required for f in msgspec.structs.fields(kind))


def test_there_is_an_example_of_every_message() -> None:
    assert [type(example) for example in EXAMPLES] == list(KINDS)


def test_every_message_class_is_one_that_can_be_received() -> None:
    assert set(Message.__subclasses__()) == set(KINDS)


@each_example
def test_a_message_comes_back_as_it_went(message: Message) -> None:
    assert messages.unpack(messages.pack(message)) == message


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
@given(data=st.data())
def test_any_message_comes_back_as_it_went(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(any_message(kind))
    assert messages.unpack(messages.pack(message)) == message


@each_example
def test_fields_that_a_newer_peer_added_are_skipped(message: Message) -> None:
    longer = [*raw(message), 1, "two", {"three": [3]}, b"four", None]
    assert messages.unpack(repack(longer)) == message


@each_example
def test_fields_with_a_default_may_be_missing(message: Message) -> None:
    kind = type(message)
    for n in range(1, defaults(kind) + 1):
        back = messages.unpack(repack(raw(message)[:-n]))
        assert raw(back)[:-n] == raw(message)[:-n]
        for field in msgspec.structs.fields(kind)[-n:]:
            empty = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
            assert getattr(back, field.name) == empty


@each_example
def test_fields_without_a_default_may_not_be_missing(message: Message) -> None:
    shorter = raw(message)[: -defaults(type(message)) - 1]
    with pytest.raises(ProtocolError, match="malformed message"):
        messages.unpack(repack(shorter))


@given(st.binary(max_size=300))
def test_random_bytes_are_a_message_or_a_protocol_error(data: bytes) -> None:
    unpacked_or_refused(data)


@given(st.sampled_from(EXAMPLES), st.lists(st.tuples(st.integers(0, 999), st.integers(0, 255))))
def test_a_spoilt_message_is_a_message_or_a_protocol_error(
    message: Message, spoil: list[tuple[int, int]]
) -> None:
    data = bytearray(messages.pack(message))
    for at, value in spoil:
        data[at % len(data)] = value
    unpacked_or_refused(bytes(data))


@given(st.sampled_from(EXAMPLES), st.integers(0, 200))
def test_a_message_cut_short_is_a_protocol_error(message: Message, keep: int) -> None:
    data = messages.pack(message)
    with pytest.raises(ProtocolError):
        messages.unpack(data[: keep % len(data)])


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.sampled_from([kind.__name__ for kind in KINDS]), st.lists(plain, max_size=12))
def test_wrong_types_are_a_message_or_a_protocol_error(tag: str, fields: list[Any]) -> None:
    unpacked_or_refused(repack([tag, *fields]))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x91" * 100_000,
        b"\x93\xa4Ping\x01" + b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff\xa4Ping",
        b"\x92\xa5Renew\xdd\xff\xff\xff\xff",
        b"\x92\xa6Notify\xc6\xff\xff\xff\xff",
        b"\x93\xa6Reject\xa1\xff\xa1a",
        repack(["Ping", 1]) + b"x",
        repack(["Nobody", 1]),
        repack([]),
        repack({"Ping": 1}),
    ],
    ids=[
        "empty",
        "deep",
        "deep extra",
        "huge array",
        "huge list",
        "huge bytes",
        "not UTF-8",
        "trailing",
        "unknown tag",
        "no tag",
        "a map",
    ],
)
def test_hostile_payloads_are_protocol_errors(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="malformed message"):
        messages.unpack(data)


@pytest.mark.parametrize(
    "fields",
    [
        ["Ping", -1],
        ["Ping", 1 << 62],
        ["Ping", True],
        ["Claim", b"short", B],
        ["Claim", A + b"x", B],
        ["Granted", A, B, float("nan"), b""],
        ["Granted", A, B, float("inf"), b""],
        ["Granted", A, B, -1.0, b""],
        ["Reject", "c" * 257, ""],
        ["Reject", "", "t" * 2001],
        ["Notify", bytes(messages.NOTIFY_BYTES_MAX + 1)],
        ["Renew", [A] * 8193],
    ],
    ids=lambda f: f"{f[0]}-{str(f[1])[:8]}",
)
def test_values_out_of_range_are_protocol_errors(fields: list[Any]) -> None:
    with pytest.raises(ProtocolError, match="malformed message"):
        messages.unpack(repack(fields))


@given(st.text(max_size=40), st.integers(0, 3000))
def test_a_clipped_text_always_fits(text: str, repeat: int) -> None:
    clipped = messages.clip(text * repeat)
    assert messages.unpack(messages.pack(messages.Reject("code", clipped))).message == clipped
    assert clipped == text * repeat or clipped.endswith("[cut]")


def unpacked_or_refused(data: bytes) -> None:
    """Nothing but a message or a ProtocolError may come of ``data``."""
    try:
        message = messages.unpack(data)
    except ProtocolError:
        return
    assert type(message) in KINDS


def any_message(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Valid messages of a kind, made from the limits that its annotations state."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{f.name: values(hints[f.name]) for f in msgspec.structs.fields(kind)})


def values(hint: Any) -> st.SearchStrategy[Any]:
    meta = msgspec.Meta()
    if typing.get_origin(hint) is typing.Annotated:
        hint, meta = typing.get_args(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    longest = min(max(20, meta.min_length or 0), meta.max_length or 20)
    if hint is bool:
        return st.booleans()
    if hint is int:
        return st.integers(meta.ge or 0, (meta.lt or 100) - 1)
    if hint is float:
        return st.floats(meta.ge, meta.le)
    if hint is str:
        return st.text(max_size=longest)
    if hint is bytes:
        return st.binary(min_size=meta.min_length or 0, max_size=longest)
    if origin is list:
        return st.lists(values(arguments[0]), max_size=3)
    assert origin is dict
    return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
