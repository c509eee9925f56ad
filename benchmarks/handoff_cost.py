"""``python -m benchmarks.handoff_cost``: what a hand-off costs beside the read it is made of.

Two processes on one host, over ``shm``. In turns, so that both see the same noise: a bare read of
some blocks, and offer, claim, read and confirm of as many. Then what comparing bytes costs: reads
with ``checksum`` off, sampled and full. Medians, and for the times of hand-offs the median of the
quietest RUN rounds in a row, since other programs take their share of a machine. Written to
``bench-results/handoff.json``.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.base import KIB, MIB
from benchmarks.process import ROOT
from kvferry.config import EngineConfig
from kvferry.engine import Engine
from kvferry.handoff import HandOff
from kvferry.layout import KVGeometry, transfer_spans
from kvferry.protocol.messages import Confirm, Granted
from kvferry.regions import Spans
from kvferry.testing import Child
from kvferry.transports.base import RemoteRegion

BLOCK_TOKENS = 16
RUN = 25
TRANSPORTS = ("shm", "staged", "tcp")

PREFILL = """
import time
import numpy as np
from kvferry.config import EngineConfig
from kvferry.engine import Engine
from kvferry.handoff import HandOff
from kvferry.layout import KVGeometry

config = EngineConfig(name="prefill", directory={directory!r}, transports={transports!r})
engine = Engine(config)
geometry = KVGeometry(*{geometry!r})
pool = engine.allocate(max(geometry.pool_nbytes, {bulk_bytes}))
pool.array[:] = np.random.default_rng(1).integers(0, 256, pool.array.size, np.uint8)
ferry = HandOff(engine, pool, geometry)
result = {{"addresses": engine.addresses, "ref": pool.ref.hex()}}
"""
OFFER = """
result = []
for _ in range({count}):
    begin = time.perf_counter()
    offer = ferry.offer({blocks!r}, {tokens}, on_end=lambda end: None)
    result.append((offer.params, time.perf_counter() - begin))
"""


def geometry(blocks: int) -> KVGeometry:
    """A small model's pool: 8 layers, 4 KV heads of 64 in two bytes; 8 KiB spans for 16 tokens."""
    return KVGeometry("cost", 8, 4, 64, "bfloat16", BLOCK_TOKENS, blocks)


class Decode:
    """The side that reads and claims, in this process."""

    def __init__(self, child: Child, directory: str, blocks: int, bulk_bytes: int) -> None:
        shape = geometry(blocks)
        arguments = ("cost", 8, 4, 64, "bfloat16", BLOCK_TOKENS, blocks)
        facts = child.run(
            PREFILL.format(
                directory=directory,
                transports=TRANSPORTS,
                geometry=arguments,
                bulk_bytes=bulk_bytes,
            )
        )
        self.child = child
        self.engine = Engine(
            EngineConfig(name="decode", directory=directory, transports=TRANSPORTS)
        )
        self.pool = self.engine.allocate(max(shape.pool_nbytes, bulk_bytes))
        self.ferry = HandOff(self.engine, self.pool, shape)
        self.peer = self.engine.connect(facts["addresses"][0])
        self.remote: RemoteRegion = self.peer.region(bytes.fromhex(facts["ref"]))
        self.marks: dict[type, float] = {}

        def marked(peer: Any, message: Any) -> None:
            self.marks[type(message)] = time.perf_counter()
            take(peer, message)

        def sent(message: Any, fds: tuple[int, ...] = ()) -> None:
            self.marks[type(message)] = time.perf_counter()
            send(message, fds)

        take, self.engine.on_message = self.engine.on_message, marked  # type: ignore[method-assign]
        send, self.peer.send = self.peer.send, sent  # type: ignore[method-assign]

    def offers(self, count: int, blocks: list[int]) -> list[tuple[dict[str, Any], float]]:
        """Parameters of new offers, and the seconds that prefill spent in ``offer``."""
        tokens = len(blocks) * BLOCK_TOKENS
        made = self.child.run(OFFER.format(count=count, blocks=blocks, tokens=tokens))
        return [(params, seconds) for params, seconds in made]

    def claim(self, params: dict[str, Any], blocks: list[int]) -> dict[str, float]:
        """One hand-off; when what had happened, in seconds since the call."""
        ended = threading.Event()
        at = [0.0]

        def on_end(end: Any) -> None:
            at[0] = time.perf_counter()
            assert end.error is None, end.error
            at.append(end.move_s)
            ended.set()

        begin = time.perf_counter()
        self.ferry.claim(params, blocks, len(blocks) * BLOCK_TOKENS, on_end=on_end)
        assert ended.wait(10.0)
        granted, asked = self.marks[Granted] - begin, self.marks[Confirm] - begin
        end = at[0] - begin
        return {"end": end, "granted": granted, "confirm": end - asked, "move": at[1]}


