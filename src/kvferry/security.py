"""What the settings mean for who may talk to an engine: keys, certificates, where it listens."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections import deque

from kvferry import sockets
from kvferry.config import EngineConfig
from kvferry.errors import ConfigError
from kvferry.protocol.auth import Keys
from kvferry.tls import Contexts, Tunnel

KEY_BYTES_MIN, KEY_BYTES_MAX = 16, 4096
KEYS_MAX = 2
_MAKE_ONE = "make a good one with: python -c 'import secrets; print(secrets.token_hex(32))'"


class Security:
    """The secrets of one engine. Raises ConfigError that names the setting, and shows no secret."""

    def __init__(self, config: EngineConfig) -> None:
        self.keys = _keys(config)
        self._contexts = _contexts(config)
        self._lane_secret = os.urandom(32)

    @property
    def has_tls(self) -> bool:
        return self._contexts is not None

    def tunnel(self, *, is_unix: bool, caller: bool) -> Tunnel | None:
        """TLS for a new connection; None where there is none. Unix sockets never leave the host."""
        if is_unix or self._contexts is None:
            return None
        return self._contexts.tunnel(caller=caller)

    def lane_key(self, incarnation: bytes) -> bytes:
        """What a peer must show to open a lane: each peer has one of its own."""
        return hmac.new(self._lane_secret, incarnation, hashlib.sha256).digest()[:16]

    def is_lane_key(self, incarnation: bytes, key: bytes) -> bool:
        return hmac.compare_digest(self.lane_key(incarnation), key)

    def check_listen(self, config: EngineConfig, host: str) -> None:
        """Raise ConfigError when strangers could reach the engine and nothing would stop them."""
        if sockets.is_loopback(host) or self.keys or self.has_tls or config.insecure:
            return
        raise ConfigError(
            f"listen={config.listen}: beyond loopback anybody could read the KV cache",
            fix="set cluster_key (KVFERRY_CLUSTER_KEY or KVFERRY_CLUSTER_KEY_FILE) to the same "
            "secret on all engines, or tls_cert, tls_key and tls_ca; or listen on 127.0.0.1; or "
            "set insecure=True (KVFERRY_INSECURE=1) on a network that you trust",
        )


def _keys(config: EngineConfig) -> Keys | None:
    given, where = config.cluster_key, "cluster_key"
    if config.cluster_key_file:
        if given:
            raise ConfigError("cluster_key and cluster_key_file are both set", fix="set one")
        given, where = _read(config.cluster_key_file), "cluster_key_file"
    elif not given:
        return None
    keys = [given] if isinstance(given, bytes) else [part.encode() for part in given.split()]
    if not 1 <= len(keys) <= KEYS_MAX:
        raise ConfigError(
            f"{where} holds {len(keys)} keys: it must be one, or the new and the old one",
            fix=_MAKE_ONE,
        )
    for key in keys:
        if not KEY_BYTES_MIN <= len(key) <= KEY_BYTES_MAX:
            raise ConfigError(
                f"{where}: a key of {len(key)} bytes; it must have {KEY_BYTES_MIN} to "
                f"{KEY_BYTES_MAX}",
                fix=_MAKE_ONE,
            )
    return Keys(keys)


def _read(path: str) -> str:
    """The text of a key file that only this user, root or its group can read."""
    try:
        with open(path, "rb") as file:
            facts = os.fstat(file.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise ConfigError(f"cluster_key_file={path!r} is not a file")
            if facts.st_uid not in (0, os.getuid()) or facts.st_mode & 0o027:
                raise ConfigError(
                    f"cluster_key_file={path!r} can be read or replaced by others: it belongs to "
                    f"user {facts.st_uid} and has mode {stat.S_IMODE(facts.st_mode):04o}",
                    fix="chmod 600 it; for a Kubernetes secret set defaultMode: 0400",
                )
            return file.read(4 * KEY_BYTES_MAX).decode("ascii")
    except OSError as error:
        raise ConfigError(f"cluster_key_file={path!r}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"cluster_key_file={path!r} is not text", fix=_MAKE_ONE) from None


def _contexts(config: EngineConfig) -> Contexts | None:
    files = {name: getattr(config, name) for name in ("tls_cert", "tls_key", "tls_ca")}
    missing = [name for name, path in files.items() if not path]
    if len(missing) == len(files):
        return None
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} must be set too: TLS is mutual",
            fix="set tls_cert, tls_key and tls_ca, each to a PEM file",
        )
    return Contexts(*files.values())


class Sparing:
    """Decides which of many like records are logged: a flood must not fill the disk.

    burst: so many per ``per_s`` seconds pass.
    """

    def __init__(self, burst: int = 10, per_s: float = 10.0) -> None:
        self._per_s = per_s
        self._passed: deque[float] = deque(maxlen=burst)
        self._left_out = 0

    def passes(self, now: float) -> tuple[bool, int]:
        """Whether to log one at ``now``, and how many were left out since the last that passed."""
        full = len(self._passed) == self._passed.maxlen
        if full and now - self._passed[0] < self._per_s:
            self._left_out += 1
            return False, self._left_out
        self._passed.append(now)
        left_out, self._left_out = self._left_out, 0
        return True, left_out
