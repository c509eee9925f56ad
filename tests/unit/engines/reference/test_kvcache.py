from __future__ import annotations

import numpy as np
import pytest

from kvferry.engines.reference.config import ModelConfig
from kvferry.engines.reference.kvcache import PagedKV
from kvferry.engines.reference.weights import load
from kvferry.errors import UsageError


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return load("tiny")[0]


def test_data_is_a_view_of_the_buffer_in_the_documented_order(config: ModelConfig) -> None:
    buffer = np.zeros(PagedKV.nbytes(config, 4, 5), dtype=np.uint8)
    kv = PagedKV(config, block_tokens=4, blocks=5, buffer=buffer)
    assert kv.data.shape == (config.layers, 2, 5, 4, config.kv_heads, config.head_dim)
    assert kv.data.flags.c_contiguous
    kv.data[1, 0, 3] = 1.0
    block_floats = 4 * config.kv_heads * config.head_dim
    first = ((1 * 2 + 0) * 5 + 3) * block_floats
    floats = buffer.view(np.float32)
    assert np.flatnonzero(floats).tolist() == list(range(first, first + block_floats))


def test_allocates_zeros_without_a_buffer(config: ModelConfig) -> None:
    kv = PagedKV(config, block_tokens=2, blocks=3)
    assert kv.data.nbytes == PagedKV.nbytes(config, 2, 3)
    assert not kv.data.any()


def test_larger_buffer_is_used_from_its_start_and_keeps_its_content(config: ModelConfig) -> None:
    needed = PagedKV.nbytes(config, 1, 1)
    buffer = np.full(needed + 4096, 7, dtype=np.uint8)
    kv = PagedKV(config, block_tokens=1, blocks=1, buffer=buffer)
    assert kv.data.tobytes() == bytes([7]) * needed
    kv.data[:] = 0
    assert (buffer[needed:] == 7).all()


def test_bad_buffers_are_refused(config: ModelConfig) -> None:
    needed = PagedKV.nbytes(config, 1, 2)
    read_only = np.zeros(needed, dtype=np.uint8)
    read_only.flags.writeable = False
    aligned = np.zeros(needed + 8, dtype=np.uint8)
    for buffer, reason in (
        (np.zeros(needed - 1, dtype=np.uint8), "needs"),
        (np.zeros(needed // 4, dtype=np.float32), "uint8"),
        (np.zeros(2 * needed, dtype=np.uint8)[::2], "contiguous"),
        (read_only, "read-only"),
        (aligned[1 : needed + 1], "multiple of 4"),
    ):
        with pytest.raises(UsageError, match=reason):
            PagedKV(config, block_tokens=1, blocks=2, buffer=buffer)


@pytest.mark.parametrize(("block_tokens", "blocks"), [(0, 1), (1, 0), (-1, 4)])
def test_counts_below_one_are_refused(config: ModelConfig, block_tokens: int, blocks: int) -> None:
    with pytest.raises(UsageError, match="1 or more"):
        PagedKV.nbytes(config, block_tokens, blocks)
