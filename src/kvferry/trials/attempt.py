"""One path, tried: random bytes of three sizes between two engines, each compared with what was
sent.

The near engine moves the bytes. The far one is anything that answers the calls of :class:`Far`:
another process, or in tests an engine beside this one.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.config import EngineConfig
from kvferry.engine import Engine
from kvferry.errors import DeadlineError, KVFerryError, StallError
from kvferry.memory.cuda_driver import CudaDriver, driver
from kvferry.regions import Spans
from kvferry.transports.base import RemoteRegion
from kvferry.trials.records import HOST, Trial, TrialBook

Bytes = npt.NDArray[np.uint8]

REPEATS = 3
MOVE_S = 10.0
"""A move that has not ended by then never will: the largest one takes well under a second."""
WIPED = 0xA5


@dataclass(frozen=True, slots=True)
class Shape:
    """``nbytes`` bytes in blocks of ``block`` bytes, which lie in another order on each side."""

    nbytes: int
    block: int

    def spans(self, seed: int) -> Spans:
        """Where the blocks lie, in the order in which they are moved."""
        return Spans.of(self.order(seed) * self.block, self.block)

    def order(self, seed: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng(seed).permutation(self.nbytes // self.block).astype(np.int64)

    def values(self, seed: int) -> Bytes:
        """The random bytes of the source, as they lie there."""
        words = np.random.default_rng(seed).integers(0, 1 << 63, self.nbytes // 8, np.uint64)
        return words.view(np.uint8)

    def moved(self, seed: int, source: int, target: int) -> Bytes:
        """What must lie in the target, whose blocks are ordered by ``target``, afterwards."""
        whole = np.empty((self.nbytes // self.block, self.block), np.uint8)
        blocks = self.values(seed).reshape(whole.shape)
        whole[self.order(target)] = blocks[self.order(source)]
        return whole.reshape(-1)


SHAPES = (Shape(64 << 10, 4 << 10), Shape(4 << 20, 4 << 20), Shape(32 << 20, 64 << 10))
"""Small blocks; one large piece, which a device moves by other means; many blocks for the speed."""
NEAR_ORDER, FAR_ORDER, SEED = 1, 2, 3


class Far(Protocol):
    """The other engine. A call raises FarEnded when its process is no more."""

    def open(self, transports: list[str], place: str, nbytes: int) -> tuple[str, str]:
        """Start an engine with memory in ``place``: its address, and the region's ref in hex."""
        ...

    def fill(self, nbytes: int, block: int) -> None: ...
    def wipe(self, nbytes: int) -> None: ...
    def compare(self, nbytes: int, block: int) -> str:
        """What is wrong with the bytes that should have come, in words; "" if nothing is."""
        ...

    def shut(self) -> None: ...


class FarEnded(Exception):
    """The far process ended; the text says how."""


class NotTried(Exception):
    """The trial could not begin, which says nothing about the path; the text says why."""


def _as_measured(_transport: str, _nbytes: int, seconds: float) -> float:
    return seconds


@functools.lru_cache(maxsize=1)
def _moved(shape: Shape, source: int, target: int) -> Bytes:
    """:meth:`Shape.moved`, kept for the repeats."""
    return shape.moved(SEED, source, target)


