"""OpenAI response bodies, whole and in chunks, from the outputs of a request's sequences. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvferry.engines.reference.api import FieldError, Generation
from kvferry.engines.reference.sequence import Output, TokenLogprobs
from kvferry.engines.reference.tokenizer import Tokenizer
from kvferry.errors import (
    BusyError,
    ClosedError,
    DeadlineError,
    HandoffError,
    KVFerryError,
    PeerError,
    TransferError,
    UsageError,
)

UNKNOWN_LOGPROB = -9999.0
"""Stands for a log-probability that is not known where the format allows no null."""

_STATUSES: tuple[tuple[type[KVFerryError], int, str], ...] = (
    (UsageError, 400, "invalid_request_error"),
    (BusyError, 429, "rate_limit_error"),
    (ClosedError, 503, "service_unavailable_error"),
    (DeadlineError, 504, "timeout_error"),
    (HandoffError, 502, "handoff_error"),
    (PeerError, 502, "handoff_error"),
    (TransferError, 502, "handoff_error"),
)


def error_reply(error: KVFerryError) -> tuple[int, dict[str, Any]]:
    """HTTP status and body for an error."""
    status, kind = next(
        ((status, kind) for cls, status, kind in _STATUSES if isinstance(error, cls)),
        (500, "server_error"),
    )
    param = error.param if isinstance(error, FieldError) else None
    if error.code == "model_not_found":
        status = 404
    return status, error_body(str(error), kind, error.code, param)


def error_body(message: str, kind: str, code: str, param: str | None = None) -> dict[str, Any]:
    """The shape that OpenAI clients expect of an error."""
    return {"error": {"message": message, "type": kind, "code": code, "param": param}}


@dataclass(slots=True)
class _Choice:
    """What has come of one answer so far."""

    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text_length: int = 0
    finish: str = ""


class Reply:
    """Builds the response to one generation.

    id, created: what the response says; seconds since 1970.
    Feed outputs to ``chunks`` for a stream, or to ``add`` and take ``body`` at the end.
    """

    def __init__(self, generation: Generation, tokenizer: Tokenizer, id: str, created: int) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._choices = [_Choice() for _ in range(generation.n)]
        self._transfer: dict[str, Any] | None = None
        kind = "chat.completion" if generation.is_chat else "text_completion"
        chunk_kind = "chat.completion.chunk" if generation.is_chat else kind
        self._head = {
            "id": id,
            "object": chunk_kind if generation.is_stream else kind,
            "created": created,
            "model": generation.model,
        }

    @property
    def is_complete(self) -> bool:
        """Whether every answer has ended."""
        return all(choice.finish for choice in self._choices)

    def add(self, output: Output) -> None:
        """Take in news of one sequence, which must not be an error."""
        choice = self._choices[output.sequence.index]
        choice.text.append(output.text)
        choice.tokens.extend(output.tokens)
        if output.logprobs is not None:
            choice.logprobs.append(output.logprobs)
        choice.finish = output.finish
        if output.transfer is not None:
            self._transfer = output.transfer

    def body(self) -> dict[str, Any]:
        """The whole response."""
        choices = [self._whole(index, choice) for index, choice in enumerate(self._choices)]
        body = {**self._head, "choices": choices, "usage": self._usage()}
        if self._transfer is not None:
            body["kv_transfer_params"] = self._transfer
        return body

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first output: in a chat each answer begins with its role."""
        if not self._generation.is_chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
            for index in range(self._generation.n)
        ]

    def chunks(self, output: Output) -> list[dict[str, Any]]:
        """Chunks for an output that is no error; none if it shows nothing new."""
        self.add(output)
        choice = self._choices[output.sequence.index]
        shown = output.text or output.finish or output.logprobs
        if not shown and not (self._generation.return_token_ids and output.tokens):
            return []
        new: dict[str, Any] = {"index": output.sequence.index}
        if self._generation.is_chat:
            new["delta"] = {"content": output.text} if output.text else {}
        else:
            new["text"] = output.text
        entries = [output.logprobs] if output.logprobs is not None else []
        new["logprobs"] = self._logprobs(entries, choice.text_length) if entries else None
        new["finish_reason"] = output.finish or None
        if self._generation.return_token_ids:
            new["token_ids"] = list(output.tokens)
        choice.text_length += len(output.text)
        chunk = self._chunk(new)
        if output.transfer is not None:
            chunk["kv_transfer_params"] = output.transfer
        return [chunk]

    def closing(self) -> list[dict[str, Any]]:
        """Chunks after the last output: the token counts, if they are wanted."""
        if not self._generation.include_usage:
            return []
        return [{**self._head, "choices": [], "usage": self._usage()}]

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._generation.include_usage:
            chunk["usage"] = None
        return chunk

    def _whole(self, index: int, choice: _Choice) -> dict[str, Any]:
        text = "".join(choice.text)
        whole: dict[str, Any] = {"index": index}
        if self._generation.is_chat:
            whole["message"] = {"role": "assistant", "content": text}
        else:
            whole["text"] = text
        wanted = self._generation.params.logprobs is not None
        whole["logprobs"] = self._logprobs(choice.logprobs, 0) if wanted else None
        whole["finish_reason"] = choice.finish
        if self._generation.return_token_ids:
            whole["token_ids"] = choice.tokens
        return whole

    def _usage(self) -> dict[str, int]:
        prompt = len(self._generation.prompt)
        made = sum(len(choice.tokens) for choice in self._choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
        }

    def _logprobs(self, entries: list[TokenLogprobs], offset: int) -> dict[str, Any]:
        if self._generation.is_chat:
            return {"content": [self._chat_logprob(entry) for entry in entries]}
        names = [self._name(entry.token) for entry in entries]
        offsets = []
        for name in names:
            offsets.append(offset)
            offset += len(name)
        return {
            "tokens": names,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                {self._name(token): logprob for token, logprob in entry.top} for entry in entries
            ],
            "text_offset": offsets,
        }

    def _chat_logprob(self, entry: TokenLogprobs) -> dict[str, Any]:
        known = UNKNOWN_LOGPROB if entry.logprob is None else entry.logprob
        top = [self._named(token, logprob) for token, logprob in entry.top]
        return {**self._named(entry.token, known), "top_logprobs": top}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        name = self._name(token)
        return {"token": name, "logprob": logprob, "bytes": list(name.encode())}

    def _name(self, token: int) -> str:
        return self._tokenizer.decode([token])
