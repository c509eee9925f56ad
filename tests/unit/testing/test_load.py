"""The load generator against a server that errs on purpose: each outcome is what it says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from kvferry.testing.load import Known, Load, LoadResult, Question, learn, make_questions

ANSWER = (5, 6, 7, 8)
KNOWN = Known(Question((1, 2, 3), 4), ANSWER, "length")
Behaviour = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def choice(tokens: list[int], finish: str | None) -> dict[str, Any]:
    return {"index": 0, "text": "", "token_ids": tokens, "finish_reason": finish}


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def answering(
    tokens: tuple[int, ...] = ANSWER,
    *,
    finish: str = "length",
    error_after: int | None = None,
    cut_after: int | None = None,
    stall_after: int | None = None,
) -> Behaviour:
    """A worker that streams these tokens, until something goes wrong after so many of them."""

    async def behave(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body["stream"]:
            return web.json_response({"choices": [choice(list(tokens), finish)]})
        response = web.StreamResponse(headers={"x-kvferry-handoff": "remote"})
        await response.prepare(request)
        for at, token in enumerate(tokens):
            if at == error_after:
                await response.write(event({"error": {"code": "peer_lost", "message": "gone"}}))
                return response
            if at == cut_after:
                assert request.transport is not None
                request.transport.close()
                return response
            if at == stall_after:
                await asyncio.Event().wait()
            last = at == len(tokens) - 1
            await response.write(event({"choices": [choice([token], finish if last else None)]}))
        await response.write(b"data: [DONE]\n\n")
        return response

    return behave


async def refusing(_request: web.Request, _body: dict[str, Any]) -> web.StreamResponse:
    return web.json_response({"error": {"code": "busy", "message": "later"}}, status=429)


def against(behaviour: Behaviour, use: Callable[[str], Awaitable[Any]]) -> Any:
    """Run ``use`` with the URL of a server that behaves so."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await behaviour(request, await request.json())

    async def scene() -> Any:
        application = web.Application()
        application.router.add_post("/v1/completions", handle)
        runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.01)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            return await use(f"http://127.0.0.1:{runner.addresses[0][1]}")
        finally:
            await runner.cleanup()

    return asyncio.run(scene())


def load(behaviour: Behaviour, **settings: Any) -> LoadResult:
    chosen = {"clients": 2, "requests": 2, "leave_share": 0.0, "whole_share": 0.0, **settings}
    result = against(behaviour, lambda url: Load(url, [KNOWN], **chosen).run())
    assert isinstance(result, LoadResult)
    assert len(result.records) == chosen["requests"]
    return result


@pytest.mark.parametrize("whole_share", [0.0, 1.0])
def test_a_right_answer_is_ok(whole_share: float) -> None:
    result = load(answering(), whole_share=whole_share)
    assert result.counts() == {"ok": 2}
    assert len(result.latencies()) == 2


@pytest.mark.parametrize("whole_share", [0.0, 1.0])
@pytest.mark.parametrize(
    ("tokens", "finish"),
    [((5, 6, 9, 8), "length"), ((5, 6, 7), "length"), ((*ANSWER, 9), "length"), (ANSWER, "stop")],
    ids=["another token", "too few", "too many", "another end"],
)
def test_anything_else_is_wrong(tokens: tuple[int, ...], finish: str, whole_share: float) -> None:
    result = load(answering(tokens, finish=finish), whole_share=whole_share)
    assert result.counts() == {"wrong": 2}
    assert str(list(ANSWER)) in result.explain("wrong")
    assert str(list(tokens)) in result.explain("wrong")


def test_an_error_is_told_by_its_code_before_and_in_the_answer() -> None:
    assert load(refusing).counts() == {"error:busy": 2}
    result = load(answering(error_after=2))
    assert result.counts() == {"error:peer_lost": 2}
    assert result.records[0].tokens == [5, 6]


def test_a_wrong_token_before_an_error_is_still_wrong() -> None:
    assert load(answering((5, 9, 7, 8), error_after=3)).counts() == {"wrong": 2}


def test_an_end_without_a_word_is_broken() -> None:
    assert load(answering(cut_after=2)).counts() == {"broken": 2}


def test_what_takes_too_long_is_a_hang() -> None:
    result = load(answering(stall_after=1), bound_s=0.1)
    assert result.counts() == {"hang": 2}
    assert result.longest_s() < 1


def test_leavers_leave_after_some_parts_and_the_server_sees_it() -> None:
    gone: list[str] = []

    async def watching(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        try:
            return await answering(stall_after=3)(request, body)
        except asyncio.CancelledError:
            gone.append(request.headers["x-request-id"])
            raise

    result = load(watching, clients=1, requests=3, leave_share=1.0, bound_s=0.06, seed=2)
    left = {record.label for record in result.of("left")}
    assert left
    assert set(result.counts()) <= {"left", "hang"}
    assert set(gone) == {record.label for record in result.records}


def test_the_same_seed_asks_the_same() -> None:
    first, second = (load(answering(), requests=6, clients=1, seed=3) for _ in range(2))
    assert [r.known for r in first.records] == [r.known for r in second.records]
    assert make_questions(20, seed=1) == make_questions(20, seed=1)
    assert make_questions(20, seed=1) != make_questions(20, seed=2)


def test_questions_lie_around_the_edges_of_blocks() -> None:
    lengths = {len(question.prompt) for question in make_questions(200, seed=1, blocks_max=3)}
    assert {15, 16, 17, 31, 32, 33, 47, 48, 49} <= lengths
    assert any(question.temperature for question in make_questions(10, seed=1))


def test_answers_are_learned_or_it_says_why_not() -> None:
    assert against(answering(), lambda url: learn(url, [KNOWN.question])) == [KNOWN]
    with pytest.raises(ValueError, match="429: later"):
        against(refusing, lambda url: learn(url, [KNOWN.question]))
