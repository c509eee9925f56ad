"""Every backend copies the right bytes, touches no other, and reports mistakes the same way."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.errors import UsageError
from kvferry.memory import copy
from kvferry.memory.copy import CopyBackend
from kvferry.regions import I64, U64

U8 = npt.NDArray[np.uint8]
GUARD = 0xA5


@pytest.fixture(params=[*[b.name for b in copy.backends()], "ctypes, memmove only"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> CopyBackend:
    """Each backend of this machine in turn; every test of bytes and of mistakes takes it."""
    if "memmove" in request.param:
        monkeypatch.setattr(copy, "_reads_itself", lambda: False)
    name = request.param.split(",")[0]
    chosen = next(b for b in copy.backends() if b.name == name)
    monkeypatch.setattr(copy, "backend", lambda: chosen)
    return chosen


each_backend = pytest.mark.usefixtures("backend")


@pytest.fixture
def fresh_choice() -> Iterator[None]:
    copy.backend.cache_clear()
    yield
    copy.backend.cache_clear()


def addresses(pool: U8, offsets: I64) -> U64:
    return offsets.astype(np.uint64) + np.uint64(pool.ctypes.data)


def aligned(nbytes: int) -> U8:
    """nbytes bytes that begin at a multiple of 64, so that offsets are misalignments."""
    raw = np.empty(nbytes + 64, dtype=np.uint8)
    first = -raw.ctypes.data % 64
    return raw[first : first + nbytes]


def check(at: I64, of: I64, lengths: I64, *, threads: int = 1) -> None:
    """Copy spans between two pools and compare every byte of the target pool with numpy's."""
    rng = np.random.default_rng(at.size)
    source = aligned(int((of + lengths).max(initial=0)) + 64)
    source[:] = rng.integers(0, 256, source.size, dtype=np.uint8)
    target = aligned(int((at + lengths).max(initial=0)) + 64)
    target[:] = GUARD
    truth = target.copy()
    for to, frm, size in zip(at.tolist(), of.tolist(), lengths.tolist(), strict=True):
        truth[to : to + size] = source[frm : frm + size]
    before = source.copy()

    copy.copy_spans(addresses(target, at), addresses(source, of), lengths, threads=threads)

    wrong = np.flatnonzero(target != truth)
    assert wrong.size == 0, f"{wrong.size} wrong bytes, the first at {wrong[0]}"
    assert np.array_equal(source, before)


def packed(lengths: I64, misalignments: I64) -> I64:
    """Offsets one after the other, each misaligned as told, with guard bytes between."""
    room = (lengths + 64 + 63) // 64 * 64 + 64
    return np.cumsum(room) - room + misalignments


def grid(sizes: list[int], targets: range, sources: list[int]) -> tuple[I64, I64, I64]:
    size, to, frm = (a.ravel() for a in np.meshgrid(sizes, targets, sources))
    return packed(size, to), packed(size, frm), size


@each_backend
@pytest.mark.parametrize("first", [0, 100, 200])
def test_every_size_up_to_300_at_every_misalignment(first: int) -> None:
    at, _, lengths = grid(list(range(first, first + 101)), range(64), [0])
    shifted = packed(lengths, (np.arange(lengths.size) * 7) % 64)
    check(at, shifted, lengths)


@pytest.mark.parametrize("edge", [1024, 1280, 1536, 4096, 4608])
@each_backend
def test_sizes_around_the_kernels_edges(edge: int) -> None:
    sizes = [edge - 65, edge - 64, edge - 1, edge, edge + 1, edge + 63, edge + 64, edge + 255]
    check(*grid(sizes, range(0, 64, 3), [0, 1, 31, 33]))


@pytest.mark.parametrize("threads", [1, 2, 4])
@each_backend
def test_random_spans_in_random_order(threads: int) -> None:
    rng = np.random.default_rng(threads)
    lengths = rng.integers(0, 40_000, 450)
    lengths[rng.random(450) < 0.1] = 0
    assert lengths.sum() > copy.THREADS_PAY_BYTES * 0.9
    lengths[7] += copy.THREADS_PAY_BYTES // 4
    order = rng.permutation(450)
    at = np.empty(450, dtype=np.int64)
    at[order] = packed(lengths[order], rng.integers(0, 64, 450))
    check(at, packed(lengths, rng.integers(0, 64, 450)), lengths, threads=threads)


@pytest.mark.parametrize("threads", [1, 2, 4])
@each_backend
def test_many_short_spans(threads: int) -> None:
    lengths = np.full(6_500, 1300, dtype=np.int64)
    at = packed(lengths, np.arange(6_500) % 64)
    check(
        at, packed(lengths, np.zeros(6_500, dtype=np.int64))[::-1].copy(), lengths, threads=threads
    )


@pytest.mark.parametrize("threads", [1, 2, 3, 64])
@each_backend
def test_one_long_span_is_shared_by_threads(threads: int) -> None:
    size = np.array([0, copy.THREADS_PAY_BYTES + 12_345, 0])
    check(np.array([5, 5, 0]), np.array([0, 17, 3]), size, threads=threads)


