"""Two connected engines for checks of a transport, in one process or in two.

The far engine's memory is visible to the checks as an array in either case: a child's is in files
that this process maps as well, so a check compares bytes the same way.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.config import EngineConfig
from kvferry.engine import Engine
from kvferry.errors import KVFerryError
from kvferry.memory.host import SharedBuffer, map_shared
from kvferry.peers import Peer
from kvferry.regions import READ_WRITE, Region, Spans
from kvferry.registry import Registration
from kvferry.testing.child import Child
from kvferry.testing.leaks import Snapshot
from kvferry.transfer import Transfer
from kvferry.transports.base import RemoteRegion, Transport

Bytes = npt.NDArray[np.uint8]
Make = Callable[[], Transport]

BOUNDED_S = 5.0
"""What must end soon has so long: far more than it takes, far less than a lost heart-beat."""


class Registered(Protocol):
    """What checks use of a region, wherever its engine is."""

    @property
    def ref(self) -> bytes: ...
    @property
    def users(self) -> int: ...
    def renew(self) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Side:
    """Memory of one engine."""

    registration: Registered
    array: Bytes


@dataclass(slots=True)
class LocalSide(Side):
    """Memory of the near engine."""

    registration: Registration

    @property
    def region(self) -> Region:
        return self.registration.region


class FarEngine(Protocol):
    """What checks use of the far engine."""

    def memory(self, nbytes: int, kind: str, access: str) -> Side:
        """Registered memory. kind: ``"allocated"`` or ``"plain"``."""
        ...

    def close(self) -> None: ...


class FarHere:
    """A far engine in this process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def memory(self, nbytes: int, kind: str, access: str) -> Side:
        return memory_of(self.engine, nbytes, kind, access)

    def close(self) -> None:
        self.engine.close()


class FarChild:
    """A far engine in a child process. Used by one thread at a time."""

    def __init__(self, child: Child, make: Make, config: dict[str, Any]) -> None:
        self._child = child
        child.run("from kvferry.testing.pairs import Hosted")
        self.address = str(self.call("hosted = Hosted({}, {}); result = hosted.address",
                                     where(make), config))  # fmt: skip

    def call(self, statements: str, *values: Any) -> Any:
        """Run statements in the child, with JSON values for each ``{}``."""
        return self._child.run(
            statements.format(*(repr(json.loads(json.dumps(v))) for v in values))
        )

    def memory(self, nbytes: int, kind: str, access: str) -> Side:
        number, ref, fd = self.call("result = hosted.memory({}, {}, {})", nbytes, kind, access)
        there = os.open(f"/proc/{self._child.pid}/fd/{fd}", os.O_RDWR)
        try:
            if kind == "allocated":
                buffer = map_shared(there, nbytes, writable=True)
                array = buffer.array()
                buffer.close()  # The array keeps it.
            else:
                array = np.frombuffer(mmap.mmap(there, nbytes), np.uint8)
        finally:
            os.close(there)
        return Side(_ChildRegistration(self, int(number), bytes.fromhex(ref)), array)

    def close(self) -> None:
        self.call("hosted.close()")

    def leaked(self) -> Any:
        """What is left in the child after closing, as :meth:`Snapshot.leaked` says it."""
        return self.call("result = hosted.leaked()")


class _ChildRegistration:
    """A region of a child's engine."""

    def __init__(self, far: FarChild, number: int, ref: bytes) -> None:
        self._far = far
        self._number = number
        self.ref = ref

    @property
    def users(self) -> int:
        return int(self._far.call("result = hosted.sides[{}].registration.users", self._number))

    def renew(self) -> None:
        self._far.call("hosted.sides[{}].registration.renew()", self._number)

    def close(self) -> None:
        self._far.call("hosted.close_side({})", self._number)


