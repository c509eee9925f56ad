"""Fuzz targets of what clients send: request bodies at the router and the engine, and raw HTTP.

Whatever arrives, a body is understood or refused by an error that names what is wrong. Nothing that
a client sends is answered as if the server had failed.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from aiohttp import web
from fuzzing import as_json, drawing, nest, spoilt
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engines.reference.api import Generation, Served, parse
from kvferry.engines.reference.http import Api
from kvferry.engines.reference.replies import error_reply
from kvferry.engines.reference.tokenizer import ByteTokenizer
from kvferry.errors import KVFerryError, ProtocolError, UsageError
from kvferry.router.legs import (
    KV_PARAMS,
    decode_body,
    local_reason,
    offered_params,
    parse_fields,
    prefill_body,
)

SERVED = Served(("tiny",), ByteTokenizer(), 200, 64)
REPLY_CHARS_MAX = 3000

number = st.integers(-2, 10) | st.sampled_from([1 << 70, 0.5, -0.0, 1e308, True, "1", None])
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["tiny", "other", "", 1, None]),
    "prompt": st.one_of(
        st.text(max_size=10),
        st.lists(st.integers(-1, 300) | st.just(1 << 64), max_size=4),
        st.lists(st.text(max_size=4), max_size=2),
        st.lists(st.lists(st.integers(0, 9), max_size=2), max_size=2),
    ),
    "messages": st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "role": st.sampled_from(["user", "system", "developer", "tool", [], None]),
                "content": st.text(max_size=8)
                | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": as_json})),
            },
        ),
        max_size=2,
    ),
    **dict.fromkeys(
        ("max_tokens", "max_completion_tokens", "min_tokens", "top_k", "seed", "n", "logprobs"),
        number,
    ),
    **dict.fromkeys(
        ("temperature", "top_p", "best_of", "top_logprobs", "presence_penalty"), number
    ),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=5),
    **dict.fromkeys(("stream", "echo", "ignore_eos", "return_token_ids"), st.booleans() | number),
    "stream_options": st.dictionaries(st.just("include_usage"), st.booleans() | number),
    KV_PARAMS: st.fixed_dictionaries(
        {},
        optional={
            "do_remote_decode": st.booleans() | number,
            "do_remote_prefill": st.booleans(),
            "kvferry": as_json,
        },
    ),
}


@st.composite
def objects(draw: st.DrawFn) -> dict[str, Any]:
    """Bodies that use the fields of the API, most of them as they are meant."""
    body = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}
    for key in draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=4)):
        body[key] = draw(as_json if draw(st.integers(0, 5)) == 0 else FIELDS[key])
    return body


DEEP = [nest("1", depth, kind) for depth in (200, 500, 900, 100_000) for kind in ("list", "object")]
encoded = objects().map(lambda body: json.dumps(body).encode())
bodies = st.one_of(
    encoded,
    encoded.flatmap(spoilt),
    as_json.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=30),
)


def deep_bodies() -> list[bytes]:
    """Each field nested as deep as a body can be, and deeper."""
    whole = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}
    return [
        json.dumps({**whole, key: 0}).replace(f'"{key}": 0', f'"{key}": {deep}').encode()
        for key in FIELDS
        for deep in DEEP
    ] + [deep.encode() for deep in DEEP]


def bounded(error: KVFerryError) -> None:
    assert len(str(error)) < REPLY_CHARS_MAX


def refused(error: KVFerryError) -> None:
    status, reply = error_reply(error)
    assert 400 <= status < 500, f"a client's mistake is answered {status}: {error}"
    assert len(msgspec.json.encode(reply)) < REPLY_CHARS_MAX


# -- the engine ------------------------------------------------------------------------------------


def generation_or_refusal(body: bytes, is_chat: bool) -> None:
    try:
        generation = parse(body, SERVED, is_chat=is_chat)
    except KVFerryError as error:
        refused(error)
        return
    assert isinstance(generation, Generation)
    assert generation.prompt.size > 0
    assert 1 <= generation.n <= 8
    assert generation.transfer is None or generation.n == 1


@drawing(200)
@given(body=bodies, is_chat=st.booleans())
def test_bodies_at_the_engine(body: bytes, is_chat: bool) -> None:
    generation_or_refusal(body, is_chat)


def test_deep_bodies_at_the_engine() -> None:
    for body in deep_bodies():
        for is_chat in (False, True):
            generation_or_refusal(body, is_chat)


# -- the router ------------------------------------------------------------------------------------


def legs_or_refusal(body: bytes) -> None:
    try:
        fields = parse_fields(body)
    except UsageError as error:
        refused(error)
        return
    assert KV_PARAMS not in fields, "a client may not name blocks of others"
    assert isinstance(local_reason(fields), str)
    # The parser of another language may not nest as deep; what is passed on is compared as bytes.
    sent = parse_raw(prefill_body(fields))
    assert bytes(sent["max_tokens"]) == b"1"
    assert b"true" not in bytes(sent.get("stream", b"false"))
    assert parse_raw(decode_body(fields, None)) == fields
    offer = msgspec.Raw(b'{"kvferry":{}}')
    assert parse_raw(decode_body(fields, offer)) == {**fields, KV_PARAMS: offer}
    params = offered_params(decode_body(fields, offer))
    assert params is not None
    assert bytes(params) == bytes(offer)


def parse_raw(body: bytes) -> dict[str, msgspec.Raw]:
    return msgspec.json.decode(body, type=dict[str, msgspec.Raw])


@drawing(200)
@given(body=bodies)
def test_bodies_at_the_router(body: bytes) -> None:
    legs_or_refusal(body)
    try:
        params = offered_params(body)
    except ProtocolError as problem:
        bounded(problem)
        return
    assert params is None or bytes(params).lstrip().startswith(b"{")


def test_deep_bodies_at_the_router() -> None:
    for body in deep_bodies():
        legs_or_refusal(body)


# -- raw HTTP --------------------------------------------------------------------------------------

REQUEST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    b"x-kvferry-attempt: a-1\r\nContent-Length: 15\r\n\r\n"
    b'{"prompt":"hi"}'
)
CHUNKED = (
    b"POST /kvferry/abandon HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"3\r\nabc\r\n0\r\n\r\n"
)
ANSWER_S = 0.05
"""Long enough for most answers; one that is missed has only not been looked at."""
HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


class Site:
    """The engine's HTTP side on a Unix socket, before a model is attached, and its event loop."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.loop = asyncio.new_event_loop()
        self.runner = web.AppRunner(Api(body_bytes_max=1000).app, access_log=None)
        self.loop.run_until_complete(self._start())

    async def _start(self) -> None:
        await self.runner.setup()
        await web.UnixSite(self.runner, self.path).start()

    def exchange(self, data: bytes) -> bytes:
        """What the server says to these bytes; nothing, if it waits for more of them."""
        return self.loop.run_until_complete(self._exchange(data))

    async def _exchange(self, data: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(self.path)
        writer.write(data)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await reader.read(4096)
        except (TimeoutError, ConnectionError):
            return b""
        finally:
            writer.close()

    async def _stop(self) -> None:
        await self.runner.cleanup()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def close(self) -> None:
        self.loop.run_until_complete(self._stop())
        self.loop.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(str(tmp_path_factory.mktemp("http") / "engine.sock"))
    yield made
    made.close()


@drawing(150)
@given(data=st.sampled_from([REQUEST, CHUNKED, HEALTH]).flatmap(spoilt) | st.binary(max_size=60))
def test_raw_http_at_the_engine(site: Site, data: bytes) -> None:
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    answer = site.exchange(data)
    assert b" 500 " not in answer.split(b"\r\n", 1)[0], answer[:200]
    assert not answer or answer.startswith(b"HTTP/"), answer[:200]


def test_the_engine_answers_after_all_that(site: Site) -> None:
    answers = [site.exchange(HEALTH) for _ in range(20)]
    assert any(answer.startswith(b"HTTP/1.1 503") for answer in answers)
