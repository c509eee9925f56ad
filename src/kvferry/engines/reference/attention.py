"""Attention over the paged cache, by arithmetic that depends on the query's own context alone.

Keys are visited in tiles of ``KEY_TILE_TOKENS`` positions, counted from position 0, and the
partial sums of the tiles are added in order of position. So a query gives the same bits
whatever block size the cache has, whichever blocks the sequence owns, however the prompt was
cut into chunks, and whatever other sequences are attended at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.engines.reference.config import ModelConfig
from kvferry.engines.reference.kvcache import PagedKV
from kvferry.engines.reference.rows import ROW_TILE, Floats, is_order_free

KEY_TILE_TOKENS = 64

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Span:
    """New positions of one sequence: ``tokens`` of them from ``start``, at row ``row``."""

    row: int
    tokens: int
    start: int
    blocks: Indices


def query_row_tile(head_dim: int) -> int:
    """Query rows per product: ``ROW_TILE`` where this BLAS treats all rows alike, else 1."""
    rng = np.random.default_rng(head_dim)
    keys = rng.standard_normal((KEY_TILE_TOKENS, head_dim), dtype=np.float32)
    alike = is_order_free(lambda q: np.matmul(q, keys.T), head_dim) and is_order_free(
        lambda p: np.matmul(p, keys), KEY_TILE_TOKENS
    )
    return ROW_TILE if alike else 1


class AttentionPass:
    """Attention of one set of spans in one forward call: the index arithmetic of all layers.

    spans: either any number of one-token spans, or a single span of any length. They are
        handled in one go, without padding short sequences to the length of long ones.
    row_tile: result of ``query_row_tile``.

    Work is cut into items, one per (sequence, key tile), sorted by tile and then by sequence
    with the longest first. The sequences that still have keys at tile j are then the first
    ``counts[j]`` ones, and adding up is a loop over tiles of whole-array operations.
    """

    def __init__(
        self, config: ModelConfig, kv: PagedKV, spans: Sequence[Span], *, row_tile: int
    ) -> None:
        spans = sorted(spans, key=lambda span: -(span.start + span.tokens))
        self._config = config
        self._row_tile = row_tile
        self._tokens = spans[0].tokens
        lengths = [span.start + span.tokens for span in spans]
        tiles = [-(-length // KEY_TILE_TOKENS) for length in lengths]
        self._counts = [sum(count > tile for count in tiles) for tile in range(tiles[0])]
        self._offsets = [sum(self._counts[:tile]) for tile in range(tiles[0])]
        self._owners = np.concatenate([np.arange(count) for count in self._counts])
        self._item_tiles = np.repeat(np.arange(tiles[0]), self._counts)
        self._rows = np.array([span.row for span in spans])[:, None] + np.arange(self._tokens)
        # In its last tile a sequence has this many valid positions; what the cache holds behind
        # them may be anything, even NaN, and is overwritten with zeros after the gather.
        self._tails = [
            (self._offsets[tile - 1] + index, length - (tile - 1) * KEY_TILE_TOKENS)
            for index, (tile, length) in enumerate(zip(tiles, lengths, strict=True))
            if length % KEY_TILE_TOKENS
        ]
        self._unit_tokens = math.gcd(KEY_TILE_TOKENS, kv.block_tokens)
        self._units = self._gather_units(kv.block_tokens, spans, lengths)
        shape = (len(self._owners), KEY_TILE_TOKENS, config.kv_heads, config.head_dim)
        self._keys = np.empty(shape, dtype=np.float32)
        self._values = np.empty(shape, dtype=np.float32)
        self._mask_items(spans)

    def _gather_units(
        self, block_tokens: int, spans: Sequence[Span], lengths: Sequence[int]
    ) -> Indices:
        """Which unit of the cache goes where in the gathered tiles: int64[items * units]."""
        unit = self._unit_tokens
        units = np.zeros((len(self._owners), KEY_TILE_TOKENS // unit), dtype=np.int64)
        for index, (span, length) in enumerate(zip(spans, lengths, strict=True)):
            first = np.arange(0, length, unit)
            found = span.blocks[first // block_tokens] * (block_tokens // unit)
            found += first % block_tokens // unit
            per_tile = np.zeros(-(-length // KEY_TILE_TOKENS) * units.shape[1], dtype=np.int64)
            per_tile[: len(found)] = found
            units[self._owners == index] = per_tile.reshape(-1, units.shape[1])
        return units.reshape(-1)

    def _mask_items(self, spans: Sequence[Span]) -> None:
        """Mark the keys that a query must not see. Tiles before every start need no mask."""
        group = self._config.heads // self._config.kv_heads
        used = self._tokens * group
        padded = -(-used // self._row_tile) * self._row_tile
        positions = np.zeros((len(spans), padded), dtype=np.int64)
        for index, span in enumerate(spans):
            positions[index, :used] = span.start + np.arange(self._tokens).repeat(group)
        first_tile = min(span.start for span in spans) // KEY_TILE_TOKENS
        self._masked_from = self._offsets[first_tile]
        tiles = self._item_tiles[self._masked_from :]
        keys = tiles[:, None] * KEY_TILE_TOKENS + np.arange(KEY_TILE_TOKENS)
        hidden = keys[:, None, :] > positions[self._owners[self._masked_from :]][:, :, None]
        self._hidden = hidden.reshape(len(tiles), 1, -1, self._row_tile, KEY_TILE_TOKENS)
        self._query_rows = padded

    def attend(self, layer: int, kv: PagedKV, queries: Floats, out: Floats) -> None:
        """Attend from the rows of these spans and write the result into the same rows of out.

        queries: float32[rows, heads, head_dim], rotated and scaled.
        out: float32[rows, heads * head_dim].
        The keys and values of the new positions are in the cache already.
        """
        self._gather(kv.data[layer, 0], self._keys)
        self._gather(kv.data[layer, 1], self._values)
        grouped = self._group(queries)
        # One sequence broadcasts over all items; several are matched to their items by index.
        owners = slice(None) if len(self._rows) == 1 else self._owners
        scores = np.matmul(grouped[owners], self._keys.transpose(0, 2, 3, 1)[:, :, None])
        np.copyto(scores[self._masked_from :], -np.inf, where=self._hidden)

        tile_highs = scores.max(axis=-1)
        high = np.full(grouped.shape[:-1], -np.inf, dtype=np.float32)
        for count, at in zip(self._counts, self._offsets, strict=True):
            np.maximum(high[:count], tile_highs[at : at + count], out=high[:count])
        scores -= high[owners][..., None]
        np.exp(scores, out=scores)

        tile_weights = scores.sum(axis=-1)
        tile_sums = np.matmul(scores, self._values.transpose(0, 2, 1, 3)[:, :, None])
        weights = np.zeros_like(high)
        sums = np.zeros_like(grouped)
        for count, at in zip(self._counts, self._offsets, strict=True):
            weights[:count] += tile_weights[at : at + count]
            sums[:count] += tile_sums[at : at + count]
        sums /= weights[..., None]
        self._ungroup(sums, out)

    def _gather(self, source: Floats, target: Floats) -> None:
        """Copy the positions of all items out of float32[blocks, block_tokens, ...]."""
        unit_elements = self._unit_tokens * source.shape[2] * source.shape[3]
        np.take(
            source.reshape(-1, unit_elements),
            self._units,
            axis=0,
            out=target.reshape(-1, unit_elements),
            mode="clip",
        )
        for item, valid in self._tails:
            target[item, valid:] = 0.0

    def _group(self, queries: Floats) -> Floats:
        """float32[sequences, kv_heads, row tiles, row_tile, head_dim], zero-padded."""
        config = self._config
        group = config.heads // config.kv_heads
        sequences = len(self._rows)
        grouped = np.zeros(
            (sequences, config.kv_heads, self._query_rows, config.head_dim), dtype=np.float32
        )
        picked = queries[self._rows].reshape(
            sequences, self._tokens, config.kv_heads, group, config.head_dim
        )
        grouped[:, :, : self._tokens * group] = picked.transpose(0, 2, 1, 3, 4).reshape(
            sequences, config.kv_heads, self._tokens * group, config.head_dim
        )
        return grouped.reshape(sequences, config.kv_heads, -1, self._row_tile, config.head_dim)

    def _ungroup(self, sums: Floats, out: Floats) -> None:
        config = self._config
        group = config.heads // config.kv_heads
        sequences = len(self._rows)
        flat = sums.reshape(sequences, config.kv_heads, self._query_rows, config.head_dim)
        used = flat[:, :, : self._tokens * group].reshape(
            sequences, config.kv_heads, self._tokens, group, config.head_dim
        )
        out[self._rows] = used.transpose(0, 2, 1, 3, 4).reshape(sequences, self._tokens, -1)
