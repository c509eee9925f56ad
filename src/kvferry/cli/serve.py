"""``kvferry serve``: prefill, decode and router on this machine."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

import click

from kvferry.errors import ClosedError

if TYPE_CHECKING:
    from kvferry.launcher import Fleet

TRIALS_S = 30.0
"""Trials before serving take so long at most."""


@click.command()
@click.argument("model")
@click.option("--prefill", default=1, show_default=True, help="Number of prefill processes.")
@click.option("--decode", default=1, show_default=True, help="Number of decode processes.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where the router listens.")
@click.option("--port", default=8000, show_default=True, help="The router's port; 0: any free one.")
@click.option(
    "--transport", "transports", multiple=True, metavar="NAME", help="Allow only this; repeatable."
)
@click.option("--restart", is_flag=True, help="Start a process again when it ends by itself.")
@click.option(
    "--trial/--no-trial",
    default=True,
    show_default=True,
    help="Prove the paths between processes first, once per boot.",
)
@click.option("--start-s", default=180.0, show_default=True, help="Longest wait for all to start.")
@click.argument("engine_flags", nargs=-1, type=click.UNPROCESSED)
def serve(
    model: str,
    prefill: int,
    decode: int,
    host: str,
    port: int,
    transports: tuple[str, ...],
    restart: bool,
    trial: bool,
    start_s: float,
    engine_flags: tuple[str, ...],
) -> None:
    """Start prefill, decode and router processes for MODEL, and stop them all together.

    MODEL is what `kvferry engine --model` takes: `tiny`, `smollm2`, a GGUF file or a folder.
    Anything after `--` goes to each engine. Ctrl-C stops all; pressed again, it kills.

    \b
    Example:
      kvferry serve tiny --prefill 1 --decode 2 --transport shm -- --blocks 256
    """
    from kvferry.launcher import Fleet

    fleet = Fleet(
        model,
        prefill=prefill,
        decode=decode,
        transports=transports,
        host=host,
        port=port,
        log=_print_line,
        engine_flags=engine_flags,
        start_s=start_s,
    )
    with _signals_to(fleet):
        try:
            if trial:
                _prove(transports)
            fleet.start()
            _print_line("kvferry", f"serving {model} at {fleet.router_url}, for example:")
            _print_line("kvferry", _curl_of(fleet.router_url))
            fleet.wait(restart=restart)
        except ClosedError:
            pass  # Interrupted while starting: an end that was asked for.
        finally:
            fleet.stop()
            _print_line("kvferry", "all processes have ended")


def _prove(transports: tuple[str, ...]) -> None:
    """Try the paths of host memory, unless that was done since the machine started; the engines
    find what is kept when they start."""
    from kvferry.config import EngineConfig
    from kvferry.trials.records import HOST
    from kvferry.trials.run import run_and_keep

    config = EngineConfig.from_environment().with_defaults()
    allowed = transports or config.transports
    pairs = [(HOST, HOST)]
    outcome = run_and_keep(
        config.cache_dir, pairs, again=False, transports=allowed, limit_s=TRIALS_S
    )
    failed = [f"{trial.path}: a trial {trial.why}" for trial in outcome.new if trial.why]
    for line in (*failed, outcome.problem, *outcome.notes):
        if line:
            _print_line("kvferry", line)


@contextlib.contextmanager
def _signals_to(fleet: Fleet) -> Iterator[None]:
    """The first signal ends the fleet in good order, the second at once."""
    was_told = False

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        nonlocal was_told
        if was_told:
            fleet.kill()
        was_told = True
        fleet.interrupt()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, on_signal) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _curl_of(url: str) -> str:
    body = '{"prompt": "The ferry", "max_tokens": 16}'
    return f"curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'"


def _print_line(name: str, line: str) -> None:
    # Nobody may be reading any more; the processes go on all the same.
    with contextlib.suppress(OSError):
        click.echo(f"[{name}] {line}")
