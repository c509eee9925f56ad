"""Spans against a reference that goes byte by byte, and numbers at the edge of int64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry import regions
from kvferry.errors import BoundsError, UsageError
from kvferry.regions import Spans, check_bounds, coalesce, merge, pair

TOP = (1 << 63) - 1

pieces = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=12)


def spans(parts: list[tuple[int, int]], base: int = 0) -> Spans:
    return Spans.of([base + off for off, _ in parts], [size for _, size in parts])


def every_byte(offsets: Any, lengths: Any) -> list[int]:
    """The reference: each byte's offset, in order."""
    return [
        byte
        for off, size in zip(offsets.tolist(), lengths.tolist(), strict=True)
        for byte in range(off, off + size)
    ]


@st.composite
def two_cuts(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Two lists that cover the same number of bytes, cut differently."""
    left = draw(pieces)
    total = sum(size for _, size in left)
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=8)))
    sizes = np.diff([0, *cuts, total]).tolist()
    # Neighbours that touch are as likely as jumps, so that merging has something to do.
    right, at = [], draw(st.integers(0, 60))
    for size in sizes:
        right.append((at, size))
        at = at + size if draw(st.booleans()) else draw(st.integers(0, 60))
    return left, right


@given(two_cuts(), st.sampled_from([0, 1 << 31, TOP - 200]))
def test_pair_matches_bytes_in_order(
    lists: tuple[list[tuple[int, int]], list[tuple[int, int]]], base: int
) -> None:
    local, remote = spans(lists[0], base), spans(lists[1])
    for one, other in ((local, remote), (remote, local)):
        a, b, size = pair(one, other)
        assert every_byte(a, size) == every_byte(one.offsets, one.lengths)
        assert every_byte(b, size) == every_byte(other.offsets, other.lengths)
        assert (size > 0).all()
        assert a.dtype == b.dtype == size.dtype == np.int64
        both = (a[1:] == (a + size)[:-1]) & (b[1:] == (b + size)[:-1])
        assert not both.any(), "neighbours on both sides were not merged"


@given(pieces, pieces)
def test_pair_refuses_sides_of_different_size(
    left: list[tuple[int, int]], right: list[tuple[int, int]]
) -> None:
    local, remote = (
        spans(left),
        spans([*right, (0, abs(local_total(left) - local_total(right)) + 1)]),
    )
    if local.nbytes == remote.nbytes:
        return
    with pytest.raises(BoundsError, match=rf"cover {local.nbytes} bytes.* {remote.nbytes}"):
        pair(local, remote)


def local_total(parts: list[tuple[int, int]]) -> int:
    return sum(size for _, size in parts)


@given(pieces)
def test_merge_keeps_bytes_and_order(parts: list[tuple[int, int]]) -> None:
    merged = merge(spans(parts))
    before = spans(parts)
    assert every_byte(merged.offsets, merged.lengths) == every_byte(before.offsets, before.lengths)
    assert (merged.lengths > 0).all()
    assert (merged.offsets[1:] != (merged.offsets + merged.lengths)[:-1]).all()


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(1, 5)), max_size=12))
def test_coalesce_merges_what_touches_on_both_sides(
    steps: list[tuple[bool, bool, int]],
) -> None:
    a, b, sizes = [], [], []
    at_a, at_b = 0, 1000
    for jump_a, jump_b, size in steps:
        at_a, at_b = at_a + jump_a, at_b + jump_b
        a.append(at_a)
        b.append(at_b)
        sizes.append(size)
        at_a, at_b = at_a + size, at_b + size
    given_arrays = [np.array(x, np.int64) for x in (a, b, sizes)]
    left, right, lengths = coalesce(*given_arrays)
    assert every_byte(left, lengths) == every_byte(given_arrays[0], given_arrays[2])
    assert every_byte(right, lengths) == every_byte(given_arrays[1], given_arrays[2])
    runs = sum(jump_a or jump_b for jump_a, jump_b, _ in steps[1:]) + bool(steps)
    assert lengths.size == runs


@given(pieces, st.integers(0, 70))
def test_check_bounds_refuses_exactly_what_leaves_the_region(
    parts: list[tuple[int, int]], nbytes: int
) -> None:
    outside = [i for i, (off, size) in enumerate(parts) if off + size > nbytes]
    if not outside:
        check_bounds(spans(parts), nbytes, what="local")
        return
    off, size = parts[outside[0]]
    with pytest.raises(
        BoundsError,
        match=rf"local span {outside[0]} of {len(parts)} \(offset {off}, length {size}\)",
    ):
        check_bounds(spans(parts), nbytes, what="local")


@pytest.mark.parametrize(
    ("offset", "length"),
    [(TOP, 1), (TOP, TOP), (1, TOP), (TOP - 1, 3), (4096, 1), (0, 4097), (4097, 0)],
)
def test_hostile_numbers_never_wrap_into_the_region(offset: int, length: int) -> None:
    with pytest.raises(BoundsError):
        check_bounds(Spans.of([offset], [length]), 4096, what="remote")


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (-(1 << 63), 0), (0, -(1 << 63)), (5, -1)])
def test_negative_numbers_from_elsewhere_are_out_of_bounds(offset: int, length: int) -> None:
    raw = Spans(np.array([offset], np.int64), np.array([length], np.int64))
    with pytest.raises(BoundsError):
        check_bounds(raw, 4096, what="remote")


def test_spans_at_the_very_end_of_a_huge_region_are_inside() -> None:
    check_bounds(Spans.of([TOP - 8, TOP], [8, 0]), TOP, what="local")


def test_spans_over_two_gigabytes_are_not_cut() -> None:
    size = (1 << 33) + 5
    a, b, lengths = pair(Spans.of([0, size], [size, size]), Spans.of([7], [2 * size]))
    assert (a.tolist(), b.tolist(), lengths.tolist()) == ([0], [7], [2 * size])
    assert Spans.whole(2 * size).nbytes == 2 * size


def test_nothing_pairs_with_nothing() -> None:
    for empty in (Spans.of([], []), Spans.of([5, 9], [0, 0])):
        a, b, size = pair(empty, Spans.of([], 4))
        assert (a.size, b.size, size.size) == (0, 0, 0)
        assert merge(empty).nbytes == 0


def test_blocks_are_named_by_number_in_the_given_order() -> None:
    found = Spans.blocks([3, 0, 3], 16)
    assert found.offsets.tolist() == [48, 0, 48]
    assert found.lengths.tolist() == [16, 16, 16]
    assert (len(found), found.nbytes) == (3, 48)


@pytest.mark.parametrize(
    ("offsets", "lengths", "text"),
    [
        ([0, 1], [1], "2 offsets but 1 lengths"),
        ([-1], [1], "negative"),
        ([1], [-1], "negative"),
        ([1 << 63], [1], "int64"),
        ([0], [1 << 63], "int64"),
        ([0], 1 << 63, "int64"),
        (["a"], [1], "int64"),
        ([0], None, "int64"),
        ([0] * 2, [TOP, 1], "more than an int64 holds"),
        ([0] * 4, [1 << 62] * 4, "more than an int64 holds"),
    ],
)
def test_spans_that_can_never_be_are_refused(offsets: Any, lengths: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        Spans.of(offsets, lengths)


def test_the_largest_total_is_allowed() -> None:
    assert Spans.of([0, 0], [TOP - 1, 1]).nbytes == TOP


def test_there_is_a_limit_to_spans_in_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "SPANS_MAX", 3)
    Spans.of([0] * 3, 1)
    with pytest.raises(UsageError, match="4 spans in one transfer; at most 3"):
        Spans.of([0] * 4, 1)


def test_fractions_are_refused_not_cut() -> None:
    with pytest.raises(UsageError, match="must be int64"):
        Spans.of([0.5], [1])
    with pytest.raises(UsageError, match="must be int64"):
        Spans.of([0], 1.5)
    assert len(Spans.of([], [])) == 0