class Memory:
    """Memory of an engine in one place, filled and read by way of the host."""

    def __init__(self, engine: Engine, place: str, nbytes: int) -> None:
        device = "" if place == HOST else place
        self.registration = engine.allocate(nbytes, access="read-write", device=device)
        self._device = engine.devices.device(device) if device else None

    def put(self, values: Bytes) -> None:
        """Write bytes to its beginning."""
        if self.registration.array is not None:
            self.registration.array[: values.size] = values
            return
        self._through(values.size, lambda array: np.copyto(array, values), into=True)

    def get(self, nbytes: int) -> Bytes:
        """The bytes at its beginning."""
        if self.registration.array is not None:
            return self.registration.array[:nbytes].copy()
        found = np.empty(nbytes, np.uint8)
        self._through(nbytes, lambda array: np.copyto(found, array), into=False)
        return found

    def _through(self, nbytes: int, work: Callable[[Bytes], None], *, into: bool) -> None:
        assert self._device is not None
        where = np.array([self.registration.region.address], np.uint64)
        size = np.array([nbytes], np.int64)
        address = self._device.pinned(nbytes)
        array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
        with self._device.queue() as queue:
            if into:
                work(array)
                queue.scatter(address, where, size).settle(MOVE_S)
            else:
                queue.gather(address, where, size).settle(MOVE_S)
                work(array)
        self._device.give_pinned(address)


class FarEngine:
    """The far side in the process where it is made."""

    def __init__(self, cuda: Callable[[], CudaDriver] = driver, **settings: Any) -> None:
        self._cuda = cuda
        self._settings = settings
        self._engine: Engine | None = None
        self._memory: Memory | None = None

    def open(self, transports: list[str], place: str, nbytes: int) -> tuple[str, str]:
        self.shut()
        config = settings_of(transports, name="trial-far", **self._settings)
        self._engine = Engine(config, cuda=self._cuda, trials=TrialBook())
        self._memory = Memory(self._engine, place, nbytes)
        return self._engine.addresses[0], self._memory.registration.ref.hex()

    def fill(self, nbytes: int, block: int) -> None:
        self._there().put(Shape(nbytes, block).values(SEED))

    def wipe(self, nbytes: int) -> None:
        self._there().put(np.full(nbytes, WIPED, np.uint8))

    def compare(self, nbytes: int, block: int) -> str:
        wanted = _moved(Shape(nbytes, block), NEAR_ORDER, FAR_ORDER)
        return difference(self._there().get(nbytes), wanted)

    def shut(self) -> None:
        """Close the engine, if one is open."""
        engine, self._engine, self._memory = self._engine, None, None
        if engine is not None:
            engine.close()

    def _there(self) -> Memory:
        assert self._memory is not None
        return self._memory


def settings_of(transports: list[str], **settings: Any) -> EngineConfig:
    """Settings of an engine for trials: this process's own, but for what must not differ."""
    fixed: dict[str, Any] = {
        "transports": tuple(transports),
        "listen": "127.0.0.1:0",
        "advertise": "",
        "dump_dir": "",
        "checksum": "off",
        "transfer_s": MOVE_S,
    }
    return EngineConfig.from_environment(**{**fixed, **settings})


def difference(found: Bytes, wanted: Bytes) -> str:
    """What is wrong with bytes that came, in words that follow "a trial"; "" if nothing is."""
    if np.array_equal(found, wanted):
        return ""
    wrong = np.flatnonzero(found != wanted)
    if not found.any():
        return "brought zeros"
    if (found[wrong] == 0).all():
        return f"brought zeros in place of {wrong.size} of {found.size} bytes"
    if (found == WIPED).all():
        return "reported success and moved nothing"
    return f"brought {wrong.size} wrong bytes of {found.size}, the first at {wrong[0]}"


