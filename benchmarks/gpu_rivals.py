"""Other engines on device memory, each in two processes of its own, for ``benchmarks.gpu``.

A rival that is not installed, or that fails, says why in its row. Its time is taken in the reading
process, around the very call. Install for CUDA 13: mooncake-transfer-engine-cuda13, nixl-cu13.
"""

from __future__ import annotations

import os
from typing import Any

from kvferry.regions import Spans
from kvferry.testing import Child

POOL_BYTES = 1 << 30
RIVAL_SPANS_MAX = 1 << 14
"""Blocks per call. One of them refuses more in one batch."""

COMMON = """
import ctypes, importlib.metadata, time
import numpy as np
from kvferry.memory.cuda import CudaDevice
from kvferry.memory.cuda_driver import driver
cuda = driver()
device = CudaDevice(cuda, cuda.devices()[0])
device.use()

def make(nbytes, seed):
    global address, host, array
    address, host = cuda.alloc(nbytes), cuda.host_alloc(nbytes)
    array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(host))
    array[:] = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    move(address, host)

def move(target, source):
    with device.queue() as queue:
        where = [np.array([at], np.uint64) for at in (target, source)]
        queue.copy_spans(*where, np.array([array.size])).wait(lambda: None)

def check(here, there, block, seed):
    move(host, address)
    values = np.random.default_rng(seed).integers(0, 256, array.size, dtype=np.uint8)
    a, b = array.reshape(-1, block), values.reshape(-1, block)
    return bool((a[np.array(here) // block] == b[np.array(there) // block]).all())
"""

MOONCAKE = """
from mooncake.engine import TransferEngine

def open_engine(protocol):
    global engine
    engine = TransferEngine()
    code = engine.initialize("127.0.0.1", "P2PHANDSHAKE", protocol, "")
    code = code or engine.register_memory(address, array.size)
    if code:
        raise RuntimeError(f"start: {code}")
    return [engine.get_rpc_port(), address]

def prepare(where, here, there, block):
    global call
    port, remote = where
    local = [address + at for at in here]
    far = [remote + at for at in there]
    sizes = [block] * len(local)
    def call():
        code = engine.batch_transfer_sync_read(f"127.0.0.1:{port}", local, far, sizes)
        if code:
            raise RuntimeError(f"batch_transfer_sync_read returned {code}")
"""

NIXL = """
from nixl_cu13._api import nixl_agent, nixl_agent_config

def open_engine(role):
    global agent
    agent = nixl_agent(role, nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(address, array.size, 0, "")], "VRAM")
    return [agent.get_agent_metadata().hex(), address]

def prepare(where, here, there, block):
    global call, known
    if "known" not in globals():
        known = agent.add_remote_agent(bytes.fromhex(where[0]))
        known = known.decode() if isinstance(known, bytes) else known
    local = agent.get_xfer_descs([(address + at, block, 0) for at in here], "VRAM")
    far = agent.get_xfer_descs([(where[1] + at, block, 0) for at in there], "VRAM")
    handle = agent.initialize_xfer("READ", local, far, known)
    def call():
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(state)
"""

TIMED = """
begin = time.perf_counter()
call()
result = time.perf_counter() - begin
"""


class GpuRival:
    """One engine with one setting. ``missing`` says why it takes no part, or ""."""

    def __init__(self, name: str, code: str, argument: str, environment: dict[str, str]) -> None:
        self.name = name
        self._code, self._argument, self._environment = code, argument, environment
        self._children: list[Child] = []
        self.missing = ""

    def start(self) -> None:
        saved = {key: os.environ.get(key) for key in self._environment}
        os.environ.update(self._environment)
        try:
            for role, seed in (("source", 5), ("target", 6)):
                child = Child()
                self._children.append(child)
                argument = self._argument or role
                statements = f"make({POOL_BYTES}, {seed})\nresult = open_engine({argument!r})"
                where = child.run(COMMON + self._code + statements, timeout_s=90.0)
                if role == "source":
                    self._where = where
        except (AssertionError, TimeoutError) as error:
            self.missing = str(error).strip().splitlines()[-1]
            self.stop()
        finally:
            for key, value in saved.items():
                os.environ.pop(key) if value is None else os.environ.update({key: value})

    def prepare(self, here: Spans, there: Spans) -> tuple[Any, int] | None:
        """(a call that returns seconds, bytes), with bytes verified; None if it takes no part."""
        if self.missing:
            return None
        block = int(here.lengths[0])
        lists = [side.offsets.tolist() for side in (here, there)]
        target = self._children[1]
        try:
            target.run(f"prepare({self._where!r}, {lists[0]!r}, {lists[1]!r}, {block})")
            target.run(TIMED, timeout_s=60.0)
            if not target.run(f"result = check({lists[0]!r}, {lists[1]!r}, {block}, 5)", 60.0):
                self.missing = "wrong bytes"
                return None
        except (AssertionError, TimeoutError) as error:
            self.missing = str(error).strip().splitlines()[-1]
            return None
        return (lambda: target.run(TIMED, timeout_s=60.0)), block * len(lists[0])

    def stop(self) -> None:
        for child in self._children:
            child.close()
        self._children = []


def rivals() -> list[GpuRival]:
    quiet = {"MC_LOG_LEVEL": "ERROR"}
    return [
        GpuRival(
            "Mooncake nvlink_intra", MOONCAKE, "nvlink_intra", {"MC_INTRANODE_NVLINK": "1", **quiet}
        ),
        GpuRival("Mooncake tcp", MOONCAKE, "tcp", {"MC_FORCE_TCP": "1", **quiet}),
        GpuRival("NIXL", NIXL, "", {}),
    ]
