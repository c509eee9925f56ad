"""The clock that tests move by hand."""

from __future__ import annotations

import threading

import pytest

from kvferry.clock import Clock
from kvferry.testing.clock import FakeClock


def test_it_stands_still_until_it_is_moved() -> None:
    clock: Clock = FakeClock(start=5.0)
    assert (clock.now(), clock.now()) == (5.0, 5.0)


def test_each_advance_moves_the_time_and_then_wakes_everybody() -> None:
    clock = FakeClock(start=5.0)
    seen: list[float] = []
    clock.on_jump(lambda: seen.append(clock.now()))
    clock.on_jump(lambda: seen.append(-clock.now()))
    assert clock.advance(2.5) == 7.5
    clock.advance(0.0)
    assert seen == [7.5, -7.5, 7.5, -7.5]


@pytest.mark.parametrize("seconds", [-0.1, float("nan")])
def test_it_never_goes_back(seconds: float) -> None:
    clock = FakeClock(start=5.0)
    with pytest.raises(ValueError, match="never goes back"):
        clock.advance(seconds)
    assert clock.now() == 5.0


def test_a_wake_may_register_another_wake() -> None:
    clock = FakeClock()
    woken = threading.Event()
    clock.on_jump(lambda: clock.on_jump(woken.set))
    clock.advance(1)
    assert not woken.is_set()
    clock.advance(1)
    assert woken.is_set()
