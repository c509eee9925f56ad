"""Prefill is told when nobody will claim what it offered, and is left alone otherwise."""

import asyncio
from types import SimpleNamespace

import pytest
from fake_workers import (
    answers,
    offers,
    offers_nothing,
    recomputes,
    rejects,
    resets,
    run,
    site,
    stalls,
    streams,
    until,
)

from kvferry.router.abandon import TELL_S, Abandoner
from kvferry.router.legs import ATTEMPT_HEADER


@pytest.mark.parametrize(("prefill", "decode"), [(stalls, answers), (offers, stalls)])
def test_a_client_that_leaves_before_decode_answers(prefill, decode):
    async def body():
        async with site([prefill], [decode]) as made:
            waits = made.prefill[0] if prefill is stalls else made.decode[0]
            running = asyncio.ensure_future(made.post())
            await waits.arrived.wait()
            running.cancel()
            await until(lambda: made.prefill[0].abandoned)
            asked = made.prefill[0].seen[0].headers["x-kvferry-attempt"]
            assert made.prefill[0].abandoned == [asked]

    run(body())


@pytest.mark.parametrize("decode", [resets, rejects(429), rejects(503)])
def test_a_decode_that_does_not_take_the_request(decode):
    async def body():
        async with site([offers], [decode]) as made:
            async with made.post() as answer:
                assert answer.status >= 400
            await until(lambda: made.prefill[0].abandoned)

    run(body())


def test_a_prefill_that_failed_may_have_made_its_offer_all_the_same():
    async def body():
        async with site([resets], [answers]) as made:
            async with made.post() as answer:
                assert answer.headers["x-kvferry-handoff"] == "local"
            await until(lambda: made.prefill[0].abandoned)

    run(body())


def test_a_prefill_that_offers_nothing_is_not_asked_again():
    async def body():
        async with site([offers_nothing], [answers, answers]) as made:
            for _ in range(2):
                async with made.post() as answer:
                    await answer.read()
        assert made.prefill[0].abandoned == []

    run(body())


def test_a_decode_that_could_not_load_and_says_so():
    """It may be cut off from prefill, which then hears of it from nobody but the router."""

    async def body():
        async with site([offers], [recomputes]) as made:
            async with made.post() as answer:
                assert answer.status == 200
                assert answer.headers["x-kvferry-handoff"] == "recomputed"
            await until(lambda: made.prefill[0].abandoned)
            asked = made.prefill[0].seen[0].headers["x-kvferry-attempt"]
            await until(lambda: not made.router._abandoner._tasks)
            assert made.prefill[0].abandoned == [asked]

    run(body())


def test_an_answer_that_has_begun_abandons_nothing_even_if_its_client_leaves():
    async def body():
        async with site([offers], [streams]) as made:
            answer = await made.post()
            await answer.content.readany()
            answer.close()
            await made.decode[0].cancelled.wait()
            await until(lambda: not made.router._running)
            async with made.post() as whole:
                made.decode[0].go_on.set()
                await whole.read()
        assert made.prefill[0].abandoned == []

    run(body())


def test_a_worker_that_does_not_answer_is_not_waited_for():
    async def body():
        async with site([offers], [stalls]) as made:
            running = asyncio.ensure_future(made.post())
            await made.decode[0].arrived.wait()
            await made.prefill[0].stop()
            running.cancel()
            await until(lambda: not made.router._running)

    run(body())


def test_a_prefill_that_does_not_hear_it_is_told_again():
    async def body():
        async with site([offers], [rejects(429)]) as made:
            made.router._abandoner._pause_s = 0.0
            made.prefill[0].deaf_to = 2
            async with made.post() as answer:
                assert answer.status == 429
            await until(lambda: len(made.prefill[0].abandoned) == 3)
            await until(lambda: not made.router._abandoner._tasks)
            assert len(set(made.prefill[0].abandoned)) == 1

    run(body())


def test_a_frozen_worker_takes_no_more_than_its_share_of_connections():
    """Many clients leave, and the worker that they were at hears nothing: others still do."""

    async def body():
        begun = []
        go_on = asyncio.Event()

        class Silent:
            def post(self, _url, *, headers, timeout):
                assert timeout.total == TELL_S
                begun.append(headers[ATTEMPT_HEADER])
                return self

            async def __aenter__(self):
                await go_on.wait()

            async def __aexit__(self, *_error):
                return None

        abandoner = Abandoner(Silent())
        frozen, other = (SimpleNamespace(name=name, url=f"http://{name}") for name in "fo")
        for number in range(100):
            abandoner.tell(frozen, str(number))
        abandoner.tell(other, "other")
        await until(lambda: "other" in begun)
        assert sorted(begun) == ["0", "1", "other"]
        go_on.set()
        await until(lambda: len(begun) == 101)
        await abandoner.stop()

    run(body())
