"""A router that lost its client has prefill's offer withdrawn, by the name of the attempt."""

import asyncio
import json
import os
import signal

from kvferry.engines.reference.http import ATTEMPT_HEADER
from kvferry.errors import ConfigError

from .fakes import DECODE_ELSEWHERE
from .test_server import run

BODY = {"prompt": [1, 2, 3], "max_tokens": 1, "kv_transfer_params": DECODE_ELSEWHERE}


async def abandon(site, attempt):
    headers = {ATTEMPT_HEADER: attempt} if attempt else {}
    async with site.http.post(site.address + "/kvferry/abandon", headers=headers) as answer:
        assert answer.status == 200
        return (await answer.json())["abandoned"]


def test_an_abandoned_offer_is_withdrawn_once():
    async def body(site):
        headers = {ATTEMPT_HEADER: "a-1"}
        url, data = site.address + "/v1/completions", json.dumps(BODY)
        async with site.http.post(url, data=data, headers=headers) as answer:
            assert answer.status == 200
        assert await abandon(site, "another") == 0
        assert await abandon(site, "") == 0
        assert site.connector.withdrawn == []
        assert await abandon(site, "a-1") == 1
        assert await abandon(site, "a-1") == 0
        while not site.connector.withdrawn:
            await asyncio.sleep(0)
        (on_end,) = site.connector.offers.values()
        on_end("withdrawn")
        await site.empty()

    run(body)


def test_only_so_many_attempts_are_remembered(monkeypatch):
    monkeypatch.setattr("kvferry.engines.reference.http.ATTEMPTS_MAX", 2)

    async def body(site):
        for number in range(3):
            headers = {ATTEMPT_HEADER: f"a-{number}"}
            url, data = site.address + "/v1/completions", json.dumps(BODY)
            async with site.http.post(url, data=data, headers=headers) as answer:
                assert answer.status == 200
        assert [await abandon(site, f"a-{number}") for number in range(3)] == [0, 1, 1]
        for on_end in site.connector.offers.values():
            on_end("delivered")
        await site.empty()

    run(body)


def test_an_attempt_that_was_abandoned_before_it_arrived_is_refused():
    async def body(site):
        assert await abandon(site, "a-1") == 0
        headers = {ATTEMPT_HEADER: "a-1"}
        url, data = site.address + "/v1/completions", json.dumps(BODY)
        async with site.http.post(url, data=data, headers=headers) as answer:
            assert answer.status >= 400
            assert "given this attempt up" in (await answer.json())["error"]["message"]
        assert not site.connector.offers
        await site.empty()

    run(body)


async def why(site, text):
    async with site.http.get(site.address + "/debug/why", params={"id": text}) as answer:
        assert answer.status == 200
        return await answer.json()


def test_why_asks_the_connector_and_labels_reach_it():
    asked = []

    async def body(site):
        assert (await why(site, "x"))["trails"] == []
        site.connector.why = lambda text: asked.append(text) or {"found": 1, "trails": [{}]}
        assert (await why(site, "y" * 999))["found"] == 1
        headers = {ATTEMPT_HEADER: "a-1", "x-request-id": "m" * 999}
        url, data = site.address + "/v1/completions", json.dumps(BODY)
        async with site.http.post(url, data=data, headers=headers) as answer:
            assert answer.status == 200
        ((sequence, on_end),) = site.connector.offers.items()
        assert sequence.labels == ("a-1", "m" * 128)
        on_end("delivered")
        await site.empty()

    run(body)
    assert asked == ["y" * 200]


def test_sigusr1_dumps_the_flight_recorder(caplog):
    async def dumped(text):
        while text not in caplog.text:
            await asyncio.sleep(0.001)

    async def body(site):
        os.kill(os.getpid(), signal.SIGUSR1)
        await dumped("there is no flight recorder")

        def full():
            raise ConfigError("no room for it")

        site.connector.dump = full
        os.kill(os.getpid(), signal.SIGUSR1)
        await dumped("no room for it")
        site.connector.dump = lambda: "there.json"
        os.kill(os.getpid(), signal.SIGUSR1)
        await dumped("the flight recorder is in there.json")

    run(body)
