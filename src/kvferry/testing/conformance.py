"""What every transport must do, as checks that run against any of them.

::

    from kvferry.testing import check_transport
    check_transport(MyTransport)                    # raises ConformanceError, naming what failed
    check_transport(MyTransport, remote="plain")    # the peer's memory was not made by kvferry
    check_transport(MyTransport, processes=2)       # the peer is another process

Each check gets two fresh engines that have this transport alone, ``near`` and ``far``, and runs
transfers from ``near``. All contents are seeded; nothing here depends on speed. After the plain
checks come those under faults, see ``fault_checks``.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from kvferry.errors import (
    AbortedError,
    BoundsError,
    DeadlineError,
    KVFerryError,
    PeerError,
    PeerLostError,
    StaleRegionError,
    TransferError,
)
from kvferry.regions import READ, READ_WRITE, Spans
from kvferry.testing.child import Child
from kvferry.testing.fault_checks import FAULT_CHECKS, run_fault_check
from kvferry.testing.pairs import (
    BOUNDED_S,
    Bytes,
    LocalSide,
    Make,
    Pair,
    Registered,
    engines,
    failure,
    move_and_compare,
    take,
    wait_until,
    where,
)
from kvferry.transfer import Transfer
from kvferry.transports.base import RemoteRegion, Transport

__all__ = [
    "CHECKS",
    "ConformanceError",
    "Report",
    "check_transport",
    "failure",
    "run_check",
    "wait_until",
]

GUARD = 0xA5


class ConformanceError(AssertionError):
    """A transport failed checks; the text names each with its reason."""


@dataclass(slots=True)
class Report:
    """Outcome of :func:`check_transport`: names of checks, with the reason where there is one."""

    transport: str
    passed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.transport}: {len(self.passed)} checks passed"]
        lines += [f"  skipped {name}: {why}" for name, why in self.skipped.items()]
        lines += [f"  FAILED {name}: {why}" for name, why in self.failed.items()]
        return "\n".join(lines)


# -- content -------------------------------------------------------------------------------------


def check_sizes(pair: Pair) -> None:
    """One span of each awkward size, at offsets that are aligned to nothing."""
    for size in (0, 1, 511, 512, 4095, 4096, 65535, 65536, 65537):
        move_and_compare(pair, size + 64, Spans.of([7], [size]), Spans.of([13], [size]))


def check_scattered(pair: Pair) -> None:
    """Blocks in another random order on each side; bytes between them stay untouched."""
    rng = np.random.default_rng(5)
    for block in (512, 4096 + 24):
        local, remote = rng.permutation(64)[:40], rng.permutation(64)[:40]
        nbytes = 64 * block
        move_and_compare(pair, nbytes, Spans.blocks(local, block), Spans.blocks(remote, block))


def check_cut_differently(pair: Pair) -> None:
    """The two lists have other cuts but the same bytes, empty spans among them."""
    local = Spans.of([10, 500, 40, 1000], [100, 0, 333, 67])
    remote = Spans.of([800, 3, 1200], [1, 299, 200])
    move_and_compare(pair, 2048, local, remote)


def check_overlapping_source(pair: Pair) -> None:
    """The same source bytes may be named more than once."""
    for write in pair.directions:
        here, there, region = pair.sides(8192)
        source, target = (here, there) if write else (there, here)
        several = Spans.of([0, 100, 50, 0], [1000, 1000, 1000, 1000])
        once = Spans.of([0, 2000, 4000, 6000], 1000)
        a, b = (several, once) if write else (once, several)
        pair.start(write, here, a, region, b).wait(BOUNDED_S)
        assert np.array_equal(take(target.array, once), take(source.array, several))


def check_many_spans(pair: Pair) -> None:
    """16,384 spans in one transfer."""
    rng, count = np.random.default_rng(6), 16384
    local, remote = rng.permutation(count), rng.permutation(count)
    move_and_compare(pair, count * 64, Spans.blocks(local, 64), Spans.blocks(remote, 64))


def check_large(pair: Pair) -> None:
    """More than 16 MiB, so that transports cut it, in spans of very different sizes."""
    sizes = np.array([9 << 20, 1, 4097, (8 << 20) + 3, 65537])
    offsets = np.concatenate(([5], 5 + np.cumsum(sizes + 11)[:-1]))
    nbytes = int(offsets[-1] + sizes[-1]) + 9
    order = np.array([3, 0, 4, 2, 1])
    move_and_compare(pair, nbytes, Spans.of(offsets, sizes), Spans.of(offsets[order], sizes[order]))


def check_concurrent(pair: Pair) -> None:
    """64 transfers from 8 threads at once, each with its own bytes."""
    size, count = 96 << 10, 64
    here, there, region = pair.sides(size * count)
    failures: list[BaseException] = []
    write = pair.directions[-1]

    def work(first: int) -> None:
        try:
            mine = range(first, count, 8)
            spans = [Spans.of([i * size], [size]) for i in mine]
            transfers = [pair.start(write, here, s, region, s) for s in spans]
            for transfer in transfers:
                assert transfer.wait(30.0) == size
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert np.array_equal(here.array, there.array)


# -- refusals ------------------------------------------------------------------------------------


def check_read_only(pair: Pair) -> None:
    """A region that is registered for reading cannot be written to, and is not changed."""
    here, there = pair.near_memory(4096), pair.far_memory(4096, access=READ)
    region = pair.peer.region(there.registration.ref)
    before = there.array.copy()
    spans = Spans.whole(4096)
    for claimed in (region, replace(region, access=READ_WRITE)):
        error = failure(pair.start, True, here, spans, claimed, spans)
        assert error is not None, "a write to a read-only region succeeded"
    assert np.array_equal(there.array, before)


def check_bounds(pair: Pair) -> None:
    """Spans outside either region are refused before any byte moves."""
    here, there, region = pair.sides(4096)
    before = here.array.copy(), there.array.copy()
    inside = Spans.of([0], [100])
    for bad in (Spans.of([4000], [100]), Spans.of([1 << 62], [100]), Spans.of([4097], [0])):
        good = Spans.of([0], [bad.nbytes])
        for write in pair.directions:
            for a, b in ((good, bad), (bad, good)):
                error = failure(pair.start, write, here, a, region, b)
                assert isinstance(error, BoundsError), error
                assert error.fix, "the error does not say what to do"
    short = Spans.of([0], [99])
    error = failure(pair.start, False, here, inside, region, short)
    assert isinstance(error, BoundsError), error
    assert np.array_equal(here.array, before[0])
    assert np.array_equal(there.array, before[1])


def check_stale(pair: Pair) -> None:
    """After deregistering, a region cannot be reached, neither as it was nor asked for again."""
    here, there, region = pair.sides(4096)
    spans = Spans.whole(4096)
    pair.near.read(here.registration, spans, region, spans).wait(BOUNDED_S)
    there.registration.close()
    wait_until(lambda: region.region_id not in pair.peer.regions, "the peer was not told")
    for error in (
        failure(pair.start, False, here, spans, region, spans),
        failure(pair.peer.region, there.registration.ref),
    ):
        assert isinstance(error, StaleRegionError), error
        assert "; " in str(error), "the error does not say what to do"


def check_wrong_token(pair: Pair) -> None:
    """A reference with a forged token is refused, and so is a transfer that shows one."""
    here, there, region = pair.sides(4096)
    ref = there.registration.ref
    error = failure(pair.peer.region, ref[:8] + bytes(16))
    assert isinstance(error, StaleRegionError), error
    forge(pair, here, replace(region, token=bytes(16)))


def check_wrong_generation(pair: Pair) -> None:
    """Once its owner renewed a region, transfers that name the old generation are refused."""
    here, there, region = pair.sides(4096)
    there.registration.renew()
    wait_until(lambda: region.region_id not in pair.peer.regions, "the peer was not told")
    spans = Spans.whole(4096)
    error = failure(pair.start, False, here, spans, region, spans)
    assert isinstance(error, StaleRegionError), error
    again = pair.peer.region(there.registration.ref)
    assert again.generation == region.generation + 1
    pair.near.read(here.registration, spans, again, spans).wait(BOUNDED_S)
    assert np.array_equal(here.array, there.array)
    if pair.transport.capabilities().family != "mapped":
        forge(pair, here, replace(again, generation=region.generation))


def forge(pair: Pair, here: LocalSide, region: RemoteRegion) -> None:
    """A transfer with a description that was tampered with must fail and leave the target alone."""
    if pair.transport.capabilities().needs_unix and pair.transport.capabilities().needs_export:
        return  # Who has the descriptor has the memory: there is no token to be checked.
    pair.peer.regions[region.region_id] = region
    before = here.array.copy()
    spans = Spans.whole(4096)
    error = failure(pair.start, False, here, spans, region, spans)
    assert isinstance(error, StaleRegionError), error
    assert "; " in str(error), "the error does not say what to do"
    assert np.array_equal(here.array, before)


# -- ends ----------------------------------------------------------------------------------------


def check_abort(pair: Pair) -> None:
    """A transfer cancelled on its way ends soon, and then nothing writes to its target."""
    size = 24 << 20
    here, there, region = pair.sides(size)
    spans = Spans.whole(size)
    for write in pair.directions:
        target = there if write else here
        target.array[:] = GUARD
        transfer = pair.start(write, here, spans, region, spans)
        wait_until(partial(_has_begun, transfer, target.array), "it never began")
        transfer.cancel()
        error = failure(transfer.wait, BOUNDED_S)
        assert error is None or isinstance(error, AbortedError), error
        if write:
            # The owner's side may still take in what was under way; it stops soon by itself.
            wait_until(partial(_is_unused, there.registration), "the peer goes on")
        seen = target.array.copy()
        for _ in range(20):
            pair.peer.ping()
        assert np.array_equal(seen, target.array), "bytes were written after the end"
    again = pair.near.read(here.registration, spans, region, spans)
    assert again.wait(30.0) == size
    assert np.array_equal(here.array, there.array)


def _has_begun(transfer: Transfer, target: Bytes) -> bool:
    return transfer.is_done() or bool(target[0] != GUARD)


def _is_unused(registration: Registered) -> bool:
    return registration.users == 0


def check_deadline(pair: Pair) -> None:
    """A deadline that is over, or too short, ends the transfer with DeadlineError."""
    size = 24 << 20
    here, _, region = pair.sides(size)
    spans = Spans.whole(size)
    for write in pair.directions:
        for deadline_s in (-1.0, 0.0, 1e-6):
            began = time.monotonic()
            error = failure(pair.start, write, here, spans, region, spans, deadline_s)
            assert isinstance(error, DeadlineError), error
            assert time.monotonic() - began < BOUNDED_S


def check_once(pair: Pair) -> None:
    """Each transfer ends exactly once, also when it is cancelled at that very moment."""
    size = 256 << 10
    here, _, region = pair.sides(size)
    spans = Spans.whole(size)
    ends: list[int] = []
    done = threading.Semaphore(0)
    count = 40

    def ended(transfer: Transfer) -> None:
        ends.append(transfer.transfer_id)
        done.release()

    for _ in range(count):
        transfer = pair.near.read(here.registration, spans, region, spans)
        transfer.add_done_callback(ended)
        transfer.cancel()
    for _ in range(count):
        assert done.acquire(timeout=BOUNDED_S), "a transfer never ended"
    assert len(ends) == len(set(ends)) == count
    assert pair.near.statistics()["running"] == 0


def check_peer_closes(pair: Pair) -> None:
    """The peer's engine closes while bytes move: a typed error, or all bytes were there."""
    size = 17 << 20
    here, there, region = pair.sides(size)
    spans = Spans.whole(size)
    expected = there.array.copy()
    transfers = [pair.near.read(here.registration, spans, region, spans) for _ in range(4)]
    there.array = np.zeros(0, np.uint8)
    pair.far.close()
    for transfer in transfers:
        error = failure(transfer.wait, BOUNDED_S)
        assert error is None or isinstance(error, (PeerError, TransferError, StaleRegionError))
    if all(transfer.error is None for transfer in transfers):
        assert np.array_equal(here.array, expected)
    error = failure(pair.start, False, here, spans, region, spans)
    assert isinstance(error, PeerLostError), error
    wait_until(lambda: not any(_held(pair.transport)), "lanes or mappings of the peer are left")


