"""Digests of scattered memory, and which part of a transfer to compare. Pure but for the reading.

The digest is XXH3 with 64 bits: it finds what broken hardware and broken software do to bytes. It
is no defence against somebody who changes them on purpose.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable

import numpy as np
import xxhash

from kvferry.memory.places import SETTLE_S, Place
from kvferry.regions import I64, U64

KIND = "xxh3-64"
"""What peers call this digest; another kind is refused."""
DIGEST_BYTES = 8
FULL_PIECE_BYTES = 1 << 20
SAMPLE_PIECE_BYTES = 64 << 10
"""Longer spans are compared in pieces of this size, so that a mismatch says where."""
SAMPLE_PIECES = 32
"""Pieces in a sample: a bounded cost, however large the transfer is."""
BATCH_PIECES_MAX = 16384
BATCH_BYTES_MAX = 64 << 20
"""One request covers no more than this: its answer keeps a thread of the owner for about 10 ms."""
_STOP_EVERY_PIECES = 32


def choose(lengths: I64, *, sampled: bool, seed: int) -> tuple[I64, I64, I64]:
    """The pieces to compare: (index of the span, first byte within it, length), int64[m].

    lengths: of the spans, positive. Sampled, these are at most SAMPLE_PIECES, the first and the
    last among them; the same seed chooses the same.
    """
    size = SAMPLE_PIECE_BYTES if sampled else FULL_PIECE_BYTES
    count = -(-lengths // size)
    ends = np.cumsum(count)
    total = int(ends[-1]) if ends.size else 0
    if sampled and total > SAMPLE_PIECES:
        middle = random.Random(seed).sample(range(1, total - 1), SAMPLE_PIECES - 2)
        pieces = np.array([0, *sorted(middle), total - 1], dtype=np.int64)
    else:
        pieces = np.arange(total, dtype=np.int64)
    index = np.searchsorted(ends, pieces, side="right")
    begin = (pieces - (ends[index] - count[index])) * size
    return index, begin, np.minimum(lengths[index] - begin, size)


def batches(lengths: I64) -> list[slice]:
    """Cut pieces into runs that one request may cover. Each piece is within BATCH_BYTES_MAX."""
    ends = np.cumsum(lengths)
    runs, begin, base = [], 0, 0
    while begin < lengths.size:
        end = int(np.searchsorted(ends, base + BATCH_BYTES_MAX, side="right"))
        end = min(max(end, begin + 1), begin + BATCH_PIECES_MAX)
        runs.append(slice(begin, end))
        begin, base = end, int(ends[end - 1])
    return runs


def digest_of(place: Place, addresses: U64, lengths: I64, stop: Callable[[], bool]) -> U64 | None:
    """:func:`digest` of spans in memory of any kind; device memory is first brought to the host.

    Raises DeviceError.
    """
    if place.is_host or not lengths.size:
        return digest(addresses, lengths, stop)
    ends = np.cumsum(lengths)
    buffer = place.pinned(int(ends[-1]))
    place.gather(buffer.ctypes.data, addresses, lengths).settle(SETTLE_S)
    return digest((ends - lengths).view("u8") + np.uint64(buffer.ctypes.data), lengths, stop)


def digest(addresses: U64, lengths: I64, stop: Callable[[], bool]) -> U64 | None:
    """Digests of spans of memory that one region of this process holds, uint64[n].

    Blocks; None when ``stop`` said so in between, which is asked every few milliseconds.
    """
    out = np.empty(lengths.size, np.uint64)
    if not lengths.size:
        return out
    base = int(addresses.min())
    nbytes = int((addresses + lengths.view("u8")).max()) - base
    view = memoryview((ctypes.c_ubyte * nbytes).from_address(base)).cast("B")
    hash_one = xxhash.xxh3_64_intdigest
    begins = (addresses - np.uint64(base)).tolist()
    for number, (begin, length) in enumerate(zip(begins, lengths.tolist(), strict=True)):
        if number % _STOP_EVERY_PIECES == 0 and stop():
            return None
        out[number] = hash_one(view[begin : begin + length])
    return out
