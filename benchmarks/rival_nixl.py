"""NIXL over UCX: the target reads the source's host memory through a prepared transfer."""

from __future__ import annotations

import base64
import importlib.metadata
from typing import Any

from benchmarks.base import Case
from benchmarks.process import ProcessRival
from benchmarks.worker import Worker, serve


class Nixl(Worker):
    """An agent with the pool registered."""

    def connect(self, name: str) -> None:
        from nixl_cu12._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found]

        # The source needs the progress thread to answer at all. At the target it only takes time
        # from move's own polling: without it twice as fast on two processors.
        progress = name == "source"
        config = nixl_agent_config(backends=["UCX"], enable_prog_thread=progress)
        self.agent = nixl_agent(name, config)
        self.address = self.pool.ctypes.data
        self.agent.register_memory([(self.address, self.pool.nbytes, 0, "")], "DRAM")


class Source(Nixl):
    def open(self, remote: dict[str, Any]) -> dict[str, Any]:
        self.connect("source")
        metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "address": self.address}


class Target(Nixl):
    _handle: Any = None

    def open(self, remote: dict[str, Any]) -> dict[str, Any]:
        self.connect("target")
        peer = self.agent.add_remote_agent(base64.b64decode(remote["metadata"]))
        self._peer = peer.decode() if isinstance(peer, bytes) else peer
        self._remote_address = remote["address"]
        return {"nixl-cu12": importlib.metadata.version("nixl-cu12")}

    def prepare(self, case: Case) -> None:
        if self._handle is not None:
            self.agent.release_xfer_handle(self._handle)
        source, target = case.offsets()
        self._handle = self.agent.initialize_xfer(
            "READ",
            self._descriptors(self.address + target, case.block_bytes),
            self._descriptors(self._remote_address + source, case.block_bytes),
            self._peer,
        )

    def move(self) -> None:
        state = self.agent.transfer(self._handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(self._handle)
        if state != "DONE":
            raise RuntimeError(f"the transfer ended as {state}")

    def _descriptors(self, addresses: Any, block_bytes: int) -> Any:
        rows = [(address, block_bytes, 0) for address in addresses.tolist()]
        return self.agent.get_xfer_descs(rows, "DRAM")


def rivals() -> list[ProcessRival]:
    return [
        ProcessRival("nixl", "benchmarks.rival_nixl", note="UCX as it chooses, read"),
        ProcessRival(
            "nixl tcp",
            "benchmarks.rival_nixl",
            env={"UCX_TLS": "tcp"},
            note="UCX_TLS=tcp: what is left between hosts without RDMA; read",
        ),
    ]


if __name__ == "__main__":
    serve(Source, Target)
