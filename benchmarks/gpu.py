"""``python -m benchmarks.gpu``: device memory between two processes, beside the device's limits.

The far process owns a pool on the device, the near one reads it: scattered blocks in random order
on both sides, and one contiguous piece. All rows of a block size take turns within each round; a
share compares medians of one round with the limit of the same round. Bytes are compared once per
cell. Two processes on one device stand for two devices where there is only one.
"""

from __future__ import annotations

import ctypes
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.gpu_rivals import POOL_BYTES, RIVAL_SPANS_MAX, GpuRival, rivals
from kvferry import Engine, EngineConfig
from kvferry.memory.cuda import CudaDevice, ResidentLists
from kvferry.memory.cuda_driver import driver
from kvferry.regions import Spans
from kvferry.testing import Child

KIB, MIB = 1 << 10, 1 << 20
BLOCK_BYTES = (KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB)
SPANS_MAX = 1 << 20
CHECK_BYTES = 512 * MIB
SLOW_BYTES = 256 * MIB
"""What the streamed paths move per transfer: enough for a rate, and it is over soon."""
ROUNDS = 9
DEPTH = 8
"""Transfers, or copies, in flight: rates are those of a process with more than one request."""
PATHS = ("cuda_ipc", "staged", "tcp")
FAR = """
import ctypes, numpy as np
from kvferry import Engine, EngineConfig
def start(directory, nbytes, device):
    global engine, owned
    engine = Engine(EngineConfig(name="far", directory=directory, listen="127.0.0.1:0"))
    owned = engine.allocate(nbytes, device=device)
    if owned.array is not None:
        owned.array[:] = np.random.default_rng(5).integers(0, 256, nbytes, dtype=np.uint8)
        return engine.addresses, owned.ref.hex()
    cuda = engine.devices.named("cuda")
    host = cuda.pinned(nbytes)
    array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(host))
    array[:] = np.random.default_rng(5).integers(0, 256, nbytes, dtype=np.uint8)
    with cuda.queue() as queue:
        where = [np.array([at], np.uint64) for at in (owned.region.address, host)]
        queue.copy_spans(*where, np.array([nbytes])).wait(lambda: None)
    return engine.addresses, owned.ref.hex()
"""


def wait(flight: Any) -> None:
    while not flight.is_done():
        pass


def deep(start: Callable[[], Any]) -> None:
    for flight in [start() for _ in range(DEPTH)]:
        wait(flight)


class Near:
    """The reading process: one engine per path, so that the planner has no choice."""

    def __init__(
        self,
        directory: str,
        nbytes: int,
        place: str = "cuda",
        paths: tuple[str, ...] = PATHS,
        **how: Any,
    ) -> None:
        self.nbytes = nbytes
        self.values = np.random.default_rng(5).integers(0, 256, nbytes, dtype=np.uint8)
        self.far = Child(FAR)
        device = "cuda" if place == "cuda" else ""
        call = f"result = start({directory!r}, {nbytes}, {device!r})"
        addresses, ref = self.far.run(call, timeout_s=120.0)
        self.engines, self.owned, self.remote = {}, {}, {}
        for path in paths:
            if place == "host" and path == "cuda_ipc":
                continue
            config = EngineConfig(name=path, directory=directory, transports=(path,), **how)
            engine = self.engines[path] = Engine(config)
            peer = engine.connect(addresses[0])
            self.owned[path] = engine.allocate(nbytes, device=device)
            self.remote[path] = peer.region(bytes.fromhex(ref))

    def read(self, path: str, here: Spans, there: Spans, depth: int = DEPTH) -> Callable[[], None]:
        """Spans that the engine sees for the first time, each time."""
        engine, owned, remote = self.engines[path], self.owned[path], self.remote[path]

        def run() -> None:
            for transfer in [
                engine.read(owned, here, remote, there, deadline_s=30.0) for _ in range(depth)
            ]:
                transfer.wait(30.0)

        return run

    def prepared(self, path: str, here: Spans, there: Spans) -> Callable[[], None]:
        """Spans that were prepared once, as peers have their descriptors; DEPTH at a time."""
        made = self.engines[path].prepare(self.owned[path], here, self.remote[path], there)

        def run() -> None:
            for transfer in [made.read(deadline_s=30.0) for _ in range(DEPTH)]:
                transfer.wait(30.0)

        return run

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
        self.far.close()


