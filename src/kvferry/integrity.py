"""Comparing what arrived with what the owner has: asking for digests, and answering for them.

After a move, over whichever transport, the side that began it asks the owner of the other region
for digests of the very spans, over the session, and computes its own meanwhile. So the comparison
covers the whole way, from the owner's memory to the memory here, and needs nothing from a
transport. Both sides compute in mover threads, never in the control thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kvferry import digests
from kvferry.errors import (
    AbortedError,
    BoundsError,
    BusyError,
    CorruptError,
    KVFerryError,
    ProtocolError,
)
from kvferry.memory.places import lend
from kvferry.peers import Peer
from kvferry.protocol import messages
from kvferry.protocol.messages import Digests, Failure, Verify
from kvferry.regions import U64, Spans
from kvferry.transports.base import Operation

if TYPE_CHECKING:
    from kvferry.engine import Engine

log = logging.getLogger(__name__)

ASKED_MAX = 1024
"""Requests of one peer that may wait to be answered."""


class Verification:
    """The comparison of one operation that has moved its bytes. Tables change under the lock.

    ended: called once, under the lock, when nothing reads the local memory any more: with None if
    all digests are equal, a CorruptError if not, or why they could not be compared.
    """

    def __init__(
        self,
        engine: Engine,
        op: Operation,
        *,
        sampled: bool,
        ended: Callable[[KVFerryError | None], None],
    ) -> None:
        self._engine = engine
        self._op = op
        self._ended = ended
        index, begin, self._lengths = digests.choose(op.lengths, sampled=sampled, seed=op.op_id)
        self._local = op.local_offsets[index] + begin
        self._remote = op.remote_offsets[index] + begin
        self._batches = deque(digests.batches(self._lengths))
        self._mine: U64 | None = None
        self._theirs: U64 | None = None
        self._is_reading = False
        self._bad = 0
        self._first_bad = -1
        self._error: KVFerryError | None = None
        self._is_over = False

    def start(self) -> None:
        """Ask for the first batch. Under the lock."""
        self._ask()

    def stop(self, error: KVFerryError) -> None:
        """End with ``error`` as soon as nothing reads the memory. Under the lock."""
        self._error = self._error or error
        if not self._is_reading and not self._is_over:
            self._is_over = True
            self._ended(self._error)

    def _ask(self) -> None:
        batch = self._batches[0]
        op = self._op
        self._mine = self._theirs = None

        def make(number: int) -> Verify:
            return Verify(
                request_id=number,
                region_id=op.remote.region_id,
                token=op.remote.token,
                generation=op.remote.generation,
                offsets=self._remote[batch].tobytes(),
                lengths=self._lengths[batch].tobytes(),
                kind=digests.KIND,
            )

        try:
            peer = self._engine.connections.find(op.remote.peer)
            peer.request(make, op.deadline, self._answered)
        except KVFerryError as error:
            self.stop(error)
            return
        self._engine.later(self._compute_soon)

    def _compute_soon(self) -> None:
        try:
            self._engine.run(self._compute)
        except KVFerryError as error:
            with self._engine.locked():
                self.stop(error)

    def _compute(self) -> None:
        """The digests of the local side, in a mover."""
        engine, batch = self._engine, self._batches[0]
        with engine.locked():
            if self._is_over:
                return
            self._is_reading = True
        addresses = self._local[batch].view("u8") + np.uint64(self._op.local.address)
        error: KVFerryError | None = None
        mine = None
        try:
            with lend(engine.devices, self._op.local.kind, self._op.local.device) as place:
                mine = digests.digest_of(
                    place, addresses, self._lengths[batch], lambda: self._error is not None
                )
        except KVFerryError as failure:
            error = failure
        except Exception as failure:
            log.exception("computing digests failed; this is a bug in kvferry")
            error = AbortedError(f"internal error: {failure}")
        with engine.locked():
            self._is_reading = False
            self._mine = mine
            if error is not None or self._error is not None:
                self.stop(error or AbortedError("stopped"))
            else:
                self._compare()

    def _answered(self, answer: Any, error: KVFerryError | None) -> None:
        """The owner's digests, or why there are none."""
        with self._engine.locked():
            if self._is_over:
                return
            if error is None:
                expected = self._lengths[self._batches[0]].size * digests.DIGEST_BYTES
                if not isinstance(answer, Digests) or len(answer.values) != expected:
                    error = ProtocolError("the owner answered with another number of digests")
                else:
                    self._theirs = np.frombuffer(answer.values, "<u8")
            if error is not None:
                self.stop(error.located(stage="verify"))
            else:
                self._compare()

    def _compare(self) -> None:
        """Go on when both sides of a batch are known."""
        if self._mine is None or self._theirs is None:
            return
        wrong = np.flatnonzero(self._mine != self._theirs)
        batch = self._batches.popleft()
        if wrong.size and not self._bad:
            self._first_bad = batch.start + int(wrong[0])
        self._bad += int(wrong.size)
        if self._batches:
            self._ask()
            return
        self._is_over = True
        self._ended(self._verdict())

    def _verdict(self) -> CorruptError | None:
        if not self._bad:
            return None
        first = self._first_bad
        return CorruptError(
            f"{self._bad} of {self._lengths.size} compared spans differ from the owner's bytes; "
            f"the first: {self._lengths[first]} bytes at local offset {self._local[first]}, remote "
            f"offset {self._remote[first]}",
            stage="verify",
            fix="the path or the hardware changes bytes, or one side's memory was written to "
            "during the transfer",
        )


