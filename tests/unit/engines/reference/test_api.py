"""Request bodies: a table of what is understood, and a table of what is refused."""

import json

import pytest

from kvferry.engines.reference.api import FieldError, ModelNotFoundError, Served, parse
from kvferry.engines.reference.replies import Reply, error_reply
from kvferry.engines.reference.sampling import SamplingParams
from kvferry.engines.reference.sequence import Output, Sequence, TokenLogprobs
from kvferry.engines.reference.tokenizer import ByteTokenizer
from kvferry.errors import (
    BusyError,
    ClosedError,
    DeadlineError,
    KVFerryError,
    PeerLostError,
    RefusedError,
    UsageError,
)

SERVED = Served(("tiny", "alias"), ByteTokenizer(), 200, 64)
USER = [{"role": "user", "content": "hi"}]


def completion(**body):
    return parse(json.dumps(body).encode(), SERVED, is_chat=False)


def chat(**body):
    return parse(json.dumps({"messages": USER, **body}).encode(), SERVED, is_chat=True)


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("hi", [256, 104, 105]),
        (["hi"], [256, 104, 105]),
        ([1, 2, 3], [1, 2, 3]),
        ([[1, 2, 3]], [1, 2, 3]),
        ([7], [7]),
        ("", [256]),
    ],
)
def test_prompts(prompt, tokens):
    assert completion(prompt=prompt).prompt.tolist() == tokens


def test_chat_messages_with_text_and_parts_are_the_same_prompt():
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    whole = chat().prompt.tolist()
    assert chat(messages=[{"role": "user", "content": parts}]).prompt.tolist() == whole
    assert ByteTokenizer().decode(whole) == "user\nhi\nassistant\n"


def test_defaults():
    plain = completion(prompt="a")
    assert plain.params == SamplingParams(max_tokens=16)
    assert (plain.model, plain.n, plain.is_stream, plain.transfer) == ("tiny", 1, False, None)
    assert chat().params.max_tokens == 64
    long = [{"role": "user", "content": "x" * 150}]
    generous = chat(messages=long)
    assert generous.params.max_tokens == 200 - len(generous.prompt)


def test_every_parameter_arrives():
    params = completion(
        prompt="a",
        model="alias",
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        seed=-3,
        stop="x",
        logprobs=4,
        ignore_eos=True,
    ).params
    assert params == SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        seed=-3,
        stop=("x",),
        logprobs=4,
        ignore_eos=True,
    )


def test_the_rest_arrives():
    made = chat(
        n=3,
        stream=True,
        stream_options={"include_usage": True},
        return_token_ids=True,
        max_tokens=4,
        max_completion_tokens=5,
        logprobs=True,
        top_logprobs=2,
        stop=["a", "b"],
        top_k=-1,
        seed=8,
    )
    assert (made.n, made.is_stream, made.include_usage) == (3, True, True)
    assert made.return_token_ids
    assert (made.params.max_tokens, made.params.logprobs) == (5, 2)
    assert made.params.stop == ("a", "b")
    assert [made.choice_params(index).seed for index in range(3)] == [8, 9, 10]


def test_kv_transfer_params_count_only_if_they_ask_for_something():
    asks = {"do_remote_prefill": True, "do_remote_decode": False, "opaque": [1, {"a": None}]}
    assert completion(prompt="a", kv_transfer_params=asks).transfer == asks
    idle = {"do_remote_prefill": None, "do_remote_decode": False}
    assert completion(prompt="a", kv_transfer_params=idle).transfer is None
    assert completion(prompt="a", kv_transfer_params=None).transfer is None


def test_prefill_of_one_token_does_not_mind_the_clients_min_tokens():
    asks = {"do_remote_decode": True}
    made = completion(prompt="a", max_tokens=1, min_tokens=5, kv_transfer_params=asks)
    assert made.params.min_tokens == 1


def test_unknown_and_harmless_fields_are_ignored():
    completion(
        prompt="a",
        user="me",
        echo=False,
        suffix=None,
        best_of=1,
        tools=[],
        presence_penalty=0.0,
        store=True,
        response_format={"type": "text"},
        priority=9,
    )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"model": 3}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "4"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
        ({"min_tokens": "x"}, "min_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 0.5}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": 1}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"kv_transfer_params": []}, "kv_transfer_params"),
        ({"kv_transfer_params": {"do_remote_decode": 1}}, "kv_transfer_params.do_remote_decode"),
        (
            {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": True}},
            "kv_transfer_params",
        ),
        ({"kv_transfer_params": {"do_remote_decode": True}, "n": 2}, "n"),
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"tools": [{}]}, "tools"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_bad_completions_are_refused_by_field(body, param):
    if param != "prompt":
        body = {"prompt": "a", **body}
    with pytest.raises(FieldError) as caught:
        completion(**body)
    assert caught.value.param == param
    status, shape = error_reply(caught.value)
    assert (status, shape["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([*USER, {"role": "tool", "content": "x"}], "messages[1].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content"),
    ],
)
def test_bad_messages_are_refused_by_place(messages, param):
    with pytest.raises(FieldError) as caught:
        chat(messages=messages)
    assert caught.value.param == param


def test_top_logprobs_need_logprobs():
    with pytest.raises(FieldError, match="logprobs: true"):
        chat(top_logprobs=3)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 5000, b'{"prompt": NaN}']
)
def test_bodies_that_are_no_object(body):
    with pytest.raises(FieldError):
        parse(body, SERVED, is_chat=False)


