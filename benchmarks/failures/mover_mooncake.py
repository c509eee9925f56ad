"""Mooncake's transfer engine over tcp, with its default settings."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

import numpy as np

from benchmarks.base import I64, U8
from benchmarks.failures.mover import Mover, pattern, serve


class Mooncake(Mover):
    _scrap: U8

    def open(self, nbytes: int, host: str, port: int) -> dict[str, Any]:
        if port:
            # The only say in its ports: the range from which both are drawn.
            os.environ.update(MC_MIN_RPC_PORT=str(port), MC_MAX_RPC_PORT=str(port + 2))
        from mooncake.engine import TransferEngine  # type: ignore[import-not-found]

        self.engine = TransferEngine()
        self._check("initialize", self.engine.initialize(host, "P2PHANDSHAKE", "tcp", ""))
        self.allocate(nbytes)
        self.address = self.pool.ctypes.data
        self._check("register_memory", self.engine.register_memory(self.address, nbytes))
        return {"address": self.address, "host": host, "port": self.engine.get_rpc_port()}

    @staticmethod
    def _check(call: str, code: int) -> None:
        if code:
            raise RuntimeError(f"{call} returned {code}")

    def connect(self, facts: dict[str, Any], by_port: int) -> None:
        """It has no call for that: the first transfer connects."""
        self._peer = f"{facts['host']}:{by_port or facts['port']}"
        self._remote_address = facts["address"]
        self._seed = facts.get("seed", 0)

    def move(self, target: I64, source: I64, block_bytes: int, *, write: bool) -> None:
        name = f"batch_transfer_sync_{'write' if write else 'read'}"
        ours = (self.address + target).tolist()
        theirs = (self._remote_address + source).tolist()
        sizes = [block_bytes] * len(ours)
        self._check(name, getattr(self.engine, name)(self._peer, ours, theirs, sizes))

    def read_unregistered(self, nbytes: int) -> bool:
        scrap = np.zeros(nbytes, np.uint8)
        address = scrap.ctypes.data
        code = self.engine.transfer_sync_read(self._peer, address, self._remote_address, nbytes)
        self._check("transfer_sync_read", code)
        return bool(np.array_equal(scrap, pattern(self._seed, nbytes)))

    def deregister(self) -> None:
        self._check("unregister_memory", self.engine.unregister_memory(self.address))

    def versions(self) -> dict[str, str]:
        return {"Mooncake": importlib.metadata.version("mooncake-transfer-engine-non-cuda")}


if __name__ == "__main__":
    serve(Mooncake)
