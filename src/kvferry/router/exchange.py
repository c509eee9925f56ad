"""One client's request on its way: what /debug/requests shows, and the errors clients are sent."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from kvferry.errors import (
    DeadlineError,
    KVFerryError,
    PeerLostError,
    ProtocolError,
    UnreachableError,
)
from kvferry.router.workers import Worker

EVENTS_MAX = 64
"""A request that is tried on very many workers stops being recorded there."""


@dataclass(eq=False)
class Exchange:
    """A request, from its arrival to its end. Holds no prompt and no text."""

    path: str
    label: str
    """The client's x-request-id; a name for people, never an identity."""
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    tries: int = 1
    phase: str = "reading"
    prefill: str = ""
    decode: str = ""
    handoff: str = "local"
    outcome: str = ""
    error: str = ""
    bytes_done: int = 0
    started: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    asked: tuple[Worker, str] | None = None
    """The prefill worker that may have made an offer for this, and under which attempt."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """What happened when, for ``kvferry why``; at most EVENTS_MAX."""

    def __post_init__(self) -> None:
        self.note("arrived", path=self.path)

    def note(self, event: str, **facts: Any) -> None:
        """Keep an event of this request, now. Names and facts: docs/reference/events.md."""
        if len(self.events) < EVENTS_MAX:
            at_s = time.monotonic() - self.started
            self.events.append({"at_s": at_s, "event": event, **facts})

    @property
    def attempt(self) -> str:
        """Unique for each pairing of a prefill with a decode worker, whatever the client sends."""
        return f"{self.id}-{self.tries}"

    @property
    def is_unclaimed(self) -> bool:
        """Whether prefill may have offered something that decode never took over."""
        refused = self.outcome in ("client_error", "upstream_error")
        taken = self.handoff == "remote" and self.phase == "answering" and not refused
        return self.asked is not None and not taken

    def answers_to(self, text: str) -> bool:
        """Whether ``text`` is one of its names, or the beginning of one."""
        return bool(text) and any(name.startswith(text) for name in self.names())

    def names(self) -> list[str]:
        """What it is called in headers and by workers, the latest attempt first."""
        attempts = [f"{self.id}-{number}" for number in range(self.tries, 0, -1)]
        return [*attempts[:8], *([self.label] if self.label else [])]

    def as_trail(self) -> dict[str, Any]:
        """The router's view of both legs, as ``kvferry why`` reads it."""
        now = time.monotonic()
        outcome = "running" if not self.ended else "ok" if self.outcome == "ok" else "failed"
        if self.outcome == "client_left":
            outcome = "cancelled"
        why = {"code": self.outcome, "message": self.error}
        return {
            "kind": "request",
            "id": self.id,
            "handoff": "",
            "labels": self.names(),
            "engine": "router",
            "peer": "",
            "outcome": outcome,
            "seconds": (self.ended or now) - self.started,
            "ended_ago_s": now - self.ended if self.ended else 0.0,
            "bytes_done": self.bytes_done,
            "error": None if outcome in ("ok", "running") else why,
            "events": list(self.events),
        }

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "attempt": self.attempt,
            "label": self.label,
            "path": self.path,
            "phase": self.phase,
            "prefill": self.prefill,
            "decode": self.decode,
            "handoff": self.handoff,
            "outcome": self.outcome,
            "error": self.error,
            "bytes_done": self.bytes_done,
            "age_s": round((self.ended or time.monotonic()) - self.started, 3),
        }


def error_body(status: int, message: str, code: str) -> dict[str, object]:
    """An error in the shape that OpenAI's clients read."""
    kinds = {429: "rate_limit_error", 413: "invalid_request_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def error_response(status: int, message: str, code: str, **headers: str) -> web.Response:
    return web.json_response(error_body(status, message, code), status=status, headers=headers)


def status_of(error: KVFerryError) -> int:
    """The HTTP status that says what kind of failure this was."""
    if isinstance(error, DeadlineError) or error.stage == "health":
        return 504
    if isinstance(error, UnreachableError):
        return 503
    if isinstance(error, PeerLostError | ProtocolError):
        return 502
    return 500
