"""Findings: each has a cause, none comes without one, and the worst are first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvferry.doctor.findings import LEVELS, find, fix_of, missed, name_of, size
from kvferry.doctor.records import DeviceFacts, Facts, Gpu, LiveEngine, PeerClaim, RunFacts, Service
from kvferry.planner import PairFacts, Plan, RankedPath, TransportFacts, Tried, rank
from kvferry.transports import Capabilities
from kvferry.trials.records import HOST, Trial

from .systems import LAPTOP

A, B = "GPU-1", "GPU-2"
LATE = "the limit of 1 s passed before every pair was reached"
GPUS = DeviceFacts(driver="570", gpus=(Gpu(A, "x", 0), Gpu(B, "x", 1)))
WITH_GPUS = replace(LAPTOP, devices=GPUS)
GOOD = Service(HOST, HOST, pull=Plan((RankedPath("shm", "pull", 1.0, "fine"),), {}))


def titles(
    facts: Facts, services: tuple[Service, ...] = (GOOD,), trials: tuple[Trial, ...] = ()
) -> list[tuple[str, str]]:
    found = find(facts, services, trials)
    assert [LEVELS.index(item.level) for item in found] == sorted(
        LEVELS.index(item.level) for item in found
    )
    return [(item.level, item.title) for item in found if item.title != "no RDMA device"]


def test_a_plain_machine_has_nothing_wrong() -> None:
    assert titles(LAPTOP) == []
    assert titles(WITH_GPUS) == []


def test_wrong_bytes_are_the_worst_and_one_finding_for_all_pairs() -> None:
    trials = tuple(
        Trial("cuda_ipc", "pull", a, b, 1.8e9, why="brought zeros", is_wrong=True)
        for a, b in ((A, B), (B, A))
    )
    hung = Trial("tcp", "pull", HOST, HOST, 1.8e9, why="did not end within 45 s")
    good = Trial("shm", "pull", HOST, HOST, 1.8e9, bytes_per_s=1e9)
    assert titles(WITH_GPUS, trials=(hung, good, *trials)) == [
        (
            "error",
            "cuda_ipc/pull between cuda:0 and cuda:1, cuda:1 and cuda:0: "
            "a trial on 2027-01-15 brought zeros",
        ),
        (
            "warning",
            "tcp/pull between host and host: a trial on 2027-01-15 did not end within 45 s",
        ),
    ]


def test_a_pair_that_nothing_serves_is_an_error_and_an_unknown_one_a_warning() -> None:
    none = Service(A, HOST, pull=Plan((), {"tcp": "not enabled here"}), push=Plan((), {}))
    unknown = [Service(a, b, why=LATE) for a, b in ((HOST, A), (A, B))]
    found = find(WITH_GPUS, [GOOD, *unknown, none], [])[:2]
    assert [(item.level, item.title, item.why) for item in found] == [
        ("error", "no path serves bytes from cuda:0 to host", "tcp: not enabled here"),
        (
            "warning",
            "paths are not known: host -> cuda:0, cuda:0 -> cuda:1",
            LATE,
        ),
    ]
    assert "--limit-s" in found[1].fix


def test_engines_that_do_not_run_are_told() -> None:
    engines = (LiveEngine("unix:/a", 7), LiveEngine("unix:/b", 8, "stopped"))
    facts = replace(LAPTOP, run=RunFacts("/run/x", engines=engines))
    assert titles(facts) == [("warning", "the engine at unix:/b is stopped (process 8)")]


@pytest.mark.parametrize(
    ("devices", "fix"),
    [
        ({"missing": "cuda-bindings cannot be imported"}, "pip install 'kvferry[cuda]'"),
        ({"missing": "this process sees no GPU", "visible": ""}, "CUDA_VISIBLE_DEVICES=''"),
        ({"missing": "no usable NVIDIA driver"}, "--gpus all"),
    ],
)
def test_gpus_that_cannot_be_used_have_a_fix_each(devices: dict[str, str], fix: str) -> None:
    facts = replace(LAPTOP, devices=replace(GPUS, **devices))  # type: ignore[arg-type]
    [found] = [item for item in find(facts, [GOOD], []) if item.level == "error"]
    assert found.title == "there are GPUs, and this process can use none"
    assert fix in found.fix


def test_only_claims_that_say_no_are_told() -> None:
    claims = (PeerClaim(A, B, "no"), PeerClaim(B, A))
    facts = replace(LAPTOP, devices=replace(GPUS, claims=claims))
    assert titles(facts) == [("note", "GPUs without peer access: cuda:0 from cuda:1")]


def test_reasons_in_the_nature_of_a_pair_have_no_fix() -> None:
    plan = Plan(
        (),
        {
            "inproc": "the engines are in different processes",
            "shm": "cannot touch cuda memory, and the local region is cuda",
            "staged": "no Unix socket is shared with the peer: ...",
            "cuda_ipc": "a trial on 2026-05-31 brought zeros",
            "x": "the engines are on different hosts",
        },
    )
    found = missed(plan)
    assert [name for name, _, _ in found] == ["staged", "cuda_ipc", "x"]
    assert "KVFERRY_DIRECTORY" in found[0][2]
    assert "NCCL_P2P_DISABLE" in found[1][2]
    assert (fix_of("something new"), found[2][2]) == (None, "")


def test_the_planner_still_gives_the_reasons_that_fixes_are_for() -> None:
    """Fixes are found by words of reasons; these are written elsewhere."""
    pair = PairFacts(HOST, HOST, False, False, True, False, "read")
    offered = [
        TransportFacts("a", Capabilities("mapped", needs_unix=True)),
        TransportFacts("b", Capabilities("streamed"), remote="the peer has not enabled it"),
        TransportFacts("c", Capabilities("streamed")),
    ]
    trials = {("c", "pull"): Tried("2026-05-31", why="failed: something")}
    plan = rank(pair, offered, nbytes=1, spans=1, trials=trials)
    assert [name for name, _, fix in missed(plan) if fix] == ["a", "b", "c"]


def test_places_have_names() -> None:
    facts = replace(LAPTOP, devices=replace(GPUS, gpus=(Gpu(A, "x", 3), Gpu(B, "x"))))
    names = [name_of(facts, place) for place in (A, B, HOST, "tcp://h:1")]
    assert names == ["cuda:3", "GPU-2 (hidden)", "host", "tcp://h:1"]


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (64 << 20, "64 MiB"), (3 << 50, "3072 TiB")],
)
def test_sizes_read_well(nbytes: int, text: str) -> None:
    assert size(nbytes) == text
