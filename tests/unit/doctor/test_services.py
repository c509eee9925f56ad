"""Which pairs are asked about, by which names, and what a running engine's hello says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from kvferry import Engine, EngineConfig
from kvferry.doctor import services
from kvferry.doctor.records import DeviceFacts, Gpu, LinkFacts
from kvferry.doctor.services import Met
from kvferry.errors import UnreachableError, UsageError
from kvferry.planner import Plan
from kvferry.transports import Capabilities
from kvferry.trials.records import HOST, Trial, TrialBook
from kvferry.trials.run import Outcome

from .systems import LAPTOP

A, B, C = "GPU-aaaa-1", "GPU-bbbb-2", "GPU-cccc-3"
FACTS = replace(
    LAPTOP,
    devices=DeviceFacts(gpus=(Gpu(A, "x", 0), Gpu(B, "x", 1), Gpu(C, "x")), visible="0,1"),
)
CAN = {
    "shm": Capabilities("mapped", same_host=True, needs_unix=True, bytes_per_s=9e9),
    "tcp": Capabilities("streamed", kinds=frozenset({"host", "cuda"})),
}
MET = Met("far", "unix:/x", True, True, True, frozenset({"shm", "tcp"}), 1e-4)


@pytest.mark.parametrize(
    ("name", "place"),
    [("host", HOST), ("cuda", A), ("cuda:1", B), (A, A), ("GPU-bb", B), (C, C)],
)
def test_names_of_memory(name: str, place: str) -> None:
    assert services.place_named(FACTS, name) == place


@pytest.mark.parametrize("name", ["cuda:2", "cuda:x", "GPU", "disk", "", "cuda:-1"])
def test_other_names_are_refused_with_what_there_is(name: str) -> None:
    with pytest.raises(UsageError, match="there is host, cuda:0, cuda:1"):
        services.place_named(FACTS, name)


def test_without_gpus_the_reason_is_the_fix() -> None:
    with pytest.raises(UsageError, match="there is host; cuda-bindings cannot be imported"):
        services.place_named(LAPTOP, "cuda:0")


def test_all_pairs_each_once_without_what_is_hidden() -> None:
    pairs = services.local_pairs(FACTS)
    assert pairs == [(HOST, HOST), (A, A), (A, B), (B, B), (A, HOST), (B, HOST)]
    both = services.both_ways(pairs)
    assert len(both) == len(set(both)) == 9
    assert services.local_pairs(LAPTOP) == [(HOST, HOST)]


def test_a_hidden_gpu_is_named_with_its_setting() -> None:
    assert services.hidden_in(FACTS, (A, B)) == ""
    assert "hidden from this process, because CUDA_VISIBLE_DEVICES='0,1'" in services.hidden_in(
        FACTS, (A, C)
    )
    facts = replace(FACTS, devices=replace(FACTS.devices, visible=None))
    assert services.hidden_in(facts, (C, A)).endswith("is hidden from this process")


def test_plans_are_sorted_by_the_way_that_bytes_go() -> None:
    plans = {
        (a, b, direction): Plan((), {"t": f"{direction} by {a}"})
        for a, b in ((A, HOST), (HOST, A))
        for direction in ("pull", "push")
    }
    outcome = Outcome(TrialBook(), plans=plans, failed={(B, A): "no memory"}, problem="late")
    out, back = services.services_of([(A, HOST)], outcome)
    assert (out.source, out.target) == (A, HOST)
    assert out.pull == plans[HOST, A, "pull"]
    assert out.push == plans[A, HOST, "push"]
    assert (back.pull, back.push) == (plans[A, HOST, "pull"], plans[HOST, A, "push"])
    assert [each.why for each in services.services_of([(A, B)], outcome)] == ["no memory"] * 2
    assert services.services_of([(B, HOST)], outcome)[0].why == "late"


def test_an_engine_on_this_host_is_served_by_what_trials_proved() -> None:
    book = TrialBook(
        [
            Trial("shm", "pull", HOST, HOST, 1.8e9, why="brought zeros", is_wrong=True),
            Trial("tcp", "pull", HOST, HOST, 1.8e9, bytes_per_s=2e9),
        ]
    )
    unusable = {"x": "not enabled here"}
    here, there = services.services_with(MET, HOST, CAN, unusable, book)
    assert (here.source, here.target, there.source) == ("unix:/x", HOST, HOST)
    assert here.stand_in == there.stand_in == HOST
    assert here.path is not None
    assert here.path.name == "tcp/pull"
    assert here.pull is not None
    assert here.pull.rejected == {"shm": "a trial on 2027-01-15 brought zeros", **unusable}
    assert there.path is not None
    assert there.path.name == "shm/push"
    assert "trials between two processes of this machine" in services.about(MET, HOST, LAPTOP)


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        ({"same_host": False}, {"shm": "the engines are on different hosts"}),
        ({"unix": False}, {"shm": "no Unix socket is shared with the peer"}),
        ({"tcp": False}, {"tcp": "the peer does not listen on TCP"}),
        ({"transports": frozenset({"tcp"})}, {"shm": "not usable on the peer"}),
    ],
)
def test_what_an_engine_lacks_is_a_reason(
    change: dict[str, object], reasons: dict[str, str]
) -> None:
    met = replace(MET, **change)  # type: ignore[arg-type]
    zeros = Trial("tcp", "pull", HOST, HOST, 1.8e9, why="brought zeros", is_wrong=True)
    book = TrialBook([zeros] if not met.same_host else [])
    plan = services.services_with(met, HOST, CAN, {}, book)[0].pull
    assert plan is not None
    assert plan.rejected.keys() == reasons.keys()
    for name, reason in reasons.items():
        assert plan.rejected[name].startswith(reason)


def test_memory_of_a_gpu_is_taken_for_the_same_gpu() -> None:
    plan = services.services_with(MET, A, CAN, {}, TrialBook())[0].pull
    assert plan is not None
    assert [path.transport for path in plan.paths] == ["tcp"]
    assert "memory of the same GPU" in services.about(MET, A, LAPTOP)


def test_an_engine_far_away_is_not_proven_and_rdma_is_told() -> None:
    far = replace(MET, same_host=False)
    assert services.services_with(far, HOST, CAN, {}, TrialBook())[0].stand_in == ""
    assert "nothing was tried" in services.about(far, HOST, LAPTOP)
    assert services.about(far, HOST, LAPTOP).endswith("there is no RDMA device here")
    facts = replace(LAPTOP, links=LinkFacts(rdma=("mlx5_0",)))
    assert services.about(far, HOST, facts).endswith("no transport uses mlx5_0 yet")


def test_two_gpus_come_with_a_hint() -> None:
    assert "CUDA_VISIBLE_DEVICES=0,1 and 1,0" in services.about_gpus((A, B))[0]
    assert services.about_gpus((A, A)) == services.about_gpus((A, HOST)) == []


def test_a_running_engine_is_met(make_engine: Callable[..., Engine], engine_directory: str) -> None:
    far = make_engine("far", "shm", "tcp")
    config = EngineConfig(directory=engine_directory, transports=("shm", "staged"))
    met, can, unusable = services.meet(config, far.addresses[0])
    assert (met.name, met.same_host, met.unix) == ("far", True, True)
    assert met.transports == frozenset({"shm", "tcp"})
    assert 0 < met.rtt_s < 5
    assert can.keys() == {"shm", "staged"}
    assert "tcp" in unusable
    address = far.addresses[0]
    far.close()
    with pytest.raises(UnreachableError):
        services.meet(config, address)
