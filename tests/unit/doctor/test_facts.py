"""Facts of this very machine, and of one that lacks everything."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry import Engine, EngineConfig
from kvferry.doctor import facts
from kvferry.doctor.facts import gather
from kvferry.doctor.records import DeviceFacts, Facts


def look(directory: str) -> Facts:
    return gather(EngineConfig(directory=directory), DeviceFacts)


def test_this_machine(tmp_path: Path) -> None:
    found = look(str(tmp_path))
    assert found.memory.ram >= found.memory.ram_free > 0
    assert found.memory.descriptors_max > 0
    assert {nic.name for nic in found.links.nics} >= {"lo"}
    [lo] = [nic for nic in found.links.nics if nic.name == "lo"]
    assert (lo.is_up, lo.addresses[:1]) == (True, ("127.0.0.1",))
    assert dict(found.process.namespaces)["pid"].isdecimal()
    assert dict(found.software.packages)["numpy"]
    assert (found.run.problem, found.run.is_set) == ("", True)
    json.dumps(dataclasses.asdict(found))


def test_a_machine_that_lacks_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(facts, "_text", lambda _: "")
    with monkeypatch.context() as patch:
        for name in ("statvfs", "memfd_create", "readlink"):
            patch.setattr(os, name, refuse)
        found = look(str(tmp_path))
    assert (found.memory.ram, found.memory.shm) == (0, 0)
    assert found.memory.memfd == "memfd_create: Function not implemented"
    assert found.process.namespaces == ()
    assert (found.process.ptrace_scope, found.process.seccomp) == (-1, -1)


def test_live_and_dead_engines_are_told_apart(
    make_engine: Callable[..., Engine], engine_directory: str
) -> None:
    engine = make_engine("here")
    path = os.path.join(engine_directory, "dead.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(path)
    run = look(engine_directory).run
    [live] = run.engines
    assert (live.pid, live.state) == (os.getpid(), "live")
    assert live.address in engine.addresses
    assert run.dead == 1
    os.unlink(path)


def test_a_stopped_engine_is_told(
    make_engine: Callable[..., Engine], engine_directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_engine("here")
    monkeypatch.setattr(facts, "is_stopped", lambda pid: pid == os.getpid())
    assert [engine.state for engine in look(engine_directory).run.engines] == ["stopped"]


def test_directories_that_cannot_be_used_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert look(str(open_to_all)).run.problem == "other users can write to it"
    assert look(str(tmp_path / ("x" * 100))).run.problem.startswith("its path is too long")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        problems = [look(str(path)).run.problem for path in (tmp_path, tmp_path / "a" / "b")]
    assert problems[0] == "this user cannot write to it"
    assert problems[1] == f"it does not exist, and this user cannot write to {tmp_path}"


def test_a_directory_of_somebody_else_is_told() -> None:
    other = os.getuid() + 1
    assert facts._distrust(other, 0o40700) == f"it belongs to user {other}"
    assert facts._distrust(0, 0o40700) == facts._distrust(os.getuid(), 0o41777) == ""


def test_a_container_shows_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_text", lambda path: "0::/kubepods/x" if "cgroup" in path else "")
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "exists", lambda path: path == "/.dockerenv")
        signs = facts._container_signs({"container": "podman", "OTHER": "1"})
    assert signs == ("/.dockerenv", "container", "/proc/1/cgroup names kubepods")
