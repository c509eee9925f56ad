from __future__ import annotations

import dataclasses

import pytest

from kvferry.engines.reference.weights import load
from kvferry.errors import ConfigError


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 0},
        {"norm_eps": 0.0},
        {"rope_theta": -1.0},
        {"kv_heads": 3},
        {"head_dim": 15},
        {"bos_id": 260},
        {"eos_ids": frozenset({-1})},
    ],
)
def test_impossible_numbers_name_their_field(change: dict[str, object]) -> None:
    config = load("tiny")[0]
    with pytest.raises(ConfigError, match=next(iter(change))):
        dataclasses.replace(config, **change)