class Limits:
    """What one process can do on the device by itself."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        self.device, self.nbytes = device, nbytes
        device.use()
        self.source, self.target = (device.driver.alloc(nbytes) for _ in range(2))
        self.host = device.driver.host_alloc(nbytes)
        self.queue = device.take()
        self.stream = self.queue._stream

    def device_copy(self, nbytes: int) -> Callable[[], None]:
        return self._one(self.target, self.source, nbytes)

    def pinned_copy(self, nbytes: int) -> Callable[[], None]:
        return self._one(self.host, self.source, nbytes)

    def _one(self, target: int, source: int, nbytes: int) -> Callable[[], None]:
        where = [np.array([at], np.uint64) for at in (target, source)]
        size = np.array([nbytes])
        return lambda: deep(lambda: self.queue.copy_spans(*where, size))

    def loop(self, here: Spans, there: Spans) -> Callable[[], None]:
        """A copy call per block, as most connectors do it."""
        places = list(zip(here.offsets.tolist(), there.offsets.tolist(), strict=True))
        size = int(here.lengths[0])
        copy = self.device.driver.copy

        def run() -> None:
            for a, b in places:
                copy(self.target + a, self.source + b, size, self.stream)
            wait(self.queue._flight())

        return run

    def kernel(self, here: Spans, there: Spans) -> Callable[[], None]:
        """kvferry's kernel within this process: what the path adds shows against it."""
        lists = here.offsets.view("u8"), there.offsets.view("u8"), here.lengths
        resident = ResidentLists(self.device, *lists, 0)
        return lambda: deep(
            lambda: self.queue.copy_resident(resident, self.target, self.source, to_first=True)
        )

    def close(self) -> None:
        self.device.give(self.queue)
        self.device.driver.free(self.source)
        self.device.driver.free(self.target)
        self.device.driver.host_free(self.host)


def timed(run: Callable[[], Any]) -> float:
    """Seconds that it took, or that it says it took."""
    begin = time.perf_counter()
    own = run()
    return own if isinstance(own, float) else time.perf_counter() - begin


