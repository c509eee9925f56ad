"""OpenAI request bodies: what is understood, what is refused, and with which words. Pure.

Two bodies, ``/v1/completions`` and ``/v1/chat/completions``, become one :class:`Generation`. Fields
that are not known are ignored, as clients expect. Those that are known and would change the answer,
but are not supported, are refused: a client must not get something else than it asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from reprlib import repr as brief
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.engines.reference.sampling import SamplingParams
from kvferry.engines.reference.tokenizer import Tokenizer
from kvferry.errors import UsageError

N_MAX = 8
LOGPROBS_MAX = 20
COMPLETION_MAX_TOKENS = 16
"""What a completion gets that names no max_tokens."""

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "response_format": ({"type": "text"},),
}
"""Fields that would change the answer, with the values, besides null, that do not."""

_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "min_tokens")


class FieldError(UsageError):
    """A field of the request is bad. ``param`` names it, or is None for the body as a whole."""

    def __init__(self, message: str, *, param: str | None = None, **where: Any) -> None:
        super().__init__(message, **where)
        self.param = param


class ModelNotFoundError(FieldError):
    """The request names a model that this engine does not serve."""

    code = "model_not_found"


@dataclass(frozen=True, slots=True)
class Generation:
    """One request, ready to become sequences.

    prompt: int64 ``[tokens]``, at least 1; ids below 0 or above the vocabulary are the
        scheduler's to refuse.
    n: answers wanted, 1 to 8.
    include_usage: a stream ends with a chunk of token counts.
    return_token_ids: the answer carries ``token_ids`` for each choice.
    transfer: ``kv_transfer_params`` if they ask for something, else None.
    """

    model: str
    prompt: NDArray[np.int64]
    params: SamplingParams
    n: int = 1
    is_chat: bool = False
    is_stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    transfer: dict[str, Any] | None = None

    def choice_params(self, index: int) -> SamplingParams:
        """Parameters of one of the ``n`` answers: with a seed each has its own."""
        if self.params.seed is None:
            return self.params
        return replace(self.params, seed=self.params.seed + index)


@dataclass(frozen=True, slots=True)
class Served:
    """What requests are read against.

    models: names that a request may use; the first one is what answers say.
    sequence_tokens_max: prompt and output together.
    chat_max_tokens: what a chat gets that names no limit, where the context allows.
    """

    models: tuple[str, ...]
    tokenizer: Tokenizer
    sequence_tokens_max: int
    chat_max_tokens: int


def parse(body: bytes, served: Served, *, is_chat: bool) -> Generation:
    """Read a request. Raises FieldError, ModelNotFoundError or UsageError with the reason."""
    fields = _Fields(_decode(body))
    model = fields.text("model") or served.models[0]
    if model not in served.models:
        raise ModelNotFoundError(
            f"the model {brief(model)} is not served here; there is {', '.join(served.models)}",
            param="model",
        )
    fields.refuse_unsupported()
    prompt = _chat_prompt(fields, served) if is_chat else _prompt(fields, served)
    n = fields.integer("n", 1, N_MAX, 1)
    transfer = _transfer(fields)
    if transfer is not None and n > 1:
        raise FieldError("a request with kv_transfer_params has one answer, n=1", param="n")
    options = fields.table("stream_options")
    return Generation(
        model=served.models[0],
        prompt=prompt,
        params=_params(fields, served, len(prompt), transfer, is_chat=is_chat),
        n=n,
        is_chat=is_chat,
        is_stream=fields.flag("stream"),
        include_usage=_Fields(options, "stream_options.").flag("include_usage"),
        return_token_ids=fields.flag("return_token_ids"),
        transfer=transfer,
    )


def _decode(body: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FieldError(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise FieldError("the body must be a JSON object")
    return value


class _Fields:
    """Typed access to the fields of a JSON object; null counts as absent."""

    def __init__(self, body: dict[str, Any], prefix: str = "") -> None:
        self._body = body
        self._prefix = prefix

    def get(self, key: str) -> Any:
        return self._body.get(key)

    def _bad(self, key: str, wanted: str) -> FieldError:
        # Bounded in depth too: a value may be nested as deep as the interpreter can print none.
        shown = brief(self._body[key])
        return FieldError(
            f"{self._prefix}{key} is {shown}: it must be {wanted}", param=self._prefix + key
        )

    def integer(self, key: str, low: int, high: int, default: int) -> int:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self._bad(key, f"an integer from {low} to {high}")
        return value

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self._bad(key, "true or false")
        return value

    def text(self, key: str) -> str:
        value = self.get(key)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self._bad(key, "a string")
        return value

    def table(self, key: str) -> dict[str, Any]:
        value = self.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._bad(key, "an object")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        value = self.get(key)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) and text for text in values):
            raise self._bad(key, "a string or a list of strings, none of them empty")
        return tuple(values)

    def refuse_unsupported(self) -> None:
        for key, harmless in _UNSUPPORTED.items():
            value = self.get(key)
            if value is not None and value not in harmless:
                raise FieldError(f"{key} is not supported by this engine", param=key)


def _prompt(fields: _Fields, served: Served) -> NDArray[np.int64]:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _tokens(served.tokenizer.encode(prompt), "prompt")
    if isinstance(prompt, list) and all(type(token) is int for token in prompt):
        return _tokens(prompt, "prompt")
    if isinstance(prompt, list) and len(prompt) > 1:
        raise FieldError("prompt has several prompts: send one request for each", param="prompt")
    raise FieldError("prompt must be a string or a list of token ids", param="prompt")


def _chat_prompt(fields: _Fields, served: Served) -> NDArray[np.int64]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise FieldError("messages must be a list of at least one message", param="messages")
    plain = [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]
    text = served.tokenizer.chat_prompt(plain)
    return _tokens(served.tokenizer.encode(text, add_special=False), "messages")


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise FieldError(f"{where} must be an object", param=where)
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "developer", "user", "assistant"):
        raise FieldError(
            f"{where}.role must be system, developer, user or assistant", param=f"{where}.role"
        )
    if isinstance(content, list):
        if not all(_is_text_part(part) for part in content):
            raise FieldError(f"{where}.content may have text parts only", param=f"{where}.content")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise FieldError(
            f"{where}.content must be a string or a list of text parts", param=f"{where}.content"
        )
    return {"role": "system" if role == "developer" else role, "content": content}


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    )


def _tokens(ids: list[int], param: str) -> NDArray[np.int64]:
    if not ids:
        raise FieldError(f"{param} is empty: it needs at least one token", param=param)
    try:
        return np.array(ids, dtype=np.int64)
    except OverflowError:
        raise FieldError(f"{param} has a number that is no token id", param=param) from None


def _transfer(fields: _Fields) -> dict[str, Any] | None:
    table = fields.table("kv_transfer_params")
    sides = _Fields(table, "kv_transfer_params.")
    offers, claims = sides.flag("do_remote_decode"), sides.flag("do_remote_prefill")
    if offers and claims:
        raise FieldError(
            "kv_transfer_params has both do_remote_decode and do_remote_prefill: one engine is on "
            "one side of a hand-off",
            param="kv_transfer_params",
        )
    return table if offers or claims else None


def _params(
    fields: _Fields,
    served: Served,
    prompt_tokens: int,
    transfer: dict[str, Any] | None,
    *,
    is_chat: bool,
) -> SamplingParams:
    max_tokens = fields.get("max_completion_tokens")
    if max_tokens is None:
        max_tokens = fields.get("max_tokens")
    if max_tokens is None:
        room = max(served.sequence_tokens_max - prompt_tokens, 1)
        max_tokens = min(served.chat_max_tokens, room) if is_chat else COMPLETION_MAX_TOKENS
    given = {key: fields.get(key) for key in ("temperature", "top_p", "top_k", "seed")}
    if given["top_k"] == -1:
        given["top_k"] = 0
    min_tokens = fields.get("min_tokens") or 0
    if transfer and transfer.get("do_remote_decode") and isinstance(min_tokens, int):
        # A router asks prefill for one token and may leave the client's min_tokens as it was.
        min_tokens = min(min_tokens, max_tokens) if isinstance(max_tokens, int) else min_tokens
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            stop=fields.texts("stop"),
            ignore_eos=fields.flag("ignore_eos"),
            min_tokens=min_tokens,
            logprobs=_logprobs(fields, is_chat=is_chat),
            **{key: value for key, value in given.items() if value is not None},
        )
    except FieldError:
        raise
    except UsageError as error:
        named = next((key for key in _SAMPLING if error.message.startswith(f"{key} ")), None)
        raise FieldError(error.message, param=named) from None


def _logprobs(fields: _Fields, *, is_chat: bool) -> int | None:
    if not is_chat:
        wanted = fields.integer("logprobs", 0, LOGPROBS_MAX, -1)
        return None if wanted < 0 else wanted
    top = fields.integer("top_logprobs", 0, LOGPROBS_MAX, 0)
    if fields.flag("logprobs"):
        return top
    if top:
        raise FieldError("top_logprobs needs logprobs: true", param="top_logprobs")
    return None
