"""Run one router until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
from collections.abc import Callable

from kvferry.router.app import Router
from kvferry.router.config import RouterConfig

log = logging.getLogger(__name__)

_SPARE_FILES = 64


def serve(config: RouterConfig, *, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT; calls ``on_ready(base_url)`` once it listens. Blocks.

    Raises OSError when the address cannot be bound.
    """
    _allow_files(2 * config.inflight_max + 4 * len(config.prefill + config.decode) + _SPARE_FILES)
    asyncio.run(_serve(config, on_ready))


async def _serve(config: RouterConfig, on_ready: Callable[[str], None]) -> None:
    told_to_stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told_to_stop.set)
    router = Router(config)
    url = await router.start()
    try:
        on_ready(url)
        await told_to_stop.wait()
    finally:
        await router.stop()


def _allow_files(needed: int) -> None:
    """Each request holds two sockets; the usual limit of 1,024 files is fewer than that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < needed:
        log.warning(
            "%d open files are allowed and %d may be needed; raise `ulimit -n` or lower "
            "--inflight-max",
            allowed,
            needed,
        )
