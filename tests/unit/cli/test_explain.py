"""``kvferry doctor`` and ``kvferry explain``: arguments, exit status, and one real run of each."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.unit.doctor.systems import LAPTOP, systems

from kvferry import Engine
from kvferry.cli.main import cli
from kvferry.doctor.records import Facts
from kvferry.planner import Plan, RankedPath
from kvferry.trials import run as trials_run
from kvferry.trials.records import HOST, Trial, TrialBook
from kvferry.trials.run import Outcome

HIDDEN = "GPU-00000000-0000-0000-0000-000000000007"


class World:
    """Facts and an outcome in place of the machine's; what trials were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.facts: Facts = LAPTOP
        self.serves = True
        self.asked: list[tuple[list[tuple[str, str]], dict[str, Any]]] = []
        monkeypatch.setattr("kvferry.doctor.facts.gather", lambda _config: self.facts)
        monkeypatch.setattr(trials_run, "run_and_keep", self._run)

    def _run(self, directory: str, pairs: list[tuple[str, str]], **how: Any) -> Outcome:
        assert directory
        self.asked.append((pairs, how))
        outcome = Outcome(TrialBook())
        for a, b in pairs:
            for direction in ("pull", "push"):
                path = RankedPath("tcp", direction, 1.0, "fine")
                paths = (path,) if self.serves else ()
                outcome.plans[a, b, direction] = Plan(paths, {})
                outcome.book.add(Trial("tcp", direction, a, b, 1.8e9, 2e9, 1e-4))
        return outcome


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


@pytest.mark.parametrize("name", ["doctor", "explain"])
def test_the_status_says_whether_something_serves(world: World, name: str) -> None:
    done = run(name)
    assert done.exit_code == 0, done.output
    assert "tcp/pull, 2 GB/s, 100 us for 64 KiB, proven 2027-01-15" in done.output
    world.serves = False
    done = run(name)
    assert done.exit_code == 1
    assert "nothing serves it" in done.output


@pytest.mark.parametrize("name", ["doctor", "explain"])
def test_options_reach_the_trials(world: World, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_TRANSPORTS", "tcp")
    assert run(name).exit_code == 0
    assert run(name, "--no-trial", "--again", "--limit-s", "7", "--json").exit_code == 0
    (pairs, plain), (_, changed) = world.asked
    assert pairs == [(HOST, HOST)]
    keys = ("try_paths", "again", "limit_s", "transports")
    assert [plain[key] for key in keys] == [True, False, 120.0, ("tcp",)]
    assert [changed[key] for key in keys] == [False, True, 7.0, ("tcp",)]


@pytest.mark.usefixtures("world")
def test_json_has_everything() -> None:
    found = json.loads(run("doctor", "--json").output)
    assert found.keys() == {"facts", "paths", "findings", "notes"}
    assert found["facts"]["memory"]["ram"] == LAPTOP.memory.ram
    [path] = json.loads(run("explain", "host", "host", "--json").output)["paths"]
    assert (path["path"], path["proven"]["bytes_per_s"]) == ("tcp/pull", 2e9)


def test_a_hidden_gpu_is_explained_and_not_tried(world: World) -> None:
    world.facts = replace(
        LAPTOP, devices=replace(LAPTOP.devices, gpus=systems()["hidden-gpu"]().hidden, visible="0")
    )
    done = run("explain", "host", HIDDEN)
    assert done.exit_code == 1
    assert world.asked[0][0] == []
    assert "is hidden from this process, because CUDA_VISIBLE_DEVICES='0'" in done.output
    assert "  fix: let both processes see both GPUs" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["host"], "name two memories, or none"),
        (["host", "disk"], "there is no memory 'disk' here"),
        (["unix:/a", "tcp://h:1"], "one of the two may be a running engine"),
    ],
)
def test_mistakes_are_told(world: World, arguments: list[str], words: str) -> None:
    done = run("explain", *arguments)
    assert done.exit_code == 2
    assert words in done.output
    assert world.asked == []


@pytest.mark.parametrize("turned", [False, True])
def test_a_running_engine_is_explained(
    world: World,
    make_engine: Any,
    engine_directory: str,
    monkeypatch: pytest.MonkeyPatch,
    turned: bool,
) -> None:
    far: Engine = make_engine("far", "shm", "tcp")
    monkeypatch.setenv("KVFERRY_DIRECTORY", engine_directory)
    address = far.addresses[0]
    ends = [address, "host"] if turned else ["host", address]
    done = run("explain", *ends)
    assert done.exit_code == 0, done.output
    assert done.output.startswith(f"{ends[0]} -> {ends[1]}\n")
    assert "staged: not usable on the peer: the peer has not enabled it" in done.output
    assert "note: far at " in done.output
    assert world.asked[0][0] == [(HOST, HOST)]


@pytest.mark.slow
def test_the_doctor_examines_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("KVFERRY_TRANSPORTS", "tcp")
    monkeypatch.setenv("KVFERRY_CACHE_DIR", str(tmp_path))
    done = run("doctor", "--no-trial")
    assert done.exit_code == 0, done.output
    assert "host -> host" in done.output
    assert "tcp/pull, not proven" in done.output
    assert list(tmp_path.iterdir()) == []
