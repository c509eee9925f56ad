"""NIXL over UCX, with its default settings; the row says what UCX may use."""

from __future__ import annotations

import base64
import importlib.metadata
import time
from typing import Any

import numpy as np

from benchmarks.base import I64
from benchmarks.failures.mover import POLL_S, Mover, pattern, serve


class Nixl(Mover):
    _peer = ""

    def open(self, nbytes: int, host: str, port: int) -> dict[str, Any]:
        from nixl_cu12._api import (  # type: ignore[import-not-found]
            nixl_agent,
            nixl_agent_config,
            nixl_thread_sync_t,
        )

        # Strict, because one scenario calls from ten threads; it costs the others nothing.
        strict = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        name = f"agent-{id(self)}"
        self.agent = nixl_agent(name, nixl_agent_config(sync_mode=strict))
        self.allocate(nbytes)
        self.address = self.pool.ctypes.data
        self._registered = self.agent.register_memory([(self.address, nbytes, 0, "")], "DRAM")
        metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "address": self.address}

    def connect(self, facts: dict[str, Any], by_port: int) -> None:
        if self._peer:
            self.agent.remove_remote_agent(self._peer)
        peer = self.agent.add_remote_agent(base64.b64decode(facts["metadata"]))
        self._peer = peer.decode() if isinstance(peer, bytes) else peer
        self._remote_address = facts["address"]
        self._seed = facts.get("seed", 0)

    def move(self, target: I64, source: I64, block_bytes: int, *, write: bool) -> None:
        ours = (self.address + target).tolist()
        theirs = (self._remote_address + source).tolist()
        self._transfer(ours, theirs, block_bytes, "WRITE" if write else "READ")

    def _transfer(self, ours: list[int], theirs: list[int], nbytes: int, kind: str) -> None:
        local, remote = (
            self.agent.get_xfer_descs([(address, nbytes, 0) for address in addresses], "DRAM")
            for addresses in (ours, theirs)
        )
        handle = self.agent.initialize_xfer(kind, local, remote, self._peer)
        try:
            state = self.agent.transfer(handle)
            while state == "PROC":
                # Its own thread makes the progress; a caller need not spin.
                time.sleep(POLL_S)
                state = self.agent.check_xfer_state(handle)
            if state != "DONE":
                raise RuntimeError(f"the transfer ended as {state}")
        finally:
            self.agent.release_xfer_handle(handle)

    def read_unregistered(self, nbytes: int) -> bool:
        scrap = np.zeros(nbytes, np.uint8)
        self._transfer([scrap.ctypes.data], [self._remote_address], nbytes, "READ")
        return bool(np.array_equal(scrap, pattern(self._seed, nbytes)))

    def deregister(self) -> None:
        self.agent.deregister_memory(self._registered)

    def versions(self) -> dict[str, str]:
        return {"NIXL": importlib.metadata.version("nixl-cu12")}


if __name__ == "__main__":
    serve(Nixl)
