"""Kinds of fault at the start: many engines at once, and a device driver that does not answer."""

from __future__ import annotations

import itertools
import threading

from faults.helpers import MIB, WHOLE
from kvferry import Engine, EngineConfig
from kvferry.errors import DeviceError

ENGINES = 12


def test_engines_that_start_at_the_same_moment_all_start_and_reach_each_other(engine_directory):
    barrier, engines, errors = threading.Barrier(ENGINES), [], []

    def start(number):
        barrier.wait(5.0)
        try:
            engines.append(Engine(EngineConfig(name=f"e{number}", directory=engine_directory)))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=start, args=(number,)) for number in range(ENGINES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    try:
        assert not errors
        assert len(engines) == ENGINES
        assert len({address for engine in engines for address in engine.addresses}) == 2 * ENGINES
        for engine, other in itertools.pairwise(engines):
            engine.connect(other.addresses[0]).ping(5.0)
    finally:
        for engine in engines:
            engine.close()


def test_a_driver_that_does_not_answer_hinders_nobody_who_needs_no_device(engine_directory):
    go, asked = threading.Event(), threading.Event()

    def hang():
        asked.set()
        go.wait(10.0)
        raise DeviceError("made for this test")

    config = {"directory": engine_directory}
    with (
        Engine(EngineConfig(name="near", **config), cuda=hang) as near,
        Engine(EngineConfig(name="far", **config), cuda=hang) as far,
    ):
        # One thread waits for the driver, for as long as it takes.
        waiting = threading.Thread(target=lambda: far_device(far))
        waiting.start()
        assert asked.wait(5.0)
        local, owned = near.allocate(MIB), far.allocate(MIB)
        owned.array[:] = 7
        remote = near.connect(far.addresses[0]).region(owned.ref)
        for name in ("shm", "staged", "tcp"):
            assert name in near.transports
        near.read(local, WHOLE, remote, WHOLE).wait(5.0)
        assert int(local.array.min()) == 7
        go.set()
        waiting.join(5.0)
    assert not waiting.is_alive()


def far_device(engine):
    try:
        engine.allocate(MIB, device="cuda")
    except DeviceError:
        return
    raise AssertionError("there is no device")
