"""Mooncake's transfer engine over tcp: the target reads the source's memory in batches."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from benchmarks.base import Case
from benchmarks.process import ProcessRival
from benchmarks.worker import Worker, serve

BATCH_BLOCKS = 1024
"""Blocks in one call. It refuses batches of many thousands as queue-full."""


class Mooncake(Worker):
    def connect(self) -> None:
        from mooncake.engine import TransferEngine  # type: ignore[import-not-found]

        self.engine = TransferEngine()
        self._check("initialize", self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""))
        self.address = self.pool.ctypes.data
        done = self.engine.register_memory(self.address, self.pool.nbytes)
        self._check("register_memory", done)

    @staticmethod
    def _check(call: str, code: int) -> None:
        if code:
            raise RuntimeError(f"{call} returned {code}")


class Source(Mooncake):
    def open(self, remote: dict[str, Any]) -> dict[str, Any]:
        self.connect()
        return {"address": self.address, "port": self.engine.get_rpc_port()}


class Target(Mooncake):
    def open(self, remote: dict[str, Any]) -> dict[str, Any]:
        self.connect()
        self._peer = f"127.0.0.1:{remote['port']}"
        self._remote_address = remote["address"]
        name = "mooncake-transfer-engine-non-cuda"
        return {name: importlib.metadata.version(name)}

    def prepare(self, case: Case) -> None:
        source, target = case.offsets()
        local = (self.address + target).tolist()
        remote = (self._remote_address + source).tolist()
        self._batches = []
        for first in range(0, case.blocks, BATCH_BLOCKS):
            part = slice(first, first + BATCH_BLOCKS)
            sizes = [case.block_bytes] * len(local[part])
            self._batches.append((local[part], remote[part], sizes))

    def move(self) -> None:
        for local, remote, sizes in self._batches:
            code = self.engine.batch_transfer_sync_read(self._peer, local, remote, sizes)
            self._check("batch_transfer_sync_read", code)


def rivals() -> list[ProcessRival]:
    return [
        ProcessRival(
            "mooncake tcp",
            "benchmarks.rival_mooncake",
            # Only the log of what went wrong: its chatter costs time.
            env={"MC_FORCE_TCP": "1", "MC_LOG_LEVEL": "ERROR"},
            note=f"read, {BATCH_BLOCKS} blocks a call",
        )
    ]


if __name__ == "__main__":
    serve(Source, Target)
