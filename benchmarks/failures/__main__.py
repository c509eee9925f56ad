"""``python -m benchmarks.failures``: run, print the table, write JSON and Markdown."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from benchmarks.base import MissingError, RivalError
from benchmarks.failures import report
from benchmarks.failures.scenarios import SCENARIOS, Scenario
from benchmarks.failures.system import Network, NetworkError
from benchmarks.failures.verdict import Row
from benchmarks.failures.world import EndedError, Mover, World
from benchmarks.process import BENCH_PYTHON, OWN_PYTHON, ROOT

LIMIT_S = 10.0


def all_movers() -> list[Mover]:
    """Every row, in the order of the table."""
    ferry, nixl = "benchmarks.failures.mover_kvferry", "benchmarks.failures.mover_nixl"
    ours = [
        Mover(
            f"kvferry {name}",
            ferry,
            OWN_PYTHON,
            {"KVFERRY_TRANSPORTS": name},
            has_port=name == "tcp",
            crosses=name == "tcp",
        )
        for name in ("shm", "staged", "tcp")
    ]
    return [
        *ours,
        Mover("Mooncake tcp", "benchmarks.failures.mover_mooncake", has_port=True, crosses=True,
              env={"MC_FORCE_TCP": "1"}),
        Mover("NIXL", nixl),
        Mover("NIXL tcp", nixl, env={"UCX_TLS": "tcp"}, crosses=True),
    ]  # fmt: skip


def why_not(scenario: Scenario, mover: Mover) -> str:
    """Why a scenario does not apply to a rival; empty if it does."""
    if scenario.only and not mover.name.startswith(scenario.only):
        return f"for {scenario.only} only"
    if scenario.far and not mover.crosses:
        return "for one host"
    if scenario.by_port and not mover.has_port:
        return "is not reached by a port"
    return ""


def run(scenario: Scenario, mover: Mover, limit_s: float, number: int, logs: Path) -> Row:
    """One cell. Never raises for what a rival does, and leaves nothing behind."""
    reason = why_not(scenario, mover)
    if not reason and not mover.python.exists():
        reason = "not installed: run scripts/bench_setup.sh"
    if reason:
        return Row(scenario.name, mover.name, skipped=reason)
    try:
        if not scenario.far:
            return _run(scenario, mover, limit_s, None, logs)
        with Network(number) as network:
            return _run(scenario, mover, limit_s, network, logs)
    except NetworkError as error:
        return Row(scenario.name, mover.name, skipped=str(error))
    except MissingError as error:
        return Row(scenario.name, mover.name, skipped=f"not installed: {error}")
    except RivalError as error:
        return Row(scenario.name, mover.name, skipped=f"the scenario failed: {error}")


def _run(
    scenario: Scenario, mover: Mover, limit_s: float, network: Network | None, logs: Path
) -> Row:
    with World(mover, limit_s, network, logs) as world:
        world.start(scenario.pool_bytes)
        try:
            scenario.act(world)
        except EndedError:
            pass
        VERSIONS.update(world.versions)
        return Row(scenario.name, mover.name, tuple(world.steps), notes=tuple(world.notes))


VERSIONS: dict[str, str] = {}
"""Of every rival that ran."""


def _matching(words: Sequence[str], name: str) -> bool:
    return not words or any(word.lower() in name.lower() for word in words)


@click.command()
@click.option("--only", multiple=True, help="Rivals whose name contains this; may be repeated.")
@click.option("--scenario", multiple=True, help="Scenarios whose name contains this; repeatable.")
@click.option("--limit-s", default=LIMIT_S, type=click.FloatRange(5.0), help="Hard limit per step.")
@click.option(
    "--output", type=click.Path(path_type=Path), default=ROOT / "bench-results" / "failures.json"
)
@click.option("--setup/--no-setup", default=True, help="Install missing rivals into .venv-bench.")
def main(
    only: tuple[str, ...], scenario: tuple[str, ...], limit_s: float, output: Path, setup: bool
) -> None:
    """Break things under kvferry and its rivals, and see how each of them ends."""
    console = Console(highlight=False, soft_wrap=True)
    movers = [mover for mover in all_movers() if _matching(only, mover.name)]
    scenarios = [found for found in SCENARIOS if _matching(scenario, found.name)]
    wanted = any(mover.python == BENCH_PYTHON for mover in movers)
    if setup and wanted and not BENCH_PYTHON.exists():
        console.print("Installing the rivals into .venv-bench ...")
        subprocess.run(["sh", str(ROOT / "scripts" / "bench_setup.sh")], check=False)
    # As an exception, a request to end passes through the clean-up that kills every process.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    began = time.monotonic()
    rows = []
    for i, found in enumerate(scenarios):
        console.print(f"[{i + 1}/{len(scenarios)}] {found.title}", markup=False)
        for j, mover in enumerate(movers):
            logs = output.parent / "logs" / "failures" / f"{found.name}-{mover.name}"
            logs = logs.with_name(logs.name.replace(" ", "-"))
            number = os.getpid() * 8 + i * len(movers) + j
            rows.append(run(found, mover, limit_s, number, logs))
            if not why_not(found, mover):
                console.print("   " + report.line(rows[-1]), markup=False)
    report.show(console, scenarios, rows)
    settings = {"limit_s": limit_s, "movers": [_as_json(mover) for mover in movers]}
    report.save(output, rows, VERSIONS, settings)
    output.with_suffix(".md").write_text(report.markdown(scenarios, rows))
    took = time.monotonic() - began
    console.print(f"{took:.0f} s. Written: {output} and {output.with_suffix('.md').name}")


def _as_json(mover: Mover) -> dict[str, object]:
    return {**dataclasses.asdict(mover), "python": mover.python.name}


if __name__ == "__main__":
    main()
