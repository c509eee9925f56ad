"""Whole requests through the router: both legs, pass-through, and everything around them."""

import asyncio
import json

import pytest
from fake_workers import (
    PARAMS,
    answers,
    offers,
    offers_nothing,
    rejects,
    run,
    site,
    stalls,
    streams,
    until,
)

BOTH_PATHS = pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])


@BOTH_PATHS
def test_both_legs_get_what_they_need(path):
    async def body():
        async with site([offers], [answers]) as made:
            sent = {"prompt": "a", "max_tokens": 9, "stream": False, "odd": [1.5, None]}
            headers = {"Authorization": "Bearer key", "x-request-id": "mine"}
            async with made.post(sent, path=path, headers=headers) as answer:
                assert answer.status == 200
                assert await answer.json() == {"text": "whole"}
                assert answer.headers["x-worker"] == "kept"
                assert answer.headers["x-kvferry-handoff"] == "remote"
                prefill, decode = made.prefill[0], made.decode[0]
                assert answer.headers["x-kvferry-prefill"] == f"127.0.0.1:{prefill.port}"
                assert answer.headers["x-kvferry-decode"] == f"127.0.0.1:{decode.port}"
            (first,), (second,) = prefill.seen, decode.seen
            assert first.path == second.path == path
            assert first.json["max_tokens"] == 1
            assert PARAMS in second.body
            assert second.json == {**sent, "kv_transfer_params": json.loads(PARAMS)}
            for leg in (first, second):
                assert leg.headers["Authorization"] == "Bearer key"
                assert leg.headers["x-request-id"] == "mine"
            assert first.headers["x-kvferry-attempt"] == second.headers["x-kvferry-attempt"]
            assert await made.metric('kvferry_router_requests_total{outcome="ok"}') == 1

    run(body())


def test_attempts_have_ids_of_their_own_whatever_the_client_names_them():
    async def body():
        async with site([offers], [answers]) as made:
            for _ in range(2):
                headers = {"x-request-id": "same", "x-kvferry-attempt": "forged"}
                async with made.post(headers=headers) as answer:
                    assert answer.status == 200
            ids = {leg.headers["x-kvferry-attempt"] for leg in made.prefill[0].seen}
            assert len(ids) == 2
            assert "forged" not in ids

    run(body())


def test_a_stream_is_not_held_back():
    async def body():
        async with site([offers], [streams]) as made:
            async with made.post({"prompt": "a", "stream": True}) as answer:
                assert answer.headers["Content-Type"] == "text/event-stream"
                # The worker writes its second event only after the first was seen here.
                assert await answer.content.readany() == b'data: {"text":"one"}\n\n'
                made.decode[0].go_on.set()
                rest = await answer.content.read()
                assert rest.decode() == 'data: {"text":"tw\u00e9"}\n\ndata: [DONE]\n\n'
            assert await made.metric("kvferry_router_first_byte_seconds_count") == 1

    run(body())


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 503])
def test_an_answer_of_decode_passes_through(status):
    async def body():
        async with site([offers], [rejects(status)]) as made:
            async with made.post() as answer:
                assert answer.status == status
                assert answer.headers["Content-Type"] == "application/problem+json"
                assert answer.headers["Retry-After"] == "7"
                assert await answer.json(content_type=None) == {
                    "error": {"message": f"no: {status}"}
                }
            assert len(made.decode[0].seen) == 1
            leg = f'kvferry_router_legs_total{{role="decode",status="{status}"}}'
            assert await made.metric(leg) == 1
            assert made.router.table.of("decode")[0].up

    run(body())


@pytest.mark.parametrize("status", [400, 401, 404, 429])
def test_a_refusal_of_prefill_goes_to_the_client_and_never_to_decode(status):
    async def body():
        async with site([rejects(status)], [answers]) as made:
            async with made.post() as answer:
                assert answer.status == status
                assert answer.headers["Content-Type"] == "application/problem+json"
                assert answer.headers["Retry-After"] == "7"
                assert (await answer.json(content_type=None))["error"]["message"] == f"no: {status}"
            assert made.decode[0].seen == []
            assert made.router.table.of("prefill")[0].up

    run(body())


def test_prefill_that_offers_nothing_is_counted():
    async def body():
        async with site([offers_nothing], [answers]) as made:
            async with made.post() as answer:
                assert answer.headers["x-kvferry-handoff"] == "local"
            assert "kv_transfer_params" not in made.decode[0].seen[0].json
            skipped = 'kvferry_router_prefill_skipped_total{reason="no_params"}'
            assert await made.metric(skipped) == 1

    run(body())


