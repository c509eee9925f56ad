"""Digests of memory, and the pieces of a transfer that are compared."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvferry import digests

LENGTHS = st.lists(st.integers(1, 3 << 20), max_size=60)


@given(LENGTHS)
def test_all_pieces_cover_every_byte_once_and_in_order(lengths: list[int]) -> None:
    index, begin, sizes = digests.choose(np.array(lengths, np.int64), sampled=False, seed=1)
    assert (sizes > 0).all()
    assert (sizes <= digests.FULL_PIECE_BYTES).all()
    at = [0] * len(lengths)
    for i, b, n in zip(index.tolist(), begin.tolist(), sizes.tolist(), strict=True):
        assert b == at[i]
        at[i] += n
    assert at == lengths
    assert (np.diff(index) >= 0).all()


@given(LENGTHS, st.integers(0, 9))
def test_a_sample_is_bounded_distinct_and_inside_its_spans(lengths: list[int], seed: int) -> None:
    array = np.array(lengths, np.int64)
    index, begin, sizes = digests.choose(array, sampled=True, seed=seed)
    assert len(set(zip(index.tolist(), begin.tolist(), strict=True))) == index.size
    assert index.size <= digests.SAMPLE_PIECES
    assert (sizes > 0).all()
    assert (sizes <= digests.SAMPLE_PIECE_BYTES).all()
    assert (begin + sizes <= array[index]).all()
    if lengths:
        assert (index[0], begin[0]) == (0, 0)
        assert (index[-1], begin[-1] + sizes[-1]) == (len(lengths) - 1, lengths[-1])


def test_the_seed_decides_the_sample() -> None:
    lengths = np.full(5000, 200_000, np.int64)
    same = [digests.choose(lengths, sampled=True, seed=7) for _ in range(2)]
    other = digests.choose(lengths, sampled=True, seed=8)
    assert all((a == b).all() for a, b in zip(*same, strict=True))
    assert (other[0] != same[0][0]).any()


@given(st.lists(st.integers(1, digests.FULL_PIECE_BYTES), max_size=300))
def test_batches_are_in_order_and_within_both_limits(sizes: list[int]) -> None:
    runs = digests.batches(np.array(sizes, np.int64))
    assert [i for run in runs for i in range(run.start, run.stop)] == list(range(len(sizes)))
    assert all(0 < run.stop - run.start <= digests.BATCH_PIECES_MAX for run in runs)
    assert all(sum(sizes[run]) <= digests.BATCH_BYTES_MAX for run in runs)


def test_many_small_pieces_are_cut_by_their_number() -> None:
    runs = digests.batches(np.ones(digests.BATCH_PIECES_MAX * 2 + 1, np.int64))
    assert [run.stop - run.start for run in runs] == [digests.BATCH_PIECES_MAX] * 2 + [1]


def test_a_digest_is_that_of_the_bytes() -> None:
    memory = np.random.default_rng(1).integers(0, 256, 10_000, np.uint8)
    begins, lengths = [7, 0, 9_000, 3], [100, 10_000, 1_000, 0]
    addresses = np.array([memory.ctypes.data + begin for begin in begins], np.uint64)
    found = digests.digest(addresses, np.array(lengths, np.int64), lambda: False)
    assert found is not None
    assert found.tolist() == [
        xxhash.xxh3_64_intdigest(memory[begin : begin + length].tobytes())
        for begin, length in zip(begins, lengths, strict=True)
    ]


def test_one_changed_bit_changes_one_digest() -> None:
    memory = np.zeros(64 * 1024, np.uint8)
    addresses = np.arange(64, dtype=np.uint64) * 1024 + memory.ctypes.data
    lengths = np.full(64, 1024, np.int64)
    before = digests.digest(addresses, lengths, lambda: False)
    memory[5 * 1024 + 1000] ^= 64
    after = digests.digest(addresses, lengths, lambda: False)
    assert before is not None
    assert after is not None
    assert np.flatnonzero(before != after).tolist() == [5]


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_it_stops_when_it_is_told_to(calls: int) -> None:
    memory = np.zeros(200, np.uint8)
    addresses = np.arange(200, dtype=np.uint64) + memory.ctypes.data
    asked = iter([False] * calls + [True] * 9)
    assert digests.digest(addresses, np.ones(200, np.int64), lambda: next(asked)) is None


def test_nothing_has_no_digest() -> None:
    empty = digests.digest(np.empty(0, np.uint64), np.empty(0, np.int64), lambda: True)
    assert empty is not None
    assert empty.size == 0
    assert digests.batches(np.empty(0, np.int64)) == []
