"""What killed processes leave is cleaned at the next start; what belongs to live ones stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvferry.regions import Spans
from kvferry.testing.child import Child

START = """
import os
from kvferry.config import EngineConfig
from kvferry.engine import Engine
engine = Engine(EngineConfig(name="child", directory={directory!r}, transports=("shm", "staged")))
pool = engine.allocate(1 << 20, access="read-write")
pool.array[:] = 5
mine = engine.allocate(1 << 20)
result = {{"addresses": engine.addresses, "ref": pool.ref.hex()}}
"""
READ = """
from kvferry.regions import Spans
peer = engine.connect({address!r})
remote = peer.region(bytes.fromhex({ref!r}))
whole = Spans.whole(1 << 20)
engine.read(mine, whole, remote, whole).wait(5.0)
"""


def files(directory: str) -> set[str]:
    return set(os.listdir(directory))


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "kvferry" in name}


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["shm", "staged"])
def test_a_killed_process_leaves_nothing_that_a_start_does_not_clean(
    make_engine, engine_directory, kept
):
    before = shared_memory()
    live = make_engine("live", kept)
    owned = live.allocate(1 << 20)
    with Child() as child:
        facts = child.run(START.format(directory=engine_directory))
        child.run(READ.format(address=live.addresses[0], ref=owned.ref.hex()))
        child.kill()
        # The kernel took memory and descriptors back; a name in the directory is all that is left.
        dead = facts["addresses"][0].removeprefix("unix:")
        assert os.path.exists(dead)
        assert shared_memory() == before
        assert len(files(engine_directory)) == 2
        started = make_engine("started", kept)
        assert not os.path.exists(dead)
    assert files(engine_directory) == {
        Path(engine.addresses[0].removeprefix("unix:")).name for engine in (live, started)
    }
    # The live one can still be reached by its socket.
    remote = started.connect(live.addresses[0]).region(owned.ref)
    whole = Spans.whole(1 << 20)
    assert started.read(started.allocate(1 << 20), whole, remote, whole).wait(5.0) == 1 << 20


@pytest.mark.slow
def test_a_frozen_process_is_not_taken_for_a_dead_one(make_engine, engine_directory):
    with Child() as child:
        facts = child.run(START.format(directory=engine_directory))
        path = facts["addresses"][0].removeprefix("unix:")
        child.stop()
        make_engine("started", "shm")
        assert os.path.exists(path)
        child.go_on()
        engine = make_engine("caller", "shm")
        assert engine.connect(facts["addresses"][0]).ping() < 5.0
        child.run("engine.close()")
