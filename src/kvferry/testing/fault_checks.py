"""What must come of each fault of a path, as checks of any transport inside a FaultyTransport.

One table, ``FAULT_CHECKS``, names the fault, the right outcome and the check. Each check starts
transfers of several shapes in both directions with the fault on, looks at how they end, and then
moves the same bytes again without it: the engine, its peer and the path must be as good as new.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvferry.errors import (
    AbortedError,
    BusyError,
    CorruptError,
    DeadlineError,
    KVFerryError,
    PeerLostError,
    RegistrationError,
    StallError,
)
from kvferry.regions import Spans
from kvferry.testing.faulty import FaultyTransport
from kvferry.testing.pairs import (
    BOUNDED_S,
    Bytes,
    LocalSide,
    Make,
    Pair,
    Side,
    engines,
    failure,
    take,
    wait_until,
)
from kvferry.transfer import Transfer
from kvferry.transports.base import RemoteRegion

SHORT_S = 0.1
"""A deadline that a fault runs into."""
FAR_S = 30.0
"""A deadline that must not be what ends a transfer."""
STOP_S = 0.2
"""For these checks a transport that does not stop is given up sooner than usual."""
QUICK = {"heartbeat_s": 0.05, "lost_s": 5.0, "stall_s": 0.1}
"""Settings with which a stall is seen at once."""


@dataclass(slots=True)
class Attempt:
    """One transfer with a fault."""

    shape: str
    write: bool
    here: LocalSide
    there: Side
    region: RemoteRegion
    local: Spans
    remote: Spans
    before: Bytes
    transfer: Transfer
    ends: list[KVFerryError | None] = field(default_factory=list)

    @property
    def target(self) -> Bytes:
        """The bytes of the target's spans now."""
        return take(self.there.array, self.remote) if self.write else self._here

    @property
    def source(self) -> Bytes:
        return self._here if self.write else take(self.there.array, self.remote)

    @property
    def _here(self) -> Bytes:
        return take(self.here.array, self.local)

    def ended(self, transfer: Transfer) -> None:
        """Called at the end of its transfer."""
        self.ends.append(transfer.error)

    def end(self) -> KVFerryError | None:
        """How it ended. Raises AssertionError when it does not end soon."""
        error = failure(self.transfer.wait, BOUNDED_S)
        assert self.transfer.is_done(), f"{self}: no end after {BOUNDED_S:g} s"
        return error

    def __str__(self) -> str:
        return f"{'write' if self.write else 'read'} of {self.shape}"


def faulty(pair: Pair) -> FaultyTransport:
    """The near engine's transport."""
    assert isinstance(pair.transport, FaultyTransport)
    return pair.transport


def shapes() -> list[tuple[str, int, Spans, Spans]]:
    """(name, bytes of a region, local spans, remote spans): short, scattered, long."""
    rng = np.random.default_rng(7)
    local, remote = rng.permutation(48)[:40], rng.permutation(48)[:40]
    long = (2 << 20) + 4097
    return [
        ("one span", 5000, Spans.of([7], [4097]), Spans.of([500], [4097])),
        ("40 blocks", 48 * 4104, Spans.blocks(local, 4104), Spans.blocks(remote, 4104)),
        ("a long span", long + 64, Spans.of([9], [long]), Spans.of([64], [long])),
    ]


def attempts(pair: Pair, deadline_s: float = FAR_S) -> list[Attempt]:
    """Start a transfer of each shape in each direction, with the fault that is on."""
    pair.near.moves.stop_s = STOP_S
    made = []
    for write in pair.directions:
        for shape, nbytes, local, remote in shapes():
            here, there, region = pair.sides(nbytes)
            before = take(there.array, remote) if write else take(here.array, local)
            transfer = pair.start(write, here, local, region, remote, deadline_s)
            attempt = Attempt(shape, write, here, there, region, local, remote, before, transfer)
            transfer.add_done_callback(attempt.ended)
            made.append(attempt)
    return made


def expect(made: list[Attempt], kinds: type[KVFerryError] | tuple[type[KVFerryError], ...]) -> None:
    """Each ends soon, once, in one of these errors, with peer, path and stage named."""
    for attempt in made:
        error = attempt.end()
        assert isinstance(error, kinds), f"{attempt} ended with {error!r}"
        assert error.peer == "far", f"{attempt}: the error does not name the peer"
        assert error.path, f"{attempt}: the error does not name the path"
        assert error.stage, f"{attempt}: the error does not name the stage"
        assert error.bytes_done < attempt.transfer.nbytes, f"{attempt} failed although all moved"
        assert len(attempt.ends) == 1, f"{attempt} ended {len(attempt.ends)} times"