class Hosted:
    """The far engine, in the child itself."""

    def __init__(self, transport: str, config: dict[str, Any]) -> None:
        module, _, name = transport.partition(":")
        made = getattr(__import__(module, fromlist=["_"]), name)()
        self._before = Snapshot.take()
        transports = (made.name,)
        self._engine = Engine(
            EngineConfig(transports=transports, **config), extra={made.name: made}
        )
        self.address = self._engine.addresses[0]
        self.sides: dict[int, LocalSide] = {}
        self._files: dict[int, tuple[int, mmap.mmap]] = {}

    def memory(self, nbytes: int, kind: str, access: str) -> tuple[int, str, int]:
        """A new region: its number, its reference, and a descriptor of its memory."""
        if kind == "allocated":
            side = memory_of(self._engine, nbytes, kind, access)
            assert side.registration.memory is not None
            assert isinstance(side.registration.memory, SharedBuffer)
            fd, file = side.registration.memory.fd, None
        else:
            fd = os.memfd_create("plain-memory")
            os.ftruncate(fd, nbytes)
            file = mmap.mmap(fd, nbytes)
            array: Bytes = np.frombuffer(file, np.uint8)
            side = LocalSide(self._engine.register(array, access=access), array)
        number = side.region.region_id
        self.sides[number] = side
        if file is not None:
            self._files[number] = (fd, file)
        return number, side.registration.ref.hex(), fd

    def close_side(self, number: int) -> None:
        self.sides.pop(number).registration.close()
        if number in self._files:
            os.close(self._files.pop(number)[0])

    def close(self) -> None:
        """End the engine; the regions with it."""
        self._engine.close()
        self.sides.clear()
        for fd, _ in self._files.values():
            os.close(fd)
        self._files.clear()

    def leaked(self) -> dict[str, list[str]]:
        return self._before.leaked()


@dataclass(slots=True)
class Pair:
    """Two engines that are connected, and how a check gets memory in them.

    transport: the near engine's. local, remote: kinds of memory, see :meth:`memory`.
    """

    near: Engine
    far: FarEngine
    peer: Peer
    transport: Transport
    local: str
    remote: str
    seed: int = 1

    def near_memory(self, nbytes: int) -> LocalSide:
        """Registered memory of the near engine, full of seeded bytes."""
        self.seed += 1
        side = memory_of(self.near, nbytes, self.local, READ_WRITE)
        fill(side.array, self.seed)
        return side

    def far_memory(self, nbytes: int, *, access: str = READ_WRITE) -> Side:
        """Registered memory of the far engine, full of seeded bytes."""
        self.seed += 1
        side = self.far.memory(nbytes, self.remote, access)
        fill(side.array, self.seed)
        return side

    def sides(self, nbytes: int) -> tuple[LocalSide, Side, RemoteRegion]:
        """Local memory, remote memory, and the remote region as the local engine knows it."""
        here, there = self.near_memory(nbytes), self.far_memory(nbytes)
        return here, there, self.peer.region(there.registration.ref)

    @property
    def directions(self) -> list[bool]:
        """False for reading, True for writing, as far as the transport can."""
        can = self.transport.capabilities()
        return [write for write, able in ((False, can.pull), (True, can.push)) if able]

    def start(
        self,
        write: bool,
        here: LocalSide,
        a: Spans,
        there: RemoteRegion,
        b: Spans,
        deadline_s: float | None = None,
    ) -> Transfer:
        """Begin a transfer by the near engine."""
        move = self.near.write if write else self.near.read
        return move(here.registration, a, there, b, deadline_s=deadline_s)


def memory_of(engine: Engine, nbytes: int, kind: str, access: str) -> LocalSide:
    """Memory of an engine in this process."""
    if kind == "allocated":
        registration = engine.allocate(nbytes, access=access)
        assert registration.array is not None
        return LocalSide(registration, registration.array)
    array = np.zeros(nbytes, np.uint8)
    return LocalSide(engine.register(array, access=access), array)


def fill(array: Bytes, seed: int) -> None:
    """Seeded bytes, whose period fits no power of two."""
    tile = np.random.default_rng(seed).integers(0, 256, 1_048_573, dtype=np.uint8)
    array[:] = np.resize(tile, array.size)