def _held(transport: Transport) -> list[int]:
    return [n for key, n in transport.statistics().items() if key in ("lanes", "mappings")]


def check_close_midway(pair: Pair) -> None:
    """This engine closes while bytes move: every transfer ends, and nothing writes afterwards."""
    size = 17 << 20
    here, there, region = pair.sides(size)
    spans = Spans.whole(size)
    transfers = [pair.near.read(here.registration, spans, region, spans) for _ in range(4)]
    pair.near.close()
    assert all(transfer.is_done() for transfer in transfers), "a transfer outlived its engine"
    seen = here.array.copy()
    assert np.array_equal(seen, here.array)
    error = failure(pair.start, False, here, spans, region, spans)
    assert isinstance(error, KVFerryError)
    wait_until(partial(_is_unused, there.registration), "the peer still serves")


CHECKS: tuple[Callable[[Pair], None], ...] = (
    check_sizes,
    check_scattered,
    check_cut_differently,
    check_overlapping_source,
    check_many_spans,
    check_large,
    check_concurrent,
    check_read_only,
    check_bounds,
    check_stale,
    check_wrong_token,
    check_wrong_generation,
    check_abort,
    check_deadline,
    check_once,
    check_peer_closes,
    check_close_midway,
)
"""All checks, in the order in which a new transport should pass them."""


