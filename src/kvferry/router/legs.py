"""What each leg of a request is sent, and what is taken from the answers. Pure.

Only the outermost object of a body is looked at. Every value in it stays the bytes that the client
or prefill wrote, so numbers, unknown fields and ``kv_transfer_params`` pass unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from multidict import CIMultiDict

from kvferry.errors import ProtocolError, UsageError

Fields = dict[str, msgspec.Raw]

KV_PARAMS = "kv_transfer_params"
ATTEMPT_HEADER = "x-kvferry-attempt"
PREFILL_HEADER = "x-kvferry-prefill"
DECODE_HEADER = "x-kvferry-decode"
HANDOFF_HEADER = "x-kvferry-handoff"
ABANDON_PATH = "/kvferry/abandon"

_OFFER = msgspec.Raw(b'{"do_remote_decode":true,"do_remote_prefill":false}')
_ONE = msgspec.Raw(b"1")
_ABSENT = (b"null", b"false")

# These make prefill do more than the prompt, or are refused together with stream=false or
# max_tokens=1.
_NOT_FOR_PREFILL = ("stream_options", "min_tokens", "best_of")

# Headers that belong to one connection, and those that describe a body that is written anew.
_HOP_BY_HOP = frozenset(
    (
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)
_REQUEST_ONLY = frozenset(("host", "content-length", "content-encoding", "expect"))

_fields_decoder = msgspec.json.Decoder(Fields)


def parse_fields(body: bytes) -> Fields:
    """The members of a JSON object, values as they were written.

    ``kv_transfer_params`` is dropped: a client could name blocks and hosts that are not its own.
    Raises UsageError when the body is not a JSON object.
    """
    try:
        fields = _fields_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as problem:
        raise UsageError(f"the request body is not a JSON object: {problem}") from None
    fields.pop(KV_PARAMS, None)
    return fields


def local_reason(fields: Fields) -> str:
    """Why this request cannot be handed off, or "".

    One offer is one prompt's blocks, to be claimed once: it serves one prompt and one answer.
    Log-probabilities of the prompt come from logits that decode has only if it computes the prompt.
    """
    if _is_set(fields, "prompt_logprobs"):
        return "prompt_logprobs"
    if _is_set(fields, "echo") and _is_set(fields, "logprobs"):
        return "prompt_logprobs"
    if _is_set(fields, "use_beam_search") or any(
        _is_set(fields, key) and bytes(fields[key]).strip() != b"1" for key in ("n", "best_of")
    ):
        return "many_answers"
    return "many_prompts" if _has_many_prompts(fields) else ""


def prefill_body(fields: Fields) -> bytes:
    """The request that makes prefill compute the prompt, one token, and offer its blocks."""
    leg = {key: value for key, value in fields.items() if key not in _NOT_FOR_PREFILL}
    leg["stream"] = msgspec.Raw(b"false")
    leg["max_tokens"] = _ONE
    leg["n"] = _ONE
    if "max_completion_tokens" in leg:
        leg["max_completion_tokens"] = _ONE
    leg[KV_PARAMS] = _OFFER
    return msgspec.json.encode(leg)


def decode_body(fields: Fields, params: msgspec.Raw | None) -> bytes:
    """The client's request, with what prefill offered when there is something."""
    return msgspec.json.encode(fields if params is None else {**fields, KV_PARAMS: params})


def offered_params(answer: bytes) -> msgspec.Raw | None:
    """``kv_transfer_params`` of prefill's answer, as written, or None when it offers nothing.

    Raises ProtocolError when the answer is not a JSON object.
    """
    try:
        params = _fields_decoder.decode(answer).get(KV_PARAMS)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as problem:
        raise ProtocolError(
            f"prefill's answer is not a JSON object: {problem}", stage="prefill"
        ) from None
    return params if params is not None and bytes(params).lstrip().startswith(b"{") else None


def request_headers(received: Mapping[str, str], attempt: str) -> CIMultiDict[str]:
    """End-to-end headers of the client's request, and the router's own id of this attempt."""
    headers = _end_to_end(received, _REQUEST_ONLY)
    for name in [name for name in headers if name.lower().startswith("x-kvferry-")]:
        headers.popall(name, None)
    headers["Content-Type"] = "application/json"
    headers[ATTEMPT_HEADER] = attempt
    return headers


def answer_headers(received: Mapping[str, str]) -> CIMultiDict[str]:
    """End-to-end headers of a worker's answer. Its length, where it has one, stays."""
    return _end_to_end(received, ())


def _end_to_end(received: Mapping[str, str], dropped: Iterable[str]) -> CIMultiDict[str]:
    named = {
        name.strip().lower()
        for header, value in received.items()
        if header.lower() == "connection"
        for name in value.split(",")
    }
    unwanted = _HOP_BY_HOP.union(dropped, named)
    return CIMultiDict(
        (name, value) for name, value in received.items() if name.lower() not in unwanted
    )


def _is_set(fields: Fields, key: str) -> bool:
    value = fields.get(key)
    return value is not None and bytes(value).strip() not in _ABSENT


def _has_many_prompts(fields: Fields) -> bool:
    prompt = bytes(fields.get("prompt", b"")).strip()
    # A list of numbers is one prompt, given as tokens. Only lists of texts or lists hold several.
    if not prompt.startswith(b"[") or prompt[1:2].strip(b'"[ \t\r\n'):
        return False
    try:
        prompts = msgspec.json.decode(prompt, type=list[msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError):
        return False
    return len(prompts) > 1 and bytes(prompts[0]).lstrip()[:1] in (b'"', b"[")
