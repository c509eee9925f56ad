"""Fuzz targets of what peers send: frames, messages, hand-off parameters, geometry, addresses.

Whatever arrives, a parser gives a value that keeps its promises, or one of kvferry's typed errors
with a message of bounded length. Kinds of messages are taken from the code, so new ones are fuzzed.
"""

from __future__ import annotations

import typing
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from fuzzing import as_json, drawing, near, plain, spoilt
from hypothesis import given
from hypothesis import strategies as st

from kvferry import layout
from kvferry.errors import (
    BoundsError,
    ConfigError,
    KVFerryError,
    ProtocolError,
    UsageError,
    VersionError,
)
from kvferry.handoff import PARAMS_KEY, PARAMS_VERSION, _numeric, _Params, parse_params
from kvferry.layout import KVGeometry
from kvferry.peers import REF
from kvferry.protocol import framing, messages
from kvferry.protocol.framing import Frame, FrameDecoder
from kvferry.protocol.messages import AnyMessage, Message
from kvferry.protocol.session import Closed, State
from kvferry.regions import SPANS_MAX, Spans, check_bounds, pair
from kvferry.sockets import Address
from kvferry.testing.session import SessionPair

KINDS: tuple[type[Message], ...] = typing.get_args(AnyMessage)
TEXT_CHARS_MAX = 3000
"""Longest text of an error: a peer must not be able to fill our log."""


def bounded(error: KVFerryError) -> None:
    assert len(str(error)) < TEXT_CHARS_MAX, f"{len(str(error))} characters in an error"


