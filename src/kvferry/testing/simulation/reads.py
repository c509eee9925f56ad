"""Virtual reading: bytes that are copied piece by piece, while the world goes on.

A mapped read copies from the owner's memory without the owner: also when that is frozen or dead, or
has given the blocks to somebody else. A streamed read needs an owner that runs and a way that is
open. Both stop only between two pieces.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from kvferry.errors import AbortedError, DeadlineError, KVFerryError, TransferError
from kvferry.regions import Spans
from kvferry.testing.simulation.pool import SLOT, BlockPool
from kvferry.transfer import Transfer
from kvferry.transports.base import RemoteRegion

if TYPE_CHECKING:
    from kvferry.testing.simulation.process import Process

WAIT_S = 0.1
"""A streamed read looks up so often while nothing arrives."""


class Reads:
    """The reads of one process; in the place of the engine's ``moves``."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._count = 0
        self.claim_id = b""
        self.running: dict[Transfer, _Read] = {}

    def start(
        self, local: Spans, region: RemoteRegion, remote: Spans, deadline_s: float
    ) -> Transfer:
        """See Engine.read. Some fail at once, some are over before this returns."""
        self._count += 1
        rng = random.Random(f"{self._process.seed}/read{self._count}")
        if rng.random() < 0.02:
            raise TransferError("the read could not be started", fix="try again")
        transfer = Transfer(
            self._count, local.nbytes, write=False, peer_name="", cancel=self._cancel
        )
        deadline = self._process.clock.now() + deadline_s
        read = _Read(self._process, transfer, region, (local, remote), deadline, rng)
        self.running[transfer] = read
        self._process.world.watch.read_began(self._process, self.claim_id, transfer)
        if read.is_mapped and rng.random() < 0.2:
            while transfer in self.running:
                read.copy()
        else:
            self._process.after(rng.uniform(0.0, 0.001), read.step)
        return transfer

    def due(self) -> float:
        return min((read.deadline for read in self.running.values()), default=float("inf"))

    def tick(self, now: float) -> None:
        for read in list(self.running.values()):
            if now >= read.deadline:
                read.deadline = float("inf")
                read.stop(DeadlineError("the read was not complete in time"))

    def on_peer_lost(self, peer: Any, error: KVFerryError) -> None:
        for read in list(self.running.values()):
            if read.region.peer == peer.incarnation:
                read.stop(error)

    def abort_all(self) -> None:
        for read in list(self.running.values()):
            read.stop(AbortedError("the engine was closed"))

    def _cancel(self, transfer: Transfer) -> None:
        read = self.running.get(transfer)
        if read is not None:
            read.stop(AbortedError("the transfer was cancelled"))


class _Read:
    """One read: pairs of slots that are left, and how fast it is."""

    def __init__(
        self,
        process: Process,
        transfer: Transfer,
        region: RemoteRegion,
        spans: tuple[Spans, Spans],
        deadline: float,
        rng: random.Random,
    ) -> None:
        self.region = region
        self.deadline = deadline
        self.is_mapped = rng.random() < 0.6
        self._process = process
        self._transfer = transfer
        self._rng = rng
        source, self._source = process.world.memories[region.token]
        self._owner = source
        self._left = list(zip(_slots(spans[0]), _slots(spans[1]), strict=True))
        self._fails_at = rng.randrange(len(self._left)) if rng.random() < 0.03 else -1
        self._pace_s = rng.choice((0.0002, 0.0002, 0.002, 0.02, 0.1, 0.3))
        self._size = max(1, len(self._left) // rng.choice((1, 3, 6, 12)))
        self._why: KVFerryError | None = None
        self._began = process.clock.now()
        transfer.path = "mapped/pull" if self.is_mapped else "streamed/pull"

    def stop(self, why: KVFerryError) -> None:
        self._why = self._why or why

    def step(self) -> None:
        """Copy the next piece, if it can come, and go on until the end or a reason to stop."""
        if not self.is_mapped and not self._flows():
            if self._owner.is_gone:
                self.stop(TransferError("the lane broke"))
            if self._why is not None:
                self._end(self._why)
            else:
                self._process.after(WAIT_S, self.step)
            return
        self.copy()
        if self._transfer in self._process.reads.running:
            self._process.after(self._pace_s * self._rng.uniform(0.3, 1.0), self.step)

    def copy(self) -> None:
        """Copy one piece; only then is it seen that there is a reason to stop."""
        target: BlockPool = self._process.pool
        for _ in range(min(self._size, len(self._left))):
            if len(self._left) == self._fails_at:
                self.stop(TransferError("the path broke"))
                break
            mine, theirs = self._left.pop()
            self._process.world.watch.writing(self._process, self._transfer, mine)
            slot = self._source.memory[theirs : theirs + SLOT.size]
            target.memory[mine : mine + SLOT.size] = slot
        if self._why is not None:
            self._end(self._why)
        elif not self._left:
            self._end(None)

    def _flows(self) -> bool:
        owner = self._owner
        network = self._process.world.network
        ways = network.both(owner.host, self._process.host)
        return not (owner.is_gone or owner.is_frozen or any(way.black for way in ways))

    def _end(self, error: KVFerryError | None) -> None:
        del self._process.reads.running[self._transfer]
        moved = self._transfer.nbytes - len(self._left) * SLOT.size
        self._process.world.watch.read_ended(self._transfer)
        self._transfer._finish(moved, error, self._process.clock.now() - self._began)


def _slots(spans: Spans) -> list[int]:
    """Byte offsets of the slots that spans cover, in their order."""
    return [
        at
        for begin, nbytes in zip(spans.offsets.tolist(), spans.lengths.tolist(), strict=True)
        for at in range(begin, begin + nbytes, SLOT.size)
    ]
