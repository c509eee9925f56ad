"""Trials on real devices: proven paths and rates, what the doctor sees, and what is kept."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvferry import Engine, EngineConfig
from kvferry.doctor.devices import look_in_child
from kvferry.engine import PROCESS
from kvferry.trials import cache
from kvferry.trials.run import run_and_keep

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Every pair among host memory and the first two devices, tried once."""
    facts = look_in_child()
    assert not facts.missing
    places = ["host", *(gpu.uuid for gpu in facts.seen[:2])]
    pairs = [(a, b) for a in places for b in places]
    directory = str(tmp_path_factory.mktemp("cache"))
    outcome = run_and_keep(directory, pairs, again=True, limit_s=300.0, say=print)
    for trial in outcome.new:
        print(
            f"{trial.path:14} {trial.local[:12]:12} {trial.remote[:12]:12} "
            f"{trial.bytes_per_s / 1e9:8.1f} GB/s {trial.latency_s * 1e6:8.0f} us  {trial.why}"
        )
    return facts, pairs, directory, outcome


def test_every_pair_is_served_by_a_proven_path(kept):
    _, pairs, _, outcome = kept
    assert (outcome.problem, outcome.failed, outcome.notes) == ("", {}, [])
    for pair in pairs:
        for direction in ("pull", "push"):
            best = outcome.plans[(*pair, direction)].paths[0]
            assert " in a trial on " in best.reason, best


def test_within_one_device_nothing_fails_and_cuda_ipc_serves(kept):
    facts, _, _, outcome = kept
    gpu = facts.seen[0].uuid
    inside = [trial for trial in outcome.new if (trial.local, trial.remote) == (gpu, gpu)]
    assert {trial.transport for trial in inside} == {"cuda_ipc", "staged", "tcp"}
    assert [trial for trial in inside if trial.why] == []
    assert outcome.plans[gpu, gpu, "pull"].paths[0].name == "cuda_ipc/pull"


def test_an_engine_uses_what_was_kept(kept, engine_directory, cuda):
    facts, _, directory, outcome = kept
    assert len(cache.load(directory)) == len(outcome.book)
    cuda.use(0)
    gpu = facts.seen[0].uuid
    config = {"directory": engine_directory, "cache_dir": directory}
    with Engine(EngineConfig(**config)) as near:
        PROCESS.renew()  # As if the other engine had a process of its own; nothing is moved.
        with Engine(EngineConfig(**config)) as far:
            owned = far.allocate(1 << 20, device=gpu)
            local = near.allocate(1 << 20, device=gpu)
            plan = near.plan(local, near.connect(far.addresses[0]).region(owned.ref))
    staged = next(path for path in plan.paths if path.transport == "staged")
    assert " in a trial on " in staged.reason


@pytest.mark.parametrize("arguments", [["doctor"], ["explain", "cuda:0", "cuda:0"]], ids=" ".join)
def test_commands_tell_about_this_machine(kept, arguments):
    facts, _, directory, _ = kept
    done = subprocess.run(
        [sys.executable, "-m", "kvferry.cli.main", *arguments],
        env={**os.environ, "KVFERRY_CACHE_DIR": directory},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    assert "cuda_ipc/pull" in done.stdout
    if arguments == ["doctor"]:
        assert facts.seen[0].uuid in done.stdout
