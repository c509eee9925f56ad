"""Many hand-offs through faults, in virtual time: nothing is wrong, and a run is its seed."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from kvferry.cli.main import cli
from kvferry.testing.simulation import World, make_plan

SEEDS = 120
STEPS = 120


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEEDS, 20))
def test_nothing_is_wrong(first: int) -> None:
    loaded = 0
    for seed in range(first, first + 20):
        report = World(make_plan(seed, STEPS)).run()
        assert report.violation is None, f"kvferry chaos --seed {seed} --steps {STEPS}"
        loaded += report.counts["claim loaded"]
    assert loaded > 400, "faults left hardly a hand-off"


@pytest.mark.slow
def test_every_kind_of_end_is_seen() -> None:
    counts: set[str] = set()
    for seed in range(20):
        counts |= World(make_plan(seed, STEPS)).run().counts.keys()
    ends = ["delivered", "cancelled", "expired", "released", "peer_lost"]
    assert {f"offer {end}" for end in ends} <= counts
    ends = ["loaded", "deadline", "peer_lost", "unreachable", "expired", "transfer", "aborted"]
    assert {f"claim {end}" for end in ends} <= counts


def test_the_same_seed_is_the_same_run() -> None:
    first, again, other = (World(make_plan(seed, 30)).run() for seed in (5, 5, 6))
    assert first.trace_hash == again.trace_hash != other.trace_hash
    assert first.trace == again.trace


def test_the_command_tells_the_trace() -> None:
    runs = [
        CliRunner().invoke(cli, ["chaos", "--seed", "5", "--steps", "30", "--json"])
        for _ in range(2)
    ]
    assert [run.exit_code for run in runs] == [0, 0]
    told = [json.loads(run.output) for run in runs]
    assert told[0]["trace"] == told[1]["trace"] == World(make_plan(5, 30)).run().trace_hash
    assert told[0]["handoffs"] > 10
    assert told[0]["violations"] == []
