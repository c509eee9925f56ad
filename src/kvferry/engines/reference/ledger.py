"""Who is in which state since when, holding which blocks. Only here do states and blocks change."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvferry.clock import Clock
from kvferry.engines.reference.blocks import BlockPool
from kvferry.engines.reference.limits import LIMITS, SchedulerConfig
from kvferry.engines.reference.sequence import Sequence, State

_NO_BLOCKS = np.empty(0, dtype=np.int64)
_PINNED = (State.LOADING, State.OFFERED, State.STOPPING)


class Ledger:
    """Every sequence that is not finished, with its blocks and its deadline.

    The engine's thread alone changes it; any thread may ask for ``statistics``.
    """

    def __init__(self, config: SchedulerConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._pool = BlockPool(config.blocks)
        self._counts = dict.fromkeys(State, 0)
        self.live: dict[Sequence, None] = {}

    def add(self, sequence: Sequence) -> None:
        """Take in a new sequence, in WAITING."""
        sequence.arrived_s = self._clock.now()
        sequence.block_tokens = self._config.block_tokens
        self.live[sequence] = None
        self._counts[sequence.state] += 1
        self.enter(sequence, State.WAITING)

    def has_room(self, sequence: Sequence) -> bool:
        """Whether :meth:`reserve` would find its blocks."""
        return self._config.blocks_for(sequence.reserved_tokens) <= self._pool.free_count

    def reserve(self, sequence: Sequence) -> None:
        """Give the sequence the blocks for its whole life. BusyError if too few are free."""
        sequence.blocks = self._pool.allocate(self._config.blocks_for(sequence.reserved_tokens))

    def enter(self, sequence: Sequence, state: State) -> None:
        """Change the state and start its deadline."""
        self._counts[sequence.state] -= 1
        self._counts[state] += 1
        sequence.state = state
        sequence.is_overdue = False
        sequence.deadline_s = math.inf
        if state in LIMITS:
            limit_s: float = getattr(self._config, LIMITS[state])
            sequence.deadline_s = self._clock.now() + limit_s
        if state in (State.WAITING, State.LOADING, State.RUNNING):
            end_s = sequence.arrived_s + self._config.total_s
            sequence.deadline_s = min(sequence.deadline_s, end_s)

    def release(self, sequence: Sequence) -> None:
        """The end: the blocks are free and the sequence is forgotten."""
        blocks, sequence.blocks = sequence.blocks, _NO_BLOCKS
        self._pool.free(blocks)
        self.enter(sequence, State.FINISHED)
        del self.live[sequence]

    def mark_overdue(self, sequence: Sequence) -> None:
        """Nothing more can be done but wait: no further deadline."""
        sequence.deadline_s = math.inf
        sequence.is_overdue = True

    def expired(self) -> list[Sequence]:
        """Those whose deadline has passed."""
        now = self._clock.now()
        return [sequence for sequence in self.live if sequence.deadline_s <= now]

    def next_deadline_s(self) -> float | None:
        """The nearest deadline, or None."""
        nearest = min((sequence.deadline_s for sequence in self.live), default=math.inf)
        return None if nearest == math.inf else nearest

    def statistics(self) -> dict[str, Any]:
        """Counts as plain JSON types. Any thread: copying a dict's keys is one uncut operation."""
        live = list(self.live)
        return {
            "sequences": {s.value: n for s, n in self._counts.items() if s is not State.FINISHED},
            "finished": self._counts[State.FINISHED],
            "blocks_free": self._pool.free_count,
            "blocks_total": self._pool.total,
            "blocks_pinned": sum(len(s.blocks) for s in live if s.state in _PINNED),
            "overdue": sum(1 for s in live if s.is_overdue),
        }
