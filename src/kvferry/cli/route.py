"""``kvferry route``: the router over workers that already run."""

from __future__ import annotations

import click

from kvferry.cli.main import log_level_option, log_to_stderr
from kvferry.errors import ConfigError


@click.command()
@click.option("--prefill", multiple=True, metavar="URL", help="A prefill worker; repeatable.")
@click.option(
    "--decode", multiple=True, required=True, metavar="URL", help="A decode worker; repeatable."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, help="Port to listen on; 0: any free one.")
@click.option(
    "--on-no-prefill",
    type=click.Choice(["local", "error"]),
    default="local",
    show_default=True,
    help="When prefill fails: decode computes the prompt itself, or the client gets a 503.",
)
@click.option(
    "--inflight-max", default=1024, show_default=True, help="Requests beyond this get a 429."
)
@click.option(
    "--between-bytes-s",
    default=120.0,
    show_default=True,
    help="Longest pause within an answer. Its whole length has no limit.",
)
@click.option(
    "--worker-lost-s",
    default=5.0,
    show_default=True,
    help="A worker without a good health answer for this long is down.",
)
@click.option(
    "--drain-s", default=5.0, show_default=True, help="How long requests may go on at shutdown."
)
@log_level_option
def route(
    prefill: tuple[str, ...],
    decode: tuple[str, ...],
    host: str,
    port: int,
    on_no_prefill: str,
    inflight_max: int,
    between_bytes_s: float,
    worker_lost_s: float,
    drain_s: float,
    log_level: str,
) -> None:
    """Run the router: each request goes to prefill, and with what it offers to decode.

    Speaks OpenAI's API. Workers are any that carry kv_transfer_params, vLLM among them. Without
    --prefill it is a plain proxy. The answer's x-kvferry-* headers name the workers.

    \b
    Example:
      kvferry route --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200
      curl http://127.0.0.1:8000/health
    """
    from kvferry.router.config import RouterConfig
    from kvferry.router.serve import serve

    log_to_stderr(log_level)
    config = RouterConfig(
        prefill=prefill,
        decode=decode,
        host=host,
        port=port,
        on_no_prefill="error" if on_no_prefill == "error" else "local",
        inflight_max=inflight_max,
        between_bytes_s=between_bytes_s,
        worker_lost_s=worker_lost_s,
        drain_s=drain_s,
    )
    try:
        serve(config, on_ready=lambda url: click.echo(f"ready {url}"))
    except OSError as problem:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {problem.strerror or problem}",
            fix="choose another --port, or 0 for any free one",
        ) from problem