def sound_again(pair: Pair, made: list[Attempt]) -> None:
    """Without the fault the same memory serves the same transfers; then all of it goes."""
    path = faulty(pair)
    path.fault = ""
    assert pair.peer.is_open(), "a fault of the path ended the session"
    wait_until(lambda: path.held == 0, "the wrapper still holds operations")
    figures = pair.near.statistics()
    assert (figures["running"], figures["quarantined"]) == (0, 0), figures
    for attempt in made:
        assert attempt.transfer.is_quiet(), f"{attempt}: something may still write"
        again = pair.start(
            attempt.write, attempt.here, attempt.local, attempt.region, attempt.remote
        )
        assert again.wait(BOUNDED_S) == again.nbytes
        assert np.array_equal(attempt.target, attempt.source), f"{attempt}: wrong bytes afterwards"
        assert len(attempt.ends) == 1, f"{attempt} ended {len(attempt.ends)} times"
        attempt.here.registration.close()
        attempt.there.registration.close()


# -- one check per fault -------------------------------------------------------------------------


def check_stall(pair: Pair) -> None:
    """See the table."""
    faulty(pair).fault = "stall"
    made = attempts(pair, SHORT_S)
    expect(made, DeadlineError)
    cancelled = attempts(pair)
    for attempt in cancelled:
        attempt.transfer.cancel()
    expect(cancelled, AbortedError)
    sound_again(pair, [*made, *cancelled])


def check_stall_seen(pair: Pair) -> None:
    """See the table."""
    faulty(pair).fault = "stall"
    made = attempts(pair)
    expect(made, StallError)
    sound_again(pair, made)


def check_slow(pair: Pair) -> None:
    """See the table."""
    path = faulty(pair)
    path.fault, path.pause_s = "slow", 0.02
    made = attempts(pair)
    for attempt in made:
        error = attempt.end()
        assert error is None, f"{attempt} ended with {error!r}"
        assert np.array_equal(attempt.target, attempt.source), f"{attempt}: wrong bytes"
    path.pause_s = 2 * SHORT_S
    late = attempts(pair, SHORT_S)
    expect(late, DeadlineError)
    sound_again(pair, [*made, *late])


def check_drop_completion(pair: Pair) -> None:
    """See the table."""
    path = faulty(pair)
    path.fault = "drop_completion"
    made = attempts(pair, SHORT_S)
    began = time.monotonic()
    expect(made, (DeadlineError, StallError))
    assert time.monotonic() - began < SHORT_S + STOP_S + 2.0, "much later than its deadline"
    in_quarantine(pair, made)
    wait_until(lambda: path.silent == len(made), "some bytes still move")
    assert path.release() == len(made)
    sound_again(pair, made)


def check_late_completion(pair: Pair) -> None:
    """See the table."""
    path = faulty(pair)
    path.fault = "late_completion"
    made = attempts(pair)
    wait_until(lambda: path.silent == len(made), "half of the bytes never moved")
    for attempt in made:
        attempt.transfer.cancel()
    expect(made, AbortedError)
    in_quarantine(pair, made)
    for attempt in made:
        assert not np.array_equal(attempt.target, attempt.source), "nothing was left to be late"
    closing = threading.Thread(target=made[0].here.registration.close)
    made[0].transfer.when_quiet(closing.start)
    path.release()
    for attempt in made:
        wait_until(attempt.transfer.is_quiet, f"{attempt}: it reported, and is not quiet")
        assert np.array_equal(attempt.target, attempt.source), "the late bytes did not come"
        assert isinstance(attempt.transfer.error, AbortedError), "its end has changed afterwards"
    closing.join(BOUNDED_S)
    assert made[0].here.registration.is_freed, "the memory was not freed when it was quiet"
    sound_again(pair, made[1:])


def in_quarantine(pair: Pair, made: list[Attempt]) -> None:
    """These have ended, and nobody gets their targets, while their transport is silent."""
    path = faulty(pair)
    fault, path.fault = path.fault, ""
    assert pair.near.statistics()["quarantined"] == len(made)
    for attempt in made:
        assert not attempt.transfer.is_quiet(), f"{attempt} is quiet, and its transport is not"
        error = attempt.transfer.error
        assert error is not None
        assert error.stage == "stop", f"{attempt}: the stage is {error.stage!r}"
        assert "; " in str(error), f"{attempt}: the error does not say what to do"
        again = failure(
            pair.start, attempt.write, attempt.here, attempt.local, attempt.region, attempt.remote
        )
        assert isinstance(again, BusyError), f"{attempt}: its target was given away: {again!r}"
        assert pair.near.moves.uses(attempt.here.region.region_id), "its region could be freed"
    path.fault = fault


def check_drop_and_close(pair: Pair) -> None:
    """See the table."""
    faulty(pair).fault = "drop_completion"
    made = attempts(pair)
    pair.near.close()
    for attempt in made:
        assert attempt.transfer.is_done(), f"{attempt} outlived its engine"
        assert isinstance(attempt.transfer.error, AbortedError), attempt.transfer.error
        assert attempt.transfer.is_quiet(), f"{attempt}: something may still write"
        assert len(attempt.ends) == 1, f"{attempt} ended {len(attempt.ends)} times"


