"""What an inference engine does around the hand-off, in one process: tiny queues, tiny pools.

Every request gets blocks or waits for some, with a limit. Blocks are given back when the hand-off
says so and never before, and go to the next request at once. A request whose KV was loaded is
looked at before its first token and again after its last one.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvferry.errors import KVFerryError
from kvferry.handoff import Claim, ClaimEnd, Offer, OfferEnd

if TYPE_CHECKING:
    from kvferry.testing.simulation.process import Process

QUEUE_MAX = 64
QUEUE_S = 3.0
Answer = Callable[[str, dict[str, Any] | None], None]
"""Called once: how it ended, and prefill's parameters."""


@dataclass(eq=False, slots=True)
class OfferRecord:
    """Prefill's side of one request, as the world sees it."""

    request: int
    process: Process
    n_tokens: int
    blocks: list[int] = field(default_factory=list)
    holder: int = -1
    data: bytes = b""
    offer: Offer | None = None
    offer_id: bytes = b""
    end: str = ""
    is_abandoned: bool = False


@dataclass(eq=False, slots=True)
class ClaimRecord:
    """Decode's side of one request, as the world sees it."""

    request: int
    process: Process
    n_tokens: int
    params: dict[str, Any] | None
    offered: OfferRecord | None
    answer: Answer
    blocks: list[int] = field(default_factory=list)
    holder: int = -1
    claim: Claim | None = None
    claim_id: bytes = b""
    end: str = ""
    is_reading: bool = False
    is_left: bool = False
    is_declined: bool = False