def take(array: Bytes, spans: Spans) -> Bytes:
    """The bytes of the spans, in order."""
    parts = [array[o : o + n] for o, n in zip(spans.offsets, spans.lengths, strict=True)]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint8)


def move_and_compare(pair: Pair, nbytes: int, local: Spans, remote: Spans) -> None:
    """Move spans in each direction; target spans get the source's bytes, all others keep theirs."""
    for write in pair.directions:
        here, there, region = pair.sides(nbytes)
        source, target = (here, there) if write else (there, here)
        source_spans, target_spans = (local, remote) if write else (remote, local)
        expected, kept = target.array.copy(), source.array.copy()
        moved, at = take(source.array, source_spans), 0
        for offset, length in zip(target_spans.offsets, target_spans.lengths, strict=True):
            expected[offset : offset + length] = moved[at : at + length]
            at += int(length)
        transfer = pair.start(write, here, local, region, remote)
        assert transfer.wait(60.0) == local.nbytes, "it counts another number of bytes"
        name = "write" if write else "read"
        different = np.flatnonzero(target.array != expected)
        assert not different.size, f"{name}: wrong from byte {different[:1]} of {nbytes}"
        assert np.array_equal(source.array, kept), f"{name}: the source was changed"
        here.registration.close()
        there.registration.close()


def failure(call: Callable[..., Any], *arguments: Any) -> KVFerryError | None:
    """The typed error of a call, or of the transfer that it starts; None when all went well."""
    try:
        begun = call(*arguments)
        if isinstance(begun, Transfer):
            begun.wait(BOUNDED_S)
    except KVFerryError as error:
        return error
    return None


def wait_until(condition: Callable[[], bool], otherwise: str) -> None:
    """Look until the condition holds. Raises AssertionError after BOUNDED_S."""
    give_up_at = time.monotonic() + BOUNDED_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < give_up_at, otherwise
        pause.wait(0.0002)


def where(make: Make) -> str:
    """How another process finds a transport's class. Raises ValueError when it cannot."""
    module, name = getattr(make, "__module__", ""), getattr(make, "__qualname__", "")
    if not module or not name.isidentifier() or module == "__main__":
        raise ValueError(
            f"another process cannot import {make!r}: give the transport's class, from a module"
        )
    return f"{module}:{name}"


@contextmanager
def engines(
    make: Make,
    *,
    local: str = "allocated",
    remote: str = "allocated",
    child: Child | None = None,
    wrap: Callable[[Transport], Transport] | None = None,
    spare: Make | None = None,
    **settings: Any,
) -> Iterator[Pair]:
    """Two connected engines with fresh instances of a transport and nothing else.

    child: the process for the far engine; None for this one. wrap: what to make of the near
    engine's transport. spare: makes another transport, for both engines of one process, which may
    take over. settings: of both engines. At the end nothing may be left of them in either
    process, else AssertionError.
    """
    before = Snapshot.take()
    far: FarHere | FarChild | None = None
    near: Engine | None = None
    with tempfile.TemporaryDirectory(prefix="kvferry-") as directory:
        settings = {"directory": directory, **settings}
        transport = make() if wrap is None else wrap(make())
        names = (transport.name,) if spare is None else (transport.name, spare().name)
        config = EngineConfig(name="near", transports=names, **settings)
        try:
            near = Engine(config, extra=_by_name(transport, spare))
            if child is None:
                theirs = dataclasses.replace(config, name="far")
                far = FarHere(Engine(theirs, extra=_by_name(make(), spare)))
                address = far.engine.addresses[0]
            else:
                far = FarChild(child, make, {"name": "far", **settings})
                address = far.address
            yield Pair(near, far, near.connect(address), transport, local, remote)
        finally:
            for engine in (near, far):
                if engine is not None:
                    engine.close()
    left = before.leaked()
    assert not left, f"left behind after closing: {left}"
    if isinstance(far, FarChild):
        left = far.leaked()
        assert not left, f"left behind in the other process: {left}"


def _by_name(transport: Transport, spare: Make | None) -> dict[str, Transport]:
    made = [transport] if spare is None else [transport, spare()]
    return {each.name: each for each in made}
