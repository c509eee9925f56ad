"""Settings to secrets: what is accepted, what is refused and how, and that nothing is shown."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kvferry.config import EngineConfig
from kvferry.errors import ConfigError, UsageError
from kvferry.security import Security, Sparing

KEY = "0123456789abcdef"
OTHER = "fedcba9876543210"


def proof(**settings: Any) -> list[bytes]:
    """What the keys of such settings prove, the first key first."""
    keys = Security(EngineConfig(**settings)).keys
    assert keys is not None
    return [keys.prove("caller", [b"x"], which) for which in range(len(keys._keys))]


def key_file(folder: Path, text: str = KEY + "\n", mode: int = 0o600) -> str:
    path = folder / "cluster.key"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_without_settings_there_is_neither_key_nor_tls() -> None:
    security = Security(EngineConfig())
    assert security.keys is None
    assert not security.has_tls
    assert security.tunnel(is_unix=False, caller=True) is None


def test_text_bytes_and_a_file_are_the_same_key(tmp_path: Path) -> None:
    wanted = proof(cluster_key=KEY)
    assert proof(cluster_key=KEY.encode()) == wanted
    assert proof(cluster_key=f"\n {KEY}\n") == wanted
    assert proof(cluster_key_file=key_file(tmp_path)) == wanted


def test_two_keys_are_the_one_to_use_and_one_more(tmp_path: Path) -> None:
    wanted = [*proof(cluster_key=KEY), *proof(cluster_key=OTHER)]
    assert proof(cluster_key=f"{KEY} {OTHER}") == wanted
    assert proof(cluster_key_file=key_file(tmp_path, f"{KEY}\n{OTHER}\n")) == wanted


@pytest.mark.parametrize(
    ("key", "text"),
    [("short", "a key of 5 bytes"), (b"short", "a key of 5 bytes"), ("x" * 4097, "4097 bytes"),
     (f"{KEY} {OTHER} {KEY}", "holds 3 keys"), (f"{KEY} short", "a key of 5 bytes"),
     (" \n", "holds 0 keys")],
    ids=repr,
)  # fmt: skip
def test_a_bad_key_is_named_and_not_shown(key: str | bytes, text: str) -> None:
    with pytest.raises(ConfigError, match=r"^cluster_key") as caught:
        Security(EngineConfig(cluster_key=key))
    assert text in str(caught.value)
    assert "token_hex(32)" in caught.value.fix
    shown = str(caught.value)
    assert not any(part in shown for part in (KEY, OTHER, "short"))


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620, 0o602, 0o666])
def test_a_file_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="by others") as caught:
        Security(EngineConfig(cluster_key_file=key_file(tmp_path, mode=mode)))
    assert f"{mode:04o}" in str(caught.value)
    assert "chmod 600" in caught.value.fix


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440])
def test_a_file_for_the_user_or_its_group_is_good(tmp_path: Path, mode: int) -> None:
    assert proof(cluster_key_file=key_file(tmp_path, mode=mode))


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    for path in (str(tmp_path), str(tmp_path / "missing"), "/dev/null"):
        with pytest.raises(ConfigError, match="cluster_key_file="):
            Security(EngineConfig(cluster_key_file=path))
    with pytest.raises(ConfigError, match="holds 0 keys"):
        Security(EngineConfig(cluster_key_file=key_file(tmp_path, "")))
    (tmp_path / "binary").write_bytes(b"\xff" * 40)
    (tmp_path / "binary").chmod(0o600)
    with pytest.raises(ConfigError, match="is not text"):
        Security(EngineConfig(cluster_key_file=str(tmp_path / "binary")))


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = key_file(tmp_path)
    os.truncate(path, 1 << 40)
    with pytest.raises(ConfigError, match="cluster_key_file"):
        Security(EngineConfig(cluster_key_file=path))


def test_key_and_file_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="both set"):
        Security(EngineConfig(cluster_key=KEY, cluster_key_file=key_file(tmp_path)))


@pytest.mark.parametrize("given", [("tls_cert",), ("tls_key", "tls_ca"), ("tls_cert", "tls_key")])
def test_tls_by_halves_names_what_is_missing(given: tuple[str, ...]) -> None:
    missing = {"tls_cert", "tls_key", "tls_ca"} - set(given)
    with pytest.raises(ConfigError, match="must be set too") as caught:
        Security(EngineConfig(**dict.fromkeys(given, "/x.pem")))
    assert all(name in caught.value.message for name in missing)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.5", "::", "a-name", "127.0.0.1.example"])
def test_beyond_loopback_something_must_be_set(host: str) -> None:
    bare = EngineConfig(listen=f"[{host}]:7600" if ":" in host else f"{host}:7600")
    with pytest.raises(UsageError, match="beyond loopback") as caught:
        Security(bare).check_listen(bare, host)
    for remedy in ("KVFERRY_CLUSTER_KEY", "tls_cert", "KVFERRY_INSECURE=1", "127.0.0.1"):
        assert remedy in caught.value.fix
    for settings in ({"cluster_key": KEY}, {"insecure": True}):
        config = EngineConfig(listen=bare.listen, **settings)
        Security(config).check_listen(config, host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_on_loopback_nothing_need_be_set(host: str) -> None:
    Security(EngineConfig()).check_listen(EngineConfig(), host)


def test_each_peer_has_a_lane_key_of_its_own() -> None:
    security, other = Security(EngineConfig()), Security(EngineConfig())
    a, b = b"a" * 16, b"b" * 16
    assert security.is_lane_key(a, security.lane_key(a))
    assert not security.is_lane_key(b, security.lane_key(a))
    assert not other.is_lane_key(a, security.lane_key(a))
    assert not security.is_lane_key(a, bytes(16))
    assert len(security.lane_key(a)) == 16


def test_a_flood_of_records_is_thinned_and_counted() -> None:
    sparing = Sparing(burst=2, per_s=10.0)
    assert [sparing.passes(now) for now in (0.0, 1.0)] == [(True, 0), (True, 0)]
    assert [sparing.passes(now)[0] for now in (2.0, 3.0, 9.9)] == [False] * 3
    assert sparing.passes(10.0) == (True, 3)
    assert not sparing.passes(10.5)[0]
    assert sparing.passes(11.0) == (True, 1)