def nearly(kind: type[Message]) -> st.SearchStrategy[bytes]:
    """Payloads that look like a kind of message: values at their limits, or of any type."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = [hints[field.name] for field in msgspec.structs.fields(kind)]
    whole = st.tuples(*map(near, fields)).map(list)
    changes = st.sampled_from(("none", "none", "none", "cut", "longer", "type"))

    def made(values: list[Any], change: str, other: Any, at: int) -> bytes:
        if change == "cut":
            values = values[: at % (len(values) + 1)]
        elif change == "longer":
            values = [*values, other]
        elif change == "type" and values:
            values = [*values]
            values[at % len(values)] = other
        return msgspec.msgpack.encode([kind.__name__, *values])

    return st.builds(made, whole, changes, plain, st.integers(0, 20))


payloads = st.sampled_from(KINDS).flatmap(nearly)


# -- frames --------------------------------------------------------------------------------------


def frames_of(stream: bytes, cuts: list[int], limit: int) -> tuple[list[Frame], type | None]:
    """What a decoder makes of a stream that arrives cut at ``cuts``."""
    decoder = FrameDecoder(limit)
    frames: list[Frame] = []
    edges = [0, *sorted(cuts), len(stream)]
    try:
        for begin, end in pairwise(edges):
            for frame in decoder.feed(stream[begin:end]):
                frames.append(frame)  # noqa: PERF402 - those before an error must be kept
            assert len(decoder) < framing.HEADER.size + limit, "more is kept than the limit"
    except (ProtocolError, VersionError) as error:
        bounded(error)
        return frames, type(error)
    return frames, None


@drawing(150)
@given(data=st.data(), limit=st.sampled_from([0, 16, 300]))
def test_frames(data: st.DataObject, limit: int) -> None:
    parts = data.draw(st.lists(st.binary(max_size=40), max_size=3))
    stream = data.draw(spoilt(b"".join(framing.encode(part) for part in parts)))
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=6))
    found = frames_of(stream, cuts, limit)
    assert found == frames_of(stream, [], limit)
    assert all(len(frame.payload) <= limit for frame in found[0])


@drawing(150)
@given(header=st.binary(min_size=12, max_size=12) | spoilt(framing.encode(b"")))
def test_frame_headers(header: bytes) -> None:
    if len(header) < framing.HEADER.size:
        return
    try:
        nbytes, descriptors = framing.check_header(header, 1000)
    except (ProtocolError, VersionError) as error:
        bounded(error)
        return
    assert 0 <= nbytes <= 1000
    assert 0 <= descriptors <= framing.DESCRIPTORS_MAX


# -- messages ------------------------------------------------------------------------------------


def read(payload: bytes) -> Message | None:
    """The message of a payload, or None when it was refused as it should be."""
    try:
        message = messages.unpack(payload)
    except ProtocolError as error:
        bounded(error)
        return None
    assert type(message) in KINDS
    return message  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_kind_of_message(kind: type[Message]) -> None:
    kept = 0

    @drawing(30)
    @given(payload=nearly(kind))
    def target(payload: bytes) -> None:
        nonlocal kept
        message = read(payload)
        if message is not None:
            kept += 1
            assert type(message) is kind
            again = messages.pack(message)
            assert messages.unpack(again) == message, "its limits differ when it is read again"

    target()
    assert kept, "nothing near this message is one: the strategy is too wild"


@drawing(200)
@given(data=st.data(), payload=payloads)
def test_spoilt_messages(data: st.DataObject, payload: bytes) -> None:
    message = read(data.draw(spoilt(payload)))
    if message is not None:
        assert messages.unpack(messages.pack(message)) == message


@drawing(60)
@given(
    frames=st.lists(st.tuples(payloads | st.binary(max_size=40), st.integers(0, 2)), max_size=6),
    opened=st.booleans(),
    caller=st.booleans(),
)
def test_a_session_takes_anything(
    frames: list[tuple[bytes, int]], opened: bool, caller: bool
) -> None:
    """Messages of any kind, in any order, in any state: one end at most, and nothing raised."""
    wire = SessionPair()
    if opened:
        wire.flow()
    side = wire.caller if caller else wire.callee
    for payload, descriptors in frames:
        limit = framing.CONTROL_BYTES_MAX
        wire.inject(side, framing.encode(payload, descriptors=descriptors, limit=limit))
    assert len(side.closed) <= 1
    assert not side.closed or (side.session.state is State.CLOSED and side.events[-1:])
    for event in side.closed:
        assert isinstance(event, Closed)
        bounded(event.error)
    for data, _ in side.session.data_to_send():
        framing.check_header(data, framing.CONTROL_BYTES_MAX)


# -- hand-off parameters -------------------------------------------------------------------------

GOOD_PARAMS: dict[str, Any] = {
    "version": PARAMS_VERSION,
    "offer": "0" * 32,
    "engine": "f" * 32,
    "addresses": ["unix:/run/kvferry/a.sock", "tcp://[fd00::5]:7600"],
    "n_tokens": 7,
    "fingerprint": "0123456789abcdef",
}
hexadecimal = st.text("0123456789abcdefABC\n ", max_size=34)
addresses = st.one_of(
    st.sampled_from(["unix:/a", "tcp://1.2.3.4:5", "[::1]:9", "a:1", "tcp://", "unix:a\0b", ":"]),
    st.text(":/[]%.0123456789abcdefuixtp \0é٣", max_size=30),
    st.text(max_size=20),
)
param_values = {
    "version": st.sampled_from([0, 1, 2, True, 1.0, "1", None]),
    "offer": hexadecimal | st.sampled_from(["0" * 32 + "\n", "0" * 31, "0" * 33, "F" * 32]),
    "engine": hexadecimal | st.just("0" * 32),
    "addresses": st.lists(addresses, max_size=18),
    "n_tokens": st.integers(-1, 1 << 41) | st.sampled_from([1 << 70, 0.5, 2.0, "3", True]),
    "fingerprint": st.text(max_size=130),
}


@st.composite
def changed(draw: st.DrawFn, good: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """``good`` with some keys removed, added, or replaced by what is nearly right or anything."""
    body = dict(good)
    for key in draw(st.lists(st.sampled_from(sorted(values)), max_size=3)):
        how = draw(st.integers(0, 9))
        if how == 0:
            body.pop(key, None)
        else:
            body[key] = draw(as_json if how == 1 else values[key])
    if draw(st.integers(0, 4)) == 0:
        body.update(draw(st.dictionaries(st.text(max_size=8), as_json, max_size=3)))
    return body


@drawing(200)
@given(body=changed(GOOD_PARAMS, param_values) | as_json, wrap=st.integers(0, 9))
def test_handoff_parameters(body: Any, wrap: int) -> None:
    params = body if wrap == 0 else {PARAMS_KEY: body}
    try:
        ours = parse_params(params)
    except UsageError as error:
        bounded(error)
        return
    assert isinstance(ours, _Params)
    for text in (ours.offer, ours.engine):
        assert len(bytes.fromhex(text)) == 16
        assert set(text) <= set("0123456789abcdef"), "more than digits passed"
    assert 0 <= ours.n_tokens < 1 << 40
    assert 1 <= len(ours.addresses) <= 16
    for text in ours.addresses:
        numeric_or_refused(text)


@pytest.mark.parametrize("key", ["version", *[k for k in GOOD_PARAMS if k != "version"]])
@pytest.mark.parametrize("depth", [300, 900, 5000])
def test_deep_handoff_parameters(key: str, depth: int) -> None:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    with pytest.raises(UsageError) as caught:
        parse_params({PARAMS_KEY: {**GOOD_PARAMS, key: value}})
    bounded(caught.value)


# -- addresses -----------------------------------------------------------------------------------


def numeric_or_refused(text: str) -> None:
    try:
        address = _numeric(text)
    except (UsageError, ConfigError) as error:
        bounded(error)
        return
    assert address.scheme in ("unix", "tcp")


@drawing(200)
@given(text=addresses)
def test_addresses(text: str) -> None:
    numeric_or_refused(text)
    try:
        address = Address.parse(text)
    except ConfigError as error:
        bounded(error)
        return
    assert 0 <= address.port <= 65535
    assert "\0" not in address.host
    assert Address.parse(str(address)) == address, "it does not come back as it went"


# -- region references and spans -------------------------------------------------------------------


@drawing(100)
@given(ref=st.binary(max_size=40), number=st.integers(0, (1 << 62) - 1))
def test_region_references(ref: bytes, number: int, make_registry: Any) -> None:
    registry, known = make_registry
    token = ref.ljust(16, b"\0")[:16]
    with pytest.raises(KVFerryError) as caught:
        registry.find(number, token)
    bounded(caught.value)
    assert REF.unpack(REF.pack(number, token)) == (number, token)
    wrong = known.region.token[:15] + bytes([known.region.token[15] ^ 1])
    with pytest.raises(KVFerryError):
        registry.find(known.region.region_id, wrong)
    assert registry.find(*REF.unpack(known.ref)) is known


@pytest.fixture(scope="module")
def make_registry() -> Any:
    """A registry with one region of host memory that nobody exports."""
    from kvferry.registry import Registry

    registry = Registry({})
    memory = np.zeros(64, np.uint8)
    known = registry.add(None, memory.ctypes.data, 64, "read", keep=memory)  # type: ignore[arg-type]
    return registry, known


numbers = st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-2, 70) | st.just(1 << 64)


@drawing(200)
@given(
    offsets=st.lists(numbers, max_size=6),
    lengths=st.lists(numbers, max_size=6) | numbers,
    nbytes=st.integers(0, 80),
)
def test_spans(offsets: list[int], lengths: Any, nbytes: int) -> None:
    try:
        spans = Spans.of(offsets, lengths)
        check_bounds(spans, nbytes, what="remote")
    except (UsageError, BoundsError) as error:
        bounded(error)
        return
    assert all(
        begin >= 0 and begin + size <= nbytes
        for begin, size in zip(spans.offsets.tolist(), spans.lengths.tolist(), strict=True)
    )


# -- geometry ------------------------------------------------------------------------------------

LOCAL = KVGeometry(
    model="m", layers=2, kv_heads=4, head_dim=8, dtype="float16", block_tokens=4, blocks=16
)
GOOD_GEOMETRY = layout.to_wire(LOCAL)
geometry_values: dict[str, Any] = {
    key: st.sampled_from([-1, 0, 1, 2, 3, 4, 8, 1 << 16, 1 << 24, 1 << 32, 1 << 65, True, 1.0])
    if isinstance(value, int)
    else st.text(max_size=40)
    for key, value in GOOD_GEOMETRY.items()
}
geometry_values["dtype"] = st.sampled_from(["float16", "bfloat16", "float8_e5m2", "complex64", ""])
geometry_values["layout"] = st.permutations("LKBTHD").map("".join) | st.text("LKBTHD", max_size=7)


@drawing(200)
@given(
    body=changed(GOOD_GEOMETRY, geometry_values) | plain,
    theirs=st.lists(st.integers(-1, 20), max_size=8),
    ours=st.lists(st.integers(0, 15), max_size=8, unique=True),
    n_tokens=st.integers(0, 40) | st.sampled_from([1 << 39, -1]),
)
def test_geometry_and_blocks(body: Any, theirs: list[int], ours: list[int], n_tokens: int) -> None:
    """A geometry from a message, and a block table for it, give spans inside both pools."""
    try:
        remote = layout.from_wire(body)
    except ProtocolError as error:
        bounded(error)
        return
    assert 0 < remote.pool_nbytes <= layout.POOL_BYTES_MAX
    assert layout.from_wire(layout.to_wire(remote)) == remote
    try:
        source, target = layout.transfer_spans(
            remote, np.array(theirs, np.int64), LOCAL, np.array(ours, np.int64), n_tokens
        )
    except (UsageError, BoundsError) as error:
        bounded(error)
        return
    assert len(source) == len(target) <= SPANS_MAX
    check_bounds(source, remote.pool_nbytes, what="source")
    check_bounds(target, LOCAL.pool_nbytes, what="target")
    _, _, lengths = pair(source, target)
    assert int(lengths.sum()) == target.nbytes
