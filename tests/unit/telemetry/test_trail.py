"""A trail keeps the beginning and the latest, whatever is noted, and never raises."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import AbortedError, DeadlineError
from kvferry.telemetry.trail import (
    FIRST_MAX,
    LABEL_CHARS_MAX,
    LABELS_MAX,
    LAST_MAX,
    Trail,
    bounded_labels,
    handoff_name,
)
from kvferry.testing import FakeClock


@pytest.fixture
def clock():
    return FakeClock()


def trail_of(clock, kind="claim", **names):
    given = {"key": 1, "handoff": b"\xab" * 16, "labels": ("cmpl-7-0", "r-1"), **names}
    return Trail(clock.now, kind, given["key"], given["handoff"], given["labels"], b"")


@given(st.integers(0, 200))
def test_it_keeps_the_first_and_the_last_events(count):
    trail = trail_of(FakeClock())
    for number in range(count):
        trail.note("progress", number, count)
    kept = [facts[0] for _, _, facts in trail.events()]
    assert kept == [*range(count)][:FIRST_MAX] + [*range(FIRST_MAX, count)][-LAST_MAX:]
    assert len(kept) + trail.left_out == count


def test_times_are_since_its_beginning(clock):
    trail = trail_of(clock)
    clock.advance(2.0)
    trail.note("confirmed")
    clock.advance(1.0)
    trail.finish("loaded")
    clock.advance(5.0)
    plain = trail.as_dict("e")
    assert [(event["at_s"], event["event"]) for event in plain["events"]] == [
        (2.0, "confirmed"),
        (3.0, "ended"),
    ]
    assert (plain["seconds"], plain["ended_ago_s"], plain["outcome"]) == (3.0, 5.0, "ok")


def test_what_is_told_late_stands_where_it_was(clock):
    trail = trail_of(clock)
    began = clock.now() + 1.0
    clock.advance(2.0)
    trail.note("moved", "tcp/pull", 5, 1.0)
    trail.note_at(began, "began", "tcp/pull")
    assert [name for _, name, _ in trail.events()] == ["began", "moved"]


def test_signs_of_life_are_counted_not_listed(clock):
    trail = trail_of(clock, "offer")
    for _ in range(10_000):
        trail.renewed()
    clock.advance(3.0)
    trail.renewed()
    assert [(name, facts) for _, name, facts in trail.events()] == [("renewed", (10_001,))]
    assert trail.as_dict("e")["events"][0]["at_s"] == 3.0


@pytest.mark.parametrize(
    ("code", "error", "outcome"),
    [
        ("loaded", None, "ok"),
        ("delivered", None, "ok"),
        ("expired", None, "failed"),
        ("cancelled", None, "cancelled"),
        ("deadline", DeadlineError("late", bytes_done=7), "failed"),
        ("aborted", AbortedError("stop"), "cancelled"),
        ("aborted", AbortedError("internal error: a bug"), "failed"),
    ],
)
def test_how_it_ends(clock, code, error, outcome):
    trail = trail_of(clock)
    trail.finish(code, error)
    trail.finish("loaded")
    assert trail.outcome == outcome
    assert sum(name == "ended" for _, name, _ in trail.events()) == 1
    assert (trail.error is None) == (outcome == "ok")
    assert trail.bytes_done == (7 if code == "deadline" else 0)


def test_a_broken_clock_does_not_reach_the_caller():
    trail = trail_of(FakeClock())
    trail._now = lambda: 1 / 0
    trail.note("confirmed")
    assert trail.events() == []


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("ab" * 8, 2),
        ("ab" * 16, 2),
        ("cmpl-7-0", 2),
        ("cmpl-7", 1),
        ("abab", 1),
        ("r-", 1),
        ("7", 0),
    ],
)
def test_names_that_it_answers_to(clock, text, score):
    assert trail_of(clock).answers_to(text) == score


def test_the_name_of_a_hand_off_cannot_be_claimed_with():
    offer_id = bytes(range(16))
    assert handoff_name(offer_id) == "0001020304050607"
    assert len(handoff_name(offer_id)) == len(offer_id.hex()) // 2


def test_labels_are_few_and_short():
    labels = bounded_labels(("x" * 999, "", *map(str, range(99))))
    assert len(labels) == LABELS_MAX
    assert labels[0] == "x" * LABEL_CHARS_MAX
    assert bounded_labels(("a", "b")) == ("a", "b")