@pytest.mark.parametrize("n", [0, 1, 3, 5])
@each_backend
def test_few_spans_and_neighbours(n: int) -> None:
    lengths = np.arange(n) * 10
    ends = np.cumsum(lengths)
    check(ends - lengths, ends - lengths + 3, lengths)


@each_backend
def test_lengths_of_zero_only() -> None:
    nowhere = np.zeros(9, dtype=np.uint64)
    copy.copy_spans(nowhere, nowhere, np.zeros(9, dtype=np.int64))


@pytest.mark.parametrize(
    ("sizes", "lengths", "words"),
    [((2, 2), [8, -1], "negative"), ((1, 2), [1, 1], "same number"), ((2, 2), [1], "same number")],
)
@each_backend
def test_mistakes_copy_nothing(sizes: tuple[int, int], lengths: list[int], words: str) -> None:
    target, source = np.zeros(64, dtype=np.uint8), np.ones(64, dtype=np.uint8)
    to = addresses(target, np.arange(sizes[0]) * 8)
    frm = addresses(source, np.arange(sizes[1]) * 8)
    with pytest.raises(UsageError, match=words):
        copy.copy_spans(to, frm, np.array(lengths))
    assert not target.any()


@each_backend
def test_other_integers_are_converted_and_other_types_refused() -> None:
    target, source = np.zeros(64, dtype=np.uint8), np.arange(64, dtype=np.uint8)
    to, frm = addresses(target, np.arange(0, 64, 8)), addresses(source, np.arange(0, 64, 8))
    lengths = np.full(8, 4)
    copy.copy_spans(to.astype(np.int64)[::2], frm[::2], lengths[::2].astype(np.int16))  # type: ignore[arg-type]
    assert target.reshape(-1, 16)[:, :5].tolist() == [
        [i, i + 1, i + 2, i + 3, 0] for i in range(0, 64, 16)
    ]
    with pytest.raises(UsageError, match="integers"):
        copy.copy_spans(to, frm, lengths.astype(float))  # type: ignore[arg-type]


@each_backend
def test_gather_then_scatter_moves_blocks() -> None:
    rng = np.random.default_rng(3)
    pool, moved = rng.integers(0, 256, (50, 300), dtype=np.uint8), np.zeros((50, 300), np.uint8)
    rows = rng.permutation(50)[:20]
    lengths = rng.integers(0, 300, 20)
    staging = np.zeros(int(lengths.sum()) + 1, dtype=np.uint8)
    sources = addresses(pool.reshape(-1), rows * 300)
    assert copy.gather(staging.ctypes.data, sources, lengths) == lengths.sum()
    assert np.array_equal(
        staging[:-1], np.concatenate([pool[r, :n] for r, n in zip(rows, lengths, strict=True)])
    )
    assert staging[-1] == 0
    targets = addresses(moved.reshape(-1), rows * 300)
    assert copy.scatter(staging.ctypes.data, targets, lengths) == lengths.sum()
    inside = np.arange(300) < np.bincount(rows, lengths, 50).astype(int)[:, None]
    assert np.array_equal(moved, np.where(inside, pool, 0))
    assert copy.gather(staging.ctypes.data, sources[:0], lengths[:0]) == 0


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 1000])
def test_split_by_bytes_keeps_every_byte_in_order(parts: int) -> None:
    rng = np.random.default_rng(parts)
    lengths = rng.integers(0, 20, 30)
    at, of = addresses(np.empty(1, np.uint8), packed(lengths, lengths)), np.arange(30) * 1000
    of = of.astype(np.uint64)

    def pairs(to: U64, frm: U64, size: I64) -> list[tuple[int, int]]:
        rows = zip(to.tolist(), frm.tolist(), size.tolist(), strict=True)
        return [(t + i, f + i) for t, f, n in rows for i in range(n)]

    pieces = [pairs(*piece) for piece in copy.split_by_bytes(at, of, lengths, parts)]
    assert [pair for piece in pieces for pair in piece] == pairs(at, of, lengths)
    sizes = [len(piece) for piece in pieces]
    assert len(sizes) == min(parts, int(lengths.sum()))
    assert max(sizes) - min(sizes) <= 1


def test_split_of_nothing_is_empty() -> None:
    none = np.zeros(0, dtype=np.int64)
    assert copy.split_by_bytes(none.view(np.uint64), none.view(np.uint64), none, 3) == []


