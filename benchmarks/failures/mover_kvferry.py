"""kvferry, with its default settings but for the transport, which is the row's."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import numpy as np

import kvferry
from benchmarks.base import I64
from benchmarks.failures.mover import GUARD_BYTES, POISON, Mover, serve
from kvferry.config import EngineConfig
from kvferry.engine import Engine
from kvferry.regions import Spans
from kvferry.sockets import Address, is_loopback


class Ferry(Mover):
    """``KVFERRY_TRANSPORTS`` in the environment says which transport."""

    def open(self, nbytes: int, host: str, port: int) -> dict[str, Any]:
        config = EngineConfig.from_environment(listen=f"{host}:{port}")
        self.engine = Engine(replace(config, insecure=not is_loopback(host)))
        if config.transports == ("shm",):
            # What can be mapped is a whole file, so there is nothing of ours around the pool.
            self.registration = self.engine.allocate(nbytes, access="read-write")
            assert self.registration.array is not None
            self.pool = self.registration.array
            self.memory = np.full(2 * GUARD_BYTES, POISON, np.uint8)
        else:
            self.allocate(nbytes)
            self.registration = self.engine.register(self.pool, access="read-write")
        reference = base64.b64encode(self.registration.ref).decode()
        addresses = self.engine.addresses
        tcp_port = Address.parse(addresses[-1]).port
        return {"addresses": addresses, "port": tcp_port, "region": reference}

    def connect(self, facts: dict[str, Any], by_port: int) -> None:
        address = f"tcp://127.0.0.1:{by_port}" if by_port else facts["addresses"][0]
        if facts.get("is_far"):
            address = facts["addresses"][-1]
        self._peer = self.engine.connect(address)
        self._remote = self._peer.region(base64.b64decode(facts["region"]))

    def move(self, target: I64, source: I64, block_bytes: int, *, write: bool) -> None:
        call = self.engine.write if write else self.engine.read
        ours, theirs = Spans.of(target, block_bytes), Spans.of(source, block_bytes)
        call(self.registration, ours, self._remote, theirs).wait()

    def read_unregistered(self, nbytes: int) -> bool:
        """Memory is named by its registration only; one that was closed is the nearest to none."""
        gone = self.engine.register(np.zeros(nbytes, np.uint8))
        gone.close()
        whole = Spans.whole(nbytes)
        self.engine.read(gone, whole, self._remote, whole).wait()
        return False

    def deregister(self) -> None:
        is_allocated = self.registration.array is not None
        self.registration.close()
        if is_allocated:
            # What was allocated is freed with its registration.
            self.pool = self.memory

    def versions(self) -> dict[str, str]:
        return {"kvferry": kvferry.__version__}


if __name__ == "__main__":
    serve(Ferry)
