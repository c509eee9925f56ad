"""Which blocks of the paged KV are free. Numbers only: nothing here knows what a block holds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import BusyError, ConfigError

Blocks = NDArray[np.int64]


class BlockPool:
    """Hands out block numbers 0 to ``total - 1``; the last ones freed are the next ones used.

    Not thread-safe: the engine's thread alone calls it, others may read ``free_count``.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ConfigError(f"blocks={total}: the KV cache needs at least one block")
        self.total = total
        self._stack = np.arange(total - 1, -1, -1, dtype=np.int64)
        self._used = np.zeros(total, dtype=bool)
        self._free_count = total

    @property
    def free_count(self) -> int:
        """Blocks that nobody holds. Safe to read from any thread."""
        return self._free_count

    def allocate(self, count: int) -> Blocks:
        """Take ``count`` blocks, 0 or more. Raises BusyError, and takes none, if fewer are free.

        Returns: int64 ``[count]``, distinct, in no particular order; the caller owns the array.
        """
        if count > self._free_count:
            raise BusyError(
                f"{count} KV blocks wanted, {self._free_count} of {self.total} free",
                stage="allocate",
            )
        rest = self._free_count - count
        taken = self._stack[rest : self._free_count][::-1].copy()
        self._used[taken] = True
        self._free_count = rest
        return taken

    def free(self, blocks: Blocks) -> None:
        """Give blocks back. Giving back what is not taken is a bug and changes nothing."""
        if not len(blocks):
            return
        inside = blocks.min() >= 0 and blocks.max() < self.total
        if not inside or not self._used[blocks].all() or len(np.unique(blocks)) != len(blocks):
            raise AssertionError(f"blocks freed that are not taken, or twice: {blocks.tolist()}")
        self._used[blocks] = False
        self._stack[self._free_count : self._free_count + len(blocks)] = blocks[::-1]
        self._free_count += len(blocks)
