"""Every setting of the router, with its unit, its default and its reason."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal
from urllib.parse import urlsplit

from kvferry.errors import ConfigError

NoPrefillPolicy = Literal["local", "error"]


@dataclass(frozen=True)
class RouterConfig:
    """Settings of one router. Checked when made; a bad one raises ConfigError that names it."""

    prefill: tuple[str, ...] = ()
    """Base URLs of the prefill workers; none makes a plain proxy of the router."""
    decode: tuple[str, ...] = ()
    """Base URLs of the decode workers; at least one."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free port; the ready line names it."""
    on_no_prefill: NoPrefillPolicy = "local"
    """``local``: decode computes the prompt itself; ``error``: the client gets a 503."""
    connect_s: float = 2.0
    first_byte_s: float = 600.0
    """Longest wait for an answer to begin. Without streaming that is the whole generation, so it
    is long: a frozen worker is found by its health check, not by this."""
    between_bytes_s: float = 120.0
    """Longest pause within an answer. There is no limit on its whole length."""
    request_body_s: float = 60.0
    """Longest wait for the client's request body."""
    body_bytes_max: int = 32 << 20
    inflight_max: int = 1024
    """Requests beyond this are answered 429 at once."""
    keepalive_s: float = 3.0
    """Idle connections to workers are closed after this, before the workers' own 5 s or more."""
    health_interval_s: float = 0.5
    health_timeout_s: float = 2.0
    worker_lost_s: float = 5.0
    """A worker without one good health answer for this long is down."""
    drain_s: float = 5.0
    """At shutdown, how long requests in flight may go on."""

    def __post_init__(self) -> None:
        if not self.decode:
            raise ConfigError("no decode worker is configured", fix="pass --decode URL")
        for role in ("prefill", "decode"):
            urls = tuple(_checked_url(role, url) for url in getattr(self, role))
            if len(set(urls)) != len(urls):
                raise ConfigError(f"{role}: a worker is listed twice: {', '.join(urls)}")
            object.__setattr__(self, role, urls)
        if self.on_no_prefill not in ("local", "error"):
            raise ConfigError(f"on_no_prefill: {self.on_no_prefill!r} is neither local nor error")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port: {self.port} is not in 0..65535")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith(("_s", "_max")) and value <= 0:
                raise ConfigError(f"{field.name}: {value} is not above 0")


def _checked_url(role: str, url: str) -> str:
    """The base URL without its last slash; ConfigError when no worker can live there."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as problem:
        raise ConfigError(f"{role}: {url!r} is not a URL: {problem}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"{role}: {url!r} is not a base URL", fix="write http://host:port")
    if parts.query or parts.fragment or parts.username or parts.password:
        raise ConfigError(
            f"{role}: a base URL has no query, fragment, user or password",
            fix="send keys in the Authorization header, which is forwarded",
        )
    return url.rstrip("/")
