"""/debug/why: the router's view of both legs, in the words that ``kvferry why`` reads."""

from __future__ import annotations

import pytest
from fake_workers import answers, offers, rejects, run, site

from kvferry.telemetry import story, timeline
from kvferry.telemetry.events import EVENTS

ID_HEADER = "x-kvferry-attempt"


async def why(made, text):
    async with made.client.get(f"{made.url}/debug/why", params={"id": text}) as answer:
        assert answer.status == 200
        return await answer.json()


def test_both_legs_of_a_request_by_each_of_its_names():
    async def body():
        async with site([offers], [answers]) as made:
            async with made.post(headers={"x-request-id": "mine"}) as answer:
                attempt = answer.headers[ID_HEADER]
            async with made.post(headers={"x-request-id": "other"}):
                pass
            for name in (attempt, attempt[:12], "mine"):
                found = await why(made, name)
                (trail,) = found["trails"]
                assert trail["labels"] == [attempt, "mine"]
                assert trail["outcome"] == "ok"
            events = trail["events"]
            assert [event["event"] for event in events] == [
                "arrived", "prefill_asked", "prefill_answered", "decode_asked", "first_byte",
                "answered",
            ]  # fmt: skip
            for event in events:
                assert set(EVENTS[event["event"]].facts) == event.keys() - {"event", "at_s"}
            assert [event["at_s"] for event in events] == sorted(e["at_s"] for e in events)
            assert found["workers"] == [made.prefill[0].url, made.decode[0].url]
            assert "for prefill's answer" in story.tell(trail)
            assert len(timeline.merge([trail]).lines) == 6
            assert (await why(made, ""))["trails"] == []
            assert (await why(made, "zzz"))["found"] == 0

    run(body())


@pytest.mark.parametrize(("scripts", "event"), [((500, 200), "prefill"), ((200, 500), "decode")])
def test_the_leg_that_failed_is_named(scripts, event):
    first, second = scripts

    async def body():
        async with site(
            [offers if first == 200 else rejects(first)],
            [answers if second == 200 else rejects(second)],
            on_no_prefill="error",
        ) as made:
            async with made.post() as answer:
                assert answer.status >= 500
            (trail,) = (await why(made, "last-failure"))["trails"]
            assert trail["outcome"] == "failed"
            assert trail["error"]["code"] in ("failed", "upstream_error")
            names = [each["event"] for each in trail["events"]]
            assert names[-1] == "answered"
            assert ("decode_asked" in names) == (event == "decode")
            assert "failed after" in story.tell(trail)

    run(body())


def test_failures_are_kept_longer_and_all_is_bounded(monkeypatch):
    monkeypatch.setattr("kvferry.router.app._HISTORY", 4)
    monkeypatch.setattr("kvferry.router.app._FOUND_MAX", 3)

    async def body():
        async with site([], [rejects(503)]) as made:
            async with made.post(headers={"x-request-id": "bad"}):
                pass
            made.decode[0].script = answers
            for number in range(12):
                async with made.post(headers={"x-request-id": f"good-{number}"}):
                    pass
            assert (await why(made, "bad"))["found"] == 1
            assert (await why(made, "good-2"))["found"] == 0
            assert (await why(made, "good-11"))["found"] == 1
            many = await why(made, "good-")
            assert (many["found"], len(many["trails"])) == (4, 3)

    run(body())


def test_the_events_of_a_request_are_bounded():
    from kvferry.router.exchange import EVENTS_MAX, Exchange

    exchange = Exchange("/v1/completions", "")
    for _ in range(1000):
        exchange.note("decode_asked", worker="w")
    assert len(exchange.as_trail()["events"]) == EVENTS_MAX
    assert exchange.as_trail()["outcome"] == "running"
