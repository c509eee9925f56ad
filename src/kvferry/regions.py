"""Regions and spans: which memory, and which bytes of it. Pure; knows no transport and no clock.

A *region* is a registered piece of memory. *Spans* are byte offsets and lengths inside one region,
two int64 arrays of the same length. A transfer pairs the spans of a local region with those of a
remote one; the two lists may be cut differently but must cover the same number of bytes, and the
bytes are paired in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.errors import BoundsError, UsageError

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

READ = "read"
READ_WRITE = "read-write"

SPANS_MAX = 1 << 20
"""Most spans in one transfer; 16 MiB of arrays. More is a sign of a wrong block size."""

_INT64_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Region:
    """A registered piece of memory of this process.

    region_id: small integer, unique in its engine, never used twice.
    kind: ``"host"`` or ``"cuda"``.
    device: ``""`` for host memory, the device's UUID otherwise (never an ordinal).
    address: first byte, in this process.
    nbytes: size in bytes, at least 1.
    generation: counts re-uses of the same memory; a peer that holds an older one is refused.
    token: 16 random bytes; a peer must show them to reach the region.
    access: what peers may do, ``"read"`` or ``"read-write"``.
    """

    region_id: int
    kind: str
    device: str
    address: int
    nbytes: int
    generation: int
    token: bytes
    access: str = READ


@dataclass(frozen=True, slots=True)
class Spans:
    """Byte ranges inside one region.

    offsets: int64[n], each at least 0.
    lengths: int64[n], each at least 0.
    length: that of every span, if all have the same and it is positive; else 0. Blocks of a KV
    pool have, which spares most passes over the arrays.

    Built by :meth:`of`, which checks; the arrays must not be changed afterwards.
    """

    offsets: I64
    lengths: I64
    length: int = 0

    @classmethod
    def of(cls, offsets: Any, lengths: Any) -> Spans:
        """Spans from anything numpy accepts; one number as ``lengths`` serves all offsets.

        Raises UsageError when shapes differ, a value is negative or no int64, there are too many
        spans, or their total is over 2**63 - 1 bytes.
        """
        for values in (offsets, lengths):
            given = np.asarray(values)
            if given.dtype.kind not in "iu" and given.size:
                raise UsageError(f"offsets and lengths must be int64 numbers, not {given.dtype}")
        try:
            off = np.ascontiguousarray(offsets, dtype=np.int64).reshape(-1)
            if np.ndim(lengths) == 0:
                size = np.full(off.shape, int(lengths), dtype=np.int64)
            else:
                size = np.ascontiguousarray(lengths, dtype=np.int64).reshape(-1)
        except (OverflowError, TypeError, ValueError) as error:
            raise UsageError(f"offsets and lengths must be int64 numbers: {error}") from error
        if off.shape != size.shape:
            raise UsageError(f"{off.size} offsets but {size.size} lengths")
        if off.size > SPANS_MAX:
            raise UsageError(f"{off.size} spans in one transfer; at most {SPANS_MAX} are allowed")
        if not off.size:
            return cls(off, size)
        if np.ndim(lengths) == 0:
            shortest = longest = int(size[0])
        else:
            shortest, longest = int(size.min()), int(size.max())
        if shortest < 0 or int(off.min()) < 0:
            raise UsageError("offsets and lengths must not be negative")
        # A total that wraps around could equal the other side's. The first test is the cheap one.
        if longest > _INT64_MAX // off.size:
            total = sum(size.tolist())
            if total > _INT64_MAX:
                raise UsageError(f"the spans cover {total} bytes in all, more than an int64 holds")
        return cls(off, size, longest if shortest == longest else 0)

    @classmethod
    def whole(cls, nbytes: int) -> Spans:
        """One span that covers a region of ``nbytes`` bytes."""
        return cls.of([0], [nbytes])

    @classmethod
    def blocks(cls, indices: Any, block_bytes: int) -> Spans:
        """Whole blocks of one size, by index, in the given order."""
        return cls.of(np.asarray(indices, dtype=np.int64) * block_bytes, block_bytes)

    @property
    def nbytes(self) -> int:
        """Total bytes covered, counting overlaps twice."""
        return self.length * self.offsets.size or int(self.lengths.sum())

    def __len__(self) -> int:
        return int(self.offsets.size)


def check_bounds(spans: Spans, nbytes: int, *, what: str) -> None:
    """Raise BoundsError unless every span lies inside ``nbytes``; names the first that does not.

    About 10 us per 10,000 spans. Written so that no sum can overflow: a hostile offset near 2**63
    is found by comparison, not by addition.
    """
    off, size = spans.offsets, spans.lengths
    if off.size == 0:
        return
    last = nbytes - spans.length
    if spans.length and int(off.min()) >= 0 and int(off.max()) <= last:
        return
    bad = (off < 0) | (size < 0) | (size > nbytes) | (off > nbytes - size)
    if bad.any():
        i = int(bad.argmax())
        raise BoundsError(
            f"{what} span {i} of {off.size} (offset {off[i]}, length {size[i]}) lies outside "
            f"the region of {nbytes} bytes",
            fix="check block numbers and block size on the side that named this span",
        )


def pair(local: Spans, remote: Spans) -> tuple[I64, I64, I64]:
    """Cut both span lists at the same places and merge what is adjacent on both sides.

    Returns (local offsets, remote offsets, lengths), all int64[m], without empty spans.
    Raises BoundsError when the totals differ.
    """
    if local.nbytes != remote.nbytes:
        raise BoundsError(
            f"local spans cover {local.nbytes} bytes, remote spans {remote.nbytes}",
            fix="both sides of a transfer must name the same number of bytes",
        )
    a, b, size = local.offsets, remote.offsets, local.lengths
    if local.length and local.length == remote.length:
        # Scattered blocks, the usual case: no two neighbours of one side are adjacent.
        if not (a[1:] - a[:-1] == local.length).any():
            return a, b, size
    elif a.size != b.size or not np.array_equal(size, remote.lengths):
        a, b, size = _split(local, remote)
    elif size.size and int(size.min()) == 0:
        keep = size > 0
        a, b, size = a[keep], b[keep], size[keep]
    return coalesce(a, b, size)


@dataclass(frozen=True, slots=True, eq=False)
class PairedSpans:
    """Two span lists cut at the same places: what a transfer is made of.

    local, remote: int64[n] offsets. lengths: int64[n], all positive. nbytes: their total.
    length: that of every span, if all have the same; else 0.
    """

    local: I64
    remote: I64
    lengths: I64
    nbytes: int
    length: int = 0

    @classmethod
    def of(cls, local: Spans, remote: Spans) -> PairedSpans:
        """Raises BoundsError when the totals differ."""
        a, b, lengths = pair(local, remote)
        length = local.length if lengths is local.lengths else 0
        return cls(a, b, lengths, local.nbytes, length)


def coalesce(a: I64, b: I64, lengths: I64) -> tuple[I64, I64, I64]:
    """Merge neighbours that are adjacent in both lists. Lengths must be positive."""
    if lengths.size < 2:
        return a, b, lengths
    ends = lengths[:-1]
    starts = (a[1:] - a[:-1] != ends) | (b[1:] - b[:-1] != ends)
    if starts.all():
        return a, b, lengths
    first = np.concatenate(([0], np.flatnonzero(starts) + 1))
    return a[first], b[first], np.add.reduceat(lengths, first)


def merge(spans: Spans) -> Spans:
    """Merge neighbours within one list; order and bytes stay the same."""
    off, size = spans.offsets, spans.lengths
    if size.size and int(size.min()) == 0:
        keep = size > 0
        off, size = off[keep], size[keep]
    off, _, size = coalesce(off, off, size)
    return Spans(off, size)


def _split(local: Spans, remote: Spans) -> tuple[I64, I64, I64]:
    """Common refinement of two lists that cover the same number of bytes."""
    local_end, remote_end = np.cumsum(local.lengths), np.cumsum(remote.lengths)
    cuts = np.union1d(local_end, remote_end)
    cuts = cuts[cuts > 0]
    begin = np.concatenate((np.zeros(1, np.int64), cuts[:-1]))[: cuts.size]
    i = np.searchsorted(local_end, begin, side="right")
    j = np.searchsorted(remote_end, begin, side="right")
    a = local.offsets[i] + begin - (local_end[i] - local.lengths[i])
    b = remote.offsets[j] + begin - (remote_end[j] - remote.lengths[j])
    return a, b, cuts - begin
