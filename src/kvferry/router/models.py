"""GET /v1/models over all healthy workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict

from kvferry.router.config import RouterConfig
from kvferry.router.exchange import error_response
from kvferry.router.workers import Worker

log = logging.getLogger(__name__)


class _ModelList(msgspec.Struct):
    data: list[dict[str, object]]


async def list_models(
    session: aiohttp.ClientSession,
    config: RouterConfig,
    workers: Sequence[Worker],
    headers: CIMultiDict[str],
) -> web.Response:
    """Each model that a healthy worker offers, once; a worker that fails is left out."""
    headers["Accept-Encoding"] = "identity"
    answers = await asyncio.gather(
        *(_models_of(session, config, worker, headers) for worker in workers if worker.up)
    )
    merged: dict[str, object] = {}
    for _, models in answers:
        for model in models:
            merged.setdefault(str(model.get("id")), model)
    if merged:
        return web.json_response({"object": "list", "data": list(merged.values())})
    for status, _ in answers:
        if status >= 400:
            return error_response(status, f"every worker refused, one with {status}", "upstream")
    return error_response(503, "no worker listed its models", "unreachable")


async def _models_of(
    session: aiohttp.ClientSession,
    config: RouterConfig,
    worker: Worker,
    headers: CIMultiDict[str],
) -> tuple[int, list[dict[str, object]]]:
    try:
        async with (
            asyncio.timeout(config.health_timeout_s),
            session.get(f"{worker.url}/v1/models", headers=headers) as response,
        ):
            if response.status != 200:
                return response.status, []
            return 200, msgspec.json.decode(await response.read(), type=_ModelList).data
    except (TimeoutError, aiohttp.ClientError, msgspec.MsgspecError) as problem:
        log.warning("%s did not list its models: %s", worker.name, problem)
        return 0, []
