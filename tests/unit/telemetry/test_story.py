"""The story: who waited for what, how long, what moved by which path, what was tried, what next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import DeadlineError, PeerLostError, StallError
from kvferry.planner import Plan, RankedPath
from kvferry.telemetry import story
from kvferry.telemetry.events import EVENTS
from kvferry.telemetry.trail import Trail
from kvferry.testing import FakeClock

PLAN = Plan(
    (RankedPath("shm", "pull", 1e-3, "12 GB/s"), RankedPath("tcp", "pull", 1e-2, "3 GB/s")), {}
)


@pytest.fixture
def clock():
    return FakeClock()


def claim(clock):
    trail = Trail(clock.now, "claim", b"c", b"\xab" * 16, ("cmpl-1-0",), b"")
    trail.note("claimed", 100, 30.0)
    clock.advance(0.01)
    trail.peer = "prefill-0"
    trail.note("claim_asked", "prefill-0")
    clock.advance(0.02)
    trail.note("granted", 5.0)
    trail.nbytes = 4_200_000
    trail.note("planned", 4_200_000, 8, PLAN)
    trail.path = "shm/pull"
    trail.note("submitted", "shm/pull")
    return trail


def told(trail):
    return story.tell(trail.as_dict("decode-0"))


def test_a_failure_is_one_paragraph(clock):
    trail = claim(clock)
    clock.advance(0.5)
    trail.note("failed_path", "shm/pull", "registration", "cannot map it", 0)
    trail.path = "tcp/pull"
    trail.note("fell_back", "tcp/pull", "cannot map it")
    trail.note("submitted", "tcp/pull")
    clock.advance(2.0)
    error = StallError("nothing moved for 2.0 s", bytes_done=1_200_000, fix="look at the firewall")
    trail.note("failed_path", "tcp/pull", "stall", "nothing moved for 2.0 s", 1_200_000)
    trail.finish("stall", error)
    assert told(trail) == (
        "decode-0 claimed KV from prefill-0 (hand-off abababababababab, request cmpl-1-0); it "
        "failed after 2.53 s: nothing moved for 2.0 s. It waited 10 ms for a connection to "
        "prefill, then 20 ms for prefill's grant, then 0 us for the description of the memory, "
        "then 500 ms for the bytes by shm/pull, then 2.00 s for the bytes by tcp/pull; that is "
        "where it ended. Of 4.2 MB, 1.2 MB had moved by tcp/pull. Before that it tried shm/pull "
        "(failed at 530 ms after 0 bytes: cannot map it). Try this: look at the firewall."
    )


def test_a_success_says_where_the_time_went_and_why_that_path(clock):
    trail = claim(clock)
    clock.advance(0.001)
    trail.note("moved", "shm/pull", 4_200_000, 0.001)
    trail.note("confirm_asked")
    clock.advance(0.002)
    trail.note("confirmed")
    trail.finish("loaded")
    text = told(trail)
    assert "it went well in 33 ms" in text
    assert "then 2 ms for prefill's confirm." in text
    assert "4.2 MB moved by shm/pull at 4.2 GB/s (12 GB/s)." in text
    assert "Try this" not in text


def test_an_offer_that_nobody_claimed(clock):
    trail = Trail(clock.now, "offer", b"o", b"\xab" * 16, (), b"")
    trail.note("offered", 100, 7, 60.0)
    clock.advance(60.0)
    trail.finish("expired")
    text = told(trail)
    assert "offered KV, which nobody claimed" in text
    assert "It waited 60.00 s for a claim; that is where it ended." in text
    assert "Try this: see why nobody claimed in time" in text


def test_a_reader_that_fell_silent(clock):
    trail = Trail(clock.now, "offer", b"o", b"\xab" * 16, (), b"")
    trail.note("offered", 100, 7, 60.0)
    trail.peer = "decode-3"
    trail.note("claim_granted")
    clock.advance(2.0)
    trail.renewed()
    clock.advance(5.0)
    trail.finish("peer_lost")
    text = told(trail)
    assert "The last of its reader's signs of life (1 in all) came 5.00 s before the end." in text


def test_a_peer_that_was_replaced(clock):
    trail = claim(clock)
    trail.finish("peer_lost", PeerLostError("the connection was closed"))
    at = clock.now()
    plain = trail.as_dict("e", [(at, "peer_restarted", ("prefill-0", "tcp://h:1"))])
    assert "prefill-0 was replaced by a new process at tcp://h:1." in story.tell(plain)


def test_what_runs_says_where_it_stands(clock):
    trail = claim(clock)
    clock.advance(4.0)
    text = told(trail)
    assert "it has been running for 4.03 s" in text
    assert "then 4.00 s for the bytes by shm/pull; that is where it stands." in text


def test_all_sides_make_one_paragraph(clock):
    late = claim(clock)
    late.finish("deadline", DeadlineError("not complete after 0.03 s"))
    offer = Trail(clock.now, "offer", b"o", b"\xab" * 16, (), b"")
    offer.note("offered", 100, 7, 60.0)
    text = story.tell_all([offer.as_dict("prefill-0"), late.as_dict("decode-0")])
    assert text.startswith("decode-0 claimed KV")
    assert "Seen from another side: prefill-0 offered KV" in text
    assert "\n" not in text


VALUES = st.one_of(st.none(), st.integers(-5, 10**9), st.text(max_size=8), st.just({}))
EVENT = st.builds(
    lambda name, at, facts: {"event": name, "at_s": at, **facts},
    st.sampled_from([*EVENTS, "unknown"]),
    st.floats(-1.0, 9.0),
    st.dictionaries(st.sampled_from(["path", "reason", "peer", "plan", "times"]), VALUES),
)


@pytest.mark.slow
@given(
    st.sampled_from(["claim", "offer", "transfer", "request", "else"]),
    st.sampled_from(["running", "ok", "failed", "cancelled", "else"]),
    st.lists(EVENT, max_size=8),
    st.one_of(st.none(), st.dictionaries(st.sampled_from(["code", "message", "fix"]), VALUES)),
)
def test_a_trail_of_anybody_can_be_told(kind, outcome, events, error):
    """A dump may come from another release, or from nowhere."""
    trail = {"kind": kind, "outcome": outcome, "events": events, "error": error, "labels": []}
    text = story.tell_all([trail])
    assert text.isprintable()
