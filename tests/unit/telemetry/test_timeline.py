"""Sides are joined by what caused what, and never by comparing their clocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.telemetry.timeline import CAUSES, merge, side_of


def trail(kind, *events, engine="e"):
    return {
        "kind": kind,
        "engine": engine,
        "events": [{"at_s": at, "event": name, "peer": "p"} for at, name in events],
    }


def ats(line):
    return {(each.side.split()[0], each.event["event"]): each.at_s for each in line.lines}


delays = st.floats(0.0, 1.0)


@given(delays, delays, delays, delays, delays, st.floats(0.0, 50.0))
def test_a_message_is_never_heard_before_it_was_said(ask, answer, read, ask2, answer2, waited):
    """True times; each side shows only what it saw since its own start."""
    said = 0.5
    heard = said + ask
    granted = heard + answer
    confirm = granted + read
    confirm_heard = confirm + ask2
    confirmed = confirm_heard + answer2
    claim = trail(
        "claim",
        (0.0, "claimed"),
        (said, "claim_asked"),
        (granted, "granted"),
        (confirm, "confirm_asked"),
        (confirmed, "confirmed"),
    )
    start = -waited  # The offer was made so long before the claim.
    offer = trail(
        "offer",
        (0.0, "offered"),
        (heard - start, "claim_arrived"),
        (heard - start, "claim_granted"),
        (confirm_heard - start, "confirm_arrived"),
        (confirm_heard - start, "confirm_granted"),
    )
    line = merge([offer, claim])
    at = ats(line)
    kinds = {"claim": "decode", "offer": "prefill"}
    for cause, first, effect, then in CAUSES:
        before = at.get((kinds.get(cause), first))
        after = at.get((kinds.get(effect), then))
        if before is not None and after is not None:
            assert before <= after + 1e-9
    slack = (min(ask, ask2) + min(answer, answer2)) / 2
    true = at["decode", "claimed"] - start * -1.0
    assert abs(at["prefill", "offered"] - true) <= slack + 1e-9
    assert min(each.at_s for each in line.lines) == 0.0
    assert line.notes[0].startswith("prefill e: aligned by its messages, to within")


def test_a_lost_answer_leaves_one_bound():
    claim = trail("claim", (0.0, "claimed"), (1.0, "claim_asked"), (9.0, "ended"))
    offer = trail("offer", (0.0, "offered"), (4.0, "claim_arrived"))
    # The offer came before the claim, so both ends are known even so.
    assert "to within" in merge([claim, offer]).notes[0]
    late = trail("offer", (4.0, "claim_arrived"))
    line = merge([claim, late])
    assert ats(line)["prefill", "claim_arrived"] == 1.0
    assert line.notes == ("prefill e: not earlier than shown; no answer says how much later",)


def test_what_can_only_have_been_earlier_stands_first():
    claim = trail("claim", (0.0, "claimed"))
    line = merge([claim, trail("offer", (0.0, "offered"))])
    assert [each.event["event"] for each in line.lines] == ["offered", "claimed"]
    assert line.notes == ("prefill e: not later than shown; nothing says how much earlier",)


def test_sides_without_a_message_are_shown_beside():
    one, other = trail("claim", (2.0, "claimed")), trail("offer", (7.0, "renewed"))
    line = merge([one, other])
    assert [(each.at_s, each.is_aligned) for each in line.lines] == [(0.0, True), (7.0, False)]
    assert "no message joins its clock" in line.notes[0]


def test_messages_that_contradict_each_other_are_not_believed():
    claim = trail("claim", (5.0, "claim_asked"), (5.1, "granted"))
    offer = trail("offer", (0.0, "claim_arrived"), (9.0, "claim_granted"))
    assert [each.is_aligned for each in merge([claim, offer]).lines] == [True, True, False, False]


def test_the_router_is_aligned_by_both_legs():
    request = trail(
        "request", (0.0, "arrived"), (1.0, "prefill_asked"), (3.0, "prefill_answered"),
        (3.5, "decode_asked"), (6.0, "first_byte"),
    )  # fmt: skip
    claim = trail("claim", (0.0, "claimed"), (1.0, "claim_asked"), (1.2, "granted"), (2.0, "ended"))
    offer = trail("offer", (0.0, "offered"), (3.1, "claim_arrived"), (3.1, "claim_granted"))
    at = ats(merge([request, offer, claim]))
    assert at["router", "arrived"] == 0.0
    assert 1.0 <= at["prefill", "offered"] <= 3.0
    assert 3.5 <= at["decode", "claimed"] <= 4.0


@pytest.mark.parametrize(
    ("kind", "engine", "side"),
    [("claim", "a", "decode a"), ("request", "router", "router"), ("transfer", "", "engine")],
)
def test_sides_have_names(kind, engine, side):
    assert side_of({"kind": kind, "engine": engine}) == side


def test_nothing_is_a_time_line_too():
    assert merge([]).lines == ()
    assert merge([{"kind": "claim", "events": [{"event": "x", "at_s": float("nan")}]}]).lines
