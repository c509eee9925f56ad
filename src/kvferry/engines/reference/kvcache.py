"""The paged KV cache: one flat buffer, seen as layers x keys/values x blocks.

The buffer belongs to the caller. In a prefill or decode process it is memory that kvferry has
registered, so the layout is part of the contract: kvferry moves (layer, keys or values, block)
spans, each of which is contiguous.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.engines.reference.config import ModelConfig
from kvferry.errors import UsageError

_ELEMENT_BYTES = 4


class PagedKV:
    """Keys and values of all sequences, in blocks of ``block_tokens`` positions.

    data: float32[layers, 2, blocks, block_tokens, kv_heads, head_dim], C-contiguous, a view of
        the buffer. Index 0 of the second axis holds keys (already rotated), 1 holds values.
    block_tokens: positions in one block, 1 or more.
    blocks: number of blocks, 1 or more. Which sequence owns which block is the scheduler's
        business; this class keeps no books.

    Raises UsageError when a count is below 1, or when the buffer is not a writable,
    C-contiguous, 4-byte-aligned uint8 array of at least ``nbytes`` bytes. Bytes past ``nbytes``
    are left alone, so a page-rounded allocation can be passed whole. The content of a supplied
    buffer is kept.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        block_tokens: int,
        blocks: int,
        buffer: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        needed_bytes = self.nbytes(config, block_tokens, blocks)
        if buffer is None:
            buffer = np.zeros(needed_bytes, dtype=np.uint8)
        _check_buffer(buffer, needed_bytes)
        self.block_tokens = block_tokens
        self.blocks = blocks
        self.data: npt.NDArray[np.float32] = (
            buffer[:needed_bytes]
            .view(np.float32)
            .reshape(config.layers, 2, blocks, block_tokens, config.kv_heads, config.head_dim)
        )

    @staticmethod
    def nbytes(config: ModelConfig, block_tokens: int, blocks: int) -> int:
        """Bytes that a cache of this shape takes. Raises UsageError when a count is below 1."""
        for name, count in (("block_tokens", block_tokens), ("blocks", blocks)):
            if count < 1:
                raise UsageError(f"{name} is {count}, it must be 1 or more")
        block_elements = block_tokens * config.kv_heads * config.head_dim
        return config.layers * 2 * blocks * block_elements * _ELEMENT_BYTES


def _check_buffer(buffer: npt.NDArray[np.uint8], needed_bytes: int) -> None:
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
        raise UsageError(
            f"the KV buffer is {buffer.dtype}{list(buffer.shape)}, "
            "it must be one contiguous uint8 array"
        )
    if not buffer.flags.writeable:
        raise UsageError("the KV buffer is read-only, the model has to write to it")
    if buffer.nbytes < needed_bytes:
        raise UsageError(
            f"the KV buffer holds {buffer.nbytes} bytes, this cache needs {needed_bytes}"
        )
    if buffer.ctypes.data % _ELEMENT_BYTES:
        raise UsageError(
            f"the KV buffer starts at {buffer.ctypes.data:#x}, "
            f"which is not a multiple of {_ELEMENT_BYTES}"
        )
