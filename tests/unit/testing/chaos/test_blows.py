"""The verdict: what a blow excuses, whom it touched, and what nothing excuses."""

from __future__ import annotations

import pytest

from kvferry.testing.chaos.blows import Blow, judge, summary
from kvferry.testing.load import Known, Question, Record

KNOWN = Known(Question((1,), 1), (5,), "length")


def record(outcome: str, *, code: str = "", begun: float = 9.0, ended: float = 11.0, **more: str):
    made = Record("load-1", KNOWN, begun, outcome, code, ended=ended)
    for name, value in more.items():
        setattr(made, name, value)
    return made


def blow(**more: object) -> Blow:
    values: dict[str, object] = {
        "at": 10.0, "wait_s": 2.0, "over": 12.0, "worker": "decode:1",
        "may": frozenset({"peer_lost"}), **more,
    }  # fmt: skip
    return Blow("kill-decode", "decode-0", **values)  # type: ignore[arg-type]


def test_a_touched_request_may_end_as_the_blow_allows() -> None:
    lost = record("error", code="peer_lost", decode="decode:1")
    assert judge([lost], [blow()]) == []
    assert "no fault touched it" in judge([lost], [])[0]
    assert "no fault touched it" in judge([record("error", code="peer_lost")], [blow()])[0]
    assert "does not excuse" in judge([record("broken", decode="decode:1")], [blow()])[0]
    assert judge([record("broken")], [blow(everyone=True, may=frozenset({"broken"}))]) == []
    assert judge([record("error", code="peer_lost")], [blow(labels={"load-1"})]) == []


@pytest.mark.parametrize("outcome", ["wrong", "hang"])
def test_nothing_excuses_a_wrong_token_or_no_end(outcome: str) -> None:
    everything = blow(everyone=True, may=frozenset({"wrong", "hang"}))
    assert judge([record(outcome)], [everything])[0].startswith(f"{outcome}: load-1")


def test_only_requests_that_lived_during_the_blow_are_touched() -> None:
    struck = blow()
    assert struck.touched(record("ok", decode="decode:1"))
    assert struck.touched(record("ok", prefill="decode:1", begun=12.0, ended=13.0))
    assert not struck.touched(record("ok", decode="decode:1", begun=8.0, ended=10.0))
    assert not struck.touched(record("ok", decode="decode:1", begun=12.5, ended=13.0))
    assert not struck.touched(record("ok", decode="decode:2"))


def test_a_touched_request_must_not_wait_for_too_long() -> None:
    slow = record("ok", decode="decode:1", ended=15.0)
    assert "5.00 s without a sign, the limit is 2.00 s" in judge([slow], [blow()])[0]
    slow.progress = [9.5, 11.5]
    assert judge([slow], [blow()]) == []
    assert summary([slow], blow())["longest_wait_s"] == 1.5


def test_what_the_load_alone_costs_and_a_second_blow_are_allowed_for() -> None:
    slow = record("ok", decode="decode:1", ended=15.0)
    calm = record("ok", begun=20.0, ended=23.5)
    assert judge([slow, calm], [blow()]) == []
    later = blow(at=11.0, wait_s=3.0)
    assert judge([slow], [blow(), later])[0].startswith("kill-decode of decode-0: 4.00 s")
    assert len(judge([slow], [blow(), later])) == 1
    assert "no fault touched waited 9.00 s" in judge([record("ok", ended=18.0)], [])[0]


def test_a_fault_must_be_noticed_in_time_by_each() -> None:
    struck = blow(seen_limit_s=1.0, seen={"router": 0.4, "prefill-0": 1.5, "prefill-1": None})
    assert judge([], [struck]) == [
        "kill-decode of decode-0: prefill-0 saw it after 1.50 s, the limit is 1 s",
        "kill-decode of decode-0: prefill-1 saw it not at all, the limit is 1 s",
    ]
    assert judge([], [blow(seen={"router": 9.0})]) == []
