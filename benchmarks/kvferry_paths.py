"""kvferry's own transports, one row each, measured as every rival is.

Each process opens an engine that is allowed this one transport. Checking, pairing and planning are
part of every run; only the span lists are made beforehand.
"""

from __future__ import annotations

import base64
import os
import statistics
import threading
import time
from typing import Any

import numpy as np

import kvferry
from benchmarks.base import Case, Rival
from benchmarks.process import OWN_PYTHON, ProcessRival
from benchmarks.worker import Worker, pattern, serve
from kvferry.config import EngineConfig
from kvferry.engine import Engine
from kvferry.layout import KVGeometry, transfer_spans
from kvferry.memory.copy import backend
from kvferry.protocol.messages import Ping
from kvferry.regions import Spans

TRANSPORT = "KVFERRY_TRANSPORTS"
"""Names the row's transport to both processes; the engine reads it too."""

THREADS = "KVFERRY_COPY_THREADS"
FIGURE_SPANS = 16384
FIGURE_BLOCK_BYTES = 4096
FIGURE_ROUNDS = 21
FIGURE_PINGS = 501


class Ferry(Worker):
    """An engine, with a pool that it allocated for ``shm`` and that it only registered else."""

    def allocate(self, nbytes: int, *, is_source: bool) -> None:
        if THREADS not in os.environ:
            # The other side sleeps while this one copies, so all processors are there for it.
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
        self.engine = Engine(EngineConfig.from_environment())
        if os.environ[TRANSPORT] != "shm":
            super().allocate(nbytes, is_source=is_source)
            self.registration = self.engine.register(self.pool)
            return
        self.registration = self.engine.allocate(nbytes)
        assert self.registration.array is not None
        self.pool = self.registration.array
        self.pool[:] = pattern(nbytes) if is_source else np.uint8(0)

    def close(self) -> None:
        del self.pool
        self.engine.close()


class Source(Ferry):
    def open(self, remote: dict[str, Any]) -> dict[str, Any]:
        reference = base64.b64encode(self.registration.ref).decode()
        return {"addresses": self.engine.addresses, "region": reference}


class Target(Ferry):
    def open(self, remote: dict[str, Any]) -> dict[str, Any]:
        self._peer = self.engine.connect(remote["addresses"][0])
        self._remote = self._peer.region(base64.b64decode(remote["region"]))
        return {"kvferry": kvferry.__version__, "copy": backend().name}

    def prepare(self, case: Case) -> None:
        source, target = case.offsets()
        self._source = Spans.of(source, case.block_bytes)
        self._target = Spans.of(target, case.block_bytes)

    def move(self) -> None:
        self.engine.read(self.registration, self._target, self._remote, self._source).wait()

    def figures(self) -> dict[str, float]:
        """Control costs, in microseconds: medians, the spans in random order on both sides."""
        count = min(FIGURE_SPANS, self.pool.nbytes // FIGURE_BLOCK_BYTES)
        case = Case(count * FIGURE_BLOCK_BYTES, FIGURE_BLOCK_BYTES)
        self.prepare(case)
        submits = []
        for _ in range(FIGURE_ROUNDS):
            begin = time.perf_counter()
            transfer = self.engine.read(self.registration, self._target, self._remote, self._source)
            submits.append(time.perf_counter() - begin)
            transfer.wait()
        pool = KVGeometry("m", 32, 8, 128, "bfloat16", 16, 512)
        blocks = np.random.default_rng(1).permutation(512)
        plans = []
        for _ in range(FIGURE_ROUNDS):
            begin = time.perf_counter()
            transfer_spans(pool, blocks[:256], pool, blocks[256:], 4096)
            plans.append(time.perf_counter() - begin)
        pings = [self._peer.ping() for _ in range(FIGURE_PINGS)]
        chained = self._chained()
        return {
            f"submit {count} spans, us": statistics.median(submits) * 1e6,
            "plan 16384 spans of a KV pool, us": statistics.median(plans) * 1e6,
            "control round trip, us": statistics.median(chained) * 1e6,
            "the same, with a thread that waits for it, us": statistics.median(pings) * 1e6,
        }

    def _chained(self) -> list[float]:
        """Round trips between the two control threads, as hand-offs use them: nobody waits."""
        engine, peer = self.engine, self._peer
        times: list[float] = []
        begun = [0.0]
        done = threading.Event()

        def ask() -> None:
            begun[0] = time.perf_counter()
            with engine.locked():
                peer.request(Ping, engine.clock.now() + 5.0, reply)

        def reply(_answer: Any, error: Exception | None) -> None:
            times.append(time.perf_counter() - begun[0])
            if error is None and len(times) < FIGURE_PINGS:
                ask()
            else:
                done.set()

        ask()
        done.wait(30.0)
        return times


def paths() -> list[Rival]:
    """One rival per transport that moves host memory between processes."""
    one_thread = {THREADS: "1"}
    rows: list[tuple[str, dict[str, str], str]] = [
        ("shm", {}, "both pools allocated by the engine; default settings, all processors"),
        ("shm, 1 thread", one_thread, "the same, pinned to one processor"),
        ("staged", one_thread, "through a ring in shared memory, for pools that cannot be mapped"),
        ("tcp", one_thread, "over the loopback"),
    ]
    return [
        ProcessRival(
            f"kvferry {name}",
            "benchmarks.kvferry_paths",
            python=OWN_PYTHON,
            env={TRANSPORT: name.split(",")[0], **env},
            sleeps=True,
            note=note,
        )
        for name, env, note in rows
    ]


if __name__ == "__main__":
    serve(Source, Target)
