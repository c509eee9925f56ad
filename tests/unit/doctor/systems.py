"""Fake systems: a facts record and trials on fake devices per situation.

Trials really run, between two engines of this process on a fake driver; only their times are made
up, by transport, so that reports are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvferry.doctor.devices import look
from kvferry.doctor.records import (
    DeviceFacts,
    Facts,
    Gpu,
    LinkFacts,
    MemoryFacts,
    Nic,
    ProcessFacts,
    RunFacts,
    Service,
    SoftwareFacts,
)
from kvferry.doctor.services import both_ways, local_pairs, services_of
from kvferry.engine import PROCESS
from kvferry.errors import KVFerryError
from kvferry.memory.cuda_driver import CudaDriver
from kvferry.testing.cuda import FakeCuda
from kvferry.trials.attempt import Attempt, FarEngine, Shape
from kvferry.trials.records import HOST, Trial, TrialBook
from kvferry.trials.run import Outcome, plan_of

DAY = 1_796_000_000.0
SHAPES = (Shape(4096, 1024), Shape(1 << 20, 1 << 20), Shape(1 << 18, 4096))
RATES = {"shm": 9e9, "staged": 12e9, "tcp": 2.5e9, "cuda_ipc": 250e9}
GIB = 1 << 30
SECOND = FakeCuda(2).facts[1].uuid

LAPTOP = Facts(
    memory=MemoryFacts(
        16 * GIB, 9 * GIB, shm=8 * GIB, shm_free=8 * GIB, huge_page=2 << 20, locked_max=2 * GIB,
        descriptors_max=65536,
    ),
    devices=DeviceFacts(missing="cuda-bindings cannot be imported: No module named 'cuda'"),
    links=LinkFacts(
        (
            Nic("lo", True, 65536, 0, ("127.0.0.1",)),
            Nic("wlan0", True, 1500, 0, ("192.0.2.7", "2001:db8::7")),
            Nic("eth0", False, 1500, 1000, ()),
        )
    ),
    process=ProcessFacts(
        "ann (1000)", ptrace_scope=1, seccomp=0, namespaces=(("pid", "4026531836"),)
    ),
    run=RunFacts("/run/user/1000/kvferry-1000"),
    software=SoftwareFacts(
        "3.12.4", "6.8.0", "c/avx2",
        packages=(("kvferry", "0.1.0"), ("numpy", "2.1.0"), ("cuda-bindings", ""), ("torch", "")),
    ),
)  # fmt: skip

SERVER = replace(
    LAPTOP,
    memory=replace(
        LAPTOP.memory, ram=512 * GIB, ram_free=480 * GIB, shm=256 * GIB, shm_free=255 * GIB
    ),
    links=LinkFacts((Nic("eth0", True, 9000, 25000, ("192.0.2.8",)),)),
    software=replace(
        LAPTOP.software,
        packages=(("kvferry", "0.1.0"), ("numpy", "2.1.0"), ("cuda-bindings", "12.9.0")),
    ),
)  # fmt: skip


@dataclass
class System:
    """One situation. facts: all but its devices, which are looked at on the fake driver."""

    facts: Facts
    cuda: FakeCuda | None = None
    visible: str | None = None
    hidden: tuple[Gpu, ...] = ()
    transports: tuple[str, ...] = ()
    is_lying: bool = False
    trials: tuple[Trial, ...] = ()


class _Beside(FarEngine):
    """A far engine that takes itself for another process."""

    def open(self, transports: list[str], place: str, nbytes: int) -> tuple[str, str]:
        PROCESS.renew()
        return super().open(transports, place, nbytes)


def seconds(transport: str, nbytes: int, _measured: float) -> float:
    return 2e-5 + nbytes / RATES[transport]


def examine(system: System, directory: str) -> tuple[Facts, list[Service], Outcome]:
    """What a doctor finds on a fake system: its facts, what serves, and all trials."""
    facts, cuda = system.facts, system.cuda
    if cuda is not None:
        seen = look(lambda: cuda)
        devices = replace(
            seen, driver="570.86.15", visible=system.visible, gpus=seen.gpus + system.hidden
        )
        facts = replace(facts, devices=devices)
        cuda.zeros = system.is_lying
    # The second GPU differs from the first in nothing but its number.
    pairs = [pair for pair in local_pairs(facts) if pair[0] != SECOND]
    outcome = try_all(pairs, cuda, system, directory)
    return facts, services_of(pairs, outcome), outcome


_hosts: dict[tuple[Trial, ...], Outcome] = {}
"""Host memory is the same in all situations, so it is tried once."""


def try_all(
    pairs: list[tuple[str, str]], cuda: FakeCuda | None, system: System, directory: str
) -> Outcome:
    if cuda is None and system.trials in _hosts:
        return _hosts[system.trials]
    settings: dict[str, Any] = {
        "directory": directory,
        "device_ring_bytes": 1 << 18,
        "device_ring_slots": 2,
    }

    def load() -> CudaDriver:
        assert cuda is not None
        return cuda

    far = _Beside(load, **settings)
    attempt = Attempt(far, load, shapes=SHAPES, seconds=seconds, **settings)
    outcome = Outcome(TrialBook(system.trials))
    try:
        for local, remote in both_ways(pairs):
            try:
                _try_pair(attempt, local, remote, system, outcome)
            except KVFerryError as error:
                outcome.failed[local, remote] = str(error)
                far.shut()
    finally:
        far.shut()
    if cuda is None:
        _hosts[system.trials] = outcome
    return outcome


def _try_pair(attempt: Attempt, local: str, remote: str, system: System, outcome: Outcome) -> None:
    plans = attempt.plans(local, remote, system.transports, outcome.book)
    for direction in ("pull", "push"):
        for path in plan_of(plans[direction]).paths:
            key = (path.transport, direction, local, remote)
            if outcome.book.get(key) is None:
                trial = replace(attempt.run(*key), at=DAY)
                outcome.book.add(trial)
                outcome.new.append(trial)
    plans = attempt.plans(local, remote, system.transports, outcome.book)
    for direction in ("pull", "push"):
        outcome.plans[local, remote, direction] = plan_of(plans[direction])


def _without_peers() -> FakeCuda:
    fake = FakeCuda(2)
    fake.peers = False
    return fake


def systems() -> dict[str, Callable[[], System]]:
    """Every situation by name, made anew for each test."""
    gpu = Gpu("GPU-00000000-0000-0000-0000-000000000007", "Fake 7", bus="0000:08:00.0")
    container = replace(
        SERVER,
        process=replace(SERVER.process, user="root (0)", container=("/.dockerenv",), seccomp=2),
        run=RunFacts("/tmp/kvferry-0"),
    )
    hung = Trial("tcp", "pull", HOST, HOST, DAY, why="did not end within 45 s")
    return {
        "laptop": lambda: System(LAPTOP),
        "two-gpus": lambda: System(SERVER, FakeCuda(2)),
        "no-peer-access": lambda: System(SERVER, _without_peers()),
        "zeros": lambda: System(SERVER, FakeCuda(2), is_lying=True),
        "container": lambda: System(container, FakeCuda(1)),
        "hidden-gpu": lambda: System(SERVER, FakeCuda(1), visible="0", hidden=(gpu,)),
        "tiny-shm": lambda: System(
            replace(container, memory=replace(SERVER.memory, shm=64 << 20, shm_free=60 << 20),
                    run=RunFacts("/run/kvferry", is_set=True))
        ),
        "no-c": lambda: System(
            replace(
                LAPTOP,
                software=replace(
                    LAPTOP.software, copy="ctypes",
                    copy_note="the C extension is missing: copies of small blocks are slower",
                ),
            )
        ),
        "hung-path": lambda: System(LAPTOP, trials=(hung,)),
        "no-run-directory": lambda: System(
            replace(
                LAPTOP,
                memory=replace(LAPTOP.memory, memfd="memfd_create: Function not implemented",
                               shm=64 << 20, shm_free=0, descriptors_max=256),
                links=replace(LAPTOP.links, rdma=("mlx5_0 (active, 200 Gb/sec)",)),
                run=RunFacts("/run/x", problem="this user cannot write to it", is_set=True, dead=2),
            )
        ),
        "driver-without-cuda": lambda: System(
            replace(LAPTOP, devices=replace(
                LAPTOP.devices, driver="570.86.15", gpus=(gpu,)))
        ),
    }  # fmt: skip
