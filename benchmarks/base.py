"""What is measured (:class:`Case`) and who is measured (:class:`Rival`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

KIB, MIB = 1 << 10, 1 << 20


class RivalError(Exception):
    """A rival could not do what it was asked to. The message goes into its row of the table."""


class HungError(RivalError):
    """A rival did not answer before its deadline and was killed."""


class MissingError(RivalError):
    """A rival is not installed here. Nothing was started."""


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of the table.

    total_bytes: bytes moved in one run; also the size of each side's pool.
    block_bytes: size of one block; divides ``total_bytes``. Equal to it means one contiguous span.
    seed: orders the blocks on both sides, each in its own random order.
    """

    total_bytes: int
    block_bytes: int
    seed: int = 1

    @property
    def name(self) -> str:
        if self.is_contiguous:
            return "contiguous"
        if self.block_bytes >= MIB:
            return f"{self.block_bytes // MIB} MiB"
        return f"{self.block_bytes // KIB} KiB"

    @property
    def is_contiguous(self) -> bool:
        return self.block_bytes == self.total_bytes

    @property
    def blocks(self) -> int:
        return self.total_bytes // self.block_bytes

    def offsets(self) -> tuple[I64, I64]:
        """Byte offsets of the blocks in the source pool and in the target pool, int64[blocks]."""
        rng = np.random.default_rng([self.seed, self.block_bytes])
        source, target = rng.permutation(self.blocks), rng.permutation(self.blocks)
        return source * self.block_bytes, target * self.block_bytes

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Sample:
    """One run. seconds: wall clock of the move alone. cpu_s: of all the rival's processes."""

    seconds: float
    cpu_s: float


class Rival(ABC):
    """Something that moves blocks from one process's memory to another's.

    Order of calls: ``start``, then for each case ``prepare``, ``verify`` and several ``run``, at
    last ``stop``. Any call may raise RivalError; after that only ``stop`` is called, and perhaps
    ``start`` again. Every call ends by the rival's own deadline. ``pause`` and ``resume`` bracket
    the turns of the others: a paused rival must use no processor time.
    """

    name: str
    note = ""

    @abstractmethod
    def start(self, pool_bytes: int) -> None:
        """Start the processes, register pools of ``pool_bytes``, connect. MissingError if absent.

        The source pool holds :func:`benchmarks.worker.pattern`, the target pool zeros.
        """

    @abstractmethod
    def prepare(self, case: Case) -> None:
        """Build descriptors and whatever else one would do once; not timed."""

    @abstractmethod
    def run(self) -> Sample:
        """Move the prepared case once. Only the move is timed, by the process that starts it."""

    @abstractmethod
    def verify(self) -> bool | None:
        """Zero the target, move once, compare every byte. None: there are no bytes to compare."""

    @abstractmethod
    def stop(self) -> None:
        """End the processes, by force if needed. Never raises; may be called at any time."""

    def pause(self) -> None:  # noqa: B027 - one that sleeps by itself needs none
        """Give up the processor until ``resume``."""

    def resume(self) -> None:  # noqa: B027
        """Undo ``pause``."""

    def figures(self) -> dict[str, float]:
        """Other measurements that only this rival has; names end in the unit. May be empty."""
        return {}

    def facts(self) -> dict[str, Any]:
        """Versions and settings worth keeping with the results, as plain JSON types."""
        return {}
