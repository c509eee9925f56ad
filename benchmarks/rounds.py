"""Rounds: every rival takes its turn in each, so that all see the same noise.

A ratio is taken within one round, against the memcpy of that round, and the median of the ratios
is reported: on a shared machine it is far steadier than a rate.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from benchmarks.base import Case, MissingError, Rival, RivalError, Sample

T = TypeVar("T")

ROUNDS_MIN = 7
WARM_BELOW_S = 0.5
"""A run that took less is done a second time in the same turn, and only the second counts: the
others' turns left the caches cold. Slower runs do not notice."""
FAILURES_MAX = 2
"""A rival that fails in this many cases is not started again."""


@dataclass(slots=True)
class Cell:
    """One rival in one case.

    samples: by round. error: why there are none, or no more. verified: None when there is
    nothing to compare. base: the yardstick's seconds, by round.
    """

    rival: str
    case: Case
    samples: list[Sample] = field(default_factory=list)
    base: list[float] = field(default_factory=list)
    verified: bool | None = None
    error: str = ""

    @property
    def seconds(self) -> float:
        return statistics.median(sample.seconds for sample in self.samples)

    @property
    def gigabytes_per_s(self) -> float:
        return self.case.total_bytes / self.seconds / 1e9

    @property
    def cpu_s_per_gb(self) -> float:
        cpu_s = statistics.median(sample.cpu_s for sample in self.samples)
        return cpu_s / (self.case.total_bytes / 1e9)

    @property
    def ratio(self) -> float:
        """Median over rounds of this rival's rate as a share of the yardstick's."""
        return statistics.median(self._ratios())

    @property
    def ratio_range(self) -> tuple[float, float]:
        ratios = self._ratios()
        return min(ratios), max(ratios)

    def times_faster_than(self, other: Cell) -> float:
        """Median over rounds of this rival's rate over the other's, of the same case."""
        pairs = zip(self.samples, other.samples, strict=True)
        return statistics.median(theirs.seconds / ours.seconds for ours, theirs in pairs)

    def _ratios(self) -> list[float]:
        return [b / s.seconds for b, s in zip(self.base, self.samples, strict=True)]


class Contest:
    """All rivals over all cases. ``say`` is told in a few words what is going on."""

    def __init__(
        self, yardstick: Rival, rivals: Sequence[Rival], pool_bytes: int, say: Callable[[str], None]
    ) -> None:
        self._yardstick = yardstick
        self._all = [yardstick, *rivals]
        self._pool_bytes = pool_bytes
        self._say = say
        self._running: set[str] = set()
        self._failures: dict[str, int] = {}
        self._why: dict[str, str] = {}
        self.figures: dict[str, dict[str, float]] = {}

    def hold(self, cases: Sequence[Case], rounds: int) -> list[Cell]:
        """Measure everything. Blocks; every rival is stopped when it returns or raises."""
        try:
            cells = [cell for case in cases for cell in self._case(case, rounds)]
            for rival in self._all:
                if rival.name in self._running:
                    rival.resume()
                    self.figures[rival.name] = rival.figures()
                    rival.pause()
            return cells
        finally:
            for rival in self._all:
                rival.resume()
                rival.stop()

    def _case(self, case: Case, rounds: int) -> list[Cell]:
        cells = {rival.name: Cell(rival.name, case) for rival in self._all}
        ready = [rival for rival in self._all if rival.name in cells]
        ready = [rival for rival in ready if self._prepared(rival, cells[rival.name])]
        for i in range(rounds):
            self._say(f"{case.name}: round {i + 1} of {rounds}")
            # The order turns, so that nobody always comes after the same neighbour.
            turn = i % len(ready) if ready else 0
            took: dict[str, Sample] = {}
            for rival in [*ready[turn:], *ready[:turn]]:
                cell = cells[rival.name]
                if cell.error:
                    continue
                sample = self._guarded(rival, cell, partial(_warm, rival))
                if sample is not None:
                    took[rival.name] = sample
            base = took.get(self._yardstick.name)
            if base is None:
                raise RivalError(f"no yardstick: {cells[self._yardstick.name].error}")
            for name, sample in took.items():
                cells[name].samples.append(sample)
                cells[name].base.append(base.seconds)
        return list(cells.values())

    def _prepared(self, rival: Rival, cell: Cell) -> bool:
        """Start if needed, prepare, and verify one move; the cell's error says what failed."""
        if self._failures.get(rival.name, 0) >= FAILURES_MAX:
            cell.error = self._why[rival.name]
            return False
        self._say(f"{cell.case.name}: {rival.name} prepares")

        def ready() -> bool:
            if rival.name not in self._running:
                rival.start(self._pool_bytes)
                self._running.add(rival.name)
            rival.prepare(cell.case)
            cell.verified = rival.verify()
            if cell.verified is False:
                raise RivalError("WRONG BYTES arrived")
            return True

        return self._guarded(rival, cell, ready) is True

    def _guarded(self, rival: Rival, cell: Cell, call: Callable[[], T]) -> T | None:
        """One turn: resume, call, pause. A failure is noted in the cell and the rival stopped."""
        try:
            rival.resume()
            result = call()
            rival.pause()
            return result
        except RivalError as error:
            cell.error = self._why[rival.name] = str(error)
            absent = isinstance(error, MissingError)
            self._failures[rival.name] = FAILURES_MAX if absent else self._failed(rival)
            self._running.discard(rival.name)
            rival.stop()
            return None

    def _failed(self, rival: Rival) -> int:
        return self._failures.get(rival.name, 0) + 1


def _warm(rival: Rival) -> Sample:
    sample = rival.run()
    return rival.run() if sample.seconds < WARM_BELOW_S else sample