def run_check(
    check: Callable[[Pair], None],
    make: Make,
    *,
    local: str = "allocated",
    remote: str = "allocated",
    child: Child | None = None,
    **how: Any,
) -> None:
    """Run one check with fresh engines; raises what it raises, and AssertionError for leaks.

    child: the process of the far engine. how: more for ``pairs.engines``.
    """
    with engines(make, local=local, remote=remote, child=child, **how) as pair:
        check(pair)


def check_transport(
    make: Make,
    *,
    local: str = "allocated",
    remote: str = "allocated",
    skip: dict[str, str] | None = None,
    processes: int = 1,
    faults: bool = True,
) -> Report:
    """Run all checks against a transport. Blocks for some seconds.

    make: makes a new transport, such as its class. local, remote: ``"allocated"`` for memory from
    ``Engine.allocate`` or ``"plain"`` for memory that is only registered, on each side.
    skip: names of checks that cannot hold for this transport, each with the reason to report.
    processes: 2 for a far engine in another process; then ``make`` must be a class that can be
    imported. faults: whether the checks under faults run as well.

    Raises ConformanceError that names every check that failed, with the traceback's last lines.
    """
    if {local, remote} - {"allocated", "plain"}:
        raise ValueError("local and remote must be 'allocated' or 'plain'")
    if processes not in (1, 2):
        raise ValueError("processes must be 1 or 2")
    transport = make()
    report = Report(transport.name)
    if processes == 2:
        where(make)
        if transport.capabilities().same_process:
            raise ValueError(f"{transport.name} serves one process only")
    why_not = transport.unavailable()
    with Child() if processes == 2 and not why_not else nullcontext() as child:
        how: dict[str, Any] = {"local": local, "remote": remote, "child": child}
        runs = [(_name(check), partial(run_check, check, make, **how)) for check in CHECKS]
        if faults:
            runs += [(c.name, partial(run_fault_check, c, make, **how)) for c in FAULT_CHECKS]
        for name, run in runs:
            reason = why_not or (skip or {}).get(name, "")
            if reason:
                report.skipped[name] = reason
                continue
            try:
                run()
                report.passed.append(name)
            except Exception:
                report.failed[name] = "".join(traceback.format_exc().splitlines(keepends=True)[-6:])
    if report.failed:
        raise ConformanceError(str(report))
    return report


def _name(check: Callable[[Pair], None]) -> str:
    return check.__name__.removeprefix("check_")
