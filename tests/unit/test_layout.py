"""KV geometry against a reference that moves one element at a time."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import BoundsError, ProtocolError, UsageError
from kvferry.layout import (
    AXES,
    ITEM_BYTES,
    POOL_BYTES_MAX,
    KVGeometry,
    block_spans,
    compatible,
    fingerprint,
    from_wire,
    to_wire,
    transfer_spans,
)
from kvferry.regions import Spans

NAMED_LAYOUTS = ("LKBTHD", "LBKTHD", "LKBHTD", "BLKTHD")
TINY = KVGeometry("tiny", 2, 4, 3, "float16", 4, 8)
LLAMA = KVGeometry("llama", 32, 8, 128, "bfloat16", 16, 1024)
seeded = settings(derandomize=True, deadline=None, max_examples=300)


def random_pool(geometry: KVGeometry, rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 256, geometry.pool_nbytes, dtype=np.uint8)


def elements(geometry: KVGeometry, pool: np.ndarray) -> np.ndarray:
    """The pool as an array with axes L, K, B, T, H, D, item bytes; writes go through."""
    shaped = pool.reshape(*geometry.shape, ITEM_BYTES[geometry.dtype])
    return shaped.transpose(*[geometry.layout.index(axis) for axis in AXES], 6)


def move(source: Spans, target: Spans, source_pool: np.ndarray, target_pool: np.ndarray) -> None:
    for a, b, size in zip(source.offsets, target.offsets, source.lengths, strict=True):
        target_pool[b : b + size] = source_pool[a : a + size]


def move_naively(
    source: KVGeometry,
    source_blocks: Any,
    target: KVGeometry,
    target_blocks: Any,
    pools: tuple[np.ndarray, np.ndarray],
    positions: range,
) -> None:
    """What transfer_spans is for, written so plainly that it can only be right."""
    a, b = elements(source, pools[0]), elements(target, pools[1])
    owned = {source.tp_rank * source.kv_heads // source.tp_size + h: h for h in range(a.shape[4])}
    for h in range(b.shape[4]):
        theirs = owned.get(target.tp_rank * target.kv_heads // target.tp_size + h)
        if theirs is None:
            continue
        for p, layer, k, d in itertools.product(
            positions, range(source.layers), range(2), range(source.head_dim)
        ):
            i, t = divmod(p, source.block_tokens)
            j, u = divmod(p, target.block_tokens)
            value = a[layer, k, source_blocks[i], t, theirs, d]
            b[layer, k, target_blocks[j], u, h, d] = value


@st.composite
def transfers(draw: st.DrawFn) -> tuple[Any, ...]:
    """Two pools of one model, a block table for each, and a range of positions near block edges."""
    layouts = st.one_of(st.sampled_from(NAMED_LAYOUTS), st.permutations(AXES).map("".join))
    model = {
        "model": "random",
        "layers": draw(st.integers(1, 3)),
        "kv_heads": draw(st.sampled_from([1, 2, 4])),
        "head_dim": draw(st.integers(1, 3)),
        "dtype": draw(st.sampled_from(["float8_e4m3", "float16"])),
    }
    first_layout = draw(layouts)
    first_tokens = draw(st.integers(1, 5))
    same_shape = draw(st.booleans())
    most = draw(st.integers(0, 14))
    sides = []
    for layout, tokens in (
        (first_layout, first_tokens),
        (first_layout, first_tokens)
        if same_shape
        else (draw(layouts), draw(st.sampled_from([first_tokens, 1, 2, 3, 4, 8]))),
    ):
        used = -(-most // tokens)
        pool_blocks = used + draw(st.integers(1, 3))
        tp_size = draw(st.sampled_from([1, 2, 4]))
        geometry = KVGeometry(
            **model,
            block_tokens=tokens,
            blocks=pool_blocks,
            layout=layout,
            tp_size=tp_size,
            tp_rank=draw(st.integers(0, tp_size - 1)),
        )
        table = draw(
            st.one_of(st.permutations(range(pool_blocks)), st.just(list(range(pool_blocks))))
        )
        sides.append((geometry, table[:used]))
    edges = [
        e
        for g, _ in sides
        for i in range(0, most + 1, g.block_tokens)
        for e in (i - 1, i, i + 1)
        if 0 <= e <= most
    ]
    stop = draw(st.sampled_from([*edges, most]))
    start = draw(st.sampled_from([0, *[e for e in edges if e <= stop]]))
    return *sides[0], *sides[1], stop, start


@pytest.mark.slow
@seeded
@given(transfers(), st.integers(0, 2**32))
def test_transfer_equals_moving_each_element(case: tuple[Any, ...], seed: int) -> None:
    source, source_blocks, target, target_blocks, stop, start = case
    rng = np.random.default_rng(seed)
    source_pool, target_pool = random_pool(source, rng), random_pool(target, rng)
    expected = target_pool.copy()
    move_naively(
        source, source_blocks, target, target_blocks, (source_pool, expected), range(start, stop)
    )
    a, b = transfer_spans(source, source_blocks, target, target_blocks, stop, start)
    assert np.array_equal(a.lengths, b.lengths)
    assert (a.lengths > 0).all()
    move(a, b, source_pool, target_pool)
    # The whole pool is compared, so a byte written anywhere else is found too.
    assert np.array_equal(target_pool, expected)


@pytest.mark.slow
@seeded
@given(transfers(), st.integers(0, 2**32))
def test_block_spans_read_the_same_bytes_from_any_layout(case: tuple[Any, ...], seed: int) -> None:
    geometry, blocks, _, _, stop, _ = case
    pool = random_pool(geometry, np.random.default_rng(seed))
    spans = block_spans(geometry, blocks, stop)
    assert spans.nbytes == stop * geometry.token_bytes
    got = np.concatenate(
        [np.zeros(0, np.uint8)]
        + [pool[o : o + n] for o, n in zip(spans.offsets, spans.lengths, strict=True)]
    )
    view = elements(geometry, pool)
    wanted = [
        view[layer, k, blocks[p // geometry.block_tokens], p % geometry.block_tokens].reshape(-1)
        for layer, k, p in itertools.product(range(geometry.layers), range(2), range(stop))
    ]
    assert np.array_equal(got, np.concatenate([np.zeros(0, np.uint8), *wanted]))


@pytest.mark.slow
@pytest.mark.parametrize(("source_tp", "target_tp"), [*itertools.product([1, 2, 4, 8], repeat=2)])
def test_all_ranks_together_rebuild_the_cache(source_tp: int, target_tp: int) -> None:
    # With 8 ranks and 4 heads, two neighbouring ranks hold copies of one head.
    rng = np.random.default_rng(source_tp * 10 + target_tp)
    source_whole, target_whole = TINY, replace(TINY, layout="LKBHTD", block_tokens=8, blocks=4)
    truth = elements(source_whole, random_pool(source_whole, rng))
    source_blocks, target_blocks, tokens = [6, 1, 3], [3, 0], 11
    pools = []
    for rank in range(source_tp):
        part = replace(source_whole, tp_size=source_tp, tp_rank=rank)
        pool = np.zeros(part.pool_nbytes, np.uint8)
        first = part.head_first
        elements(part, pool)[:] = truth[..., first : first + part.heads_local, :, :]
        pools.append((part, pool))
    for rank in range(target_tp):
        target = replace(target_whole, tp_size=target_tp, tp_rank=rank)
        pool = np.zeros(target.pool_nbytes, np.uint8)
        for part, source_pool in pools:
            spans = transfer_spans(part, source_blocks, target, target_blocks, tokens)
            move(*spans, source_pool, pool)
        got, first = elements(target, pool), target.head_first
        for p in range(tokens):
            assert np.array_equal(
                got[:, :, target_blocks[p // 8], p % 8],
                truth[:, :, source_blocks[p // 4], p % 4, first : first + target.heads_local],
            )


def test_ranks_without_a_common_head_move_nothing() -> None:
    a = replace(TINY, tp_size=2, tp_rank=0)
    b = replace(TINY, tp_size=4, tp_rank=2)
    source, target = transfer_spans(a, [0], b, [0], 4)
    assert len(source) == len(target) == 0


def test_same_pools_take_one_span_per_layer_and_block() -> None:
    blocks = np.arange(0, 512, 2)
    source, target = transfer_spans(LLAMA, blocks, LLAMA, blocks + 1, 4096)
    assert len(source) == len(target) == 32 * 2 * 256
    assert set(source.lengths) == {16 * 8 * 128 * 2}


def test_neighbouring_blocks_merge() -> None:
    source, _ = transfer_spans(LLAMA, range(10, 20), LLAMA, range(50, 60), 155)
    assert source.lengths.tolist() == [155 * 8 * 128 * 2] * 64


@pytest.mark.parametrize(
    ("layout", "tokens", "spans", "why"),
    [
        ("LKBHTD", 32, 64 * 2, "whole blocks, heads outside tokens"),
        ("LKBHTD", 31, 64 * (1 + 8), "one part block takes a span per head"),
        ("LBKTHD", 32, 32 * 2, "keys and values of a whole block lie together"),
        ("BLKTHD", 32, 2, "a whole block lies together"),
        ("BLKTHD", 31, 1 + 64, "the part block takes a span per layer and k/v"),
    ],
)
def test_spans_are_the_longest_common_runs(layout: str, tokens: int, spans: int, why: str) -> None:
    pool = replace(LLAMA, layout=layout)
    source, _ = transfer_spans(pool, [5, 9], pool, [7, 3], tokens)
    assert len(source) == spans, why
    assert source.nbytes == tokens * LLAMA.token_bytes


def test_other_block_size_cuts_at_the_edges_of_both() -> None:
    wide = replace(LLAMA, layers=1, block_tokens=24)
    one = replace(LLAMA, layers=1)
    source, _ = transfer_spans(one, [5, 3, 1], wide, [2, 0], 40, 10)
    # Positions 10-16, 16-24, 24-32, 32-40, for keys and for values.
    assert (source.lengths // (8 * 128 * 2)).tolist() == [6, 8, 8, 8] * 2


def test_nothing_to_move() -> None:
    assert len(block_spans(TINY, [], 0)) == 0
    source, target = transfer_spans(TINY, [3], TINY, [4], 3, 3)
    assert len(source) == len(target) == 0
    source, target = transfer_spans(TINY, [], TINY, [], 0)
    assert source.nbytes == target.nbytes == 0


def test_entries_before_the_start_are_not_looked_at() -> None:
    source, target = transfer_spans(TINY, [-1, 5], TINY, [99, 2], 8, 5)
    assert source.nbytes == target.nbytes == 3 * TINY.token_bytes


@pytest.mark.parametrize(
    ("blocks", "tokens", "error", "words"),
    [
        ([0, 8], 8, BoundsError, "block 8 at entry 1 is outside the pool of 8 blocks"),
        ([-1], 1, BoundsError, "block -1 at entry 0"),
        ([2**63 + 5], 1, BoundsError, "block 9223372036854775813"),
        ([0], 5, BoundsError, "1 blocks of 4 tokens do not hold 5 tokens; 2 are needed"),
        ([0], 2**62, BoundsError, "are needed"),
        ([2**70], 1, UsageError, "a flat list of integers"),
        ([0.5], 1, UsageError, "a flat list of integers"),
        (["a"], 1, UsageError, "a flat list of integers"),
        ([[0]], 1, UsageError, "a flat list of integers"),
        ([0], -1, UsageError, "n_tokens -1"),
        ([0], 1.0, UsageError, "n_tokens: an integer is needed, not 1.0"),
        ([0], True, UsageError, "n_tokens: an integer is needed"),
    ],
)
def test_bad_blocks_are_refused(
    blocks: Any, tokens: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        block_spans(TINY, blocks, tokens)


def test_transfer_refuses_what_would_go_wrong() -> None:
    with pytest.raises(UsageError, match="target block 3 is named twice"):
        transfer_spans(TINY, [0, 1], TINY, [3, 3], 8)
    with pytest.raises(UsageError, match="dtype: float16 here, bfloat16 there"):
        transfer_spans(TINY, [0], replace(TINY, dtype="bfloat16"), [0], 1)
    with pytest.raises(BoundsError, match="target block 8 at entry 1"):
        transfer_spans(TINY, [0, 1], TINY, [0, 8], 8, 6)
    with pytest.raises(UsageError, match="start_token: 3 is outside 0 to n_tokens 2"):
        transfer_spans(TINY, [0], TINY, [0], 2, 3)


def test_too_many_spans_are_refused_before_they_are_made() -> None:
    other = replace(LLAMA, layout="LKBHTD")
    blocks = np.arange(256)
    with pytest.raises(UsageError, match="move about 2048 tokens at a time"):
        transfer_spans(LLAMA, blocks, other, blocks, 4096)
    source, _ = transfer_spans(LLAMA, blocks, other, blocks[::-1], 64)
    assert len(source) == 64 * 64 * 8


def test_a_hostile_block_size_costs_nothing() -> None:
    # The peer's numbers are legal, and would need 16 million positions if they were enumerated.
    huge = KVGeometry("m", 1, 2, 1, "int8", 1 << 24, 1)
    other = replace(huge, layout="LKBHTD")
    with pytest.raises(UsageError, match="at a time"):
        transfer_spans(huge, [0], other, [0], 1 << 24)


def test_sizes() -> None:
    rank = replace(LLAMA, tp_size=4, tp_rank=3, layout="LKBHTD")
    assert (rank.heads_local, rank.head_first) == (2, 6)
    assert rank.token_bytes == 32 * 2 * 2 * 128 * 2
    assert rank.block_bytes == 16 * rank.token_bytes
    assert rank.pool_nbytes == 1024 * rank.block_bytes
    assert rank.shape == (32, 2, 1024, 2, 16, 128)
    assert rank.strides_bytes() == {
        "D": 2,
        "T": 256,
        "H": 4096,
        "B": 8192,
        "K": 8192 * 1024,
        "L": 2 * 8192 * 1024,
    }
    assert replace(LLAMA, tp_size=16, tp_rank=5).head_first == 2


def test_fingerprint_covers_what_must_match_and_no_more() -> None:
    reshaped = replace(
        LLAMA, block_tokens=32, blocks=5, layout="BLKTHD", tp_size=2, tp_rank=1, software="x 2"
    )
    assert fingerprint(reshaped) == fingerprint(LLAMA)
    assert compatible(LLAMA, reshaped) == []
    # Fixed for all time: two versions of kvferry must agree on it.
    assert fingerprint(LLAMA) == "173164e30ece9dc2"
    for change, reason in (
        ({"model": "other"}, "model: llama here, other there"),
        ({"layers": 31}, "layers: 32 here, 31 there"),
        ({"kv_heads": 16}, "kv_heads: 8 here, 16 there"),
        ({"head_dim": 64}, "head_dim: 128 here, 64 there"),
        ({"dtype": "float16"}, "dtype: bfloat16 here, float16 there"),
    ):
        changed = replace(LLAMA, **change)
        assert fingerprint(changed) != fingerprint(LLAMA)
        assert compatible(LLAMA, changed) == [reason]


def test_wire_round_trip() -> None:
    geometry = replace(LLAMA, tp_size=2, tp_rank=1, software="engine 1.2")
    message = json.loads(json.dumps(to_wire(geometry)))
    assert from_wire(message) == geometry
    assert from_wire({**message, "new_in_a_later_version": 1}) == geometry
    for key in ("tp_size", "tp_rank", "software"):
        del message[key]
    assert from_wire(message) == LLAMA


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[(key, 0) for key in ("layers", "kv_heads", "head_dim", "block_tokens", "blocks")],
        *[
            (key, bad)
            for key in ("layers", "blocks", "tp_size", "tp_rank")
            for bad in (-1, 2**31 * 3, 2**63, 1 << 5000, 1.5, True, "8", None, [1], {})
        ],
        *[(key, 7) for key in ("model", "dtype", "layout", "software")],
        ("model", ""),
        ("model", "m" * 257),
        ("model", "line\nbreak"),
        ("software", "s" * 129),
        ("software", "\x1b[2J"),
        ("dtype", "float17"),
        ("layout", "LKBTHH"),
        ("layout", "LKBTH"),
        ("layout", ["L", "K", "B", "T", "H", "D"]),
        ("tp_rank", 1),
        ("tp_size", 3),
        ("blocks", POOL_BYTES_MAX // LLAMA.block_bytes + 1),
    ],
)
def test_hostile_geometry_is_refused_by_key(key: str, value: object) -> None:
    with pytest.raises(ProtocolError, match=key) as caught:
        from_wire({**to_wire(LLAMA), key: value})
    assert len(str(caught.value)) < 200


def test_malformed_geometry_is_refused() -> None:
    message = to_wire(LLAMA)
    del message["blocks"]
    with pytest.raises(ProtocolError, match="blocks is missing"):
        from_wire(message)
    with pytest.raises(ProtocolError, match="a map is needed, not list"):
        from_wire([message])
    with pytest.raises(ProtocolError, match="at most 64"):
        from_wire({**to_wire(LLAMA), **{f"k{i}": i for i in range(64)}})
    with pytest.raises(UsageError, match="layers: 0 is outside"):
        replace(LLAMA, layers=0)