def hand_off_rows(decode: Decode, sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """One row per number of blocks, in microseconds."""
    rows = []
    shape = geometry(decode.ferry.geometry.blocks)
    for count in sizes:
        blocks = list(range(0, 2 * count, 2))
        spans = block_spans(shape, blocks)
        params = decode.offers(rounds + 5, blocks)
        bare, whole, asks, confirms, offers = [], [], [], [], []
        for number, (offered, offer_s) in enumerate(params):
            begin = time.perf_counter()
            decode.engine.read(decode.pool, spans, decode.remote, spans).wait()
            read_s = time.perf_counter() - begin
            times = decode.claim(offered, blocks)
            if number < 5:
                continue  # The first ones warm up caches and connections.
            bare.append(read_s)
            whole.append(offer_s + times["end"])
            asks.append(times["granted"])
            confirms.append(times["confirm"])
            offers.append(offer_s)
        us = {
            "bare read": bare,
            "hand-off": whole,
            "offer": offers,
            "claim to granted": asks,
            "confirm": confirms,
        }
        row: dict[str, Any] = {"blocks": count, "bytes": spans.nbytes, "spans": len(spans)}
        row |= {name: statistics.median(values) * 1e6 for name, values in us.items()}
        row |= {f"{name}, quietest": quietest(values) * 1e6 for name, values in us.items()}
        rows.append(row)
    return rows


def quietest(values: list[float]) -> float:
    """The lowest median of RUN values in a row."""
    runs = [values[at : at + RUN] for at in range(0, len(values) - RUN + 1, RUN)]
    return min(statistics.median(run) for run in runs)


def block_spans(shape: KVGeometry, blocks: list[int]) -> Spans:
    """The spans that a hand-off of whole blocks moves."""
    return transfer_spans(shape, blocks, shape, blocks, len(blocks) * BLOCK_TOKENS)[0]


def checksum_rows(decode: Decode, total_bytes: int, rounds: int) -> list[dict[str, Any]]:
    """GB/s of a large scattered read by each path, without and with a comparison."""
    rows = []
    order = np.random.default_rng(2).permutation(total_bytes // (64 * KIB))
    spans = Spans.blocks(order, 64 * KIB)
    for path in TRANSPORTS:
        row: dict[str, Any] = {"path": path}
        seconds: dict[str, list[float]] = {"off": [], "sampled": [], "full": []}
        for others in TRANSPORTS:
            if others != path:
                decode.engine.moves._paths.demote(
                    decode.remote.peer, others, "pull", "another is measured"
                )
        for _ in range(rounds + 1):
            for level, times in seconds.items():
                begin = time.perf_counter()
                transfer = decode.engine.read(
                    decode.pool, spans, decode.remote, spans, checksum=level
                )
                transfer.wait()
                times.append(time.perf_counter() - begin)
                assert transfer.path == f"{path}/pull", transfer.path
        medians = {level: statistics.median(times[1:]) for level, times in seconds.items()}
        row["GB/s"] = total_bytes / medians["off"] / 1e9
        row |= {level: medians["off"] / medians[level] for level in ("sampled", "full")}
        rows.append(row)
        decode.engine.moves._paths.forget(decode.remote.peer)
    return rows


def show(console: Console, title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)


@click.command()
@click.option("--quick", is_flag=True, help="A look, not a result.")
@click.option(
    "--output", type=click.Path(path_type=Path), default=ROOT / "bench-results" / "handoff.json"
)
def main(quick: bool, output: Path) -> None:
    """Measure what offer, claim, confirm and checksums add to a read on one host."""
    console = Console()
    rounds, total_bytes = (50, 64 * MIB) if quick else (500, 256 * MIB)
    sizes = [1, 4, 16, 64]
    with tempfile.TemporaryDirectory(prefix="kvferry-") as directory, Child() as child:
        decode = Decode(child, directory, 2 * max(sizes), total_bytes)
        try:
            hand_offs = hand_off_rows(decode, sizes, rounds)
            checksums = checksum_rows(decode, total_bytes, max(rounds // 20, 5))
        finally:
            decode.engine.close()
            child.run("engine.close()")
    columns = ["blocks", "bytes", "spans", "bare read", "hand-off", "offer", "claim to granted"]
    shown = [
        {
            key: value if key in columns[:3] else f"{value:.0f} ({row[f'{key}, quietest']:.0f})"
            for key, value in row.items()
            if key in [*columns, "confirm"]
        }
        for row in hand_offs
    ]
    show(console, "A hand-off on one host, microseconds: median (quietest)", shown)
    show(console, "Comparing bytes: share of the rate without it", checksums)
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps({"hand_off": hand_offs, "checksum": checksums}, indent=1))
    console.print(f"Written: {output}", highlight=False)


if __name__ == "__main__":
    main()