class Attempt:
    """Tries paths between one near and one far engine.

    seconds: how long a finished transfer took; tests say so themselves.
    """

    def __init__(
        self,
        far: Far,
        cuda: Callable[[], CudaDriver] = driver,
        *,
        shapes: tuple[Shape, ...] = SHAPES,
        seconds: Callable[[str, int, float], float] = _as_measured,
        **settings: Any,
    ) -> None:
        self._far = far
        self._cuda = cuda
        self._shapes = shapes
        self._seconds = seconds
        self._settings = settings

    def run(self, transport: str, direction: str, local: str, remote: str) -> Trial:
        """Try one path. What fails is in the result, in words; what says nothing about the path,
        such as memory that is used up, raises NotTried.
        """
        at = time.time()
        try:
            times, why = self._move_all(transport, direction, local, remote)
        except (DeadlineError, StallError):
            times, why = [], f"did not end within {MOVE_S:g} s"
        except KVFerryError as error:
            if "out of memory" in error.message.lower():
                raise NotTried(str(error)) from error
            return Trial(transport, direction, local, remote, at, why=f"failed: {error}")
        except FarEnded as error:
            words = f"ended the process at the other end: {error}"
            return Trial(transport, direction, local, remote, at, why=words)
        if why:
            wrong = not why.startswith("did not end")
            return Trial(transport, direction, local, remote, at, why=why, is_wrong=wrong)
        speed = self._shapes[-1].nbytes / max(times[-1], 1e-9)
        return Trial(transport, direction, local, remote, at, speed, times[0])

    def _move_all(
        self, transport: str, direction: str, local: str, remote: str
    ) -> tuple[list[float], str]:
        """The best time for each size, and what was wrong with the bytes of one."""
        config = settings_of([transport], name="trial-near", **self._settings)
        times: list[float] = []
        with Engine(config, cuda=self._cuda, trials=TrialBook()) as near:
            try:
                memory, there = self._ends(near, [transport], local, remote)
            except KVFerryError as error:
                raise NotTried(str(error)) from error
            for shape in self._shapes:
                if direction == "push":
                    memory.put(shape.values(SEED))
                else:
                    self._far.fill(shape.nbytes, shape.block)
                took, why = self._move(near, memory, there, shape, transport, direction)
                if why:
                    return times, why
                times.append(took)
        self._far.shut()
        return times, ""

    def _ends(
        self, near: Engine, transports: list[str], local: str, remote: str
    ) -> tuple[Memory, RemoteRegion]:
        """Memory on both sides."""
        nbytes = max(shape.nbytes for shape in self._shapes)
        address, ref = self._far.open(transports, remote, nbytes)
        memory = Memory(near, local, nbytes)
        return memory, near.connect(address).region(bytes.fromhex(ref))

    def _move(
        self,
        near: Engine,
        memory: Memory,
        there: RemoteRegion,
        shape: Shape,
        transport: str,
        direction: str,
    ) -> tuple[float, str]:
        """The best time for one size, and what was wrong with its bytes."""
        here, beyond = shape.spans(NEAR_ORDER), shape.spans(FAR_ORDER)
        start = near.write if direction == "push" else near.read
        best = float("inf")
        for _ in range(REPEATS):
            if direction == "push":
                self._far.wipe(shape.nbytes)
            else:
                memory.put(np.full(shape.nbytes, WIPED, np.uint8))
            transfer = start(memory.registration, here, there, beyond, deadline_s=MOVE_S)
            transfer.wait(2 * MOVE_S)
            best = min(best, self._seconds(transport, shape.nbytes, transfer.seconds))
            if direction == "push":
                why = self._far.compare(shape.nbytes, shape.block)
            else:
                why = difference(memory.get(shape.nbytes), _moved(shape, FAR_ORDER, NEAR_ORDER))
            if why:
                return best, why
        return best, ""

    def plans(
        self, local: str, remote: str, transports: tuple[str, ...], book: TrialBook
    ) -> dict[str, Any]:
        """The ranking for both directions, by what the book says, as JSON. Raises KVFerryError when
        an engine or its memory cannot be had.
        """
        config = settings_of(list(transports), name="trial-near", **self._settings)
        with Engine(config, cuda=self._cuda, trials=book) as near:
            memory, there = self._ends(near, list(transports), local, remote)
            count = self._shapes[-1].nbytes // self._shapes[-1].block
            plans = {
                direction: near.plan(
                    memory.registration,
                    there,
                    write=direction == "push",
                    nbytes=self._shapes[-1].nbytes,
                    spans=count,
                ).as_dict()
                for direction in ("pull", "push")
            }
            plans["unusable"] = dict(near.unusable)
        self._far.shut()
        return plans