def test_without_prefill_workers_it_is_a_plain_proxy():
    async def body():
        async with site([], [answers]) as made:
            sent = {"prompt": "a", "kv_transfer_params": {"remote_host": "evil"}}
            async with made.post(sent) as answer:
                assert answer.headers["x-kvferry-handoff"] == "local"
                assert "x-kvferry-prefill" not in answer.headers
            assert made.decode[0].seen[0].json == {"prompt": "a"}

    run(body())


def test_prompt_logprobs_go_to_decode_alone():
    async def body():
        async with site([offers], [answers]) as made:
            async with made.post({"prompt": "a", "prompt_logprobs": 1}) as answer:
                assert answer.headers["x-kvferry-handoff"] == "local"
            assert made.prefill[0].seen == []

    run(body())


@pytest.mark.parametrize("sent", [b"[]", b"{", b"\xff"])
def test_a_body_that_is_no_object_is_400(sent):
    async def body():
        async with site([offers], [answers]) as made:
            async with made.post(sent) as answer:
                assert answer.status == 400
                assert (await answer.json())["error"]["type"] == "invalid_request_error"
            assert made.prefill[0].seen == []

    run(body())


def test_a_body_over_the_limit_is_413():
    async def body():
        async with site([], [answers], body_bytes_max=1000) as made:
            async with made.post({"prompt": "a" * 2000}) as answer:
                assert answer.status == 413
                assert (await answer.json())["error"]["code"] == "body_bytes_max"
            assert made.decode[0].seen == []

    run(body())


def test_requests_over_the_bound_are_429():
    async def body():
        async with site([], [stalls], inflight_max=1) as made:
            first = asyncio.ensure_future(made.post())
            await made.decode[0].arrived.wait()
            async with made.post() as answer:
                assert answer.status == 429
                assert answer.headers["Retry-After"] == "1"
            made.decode[0].go_on.set()
            async with await first as answer:
                assert answer.status == 200
            async with made.post() as answer:
                assert answer.status == 200

    run(body())


def test_load_is_spread():
    async def body():
        async with site([offers, offers], [stalls, stalls]) as made:
            running = [asyncio.ensure_future(made.post()) for _ in range(8)]
            await until(lambda: sum(len(each.seen) for each in made.decode) == 8)
            assert [len(each.seen) for each in made.decode] == [4, 4]
            assert [len(each.seen) for each in made.prefill] == [4, 4]
            for worker in made.decode:
                worker.go_on.set()
            for answer in await asyncio.gather(*running):
                await answer.read()
            assert all(each.inflight == 0 for each in made.router.table.workers)

    run(body())


def test_models_are_merged_from_healthy_workers():
    async def body():
        async with site([offers], [answers, answers]) as made:
            made.decode[0].models = ("tiny", "other")
            await made.decode[1].stop()
            async with made.client.get(f"{made.url}/v1/models") as answer:
                assert answer.status == 200
                names = [model["id"] for model in (await answer.json())["data"]]
                assert sorted(names) == ["other", "tiny"]

    run(body())


def test_health_names_each_worker():
    async def body():
        async with site([offers], [answers]) as made:
            async with made.client.get(f"{made.url}/health") as answer:
                assert answer.status == 200
            port = made.decode[0].port
            await made.decode[0].stop()
            await until(lambda: not made.router.table.of("decode")[0].up)
            async with made.client.get(f"{made.url}/health") as answer:
                assert answer.status == 503
                prefill, decode = (await answer.json())["workers"]
                assert prefill["up"]
                assert not decode["up"]
                assert "connect" in decode["reason"]
            up = f'kvferry_router_worker_up{{role="decode",worker="127.0.0.1:{port}"}}'
            assert await made.metric(up) == 0

    run(body())


def test_running_requests_are_shown_without_their_text():
    async def body():
        async with site([offers], [stalls]) as made:
            sent = {"prompt": "a secret"}
            running = asyncio.ensure_future(made.post(sent, headers={"x-request-id": "mine"}))
            await made.decode[0].arrived.wait()
            async with made.client.get(f"{made.url}/debug/requests") as answer:
                text = await answer.text()
            (shown,) = json.loads(text)["running"]
            assert (shown["label"], shown["phase"], shown["handoff"]) == (
                "mine",
                "decode",
                "remote",
            )
            assert "secret" not in text
            made.decode[0].go_on.set()
            async with await running as answer:
                await answer.read()
            await until(lambda: not made.router._running)
            async with made.client.get(f"{made.url}/debug/requests") as answer:
                assert [each["outcome"] for each in (await answer.json())["ended"]] == ["ok"]

    run(body())


def test_an_unknown_path_has_the_same_error_shape():
    async def body():
        async with (
            site([], [answers]) as made,
            made.client.get(f"{made.url}/v2/nothing") as answer,
        ):
            assert answer.status == 404
            assert "/v2/nothing" in (await answer.json())["error"]["message"]

    run(body())
