"""Trails of several sides as one time line.

Clocks of two machines are never compared. What is known is which event caused which: a message is
not heard before it was said. Each such pair bounds the difference of two clocks, and a question
with its answer bounds it from both ends. What no message bounds is shown beside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.telemetry.events import seconds, text_of

Plain = Mapping[str, Any]

CAUSES = (
    ("request", "prefill_asked", "offer", "offered"),
    ("offer", "offered", "request", "prefill_answered"),
    ("offer", "offered", "claim", "claimed"),
    ("request", "decode_asked", "claim", "claimed"),
    ("claim", "claim_asked", "offer", "claim_arrived"),
    ("offer", "claim_granted", "claim", "granted"),
    ("offer", "claim_refused", "claim", "refused"),
    ("offer", "withdrawal_said", "claim", "withdrawn"),
    ("claim", "confirm_asked", "offer", "confirm_arrived"),
    ("offer", "confirm_granted", "claim", "confirmed"),
    ("claim", "stop_said", "offer", "stop_arrived"),
    ("claim", "ended", "request", "first_byte"),
)
"""(kind of trail, event) that must come before (kind of trail, event)."""

_ORDER = {"claim": 0, "transfer": 1, "request": 2, "offer": 3}


@dataclass(frozen=True, slots=True)
class Line:
    """One event. at_s: since the first of all, or of its side where ``is_aligned`` is false."""

    at_s: float
    side: str
    text: str
    event: Plain
    is_aligned: bool


@dataclass(frozen=True, slots=True)
class Timeline:
    """The lines in order; those that could not be aligned follow, side by side. notes: how well."""

    lines: tuple[Line, ...]
    notes: tuple[str, ...]


def side_of(trail: Plain) -> str:
    """What a line says about where it happened."""
    role = {"claim": "decode", "offer": "prefill", "request": "router"}.get(
        str(trail.get("kind")), "engine"
    )
    name = str(trail.get("engine") or "")
    return role if name == role or not name else f"{role} {name}"


ROUNDING_S = 1e-6
"""Bounds that meet may miss each other by so much, because they are sums of floats."""


def merge(trails: Sequence[Plain]) -> Timeline:
    """All events of all trails, aligned by what caused what."""
    trails = sorted(trails, key=lambda trail: _ORDER.get(str(trail.get("kind")), 9))
    placed: list[tuple[Plain, float]] = [(trails[0], 0.0)] if trails else []
    notes: list[str] = []
    waiting = trails[1:]
    while waiting:
        bounds = [(_bounds(trail, placed), trail) for trail in waiting]
        # The one that is known best comes next: it helps to place the others.
        (low, high), trail = min(bounds, key=lambda each: _slack(*each[0]))
        if _slack(low, high) == math.inf and not (math.isfinite(low) or math.isfinite(high)):
            break
        if low > high + ROUNDING_S:
            break
        at, note = _place(low, high)
        notes.append(f"{side_of(trail)}: {note}")
        # At the very same time, what can only have been earlier stands first.
        placed.insert(0 if math.isinf(low) else len(placed), (trail, at))
        waiting = [each for each in waiting if each is not trail]
    aligned = [line for trail, at in placed for line in _lines(trail, at, is_aligned=True)]
    zero = min((line.at_s for line in aligned), default=0.0)
    lines = [
        Line(line.at_s - zero, line.side, line.text, line.event, True)
        for line in sorted(aligned, key=lambda line: line.at_s)
    ]
    for trail in waiting:
        notes.append(f"{side_of(trail)}: no message joins its clock to the others'; from its start")
        lines += _lines(trail, 0.0, is_aligned=False)
    return Timeline(tuple(lines), tuple(notes))


def _lines(trail: Plain, at: float, *, is_aligned: bool) -> Iterator[Line]:
    side = side_of(trail)
    for event in trail.get("events") or ():
        yield Line(_at(event) + at, side, text_of(event), event, is_aligned)


def _at(event: Plain) -> float:
    at = event.get("at_s")
    return float(at) if isinstance(at, (int, float)) and math.isfinite(at) else 0.0


def _first(trail: Plain, name: str) -> float | None:
    events = trail.get("events") or ()
    return next((_at(event) for event in events if event.get("event") == name), None)


def _bounds(trail: Plain, placed: list[tuple[Plain, float]]) -> tuple[float, float]:
    """Between what and what the start of ``trail`` lies, in the time of those that have a place."""
    low, high = -math.inf, math.inf
    for other, at in placed:
        for cause, cause_event, effect, effect_event in CAUSES:
            if (cause, effect) == (other.get("kind"), trail.get("kind")):
                before, after = _first(other, cause_event), _first(trail, effect_event)
                if before is not None and after is not None:
                    low = max(low, at + before - after)
            elif (cause, effect) == (trail.get("kind"), other.get("kind")):
                before, after = _first(trail, cause_event), _first(other, effect_event)
                if before is not None and after is not None:
                    high = min(high, at + after - before)
    return low, high


def _slack(low: float, high: float) -> float:
    return (high - low) / 2 if math.isfinite(high - low) else math.inf


def _place(low: float, high: float) -> tuple[float, str]:
    if math.isfinite(low) and math.isfinite(high):
        slack = seconds((high - low) / 2)
        return (low + high) / 2, f"aligned by its messages, to within {slack}"
    if math.isfinite(low):
        return low, "not earlier than shown; no answer says how much later"
    return high, "not later than shown; nothing says how much earlier"
