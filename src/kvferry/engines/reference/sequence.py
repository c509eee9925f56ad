"""One sequence on its way through the engine, and what it tells its consumer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.engines.reference.blocks import Blocks
from kvferry.engines.reference.sampling import SamplingParams
from kvferry.errors import KVFerryError

if TYPE_CHECKING:
    from kvferry.engines.reference.connector import ClaimHandle


class State(Enum):
    """Where a sequence stands. Each state but FINISHED has a deadline, see scheduler.LIMITS."""

    WAITING = "waiting"
    """In the queue; holds nothing."""
    LOADING = "loading"
    """Holds blocks that the connector fills with KV from another engine."""
    RUNNING = "running"
    """Holds blocks; takes part in steps."""
    OFFERED = "offered"
    """Answered; the connector holds the blocks for another engine to read."""
    STOPPING = "stopping"
    """The connector was asked to stop early and has not yet let go of the blocks."""
    FINISHED = "finished"
    """Holds nothing any more."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of one output token, and of the likeliest ones at its place.

    logprob: natural logarithm, or None where it is unknown: the first token of a sequence whose
        prompt ran elsewhere was sampled there.
    top: (token, logprob), likeliest first.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """News of one sequence; at most one per step, and none after one with ``is_last``.

    tokens: the tokens that are new, none or one.
    text: what they add to the text; may lag behind the tokens by a few characters.
    finish: ``"stop"`` or ``"length"`` in the last output of a sequence that succeeded, else "".
    error: why the sequence failed, in its last output; the tokens so far are valid.
    transfer: ``kv_transfer_params`` for the response, when the KV was offered.
    """

    sequence: Sequence
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: TokenLogprobs | None = None
    finish: str = ""
    error: KVFerryError | None = None
    transfer: dict[str, Any] | None = None

    @property
    def is_last(self) -> bool:
        return bool(self.finish) or self.error is not None


class Decoder(Protocol):
    """Turns tokens into text piece by piece, as tokenizer.StreamDecoder does."""

    def push(self, token: int, /) -> str: ...

    def flush(self) -> str: ...


class TextStream:
    """Text of one sequence: holds back what may become a stop string, and cuts at one.

    ``is_stopped`` turns true when a stop string is complete; it and what follows are not shown.
    """

    def __init__(self, decoder: Decoder, stops: tuple[str, ...] = ()) -> None:
        self._decoder = decoder
        self._stops = stops
        self._held = ""
        self.is_stopped = False

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """The text that is certain now. Stop strings count only where ``may_stop``."""
        self._held += self._decoder.push(token)
        return self._release(may_stop)

    def flush(self) -> str:
        """The rest of the text, when no more tokens come."""
        if self.is_stopped:
            return ""
        self._held += self._decoder.flush()
        text, self._held = self._held, ""
        return text

    def _release(self, may_stop: bool) -> str:
        if may_stop:
            found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
            if found:
                self.is_stopped = True
                text, self._held = self._held[: min(found)], ""
                return text
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with, but not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


class Sequence:
    """One prompt and what is generated for it. After ``submit`` the engine's thread owns it.

    id: unique in this engine.
    prompt: int64 ``[n]``, 1 or more token ids.
    request_seed: seeds the draws of this sequence; the same seed gives the same tokens anywhere.
    transfer: the request's ``kv_transfer_params``, or None for an ordinary request.
    text: makes text and finds stop strings; None if only tokens are wanted.
    labels: what others call the request; for the flight recorder.
    sink: takes the outputs, in the consumer's thread.
    """

    def __init__(
        self,
        id: str,
        prompt: NDArray[np.int64],
        params: SamplingParams,
        *,
        index: int = 0,
        request_seed: int = 0,
        transfer: dict[str, Any] | None = None,
        text: TextStream | None = None,
        labels: tuple[str, ...] = (),
        sink: Callable[[Output], None] | None = None,
    ) -> None:
        self.id = id
        self.index = index
        self.prompt = prompt
        self.params = params
        self.request_seed = request_seed
        self.transfer = transfer
        self.text = text
        self.labels = labels
        self.sink = sink
        self.output: list[int] = []
        self.first_logprobs: TokenLogprobs | None = None
        """Of the first output token, if they were asked for; travels with an offer."""
        self.state = State.WAITING
        self.blocks: Blocks = np.empty(0, dtype=np.int64)
        self.block_tokens = 1
        self.computed_tokens = 0
        """Positions whose KV is complete in the blocks."""
        self.arrived_s = 0.0
        self.deadline_s = math.inf
        self.is_answered = False
        self.is_recomputed = False  # its KV was to be loaded and was computed here
        """Whether the consumer has its last output, or wants none."""
        self.is_overdue = False
        """Whether the connector still holds the blocks after it should have stopped."""
        self.ticket: object | None = None
        """Names the connector's call that is under way; stands for the blocks being its own."""
        self.handle: ClaimHandle | None = None

    @property
    def is_remote_decode(self) -> bool:
        """Whether another engine goes on after the prompt and the first token."""
        return bool(self.transfer and self.transfer.get("do_remote_decode"))

    @property
    def is_remote_prefill(self) -> bool:
        """Whether another engine has run the prompt."""
        return bool(self.transfer and self.transfer.get("do_remote_prefill"))

    @property
    def max_tokens(self) -> int:
        """Output tokens that this engine makes at most."""
        return 1 if self.is_remote_decode else self.params.max_tokens

    @property
    def reserved_tokens(self) -> int:
        """Positions that need a place: the KV of the last output token is never computed."""
        return len(self.prompt) + self.max_tokens - 1

    @property
    def prompt_blocks(self) -> Blocks:
        """int64 ``[ceil(len(prompt) / block_tokens)]``: the blocks of the prompt, in order.

        The last one may be partly filled. Empty before admission.
        """
        return self.blocks[: -(-len(self.prompt) // self.block_tokens)]

    def __repr__(self) -> str:
        return f"<Sequence {self.id} {self.state.value}>"