class Answers:
    """The owner's half: digests for peers, one request of a peer after the other."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._asked: dict[Peer, deque[Verify]] = {}

    def asked(self, peer: Peer, message: Verify) -> None:
        """A peer wants digests. Under the lock."""
        queue = self._asked.get(peer)
        if queue is not None:
            if len(queue) >= ASKED_MAX:
                busy = BusyError(f"{ASKED_MAX} requests for digests wait already")
                self._refuse(peer, message, busy)
            else:
                queue.append(message)
            return
        # One mover at most works for a peer: however much it asks, copies go on.
        self._asked[peer] = deque([message])
        self._engine.later(lambda: self._serve_soon(peer))

    def _serve_soon(self, peer: Peer) -> None:
        try:
            self._engine.run(lambda: self._serve(peer))
        except KVFerryError as error:
            with self._engine.locked():
                for message in self._asked.pop(peer):
                    self._refuse(peer, message, error)

    def _serve(self, peer: Peer) -> None:
        """Answer what waits, in a mover."""
        while True:
            with self._engine.locked():
                queue = self._asked[peer]
                if not queue or peer.lost is not None:
                    del self._asked[peer]
                    return
                message = queue.popleft()
            try:
                answer = self._digests(peer, message)
            except KVFerryError as failure:
                with self._engine.locked():
                    self._refuse(peer, message, failure)
            except Exception as failure:
                log.exception("answering for digests failed; this is a bug in kvferry")
                with self._engine.locked():
                    self._refuse(peer, message, AbortedError(f"internal error: {failure}"))
            else:
                with self._engine.locked():
                    peer.send(answer)

    def _digests(self, peer: Peer, message: Verify) -> Digests:
        if message.kind != digests.KIND:
            raise ProtocolError(f"digests of kind {message.kind!r} are not known here")
        if len(message.offsets) % 8 or len(message.offsets) != len(message.lengths):
            raise ProtocolError("a request for digests with broken span arrays")
        spans = Spans.of(
            np.frombuffer(message.offsets, "<i8"), np.frombuffer(message.lengths, "<i8")
        )
        if len(spans) > digests.BATCH_PIECES_MAX or spans.nbytes > digests.BATCH_BYTES_MAX:
            raise BoundsError(
                f"digests of {len(spans)} spans with {spans.nbytes} bytes are too much for one "
                "request"
            )
        access = self._engine.access(
            message.region_id, message.token, message.generation, spans, write=False
        )
        with access as memory, lend(self._engine.devices, memory.kind, memory.device) as place:
            values = digests.digest_of(
                place,
                memory.addresses,
                memory.lengths,
                lambda: peer.lost is not None or self._engine.is_closed,
            )
        if values is None:
            raise AbortedError("nobody waits for these digests any more")
        return Digests(message.request_id, values.astype("<u8").tobytes())

    def _refuse(self, peer: Peer, message: Verify, error: KVFerryError) -> None:
        peer.send(Failure(message.request_id, error.code, messages.explain(error)))
