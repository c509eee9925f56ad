from __future__ import annotations

import math

import numpy as np
import pytest

from kvferry.engines.reference.sampling import SamplingParams, sample, top_logprobs
from kvferry.errors import UsageError


def logits_of(*probabilities: float) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(probabilities)).astype(np.float32)


def draws(logits: np.ndarray, params: SamplingParams, count: int = 400) -> list[int]:
    return [sample(logits, params, step=step, request_seed=7) for step in range(count)]


def test_temperature_zero_takes_the_lowest_id_among_equals() -> None:
    logits = np.array([0.0, 2.0, 2.0, 1.0], dtype=np.float32)
    assert draws(logits, SamplingParams(temperature=0), 3) == [1, 1, 1]


def test_draws_follow_the_probabilities() -> None:
    counts = np.bincount(draws(logits_of(0.6, 0.3, 0.1), SamplingParams(), 2000), minlength=3)
    assert counts / 2000 == pytest.approx([0.6, 0.3, 0.1], abs=0.04)


def test_low_temperature_sharpens_and_the_lowest_is_greedy() -> None:
    logits = logits_of(0.6, 0.4)
    assert np.mean(draws(logits, SamplingParams(temperature=0.2))) < 0.2
    assert set(draws(logits, SamplingParams(temperature=1e-300), 50)) == {0}


def test_top_k_and_top_p_cut_the_tail() -> None:
    logits = logits_of(0.1, 0.5, 0.1, 0.3)
    assert set(draws(logits, SamplingParams(top_k=2))) == {1, 3}
    assert set(draws(logits, SamplingParams(top_p=0.7))) == {1, 3}
    assert set(draws(logits, SamplingParams(top_p=0.4))) == {1}
    assert set(draws(logits, SamplingParams(top_k=3, top_p=0.99))) == {0, 1, 3}


def test_excluded_tokens_are_never_drawn() -> None:
    logits = logits_of(0.0, 0.5, 0.5, 0.0)
    for params in (SamplingParams(), SamplingParams(top_k=4), SamplingParams(top_p=0.9999)):
        assert set(draws(logits, params)) == {1, 2}


def test_random_number_depends_on_seed_and_step_alone() -> None:
    logits = np.zeros(1000, dtype=np.float32)
    params = SamplingParams(seed=5)
    first = [sample(logits, params, step=step, request_seed=1) for step in range(8)]
    backwards = [sample(logits, params, step=step, request_seed=2) for step in reversed(range(8))]
    assert first == backwards[::-1]
    assert len(set(first)) > 5
    unseeded = SamplingParams()
    assert sample(logits, unseeded, step=3, request_seed=5) == first[3]
    assert sample(logits, unseeded, step=3, request_seed=6) != first[3]


def test_random_numbers_are_pinned() -> None:
    # Another process, perhaps of another release, has to draw the same ones.
    logits = np.zeros(1000, dtype=np.float32)
    drawn = [sample(logits, SamplingParams(seed=-1), step=s, request_seed=0) for s in range(4)]
    assert drawn == [234, 654, 467, 417]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -1),
        ("seed", 0.5),
        ("stop", ("",)),
        ("stop", "text"),
        ("stop", ("a",) * 17),
        ("ignore_eos", 1),
        ("min_tokens", 17),
        ("logprobs", 101),
    ],
)
def test_bad_values_name_their_field(field: str, value: object) -> None:
    with pytest.raises(UsageError, match=field):
        SamplingParams(**{field: value})


def test_top_logprobs_are_logs_of_probabilities_likeliest_first() -> None:
    own, best = top_logprobs(logits_of(0.2, 0.5, 0.2, 0.1), 3, 3)
    assert math.exp(own) == pytest.approx(0.1)
    assert [token for token, _ in best] == [1, 0, 2]
    assert math.exp(best[0][1]) == pytest.approx(0.5)


def test_top_logprobs_of_none_and_of_more_than_there_are() -> None:
    assert top_logprobs(logits_of(0.5, 0.5), 0, 0)[1] == []
    assert len(top_logprobs(logits_of(0.5, 0.5), 0, 9)[1]) == 2
