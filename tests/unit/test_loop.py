import logging
import os
import threading

import pytest

from kvferry.clock import SystemClock
from kvferry.loop import READ, ControlLoop
from kvferry.testing import FakeClock


@pytest.fixture
def make_loop():
    loops = []

    def make(clock=None, tick=None):
        clock = clock or SystemClock()
        loops.append(ControlLoop("test", clock, tick or (lambda: clock.now() + 1)))
        return loops[-1]

    yield make
    for loop in loops:
        loop.close()


@pytest.fixture
def pipe():
    read, write = os.pipe2(os.O_NONBLOCK)
    yield read, write
    os.close(read)
    os.close(write)


def test_handlers_run_in_the_loop(make_loop, pipe):
    loop, came = make_loop(), threading.Event()
    inside = []

    def ready(_events):
        os.read(pipe[0], 1)
        inside.append(loop.is_here())
        came.set()

    loop.add(pipe[0], READ, ready)
    loop.start()
    os.write(pipe[1], b"x")
    assert came.wait(5.0)
    assert inside == [True]
    assert not loop.is_here()


def test_a_handler_that_fails_does_not_end_the_loop(make_loop, pipe, caplog):
    loop, came = make_loop(), threading.Semaphore(0)

    def ready(_events):
        os.read(pipe[0], 1)
        came.release()
        raise RuntimeError("a bug")

    loop.add(pipe[0], READ, ready)
    loop.start()
    with caplog.at_level(logging.ERROR, "kvferry"):
        for _ in range(2):
            os.write(pipe[1], b"x")
            assert came.acquire(timeout=5.0)


def test_removed_and_unknown_descriptors_are_ignored(make_loop, pipe):
    loop, ticks = make_loop(), threading.Event()
    loop.add(pipe[0], READ, lambda _events: pytest.fail("it was removed"))
    loop.remove(pipe[0])
    loop.remove(pipe[0])
    loop.change(pipe[0], READ)
    os.write(pipe[1], b"x")
    loop._tick = lambda: ticks.set() or 0.0
    loop.start()
    assert ticks.wait(5.0)


def test_a_jump_of_the_clock_wakes_it(make_loop):
    clock, seen = FakeClock(), threading.Event()

    def tick():
        if clock.now() >= 1500.0:
            seen.set()
        return clock.now() + 1e9

    make_loop(clock, tick).start()
    clock.advance(500.0)
    assert seen.wait(5.0)


def test_closing_twice_and_waking_afterwards(make_loop):
    clock = FakeClock()
    loop = make_loop(clock)
    loop.start()
    loop.close()
    loop.close()
    before = os.pipe()
    # The number of its wake-up pipe may mean another file by now, which must not be written to.
    loop.wake()
    clock.advance(1.0)
    os.set_blocking(before[0], False)
    with pytest.raises(BlockingIOError):
        os.read(before[0], 1)
    for fd in before:
        os.close(fd)


def test_what_is_ready_is_handled_before_time_is_judged(make_loop, pipe):
    # A process that was frozen has both: messages that wait, and timers that are over.
    order, ticked = [], threading.Event()

    def ready(_events):
        os.read(pipe[0], 1)
        order.append("message")

    def tick():
        order.append("tick")
        ticked.set()
        return 1e12

    loop = make_loop(FakeClock(), tick)
    loop.add(pipe[0], READ, ready)
    os.write(pipe[1], b"x")
    loop.start()
    assert ticked.wait(5.0)
    assert order == ["message", "tick"]
