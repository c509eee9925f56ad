"""The table for people and the JSON for programs."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.base import MIB, Case, Rival
from benchmarks.rounds import Cell

Figures = dict[str, dict[str, float]]

VERSUS = (
    ("kvferry shm", "nixl"),
    ("kvferry shm", "mooncake tcp"),
    ("kvferry staged", "nixl"),
    ("kvferry tcp", "nixl tcp"),
    ("kvferry tcp", "mooncake tcp"),
    ("kvferry tcp", "iperf3"),
)
"""Which rows are set against which: what each would be used instead of."""


def show(
    console: Console,
    cells: Sequence[Cell],
    rivals: Sequence[Rival],
    figures: Figures,
    rounds: int,
) -> None:
    """Rows are rivals, columns are cases: GB/s, and in brackets the share of memcpy."""
    cases = list(dict.fromkeys(cell.case for cell in cells))
    found = {(cell.rival, cell.case): cell for cell in cells}
    total = cases[0].total_bytes // MIB
    table = Table(
        title=f"GB/s (share of one-thread memcpy), {total} MiB between two processes, "
        f"median of {rounds} rounds"
    )
    table.add_column("")
    for case in cases:
        table.add_column(case.name, justify="right")
    table.add_column("CPU s/GB", justify="right")
    for rival in rivals:
        row = [found.get((rival.name, case)) for case in cases]
        table.add_row(rival.name, *[_text(cell) for cell in row], _cpu(row))
    console.print(table)
    for (ours, theirs), times in versus(cells).items():
        shown = ", ".join(f"{case} {value:.2f}x" for case, value in times.items())
        console.print(f"  {ours} against {theirs}: {shown}", highlight=False)
    for rival in rivals:
        if rival.note:
            console.print(f"  {rival.name}: {rival.note}", highlight=False)
    for cell in cells:
        if cell.error:
            console.print(
                f"  {cell.rival}, {cell.case.name}: {cell.error}", style="yellow", markup=False
            )
    for name, values in figures.items():
        for figure, value in values.items():
            console.print(f"  {name}: {figure} {value:.1f}", highlight=False)
    console.print(
        "  Blocks lie in random order on both sides; every byte is compared once per column.\n"
        "  CPU s/GB: both processes, smallest to largest over the columns.",
        highlight=False,
    )


def versus(cells: Sequence[Cell]) -> dict[tuple[str, str], dict[str, float]]:
    """For each pair of :data:`VERSUS`, by case: how many times as fast, within the same rounds."""
    found = {(cell.rival, cell.case): cell for cell in cells if not cell.error}
    result: dict[tuple[str, str], dict[str, float]] = {}
    for ours, theirs in VERSUS:
        for (name, case), cell in found.items():
            other = found.get((theirs, case))
            if name == ours and other is not None:
                times = result.setdefault((ours, theirs), {})
                times[case.name] = cell.times_faster_than(other)
    return result


def save(
    path: Path,
    cells: Sequence[Cell],
    rivals: Sequence[Rival],
    figures: Figures,
    settings: dict[str, Any],
) -> None:
    """Write everything that was measured, with the facts about this machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "format": 1,
        "taken_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "settings": settings,
        "rivals": {rival.name: {"note": rival.note, **rival.facts()} for rival in rivals},
        "figures": figures,
        "versus": [
            {"rival": ours, "against": theirs, "times": times}
            for (ours, theirs), times in versus(cells).items()
        ],
        "cells": [_plain(cell) for cell in cells],
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """What a reader needs to judge the figures. No names."""
    model = ""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return {
        "processor": model or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MIB,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
    }


def _plain(cell: Cell) -> dict[str, Any]:
    case: Case = cell.case
    result: dict[str, Any] = {
        "rival": cell.rival,
        "case": case.name,
        **case.as_dict(),
        "verified": cell.verified,
        "error": cell.error,
    }
    if cell.samples:
        low, high = cell.ratio_range
        result |= {
            "gb_per_s": round(cell.gigabytes_per_s, 4),
            "ratio": round(cell.ratio, 4),
            "ratio_min": round(low, 4),
            "ratio_max": round(high, 4),
            "cpu_s_per_gb": round(cell.cpu_s_per_gb, 4),
            "seconds": [round(sample.seconds, 6) for sample in cell.samples],
        }
    return result


def _text(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    if cell.error:
        return f"[yellow]{cell.error.partition(':')[0][:14]}[/]"
    return f"{cell.gigabytes_per_s:.2f} ({cell.ratio:.2f})"


def _cpu(row: Sequence[Cell | None]) -> str:
    values = [cell.cpu_s_per_gb for cell in row if cell and cell.samples and not cell.error]
    if not values:
        return "-"
    low, high = min(values), max(values)
    return f"{low:.2f}" if high - low < 0.01 else f"{low:.2f}-{high:.2f}"
