"""A trail in one paragraph: who waited for what and how long, what moved by which path, what to do.

Works on trails as plain JSON types, so that a dump of another process can be told as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvferry.telemetry.events import EVENTS, printable, seconds, size

Plain = Mapping[str, Any]

NEXT = {
    "unreachable": "see whether the other process runs and whether its address can be reached",
    "peer_lost": "look at the other process's log and exit status: it died, froze or was cut off",
    "deadline": "look which wait above is the long one; raise the deadline if it is only slow",
    "stall": "look for what drops packets between the two (a firewall, an MTU that differs)",
    "corrupt": "take the path out of use, and look for a bad link or memory below it",
    "no_path": "make one of the reasons go away; tcp needs the least",
    "busy": "send less at once, or raise the limit that is named",
    "expired": "see why nobody claimed in time: is decode full, or is its request lost? Raise "
    "offer_s if it only queues",
    "unknown_offer": "start again from prefill: this offer was never made there, or ended long ago",
    "already_claimed": "see whether a router or client sends the same request twice",
    "already_delivered": "see whether a router or client sends the same request twice",
    "released": "ask the other side with the same id: it ended the hand-off, and knows why",
    "auth": "give both sides the same cluster key and certificates of one authority",
    "version": "run the same kvferry release on both sides",
    "geometry": "run the same model in the same KV dtype on both sides",
    "stale_region": "start again from prefill: its memory was given up in between",
    "aborted": "nothing: somebody asked for this end",
    "cancelled": "nothing: somebody asked for this end",
    "closed": "nothing: the engine was being closed",
}
"""What to try next, by error code, where the error itself does not say."""

_OTHERWISE = "look at the time line, and at the log of both sides"


def tell(trail: Plain) -> str:
    """The story of one trail."""
    sentences = [_opening(trail), _waits(trail), _bytes(trail), _before(trail), _peer(trail)]
    if trail.get("outcome") == "failed":
        sentences.append(f"Try this: {_next(trail)}.")
    return " ".join(sentence for sentence in sentences if sentence)


def _opening(trail: Plain) -> str:
    kind, engine = trail.get("kind", ""), trail.get("engine") or "the engine"
    names = []
    if trail.get("handoff"):
        names.append(f"hand-off {trail['handoff']}")
    elif kind == "transfer":
        names.append(f"transfer {trail.get('id', '')}")
    labels = trail.get("labels") or []
    if labels:
        names.append(f"request {labels[0]}")
    what = {
        "claim": f"{engine} claimed KV from {_peer_name(trail, 'prefill')}",
        "offer": f"{engine} offered KV{_to_whom(trail)}",
        "request": f"{engine} had a request",
    }.get(kind, f"{engine} {_direction(trail)}")
    took = seconds(float(trail.get("seconds") or 0.0))
    return f"{what} ({', '.join(names) or kind}); it {_end(trail, took)}."


def _to_whom(trail: Plain) -> str:
    return f", claimed by {trail['peer']}" if trail.get("peer") else ", which nobody claimed"


def _direction(trail: Plain) -> str:
    verb, word = ("wrote", "to") if trail.get("write") else ("read", "from")
    return f"{verb} {size(trail.get('nbytes') or 0)} {word} {_peer_name(trail, 'its peer')}"


def _peer_name(trail: Plain, otherwise: str) -> str:
    return str(trail.get("peer") or otherwise)


def _end(trail: Plain, took: str) -> str:
    outcome = trail.get("outcome")
    if outcome == "running":
        return f"has been running for {took}"
    if outcome == "ok":
        return f"went well in {took}"
    error = trail.get("error") or {}
    how = "was cancelled" if outcome == "cancelled" else "failed"
    why = str(error.get("message") or "") or f"its end is {error.get('code', 'unknown')!r}"
    return f"{how} after {took}: {why.rstrip('.')}"


def waits(trail: Plain) -> list[tuple[str, float]]:
    """(what was waited for, how long), in order; the last is what it ended in."""
    found: list[tuple[str, float]] = []
    what, since = "", 0.0
    end = float(trail.get("seconds") or 0.0)
    for event in trail.get("events") or ():
        kind = EVENTS.get(str(event.get("event")))
        if kind is None or not kind.waits:
            continue
        at = min(float(event.get("at_s") or 0.0), end)
        if what:
            found.append((what, max(at - since, 0.0)))
        what, since = kind.waits.replace("{path}", str(event.get("path"))), at
        what = "" if what == "nothing" else what
    if what:
        found.append((what, max(end - since, 0.0)))
    return found


def _waits(trail: Plain) -> str:
    spans = waits(trail)
    if not spans:
        return ""
    words = [f"{seconds(took)} for {what}" for what, took in spans]
    text = ", then ".join(words)
    if trail.get("outcome") in ("failed", "cancelled", "running"):
        return f"It waited {text}; that is where it {_verb(trail)}."
    return f"It waited {text}."


def _verb(trail: Plain) -> str:
    return "stands" if trail.get("outcome") == "running" else "ended"


def _bytes(trail: Plain) -> str:
    if trail.get("kind") in ("offer", "request"):
        renewed = _last(trail, "renewed")
        if renewed is None:
            return ""
        quiet = float(trail.get("seconds") or 0.0) - float(renewed.get("at_s") or 0.0)
        return (
            f"The last of its reader's signs of life ({renewed.get('times')} in all) came "
            f"{seconds(max(quiet, 0.0))} before the end."
        )
    nbytes, done = int(trail.get("nbytes") or 0), int(trail.get("bytes_done") or 0)
    path = trail.get("path") or ""
    if not nbytes or not path:
        return "No byte was asked for." if trail.get("outcome") == "failed" else ""
    by = f" by {path}"
    if trail.get("outcome") == "ok":
        moved = _last(trail, "moved")
        took = float(moved.get("move_s") or 0.0) if moved else 0.0
        rate = f" at {size(nbytes / took)}/s" if took > 0 else ""
        return f"{size(nbytes)} moved{by}{rate}{_reason(trail, path)}."
    share = "all" if done == nbytes else size(done) if done else "none"
    return f"Of {size(nbytes)}, {share} had moved{by}."


def _reason(trail: Plain, path: str) -> str:
    """Why this path."""
    planned = _last(trail, "planned")
    plan = planned.get("plan") if planned else None
    paths = plan.get("paths", ()) if isinstance(plan, dict) else ()
    reasons = [each.get("reason", "") for each in paths if each.get("path") == path]
    return f" ({reasons[0]})" if reasons else ""


def _before(trail: Plain) -> str:
    """The paths that were tried before the last one, and how they failed."""
    events = trail.get("events") or ()
    failed = [event for event in events if event.get("event") == "failed_path"]
    if trail.get("outcome") != "ok" and failed and failed[-1].get("path") == trail.get("path"):
        failed = failed[:-1]
    if not failed:
        return ""
    words = [
        f"{each.get('path')} (failed at {seconds(float(each.get('at_s') or 0.0))} after "
        f"{size(each.get('bytes_done') or 0)}: {each.get('reason')})"
        for each in failed
    ]
    return f"Before that it tried {', then '.join(words)}."


def _peer(trail: Plain) -> str:
    gone = _last(trail, "peer_gone") if trail.get("outcome") == "failed" else None
    again = _last(trail, "peer_restarted")
    if again is not None:
        return f"{again.get('peer')} was replaced by a new process at {again.get('address')}."
    if gone is None:
        return ""
    return (
        f"The connection to {gone.get('peer')} ended {seconds(float(gone.get('at_s') or 0.0))} "
        "after the start."
    )


def _next(trail: Plain) -> str:
    error = trail.get("error") or {}
    advice = str(error.get("fix") or "") or NEXT.get(str(error.get("code")), _OTHERWISE)
    return advice.rstrip(".")


def _last(trail: Plain, name: str) -> Plain | None:
    events = trail.get("events") or ()
    return next((each for each in reversed(events) if each.get("event") == name), None)


def tell_all(trails: Sequence[Plain]) -> str:
    """The story of one request from all that its sides know: decode's first, as it knows most."""
    order = {"claim": 0, "transfer": 1, "offer": 2, "request": 3}
    ranked = sorted(trails, key=lambda trail: order.get(str(trail.get("kind")), 9))
    failed = [trail for trail in ranked if trail.get("outcome") == "failed"]
    main = (failed or ranked)[0]
    parts = [tell(main)]
    parts += [
        f"Seen from another side: {_opening(trail)} {_waits(trail)}".strip()
        for trail in ranked
        if trail is not main
    ]
    return printable(" ".join(parts))
