"""What records answer by themselves."""

from __future__ import annotations

from kvferry.doctor.records import DeviceFacts, Gpu, Service
from kvferry.planner import Plan, RankedPath

PULL, PUSH = (RankedPath("tcp", direction, 1.0, "fine") for direction in ("pull", "push"))


def test_gpus_are_seen_or_hidden() -> None:
    seen, hidden = Gpu("GPU-1", "a", ordinal=0), Gpu("GPU-2", "b")
    facts = DeviceFacts(gpus=(seen, hidden))
    assert (facts.seen, facts.hidden) == ((seen,), (hidden,))


def test_the_path_of_a_hand_off_serves_first() -> None:
    pull, push, none = Plan((PULL,), {}), Plan((PUSH,), {}), Plan((), {"tcp": "no"})
    assert Service("a", "b", pull, push).path == PULL
    assert Service("a", "b", none, push).path == PUSH
    assert Service("a", "b", none, none).path is None
    assert Service("a", "b").path is None
