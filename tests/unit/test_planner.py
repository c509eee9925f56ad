"""The plan: each reason to reject, the order by size and measurement, and how it reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.planner import SAMPLES_MAX, SAMPLES_MIN, PairFacts, Rate, TransportFacts, Tried, rank
from kvferry.transports.base import Capabilities

PAIR = PairFacts(
    local_kind="host",
    remote_kind="host",
    write=False,
    same_process=True,
    same_host=True,
    unix=True,
    remote_access="read-write",
)
QUICK = Capabilities("mapped", latency_s=1e-6, bytes_per_s=1e9, span_s=0)
WIDE = Capabilities("streamed", latency_s=1e-3, bytes_per_s=1e10, span_s=1e-6)


def facts(name: str = "t", capabilities: Capabilities = QUICK, **why: str) -> TransportFacts:
    return TransportFacts(name, capabilities, **why)


def order(nbytes: int, *, spans: int = 1, pair: PairFacts = PAIR, **known: Any) -> list[str]:
    offered = [facts("quick", QUICK), facts("wide", WIDE)]
    return [p.transport for p in rank(pair, offered, nbytes=nbytes, spans=spans, **known).paths]


def measured(bytes_per_s: float) -> Rate:
    return Rate((bytes_per_s,) * SAMPLES_MIN)


def can(**changes: Any) -> Capabilities:
    return replace(QUICK, **changes)


@pytest.mark.parametrize(
    ("pair", "transport", "sentence"),
    [
        ({"allowed": ("tcp", "shm")}, facts(), "not enabled here: transports=tcp,shm"),
        ({}, facts(local="no driver"), "not usable here: no driver"),
        ({}, facts(remote="no driver"), "not usable on the peer: no driver"),
        (
            {"local_kind": "cuda"}, facts(),
            "cannot touch cuda memory, and the local region is cuda",
        ),
        (
            {"remote_kind": "cuda"}, facts(),
            "cannot touch cuda memory, and the remote region is cuda",
        ),
        (
            {"write": True}, facts(capabilities=can(push=False)),
            "cannot push, and the local side is the source",
        ),
        ({}, facts(capabilities=can(pull=False)), "cannot pull, and the local side is the target"),
        (
            {"write": True, "remote_access": "read"}, facts(),
            "the remote region is registered for reading only",
        ),
        (
            {"same_process": False}, facts(capabilities=can(same_process=True)),
            "the engines are in different processes",
        ),
        (
            {"same_host": False}, facts(capabilities=can(same_host=True)),
            "the engines are on different hosts",
        ),
        (
            {"unix": False}, facts(capabilities=can(needs_unix=True)),
            "no Unix socket is shared with the peer: mount one directory into both containers and "
            "name it by KVFERRY_DIRECTORY",
        ),
        ({}, facts(blocked="the peer exported nothing"), "the peer exported nothing"),
    ],
)  # fmt: skip
def test_each_reason_to_reject_is_a_sentence(
    pair: dict[str, Any], transport: TransportFacts, sentence: str
) -> None:
    plan = rank(replace(PAIR, **pair), [transport], nbytes=1, spans=1)
    assert (plan.paths, plan.rejected) == ((), {"t": sentence})


def test_what_the_pair_needs_not_is_no_reason_to_reject() -> None:
    pair = replace(PAIR, same_process=False, same_host=False, unix=False, remote_access="read")
    pull_only, push_only = can(push=False), can(pull=False)
    assert rank(pair, [facts(capabilities=pull_only)], nbytes=1, spans=1).paths
    writing = replace(pair, write=True, remote_access="read-write")
    assert rank(writing, [facts(capabilities=push_only)], nbytes=1, spans=1).paths
    assert rank(replace(pair, allowed=("t",)), [facts()], nbytes=1, spans=1).paths


def test_short_transfers_take_the_quick_path_and_long_ones_the_wide() -> None:
    assert order(1000) == ["quick", "wide"]
    assert order(1 << 30) == ["wide", "quick"]


def test_many_pieces_count_against_a_path_that_pays_for_each() -> None:
    assert order(100 << 20, spans=1) == ["wide", "quick"]
    assert order(100 << 20, spans=1 << 20) == ["quick", "wide"]


def test_a_measured_speed_replaces_the_expectation() -> None:
    rates = {("quick", "pull"): measured(1e11), ("wide", "push"): measured(1e15)}
    assert order(1 << 30, rates=rates) == ["quick", "wide"]
    rates = {("wide", "pull"): measured(1e8)}
    plan = rank(PAIR, [facts("wide", WIDE)], nbytes=10**9, spans=1, rates=rates)
    assert plan.paths[0].reason == "0.1 GB/s measured in use, 10001.0 ms for this size"
    assert plan.paths[0].expected_s == pytest.approx(10.001001)


def test_a_path_that_failed_a_trial_is_rejected_and_says_so() -> None:
    lied = Tried("2026-05-31", why="brought zeros")
    trials = {("quick", "pull"): lied, ("wide", "push"): lied}
    plan = rank(PAIR, [facts("quick"), facts("wide", WIDE)], nbytes=1, spans=1, trials=trials)
    assert [path.transport for path in plan.paths] == ["wide"]
    assert plan.rejected == {"quick": "a trial on 2026-05-31 brought zeros"}
    # Why a path cannot be tried at all says more than what a trial once showed.
    plan = rank(PAIR, [facts("quick", blocked="no way")], nbytes=1, spans=1, trials=trials)
    assert plan.rejected == {"quick": "no way"}


def test_the_speed_of_a_trial_counts_until_the_path_was_measured_in_use() -> None:
    trials = {("quick", "pull"): Tried("2026-05-31", 4e9)}
    [path] = rank(PAIR, [facts("quick")], nbytes=1 << 30, spans=1, trials=trials).paths
    assert path.reason.startswith("4 GB/s in a trial on 2026-05-31, ")
    few = {("quick", "pull"): Rate((1e9,) * (SAMPLES_MIN - 1))}
    [path] = rank(PAIR, [facts("quick")], nbytes=1, spans=1, trials=trials, rates=few).paths
    assert path.reason.startswith("4 GB/s in a trial")
    rates = {("quick", "pull"): measured(2e9)}
    [path] = rank(PAIR, [facts("quick")], nbytes=1, spans=1, trials=trials, rates=rates).paths
    assert path.reason.startswith("2 GB/s measured in use")


def test_a_path_is_not_measured_by_too_few_transfers() -> None:
    rates = {("quick", "pull"): Rate((1e12,) * (SAMPLES_MIN - 1))}
    assert order(1 << 30, rates=rates) == ["wide", "quick"]


def test_the_best_of_the_latest_transfers_counts() -> None:
    rate = Rate()
    for speed in [9e9, *[1e9] * (SAMPLES_MAX - 1)]:
        rate = rate.with_sample(speed)
    assert rate.bytes_per_s == 9e9
    assert rate.with_sample(2e9).bytes_per_s == 2e9
    assert len(rate.with_sample(2e9).samples) == SAMPLES_MAX


def test_on_a_slow_machine_an_untried_path_is_expected_to_be_slow_too() -> None:
    slow = {("wide", "pull"): measured(5e8)}
    assert order(1 << 30, rates=slow) == ["wide", "quick"]
    [quick] = [
        path
        for path in rank(
            PAIR, [facts("quick"), facts("wide", WIDE)], nbytes=10**9, spans=1, rates=slow
        ).paths
        if path.transport == "quick"
    ]
    assert quick.expected_s == pytest.approx(20.0, rel=1e-3)


@pytest.mark.parametrize(
    ("bytes_per_s", "text"),
    [(1.76e12, "1760 GB/s"), (1e11, "100 GB/s"), (12.4e9, "12 GB/s"), (1.25e9, "1.2 GB/s")],
)
def test_speeds_are_written_as_people_write_them(bytes_per_s: float, text: str) -> None:
    transport = facts(capabilities=can(bytes_per_s=bytes_per_s))
    [path] = rank(PAIR, [transport], nbytes=1, spans=1).paths
    assert path.reason.startswith(text + " expected, ")


def test_a_path_that_failed_lately_is_last_but_still_there() -> None:
    demoted = {("quick", "pull"): "the peer unmapped it", ("wide", "push"): "not this direction"}
    assert order(1000, demoted=demoted) == ["wide", "quick"]
    reason = rank(PAIR, [facts("quick")], nbytes=1, spans=1, demoted=demoted).paths[0].reason
    assert reason.endswith("; tried last, because it failed lately: the peer unmapped it")


def test_two_that_failed_are_ranked_among_themselves() -> None:
    demoted = {("quick", "pull"): "x", ("wide", "pull"): "y"}
    assert order(1000, demoted=demoted) == ["quick", "wide"]
    assert order(1 << 30, demoted=demoted) == ["wide", "quick"]


def test_equal_paths_stay_in_the_order_they_were_named() -> None:
    plan = rank(PAIR, [facts("b"), facts("a")], nbytes=1, spans=1)
    assert [path.transport for path in plan.paths] == ["b", "a"]


def test_the_direction_says_whose_side_moves_the_bytes() -> None:
    for write, name in ((False, "t/pull"), (True, "t/push")):
        [path] = rank(replace(PAIR, write=write), [facts()], nbytes=1, spans=1).paths
        assert path.name == name


any_pair = st.builds(
    PairFacts,
    local_kind=st.sampled_from(["host", "cuda"]),
    remote_kind=st.sampled_from(["host", "cuda"]),
    write=st.booleans(),
    same_process=st.booleans(),
    same_host=st.booleans(),
    unix=st.booleans(),
    remote_access=st.sampled_from(["read", "read-write"]),
    allowed=st.sampled_from([(), ("a",), ("a", "b")]),
)
any_transport = st.builds(
    TransportFacts,
    name=st.sampled_from("abcdef"),
    capabilities=st.builds(
        Capabilities,
        family=st.just("mapped"),
        kinds=st.sampled_from([frozenset({"host"}), frozenset({"host", "cuda"})]),
        pull=st.booleans(),
        push=st.booleans(),
        same_process=st.booleans(),
        same_host=st.booleans(),
        needs_unix=st.booleans(),
    ),
    local=st.sampled_from(["", "", "broken"]),
    remote=st.sampled_from(["", "", "broken"]),
    blocked=st.sampled_from(["", "", "blocked"]),
)


@given(any_pair, st.lists(any_transport, max_size=6, unique_by=lambda t: t.name))
def test_every_transport_is_either_ranked_or_rejected_with_a_reason(
    pair: PairFacts, transports: list[TransportFacts]
) -> None:
    plan = rank(pair, transports, nbytes=4096, spans=3)
    ranked = {path.transport for path in plan.paths}
    assert ranked | plan.rejected.keys() == {transport.name for transport in transports}
    assert not ranked & plan.rejected.keys()
    assert all([*plan.rejected.values(), *(path.reason for path in plan.paths)])
    times = [path.expected_s for path in plan.paths]
    assert times == sorted(times)


def test_the_plan_reads_like_this() -> None:
    plan = rank(
        PAIR,
        [facts("quick"), facts("wide", WIDE), facts("odd"), facts("gone", local="no driver")],
        nbytes=200_000,
        spans=2,
        rates={("wide", "pull"): measured(2e9)},
        demoted={("odd", "pull"): "the peer died"},
    )
    assert plan.explain() == (
        "  chosen  quick/pull: 0.2 GB/s expected, 1.0 ms for this size\n"
        "   no. 2  wide/pull: 2 GB/s measured in use, 1.1 ms for this size\n"
        "   no. 3  odd/pull: 0.2 GB/s expected, 1.0 ms for this size; tried last, because it "
        "failed lately: the peer died\n"
        "rejected  gone: not usable here: no driver"
    )
    shown = plan.as_dict()
    assert shown["rejected"] == {"gone": "not usable here: no driver"}
    assert [path["path"] for path in shown["paths"]] == ["quick/pull", "wide/pull", "odd/pull"]  # type: ignore[attr-defined]


def test_an_empty_plan_says_nothing() -> None:
    assert rank(PAIR, [], nbytes=1, spans=1).explain() == ""
