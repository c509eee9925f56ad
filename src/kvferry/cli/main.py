"""The ``kvferry`` command itself: the list of subcommands, and how errors look.

Subcommands are imported when they are called, so that ``kvferry --help`` stays quick.
"""

from __future__ import annotations

import importlib
import json
import logging
from typing import Any, NamedTuple

import click

from kvferry import __version__
from kvferry.errors import KVFerryError

ERROR_EXIT = 2


class _Subcommand(NamedTuple):
    """Where a subcommand lives, and its line in the list."""

    place: str
    summary: str


SUBCOMMANDS = {
    "serve": _Subcommand("serve:serve", "Start prefill, decode and router on this machine."),
    "route": _Subcommand("route:route", "Run the router over workers that already run."),
    "engine": _Subcommand("engine:engine", "Run one reference engine."),
    "demo": _Subcommand("demo:demo", "See a hand-off work, end to end, on this machine."),
    "chaos": _Subcommand("chaos:chaos", "Look for faults of the hand-off, simulated or real."),
    "doctor": _Subcommand("doctor:doctor", "Look at this machine: what serves, what to mend."),
    "explain": _Subcommand("explain:explain", "Tell which path serves two memories, and why."),
    "why": _Subcommand("why:why", "Tell why a request failed, or where its time went."),
    "version": _Subcommand("main:version", "Print the version."),
}


class LazyGroup(click.Group):
    """A group that imports a subcommand when it is called, and prints errors without a trace."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        known = SUBCOMMANDS.get(cmd_name)
        if known is None:
            return None
        module, attribute = known.place.split(":")
        command = getattr(importlib.import_module(f"kvferry.cli.{module}"), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, known.summary) for name, known in SUBCOMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KVFerryError as error:
            print_error(error)
            ctx.exit(ERROR_EXIT)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvferry")
def cli() -> None:
    """Move a language model's KV cache from prefill to decode, by the fastest path there is.

    \b
    See it work:           kvferry demo
    Serve a model:         kvferry serve tiny --prefill 1 --decode 1
    Route to own workers:  kvferry route --prefill URL --decode URL
    """


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def version(as_json: bool) -> None:
    """Print the version.

    Example: kvferry version --json
    """
    click.echo(json.dumps({"kvferry": __version__}) if as_json else f"kvferry {__version__}")


def print_error(error: KVFerryError) -> None:
    """Write an error to standard error: what happened, then what to do about it."""
    fix, error.fix = error.fix, ""
    click.echo(f"error: {error}", err=True)
    error.fix = fix
    if fix:
        click.echo(f"  fix: {fix}", err=True)


def log_to_stderr(level: str) -> None:
    """Send log records of this process to standard error; for commands that run for long."""
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


log_level_option = click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Least serious log record to print.",
)


def main() -> None:
    """Entry point of the ``kvferry`` script."""
    cli(prog_name="kvferry")


if __name__ == "__main__":
    main()
