"""One path, tried on fake devices: what is proven, and each way to fail in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvferry.engine import PROCESS
from kvferry.testing.cuda import FakeCuda
from kvferry.trials.attempt import (
    SHAPES,
    WIPED,
    Attempt,
    FarEnded,
    FarEngine,
    NotTried,
    Shape,
    difference,
)
from kvferry.trials.records import Trial, TrialBook

SMALL = (Shape(4096, 512), Shape(1 << 20, 1 << 20), Shape(1 << 18, 4096))


class FarBeside(FarEngine):
    """A far engine that takes itself for another process, and may end or lie."""

    lie: Callable[[str], Any] | None = None

    def open(self, transports: list[str], place: str, nbytes: int) -> tuple[str, str]:
        if self.lie is not None:
            self.lie("open")
        PROCESS.renew()
        return super().open(transports, place, nbytes)

    def wipe(self, nbytes: int) -> None:
        if self.lie is not None:
            self.lie("wipe")
        super().wipe(nbytes)


class World:
    def __init__(self, directory: str) -> None:
        self.fake = FakeCuda(2)
        self.gpus = [facts.uuid for facts in self.fake.facts]
        settings: dict[str, Any] = {
            "directory": directory,
            "device_ring_bytes": 1 << 18,
            "device_ring_slots": 2,
        }
        self.far = FarBeside(lambda: self.fake, **settings)
        self.attempt = Attempt(self.far, lambda: self.fake, shapes=SMALL, **settings)

    def run(self, transport: str, direction: str = "pull", a: int = 0, b: int = 1) -> Trial:
        return self.attempt.run(transport, direction, self.gpus[a], self.gpus[b])


@pytest.fixture
def world(engine_directory: str) -> Iterator[World]:
    world = World(engine_directory)
    yield world
    world.far.shut()
    assert not any(world.fake.held().values()), world.fake.held()


@pytest.mark.parametrize("direction", ["pull", "push"])
@pytest.mark.parametrize("transport", ["shm", "staged", "tcp"])
def test_host_paths_are_proven_and_timed(world: World, transport: str, direction: str) -> None:
    trial = world.attempt.run(transport, direction, "host", "host")
    assert (trial.why, trial.path) == ("", f"{transport}/{direction}")
    assert trial.bytes_per_s > 1e6
    assert 0 < trial.latency_s < 1


@pytest.mark.parametrize("direction", ["pull", "push"])
@pytest.mark.parametrize("transport", ["cuda_ipc", "staged"])
def test_device_paths_are_proven(world: World, transport: str, direction: str) -> None:
    assert world.run(transport, direction).why == ""


@pytest.mark.parametrize("direction", ["pull", "push"])
def test_peer_access_that_brings_zeros_is_seen(world: World, direction: str) -> None:
    world.fake.zeros = True
    trial = world.run("cuda_ipc", direction)
    assert (trial.why, trial.is_wrong, trial.bytes_per_s) == ("brought zeros", True, 0.0)
    assert world.run("staged", direction).why == ""
    assert world.run("cuda_ipc", direction, 1, 1).why == ""


@pytest.mark.parametrize("direction", ["pull", "push"])
def test_a_path_that_moves_nothing_is_seen(
    world: World, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvferry.transports.shm import ShmTransport

    def submit(self: Any, op: Any) -> None:
        self._services.complete(op, op.nbytes, None)

    monkeypatch.setattr(ShmTransport, "submit", submit)
    trial = world.attempt.run("shm", direction, "host", "host")
    assert (trial.why, trial.is_wrong) == ("reported success and moved nothing", True)


def test_a_failure_is_told_with_its_words(world: World) -> None:
    world.fake.fail.add("ipc_open")
    trial = world.run("cuda_ipc")
    assert trial.why.startswith("failed: the driver cannot map the peer's device memory: ipc_open")
    assert not trial.is_wrong


def test_a_move_that_hangs_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvferry.transports.shm import ShmTransport

    monkeypatch.setattr("kvferry.trials.attempt.MOVE_S", 0.05)
    held: list[Any] = []
    monkeypatch.setattr(ShmTransport, "submit", lambda self, op: held.append((self, op)))
    monkeypatch.setattr(
        ShmTransport, "abort", lambda self, op, error: self._services.complete(op, 0, error)
    )
    trial = world.attempt.run("shm", "pull", "host", "host")
    assert (trial.why, trial.is_wrong) == ("did not end within 0.05 s", False)


def test_a_far_process_that_ends_is_told(world: World) -> None:
    def end(call: str) -> None:
        if call == "wipe":
            raise FarEnded("SIGSEGV")

    world.far.lie = end
    trial = world.attempt.run("shm", "push", "host", "host")
    assert trial.why == "ended the process at the other end: SIGSEGV"


def test_what_says_nothing_about_the_path_is_no_failure_of_it(world: World) -> None:
    world.fake.fail.add("alloc")
    with pytest.raises(NotTried, match="alloc"):
        world.run("cuda_ipc")


def test_plans_follow_the_book(world: World) -> None:
    a, b = world.gpus
    before = world.attempt.plans(a, b, (), TrialBook())
    assert before["pull"]["paths"][0]["path"] == "cuda_ipc/pull"
    lied = Trial("cuda_ipc", "pull", a, b, 1.8e9, why="brought zeros", is_wrong=True)
    after = world.attempt.plans(a, b, (), TrialBook([lied]))
    assert after["pull"]["rejected"]["cuda_ipc"].endswith(" brought zeros")
    assert after["pull"]["paths"][0]["path"] == "staged/pull"
    assert after["push"] == before["push"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_keep_their_bytes_and_change_their_places(shape: Shape) -> None:
    if shape.nbytes > 1 << 20:
        shape = Shape(1 << 20, shape.block >> 5)
    values = shape.values(1).reshape(-1, shape.block)
    moved = shape.moved(1, 2, 3).reshape(-1, shape.block)
    here, there = shape.spans(2), shape.spans(3)
    for a, b in zip(here.offsets, there.offsets, strict=True):
        assert (values[a // shape.block] == moved[b // shape.block]).all()
    assert values.any(axis=1).all()


def test_differences_have_names() -> None:
    wanted = np.arange(1, 101, dtype=np.uint8)
    assert difference(wanted.copy(), wanted) == ""
    assert difference(np.zeros_like(wanted), wanted) == "brought zeros"
    part = wanted.copy()
    part[10:20] = 0
    assert difference(part, wanted) == "brought zeros in place of 10 of 100 bytes"
    assert difference(np.full_like(wanted, WIPED), wanted) == "reported success and moved nothing"
    part[15] = 255
    assert difference(part, wanted) == "brought 10 wrong bytes of 100, the first at 10"
