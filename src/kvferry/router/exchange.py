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
