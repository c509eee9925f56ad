"""A tiny block pool whose bytes say whose they are, and which gives freed blocks away at once."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from kvferry.layout import KVGeometry

LAYERS = 2
SLOT = struct.Struct("<IHHII")
"""One token's keys, or values, of one layer: request, layer, position, generation, writer."""
NOBODY = 0xFFFFFFFF


def geometry(blocks: int, block_tokens: int) -> KVGeometry:
    """A pool in which one token's keys, or values, of one layer are one slot."""
    return KVGeometry(
        model="simulated",
        layers=LAYERS,
        kv_heads=1,
        head_dim=SLOT.size // 4,
        dtype="float32",
        block_tokens=block_tokens,
        blocks=blocks,
    )


def content(request: int, n_tokens: int, generation: int, writer: int) -> bytes:
    """What the KV of a request is, slot by slot, in the order of layers and then tokens."""
    pack = SLOT.pack
    return b"".join(
        pack(request, half, position, generation, writer)
        for half in range(2 * LAYERS)
        for position in range(n_tokens)
    )


class BlockPool:
    """The KV memory of one process, and who has which block.

    The memory outlives its process for those who have mapped it.
    """

    def __init__(self, blocks: int, block_tokens: int, writer: int) -> None:
        self.geometry = geometry(blocks, block_tokens)
        self.memory = bytearray(self.geometry.pool_nbytes)
        self.writer = writer
        self.generation = 0
        self._cells: npt.NDArray[np.void] = np.frombuffer(self.memory, f"V{SLOT.size}")
        self._free = list(range(blocks))
        self._owner = [NOBODY] * blocks

    @property
    def blocks(self) -> int:
        return len(self._owner)

    @property
    def free_count(self) -> int:
        return len(self._free)

    def take(self, n_tokens: int, owner: int) -> list[int] | None:
        """Blocks for so many tokens, the last freed first; None if there are too few."""
        count = -(-n_tokens // self.geometry.block_tokens)
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._owner[block] = owner
        return blocks

    def release(self, blocks: list[int], owner: int) -> str:
        """Give blocks back, and overwrite them as the next owner will. What was wrong, or ""."""
        for block in blocks:
            if self._owner[block] != owner:
                return f"block {block} was freed by {owner} and belongs to {self._owner[block]}"
            self._owner[block] = NOBODY
        self._free += blocks
        tokens = len(blocks) * self.geometry.block_tokens
        self.write(blocks, NOBODY, tokens)
        return ""

    def write(self, blocks: list[int], request: int, n_tokens: int) -> bytes:
        """Compute the KV of a request into its blocks; what was written, as :meth:`read` sees."""
        self.generation += 1
        data = content(request, n_tokens, self.generation, self.writer)
        if n_tokens:
            self._cells[self._slots(blocks, n_tokens)] = np.frombuffer(data, self._cells.dtype)
        return data

    def read(self, blocks: list[int], n_tokens: int) -> bytes:
        """The KV that lies in these blocks, in the order of :func:`content`."""
        return self._cells[self._slots(blocks, n_tokens)].tobytes() if n_tokens else b""

    def owner_of(self, offset: int) -> int:
        """Who owns the slot at a byte offset."""
        tokens = self.geometry.block_tokens
        return self._owner[offset // SLOT.size // tokens % self.blocks]

    def _slots(self, blocks: list[int], n_tokens: int) -> npt.NDArray[np.int64]:
        """Numbers of the slots of so many tokens, in the order of :func:`content`."""
        tokens = self.geometry.block_tokens
        table = np.asarray(blocks, dtype=np.int64)
        position = np.arange(n_tokens)
        in_layer = table[position // tokens] * tokens + position % tokens
        halves = np.arange(2 * LAYERS) * (self.blocks * tokens)
        return (halves[:, None] + in_layer[None, :]).reshape(-1)


def explain(found: bytes, expected: bytes) -> str:
    """The first slot that is not what it should be, in words."""
    for at in range(0, len(expected), SLOT.size):
        if found[at : at + SLOT.size] != expected[at : at + SLOT.size]:
            have, want = (SLOT.unpack_from(data, at) for data in (found, expected))
            return f"there lies {_words(have)}, and it should be {_words(want)}"
    return "nothing differs"


def _words(slot: tuple[int, ...]) -> str:
    request, half, position, generation, writer = slot
    name = "nobody's KV" if request == NOBODY else f"request {request}"
    where = f"layer {half // 2} {'values' if half % 2 else 'keys'}, token {position}"
    return f"{name} ({where}, generation {generation} of writer {writer})"
