"""KV geometry: where each layer, head and token of a paged KV pool lies, as byte spans. Pure.

A pool is one region that holds, for a fixed number of blocks, the keys and values of
``block_tokens`` tokens each. Six axes address an element, named by a letter each:

====  ==========================================
axis  meaning
====  ==========================================
L     layer
K     0 for keys, 1 for values
B     block
T     token inside the block
H     KV head, of those that this rank owns
D     element inside the head
====  ==========================================

A layout is their order in memory, outermost first; nothing lies between the elements. Everything
here follows from the strides that the order gives, so no layout has code of its own. Two pools
need not agree on order, block size or tensor-parallel degree: :func:`transfer_spans` pairs the
bytes by absolute token position.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from kvferry.errors import BoundsError, ProtocolError, UsageError
from kvferry.regions import I64, SPANS_MAX, Spans, coalesce

AXES = "LKBTHD"

ITEM_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of one element by dtype name. Names are compared as they are: two FP8 kinds differ."""

POOL_BYTES_MAX = 1 << 60
"""Largest pool. With it every offset and every sum of two offsets fits an int64."""

_RANGES: Mapping[str, tuple[int, int]] = {
    "layers": (1, 1 << 16),
    "kv_heads": (1, 1 << 16),
    "head_dim": (1, 1 << 20),
    "block_tokens": (1, 1 << 24),
    "blocks": (1, 1 << 32),
    "tp_size": (1, 1 << 16),
    "tp_rank": (0, (1 << 16) - 1),
}
_TEXT_MAX: Mapping[str, int] = {"model": 256, "dtype": 32, "layout": 6, "software": 128}
_WIRE_KEYS_MAX = 64
_MUST_MATCH = ("model", "layers", "kv_heads", "head_dim", "dtype")


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Shape of one rank's KV pool.

    model: name or fingerprint of the weights, 1 to 256 printable characters.
    layers, kv_heads, head_dim: of the whole model; ``kv_heads`` before it is split over ranks.
    dtype: a key of :data:`ITEM_BYTES`.
    block_tokens: tokens in one block.
    blocks: blocks in the pool.
    layout: the six letters of :data:`AXES`, outermost first, such as ``"LKBTHD"``.
    tp_size, tp_rank: ranks that share the heads, and which one this is. Either divides the
        other: with more ranks than heads, neighbouring ranks hold copies of one head.
    software: engine and version, for messages only; 0 to 128 printable characters.

    Raises UsageError, naming the field, for a value out of range, a wrong type, or a pool of
    more than :data:`POOL_BYTES_MAX` bytes.
    """

    model: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int
    blocks: int
    layout: str = AXES
    tp_size: int = 1
    tp_rank: int = 0
    software: str = ""

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if type(value) is not int:
                raise UsageError(f"{name}: an integer is needed, not {_shown(value)}")
            if not low <= value <= high:
                raise UsageError(f"{name}: {_shown(value)} is outside {low} to {high}")
        for name, chars_max in _TEXT_MAX.items():
            _check_text(name, getattr(self, name), chars_max)
        if self.dtype not in ITEM_BYTES:
            raise UsageError(f"dtype: {self.dtype} is not one of {', '.join(ITEM_BYTES)}")
        if sorted(self.layout) != sorted(AXES):
            raise UsageError(f"layout: {self.layout} does not name each of {AXES} once")
        if self.tp_rank >= self.tp_size:
            raise UsageError(f"tp_rank: {self.tp_rank} is not below tp_size {self.tp_size}")
        if self.kv_heads % self.tp_size and self.tp_size % self.kv_heads:
            raise UsageError(f"tp_size: {self.tp_size} does not split {self.kv_heads} kv_heads")
        if self.pool_nbytes > POOL_BYTES_MAX:
            raise UsageError(f"blocks: the pool would have {self.pool_nbytes} bytes")

    @property
    def heads_local(self) -> int:
        """KV heads that this rank holds, at least 1."""
        return max(1, self.kv_heads // self.tp_size)

    @property
    def head_first(self) -> int:
        """Index in the whole model of the first head that this rank holds."""
        return self.tp_rank * self.kv_heads // self.tp_size

    @property
    def token_bytes(self) -> int:
        """Bytes of one token on this rank: all layers, keys and values."""
        item_bytes = ITEM_BYTES[self.dtype]
        return self.layers * 2 * self.heads_local * self.head_dim * item_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block on this rank, over all layers; they need not be contiguous."""
        return self.block_tokens * self.token_bytes

    @property
    def pool_nbytes(self) -> int:
        """Bytes of the whole pool of this rank."""
        return self.blocks * self.block_bytes

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of each axis, in the order of ``layout``; what a numpy view would have."""
        sizes = self._sizes()
        return tuple(sizes[axis] for axis in self.layout)

    def strides_bytes(self) -> dict[str, int]:
        """Bytes from one index to the next, per axis letter."""
        sizes, strides, step = self._sizes(), {}, ITEM_BYTES[self.dtype]
        for axis in reversed(self.layout):
            strides[axis] = step
            step *= sizes[axis]
        return strides

    def _sizes(self) -> dict[str, int]:
        return {
            "L": self.layers,
            "K": 2,
            "B": self.blocks,
            "T": self.block_tokens,
            "H": self.heads_local,
            "D": self.head_dim,
        }


def fingerprint(geometry: KVGeometry) -> str:
    """16 hex digits over what two pools must have in common; the same in every process.

    Block size, number of blocks, layout, tensor-parallel degree and software are left out: KV is
    reshaped across those.
    """
    facts = json.dumps([getattr(geometry, name) for name in _MUST_MATCH])
    return hashlib.sha256(facts.encode()).hexdigest()[:16]


def compatible(local: KVGeometry, remote: KVGeometry) -> list[str]:
    """Why KV cannot move between the two pools; empty when it can.

    Each reason is the field with both values, such as
    ``"dtype: bfloat16 here, float16 there"``.
    """
    return [
        f"{name}: {getattr(local, name)} here, {getattr(remote, name)} there"
        for name in _MUST_MATCH
        if getattr(local, name) != getattr(remote, name)
    ]


def to_wire(geometry: KVGeometry) -> dict[str, Any]:
    """The geometry as strings and integers only, for JSON or msgpack."""
    return asdict(geometry)


def from_wire(message: object) -> KVGeometry:
    """A geometry from what a peer sent, checked in full.

    Keys that this version does not know are ignored, so that a newer peer may add some; the last
    three fields may be missing. Raises ProtocolError, naming the key, for anything else.
    """
    if not isinstance(message, Mapping):
        raise ProtocolError(f"geometry: a map is needed, not {_shown(message)}")
    if len(message) > _WIRE_KEYS_MAX:
        raise ProtocolError(f"geometry: {len(message)} keys; at most {_WIRE_KEYS_MAX} are allowed")
    optional = ("tp_size", "tp_rank", "software")
    known = {}
    for field in fields(KVGeometry):
        if field.name in message:
            known[field.name] = message[field.name]
        elif field.name not in optional:
            raise ProtocolError(f"geometry: {field.name} is missing")
    try:
        return KVGeometry(**known)
    except UsageError as error:
        raise ProtocolError(f"geometry: {error.message}") from error


def check_blocks(geometry: KVGeometry, blocks: Any, n_tokens: int) -> I64:
    """The entries of a block table that hold the first ``n_tokens`` tokens, checked.

    Raises BoundsError for a block out of range or too few blocks, UsageError for wrong types.
    """
    _check_tokens(n_tokens, 0)
    return _table(geometry, blocks, 0, n_tokens, "")


def block_spans(geometry: KVGeometry, blocks: Any, n_tokens: int) -> Spans:
    """Where the KV of the first ``n_tokens`` tokens lies in the pool, whole tokens only.

    blocks: block number of each ``block_tokens`` tokens, integers of shape [n]; entries after the
        last token are ignored.
    n_tokens: 0 to ``n * block_tokens``.

    Bytes come in the order layer, keys then values, token, head, element, whatever the layout:
    read in this order, two pools of the same heads and dtype give the same bytes. That order
    costs short spans where heads lie outside tokens; to move KV use :func:`transfer_spans`.

    Raises BoundsError for a block out of range or too few blocks, UsageError for wrong types or
    more than SPANS_MAX spans.
    """
    _check_tokens(n_tokens, 0)
    table = _table(geometry, blocks, 0, n_tokens, "")
    if n_tokens == 0:
        return Spans.of([], [])
    # A contiguous buffer in that order is itself a pool of one block.
    buffer = replace(geometry, layout=AXES, block_tokens=n_tokens, blocks=1)
    here, _ = _paired(geometry, table, buffer, np.zeros(1, np.int64), 0, n_tokens)
    return here


def transfer_spans(
    source: KVGeometry,
    source_blocks: Any,
    target: KVGeometry,
    target_blocks: Any,
    n_tokens: int,
    start_token: int = 0,
) -> tuple[Spans, Spans]:
    """Spans that carry the KV of positions ``start_token`` to ``n_tokens - 1`` between two pools.

    source_blocks, target_blocks: block number of each ``block_tokens`` positions counted from
        position 0, integers of shape [n]. Only entries that hold a wanted position are looked at.

    Returns (source spans, target spans): equally many, and equal in bytes entry by entry, in no
    promised order. Only the heads that both ranks own are covered, so both lists may be empty.
    Each span is the longest run that is contiguous in both pools.

    Raises UsageError when the pools are not :func:`compatible`, for wrong types, for a target
    block named twice, and for more than SPANS_MAX spans; BoundsError for a block out of range or
    too few blocks.
    """
    reasons = compatible(source, target)
    if reasons:
        raise UsageError(f"these pools hold different KV: {'; '.join(reasons)}")
    _check_tokens(n_tokens, start_token)
    source_table = _table(source, source_blocks, start_token, n_tokens, "source ")
    target_table = _table(target, target_blocks, start_token, n_tokens, "target ")
    used = np.sort(target_table[start_token // target.block_tokens :])
    twice = used[1:][used[1:] == used[:-1]]
    if twice.size:
        raise UsageError(f"target block {twice[0]} is named twice; its bytes would be undefined")
    if start_token == n_tokens:
        return Spans.of([], []), Spans.of([], [])
    return _paired(source, source_table, target, target_table, start_token, n_tokens)


@dataclass(frozen=True, slots=True)
class _Side:
    """One pool in a pairing. base: byte offset of the first shared head. table: its blocks."""

    geometry: KVGeometry
    table: I64
    strides: dict[str, int]
    base: int

    @classmethod
    def of(cls, geometry: KVGeometry, table: I64, head_first: int) -> _Side:
        strides = geometry.strides_bytes()
        return cls(geometry, table, strides, (head_first - geometry.head_first) * strides["H"])

    def offsets(self, order: list[str], counts: dict[str, int], positions: I64) -> I64:
        """Byte offsets of the product of the axes in ``order``; B stands for ``positions``."""
        tokens = self.geometry.block_tokens
        total = np.array(self.base, dtype=np.int64)
        for axis in order:
            if axis == "B":
                step = self.table[positions // tokens] * self.strides["B"]
                step += positions % tokens * self.strides["T"]
            else:
                step = np.arange(counts[axis], dtype=np.int64) * self.strides[axis]
            total = np.add.outer(total, step)
        return total.reshape(-1)


def _paired(
    source: KVGeometry,
    source_table: I64,
    target: KVGeometry,
    target_table: I64,
    start: int,
    stop: int,
) -> tuple[Spans, Spans]:
    """The work of :func:`transfer_spans` on checked arguments with ``start < stop``."""
    head_first = max(source.head_first, target.head_first)
    head_stop = min(source.head_first + source.heads_local, target.head_first + target.heads_local)
    if head_stop <= head_first:
        return Spans.of([], []), Spans.of([], [])
    sides = _Side.of(source, source_table, head_first), _Side.of(target, target_table, head_first)
    counts = {"L": source.layers, "K": 2, "H": head_stop - head_first, "D": source.head_dim}

    merged, token_bytes = _run(sides, counts, 0)
    if "T" not in merged:
        _check_count(counts, merged, stop - start, stop - start)
        return _product(sides, merged, counts, np.arange(start, stop), token_bytes)
    begin, size = _segments(start, stop, source.block_tokens, target.block_tokens)
    whole = (size == source.block_tokens) & (size == target.block_tokens)
    merged_whole, block_bytes = merged, token_bytes
    if whole.any():
        # A whole block may be one run over heads, k/v and layers too; a part of one may not.
        merged_whole, block_bytes = _run(sides, counts, source.block_tokens)
    if merged_whole == merged:
        _check_count(counts, merged, begin.size, stop - start)
        return _product(sides, merged, counts, begin, size * token_bytes)
    _check_count(counts, merged_whole, begin.size, stop - start)
    found = [_product(sides, merged_whole, counts, begin[whole], block_bytes)]
    if not whole.all():
        begin, size = begin[~whole], size[~whole]
        _check_count(counts, merged, begin.size, stop - start)
        found.append(_product(sides, merged, counts, begin, size * token_bytes))
    return _joined([pair[0] for pair in found]), _joined([pair[1] for pair in found])


def _run(sides: tuple[_Side, _Side], counts: dict[str, int], tokens: int) -> tuple[set[str], int]:
    """Axes that form one contiguous run in both pools, and the bytes of that run.

    tokens: block size of both when a whole block is taken. With 0 the number of tokens varies:
    the run ends at T, and the bytes are those of one token.
    """
    a, b = sides[0].strides, sides[1].strides
    run = ITEM_BYTES[sides[0].geometry.dtype]
    merged: set[str] = set()
    while True:
        # Strides that equal the run so far, on both sides, are what contiguous means. That also
        # holds after an axis of which only some heads are shared: the next stride is then larger.
        axis = next((x for x in "DHTKL" if x not in merged and a[x] == b[x] == run), "")
        if not axis:
            return merged, run
        merged.add(axis)
        if axis == "T" and not tokens:
            return merged, run
        run *= tokens if axis == "T" else counts[axis]


def _segments(start: int, stop: int, source_tokens: int, target_tokens: int) -> tuple[I64, I64]:
    """Positions cut at the block edges of both pools: first position and size of each piece."""
    small, large = sorted((source_tokens, target_tokens))
    edges = np.arange(start // small + 1, -(-stop // small), dtype=np.int64) * small
    if large % small:
        more = np.arange(start // large + 1, -(-stop // large), dtype=np.int64) * large
        edges = np.union1d(edges, more)
    begin = np.concatenate(([start], edges))
    return begin, np.diff(begin, append=stop)


def _product(
    sides: tuple[_Side, _Side],
    merged: set[str],
    counts: dict[str, int],
    positions: I64,
    lengths: I64 | int,
) -> tuple[Spans, Spans]:
    """One span per position and per index of each axis outside the run, neighbours merged.

    lengths: bytes of the span of each position, or one number for all.
    """
    # The target's order keeps its writes ascending, and lets neighbouring blocks merge.
    order = [axis for axis in sides[1].geometry.layout if axis not in merged and axis != "T"]
    a, b = (side.offsets(order, counts, positions) for side in sides)
    shape = [positions.size if axis == "B" else counts[axis] for axis in order]
    if isinstance(lengths, np.ndarray):
        lengths = lengths.reshape([-1 if axis == "B" else 1 for axis in order])
    size = np.broadcast_to(np.asarray(lengths, dtype=np.int64), shape).reshape(-1)
    a, b, size = coalesce(a, b, size)
    return Spans(a, size), Spans(b, size)


def _joined(parts: list[Spans]) -> Spans:
    if len(parts) == 1:
        return parts[0]
    return Spans(
        np.concatenate([part.offsets for part in parts]),
        np.concatenate([part.lengths for part in parts]),
    )


def _table(geometry: KVGeometry, blocks: Any, start: int, stop: int, whose: str) -> I64:
    """Block numbers that hold ``start`` to ``stop``, checked; earlier entries may be anything."""
    array = np.asarray(blocks)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UsageError(f"{whose}blocks: a flat list of integers is needed")
    needed = -(-stop // geometry.block_tokens)
    if array.size < needed:
        raise BoundsError(
            f"{array.size} {whose}blocks of {geometry.block_tokens} tokens do not hold "
            f"{stop} tokens; {needed} are needed"
        )
    first = start // geometry.block_tokens
    used = array[first:needed]
    bad = (used < 0) | (used >= geometry.blocks)
    if bad.any():
        i = int(bad.argmax())
        raise BoundsError(
            f"{whose}block {used[i]} at entry {first + i} is outside the pool of "
            f"{geometry.blocks} blocks"
        )
    return array[:needed].astype(np.int64)


def _check_tokens(n_tokens: int, start_token: int) -> None:
    for name, value in (("n_tokens", n_tokens), ("start_token", start_token)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise UsageError(f"{name}: an integer is needed, not {_shown(value)}")
    if not 0 <= start_token <= n_tokens:
        raise UsageError(f"start_token: {start_token} is outside 0 to n_tokens {n_tokens}")


def _check_count(counts: dict[str, int], merged: set[str], pieces: int, tokens: int) -> None:
    """Refuse a list that is too long before any of it is made."""
    total = pieces * math.prod(count for axis, count in counts.items() if axis not in merged)
    if total > SPANS_MAX:
        raise UsageError(
            f"{tokens} tokens need {total} spans in these two layouts; at most {SPANS_MAX} are "
            "allowed",
            fix=f"move about {max(1, tokens * SPANS_MAX // total)} tokens at a time",
        )


def _check_text(name: str, value: object, chars_max: int) -> None:
    if type(value) is not str:
        raise UsageError(f"{name}: text is needed, not {_shown(value)}")
    if len(value) > chars_max or (not value and name != "software"):
        raise UsageError(f"{name}: 1 to {chars_max} characters are needed, not {len(value)}")
    if not value.isprintable():
        raise UsageError(f"{name}: {_shown(value)} has characters that cannot be printed")


def _shown(value: object) -> str:
    """A value for a message. Bounded: a peer may have sent it, and numbers can be huge."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (int, float, type(None))):
        return repr(value)
    if isinstance(value, str):
        return repr(value[:40])
    return type(value).__name__