@pytest.mark.parametrize("span_bytes", [1 << 10, 1 << 20])
@each_backend
def test_other_threads_run_during_a_large_copy(span_bytes: int) -> None:
    pool = np.zeros((2, 8 << 20), dtype=np.uint8)
    offsets = np.arange(0, 8 << 20, span_bytes)
    # Every second span on the target's side is swapped, so that nothing can be merged.
    spans = (
        addresses(pool[0], offsets.reshape(-1, 2)[:, ::-1].reshape(-1)),
        addresses(pool[1], offsets),
        np.full(offsets.size, span_bytes),
    )
    go, ran = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: go.wait(10) and ran.set())
    interval = sys.getswitchinterval()
    try:
        other.start()
        sys.setswitchinterval(100)  # From here on the lock changes hands only if it is given up.
        deadline = time.monotonic() + 10
        go.set()
        while not ran.is_set() and time.monotonic() < deadline:
            copy.copy_spans(*spans)
        in_time = ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        other.join()
    assert in_time


def test_threads_that_cannot_start_leave_the_work_to_the_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    fallback = copy.backends(use_c=False)[0]
    monkeypatch.setattr(copy, "backend", lambda: fallback)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    size = np.array([copy.THREADS_PAY_BYTES + 1])
    check(np.array([1]), np.array([2]), size, threads=3)


def test_a_failing_thread_of_the_fallback_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(copy, "_memmove", fail)
    size = copy.THREADS_PAY_BYTES // 8
    pool = np.zeros((2, 8 * size), dtype=np.uint8)
    offsets = np.arange(8) * size
    spans = addresses(pool[0], offsets[::-1]), addresses(pool[1], offsets)
    with pytest.raises(MemoryError):
        copy.backends(use_c=False)[0].copy(*spans, np.full(8, size), 2)


@pytest.mark.slow
def test_the_compiled_copy_works_without_memory_for_threads() -> None:
    pytest.importorskip("kvferry.memory._copy")
    script = """
        import resource, numpy as np
        from kvferry.memory import copy
        source = np.arange(3 << 20, dtype=np.uint64)
        target = np.zeros_like(source)
        spans = [np.array([a.ctypes.data], dtype=np.uint64) for a in (target, source)]
        size = np.array([source.nbytes])
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        limits = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), limits[1]))
        copy.copy_spans(*spans, size, threads=4)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        assert (target == source).all(), "wrong bytes"
        print("right")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "right\n", done.stderr


@pytest.mark.slow
def test_more_than_two_gib_in_one_span() -> None:
    nbytes = (1 << 31) + 4099
    marks = np.array([0, 1, (1 << 31) - 1, 1 << 31, (1 << 31) + 1, nbytes - 1])
    source = np.zeros(nbytes, dtype=np.uint8)
    source[marks] = np.arange(1, 7)
    target = np.zeros(nbytes + 64, dtype=np.uint8)
    everything = np.array([nbytes])
    for way in (copy.backends()[0], copy.backends()[-1]):
        target[marks] = 0
        spans = addresses(target, np.array([0])), addresses(source, np.array([0]))
        way.copy(*spans, everything, 2)
        assert target[marks].tolist() == [1, 2, 3, 4, 5, 6], way.name
        assert np.count_nonzero(target) == 6, way.name


def test_the_fallback_reads_right_even_if_the_system_call_stops_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fallback = copy.backends(use_c=False)[0]
    calls = []

    def stop_short(*_: object) -> int:
        calls.append(1)
        return 5

    monkeypatch.setattr(copy, "backend", lambda: fallback)
    monkeypatch.setattr(copy, "_reads_itself", lambda: True)
    monkeypatch.setattr(copy, "_process_vm_readv", lambda: stop_short)
    lengths = np.full(1500, 33)
    check(packed(lengths, lengths), packed(lengths, lengths * 0), lengths)
    assert len(calls) == 2


@pytest.mark.usefixtures("fresh_choice")
def test_the_switch_selects_the_fallback_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVFERRY_NO_C", "1")
    with caplog.at_level(logging.INFO, logger="kvferry"):
        first, second = copy.backend(), copy.backend()
    assert first is second
    assert (first.name, first.is_fallback) == ("ctypes", True)
    assert "KVFERRY_NO_C" in first.note
    assert "slower" in first.note
    assert len(caplog.records) == 1


@pytest.mark.usefixtures("fresh_choice")
def test_a_missing_extension_selects_the_fallback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("KVFERRY_NO_C", raising=False)
    monkeypatch.setitem(sys.modules, "kvferry.memory._copy", None)
    chosen = copy.backend()
    assert chosen.is_fallback
    assert "compiler" in chosen.note


@pytest.mark.usefixtures("fresh_choice")
def test_the_compiled_copy_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("kvferry.memory._copy")
    monkeypatch.delenv("KVFERRY_NO_C", raising=False)
    chosen = copy.backend()
    assert chosen.name.startswith("c/")
    assert replace(chosen, name="x").name == "x"
    assert not chosen.is_fallback
    assert chosen.note == ""


def test_the_extension_refuses_a_kernel_that_the_processor_lacks() -> None:
    module = pytest.importorskip("kvferry.memory._copy")
    none = np.zeros(0, dtype=np.int64)
    with pytest.raises(ValueError, match="kernel"):
        module.copy_spans(none, none, none, 1, len(module.kernels()))
