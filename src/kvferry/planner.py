"""Which path a transfer takes, and why. Pure: facts in, a ranked plan out.

The planner is told what each transport can do and why it may be blocked for this pair; it adds what
was measured, and sorts by expected time for this size. It never guesses silently: every transport
ends up either ranked or rejected, each with a sentence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvferry.transports.base import Capabilities

PathKey = tuple[str, str]
"""(transport, direction)."""


@dataclass(frozen=True, slots=True)
class PairFacts:
    """What the planner must know about the two sides.

    write: whether the local side is the source. same_process, same_host, unix: what they share.
    remote_access: what the remote region allows.
    """

    local_kind: str
    remote_kind: str
    write: bool
    same_process: bool
    same_host: bool
    unix: bool
    remote_access: str
    allowed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TransportFacts:
    """One transport for one pair. ``local``/``remote``: why a side does not have it, or ""."""

    name: str
    capabilities: Capabilities
    local: str = ""
    remote: str = ""
    blocked: str = ""


SAMPLES_MAX = 16
SAMPLES_MIN = 3
"""So many transfers must have been seen before a path's speed counts as measured."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What was seen of a path: bytes per second of its latest transfers, oldest first."""

    samples: tuple[float, ...] = ()

    def with_sample(self, bytes_per_s: float) -> Rate:
        return Rate((*self.samples, bytes_per_s)[-SAMPLES_MAX:])

    @property
    def is_measured(self) -> bool:
        return len(self.samples) >= SAMPLES_MIN

    @property
    def bytes_per_s(self) -> float:
        """The best of the latest. A busy machine, a first touch of memory or a queue only ever make
        a transfer slower, so the best says most about the path.
        """
        return max(self.samples)


@dataclass(frozen=True, slots=True)
class Tried:
    """What a trial of a path showed, between memories such as these.

    day: when it was, such as "2026-05-31". bytes_per_s: how fast its bytes arrived.
    why: what went wrong instead, to follow "a trial", such as "brought zeros"; "" if it is proven.
    """

    day: str
    bytes_per_s: float = 0.0
    why: str = ""


@dataclass(frozen=True, slots=True)
class _Speed:
    """How fast a path is known to be, and from where."""

    bytes_per_s: float
    source: str


@dataclass(frozen=True, slots=True)
class RankedPath:
    """A path that works, with the time it should take for this size and why."""

    transport: str
    direction: str
    expected_s: float
    reason: str

    @property
    def name(self) -> str:
        return f"{self.transport}/{self.direction}"


@dataclass(frozen=True, slots=True)
class Plan:
    """Ranked paths, fastest first, and the rejected transports with their reasons."""

    paths: tuple[RankedPath, ...]
    rejected: dict[str, str]

    def explain(self) -> str:
        """The decision in words, a line per transport."""
        lines = []
        for place, path in enumerate(self.paths):
            mark = "chosen" if place == 0 else f"no. {place + 1}"
            lines.append(f"{mark:>8}  {path.name}: {path.reason}")
        lines += [f"rejected  {name}: {reason}" for name, reason in self.rejected.items()]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, object]:
        """For ``--json``."""
        return {
            "paths": [
                {"path": p.name, "expected_s": p.expected_s, "reason": p.reason} for p in self.paths
            ],
            "rejected": dict(self.rejected),
        }


