"""``python -m benchmarks``: measure, print the table, write ``bench-results/bench.json``."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import click
from rich.console import Console

from benchmarks import kvferry_paths, report, rival_iperf3, rival_mooncake, rival_nixl
from benchmarks.base import KIB, MIB, Case, Rival, RivalError
from benchmarks.limits import memcpy
from benchmarks.process import BENCH_PYTHON, ROOT
from benchmarks.rounds import ROUNDS_MIN, Contest

BLOCK_BYTES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB)


def all_rivals() -> list[Rival]:
    """Every row below memcpy, in the order of the table."""
    return [
        *kvferry_paths.paths(),
        *rival_nixl.rivals(),
        *rival_mooncake.rivals(),
        *rival_iperf3.rivals(),
    ]


@click.command()
@click.option("--quick", is_flag=True, help="64 MiB and 3 rounds: a look, not a result.")
@click.option("--total-mib", type=click.IntRange(1, 8192), help="MiB per run; 256 by default.")
@click.option("--rounds", type=click.IntRange(1, 1000), help="Rounds; 7 by default.")
@click.option("--only", multiple=True, help="Rivals whose name contains this; may be repeated.")
@click.option("--block-kib", multiple=True, type=click.IntRange(1), help="Only these block sizes.")
@click.option(
    "--output", type=click.Path(path_type=Path), default=ROOT / "bench-results" / "bench.json"
)
@click.option("--setup/--no-setup", default=True, help="Install missing rivals into .venv-bench.")
def main(
    quick: bool,
    total_mib: int | None,
    rounds: int | None,
    only: tuple[str, ...],
    block_kib: tuple[int, ...],
    output: Path,
    setup: bool,
) -> None:
    """Measure kvferry, its rivals and the machine's limits side by side."""
    console = Console()
    total_bytes = (total_mib or (64 if quick else 256)) * MIB
    rounds = rounds or (3 if quick else ROUNDS_MIN)
    sizes = [kib * KIB for kib in block_kib] or list(BLOCK_BYTES)
    for size in sizes:
        if total_bytes % size:
            raise click.BadParameter(f"{size // KIB} KiB does not divide {total_bytes // MIB} MiB")
    rivals = [r for r in all_rivals() if not only or any(word in r.name for word in only)]
    wanted = any(not rival.name.startswith("kvferry") for rival in rivals)
    if setup and wanted and not BENCH_PYTHON.exists():
        console.print("Installing the rivals into .venv-bench ...")
        subprocess.run(["sh", str(ROOT / "scripts" / "bench_setup.sh")], check=False)

    # As an exception, a request to end passes through the clean-up that stops every rival.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    yardstick = memcpy()
    cases = [Case(total_bytes, size) for size in dict.fromkeys([*sizes, total_bytes])]
    with console.status("starting") as status:
        contest = Contest(yardstick, rivals, total_bytes, status.update)
        try:
            cells = contest.hold(cases, rounds)
        except RivalError as error:
            raise click.ClickException(str(error)) from error
    rows = [yardstick, *rivals]
    report.show(console, cells, rows, contest.figures, rounds)
    settings = {"total_bytes": total_bytes, "rounds": rounds, "quick": quick}
    report.save(output, cells, rows, contest.figures, settings)
    console.print(f"Written: {output}", highlight=False)


if __name__ == "__main__":
    main()
