"""The forward pass of a Llama-like model over a paged KV cache, in float32 on numpy.

One call advances many sequences by any number of tokens each. What a sequence gets, its logits
and the keys and values written for it, is a function of its own tokens and its own cache, bit
for bit: not of the other sequences in the call, of how its prompt was cut into chunks, of the
block size or of which blocks it owns. Generating in one process and handing the cache over to
another in the middle therefore give the same tokens. ``rows`` and ``attention`` say how.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvferry.engines.reference.attention import AttentionPass, Span, query_row_tile
from kvferry.engines.reference.config import ModelConfig
from kvferry.engines.reference.kvcache import PagedKV
from kvferry.engines.reference.rows import Floats, RowProducts
from kvferry.errors import UsageError

PREFILL_CHUNK_TOKENS = 128
"""Most tokens of one prompt in one call. Larger chunks work and only hold up the others."""


@dataclass(frozen=True)
class LayerWeights:
    """Weights of one layer; each matrix is float32[outputs, inputs], C-contiguous.

    qkv: queries, keys and values below one another, for rotary pairs (i, i + head_dim / 2).
    gate_up: the gate's rows, then the up-projection's.
    """

    attention_norm: Floats
    qkv: Floats
    output: Floats
    mlp_norm: Floats
    gate_up: Floats
    down: Floats


@dataclass(frozen=True)
class Weights:
    """All weights. ``head`` is the same array as ``embedding`` where the two are tied."""

    embedding: Floats
    layers: tuple[LayerWeights, ...]
    norm: Floats
    head: Floats


@dataclass
class Chunk:
    """New tokens of one sequence.

    tokens: int64[n], n of 1 or more.
    start: position of ``tokens[0]``; keys and values of all earlier positions are in the cache.
    blocks: int64[m], the sequence's block table; it covers ``start + n`` positions.
    """

    tokens: npt.NDArray[np.int64]
    start: int
    blocks: npt.NDArray[np.int64]


class Model:
    """Weights with the arithmetic to run them. Holds no sequence state; that is all in PagedKV.

    Construction multiplies a few small matrices to find out which tiles this BLAS computes
    row-independently. ``forward`` may be called by one thread at a time.
    """

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self._weights = weights
        self._products = RowProducts()
        for layer in weights.layers:
            for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down):
                self._products.prove(matrix)
        self._products.prove(weights.head, wide=False)
        self._query_row_tile = query_row_tile(config.head_dim)
        self._cosines, self._sines = _rotary_table(config)

    def forward(self, kv: PagedKV, chunks: Sequence[Chunk]) -> Floats:
        """Run the chunks, write their keys and values, return logits. Blocks until done.

        Returns float32[len(chunks), vocab_size]: the logits after the last token of each chunk.
        Two chunks may share blocks, but not the positions that they write.

        Raises UsageError, before anything is written, when a chunk is empty, reaches past
        ``max_tokens``, holds a token outside the vocabulary, or has a block table that is too
        short or names a block that ``kv`` does not have.
        """
        for index, chunk in enumerate(chunks):
            self._check(kv, index, chunk)
        if not chunks:
            return np.zeros((0, self.config.vocab_size), dtype=np.float32)
        batch = _Batch.of(kv, chunks)
        passes = [
            AttentionPass(self.config, kv, spans, row_tile=self._query_row_tile)
            for spans in _together(batch.spans)
        ]
        cosines = self._cosines[batch.positions][:, None]
        sines = self._sines[batch.positions][:, None]
        eps = self.config.norm_eps
        x = self._weights.embedding[batch.tokens]
        for index, layer in enumerate(self._weights.layers):
            mixed = self._attend(index, layer, x, kv, batch, passes, cosines, sines)
            x += self._products.multiply(mixed, layer.output)
            x += self._mlp(layer, _normed(x, layer.mlp_norm, eps))
        last = _normed(x[batch.last_rows], self._weights.norm, eps)
        return self._products.multiply(last, self._weights.head)

    def _attend(
        self,
        index: int,
        layer: LayerWeights,
        x: Floats,
        kv: PagedKV,
        batch: _Batch,
        passes: Sequence[AttentionPass],
        cosines: Floats,
        sines: Floats,
    ) -> Floats:
        config = self.config
        rows = len(x)
        qkv = self._products.multiply(_normed(x, layer.attention_norm, config.norm_eps), layer.qkv)
        heads = qkv.reshape(rows, -1, config.head_dim)
        rotated = _rotated(heads[:, : config.heads + config.kv_heads], cosines, sines)
        for half, new in (
            (0, rotated[:, config.heads :]),
            (1, heads[:, config.heads + config.kv_heads :]),
        ):
            kv.data[index, half].reshape(-1, config.kv_heads, config.head_dim)[batch.slots] = new
        queries = rotated[:, : config.heads] * np.float32(config.head_dim**-0.5)
        mixed = np.empty((rows, config.heads * config.head_dim), dtype=np.float32)
        for attention in passes:
            attention.attend(index, kv, queries, mixed)
        return mixed

    def _mlp(self, layer: LayerWeights, x: Floats) -> Floats:
        gate, up = np.split(self._products.multiply(x, layer.gate_up), 2, axis=1)
        # exp overflows to infinity for very negative gates, and the quotient is then a right 0.
        with np.errstate(over="ignore"):
            hidden = np.divide(gate, np.exp(-gate) + 1, dtype=np.float32)
        hidden *= up
        return self._products.multiply(hidden, layer.down)

    def _check(self, kv: PagedKV, index: int, chunk: Chunk) -> None:
        stop = chunk.start + len(chunk.tokens)
        if not len(chunk.tokens) or chunk.start < 0:
            raise UsageError(
                f"chunk {index} has {len(chunk.tokens)} tokens from position {chunk.start}; "
                "it needs 1 or more, from position 0 or later"
            )
        if stop > self.config.max_tokens:
            raise UsageError(
                f"chunk {index} reaches position {stop}, "
                f"the context limit of {self.config.name!r} is {self.config.max_tokens}"
            )
        if not 0 <= chunk.tokens.min() <= chunk.tokens.max() < self.config.vocab_size:
            raise UsageError(
                f"chunk {index} holds token ids from {chunk.tokens.min()} to "
                f"{chunk.tokens.max()}, the vocabulary has {self.config.vocab_size}"
            )
        if len(chunk.blocks) * kv.block_tokens < stop:
            raise UsageError(
                f"chunk {index} has {len(chunk.blocks)} blocks of {kv.block_tokens} tokens, "
                f"too few for {stop} positions"
            )
        if not 0 <= chunk.blocks.min() <= chunk.blocks.max() < kv.blocks:
            raise UsageError(
                f"chunk {index} names blocks from {chunk.blocks.min()} to {chunk.blocks.max()}, "
                f"the cache has {kv.blocks}"
            )


@dataclass(frozen=True)
class _Batch:
    """The rows of one call: all new tokens of all chunks, one after the other."""

    tokens: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    last_rows: npt.NDArray[np.int64]
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, kv: PagedKV, chunks: Sequence[Chunk]) -> _Batch:
        positions = [np.arange(chunk.start, chunk.start + len(chunk.tokens)) for chunk in chunks]
        slots = [
            chunk.blocks[at // kv.block_tokens] * kv.block_tokens + at % kv.block_tokens
            for chunk, at in zip(chunks, positions, strict=True)
        ]
        ends = np.cumsum([len(chunk.tokens) for chunk in chunks])
        spans = tuple(
            Span(
                row=int(end) - len(chunk.tokens),
                tokens=len(chunk.tokens),
                start=chunk.start,
                blocks=chunk.blocks,
            )
            for chunk, end in zip(chunks, ends, strict=True)
        )
        return cls(
            tokens=np.concatenate([chunk.tokens for chunk in chunks]),
            positions=np.concatenate(positions),
            slots=np.concatenate(slots),
            last_rows=ends - 1,
            spans=spans,
        )


def _together(spans: Sequence[Span]) -> Iterator[Sequence[Span]]:
    """Spans that one attention pass takes: all of one token, then each longer one alone."""
    single = [span for span in spans if span.tokens == 1]
    if single:
        yield single
    yield from ([span] for span in spans if span.tokens > 1)


def _normed(x: Floats, weight: Floats, eps: float) -> Floats:
    mean_square = np.square(x).mean(axis=-1, keepdims=True)
    normed: Floats = x / np.sqrt(mean_square + np.float32(eps)) * weight
    return normed


def _rotated(heads: Floats, cosines: Floats, sines: Floats) -> Floats:
    """Rotate float32[rows, heads, head_dim] by float32[rows, 1, head_dim / 2] tables."""
    low, high = np.split(heads, 2, axis=-1)
    return np.concatenate((low * cosines - high * sines, high * cosines + low * sines), axis=-1)


def _rotary_table(config: ModelConfig) -> tuple[Floats, Floats]:
    half = config.head_dim // 2
    rates = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half)
    angles = np.arange(config.max_tokens, dtype=np.float64)[:, None] * rates
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