class Serving:
    """Both roles of one process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._rng = random.Random(f"{process.seed}/serving")
        self._waiting: deque[tuple[int, Callable[[list[int], int], None]]] = deque()
        self.naming: OfferRecord | ClaimRecord | None = None
        self.offers: dict[int, OfferRecord] = {}
        self.claims: dict[int, ClaimRecord] = {}
        self._abandoned: set[int] = set()

    def __len__(self) -> int:
        """Requests that wait for blocks."""
        return len(self._waiting)

    # -- blocks ---------------------------------------------------------------------------------

    def _with_blocks(
        self, n_tokens: int, use: Callable[[list[int], int], None], give_up: Callable[[], None]
    ) -> None:
        """Call ``use(blocks, holder)`` when there are blocks; or ``give_up``, in time."""
        entry = (n_tokens, use)
        if len(self._waiting) >= QUEUE_MAX:
            give_up()
            return
        self._waiting.append(entry)
        self._serve_waiting()
        if entry in self._waiting:

            def late() -> None:
                if entry in self._waiting:
                    self._waiting.remove(entry)
                    give_up()

            self._process.after(QUEUE_S, late)

    def _serve_waiting(self) -> None:
        while self._waiting:
            n_tokens, use = self._waiting[0]
            holder = self._process.world.new_holder()
            blocks = self._process.pool.take(n_tokens, holder)
            if blocks is None:
                return
            self._waiting.popleft()
            use(blocks, holder)

    def _free(self, record: OfferRecord | ClaimRecord) -> None:
        wrong = self._process.pool.release(record.blocks, record.holder)
        if wrong:
            self._process.world.watch.violated("memory", f"{self._process.name}: {wrong}")
        record.blocks = []
        self._serve_waiting()

    # -- prefill --------------------------------------------------------------------------------

    def prefill(self, request: int, n_tokens: int, expires_s: float, answer: Answer) -> None:
        """Compute the prompt, offer its KV, and answer with the parameters."""
        record = OfferRecord(request, self._process, n_tokens)

        def compute(blocks: list[int], holder: int) -> None:
            record.blocks, record.holder = blocks, holder
            self._process.after(self._rng.uniform(0.001, 0.02), offer)

        def offer() -> None:
            if request in self._abandoned:
                self._free(record)
                answer("abandoned", None)
                return
            pool, ferry = self._process.pool, self._process.ferry
            record.data = pool.write(record.blocks, request, n_tokens)
            extra = {"first_token": request}
            self.naming = record
            self.offers[request] = record
            try:
                record.offer = ferry.offer(
                    record.blocks,
                    n_tokens,
                    on_end=lambda end: self._offer_ended(record, end),
                    extra=extra,
                    expires_s=expires_s,
                )
            except KVFerryError as error:
                self.offers.pop(request)
                self._free(record)
                answer(error.code, None)
                return
            self._process.world.watch.offered(record, expires_s)
            answer("offered", record.offer.params)

        self._with_blocks(n_tokens, compute, lambda: answer("busy", None))

    def _offer_ended(self, record: OfferRecord, end: OfferEnd) -> None:
        self._process.world.watch.offer_ended(record, end)
        self.offers.pop(record.request, None)
        if record.blocks or not record.n_tokens:
            self._free(record)

    def abandon(self, request: int) -> None:
        """The router, or the scheduler's own deadline: nobody will claim this."""
        self._abandoned.add(request)
        record = self.offers.get(request)
        if record is not None and record.offer is not None:
            self._process.world.watch.withdrawing(record)
            record.offer.cancel()

    # -- decode ---------------------------------------------------------------------------------

    def decode(self, record: ClaimRecord) -> None:
        """Load the KV, or compute it; answer when the last token is out."""
        self.claims[record.request] = record

        def use(blocks: list[int], holder: int) -> None:
            record.blocks, record.holder = blocks, holder
            if record.is_left:
                self._free(record)
            elif record.params is None:
                self._compute(record)
            else:
                self._claim(record)

        def give_up() -> None:
            if record.params is not None:
                self._decline(record)
            self._finish(record, "busy")

        self._with_blocks(record.n_tokens, use, give_up)

    def _claim(self, record: ClaimRecord) -> None:
        deadline_s = self._rng.choice((0.05, 0.5, 2.0, 4.0, 4.0))
        self.naming = record
        self._process.world.watch.claiming(record, deadline_s)
        assert record.params is not None
        try:
            claim = self._process.ferry.claim(
                record.params,
                record.blocks,
                record.n_tokens,
                on_end=lambda end: self._claim_ended(record, end),
                deadline_s=deadline_s,
            )
        except KVFerryError as error:
            record.end = error.code
            self._compute(record)
            return
        record.claim = claim
        if record.is_left and not record.end:
            claim.cancel()

    def _claim_ended(self, record: ClaimRecord, end: ClaimEnd) -> None:
        again = bool(record.end)
        self._process.world.watch.claim_ended(record, end)
        if again:
            return
        if record.is_left:
            self._free(record)
        elif end.error is not None:
            self._compute(record)
        else:
            assert record.offered is not None
            self._run(record, record.offered.data, "loaded")

    def _compute(self, record: ClaimRecord) -> None:
        data = self._process.pool.write(record.blocks, record.request, record.n_tokens)
        self._run(record, data, "computed")

    def _run(self, record: ClaimRecord, data: bytes, how: str) -> None:
        """Make tokens from the blocks: they must hold ``data`` from the first to the last one."""
        self._process.world.watch.token(record, data, how)

        def last() -> None:
            self._process.world.watch.token(record, data, how)
            self._free(record)
            self._finish(record, how)

        self._process.after(self._rng.choice((0.005, 0.03, 0.1)), last)

    def leave(self, request: int) -> None:
        """The client of a request has gone away."""
        record = self.claims.get(request)
        if record is None or record.is_left:
            return
        record.is_left = True
        if record.claim is not None and not record.end:
            record.claim.cancel()
        elif record.claim is None and not record.blocks and record.params is not None:
            self._decline(record)
        self._finish(record, "left")

    def _decline(self, record: ClaimRecord) -> None:
        if record.is_declined:
            return
        record.is_declined = True
        self.naming = None
        assert record.params is not None
        try:
            self._process.ferry.decline(record.params)
        except KVFerryError as error:
            self._process.world.note(self._process.name, "cannot decline:", error.code)

    def _finish(self, record: ClaimRecord, outcome: str) -> None:
        if self.claims.get(record.request) is record:
            del self.claims[record.request]
            record.answer(outcome, None)
