"""Copies lists of spans between addresses of this process: what every mapped path ends in.

A list of spans is three arrays: target addresses, source addresses, lengths. One call copies them
all, in C where the extension was built (streaming stores, prefetch, threads), otherwise by
system calls and ctypes, which is slower and says so. Addresses are not checked here: whoever
calls has checked spans against regions, and keeps both mapped until the call returns.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import itertools
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvferry.errors import UsageError
from kvferry.regions import I64, U64, coalesce

log = logging.getLogger(__name__)

THREADS_PAY_BYTES = 8 << 20
"""Smaller batches are copied by the caller alone; starting a thread would cost more."""

_MEMMOVE_PAYS_BYTES = 64 << 10
_IOVECS_MAX = 1024
_U64, _I64 = np.dtype(np.uint64), np.dtype(np.int64)
_SpanCopy = Callable[[U64, U64, I64, int], None]


@dataclass(frozen=True, slots=True)
class CopyBackend:
    """One way to copy spans.

    name: ``"c/avx512"``, ``"c/avx2"``, ``"c/plain"`` or ``"ctypes"``.
    is_fallback: whether a faster one exists but is missing here.
    note: a sentence for people: what is slower and how to mend it, or "".
    copy: ``copy(target, source, lengths, threads)`` as in :func:`copy_spans`, arrays already
        uint64, uint64 and int64.
    """

    name: str
    is_fallback: bool
    note: str
    copy: _SpanCopy = field(repr=False)


def copy_spans(target: U64, source: U64, lengths: I64, *, threads: int = 1) -> None:
    """Copy ``lengths[i]`` bytes from address ``source[i]`` to ``target[i]``, for every i.

    target, source: uint64[n] addresses in this process; lengths: int64[n], each 0 or more.
    C-contiguous arrays of these types are used as they are, other integers are converted.
    threads: at most this many threads share a batch of at least 8 MiB; 1 or more.

    Blocks until all bytes are copied. Batches above 64 KiB let other Python threads run meanwhile.
    No address is checked: a bad one ends the process. Overlapping source and target, within a span
    or between spans, give undefined bytes. Raises UsageError, with nothing copied, when the arrays
    differ in size or a length is negative.
    """
    target, source = _whole_numbers(target, _U64), _whole_numbers(source, _U64)
    lengths = _whole_numbers(lengths, _I64)
    try:
        backend().copy(target, source, lengths, threads)
    except ValueError as error:
        raise UsageError(f"cannot copy these spans: {error}") from error


def gather(target_address: int, sources: U64, lengths: I64, *, threads: int = 1) -> int:
    """Copy scattered spans into one contiguous target, in order. Returns the bytes copied.

    Conditions and errors are those of :func:`copy_spans`.
    """
    addresses, nbytes = _consecutive(target_address, lengths)
    copy_spans(addresses, sources, lengths, threads=threads)
    return nbytes


def scatter(source_address: int, targets: U64, lengths: I64, *, threads: int = 1) -> int:
    """Copy one contiguous source to scattered spans, in order. Returns the bytes copied.

    Conditions and errors are those of :func:`copy_spans`.
    """
    addresses, nbytes = _consecutive(source_address, lengths)
    copy_spans(targets, addresses, lengths, threads=threads)
    return nbytes


def split_by_bytes(
    target: U64, source: U64, lengths: I64, parts: int
) -> list[tuple[U64, U64, I64]]:
    """Cut a list of spans into at most ``parts`` lists of about equal bytes, also inside spans.

    Parts without bytes are left out, so the list is empty when there is nothing to copy.
    """
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if ends.size else 0
    cuts = [total * part // parts for part in range(parts + 1)]
    pieces = []
    for begin, end in itertools.pairwise(cuts):
        if begin == end:
            continue
        first = int(np.searchsorted(ends, begin, side="right"))
        last = int(np.searchsorted(ends, end, side="left"))
        size = lengths[first : last + 1].copy()
        skip = begin - int(ends[first] - lengths[first])
        size[-1] -= int(ends[last]) - end
        size[0] -= skip
        piece_target, piece_source = (
            target[first : last + 1].copy(),
            source[first : last + 1].copy(),
        )
        piece_target[0] += np.uint64(skip)
        piece_source[0] += np.uint64(skip)
        pieces.append((piece_target, piece_source, size))
    return pieces


@functools.cache
def backend() -> CopyBackend:
    """The backend that :func:`copy_spans` uses: the best of :func:`backends`.

    Decided once per process, where ``KVFERRY_NO_C=1`` asks for the fallback.
    A fallback is logged, once.
    """
    best = backends(use_c=os.environ.get("KVFERRY_NO_C", "") in ("", "0"))[-1]
    if best.is_fallback:
        log.warning("copying spans by %s: %s", best.name, best.note)
    return best


def backends(*, use_c: bool = True) -> list[CopyBackend]:
    """All backends that work on this machine, the best one last."""
    usable = [_fallback("the C extension is switched off by KVFERRY_NO_C")]
    if use_c:
        try:
            import kvferry.memory._copy as _copy
        except ImportError as error:
            usable = [_fallback(f"the C extension cannot be used ({error})")]
        else:
            usable += [_compiled(_copy, i, name) for i, name in enumerate(_copy.kernels())]
    return usable


def _compiled(module: Any, kernel: int, name: str) -> CopyBackend:
    run = module.copy_spans

    def copy(target: U64, source: U64, lengths: I64, threads: int) -> None:
        run(target, source, lengths, threads, kernel)

    return CopyBackend(f"c/{name}", is_fallback=False, note="", copy=copy)


def _fallback(reason: str) -> CopyBackend:
    note = (
        f"{reason}; scattered blocks copy 1.5 to 3 times slower. Install a C compiler and "
        "reinstall kvferry to get the fast copy"
    )
    return CopyBackend("ctypes", is_fallback=True, note=note, copy=_ctypes_copy)


def _ctypes_copy(target: U64, source: U64, lengths: I64, threads: int) -> None:
    if not target.size == source.size == lengths.size:
        raise ValueError("the three arrays must hold the same number of 64-bit integers")
    if lengths.size == 0:
        return
    if int(lengths.min()) < 0:
        raise ValueError("a length is negative")
    if lengths.size == 1:
        if threads == 1 or int(lengths[0]) < THREADS_PAY_BYTES:
            ctypes.memmove(int(target[0]), int(source[0]), int(lengths[0]))
            return
    else:
        kept = lengths > 0
        # Signed views, because differences of addresses may be negative.
        ends, starts = target[kept].view(np.int64), source[kept].view(np.int64)
        ends, starts, lengths = coalesce(ends, starts, lengths[kept])
        target, source = ends.view(np.uint64), starts.view(np.uint64)
    total = int(lengths.sum())
    if threads > 1 and total >= THREADS_PAY_BYTES:
        _in_threads(split_by_bytes(target, source, lengths, threads))
    elif total >= _MEMMOVE_PAYS_BYTES * lengths.size or lengths.size < 4 or not _reads_itself():
        _memmove(target, source, lengths)
    else:
        _read_itself(target, source, lengths)


def _in_threads(pieces: list[tuple[U64, U64, I64]]) -> None:
    """Copy every piece; the caller does the first, and those whose thread does not start."""
    failures: list[BaseException] = []

    def work(piece: tuple[U64, U64, I64]) -> None:
        try:
            _ctypes_copy(*piece, 1)
        except BaseException as error:
            failures.append(error)

    threads = []
    own = pieces[:1]
    for piece in pieces[1:]:
        thread = threading.Thread(target=work, args=(piece,), name="kvferry-copy")
        try:
            thread.start()
        except RuntimeError:  # The system has no thread to spare.
            own.append(piece)
        else:
            threads.append(thread)
    for piece in own:
        work(piece)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _memmove(target: U64, source: U64, lengths: I64) -> None:
    """One call per span: right for long spans. ctypes gives up the interpreter lock in each."""
    moves = map(ctypes.memmove, target.tolist(), source.tolist(), lengths.tolist())
    collections.deque(moves, maxlen=0)


def _read_itself(target: U64, source: U64, lengths: I64) -> None:
    """A thousand spans per system call: the process reads its own memory.

    No faster per byte than memmove, but the interpreter lock is given up once per thousand
    spans; a loop of short memmoves would have to win it back after each, against busy threads.
    """
    vectors = np.empty((2, lengths.size, 2), dtype=np.uint64)
    vectors[0, :, 0], vectors[1, :, 0], vectors[:, :, 1] = target, source, lengths
    read, pid = _process_vm_readv(), os.getpid()
    for first in range(0, lengths.size, _IOVECS_MAX):
        piece = vectors[:, first : first + _IOVECS_MAX]
        count = piece.shape[1]
        done = read(pid, piece[0].ctypes.data, count, piece[1].ctypes.data, count, 0)
        if done != int(piece[0, :, 1].sum()):
            # The kernel caps one call at 2 GiB, and may refuse memory of devices. Copying a span
            # twice does no harm.
            stop = first + count
            _memmove(target[first:stop], source[first:stop], lengths[first:stop])


@functools.cache
def _process_vm_readv() -> Any:
    read = getattr(ctypes.CDLL(None), "process_vm_readv", None)
    if read is not None:
        word, pointer = ctypes.c_ulong, ctypes.c_void_p
        read.argtypes = [ctypes.c_int, pointer, word, pointer, word, word]
        read.restype = ctypes.c_ssize_t
    return read


@functools.cache
def _reads_itself() -> bool:
    """Whether process_vm_readv may read this process: sandboxes refuse it, macOS lacks it."""
    read = _process_vm_readv()
    if read is None:
        return False
    numbers = np.array([7, 0], dtype=np.uint64)
    vector = np.array([numbers.ctypes.data, 8, numbers.ctypes.data + 8, 8], dtype=np.uint64)
    where = vector.ctypes.data
    return bool(read(os.getpid(), where + 16, 1, where, 1, 0) == 8 and numbers[1] == 7)


def _consecutive(address: int, lengths: I64) -> tuple[U64, int]:
    """Addresses of spans that lie one after the other from ``address`` on, and their bytes."""
    lengths = _whole_numbers(lengths, _I64)
    ends = np.cumsum(lengths)
    nbytes = int(ends[-1]) if ends.size else 0
    starts: U64 = (ends - lengths).view(np.uint64) + np.uint64(address)
    return starts, nbytes


def _whole_numbers(values: Any, dtype: np.dtype[Any]) -> Any:
    """``values`` itself if it is such an array already, as it nearly always is; else a copy."""
    if type(values) is np.ndarray and values.dtype == dtype and values.flags.c_contiguous:
        return values
    array = np.asarray(values)
    if array.dtype.kind not in "ui" and array.size:
        raise UsageError(f"addresses and lengths must be integers, not {array.dtype}")
    return np.ascontiguousarray(array, dtype=dtype)
