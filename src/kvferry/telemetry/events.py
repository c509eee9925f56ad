"""Every event that is recorded: its facts, its sentence, and what is waited for after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of event.

    facts: names of what ``note`` is given, in order. text: the sentence, with facts in braces.
    waits: what the side waits for from then on ("nothing" at an end), or "" if that stays.
    """

    facts: tuple[str, ...]
    text: str
    waits: str = ""


EVENTS: dict[str, Kind] = {
    # decode's half of a hand-off
    "claimed": Kind(
        ("tokens", "limit_s"),
        "wants the KV of {tokens} tokens within {limit_s}",
        "a connection to prefill",
    ),
    "claim_asked": Kind(("peer",), "asks {peer} for it", "prefill's grant"),
    "granted": Kind(
        ("lease_s",), "has the grant, with a lease of {lease_s}", "the description of the memory"
    ),
    "refused": Kind(("code", "reason"), "is refused ({code}): {reason}"),
    "withdrawn": Kind(("code", "reason"), "hears that prefill takes it back ({code}): {reason}"),
    "confirm_asked": Kind((), "has all bytes and asks for the confirm", "prefill's confirm"),
    "confirmed": Kind((), "has the confirm"),
    "stop_said": Kind(("reason",), "tells prefill that it has stopped: {reason}"),
    # prefill's half
    "offered": Kind(
        ("tokens", "blocks", "limit_s"),
        "offers {tokens} tokens in {blocks} blocks, for {limit_s}",
        "a claim",
    ),
    "claim_arrived": Kind(("peer",), "hears the claim of {peer}"),
    "claim_granted": Kind((), "grants it", "the reader to confirm"),
    "claim_refused": Kind(("code", "reason"), "refuses the claim ({code})"),
    "confirm_arrived": Kind((), "is asked to confirm"),
    "confirm_granted": Kind((), "confirms"),
    "withdrawal_said": Kind(("code",), "takes the offer back ({code})", "the reader to stop"),
    "stop_arrived": Kind(("reason",), "hears that the reader has stopped: {reason}"),
    # a transfer, alone or within a claim
    "planned": Kind(("nbytes", "spans", "plan"), "plans {nbytes} in {spans} spans: {plan}"),
    "submitted": Kind(("path",), "starts {path}", "the bytes by {path}"),
    "began": Kind(("path",), "{path} begins to move bytes"),
    "progress": Kind(("bytes_done", "nbytes"), "{bytes_done} of {nbytes} have moved"),
    "stalled": Kind(
        ("path", "quiet_s", "bytes_done"),
        "{path} stands still for {quiet_s}, after {bytes_done}",
        "the stalled path to stop",
    ),
    "failed_path": Kind(
        ("path", "code", "reason", "bytes_done"),
        "{path} fails after {bytes_done} ({code}): {reason}",
    ),
    "fell_back": Kind(("path", "reason"), "goes on by {path}, because {reason}"),
    "abort": Kind(("code", "reason"), "is to stop ({code}): {reason}", "the path to stop"),
    "comparing": Kind((), "compares what came with the owner's bytes", "the owner's digests"),
    "compared": Kind((), "finds every compared byte right"),
    "moved": Kind(("path", "nbytes", "move_s"), "has moved {nbytes} by {path} in {move_s}"),
    "move_failed": Kind(("path", "code", "bytes_done"), "ends the move by {path} ({code})"),
    "quarantined": Kind(
        ("path",), "does not wait for {path} any longer; its memory stays reserved"
    ),
    # ends
    "cancelled": Kind(("who",), "is cancelled by {who}", "what runs to stop"),
    "renewed": Kind(("times",), "the lease was renewed {times} times, the last time here"),
    "ended": Kind(("outcome", "code"), "ends: {outcome} ({code})", "nothing"),
    # a peer
    "peer_up": Kind(("peer", "address"), "is connected with {peer} ({address})"),
    "peer_restarted": Kind(("peer", "address"), "{peer} at {address} is a new process"),
    "peer_gone": Kind(("peer", "reason"), "has lost {peer}: {reason}"),
    "demoted": Kind(("path", "reason"), "tries {path} last for a while: {reason}"),
    "lane_opened": Kind(("transport", "open_s"), "opens a lane for {transport} in {open_s}"),
    "lane_failed": Kind(("transport", "reason"), "cannot open a lane for {transport}: {reason}"),
    # the router's view
    "arrived": Kind(("path",), "has a request for {path}", "the body of the request"),
    "prefill_asked": Kind(("worker",), "sends it to prefill {worker}", "prefill's answer"),
    "prefill_answered": Kind(("worker", "status"), "has prefill's answer, status {status}"),
    "prefill_failed": Kind(("worker", "reason"), "has no answer of prefill {worker}: {reason}"),
    "decode_asked": Kind(("worker",), "sends it to decode {worker}", "decode's first byte"),
    "first_byte": Kind(("worker",), "has the first byte of decode", "the rest of the answer"),
    "decode_failed": Kind(("worker", "reason"), "loses decode {worker}: {reason}"),
    "answered": Kind(("outcome",), "is done with the request: {outcome}", "nothing"),
}


def facts_of(event: str, facts: tuple[Any, ...]) -> dict[str, Any]:
    """An event's facts by name, JSON types only."""
    kind = EVENTS.get(event)
    names = kind.facts if kind else tuple(f"fact_{i}" for i in range(len(facts)))
    plain = (_plain(fact) for fact in facts)
    return dict(zip(names, plain, strict=False))


def _plain(fact: Any) -> Any:
    if isinstance(fact, (str, int, float, bool, type(None))):
        return fact
    as_dict = getattr(fact, "as_dict", None)
    return as_dict() if as_dict is not None else str(fact)


def text_of(event: Mapping[str, Any]) -> str:
    """The sentence of an event, as :meth:`Trail.as_dict` or another release of kvferry gave it."""
    name = str(event.get("event", ""))
    kind = EVENTS.get(name)
    shown = {key: shown_fact(key, value) for key, value in event.items()}
    if kind is None or not shown.keys() >= set(kind.facts):
        rest = ", ".join(f"{k}={v}" for k, v in shown.items() if k not in ("event", "at_s"))
        return f"{name} {rest}".strip()
    return kind.text.format_map(shown)


def shown_fact(key: str, value: Any) -> str:
    """A fact as people read it; the unit is the end of its name."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, (int, float)):
        if key.endswith("_s"):
            return seconds(value)
        if key.endswith("bytes") or key.startswith("bytes"):
            return size(value)
        return str(value)
    if isinstance(value, dict) and "paths" in value:
        return _plan(value)
    return printable(str(value))


def printable(text: str) -> str:
    """Text that may have come from a peer, without what could command a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def _plan(plan: Mapping[str, Any]) -> str:
    words = []
    for place, path in enumerate(plan["paths"]):
        words.append(
            f"{'first' if place == 0 else 'then'} {path.get('path')} ({path.get('reason')})"
        )
    words += [f"not {name} ({why})" for name, why in plan.get("rejected", {}).items()]
    return "; ".join(words)


def seconds(value: float) -> str:
    """A duration with three digits at most."""
    if abs(value) < 1e-3:
        return f"{value * 1e6:.0f} us"
    if abs(value) < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.2f} s" if abs(value) < 100 else f"{value:.0f} s"


def size(nbytes: float) -> str:
    """A number of bytes with three digits."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:.0f} bytes"
