"""What trials showed: plain records, and the book in which an engine looks them up."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from kvferry.planner import PathKey, Tried

HOST = "host"
"""The place of host memory; the place of device memory is the device's UUID."""

_NOTHING: Mapping[PathKey, Tried] = MappingProxyType({})

TrialKey = tuple[str, str, str, str]
"""(transport, direction, local place, remote place)."""


class _Memory(Protocol):
    @property
    def device(self) -> str: ...


def place_of(region: _Memory) -> str:
    """Where a region lies: ``"host"`` or a device's UUID."""
    return region.device or HOST


@dataclass(frozen=True, slots=True)
class Trial:
    """One path between two places, as it was tried once.

    transport, direction: the path, direction as seen from ``local``, whose engine moved the bytes.
    local, remote: places: ``"host"`` or the UUID of a device.
    at: seconds since 1970. bytes_per_s: at the largest size; latency_s: of the smallest one.
    why: what went wrong, to follow "a trial"; "" when all bytes were right.
    is_wrong: the path reported success, and the bytes were not those that were sent.
    """

    transport: str
    direction: str
    local: str
    remote: str
    at: float
    bytes_per_s: float = 0.0
    latency_s: float = 0.0
    why: str = ""
    is_wrong: bool = False

    @property
    def key(self) -> TrialKey:
        return (self.transport, self.direction, self.local, self.remote)

    @property
    def path(self) -> str:
        return f"{self.transport}/{self.direction}"

    def as_tried(self) -> Tried:
        """What the planner must know of it."""
        day = time.strftime("%Y-%m-%d", time.gmtime(self.at))
        return Tried(day, self.bytes_per_s, self.why)


class TrialBook:
    """Trials by their paths; a later one replaces an earlier one of the same path."""

    def __init__(self, trials: Iterable[Trial] = ()) -> None:
        self._trials: dict[TrialKey, Trial] = {}
        self._between: dict[tuple[str, str], dict[PathKey, Tried]] = {}
        for trial in trials:
            self.add(trial)

    def add(self, trial: Trial) -> None:
        self._trials[trial.key] = trial
        pair = self._between.setdefault((trial.local, trial.remote), {})
        pair[trial.transport, trial.direction] = trial.as_tried()

    def get(self, key: TrialKey) -> Trial | None:
        return self._trials.get(key)

    def between(self, local: str, remote: str) -> Mapping[PathKey, Tried]:
        """What is known of the paths between two places."""
        return self._between.get((local, remote), _NOTHING)

    def __iter__(self) -> Iterator[Trial]:
        return iter(self._trials.values())

    def __len__(self) -> int:
        return len(self._trials)
