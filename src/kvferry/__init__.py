"""kvferry moves a language model's KV cache from prefill to decode by the fastest path there is.

The public names are loaded when they are first used, so that ``import kvferry`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvferry.config import EngineConfig
    from kvferry.engine import Engine
    from kvferry.errors import KVFerryError
    from kvferry.handoff import Claim, ClaimEnd, HandOff, Offer, OfferEnd
    from kvferry.layout import KVGeometry
    from kvferry.peers import Peer
    from kvferry.planner import Plan
    from kvferry.regions import Region, Spans
    from kvferry.registry import Registration
    from kvferry.transfer import Transfer
    from kvferry.transports.base import RemoteRegion

__version__ = "0.1.0"

_HOMES = {
    "Claim": "handoff",
    "ClaimEnd": "handoff",
    "Engine": "engine",
    "EngineConfig": "config",
    "HandOff": "handoff",
    "KVFerryError": "errors",
    "KVGeometry": "layout",
    "Offer": "handoff",
    "OfferEnd": "handoff",
    "Peer": "peers",
    "Plan": "planner",
    "Region": "regions",
    "Registration": "registry",
    "RemoteRegion": "transports.base",
    "Spans": "regions",
    "Transfer": "transfer",
}

__all__ = [
    "Claim",
    "ClaimEnd",
    "Engine",
    "EngineConfig",
    "HandOff",
    "KVFerryError",
    "KVGeometry",
    "Offer",
    "OfferEnd",
    "Peer",
    "Plan",
    "Region",
    "Registration",
    "RemoteRegion",
    "Spans",
    "Transfer",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kvferry' has no attribute {name!r}")
    return getattr(import_module(f"kvferry.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
