"""``kvferry explain A B``: which path serves two memories, and why nothing faster does."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from kvferry.errors import UsageError

if TYPE_CHECKING:
    from kvferry.config import EngineConfig
    from kvferry.doctor.records import Facts, Service
    from kvferry.trials.run import Outcome, Pair

NOTHING_SERVES_EXIT = 1


@click.command()
@click.argument("a", required=False)
@click.argument("b", required=False)
@click.option(
    "--trial/--no-trial", default=True, show_default=True, help="Prove paths by moving bytes."
)
@click.option("--again", is_flag=True, help="Repeat trials whose results are kept.")
@click.option("--limit-s", default=120.0, show_default=True, help="Longest time for all trials.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def explain(
    ctx: click.Context,
    a: str | None,
    b: str | None,
    trial: bool,
    again: bool,
    limit_s: float,
    as_json: bool,
) -> None:
    """Tell which path serves A and B, both ways, and why no faster one does.

    A and B are each `host`, `cuda:0`, a GPU's UUID, or, for one of them, the address of a running
    engine: `tcp://host:port` or `unix:/path`. Without arguments: all memories of this machine.

    \b
    Example:
      kvferry explain
      kvferry explain cuda:0 cuda:1
      kvferry explain host tcp://10.0.0.2:7000
    """
    from kvferry.config import EngineConfig
    from kvferry.doctor import report
    from kvferry.doctor.facts import gather
    from kvferry.trials.run import run_and_keep

    if (a is None) != (b is None):
        raise UsageError("name two memories, or none", fix="kvferry explain cuda:0 cuda:1")
    config = EngineConfig.from_environment().with_defaults()
    facts = gather(EngineConfig.from_environment())

    def tried(pairs: list[Pair]) -> Outcome:
        return run_and_keep(
            config.cache_dir,
            pairs,
            again=again,
            transports=config.transports,
            try_paths=trial,
            limit_s=limit_s,
            say=progress,
        )

    services, outcome = _services(config, facts, a, b, tried)
    if as_json:
        found = report.as_json(facts, services, outcome.book, notes=outcome.notes)
        click.echo(json.dumps(found))
    else:
        click.echo(report.explain_text(facts, services, outcome.book, outcome.notes), nl=False)
    if all(service.path is None for service in services):
        ctx.exit(NOTHING_SERVES_EXIT)


def _services(
    config: EngineConfig,
    facts: Facts,
    a: str | None,
    b: str | None,
    tried: Callable[[list[Pair]], Outcome],
) -> tuple[list[Service], Outcome]:
    """What was asked about, and what was found on the way."""
    from kvferry.doctor import services

    if a is None or b is None:
        pairs = services.local_pairs(facts)
        outcome = tried(services.both_ways(pairs))
        return services.services_of(pairs, outcome), outcome
    engines = [name for name in (a, b) if name.startswith(("tcp://", "unix:"))]
    if len(engines) == 2:
        raise UsageError(
            "one of the two may be a running engine, not both",
            fix="run this beside one of them, and name its memory: host or cuda:0",
        )
    if engines:
        place = services.place_named(facts, b if a in engines else a)
        met, can, unusable = services.meet(config, engines[0])
        # Nothing is moved to or from an engine that serves; two processes here stand for it.
        outcome = tried([(place, place)] if met.same_host else [])
        found = services.services_with(met, place, can, unusable, outcome.book)
        outcome.notes.append(services.about(met, place, facts))
        return (found if a in engines else found[::-1]), outcome
    pair = services.place_named(facts, a), services.place_named(facts, b)
    hidden = services.hidden_in(facts, pair)
    outcome = tried([]) if hidden else tried(services.both_ways([pair]))
    outcome.problem = outcome.problem or hidden
    outcome.notes += services.about_gpus(pair)
    return services.services_of([pair], outcome), outcome


def progress(line: str) -> None:
    """Tell a person who waits what is under way; nobody else."""
    if sys.stderr.isatty():
        click.echo(f"{line} ...", err=True)
