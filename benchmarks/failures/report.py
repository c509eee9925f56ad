"""Rows for people, for a page of the documentation, and for programs."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.failures.scenarios import Scenario
from benchmarks.failures.verdict import Row, in_words

MESSAGE_CHARS_MAX = 110


def seconds(row: Row) -> str:
    longest = row.longest_s()
    if not row.steps:
        return ""
    return f"{longest:.2f}" if longest < 10 else f"{longest:.0f}"


def cores(row: Row) -> str:
    share = row.waiting_share()
    return "" if share is None else f"{share:.2f}"


def verdict(row: Row) -> str:
    if row.skipped:
        return "-"
    return "right" if row.is_right else ", ".join(row.defects())


def message(row: Row, chars_max: int = MESSAGE_CHARS_MAX) -> str:
    text = " ".join(row.message().split())
    return text if len(text) <= chars_max else text[: chars_max - 3] + "..."


def line(row: Row) -> str:
    """One row for the eye, while the benchmark runs."""
    share = cores(row)
    facts = [f"{seconds(row)} s" if row.steps else "", f"{share} core" if share else ""]
    text = "; ".join(part for part in (row.outcome(), *facts, message(row)) if part)
    return f"{row.rival:<15} {verdict(row):<22} {text}"


def show(console: Console, scenarios: Sequence[Scenario], rows: Sequence[Row]) -> None:
    """How each rival did in each scenario, in one word, and how many were right."""
    rivals = list(dict.fromkeys(row.rival for row in rows))
    table = Table(title="What should happen, and whether it did")
    table.add_column("scenario")
    for rival in rivals:
        table.add_column(rival)
    cells = {(row.scenario, row.rival): row for row in rows}
    for scenario in scenarios:
        found = [cells.get((scenario.name, rival)) for rival in rivals]
        table.add_row(scenario.name, *("" if row is None else verdict(row) for row in found))
    counts = [in_words([row for row in rows if row.rival == rival]) for rival in rivals]
    table.add_row("right", *counts, style="bold")
    console.print(table)


def markdown(scenarios: Sequence[Scenario], rows: Sequence[Row]) -> str:
    """The tables of docs/benchmarks-failures.md: counts first, then one table per scenario."""
    rivals = list(dict.fromkeys(row.rival for row in rows))
    lines = ["| | " + " | ".join(rivals) + " |", "| --- |" + " --- |" * len(rivals)]
    counts = [in_words([row for row in rows if row.rival == rival]) for rival in rivals]
    lines.append("| right | " + " | ".join(counts) + " |")
    for scenario in scenarios:
        found = [row for row in rows if row.scenario == scenario.name and not row.skipped]
        if not found:
            continue
        lines += ["", f"**{scenario.title}.** Right: {scenario.right}.", ""]
        lines += ["| rival | verdict | what happened | longest wait, s | core | message |"]
        lines += ["| --- | --- | --- | --- | --- | --- |"]
        for row in found:
            said = message(row).replace("|", "/").replace("<", "(").replace(">", ")")
            cells = (row.rival, verdict(row), row.outcome(), seconds(row), cores(row), said)
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def save(path: Path, rows: Sequence[Row], versions: dict[str, str], settings: Any) -> None:
    """Everything that was seen, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "settings": settings,
        "machine": {"kernel": platform.release(), "processors": os.cpu_count()},
        "versions": {**versions, "Python": platform.python_version()},
        "rows": [
            {
                **asdict(row),
                "verdict": verdict(row),
                "outcome": row.outcome(),
                "longest_s": round(row.longest_s(), 3),
                "waiting_core_share": row.waiting_share(),
                "message": row.message(),
            }
            for row in rows
        ],
    }
    path.write_text(json.dumps(content, indent=1, default=str) + "\n")
