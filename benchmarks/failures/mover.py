"""The base of all rivals: memory, moves with their bytes checked, and the commands of a process.

Runs inside the processes of a scenario. Commands come as lines of JSON on standard input; answers
go to a descriptor of their own, because libraries print to the standard ones.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from benchmarks.base import I64, MIB, U8

_PR_SET_PDEATHSIG = 1
GUARD_BYTES = MIB
"""Memory of the owner's on both sides of what it registers. Nobody may touch it."""
POISON = 0xEE
POLL_S = 0.001
"""How often a caller looks whether a transfer has ended, where a rival makes it poll."""


class Mover(ABC):
    """One engine with one pool. The source's is filled; the target's is where bytes arrive."""

    memory: U8
    pool: U8

    def allocate(self, nbytes: int) -> None:
        """Make ``pool`` within ``memory``, which also holds the guards."""
        self.memory = np.full(nbytes + 2 * GUARD_BYTES, POISON, np.uint8)
        self.pool = self.memory[GUARD_BYTES:-GUARD_BYTES]

    @abstractmethod
    def open(self, nbytes: int, host: str, port: int) -> dict[str, Any]:
        """Start an engine, make a pool and register it. Returns what a reader must know.

        host: where to listen. port: the port to take if the rival lets one choose, or 0.
        """

    @abstractmethod
    def connect(self, facts: dict[str, Any], by_port: int) -> None:
        """Reach the source. by_port: a TCP port to reach it by, or 0 for the usual way."""

    @abstractmethod
    def move(self, target: I64, source: I64, block_bytes: int, *, write: bool) -> None:
        """Read blocks of the peer's pool into ours, or write ours into the peer's. Blocks.

        target, source: byte offsets in the pools; int64[blocks]. May lie beyond the pool. Raises
        on failure.
        """

    @abstractmethod
    def read_unregistered(self, nbytes: int) -> bool:
        """Read into memory that was never registered; whether its bytes are right then."""

    @abstractmethod
    def deregister(self) -> None:
        """Take the pool back from all peers; its memory stays."""

    def versions(self) -> dict[str, str]:
        """Of what is measured."""
        return {}