def test_an_unknown_model_is_404():
    with pytest.raises(ModelNotFoundError) as caught:
        completion(prompt="a", model="gpt-9")
    status, shape = error_reply(caught.value)
    assert status == 404
    assert shape["error"]["code"] == "model_not_found"
    assert shape["error"]["param"] == "model"
    assert "tiny, alias" in shape["error"]["message"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UsageError("x"), 400),
        (BusyError("x"), 429),
        (ClosedError("x"), 503),
        (DeadlineError("x"), 504),
        (RefusedError("x", code="expired"), 502),
        (PeerLostError("x"), 502),
        (KVFerryError("x"), 500),
    ],
)
def test_each_error_has_a_status_and_the_known_shape(error, status):
    got, body = error_reply(error)
    assert got == status
    assert set(body["error"]) == {"message", "type", "code", "param"}
    assert body["error"]["message"] == "x"


def outputs(generation):
    """Three tokens for each answer, the last one ends it."""
    for step, letter in enumerate("abc"):
        for index in range(generation.n):
            sequence = Sequence(f"s{index}", generation.prompt, generation.params, index=index)
            logprobs = TokenLogprobs(ord(letter), -0.5, ((ord(letter), -0.5),))
            yield Output(
                sequence,
                (ord(letter),),
                letter,
                logprobs if generation.params.logprobs is not None else None,
                "length" if step == 2 else "",
                None,
                {"k": 1} if step == 2 and generation.transfer else None,
            )


def build(generation):
    reply = Reply(generation, ByteTokenizer(), "id-1", 5)
    if not generation.is_stream:
        for output in outputs(generation):
            reply.add(output)
        return reply.body()
    chunks = reply.opening()
    for output in outputs(generation):
        chunks += reply.chunks(output)
    return chunks + reply.closing()


def test_a_whole_completion():
    transfer = {"do_remote_decode": True}
    body = build(
        completion(prompt="a", logprobs=1, return_token_ids=True, kv_transfer_params=transfer)
    )
    assert body == {
        "id": "id-1",
        "object": "text_completion",
        "created": 5,
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "text": "abc",
                "logprobs": {
                    "tokens": ["a", "b", "c"],
                    "token_logprobs": [-0.5] * 3,
                    "top_logprobs": [{"a": -0.5}, {"b": -0.5}, {"c": -0.5}],
                    "text_offset": [0, 1, 2],
                },
                "finish_reason": "length",
                "token_ids": [97, 98, 99],
            }
        ],
        "usage": {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5},
        "kv_transfer_params": {"k": 1},
    }


def test_a_whole_chat_with_two_answers():
    body = build(chat(n=2, logprobs=True))
    assert body["object"] == "chat.completion"
    assert [choice["message"] for choice in body["choices"]] == [
        {"role": "assistant", "content": "abc"}
    ] * 2
    assert body["choices"][1]["logprobs"]["content"][2]["bytes"] == [99]
    assert body["usage"]["completion_tokens"] == 6


def test_a_streamed_chat_opens_with_the_role_and_closes_with_the_usage():
    chunks = build(chat(n=2, stream=True, stream_options={"include_usage": True}))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert [c["choices"][0]["delta"] for c in chunks[:2]] == [
        {"role": "assistant", "content": ""}
    ] * 2
    for index in range(2):
        own = [c["choices"][0] for c in chunks[2:-1] if c["choices"][0]["index"] == index]
        assert "".join(choice["delta"]["content"] for choice in own) == "abc"
        assert [choice["finish_reason"] for choice in own] == [None, None, "length"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 6
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_a_streamed_completion_has_transfer_params_in_its_last_chunk():
    transfer = {"do_remote_decode": True}
    chunks = build(
        completion(
            prompt="a", stream=True, logprobs=0, return_token_ids=True, kv_transfer_params=transfer
        )
    )
    assert [chunk.get("kv_transfer_params") for chunk in chunks] == [None, None, {"k": 1}]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[97], [98], [99]]
    offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks]
    assert offsets == [[0], [1], [2]]
    assert "usage" not in chunks[0]


def test_tokens_without_text_make_no_chunk_unless_they_are_asked_for():
    for wanted in (False, True):
        generation = completion(prompt="a", stream=True, return_token_ids=wanted)
        reply = Reply(generation, ByteTokenizer(), "id", 0)
        sequence = Sequence("s", generation.prompt, generation.params)
        assert len(reply.chunks(Output(sequence, (200,), ""))) == wanted


def test_an_unknown_logprob_is_null_in_a_completion_and_a_number_in_a_chat():
    for generation, wanted in (
        (completion(prompt="a", logprobs=1, max_tokens=1), None),
        (chat(logprobs=True, max_tokens=1), -9999.0),
    ):
        reply = Reply(generation, ByteTokenizer(), "id", 0)
        sequence = Sequence("s", generation.prompt, generation.params)
        reply.add(Output(sequence, (97,), "a", TokenLogprobs(97, None), "length"))
        logprobs = reply.body()["choices"][0]["logprobs"]
        if generation.is_chat:
            assert logprobs["content"][0]["logprob"] == wanted
        else:
            assert logprobs["token_logprobs"] == [wanted]
