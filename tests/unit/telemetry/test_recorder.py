"""The recorder is bounded, keeps failures longer, tells each once, and never harms its engine."""

from __future__ import annotations

import json
import logging
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import AbortedError, ConfigError, PeerLostError
from kvferry.protocol import messages
from kvferry.telemetry.recorder import DUMPS_MAX, PEER_EVENTS_MAX, Recorder
from kvferry.telemetry.trail import FIRST_MAX, LAST_MAX
from kvferry.testing import FakeClock


class Somebody:
    """A peer, as far as the recorder looks at one."""

    def __init__(self, name="far", incarnation=b"i" * 16):
        self.name, self.incarnation = name, incarnation


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def recorder(clock):
    return Recorder(clock, "near", trails_max=8)


def lost():
    return PeerLostError("the connection was closed")


def fail(recorder, key, error=None):
    recorder.begin("claim", key)
    error = error or lost()
    recorder.finish(key, error.code, error)
    recorder.tell(key, error)
    return error


# -- bounds --------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 99), st.sampled_from(["run", "well", "fail"]))))
def test_it_never_holds_more_than_it_may(steps):
    recorder = Recorder(FakeClock(), "near", trails_max=8)
    for number, (key, end) in enumerate(steps):
        name = (key, number)
        recorder.begin("transfer", name)
        if end != "run":
            recorder.finish(name, "moved" if end == "well" else "peer_lost")
        assert len(recorder) <= 8
        assert len(recorder._well) + len(recorder._failed) <= len(recorder)


@pytest.mark.slow
def test_it_is_bounded_under_a_million_events(clock):
    recorder = Recorder(clock, "near", trails_max=64)
    for number in range(20_000):
        trail = recorder.begin("transfer", number, labels=("x" * 500,) * 50)
        for mark in range(48):
            trail.note("progress", mark, 48)
        recorder.peer(b"p", "peer_up", "far", "address")
        if number % 3:
            recorder.finish(number, "moved" if number % 2 else "stall")
    assert len(recorder) == 64
    assert len(recorder._peers) == PEER_EVENTS_MAX
    assert all(len(each.events()) <= FIRST_MAX + LAST_MAX for each in recorder._trails.values())
    assert len(json.dumps(recorder.as_dict())) < 2 << 20


def test_failures_outlive_what_went_well(recorder):
    fail(recorder, "bad")
    for number in range(50):
        recorder.begin("transfer", number)
        recorder.finish(number, "moved" if number % 2 else "cancelled")
    assert [trail.name for trail in recorder.find("bad")] == ["bad"]
    assert not recorder.find("42")
    assert recorder.find("43")


def test_old_failures_make_room_for_what_runs(recorder):
    for number in range(100):
        fail(recorder, f"bad-{number}")
    for number in range(4):
        recorder.begin("transfer", f"runs-{number}")
    kept = sorted(recorder._trails)
    assert kept == ["bad-96", "bad-97", "bad-98", "bad-99", *(f"runs-{n}" for n in range(4))]


def test_when_everything_runs_the_oldest_goes_and_its_end_does_no_harm(recorder):
    trails = [recorder.begin("transfer", number) for number in range(20)]
    trails[0].note("progress", 1, 2)
    recorder.finish(0, "stall", lost())
    recorder.tell(0)
    assert len(recorder) == 8
    assert not recorder._failed


# -- stories -------------------------------------------------------------------------------------


def test_a_failure_is_told_once_at_warning_and_is_in_the_error(recorder, caplog):
    error = fail(recorder, "one")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert error.story == record.getMessage()
    assert "near claimed KV from prefill" in error.story
    assert "Try this: look at the other process's log" in error.story


def test_a_peer_that_dies_with_64_transfers_is_no_flood(recorder, clock, caplog):
    errors = [fail(recorder, number) for number in range(64)]
    assert len(caplog.records) == 3
    assert sum(bool(error.story) for error in errors) == 64
    clock.advance(11.0)
    fail(recorder, "later")
    assert "(61 more like it were not told)" in caplog.records[-1].getMessage()


def test_reasons_are_counted_apart(recorder, caplog):
    for number in range(9):
        fail(recorder, number)
    fail(recorder, "other", ConfigError("no"))
    assert len(caplog.records) == 4


def test_what_somebody_asked_for_is_no_warning(recorder, caplog):
    error = fail(recorder, "one", AbortedError("the claim was cancelled"))
    assert not caplog.records
    assert "was cancelled after" in error.story


def test_a_broken_story_does_not_reach_the_caller(recorder, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG, "kvferry.telemetry")
    monkeypatch.setattr("kvferry.telemetry.story.tell", lambda _: 1 / 0)
    fail(recorder, "one")
    assert "the flight recorder failed" in caplog.text


# -- messages ------------------------------------------------------------------------------------