def pattern(seed: int, nbytes: int) -> U8:
    words = np.random.Generator(np.random.SFC64(seed)).integers(0, 1 << 64, -(-nbytes // 8), "u8")
    return words.view(np.uint8)[:nbytes]


class Reader:
    """The target's side of a scenario: makes the calls and looks at the bytes."""

    def __init__(self, mover: Mover, expected: U8) -> None:
        self.mover = mover
        self.expected = expected

    def attempts(self, spec: dict[str, Any]) -> list[dict[str, Any]]:
        """Call as ``spec`` says, in all its threads; one record per call, as ``Attempt`` has."""
        threads = spec.get("threads", 1)
        records: list[list[dict[str, Any]]] = [[] for _ in range(threads)]

        def work(i: int) -> None:
            end = time.monotonic() + spec.get("for_s", 1e9)
            for _ in range(spec.get("times", 1)):
                records[i].append(self._attempt(spec, i))
                # Who fails once has nothing to add alone; threads show how many fail.
                failed = bool(records[i][-1]["error"]) and threads == 1
                if failed or time.monotonic() >= end:
                    break

        if threads == 1:
            work(0)
        else:
            workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        return [record for part in records for record in part]

    def _attempt(self, spec: dict[str, Any], thread: int) -> dict[str, Any]:
        blocks, block_bytes = spec["blocks"], spec["block_bytes"]
        nbytes = blocks * block_bytes
        first = thread * nbytes
        # Last block first, so that no two of them can be merged.
        source = first + np.arange(blocks, dtype=np.int64) * block_bytes
        target = source[::-1].copy()
        arrives = self.mover.pool[first : first + nbytes]
        write, beyond = spec.get("write", False), spec.get("beyond", False)
        if beyond:
            # Right behind the registered memory, in the owner's guard.
            source = source - first + self.mover.pool.nbytes
        else:
            # A byte of each page: quick, so that most of the time bytes move.
            arrives[::4096] ^= 0xFF
        cpu, begin = time.process_time(), time.monotonic()
        error, is_correct = "", True
        try:
            if spec.get("unregistered"):
                is_correct = self.mover.read_unregistered(nbytes)
            else:
                self.mover.move(target, source, block_bytes, write=write)
        except Exception as failure:
            error = _explain(failure)
        record = {"begin": begin, "seconds": time.monotonic() - begin, "error": error}
        record["cpu_s"] = time.process_time() - cpu
        if not error and not write and not beyond and not spec.get("unregistered"):
            got, wanted = (
                part.view(np.uint64).reshape(blocks, -1)
                for part in (arrives, self.expected[first : first + nbytes])
            )
            is_correct = bool(np.array_equal(got[::-1], wanted))
        return {**record, "is_correct": is_correct}


def _explain(failure: Exception) -> str:
    text = str(failure)
    kind = type(failure).__name__
    return text if kind == "RuntimeError" and text else f"{kind}: {text}"


class Process:
    """The commands of one process."""

    def __init__(self, kind: type[Mover]) -> None:
        self._kind = kind
        self._mover = kind()
        self._reader: Reader | None = None
        self._twin: Mover | None = None

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        do = {
            "open": self._open,
            "reach": self._reach,
            "call": self._call,
            "twin": self._open_twin,
            "deregister": self._deregister,
            "guard": self._guard,
        }
        return do[command.pop("do")](**command)

    def _open(self, nbytes: int, host: str, port: int, seed: int) -> dict[str, Any]:
        """seed: of the bytes that the pool holds; 0 for zeros."""
        facts = self._mover.open(nbytes, host, port)
        self._mover.pool[:] = pattern(seed, nbytes) if seed else np.uint8(0)
        return {"facts": facts, "versions": self._mover.versions()}

    def _open_twin(self, nbytes: int, host: str, seed: int) -> dict[str, Any]:
        """A second engine, which is the source, in this process."""
        self._twin = self._kind()
        facts = self._twin.open(nbytes, host, 0)
        self._twin.pool[:] = pattern(seed, nbytes)
        return {"facts": facts}

    def _reach(self, facts: dict[str, Any], by_port: int, seed: int) -> dict[str, Any]:
        self._reader = Reader(self._mover, pattern(seed, self._mover.pool.nbytes))
        cpu, begin = time.process_time(), time.monotonic()
        error = ""
        try:
            self._mover.connect(facts, by_port)
        except Exception as failure:
            error = _explain(failure)
        record = {"begin": begin, "seconds": time.monotonic() - begin, "error": error}
        return {"attempts": [{**record, "cpu_s": time.process_time() - cpu}]}

    def _call(self, spec: dict[str, Any]) -> dict[str, Any]:
        assert self._reader is not None
        return {"attempts": self._reader.attempts(spec)}

    def _deregister(self) -> dict[str, Any]:
        """Take the pool back and use its memory for something else at once."""
        self._mover.deregister()
        ended = time.monotonic()
        self._mover.pool[:] = POISON
        return {"ended": ended}

    def _guard(self) -> dict[str, Any]:
        """Whether the memory around the pool is as it was."""
        memory = self._mover.memory
        is_whole = all(
            bool((part == POISON).all()) for part in (memory[:GUARD_BYTES], memory[-GUARD_BYTES:])
        )
        return {"is_whole": is_whole}


def serve(kind: type[Mover]) -> None:
    """Main of a rival's file: ``python -m benchmarks.failures.mover_x ROLE CORES ANSWER_FD``."""
    answer_fd = int(sys.argv[3])
    # A stopped process would outlive a killed parent for ever otherwise.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    process = Process(kind)
    with os.fdopen(answer_fd, "w") as answers:
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "close":
                break
            try:
                answer = process.obey(command)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    # Nothing has to be saved, and a library that hangs or crashes at its exit proves nothing here.
    os._exit(0)
