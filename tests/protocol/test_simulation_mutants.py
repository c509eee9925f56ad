"""Bugs that are seeded on purpose: the simulation finds each of them, and makes its story short."""

from __future__ import annotations

import pytest
from mutants import MUTANTS, free_targets_at_abort

from kvferry.testing.simulation import Report, World, make_plan, shrink, story

SEEDS_MAX = 200
STEPS = 80


def first_failure(name: str) -> Report | None:
    runs = (World(make_plan(seed, STEPS), MUTANTS[name]).run() for seed in range(SEEDS_MAX))
    return next((report for report in runs if report.violation is not None), None)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_seeded_bug_is_found(name: str) -> None:
    assert first_failure(name) is not None, f"{SEEDS_MAX} seeds do not find it"


@pytest.mark.slow
def test_a_failure_is_made_short_and_told_in_words() -> None:
    report = first_failure("free the target blocks at abort")
    assert report is not None
    assert report.violation is not None
    shortest = shrink(report, free_targets_at_abort, tries_max=80)
    assert shortest.violation is not None
    assert shortest.violation.check == report.violation.check
    assert len(shortest.plan.actions) <= 5
    told = story(shortest)
    assert "Wrong" in told
    assert f"request {shortest.plan.actions[0].number} (" in told


def test_only_a_failure_can_be_shrunk() -> None:
    with pytest.raises(ValueError, match="failing"):
        shrink(World(make_plan(0, 3)).run())
