"""A prefill and a decode engine with a small pool each, for kinds of fault in hand-offs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from faults.helpers import Ends
from kvferry.handoff import HandOff
from kvferry.layout import KVGeometry

GEOMETRY = KVGeometry(
    model="m", layers=2, kv_heads=2, head_dim=8, dtype="float16", block_tokens=4, blocks=64
)
TOKENS = 10


@dataclass
class Side:
    """An engine with a pool and a hand-off."""

    engine: Any
    handoff: HandOff
    pool: Any

    def offer(self, on_end: Any = None) -> Any:
        """Offer the first ten tokens, in blocks 3, 1 and 7."""
        return self.handoff.offer([3, 1, 7], TOKENS, on_end=on_end or Ends())

    def claim(self, offer: Any, blocks: Any = (9, 2, 4), **options: Any) -> Ends:
        """Claim what was offered; the result collects its end."""
        ends = Ends()
        self.handoff.claim(offer.params, list(blocks), TOKENS, on_end=ends, **options)
        return ends

    def is_idle(self) -> bool:
        figures = self.handoff.statistics()
        return not sum(figures["offers"].values()) and not sum(figures["claims"].values())


@pytest.fixture
def make_side(make_engine):
    def make(name, *transports, **settings):
        engine = make_engine(name, *transports, **settings)
        pool = engine.allocate(GEOMETRY.pool_nbytes)
        pool.array[:] = np.random.default_rng(len(name)).integers(0, 256, pool.array.size)
        return Side(engine, HandOff(engine, pool, GEOMETRY), pool)

    return make
