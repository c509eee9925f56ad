"""What must never happen, and what must have happened in time. Judges; changes nothing.

The first violation ends a run. Each check is named, so that a shorter run that fails by the same
name counts as the same failure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvferry.connections import STRANGERS_MAX
from kvferry.handoff import PARAMS_KEY, ClaimEnd, OfferEnd
from kvferry.peers import OUTBOX_BYTES_MAX, PENDING_MAX, Peer
from kvferry.protocol.handoff import FINISHED_MAX, ClaimState, OfferEnded
from kvferry.protocol.messages import Claim, Confirm, Message
from kvferry.testing.simulation.pool import explain
from kvferry.testing.simulation.serving import QUEUE_MAX, ClaimRecord, OfferRecord
from kvferry.transfer import Transfer

if TYPE_CHECKING:
    from kvferry.testing.simulation.process import Process
    from kvferry.testing.simulation.world import World

STOP_S = 1.0
"""How long a read may take to stop: the hand-off promises "well under a second"."""
NOTICE_S = 1.0
"""How long news may take between two processes that run, over a way that is open."""
SLACK_S = 0.5
LOST_S = 1.5
DUES_MAX = 4096
_ASKING = {Claim: ClaimState.CLAIMING, Confirm: ClaimState.CONFIRMING}


@dataclass(frozen=True, slots=True)
class Violation:
    """What went wrong: which check, when, and the facts in words."""

    check: str
    at_s: float
    text: str


class Watch:
    """See the module. One per world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.violation: Violation | None = None
        self.ids: dict[bytes, str] = {}
        self.claims: dict[bytes, ClaimRecord] = {}
        self.offers: dict[bytes, OfferRecord] = {}
        self.counts: dict[str, int] = {}
        self._reading: dict[Transfer, ClaimRecord] = {}
        self._loaded: dict[OfferRecord, ClaimRecord] = {}

    def violated(self, check: str, text: str) -> None:
        if self.violation is None:
            self.violation = Violation(check, self._world.schedule.now, text)

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def overdue(
        self, check: str, text: str, process: Process, limit_s: float, is_done: Callable[[], bool]
    ) -> None:
        """``is_done`` must hold after ``limit_s`` of life of ``process``, frozen time left out."""
        schedule = self._world.schedule
        due, frozen_s = schedule.now + limit_s, process.frozen_total_s()

        def look() -> None:
            if process.is_gone or is_done():
                return
            left = due + process.frozen_total_s() - frozen_s - schedule.now
            if left > 1e-6 or process.is_frozen:
                schedule.after(max(left, 0.01), look)
            else:
                self.violated(check, f"{process.name}: {text}, {limit_s:g} s after it was due")

        schedule.after(limit_s, look)

    def promptly(
        self,
        text: str,
        listeners: list[Process],
        hosts: tuple[str, str],
        limit_s: float,
        is_done: Callable[[], bool],
    ) -> None:
        """``is_done`` must hold after ``limit_s``, if nothing disturbed the way or who listens."""
        began = self._world.schedule.now

        def look() -> None:
            if not is_done() and not self._world.disturbed(listeners, hosts, began):
                self.violated("notice", f"{text}, {limit_s:g} s after it happened")

        self._world.schedule.after(limit_s, look)

    def _between(
        self, text: str, ends: list[Process], limit_s: float, is_done: Callable[[], bool]
    ) -> None:
        one, two = ends
        self.promptly(text, ends, (one.host, two.host), limit_s, is_done)

    # -- ids --------------------------------------------------------------------------------------

    def named(self, process: Process, made: bytes) -> None:
        """A process made an id."""
        record, process.serving.naming = process.serving.naming, None
        kind = "offer" if isinstance(record, OfferRecord) else "claim"
        words = f"{kind} of request {record.request}" if record else "declining claim"
        if made in self.ids:
            self.violated("id", f"{process.name}: the id of the {self.ids[made]} is used again")
        self.ids[made] = words
        if isinstance(record, OfferRecord):
            record.offer_id = made
            self.offers[made] = record
        elif record is not None:
            record.claim_id = made
            self.claims[made] = record

    # -- offers -----------------------------------------------------------------------------------

    def offered(self, record: OfferRecord, expires_s: float) -> None:
        self.count("offers")
        process, lease_s = record.process, self._world.lease_s
        # Claimed at the last moment, and renewed until decode's own deadline.
        limit_s = expires_s + 4.0 + STOP_S + lease_s + LOST_S + SLACK_S
        text = f"the offer of request {record.request} has not ended"
        self.overdue("deadline", text, process, limit_s, lambda: bool(record.end))

    def withdrawing(self, record: OfferRecord) -> None:
        """Its end was asked for: the reader must hear it, stop, and say so."""
        live = record.process.ferry._offers._offers.get(record.offer_id)
        claim = self.claims.get(live.claim_id) if live is not None else None
        if claim is not None:
            text = f"the offer of request {record.request} was withdrawn and lives on"
            ends = [record.process, claim.process]
            self._between(text, ends, NOTICE_S, lambda: bool(record.end))

    def offer_released(self, process: Process, action: OfferEnded) -> None:
        """The tables let go of an offer: nobody may read it now, unless that was forced."""
        record = self.offers.get(action.offer_id)
        if record is None or action.is_forced:
            return
        for claim in self._reading.values():
            if claim.offered is record and not claim.process.is_gone:
                self.violated(
                    "early",
                    f"{process.name} freed the blocks of request {record.request} "
                    f"({action.code}) while {claim.process.name} was reading them",
                )

    def offer_ended(self, record: OfferRecord, end: OfferEnd) -> None:
        name = f"{record.process.name}: the offer of request {record.request}"
        if record.end:
            self.violated("once", f"{name} ended twice: {record.end}, then {end.code}")
        record.end = end.code
        self.count("offer " + end.code)
        self._world.note(
            record.process.name, f"ends its offer of request {record.request}:", end.code
        )
        if end.code != "delivered" and record in self._loaded:
            self.violated("agreement", f"{name} ended {end.code}, and was loaded")

    # -- claims -----------------------------------------------------------------------------------

    def claiming(self, record: ClaimRecord, deadline_s: float) -> None:
        self.count("claims")
        text = f"the claim of request {record.request} has not ended"
        limit_s = deadline_s + STOP_S + SLACK_S
        self.overdue("deadline", text, record.process, limit_s, lambda: bool(record.end))

    def said(self, process: Process, session: object, message: Message) -> None:
        """A message is about to be sent: a claim goes to the incarnation that made the offer."""
        self._world.note(process.name, "says", message)
        if not isinstance(message, (Claim, Confirm)):
            return
        record = self.claims.get(message.claim_id)
        if record is None or record.params is None or not isinstance(session, Peer):
            return
        if record.params[PARAMS_KEY]["engine"] != session.incarnation.hex():
            self.violated(
                "incarnation",
                f"{process.name} claims request {record.request} from {session.name}, and another "
                "incarnation made the offer",
            )
        elif record.offered is not None:
            claim_id, state = message.claim_id, _ASKING[type(message)]
            text = f"{process.name} asked for request {record.request} and has no answer"

            def is_answered() -> bool:
                live = process.ferry._claims._claims.get(claim_id)
                return live is None or live.state is not state

            self._between(text, [process, record.offered.process], NOTICE_S, is_answered)

    def session_lost(self, process: Process, peer: Peer) -> None:
        """A session has ended, and the tables were told: nothing hangs on it for long."""
        ferry = process.ferry
        if any(offer.session is peer for offer in ferry._offers._offers.values()):
            self.violated("notice", f"{process.name} keeps blocks for {peer.name}, which is lost")
        for claim in ferry._claim_of.values():
            record = self.claims.get(claim.claim_id)
            if record is not None and claim.peer is peer:
                text = f"the claim of request {record.request} hangs on a lost session"
                self.overdue("notice", text, process, STOP_S, partial(_has_ended, record))

    def read_stopping(self, process: Process, claim_id: bytes) -> None:
        record = self.claims.get(claim_id)
        if record is not None:
            text = f"the claim of request {record.request} was told to stop and has not"
            self.overdue("stopping", text, process, STOP_S, lambda: bool(record.end))

    def read_began(self, process: Process, claim_id: bytes, transfer: Transfer) -> None:
        record = self.claims.get(claim_id)
        if record is not None:
            self._reading[transfer] = record

    def read_ended(self, transfer: Transfer) -> None:
        self._reading.pop(transfer, None)

    def writing(self, process: Process, transfer: Transfer, offset: int) -> None:
        """A read is about to write a slot of its own process' memory."""
        record = self._reading.get(transfer)
        if record is None or process.pool.owner_of(offset) != record.holder:
            request = record.request if record else "a declined offer"
            self.violated(
                "late write",
                f"{process.name}: the read of request {request} writes into a block that belongs "
                "to somebody else by now",
            )

    def claim_ended(self, record: ClaimRecord, end: ClaimEnd) -> None:
        process = record.process
        name = f"{process.name}: the claim of request {record.request}"
        code = end.error.code if end.error is not None else "loaded"
        self._world.note(process.name, f"ends its claim of request {record.request}:", code)
        if record.end:
            self.violated("once", f"{name} ended twice: {record.end}, then {code}")
        record.end = code
        self.count("claim " + code)
        if any(claim is record for claim in self._reading.values()):
            self.violated("late write", f"{name} ended while its read goes on")
        offered = record.offered
        if offered is None:
            return
        if code == "loaded":
            if end.extra.get("first_token") != record.request:
                self.violated("token", f"{name} brought another request's first token")
            if offered in self._loaded:
                self.violated("agreement", f"{name}: another claim had loaded the same offer")
            self._loaded[offered] = record
            if offered.end not in ("", "delivered"):
                self.violated("agreement", f"{name} was loaded, its offer was {offered.end}")
        else:
            self._expect_release(record, offered)

    def _expect_release(self, record: ClaimRecord, offered: OfferRecord) -> None:
        """The claim failed: unless the session did, the offer's blocks come back soon."""
        claim = record.claim
        if claim is None or claim.peer is None or not claim.peer.is_open():
            return
        text = (
            f"{record.process.name} gave up its claim of request {record.request}, and "
            f"{offered.process.name} still keeps the blocks for it"
        )

        def is_done() -> bool:
            live = offered.process.ferry._offers._offers.get(offered.offer_id)
            return live is None or live.claim_id != record.claim_id

        self._between(text, [record.process, offered.process], NOTICE_S, is_done)

    def token(self, record: ClaimRecord, data: bytes, how: str) -> None:
        """A token is about to be made from the blocks of a request."""
        found = record.process.pool.read(record.blocks, record.n_tokens)
        if found != data:
            self.violated(
                "token",
                f"{record.process.name} makes a token of request {record.request} ({how}) from "
                f"wrong bytes: {explain(found, data)}",
            )

    # -- processes ------------------------------------------------------------------------------

    def died(self, process: Process) -> None:
        """Whoever was connected hears the end of the stream, and gives up what hung on it."""
        for other in self._world.processes():
            if other is process:
                continue
            text = f"{other.name} does not know that {process.name} is gone"
            for peer in other.engine.connections.all_peers():
                if peer.incarnation == process.incarnation:
                    hosts = (process.host, other.host)
                    self.promptly(text, [other], hosts, NOTICE_S, partial(_is_lost, peer))

    def after_step(self, process: Process) -> None:
        """After each event of a process: its tables agree, and no queue is too long."""
        ferry = process.ferry
        if len(ferry._offer_of) != len(ferry._offers) or len(ferry._claim_of) != len(ferry._claims):
            self.violated("agreement", f"{process.name}: the shell and the tables disagree")
        connections = process.engine.connections
        lengths = (
            (len(process.serving), QUEUE_MAX, "requests waiting"),
            (len(connections._strangers), STRANGERS_MAX, "strangers"),
            (len(ferry._offers._finished), FINISHED_MAX, "ended offers"),
            (len(ferry._offers._dues), DUES_MAX, "times of offers"),
        )
        for length, limit, what in lengths:
            if length > limit:
                self.violated("queue", f"{process.name}: {length} {what}; at most {limit}")
        for peers in connections._peers.values():
            for peer in peers:
                self._check_peer(process, peer)

    def _check_peer(self, process: Process, peer: Peer) -> None:
        """Nothing piles up for a peer."""
        if peer._outbox_bytes > OUTBOX_BYTES_MAX or len(peer._pending) > PENDING_MAX:
            self.violated("queue", f"{process.name}: too much waits for {peer.name}")


def _is_lost(peer: Peer) -> bool:
    return peer.lost is not None


def _has_ended(record: ClaimRecord) -> bool:
    return bool(record.end)
