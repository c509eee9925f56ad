"""The machine's limit: one thread's memcpy of the same number of bytes, within one process."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from benchmarks.base import U8, Case
from benchmarks.process import OWN_PYTHON, ProcessRival
from benchmarks.worker import Worker, pattern, serve

MEMCPY = "memcpy, 1 thread"


class Memcpy(Worker):
    """Copies a second buffer into the pool, always as one contiguous piece."""

    _source: U8

    def open(self, remote: dict[str, Any]) -> dict[str, Any]:
        self._source = pattern(self.pool.nbytes)
        return {"numpy": np.__version__}

    def prepare(self, case: Case) -> None:
        self._nbytes = case.total_bytes

    def move(self) -> None:
        ctypes.memmove(self.pool.ctypes.data, self._source.ctypes.data, self._nbytes)

    def verify(self, case: Case) -> bool:
        return super().verify(Case(case.total_bytes, case.total_bytes))


def memcpy() -> ProcessRival:
    """The base of every ratio. Contiguous in all columns, so that they share one yardstick."""
    return ProcessRival(MEMCPY, "benchmarks.limits", python=OWN_PYTHON, alone=True)


if __name__ == "__main__":
    serve(Memcpy, Memcpy)
