"""Memory that may still be written to, although the transfer has ended for its caller.

A transport that was told to stop says when it has. One that does not say so in time, because of a
bug or a device that lost a completion, must not keep the caller waiting for ever, and its target
must not be given to somebody else either. So the transfer ends with its error, and its bytes stay
here until the late completion comes or the transport is closed.
"""

from __future__ import annotations

import numpy as np

from kvferry.errors import BusyError
from kvferry.transfer import Transfer
from kvferry.transports.base import Operation


class Quarantine:
    """Operations that nobody waits for any more. Belongs to an engine, used under its lock."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Transfer, Operation]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def add(self, transfer: Transfer, op: Operation) -> None:
        """Keep the operation's memory from other use."""
        self._held[op.op_id] = (transfer, op)

    def release(self, op: Operation) -> Transfer | None:
        """The operation has stopped; its transfer, or None if it was not held."""
        held = self._held.get(op.op_id)
        if held is None or held[1] is not op:
            return None
        del self._held[op.op_id]
        return held[0]

    def release_all(self) -> list[Transfer]:
        """Every transport is closed, so nothing writes any more."""
        transfers = [transfer for transfer, _ in self._held.values()]
        self._held.clear()
        return transfers

    def uses(self, region_id: int) -> bool:
        """Whether a held operation may touch this region of ours."""
        return any(op.local.region_id == region_id for _, op in self._held.values())

    def check(self, op: Operation) -> None:
        """Raise BusyError when a held operation may still write where ``op`` would."""
        for transfer, held in self._held.values():
            if write_same_bytes(op, held):
                raise BusyError(
                    f"transfer {transfer.transfer_id} has ended, but its transport may still "
                    "write to the same bytes",
                    peer=held.peer.name,
                    path=transfer.path,
                    stage="submit",
                    fix="use other memory until that transfer's is_quiet() is true",
                )


def write_same_bytes(one: Operation, other: Operation) -> bool:
    """Whether two operations of one engine have a target byte in common."""
    if one.write != other.write or (one.write and one.remote.key != other.remote.key):
        return False
    begins, others = (
        op.remote_offsets if op.write else op.local_addresses().view("i8") for op in (one, other)
    )
    order = np.argsort(others, kind="stable")
    firsts, ends = others[order], (others + other.lengths)[order]
    # Of the spans that begin before the end of ours, the one that reaches furthest decides.
    reach = np.concatenate(([-1], np.maximum.accumulate(ends)))
    before = reach[np.searchsorted(firsts, begins + one.lengths, side="left")]
    return bool(np.any(before > begins))
