"""Choosing the next token. Random numbers depend on seed and step alone, never on history."""

from __future__ import annotations

import math
from dataclasses import dataclass
from reprlib import repr as brief

import numpy as np
import numpy.typing as npt

from kvferry.errors import UsageError

Floats = npt.NDArray[np.float32]

_TEMPERATURE_MAX = 100.0
_STOP_MAX = 16
_LOGPROBS_MAX = 100
_SEED_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class SamplingParams:
    """How one request is answered. Raises UsageError, naming the field, on a bad value.

    max_tokens: most tokens to generate, 1 or more.
    temperature: 0 picks the likeliest token, up to 100.
    top_p: smallest set of likeliest tokens with this probability, above 0, up to 1.
    top_k: only this many likeliest tokens, 0 for all.
    seed: makes the answer repeatable; any integer, of which 64 bits count. None leaves the
        choice to the server.
    stop: texts that end the answer, at most 16, none of them empty.
    ignore_eos: go on after an end token.
    min_tokens: tokens before an end token or a stop text counts; 0 to max_tokens.
    logprobs: how many likeliest tokens to report with each one, 0 to 100, or None.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _whole("max_tokens", self.max_tokens, 1, None)
        _whole("top_k", self.top_k, 0, None)
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.seed is not None:
            _whole("seed", self.seed, None, None)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, _LOGPROBS_MAX)
        if not (_is_number(self.temperature) and 0 <= self.temperature <= _TEMPERATURE_MAX):
            raise UsageError(
                f"temperature is {brief(self.temperature)}, "
                f"it must be a number from 0 to {_TEMPERATURE_MAX:g}"
            )
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            raise UsageError(f"top_p is {brief(self.top_p)}, it must be above 0 and at most 1")
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(f"ignore_eos is {brief(self.ignore_eos)}, it must be true or false")
        texts = self.stop
        if not isinstance(texts, tuple) or not all(isinstance(t, str) and t for t in texts):
            raise UsageError(
                f"stop is {brief(texts)}, it must be a tuple of texts, none of them empty"
            )
        if len(texts) > _STOP_MAX:
            raise UsageError(f"stop has {len(texts)} texts, at most {_STOP_MAX} are allowed")


def sample(logits: Floats, params: SamplingParams, *, step: int, request_seed: int) -> int:
    """The next token.

    logits: float32[vocab_size]; -inf rules a token out. At least one is finite.
    step: index of the token in the answer, 0 or more. The same seed and step give the same
        random number in every process, so an answer can be continued elsewhere.
    request_seed: used where ``params.seed`` is None.

    Temperature 0 gives the likeliest token, the lowest id among equals. Where
    top_k or top_p cut between equals, lower ids stay. min_tokens is the caller's: set the end
    tokens to -inf.
    """
    if params.temperature == 0:
        return int(np.argmax(logits))
    # In float64, because a tiny temperature would overflow float32 to NaN.
    scaled = logits.astype(np.float64) - float(logits.max())
    with np.errstate(over="ignore"):
        scaled /= params.temperature
    # Sorting a large vocabulary costs more than the rest, and only the cuts below need it.
    needs_order = params.top_k > 0 or params.top_p < 1
    order = np.argsort(-scaled, kind="stable") if needs_order else np.arange(len(scaled))
    if 0 < params.top_k < len(order):
        order = order[: params.top_k]
    cumulative = np.cumsum(np.exp(scaled[order]))
    if params.top_p < 1:
        kept = int(np.searchsorted(cumulative, params.top_p * cumulative[-1])) + 1
        cumulative = cumulative[:kept]
    seed = request_seed if params.seed is None else params.seed
    chosen = np.searchsorted(cumulative, _uniform(seed, step) * cumulative[-1], side="right")
    # The product may round up to the sum itself.
    return int(order[min(int(chosen), _last_possible(cumulative))])


def top_logprobs(logits: Floats, token: int, k: int) -> tuple[float, list[tuple[int, float]]]:
    """Log probability of ``token``, and the ``k`` likeliest tokens with theirs, likeliest first.

    logits: float32[vocab_size]. k: 0 or more; more than there are gives all. Equals are in
    order of id.
    """
    exact = logits.astype(np.float64)
    high = exact.max()
    logprobs = exact - (high + math.log(np.exp(exact - high).sum()))
    if k == 0:
        return float(logprobs[token]), []
    best = np.argsort(-logprobs, kind="stable")[:k]
    return float(logprobs[token]), [(int(i), float(logprobs[i])) for i in best]


def _uniform(seed: int, step: int) -> float:
    """One number from 0 (included) to 1 (excluded), by a counter-based generator."""
    key = (seed & _SEED_MASK) | (step & _SEED_MASK) << 64
    return float(np.random.Generator(np.random.Philox(key=key)).random())


def _last_possible(cumulative: npt.NDArray[np.float64]) -> int:
    """Index of the last entry with a probability above 0."""
    return int(np.searchsorted(cumulative, cumulative[-1]))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(field: str, value: object, low: int | None, high: int | None) -> None:
    fits = isinstance(value, int) and not isinstance(value, bool)
    if fits and isinstance(value, int):
        fits = (low is None or value >= low) and (high is None or value <= high)
    if not fits:
        span = "an integer"
        if low is not None:
            span += f" from {low}" + (f" to {high}" if high is not None else "")
        raise UsageError(f"{field} is {brief(value)}, it must be {span}")