def check_duplicate_completion(pair: Pair) -> None:
    """See the table."""
    faulty(pair).fault = "duplicate_completion"
    before = pair.near.statistics()
    made = attempts(pair)
    for attempt in made:
        error = attempt.end()
        assert error is None, f"{attempt} ended with {error!r}"
        assert np.array_equal(attempt.target, attempt.source), f"{attempt}: wrong bytes"
    after = pair.near.statistics()
    moved = sum(attempt.transfer.nbytes for attempt in made)
    assert after["bytes"] - before["bytes"] == moved, "bytes were counted twice"
    assert after["failed"] == before["failed"]
    sound_again(pair, made)


def check_corrupt(pair: Pair) -> None:
    """See the table."""
    faulty(pair).fault = "corrupt"
    made = attempts(pair)
    for attempt in made:
        error = attempt.end()
        assert error is None, f"{attempt} ended with {error!r}"
        wrong = int(np.count_nonzero(attempt.target != attempt.source))
        assert wrong == 1, f"{attempt}: {wrong} bytes are wrong where the fault changes one"
    sound_again(pair, made)


def check_corrupt_seen(pair: Pair) -> None:
    """See the table."""
    faulty(pair).fault = "corrupt"
    made = attempts(pair)
    for attempt in made:
        error = attempt.end()
        assert isinstance(error, CorruptError), f"{attempt} ended with {error!r}"
        assert error.fix, f"{attempt}: the error does not say what to do"
    sound_again(pair, made)


def check_truncate(pair: Pair) -> None:
    """See the table."""
    faulty(pair).fault = "truncate"
    made = attempts(pair)
    expect(made, CorruptError)
    for attempt in made:
        error = attempt.transfer.error
        assert error is not None
        assert error.bytes_done == attempt.transfer.nbytes // 2
    sound_again(pair, made)


def check_close_midflight(pair: Pair) -> None:
    """See the table."""
    faulty(pair).fault = "close_midflight"
    made = attempts(pair)
    expect(made, PeerLostError)
    sound_again(pair, made)


def check_fail_at_submit(pair: Pair) -> None:
    """See the table."""
    faulty(pair).fault = "fail_at_submit"
    made = attempts(pair)
    expect(made, RegistrationError)
    for attempt in made:
        error = attempt.transfer.error
        assert error is not None
        assert error.stage == "submit"
        assert np.array_equal(attempt.target, attempt.before), f"{attempt}: bytes moved"
    sound_again(pair, made)


@dataclass(frozen=True, slots=True)
class FaultCheck:
    """A row of the table. settings: of both engines."""

    fault: str
    when: str
    outcome: str
    check: Callable[[Pair], None]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "fault_" + self.check.__name__.removeprefix("check_")


FAULT_CHECKS: tuple[FaultCheck, ...] = (
    FaultCheck(
        "stall",
        "the deadline comes first, or a cancel",
        "DeadlineError at the deadline, AbortedError at the cancel; the bytes that came are named",
        check_stall,
    ),
    FaultCheck(
        "stall",
        "`stall_s` passes first",
        "StallError, long before the deadline; the peer's session goes on",
        check_stall_seen,
        QUICK,
    ),
    FaultCheck(
        "slow",
        "each pause is shorter than `stall_s`",
        "success, never StallError; DeadlineError if the deadline is too short",
        check_slow,
        QUICK | {"stall_s": 1.0},
    ),
    FaultCheck(
        "drop_completion",
        "the deadline passes",
        "DeadlineError (or StallError) with stage `stop`, a second after it at the latest; the "
        "target stays in quarantine until the transport reports",
        check_drop_completion,
    ),
    FaultCheck(
        "drop_completion",
        "the engine is closed",
        "AbortedError; then all memory is free, since the transport is closed",
        check_drop_and_close,
    ),
    FaultCheck(
        "duplicate_completion",
        "always",
        "success, reported and counted once; the second report is logged as the transport's bug",
        check_duplicate_completion,
    ),
    FaultCheck(
        "corrupt",
        '`checksum="off"`',
        "**cannot be seen**: success with a wrong byte",
        check_corrupt,
    ),
    FaultCheck(
        "corrupt",
        '`checksum="full"`',
        "CorruptError",
        check_corrupt_seen,
        {"checksum": "full"},
    ),
    FaultCheck(
        "truncate",
        "always",
        "CorruptError that names how many bytes came, never success",
        check_truncate,
    ),
    FaultCheck(
        "close_midflight",
        "always",
        "PeerLostError; the session goes on, and the next transfer opens lanes and mappings anew",
        check_close_midflight,
    ),
    FaultCheck(
        "fail_at_submit",
        "always",
        "RegistrationError with stage `submit`; the target is untouched",
        check_fail_at_submit,
    ),
    FaultCheck(
        "late_completion",
        "it was cancelled",
        "AbortedError with stage `stop`; the target stays in quarantine until the late report, "
        "which changes nothing else",
        check_late_completion,
    ),
)
"""Every fault and the right outcome when no other path can take over."""


def run_fault_check(row: FaultCheck, make: Make, **how: Any) -> None:
    """Run one row with fresh engines; ``how`` is for ``pairs.engines``."""
    with engines(make, wrap=FaultyTransport, **{**row.settings, **how}) as pair:
        row.check(pair)
