"""``kvferry doctor``: what this machine has, what serves, and what is wrong."""

from __future__ import annotations

import json

import click

NOTHING_SERVES_EXIT = 1


@click.command()
@click.option(
    "--trial/--no-trial", default=True, show_default=True, help="Prove paths by moving bytes."
)
@click.option("--again", is_flag=True, help="Repeat trials whose results are kept.")
@click.option("--limit-s", default=120.0, show_default=True, help="Longest time for all trials.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(ctx: click.Context, trial: bool, again: bool, limit_s: float, as_json: bool) -> None:
    """Look at memory, GPUs, links and engines; prove the paths; say what to mend.

    The exit status is 0 when some path serves, 1 when none does. Works without a GPU.

    \b
    Example:
      kvferry doctor
      kvferry doctor --no-trial --json
    """
    from kvferry.cli.explain import progress
    from kvferry.config import EngineConfig
    from kvferry.doctor import report
    from kvferry.doctor.facts import gather
    from kvferry.doctor.findings import find
    from kvferry.doctor.services import both_ways, local_pairs, services_of
    from kvferry.trials.run import run_and_keep

    config = EngineConfig.from_environment().with_defaults()
    facts = gather(EngineConfig.from_environment())
    pairs = local_pairs(facts)
    outcome = run_and_keep(
        config.cache_dir,
        both_ways(pairs),
        again=again,
        transports=config.transports,
        try_paths=trial,
        limit_s=limit_s,
        say=progress,
    )
    services = services_of(pairs, outcome)
    findings = find(facts, services, outcome.book)
    if as_json:
        click.echo(
            json.dumps(
                report.as_json(
                    facts, services, outcome.book, findings=findings, notes=outcome.notes
                )
            )
        )
    else:
        click.echo(report.doctor_text(facts, findings, services, outcome.book), nl=False)
        for note in outcome.notes:
            click.echo(f"note: {note}")
    if all(service.path is None for service in services):
        ctx.exit(NOTHING_SERVES_EXIT)
