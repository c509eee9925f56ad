"""Frames: any cut of a stream gives the same frames, and noise is refused as early as it can be."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import KVFerryError, ProtocolError, VersionError
from kvferry.protocol import framing
from kvferry.protocol.framing import Frame, FrameDecoder

LIMIT = 1000


def decode(data: bytes, cuts: list[int]) -> tuple[list[Frame], type[KVFerryError] | None]:
    """What a decoder makes of ``data`` that arrives cut at ``cuts``."""
    decoder = FrameDecoder(LIMIT)
    frames: list[Frame] = []
    try:
        for begin, end in pairwise([0, *sorted(cuts), len(data)]):
            for frame in decoder.feed(data[begin:end]):
                frames.append(frame)  # noqa: PERF402 - those before an error must be kept
    except KVFerryError as error:
        return frames, type(error)
    return frames, None


def test_a_frame_has_the_header_that_the_docstring_draws() -> None:
    data = framing.encode(b"abc", descriptors=2)
    assert data == b"KVFY" + bytes([1, 2, 0, 0]) + (3).to_bytes(4, "little") + b"abc"


payloads = st.lists(
    st.tuples(st.binary(max_size=60), st.integers(0, framing.DESCRIPTORS_MAX)), max_size=5
)


@given(payloads, st.data())
def test_frames_survive_any_cut(parts: list[tuple[bytes, int]], data: st.DataObject) -> None:
    stream = b"".join(framing.encode(p, descriptors=n) for p, n in parts)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    assert decode(stream, cuts) == ([Frame(p, n) for p, n in parts], None)


@given(payloads)
def test_frames_survive_arriving_byte_by_byte(parts: list[tuple[bytes, int]]) -> None:
    stream = b"".join(framing.encode(p, descriptors=n) for p, n in parts)
    assert decode(stream, list(range(len(stream)))) == ([Frame(p, n) for p, n in parts], None)


@given(st.binary(min_size=4, max_size=40).filter(lambda junk: junk[:4] != b"KVFY"), st.data())
def test_what_precedes_junk_is_delivered_however_the_stream_was_cut(
    junk: bytes, data: st.DataObject
) -> None:
    stream = framing.encode(b"good") + framing.encode(b"too") + junk
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    assert decode(stream, cuts) == ([Frame(b"good", 0), Frame(b"too", 0)], ProtocolError)


@given(st.binary(max_size=200), st.data())
def test_random_bytes_end_in_typed_errors_only(noise: bytes, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(noise)), max_size=8))
    assert decode(noise, cuts) == decode(noise, [])


@given(st.binary(max_size=60), st.integers(0, 71), st.integers(1, 255))
def test_a_spoilt_frame_ends_in_typed_errors_only(payload: bytes, at: int, flip: int) -> None:
    stream = bytearray(framing.encode(payload) + framing.encode(b"next"))
    at %= len(stream)
    stream[at] ^= flip
    frames, error = decode(bytes(stream), [])
    assert error in (None, ProtocolError, VersionError)
    assert len(frames) <= 2


@pytest.mark.parametrize("noise", [b"GET ", b"\x16\x03\x01\x02", b"KVFX", b"\0\0\0\0"])
def test_noise_is_refused_at_the_fourth_byte_at_the_latest(noise: bytes) -> None:
    frames, error = decode(noise, [1, 2, 3])
    assert (frames, error) == ([], ProtocolError)


def test_the_beginning_of_a_frame_is_no_noise() -> None:
    decoder = FrameDecoder(LIMIT)
    for byte in b"KVFY":
        assert list(decoder.feed(bytes([byte]))) == []
    assert len(decoder) == 4


def test_another_version_is_named_with_our_own() -> None:
    header = framing.HEADER.pack(b"KVFY", 9, 0, 0, 5)
    with pytest.raises(VersionError, match=r"version 9, this side 1"):
        list(FrameDecoder(LIMIT).feed(header))


def test_a_message_at_the_limit_passes_and_one_byte_more_does_not() -> None:
    decoder = FrameDecoder(LIMIT)
    assert list(decoder.feed(framing.encode(bytes(LIMIT)))) == [Frame(bytes(LIMIT), 0)]
    with pytest.raises(ProtocolError, match=r"1001 bytes; the limit is 1000"):
        list(decoder.feed(framing.HEADER.pack(b"KVFY", 1, 0, 0, LIMIT + 1)))


def test_the_first_frame_can_raise_the_limit_for_the_second_of_the_same_piece() -> None:
    decoder = FrameDecoder(10)
    frames = decoder.feed(framing.encode(b"small") + framing.encode(bytes(50)))
    assert next(frames).payload == b"small"
    decoder.limit = 50
    assert next(frames).payload == bytes(50)


def test_our_own_message_over_the_limit_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ProtocolError, match="over the limit of 10"):
        framing.encode(bytes(11), limit=10)


@pytest.mark.parametrize("count", [-1, framing.DESCRIPTORS_MAX + 1, 256])
def test_more_descriptors_than_a_frame_may_have_are_not_sent(count: int) -> None:
    with pytest.raises(ProtocolError, match="descriptors"):
        framing.encode(b"", descriptors=count)


@pytest.mark.parametrize(("descriptors", "zero"), [(17, 0), (255, 0), (0, 1)])
def test_a_header_with_forbidden_values_is_refused(descriptors: int, zero: int) -> None:
    header = framing.HEADER.pack(b"KVFY", 1, descriptors, zero, 0)
    with pytest.raises(ProtocolError, match="malformed frame header"):
        list(FrameDecoder(LIMIT).feed(header))


def test_nothing_of_a_message_over_the_limit_is_kept() -> None:
    decoder = FrameDecoder(LIMIT)
    with pytest.raises(ProtocolError):
        list(decoder.feed(framing.HEADER.pack(b"KVFY", 1, 0, 0, 1 << 31)))
    assert len(decoder) <= framing.HEADER.size
