"""How this engine hands KV over: the part that an engine's author copies.

Everything kvferry needs of an engine is here: memory for the KV pool that peers can reach, a
geometry that says what lies where in it, and two calls: ``offer`` when a prompt's KV is complete,
``claim`` when blocks for a prompt are allocated, each with what to do when it has ended. The
scheduler keeps the blocks untouched in between; that is all the co-operation it takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvferry.config import EngineConfig
from kvferry.engine import Engine
from kvferry.engines.reference.config import ModelConfig
from kvferry.engines.reference.connector import ClaimHandle, ClaimResult, KVConnector
from kvferry.engines.reference.kvcache import PagedKV
from kvferry.engines.reference.sequence import Sequence, TokenLogprobs
from kvferry.errors import KVFerryError
from kvferry.handoff import ClaimEnd, HandOff, Offer, OfferEnd
from kvferry.layout import KVGeometry

if TYPE_CHECKING:
    from kvferry.engines.reference.server import ServerConfig

RECENT_MAX = 64
"""Ended claims that ``/debug/state`` shows."""


class KVFerryConnector:
    """Offers and claims of one engine process.

    engine: moves the bytes; closed together with the connector. ferry: the hand-off over it.
    """

    def __init__(self, engine: Engine, ferry: HandOff) -> None:
        self._engine = engine
        self._ferry = ferry
        self._offers: dict[str, Offer] = {}
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT_MAX)
        self._plan = ""

    def offer(
        self, sequence: Sequence, first_token: int, on_end: Callable[[str], None]
    ) -> dict[str, Any]:
        """See KVConnector. The first token travels along, so decode need not sample it again."""

        def ended(end: OfferEnd) -> None:
            self._offers.pop(sequence.id, None)
            on_end(end.code)

        extra: dict[str, Any] = {"first_token": first_token}
        if sequence.first_logprobs is not None:
            extra["logprob"] = sequence.first_logprobs.logprob
            extra["top"] = sequence.first_logprobs.top
        offer = self._ferry.offer(
            sequence.prompt_blocks,
            len(sequence.prompt),
            extra=extra,
            on_end=ended,
            labels=_labels(sequence),
        )
        self._offers[sequence.id] = offer
        return offer.params

    def withdraw(self, sequence: Sequence) -> None:
        """See KVConnector."""
        offer = self._offers.get(sequence.id)
        if offer is not None:
            offer.cancel()

    def claim(
        self,
        sequence: Sequence,
        params: dict[str, Any],
        on_end: Callable[[ClaimResult], None],
    ) -> ClaimHandle:
        """See KVConnector. After a failure the engine computes the prompt itself, or fails it."""

        def ended(end: ClaimEnd) -> None:
            self._note(sequence, end)
            on_end(
                ClaimResult(
                    first_token=end.extra.get("first_token"),
                    first_logprobs=_logprobs(end.extra),
                    error=end.error,
                    nbytes=end.nbytes,
                    seconds=end.seconds,
                    path=end.path,
                )
            )

        return self._ferry.claim(
            params,
            sequence.prompt_blocks,
            len(sequence.prompt),
            on_end=ended,
            labels=_labels(sequence),
        )

    def decline(self, params: dict[str, Any]) -> None:
        """See KVConnector. Prefill has its blocks back at once, and not when the offer expires."""
        self._ferry.decline(params)

    def close(self) -> None:
        """See KVConnector. Peers are told, so that none of them waits for a lease to run out."""
        self._engine.close()

    def statistics(self) -> dict[str, Any]:
        """For ``/debug/state``: what moved, by which path and why, and what is under way."""
        return {
            **self._engine.statistics(),
            "plan": self._plan,
            "recent_claims": list(self._recent),
        }

    def why(self, text: str) -> dict[str, Any]:
        """For ``/debug/why``: the trails of the hand-offs that ``text`` names."""
        return self._engine.recorder.why(text)

    def dump(self) -> Path:
        """Write the flight recorder to a file, in ``dump_dir`` or beside the socket. Blocks."""
        config = self._engine.config
        return self._engine.recorder.dump_to(config.dump_dir or config.directory)

    def _note(self, sequence: Sequence, end: ClaimEnd) -> None:
        if end.plan is not None:
            self._plan = end.plan.explain()
        self._recent.append(
            {
                "id": sequence.id,
                "tokens": len(sequence.prompt),
                "path": end.path,
                "nbytes": end.nbytes,
                "seconds": end.seconds,
                "move_s": end.move_s,
                "error": end.error.as_dict() if end.error else None,
            }
        )


def _labels(sequence: Sequence) -> tuple[str, ...]:
    """The request's names, the one that its client has in the answer first."""
    return (sequence.id, *sequence.labels)


def _logprobs(extra: dict[str, Any]) -> TokenLogprobs | None:
    """What ``offer`` put into ``extra``; None if it put nothing, or nothing that makes sense."""
    try:
        top = tuple((int(token), float(logprob)) for token, logprob in extra["top"])
        return TokenLogprobs(int(extra["first_token"]), float(extra["logprob"]), top)
    except (KeyError, TypeError, ValueError):
        return None


def kvferry_connector(config: EngineConfig) -> Callable[[ServerConfig, ModelConfig], Any]:
    """A connector factory for ServerConfig: KV in memory that peers can map, and its mover."""

    def make(server: ServerConfig, model: ModelConfig) -> tuple[PagedKV, KVConnector]:
        engine = Engine(config)
        try:
            nbytes = PagedKV.nbytes(model, server.block_tokens, server.blocks)
            pool = engine.allocate(nbytes)
            kv = PagedKV(
                model,
                block_tokens=server.block_tokens,
                blocks=server.blocks,
                buffer=pool.array,
            )
            geometry = KVGeometry(
                model=model.name,
                layers=model.layers,
                kv_heads=model.kv_heads,
                head_dim=model.head_dim,
                dtype="float32",
                block_tokens=server.block_tokens,
                blocks=server.blocks,
                layout="LKBTHD",
            )
            return kv, KVFerryConnector(engine, HandOff(engine, pool, geometry))
        except KVFerryError:
            engine.close()
            raise

    return make
