"""What each leg is sent, value by value."""

import json

import pytest

from kvferry.errors import ProtocolError, UsageError
from kvferry.router.legs import (
    answer_headers,
    decode_body,
    local_reason,
    offered_params,
    parse_fields,
    prefill_body,
    request_headers,
)

OFFER = {"do_remote_decode": True, "do_remote_prefill": False}


def prefill_of(**body):
    return json.loads(prefill_body(parse_fields(json.dumps(body).encode())))


def test_prefill_asks_for_one_token_without_streaming():
    leg = prefill_of(
        prompt="a",
        stream=True,
        stream_options={"include_usage": True},
        max_tokens=64,
        min_tokens=8,
        n=4,
        best_of=4,
        temperature=0.5,
        unknown=[1, {"deep": None}],
    )
    assert leg == {
        "prompt": "a",
        "stream": False,
        "max_tokens": 1,
        "n": 1,
        "temperature": 0.5,
        "unknown": [1, {"deep": None}],
        "kv_transfer_params": OFFER,
    }


@pytest.mark.parametrize("limits", [{}, {"max_tokens": 9}, {"max_completion_tokens": 9}])
def test_prefill_clamps_every_name_of_the_limit_that_is_there(limits):
    leg = prefill_of(**limits, **({"max_completion_tokens": 5} if "max_tokens" in limits else {}))
    assert leg["max_tokens"] == 1
    assert leg.get("max_completion_tokens", 1) == 1
    assert ("max_completion_tokens" in leg) == bool(limits)


def test_decode_gets_the_original_values_byte_for_byte():
    body = b'{"prompt":"\\u00e9", "temperature":1.50,"seed":123456789012345678901234567890}'
    assert decode_body(parse_fields(body), None) == body.replace(b", ", b",")


def test_params_pass_verbatim():
    params = b'{ "ids":[1, 2],"big":123456789012345678901234567890,"f":1e2 }'
    offered = offered_params(b'{"id":1,"kv_transfer_params":' + params + b"}")
    assert params in decode_body(parse_fields(b'{"prompt":"a"}'), offered)


@pytest.mark.parametrize("key", ["kv_transfer_params", "kv\\u005ftransfer_params"])
def test_params_of_the_client_never_reach_a_worker(key):
    fields = parse_fields(b'{"%s":{"remote_host":"evil"},"prompt":"a"}' % key.encode())
    assert json.loads(decode_body(fields, None)) == {"prompt": "a"}
    assert json.loads(prefill_body(fields))["kv_transfer_params"] == OFFER


@pytest.mark.parametrize(
    "answer", [b"{}", b'{"kv_transfer_params":null}', b'{"kv_transfer_params":[1]}']
)
def test_prefill_may_offer_nothing(answer):
    assert offered_params(answer) is None


@pytest.mark.parametrize("answer", [b"", b"<html>", b"[]"])
def test_prefill_must_answer_an_object(answer):
    with pytest.raises(ProtocolError):
        offered_params(answer)


@pytest.mark.parametrize("body", [b"", b"[]", b'"a"', b'{"a":', b'{"a":' + b"[" * 200_000])
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(UsageError, match="JSON object"):
        parse_fields(body)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"prompt_logprobs":0}', "prompt_logprobs"),
        (b'{"prompt_logprobs":null}', ""),
        (b'{"echo":true,"logprobs":1}', "prompt_logprobs"),
        (b'{"echo":true}', ""),
        (b'{"echo": false ,"logprobs":1}', ""),
        (b'{"logprobs":5}', ""),
        (b'{"n":1,"best_of":1}', ""),
        (b'{"n":null}', ""),
        (b'{"n":2}', "many_answers"),
        (b'{"best_of":3}', "many_answers"),
        (b'{"use_beam_search":true}', "many_answers"),
        (b'{"prompt":["a"]}', ""),
        (b'{"prompt":["a","b"]}', "many_prompts"),
        (b'{"prompt":[ "a","b"]}', "many_prompts"),
        (b'{"prompt":[[1,2],[3]]}', "many_prompts"),
        (b'{"prompt":[1,2,3]}', ""),
        (b'{"prompt":[ 1,2,3]}', ""),
        (b'{"prompt":[]}', ""),
        (b'{"prompt":"[1,2"}', ""),
    ],
)
def test_what_one_offer_cannot_serve_is_not_handed_off(body, reason):
    assert local_reason(parse_fields(body)) == reason


def test_request_headers_are_end_to_end_only():
    headers = request_headers(
        {
            "Host": "router",
            "Authorization": "Bearer key",
            "X-Request-Id": "mine",
            "Connection": "keep-alive, X-Private",
            "X-Private": "1",
            "Keep-Alive": "timeout=5",
            "Transfer-Encoding": "chunked",
            "Content-Encoding": "gzip",
            "Content-Length": "3",
            "content-type": "application/json; charset=utf-8",
            "X-KVFerry-Attempt": "forged",
            "traceparent": "00-1-2-01",
        },
        "id-1",
    )
    assert {name.lower(): value for name, value in headers.items()} == {
        "authorization": "Bearer key",
        "x-request-id": "mine",
        "traceparent": "00-1-2-01",
        "content-type": "application/json",
        "x-kvferry-attempt": "id-1",
    }


def test_answer_headers_keep_the_length_and_drop_the_hop():
    headers = answer_headers(
        {"Content-Length": "3", "Connection": "close", "X-Request-Id": "a", "Server": "w"}
    )
    assert dict(headers) == {"Content-Length": "3", "X-Request-Id": "a", "Server": "w"}
