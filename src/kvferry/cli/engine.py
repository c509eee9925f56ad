"""``kvferry engine``: one reference engine."""

from __future__ import annotations

from typing import Any

import click

from kvferry.cli.main import log_level_option, log_to_stderr


@click.command()
@click.option(
    "--model",
    default="tiny",
    show_default=True,
    help="`tiny` (built in, random), `smollm2`, a GGUF file or a safetensors folder.",
)
@click.option(
    "--role",
    type=click.Choice(["both", "prefill", "decode"]),
    default="both",
    show_default=True,
    help="Offer KV to others, load it from others, or either.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address for HTTP.")
@click.option("--port", default=0, show_default=True, help="Port for HTTP; 0: any free one.")
@click.option("--served-name", default="", help="A name for clients besides the model's own.")
@click.option("--blocks", default=512, show_default=True, help="KV blocks in all.")
@click.option("--block-tokens", default=16, show_default=True, help="Tokens in one KV block.")
@click.option("--running-max", default=32, show_default=True, help="Sequences computed at once.")
@click.option("--waiting-max", default=256, show_default=True, help="Sequences that may queue.")
@click.option(
    "--on-load-failure",
    type=click.Choice(["recompute", "fail"]),
    default="recompute",
    show_default=True,
    help="When KV cannot be had: compute the prompt here, or end the request with the error.",
)
@click.option(
    "--drain-s", default=30.0, show_default=True, help="How long SIGTERM lets requests go on."
)
@click.option(
    "--transport", "transports", multiple=True, metavar="NAME", help="Allow only this; repeatable."
)
@click.option("--socket-dir", default="", help="Directory of the Unix socket; shared by all.")
@click.option("--listen", default="127.0.0.1:0", show_default=True, help="Address for KV over TCP.")
@click.option(
    "--lease-s", default=5.0, show_default=True, help="Life of a claim without a heart-beat."
)
@log_level_option
@click.pass_context
def engine(
    ctx: click.Context,
    model: str,
    role: str,
    host: str,
    port: int,
    served_name: str,
    blocks: int,
    block_tokens: int,
    running_max: int,
    waiting_max: int,
    on_load_failure: str,
    drain_s: float,
    transports: tuple[str, ...],
    socket_dir: str,
    listen: str,
    lease_s: float,
    log_level: str,
) -> None:
    """Run one reference engine: a small Llama on the CPU, with paged KV and OpenAI's API.

    Prints `ready http://host:port` once it serves.

    \b
    Example:
      kvferry engine --model tiny --port 8100 --role prefill
      kvferry engine --model tiny --port 8200 --role decode
    """
    from kvferry.config import EngineConfig
    from kvferry.engines.reference.handoff import kvferry_connector
    from kvferry.engines.reference.server import ServerConfig, serve

    log_to_stderr(log_level)
    chosen: dict[str, Any] = {
        "transports": transports,
        "directory": socket_dir,
        "listen": listen,
        "lease_s": lease_s,
    }
    # What the command line leaves open may be set in the environment.
    given = {
        name: value
        for name, value in chosen.items()
        if ctx.get_parameter_source(_PARAMETERS.get(name, name))
        is not click.core.ParameterSource.DEFAULT
    }
    config = ServerConfig(
        model=model,
        served_name=served_name,
        host=host,
        port=port,
        role=role,
        on_load_failure=on_load_failure,
        blocks=blocks,
        block_tokens=block_tokens,
        running_max=running_max,
        waiting_max=waiting_max,
        drain_s=drain_s,
        connector=kvferry_connector(EngineConfig.from_environment(**given)),
    )
    ctx.exit(serve(config))


_PARAMETERS = {"directory": "socket_dir"}