def check(near: Near, device: CudaDevice, path: str, here: Spans, there: Spans) -> bool:
    """Whether the pool of a path holds the far side's bytes in the right places.

    Of very many blocks, a random choice of CHECK_BYTES is compared.
    """
    owned, nbytes = near.owned[path], near.nbytes
    host = device.pinned(nbytes)
    got = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(host))
    if owned.array is not None:
        got = owned.array
    else:
        with device.queue() as queue:
            where = [np.array([at], np.uint64) for at in (host, owned.region.address)]
            wait(queue.copy_spans(*where, np.array([nbytes])))
    block = int(here.lengths[0])
    if len(here) == 1:
        same = np.array_equal(got[:block], near.values[:block])
    else:
        some = np.random.default_rng(0).permutation(len(here))[: CHECK_BYTES // block]
        mine = got[: nbytes // block * block].reshape(-1, block)
        theirs = near.values[: nbytes // block * block].reshape(-1, block)
        same = np.array_equal(
            mine[here.offsets[some] // block], theirs[there.offsets[some] // block]
        )
    device.give_pinned(host)
    return bool(same)


def measure(
    near: Near, limits: Limits, block: int, rounds: int, others: list[GpuRival]
) -> dict[str, Any]:
    """One block size: every row in GB/s, and the shares of the limits of the same round."""
    nbytes = near.nbytes
    count = 1 if block == nbytes else min(nbytes // block, SPANS_MAX)
    rng = np.random.default_rng(block)
    if count == 1:
        here = there = Spans.whole(nbytes)
    else:
        here, there = (
            Spans.of(rng.permutation(nbytes // block)[:count] * block, block) for _ in "12"
        )
    total = here.nbytes
    lists = dict.fromkeys(near.engines, (here, there))
    few = max(1, min(count, SLOW_BYTES // block))
    for path in ("staged", "tcp"):
        lists[path] = tuple(
            Spans.of(side.offsets[:few], min(block, SLOW_BYTES)) for side in (here, there)
        )
    rows = {f"kvferry {path}": near.prepared(path, *lists[path]) for path in near.engines}
    if "cuda_ipc" in near.engines:
        rows["kvferry cuda_ipc, new lists"] = near.read("cuda_ipc", here, there)
    rows["kernel, one process"] = limits.kernel(here, there)
    if count <= 1 << 15:
        rows["copy per block, one process"] = limits.loop(here, there)
    rows["device copy"] = limits.device_copy(total)
    rows["pinned copy"] = limits.pinned_copy(min(total, 256 * MIB))
    sizes = dict.fromkeys(rows, total * DEPTH) | {"pinned copy": min(total, 256 * MIB) * DEPTH}
    sizes["copy per block, one process"] = total
    for path in ("staged", "tcp"):
        sizes[f"kvferry {path}"] = lists[path][0].nbytes * DEPTH
    if count > 1 and block >= 16 * KIB:
        fewer = [rng.permutation(POOL_BYTES // block)[:RIVAL_SPANS_MAX] * block for _ in "12"]
        for rival in others:
            found = rival.prepare(*(Spans.of(offsets, block) for offsets in fewer))
            if found is not None:
                rows[rival.name], sizes[rival.name] = found
    for run in rows.values():
        run()
    verified = {path: check(near, limits.device, path, *lists[path]) for path in near.engines}
    seen: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name, run in rows.items():
            seen[name].append(sizes[name] / timed(run) / 1e9)
    limit = seen["device copy"]
    return {
        "block": block,
        "spans": count,
        "nbytes": total,
        "verified": verified,
        "gb_per_s": {name: statistics.median(values) for name, values in seen.items()},
        "share_of_device_copy": {
            name: statistics.median(a / b for a, b in zip(values, limit, strict=True))
            for name, values in seen.items()
        },
        "share_of_pinned_copy": {
            name: statistics.median(a / b for a, b in zip(values, seen["pinned copy"], strict=True))
            for name, values in seen.items()
        },
    }


def costs(near: Near) -> dict[str, float]:
    """Microseconds: submitting 16,384 spans, and a hand-off's worth of blocks to its end."""
    rng = np.random.default_rng(1)
    out = {}
    engine, owned, remote = (part["cuda_ipc"] for part in (near.engines, near.owned, near.remote))
    blocks = 64 * MIB // 4096
    here, there = (Spans.of(rng.permutation(blocks) * 4096, 4096) for _ in "12")
    submits = []
    for _ in range(30):
        begin = time.perf_counter()
        transfer = engine.read(owned, here, remote, there)
        submits.append(time.perf_counter() - begin)
        transfer.wait(10.0)
    out["submit 16,384 spans"] = statistics.median(submits) * 1e6
    blocks = 117 * MIB // (16 * KIB)
    here, there = (Spans.of(rng.permutation(blocks) * 16 * KIB, 16 * KIB) for _ in "12")
    run = near.read("cuda_ipc", here, there, 1)
    out["117 MiB in 16 KiB blocks"] = statistics.median(timed(run) for _ in range(30)) * 1e6
    one = Spans.of([0], 4096)
    run = near.read("cuda_ipc", one, one, 1)
    out["4 KiB"] = statistics.median(timed(run) for _ in range(50)) * 1e6
    return out


def interference(near: Near) -> dict[str, float]:
    """How many times slower a loop of bf16 products is while transfers run beside it, by the number
    of thread blocks; needs torch. The transfer's own rate stands beside it."""
    try:
        import torch
    except ImportError:
        return {}
    import threading

    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    thin = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    rng = np.random.default_rng(2)
    blocks = near.nbytes // (16 * KIB)
    here, there = (Spans.of(rng.permutation(blocks) * 16 * KIB, 16 * KIB) for _ in "12")
    run = near.read("cuda_ipc", here, there, 1)
    device = near.engines["cuda_ipc"].devices.named("cuda")
    out = {}

    def loop(matrix: Any, times: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "12")
        begin.record()
        for _ in range(times):
            matrix @ x
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    full = device.blocks
    for kind, matrix, times in (("compute", x, 200), ("decode-like", thin, 2000)):
        loop(matrix, times)
        for count in (8, 32, 132, full):
            device.blocks = count
            alone = statistics.median(loop(matrix, times) for _ in range(3))
            stop, moved = threading.Event(), []

            def keep_moving(stop: threading.Event = stop, moved: list[float] = moved) -> None:
                while not stop.is_set():
                    moved.append(near.nbytes / timed(run) / 1e9)

            thread = threading.Thread(target=keep_moving)
            thread.start()
            beside = statistics.median(loop(matrix, times) for _ in range(3))
            stop.set()
            thread.join()
            out[f"{kind}, {count} blocks: slower by"] = beside / alone
            out[f"{kind}, {count} blocks: GB/s beside it"] = statistics.median(moved)
    device.blocks = full
    return out


def show(console: Console, cells: list[dict[str, Any]], title: str) -> None:
    names = list(dict.fromkeys(name for cell in cells for name in cell["gb_per_s"]))
    table = Table(title=f"{title}: GB/s (share of the device copy)")
    table.add_column("")
    for cell in cells:
        block = cell["block"]
        text = "contiguous" if cell["spans"] == 1 else f"{block // KIB} KiB"
        table.add_column(text, justify="right")
    for name in names:
        row = [name]
        for cell in cells:
            if name not in cell["gb_per_s"]:
                row.append("")
                continue
            wrong = cell["verified"].get(name.removeprefix("kvferry "), True) is False
            mark = " WRONG BYTES" if wrong else ""
            share = cell["share_of_device_copy"][name]
            row.append(f"{cell['gb_per_s'][name]:.4g} ({share:.2f}){mark}")
        table.add_row(*row)
    console.print(table)


@click.command()
@click.option("--total-mib", default=4096, help="Size of each pool.")
@click.option("--rounds", default=ROUNDS)
@click.option("--output", type=click.Path(path_type=Path), default=Path("bench-results/gpu.json"))
@click.option("--host/--no-host", default=True, help="Also host memory by tcp and staged.")
def main(total_mib: int, rounds: int, output: Path, host: bool) -> None:
    """Measure transfers of device memory between two processes."""
    console = Console(width=160)
    nbytes = total_mib * MIB
    cuda = driver()
    facts = cuda.devices()[0]
    device = CudaDevice(cuda, facts)
    result: dict[str, Any] = {
        "device": facts.name,
        "driver": cuda.version(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "rounds": rounds,
    }
    with tempfile.TemporaryDirectory() as directory:
        others = rivals()
        for rival in others:
            rival.start()
        near, limits = Near(directory, nbytes), Limits(device, nbytes)
        result["cells"] = [
            measure(near, limits, block, rounds, others) for block in (*BLOCK_BYTES, nbytes)
        ]
        for rival in others:
            rival.stop()
            if rival.missing:
                console.print(f"  {rival.name}: {rival.missing}", highlight=False, markup=False)
        result["missing"] = {rival.name: rival.missing for rival in others if rival.missing}
        show(console, result["cells"], f"{facts.name}, device memory")
        result["costs_us"] = costs(near)
        result["interference"] = interference(near)
        for name in ("costs_us", "interference"):
            for key, value in result[name].items():
                console.print(f"  {name}: {key}: {value:.4g}", highlight=False)
        near.close()
        if host:
            near = Near(directory, 256 * MIB, "host")
            result["host_cells"] = [
                measure(near, limits, block, rounds, []) for block in (16 * KIB, 64 * KIB)
            ]
            show(console, result["host_cells"], "host memory on the same machine")
            near.close()
        limits.close()
    device.close()
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1))
    console.print(f"Written: {output}", highlight=False)


if __name__ == "__main__":
    main()
