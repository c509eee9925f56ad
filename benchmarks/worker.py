"""Inside a rival's process: a pool, and commands that come as lines of JSON on standard input.

Answers go to a descriptor of their own, because libraries print to the standard ones.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from benchmarks.base import MIB, U8, Case

_PR_SET_PDEATHSIG = 1
_VERIFY_BYTES = 16 * MIB


def pattern(nbytes: int) -> U8:
    """Bytes that the source pool holds: random, and the same in every process."""
    words = np.random.Generator(np.random.SFC64(7)).integers(0, 1 << 64, nbytes // 8, np.uint64)
    return words.view(np.uint8)


class Worker(ABC):
    """One process of a rival. The source's only answers; the target's moves the bytes."""

    pool: U8

    def allocate(self, nbytes: int, *, is_source: bool) -> None:
        """Make ``self.pool``. numpy asks for huge pages for an array of this size."""
        self.pool = pattern(nbytes) if is_source else np.zeros(nbytes, np.uint8)
        self.pool[::4096] |= 0  # every page is touched before any clock runs

    @abstractmethod
    def open(self, remote: dict[str, Any]) -> dict[str, Any]:
        """Register the pool and connect. remote: what the source's ``open`` returned, or {}."""

    def prepare(self, case: Case) -> None:  # noqa: B027 - the source has nothing to do
        """Build descriptors for the case."""

    def move(self) -> None:
        """Move the prepared case and return when every byte has arrived. Raises on failure."""
        raise NotImplementedError

    def verify(self, case: Case) -> bool:
        """Whether one move into a zeroed pool puts every byte in its place."""
        self.pool[:] = 0
        self.move()
        expected = pattern(case.total_bytes)
        if case.is_contiguous:
            return np.array_equal(self.pool[: case.total_bytes], expected)
        source, target = (offsets // case.block_bytes for offsets in case.offsets())
        got = self.pool[: case.total_bytes].reshape(-1, case.block_bytes)
        wanted = expected.reshape(-1, case.block_bytes)
        step = max(1, _VERIFY_BYTES // case.block_bytes)
        return all(
            np.array_equal(got[target[n : n + step]], wanted[source[n : n + step]])
            for n in range(0, case.blocks, step)
        )

    def figures(self) -> dict[str, float]:
        """What else this rival measures; only the target is asked. Names end in the unit."""
        return {}

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Let go of what would outlive the process."""


def serve(source: type[Worker], target: type[Worker]) -> None:
    """Main of a rival's file: ``python -m benchmarks.rival_x ROLE CORES ANSWER_FD``."""
    role, cores, answer_fd = sys.argv[1:4]
    # A stopped process would outlive a killed parent for ever otherwise.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    worker = (source if role == "source" else target)()
    with os.fdopen(int(answer_fd), "w") as answers:
        for line in sys.stdin:
            try:
                answer = _obey(worker, role, json.loads(line))
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
            if answer.get("bye"):
                break
    # Some libraries crash in their exit handlers; there is nothing left to be saved.
    os._exit(0)


def _obey(worker: Worker, role: str, command: dict[str, Any]) -> dict[str, Any]:
    match command["do"]:
        case "open":
            worker.allocate(command["pool_bytes"], is_source=role == "source")
            return worker.open(command["remote"])
        case "prepare":
            worker.prepare(Case(**command["case"]))
            return {}
        case "move":
            begin = time.perf_counter()
            worker.move()
            return {"seconds": time.perf_counter() - begin, "cpu_s": time.process_time()}
        case "verify":
            return {"ok": worker.verify(Case(**command["case"]))}
        case "cpu":
            return {"cpu_s": time.process_time()}
        case "figures":
            return worker.figures()
        case "close":
            worker.close()
            return {"bye": True}
    raise ValueError(f"unknown command {command['do']}")
