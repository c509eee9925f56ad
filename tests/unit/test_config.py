"""Settings: where they come from, and that each bad one is named."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from kvferry.config import SECONDS_MAX, EngineConfig
from kvferry.errors import ConfigError

NUMBERS = [
    field.name
    for field in fields(EngineConfig)
    if isinstance(field.default, (int, float)) and not isinstance(field.default, bool)
]
SECONDS = [name for name in NUMBERS if name.endswith("_s")]


def test_the_defaults_are_good() -> None:
    assert EngineConfig.from_environment({}) == EngineConfig()


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("NAME", "prefill-0", "prefill-0"),
        ("TRANSPORTS", "shm, tcp,", ("shm", "tcp")),
        ("TRANSPORTS", "", ()),
        ("LISTEN", "", ""),
        ("INSECURE", "Yes ", True),
        ("INSECURE", "1", True),
        ("INSECURE", "false", False),
        ("HEARTBEAT_S", "0.5", 0.5),
        ("LOST_S", "9", 9.0),
        ("PEERS_MAX", "12", 12),
        ("COPY_THREADS", "0", 0),
    ],
)
def test_the_environment_sets_a_field(key: str, text: str, value: Any) -> None:
    config = EngineConfig.from_environment({"KVFERRY_" + key: text, "OTHER": "x"})
    found = getattr(config, key.lower())
    assert (found, type(found)) == (value, type(value))


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_NAME", "from-outside")
    assert EngineConfig.from_environment().name == "from-outside"


def test_the_cluster_key_is_never_shown() -> None:
    config = EngineConfig.from_environment({"KVFERRY_CLUSTER_KEY": "a secret of sixteen"})
    assert config.cluster_key == "a secret of sixteen"
    assert "secret" not in repr(config.with_defaults())


def test_an_argument_wins_and_hides_a_bad_value() -> None:
    config = EngineConfig.from_environment({"KVFERRY_LOST_S": "soon"}, lost_s=7.0)
    assert config.lost_s == 7.0


def test_every_field_can_be_set_by_the_environment() -> None:
    good = {bool: "yes", float: "30", int: "64", str: "x", tuple: "tcp"}
    for field in fields(EngineConfig):
        text = {"checksum": "full"}.get(field.name, good[type(field.default)])
        if field.name.endswith("ring_bytes"):
            text = "8192"
        key = "KVFERRY_" + field.name.upper()
        others = {"lost_s": 100.0} if field.name == "heartbeat_s" else {}
        found = getattr(EngineConfig.from_environment({key: text}, **others), field.name)
        assert found != field.default or field.name in ("transfer_s",)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("INSECURE", "maybe"), ("INSECURE", ""), ("LOST_S", "soon"), ("LOST_S", ""),
        ("PEERS_MAX", "1.5"), ("PEERS_MAX", "many"), ("RING_BYTES", "1MiB"),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_kind_names_its_variable(key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^KVFERRY_{key}={text!r} is not a "):
        EngineConfig.from_environment({"KVFERRY_" + key: text})


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [-1, 0])
def test_a_number_out_of_range_names_its_field(name: str, value: int) -> None:
    if value == 0 and name in ("copy_threads", "split_lanes", "device_blocks"):
        return
    with pytest.raises(ConfigError, match=f"^{name}={value}: must be greater than 0"):
        EngineConfig(**{name: value})


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e400", "1000001"])
def test_a_time_that_no_message_can_carry_names_its_field(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}="):
        EngineConfig.from_environment({"KVFERRY_" + name.upper(): text})


def test_the_longest_time_is_what_a_message_may_carry() -> None:
    from kvferry.protocol import messages

    [limit] = messages.Seconds.__metadata__
    assert limit.le == SECONDS_MAX


@pytest.mark.parametrize(
    "values",
    [{"heartbeat_s": 3.0}, {"lost_s": 1.9}, {"heartbeat_s": 1.0, "lost_s": 1.0}],
    ids=str,
)
def test_one_lost_heart_beat_must_not_end_a_session(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"lost_s=.* with heartbeat_s=") as caught:
        EngineConfig(**values)
    assert "twice" in caught.value.fix


@pytest.mark.parametrize(
    "values",
    [{"ring_bytes": 4095}, {"ring_bytes": (1 << 30) + 1}, {"ring_slots": 1}, {"ring_slots": 1025}],
    ids=str,
)
def test_a_ring_out_of_range_names_its_fields(values: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        EngineConfig(**values)


def test_empty_fields_are_filled_from_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    filled = EngineConfig().with_defaults()
    assert filled.directory.startswith("/run/user/7/kvferry-")
    assert filled.name.startswith("engine-")
    assert 1 <= filled.copy_threads <= 4
    assert 1 <= filled.split_lanes <= 2
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert EngineConfig().with_defaults().cache_dir == "/caches/kvferry"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/homes/7")
    assert EngineConfig().with_defaults().cache_dir == "/homes/7/.cache/kvferry"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert EngineConfig().with_defaults().directory.startswith("/tmp/kvferry-")


def test_what_was_given_is_kept() -> None:
    given = EngineConfig(name="n", directory="/d", copy_threads=9, split_lanes=3, cache_dir="/c")
    assert given.with_defaults() == given
