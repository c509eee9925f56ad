"""``kvferry chaos``: look for faults of the hand-off, in a simulated world or for real."""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any

import click

FAILED_EXIT = 1


@click.command()
@click.option("--seed", default=0, show_default=True, help="The first run; a run is its seed.")
@click.option("--steps", default=150, show_default=True, help="Requests and faults in one run.")
@click.option("--seeds", default=1, show_default=True, help="Runs, each with the next seed.")
@click.option("--shrink/--no-shrink", default=True, help="Look for a shorter run that fails too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, and nothing else.")
@click.option("--processes", is_flag=True, help="Real processes of the reference engine instead.")
@click.option("--minutes", default=10.0, show_default=True, help="With --processes: how long.")
@click.option("--clients", default=64, show_default=True, help="With --processes: asking at once.")
@click.option(
    "--scenario", "scenarios", multiple=True, help="With --processes: only this; repeatable."
)
@click.pass_context
def chaos(
    ctx: click.Context,
    seed: int,
    steps: int,
    seeds: int,
    shrink: bool,
    as_json: bool,
    processes: bool,
    minutes: float,
    clients: int,
    scenarios: tuple[str, ...],
) -> None:
    """Run many hand-offs through faults, and check that no byte is wrong and nothing is left over.

    Prefill and decode engines, their network, memory and time are simulated in one thread; sessions
    and hand-off are the real ones. Engines freeze, die and come back at the same address, while
    connections are cut, half open, slow or black, and clients leave. The same seed and number of
    steps give the same run, event by event: the trace hash says so. A run that fails is made
    shorter, as far as it goes, and told in words. Exit status 0: nothing was wrong; 1: something.

    \b
    Examples:
      kvferry chaos --seeds 100
      kvferry chaos --seed 17 --steps 150
      kvferry chaos --seed 17 --steps 150 --json
      kvferry chaos --processes --minutes 2
    """
    if processes:
        ctx.exit(_disturb_processes(seed, minutes, clients, scenarios, as_json))
    failed = _simulate(range(seed, seed + max(seeds, 1)), steps, shrink, as_json)
    ctx.exit(FAILED_EXIT if failed else 0)


def _simulate(seeds: range, steps: int, shrinks: bool, as_json: bool) -> int:
    """Run all seeds; the number that failed."""
    from kvferry.testing import simulation

    began = time.monotonic()
    counts: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    trace = ""
    for seed in seeds:
        report = simulation.World(simulation.make_plan(seed, steps)).run()
        counts.update(report.counts)
        trace = report.trace_hash
        if report.violation is not None:
            shortest = simulation.shrink(report) if shrinks else report
            told = simulation.story(shortest)
            failures.append({**simulation.facts(report), "shortest": told.splitlines()})
            if not as_json:
                click.echo(f"{told}\nAgain: kvferry chaos --seed {seed} --steps {steps}\n")
    seconds = time.monotonic() - began
    if as_json:
        summary = {
            "seeds": [seeds.start, seeds.stop - 1],
            "steps": steps,
            "handoffs": counts["offers"],
            "loaded": counts["claim loaded"],
            "counts": dict(sorted(counts.items())),
            "trace": trace if len(seeds) == 1 else None,
            "violations": failures,
            "seconds": round(seconds, 3),
        }
        click.echo(json.dumps(summary))
    else:
        _print_summary(seeds, counts, len(failures), trace, seconds)
    return len(failures)


def _print_summary(
    seeds: range, counts: Counter[str], failed: int, trace: str, seconds: float
) -> None:
    click.echo(
        f"{len(seeds)} runs, {counts['offers']} hand-offs offered, {counts['claims']} claimed, "
        f"{counts['claim loaded']} loaded, in {seconds:.1f} s: {failed} runs went wrong"
    )
    for side in ("offer", "claim", "request"):
        ends = [(n, k.partition(" ")[2]) for k, n in counts.items() if k.startswith(side + " ")]
        told = ", ".join(f"{count} {end}" for count, end in sorted(ends, reverse=True))
        click.echo(f"  {side}s ended: {told}")
    if len(seeds) == 1:
        click.echo(f"  trace {trace}")


def _disturb_processes(
    seed: int, minutes: float, clients: int, scenarios: tuple[str, ...], as_json: bool
) -> int:
    """Do the same to real processes; the exit status."""
    from kvferry.testing import chaos as kit

    unknown = set(scenarios) - set(kit.SCENARIOS)
    if unknown:
        raise click.BadParameter(
            f"{', '.join(sorted(unknown))}: not one of {', '.join(kit.SCENARIOS)}",
            param_hint="--scenario",
        )
    options = kit.Options(minutes=minutes, clients=clients, scenarios=scenarios, seed=seed)
    report = kit.run(options, lambda line: click.echo(line, err=True))
    click.echo(json.dumps(report.as_dict()) if as_json else str(report))
    return 0 if report.ok else FAILED_EXIT