def rank(
    pair: PairFacts,
    transports: Iterable[TransportFacts],
    *,
    nbytes: int,
    spans: int,
    rates: Mapping[PathKey, Rate] | None = None,
    demoted: Mapping[PathKey, str] | None = None,
    trials: Mapping[PathKey, Tried] | None = None,
) -> Plan:
    """The plan for one transfer of ``nbytes`` bytes in ``spans`` pieces.

    rates: measured speeds, which replace the transport's own expectation.
    trials: what trials showed. A path that failed one is rejected; the speed of one that passed
    counts until the path was measured in use.
    demoted: paths that failed lately with the reason; they are ranked last, not dropped, so that
    something is still tried when everything else is gone.
    """
    direction = "push" if pair.write else "pull"
    good: list[tuple[bool, float, RankedPath]] = []
    rejected: dict[str, str] = {}
    known = _speeds(rates or {}, trials or {})
    transports = list(transports)
    scale = _scale(transports, direction, known)
    for facts in transports:
        key = (facts.name, direction)
        why_not = _objection(pair, facts) or _failed_trial((trials or {}).get(key))
        if why_not:
            rejected[facts.name] = why_not
            continue
        expected, reason = _expect(facts.capabilities, nbytes, spans, known.get(key), scale)
        failed = (demoted or {}).get(key, "")
        if failed:
            reason += f"; tried last, because it failed lately: {failed}"
        path = RankedPath(facts.name, direction, expected, reason)
        good.append((bool(failed), expected, path))
    good.sort(key=lambda item: item[:2])
    return Plan(tuple(path for _, _, path in good), rejected)


def _objection(pair: PairFacts, facts: TransportFacts) -> str:
    """Why the transport cannot serve the pair; empty if it can."""
    can = facts.capabilities
    if pair.allowed and facts.name not in pair.allowed:
        return f"not enabled here: transports={','.join(pair.allowed)}"
    if facts.local:
        return f"not usable here: {facts.local}"
    if facts.remote:
        return f"not usable on the peer: {facts.remote}"
    for side, kind in (("local", pair.local_kind), ("remote", pair.remote_kind)):
        if kind not in can.kinds:
            return f"cannot touch {kind} memory, and the {side} region is {kind}"
    if pair.write and not can.push:
        return "cannot push, and the local side is the source"
    if not pair.write and not can.pull:
        return "cannot pull, and the local side is the target"
    if pair.write and pair.remote_access != "read-write":
        return "the remote region is registered for reading only"
    if can.same_process and not pair.same_process:
        return "the engines are in different processes"
    if can.same_host and not pair.same_host:
        return "the engines are on different hosts"
    if can.needs_unix and not pair.unix:
        return (
            "no Unix socket is shared with the peer: mount one directory into both containers and "
            "name it by KVFERRY_DIRECTORY"
        )
    return facts.blocked


def _failed_trial(tried: Tried | None) -> str:
    return f"a trial on {tried.day} {tried.why}" if tried is not None and tried.why else ""


def _speeds(
    rates: Mapping[PathKey, Rate], trials: Mapping[PathKey, Tried]
) -> dict[PathKey, _Speed]:
    """What is known of each path's speed; use says more than a trial."""
    known = {
        key: _Speed(tried.bytes_per_s, f"in a trial on {tried.day}")
        for key, tried in trials.items()
        if not tried.why
    }
    for key, rate in rates.items():
        if rate.is_measured:
            known[key] = _Speed(rate.bytes_per_s, "measured in use")
    return known


def _scale(
    transports: list[TransportFacts], direction: str, known: Mapping[PathKey, _Speed]
) -> float:
    """How much slower than expected this machine is, by the paths that were measured; at most 1.

    A path that was never tried must not win because the others were measured on a slow machine.
    """
    ratios = [
        known[facts.name, direction].bytes_per_s / facts.capabilities.bytes_per_s
        for facts in transports
        if (facts.name, direction) in known
    ]
    return min([1.0, *ratios])


def _expect(
    can: Capabilities, nbytes: int, spans: int, known: _Speed | None, scale: float
) -> tuple[float, str]:
    speed = known.bytes_per_s if known else can.bytes_per_s * scale
    seconds = can.latency_s + spans * can.span_s + nbytes / speed
    note = f", {can.note}" if can.note else ""
    source = known.source if known else "expected"
    return seconds, f"{_rate(speed)} {source}, {_time(seconds)} for this size{note}"


def _rate(bytes_per_s: float) -> str:
    """Two digits, and never an exponent where people would write the number."""
    gigabytes = bytes_per_s / 1e9
    return f"{gigabytes:.0f} GB/s" if gigabytes >= 10 else f"{gigabytes:.2g} GB/s"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"