def test_messages_land_in_the_trail_of_their_side(recorder):
    offer_id, claim_id = b"o" * 16, b"c" * 16
    recorder.begin("offer", offer_id, handoff=offer_id)
    recorder.begin("claim", claim_id, handoff=offer_id)
    far = Somebody()
    recorder.said(far, messages.Claim(claim_id, offer_id))
    recorder.heard(far, messages.Claim(claim_id, offer_id))
    recorder.said(far, messages.Granted(claim_id, offer_id, 5.0, b"secret"))
    recorder.heard(far, messages.Granted(claim_id, offer_id, 5.0, b"secret"))
    recorder.heard(far, messages.Renew([offer_id, b"?" * 16]))
    recorder.said(far, messages.Confirm(claim_id, offer_id))
    recorder.heard(far, messages.Confirm(claim_id, offer_id))
    recorder.said(far, messages.Refused(claim_id, offer_id, "expired", "too late"))
    recorder.heard(far, messages.Refused(claim_id, offer_id, "expired", "too late"))
    offer, claim = recorder.find(offer_id.hex())
    assert [name for _, name, _ in offer.events()] == [
        "claim_arrived", "claim_granted", "confirm_arrived", "claim_refused", "renewed"
    ]  # fmt: skip
    assert [(name, facts) for _, name, facts in claim.events()] == [
        ("claim_asked", ("far",)),
        ("granted", (5.0,)),
        ("confirm_asked", ()),
        ("refused", ("expired", "too late")),
    ]
    assert b"secret".hex() not in json.dumps(recorder.as_dict())
    assert "secret" not in json.dumps(recorder.as_dict())


def test_strange_messages_are_nothing(recorder):
    recorder.heard(Somebody(), messages.Ping(1))
    recorder.said(Somebody(), object())
    recorder.heard(None, messages.Claim(b"c" * 16, b"o" * 16))
    assert len(recorder) == 0


# -- peers ---------------------------------------------------------------------------------------


def test_what_happened_to_the_peer_meanwhile_is_shown(recorder, clock):
    recorder.peer(b"p", "peer_gone", "far", "an old story")
    clock.advance(60.0)
    recorder.begin("transfer", 1, peer_id=b"p")
    clock.advance(0.5)
    recorder.peer(b"p", "lane_opened", "tcp", 0.01)
    recorder.peer(b"q", "peer_gone", "other", "not ours")
    (plain,) = recorder.why("1")["trails"]
    assert [(event["event"], event["at_s"]) for event in plain["events"]] == [("lane_opened", 0.5)]


def test_a_new_process_at_a_known_address_is_a_restart(recorder):
    recorder.begin("transfer", 1, peer_id=b"new")
    recorder.begin("transfer", 2, peer_id=b"old")
    recorder.peer_up(b"old", "far", "tcp://h:1", True)
    recorder.peer_up(b"old", "far", "tcp://h:1", True)
    recorder.peer_up(b"new", "far", "tcp://h:1", False)
    assert "peer_restarted" not in str(recorder.why("1"))
    recorder.peer_up(b"new", "far", "tcp://h:1", True)
    for name in ("1", "2"):
        assert "peer_restarted" in str(recorder.why(name))


# -- asking --------------------------------------------------------------------------------------


def test_whole_names_come_before_beginnings(recorder):
    recorder.begin("claim", "a", labels=("cmpl-1",))
    recorder.begin("claim", "b", labels=("cmpl-12",))
    assert [trail.name for trail in recorder.find("cmpl-1")] == ["a"]
    assert [trail.name for trail in recorder.find("cmpl-")] == ["a", "b"]
    assert recorder.find("") == recorder.find("zzz") == []


def test_the_last_failure_is_the_latest(recorder, clock):
    for name in ("one", "two"):
        clock.advance(1.0)
        fail(recorder, name)
    recorder.begin("claim", "three")
    recorder.finish("three", "loaded")
    assert [trail.name for trail in recorder.find("last-failure")] == ["two"]


def test_an_answer_is_bounded(clock):
    recorder = Recorder(clock, "near")
    for number in range(100):
        recorder.begin("claim", f"x{number}")
    answer = recorder.why("x")
    assert (answer["found"], len(answer["trails"])) == (100, 16)
    assert recorder.trail("never begun").note("confirmed") is None


# -- dumps ---------------------------------------------------------------------------------------


def test_a_dump_is_whole_and_for_its_owner_alone(recorder, tmp_path):
    fail(recorder, "one")
    path = recorder.dump(tmp_path / "d.json")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    body = json.loads(path.read_text())
    assert (body["name"], body["trails"][0]["outcome"]) == ("near", "failed")
    assert os.listdir(tmp_path) == ["d.json"]


def test_a_dump_that_cannot_be_written_says_so(recorder, tmp_path):
    with pytest.raises(ConfigError, match="cannot be written to"):
        recorder.dump(tmp_path / "nowhere" / "d.json")


def test_internal_errors_leave_few_dumps(clock, tmp_path, caplog):
    recorder = Recorder(clock, "near/er", dump_dir=str(tmp_path))
    for _ in range(50):
        recorder.internal_error("a test")
        recorder.internal_error("a test")
        clock.advance(61.0)
    names = os.listdir(tmp_path)
    assert len(names) == DUMPS_MAX
    assert all(name.startswith("kvferry-near_er-") for name in names)
    assert str(tmp_path) in caplog.text


def test_no_dump_without_a_place_and_no_harm_without_room(clock, tmp_path):
    Recorder(clock, "near").internal_error("a test")
    Recorder(clock, "near", dump_dir=str(tmp_path / "gone")).internal_error("a test")
    assert os.listdir(tmp_path) == []
