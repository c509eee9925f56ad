"""The table of workers: who is healthy, who is busy, who is next. Pure: the caller brings the time.

Two facts are kept apart. A worker is *up* or *down* for new requests. It is *lost* when nothing at
all has been heard from it, only then are the requests in flight on it given up: a worker that
refuses new connections or reports itself unwell is often finishing what it has.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, Role] = ("prefill", "decode")


class Sign(StrEnum):
    """What one health check, or one attempt to connect, showed."""

    GOOD = "good"
    UNWELL = "unwell"  # an answer, but not a good one
    REFUSED = "refused"  # the host says that nobody listens
    SILENT = "silent"  # no answer of any kind in time


class Change(NamedTuple):
    """What a sign changed; ``lost`` says that requests in flight there should be given up."""

    came_up: bool = False
    went_down: bool = False
    lost: bool = False


@dataclass(eq=False)
class Worker:
    """One worker and what is known of it. ``inflight`` counts legs that are running on it now."""

    role: Role
    url: str
    up: bool = False
    reason: str = "not yet checked"
    inflight: int = 0
    picked_at: int = 0
    good_at: float = float("-inf")
    answered_at: float = float("-inf")

    @property
    def name(self) -> str:
        """Host and port, as headers, metrics and messages show it."""
        return urlsplit(self.url).netloc


class WorkerTable:
    """All workers of one router. Counters live as long as the worker is configured."""

    def __init__(
        self, prefill: Sequence[str], decode: Sequence[str], *, lost_s: float, now: float
    ) -> None:
        self.workers: tuple[Worker, ...] = tuple(
            Worker(role, url, answered_at=now)
            for role, urls in zip(ROLES, (prefill, decode), strict=True)
            for url in urls
        )
        self._lost_s = lost_s
        self._picks = 0

    def of(self, role: Role) -> list[Worker]:
        return [worker for worker in self.workers if worker.role == role]

    def choose(self, role: Role, tried: Collection[Worker] = ()) -> Worker | None:
        """The healthy worker with the fewest legs that is not in ``tried``, or None.

        Among equals it is the one chosen longest ago: round robin, whatever the set of candidates.
        """
        able = [worker for worker in self.of(role) if worker.up and worker not in tried]
        if not able:
            return None
        worker = min(able, key=lambda each: (each.inflight, each.picked_at))
        self._picks += 1
        worker.picked_at = self._picks
        return worker

    def observe(self, worker: Worker, sign: Sign, detail: str, now: float) -> Change:
        """Take one sign of life, or of its absence, into account at time ``now`` (seconds)."""
        was_up = worker.up
        if sign is not Sign.SILENT:
            worker.answered_at = now
        if sign is Sign.GOOD:
            worker.good_at = now
            worker.up, worker.reason = True, ""
            return Change(came_up=not was_up)
        if sign is Sign.REFUSED or now - worker.good_at >= self._lost_s:
            worker.up, worker.reason = False, detail
        lost = sign is Sign.SILENT and now - worker.answered_at >= self._lost_s
        return Change(went_down=was_up and not worker.up, lost=lost)

    def patience_s(self, worker: Worker, now: float, limit_s: float) -> float:
        """How long the next health check may take, so that silence is noticed when it is loss."""
        left_s = worker.answered_at + self._lost_s - now
        return min(limit_s, left_s) if left_s > 0 else limit_s
