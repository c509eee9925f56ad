"""One fault and what it may do to requests; the verdict on all requests of a load. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.testing.load import Record

SLACK_S = 1.5
"""Health checks, timers and a busy machine, on top of the limits that are configured."""
CALM_MAX_S = 5.0
"""Longest wait of a request that nothing touched: at 64 clients they queue for each other."""
FORBIDDEN = ("wrong", "hang")
"""Outcomes that nothing explains."""


@dataclass(eq=False)
class Blow:
    """One fault, from its start to its end. Times are seconds of ``time.monotonic``.

    scenario, victim: names. worker: the victim's host:port, or "" when it is no worker.
    at, over: when it began, and when the victim was whole again.
    wait_s: longest wait of a request that it touched until its end or the next part of its answer.
    may: outcomes that it excuses, such as ``peer_lost`` (an error's code) or ``broken``.
    everyone: every request that ran meanwhile was touched, and not only the victim's.
    labels: requests that the victim had when it was hit.
    seen_limit_s: by when each observer must have noticed it; 0 when nobody needs to.
    seen: seconds until each did, None for one that did not.
    """

    scenario: str
    victim: str
    at: float
    wait_s: float
    worker: str = ""
    may: frozenset[str] = frozenset()
    everyone: bool = False
    labels: set[str] = field(default_factory=set)
    over: float = float("inf")
    seen_limit_s: float = 0.0
    seen: dict[str, float | None] = field(default_factory=dict)

    def touched(self, record: Record) -> bool:
        """Whether a request had to do with the victim before it was whole again."""
        workers = (record.prefill, record.decode)
        named = self.everyone or record.label in self.labels or self.worker in workers
        return named and record.begun <= self.over and (not record.ended or record.ended > self.at)

    def waited_s(self, record: Record) -> float:
        """From the blow, or the request's later start, to its end or the next part of it."""
        return record.next_sign_s(max(self.at, record.begun))

    def late(self) -> list[str]:
        """Observers that did not notice it in time, in words."""
        return [
            f"{self.scenario} of {self.victim}: {who} saw it "
            + (f"after {took_s:.2f} s" if took_s is not None else "not at all")
            + f", the limit is {self.seen_limit_s:g} s"
            for who, took_s in self.seen.items()
            if self.seen_limit_s and (took_s is None or took_s > self.seen_limit_s)
        ]


def outcome(record: Record) -> str:
    """How a request ended: an error by its code."""
    return record.code if record.outcome == "error" else record.outcome


def judge(records: Iterable[Record], blows: Sequence[Blow]) -> list[str]:
    """Everything that breaks a promise, in words.

    A wrong token and a request without an end always do; another failure does when no blow excuses
    it. A request that a blow touched must not wait for longer than the blow allows, and as long
    again as requests waited at this load that nothing touched; when another blow hit it before its
    next sign, both count.
    """
    problems: list[str] = []
    touching_of = [(record, [b for b in blows if b.touched(record)]) for record in records]
    calm_s = max((_longest_gap_s(r) for r, touching in touching_of if not touching), default=0.0)
    if calm_s > CALM_MAX_S:
        problems.append(f"a request that no fault touched waited {calm_s:.2f} s for a sign")
    for record, touching in touching_of:
        problems += _judge_end(record, touching)
        for blow in touching:
            later = [b for b in touching if b.at > blow.at]
            limit_s = blow.wait_s + min(calm_s, CALM_MAX_S) + sum(b.wait_s for b in later)
            if (waited_s := blow.waited_s(record)) > limit_s:
                problems.append(
                    f"{blow.scenario} of {blow.victim}: {waited_s:.2f} s without a sign, the limit "
                    f"is {limit_s:.2f} s: {record.explain()}"
                )
    return problems + [late for blow in blows for late in blow.late()]


def _longest_gap_s(record: Record) -> float:
    signs = [record.begun, *record.progress, record.ended]
    return max(after - before for before, after in itertools.pairwise(signs))


def _judge_end(record: Record, touching: Sequence[Blow]) -> list[str]:
    how = outcome(record)
    if how in ("ok", "left"):
        return []
    if how in FORBIDDEN:
        return [f"{how}: {record.explain()}"]
    if any(how in blow.may for blow in touching):
        return []
    why = "no fault touched it" if not touching else f"{touching[0].scenario} does not excuse it"
    return [f"an error without an excuse, {why}: {record.explain()}"]


def summary(records: Sequence[Record], blow: Blow) -> dict[str, Any]:
    """One blow in numbers: whom it touched, how they ended, how long they waited, who noticed."""
    touched = [record for record in records if blow.touched(record)]
    ends: dict[str, int] = {}
    for record in touched:
        ends[outcome(record)] = ends.get(outcome(record), 0) + 1
    return {
        "scenario": blow.scenario,
        "victim": blow.victim,
        "seconds": round(blow.over - blow.at, 3),
        "touched": len(touched),
        "outcomes": dict(sorted(ends.items())),
        "longest_wait_s": round(max((blow.waited_s(r) for r in touched), default=0.0), 3),
        "wait_limit_s": blow.wait_s,
        "seen_s": {
            who: None if took_s is None else round(took_s, 3) for who, took_s in blow.seen.items()
        },
        "seen_limit_s": blow.seen_limit_s,
    }
