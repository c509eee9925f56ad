"""The settings of an engine: one frozen dataclass, the environment read in one place."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from kvferry.errors import ConfigError

ENVIRONMENT_PREFIX = "KVFERRY_"
CHECKSUMS = ("off", "sampled", "full")
SECONDS_MAX = 1e6
"""Longest time that can be set, because it is the longest that a message may carry."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How an engine behaves. Every field can be set by ``KVFERRY_<NAME>`` in the environment.

    name: what logs and errors call this engine; default is made from the process id.
    transports: names allowed, comma separated in the environment; empty means all that work here.
    listen: ``host:port`` for TCP, port 0 for any free one, or empty for no TCP at all.
    advertise: host that peers are told, when it is not the one listened on.
    cluster_key: the secret that all engines share and prove to each other, 16 bytes or more. Text
        may hold two with a space between while it is being replaced: the first is used, both are
        accepted.
    cluster_key_file: the same from a file that others cannot read.
    tls_cert, tls_key, tls_ca: PEM files; with them TCP is encrypted, and both sides must show a
        certificate of the authority ``tls_ca``.
    insecure: allows listening beyond loopback with neither key nor TLS.
    directory: where the Unix socket lies; both containers must mount it. Default is per user.
    heartbeat_s, lost_s: send something after so much silence; count the peer lost after so much.
    connect_s: limit for reaching a peer, hello included.
    lease_s: how long a claimed offer stays good without a sign of life.
    offer_s: how long an offer waits to be claimed.
    transfer_s: deadline of a transfer that names none.
    stall_s: a path on which nothing moves for so long, although its peer lives, is given up; not
        before one and a half heart-beats, which tell a stalled path from a frozen peer.
    checksum: ``"off"``, ``"sampled"`` or ``"full"``: whether transfers are compared with the
        owner's bytes afterwards, in part or entirely.
    transfers_max: transfers in flight at once; one more is a BusyError.
    peers_max: connections at once.
    lanes_max: streams per peer and streamed transport.
    split_lanes: streams that one large transfer is cut over; 0 means two from four cores on, else
        one: on two cores, two streams of one transfer only wait for each other.
    lane_queue_max: transfers waiting for one peer's streams.
    inline_bytes_max: up to so much a mapped copy runs in the caller's thread.
    copy_threads: threads for one large copy; 0 means up to four, by the number of cores.
    ring_bytes, ring_slots: size and number of slots of a ``staged`` ring.
    device_ring_bytes, device_ring_slots: the same for device memory, whose copies take longer to
        begin.
    device_blocks: thread blocks of a copy on a device; fewer leave more of it to a running model,
        and copy more slowly. 0 takes four per multiprocessor.
    dump_dir: where the flight recorder is dumped after an internal error; empty for nowhere.
    cache_dir: where results of trials are kept. Default is per user.
    """

    name: str = ""
    transports: tuple[str, ...] = ()
    listen: str = "127.0.0.1:0"
    advertise: str = ""
    cluster_key: str | bytes = dataclasses.field(default="", repr=False)
    cluster_key_file: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    insecure: bool = False
    directory: str = ""
    heartbeat_s: float = 1.0
    lost_s: float = 4.0
    connect_s: float = 4.0
    lease_s: float = 5.0
    offer_s: float = 60.0
    transfer_s: float = 30.0
    stall_s: float = 2.0
    checksum: str = "off"
    transfers_max: int = 4096
    peers_max: int = 1024
    lanes_max: int = 2
    split_lanes: int = 0
    lane_queue_max: int = 4096
    inline_bytes_max: int = 1 << 20
    copy_threads: int = 0
    ring_bytes: int = 1 << 20
    ring_slots: int = 4
    device_ring_bytes: int = 16 << 20
    device_ring_slots: int = 4
    device_blocks: int = 0
    dump_dir: str = ""
    cache_dir: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                zero_is_fine = field.name in ("copy_threads", "split_lanes", "device_blocks")
                if not math.isfinite(value) or value < 0 or (value == 0 and not zero_is_fine):
                    raise ConfigError(f"{field.name}={value!r}: must be greater than 0")
                if field.name.endswith("_s") and value > SECONDS_MAX:
                    raise ConfigError(f"{field.name}={value!r}: at most {SECONDS_MAX:g} s")
        if self.checksum not in CHECKSUMS:
            raise ConfigError(f"checksum={self.checksum!r}: must be one of {', '.join(CHECKSUMS)}")
        if self.lost_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"lost_s={self.lost_s:g} with heartbeat_s={self.heartbeat_s:g}: one lost "
                "heart-beat would end a session",
                fix="set lost_s to at least twice heartbeat_s",
            )
        for kind in ("", "device_"):
            nbytes, slots = getattr(self, f"{kind}ring_bytes"), getattr(self, f"{kind}ring_slots")
            if not 4096 <= nbytes <= 1 << 30 or not 2 <= slots <= 1024:
                raise ConfigError(
                    f"{kind}ring_bytes must be 4 KiB to 1 GiB and {kind}ring_slots 2 to 1024"
                )

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None, **values: Any
    ) -> EngineConfig:
        """Defaults, then ``KVFERRY_*``, then ``values``. Raises ConfigError that names the key."""
        source = os.environ if environment is None else environment
        read: dict[str, Any] = {}
        for field in fields(cls):
            key = ENVIRONMENT_PREFIX + field.name.upper()
            if key in source and field.name not in values:
                read[field.name] = _parse(key, source[key], field.default)
        return cls(**{**read, **values})

    def with_defaults(self) -> EngineConfig:
        """The same with the empty fields filled in from this process."""
        directory = self.directory or os.path.join(
            os.environ.get("XDG_RUNTIME_DIR") or "/tmp", f"kvferry-{os.getuid()}"
        )
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        cores = cores or 1
        return replace(
            self,
            name=self.name or f"engine-{os.getpid()}",
            directory=directory,
            cache_dir=self.cache_dir or os.path.join(_cache_home(), "kvferry"),
            copy_threads=self.copy_threads or min(4, cores),
            split_lanes=self.split_lanes or (2 if cores >= 4 else 1),
        )


def _cache_home() -> str:
    return os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")


def _parse(key: str, text: str, default: Any) -> Any:
    try:
        if isinstance(default, bool):
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[
                text.strip().lower()
            ]
        if isinstance(default, tuple):
            return tuple(part.strip() for part in text.split(",") if part.strip())
        return type(default)(text)
    except (KeyError, ValueError):
        kind = type(default).__name__
        raise ConfigError(f"{key}={text!r} is not a {kind}") from None
