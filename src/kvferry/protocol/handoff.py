"""The hand-off: what may happen to an offer (prefill's half) and to a claim (decode's half).
Sans-IO.

Both halves are a table from (state, event) to the next state, and a small class that applies the
table and says what must be done: send this, start that read, report that end. No socket, clock or
thread is known here; time comes in as an argument.

Offer::

    OFFERED --claim--> CLAIMED --confirm--> DELIVERED
       |                  |
       +--cancel, expire--+--stopped, expire, peer_lost--> RELEASED

Claim::

    CLAIMING --granted--> READING --read_done--> CONFIRMING --confirmed--> LOADED
       |                     |                       |
       |                     +--stop--> STOPPING --read_done, read_failed--> FAILED
       +--stop---------------------------------------+--stop--------------> FAILED

``stop`` is any of: cancelled, deadline, withdrawn by the offerer, peer lost. Rules that hold:

* Decode may use the blocks only in LOADED, which only prefill's Confirmed leads to. Prefill
confirms
  only while the offer is CLAIMED by that claim over that session, so its blocks were pinned for the
  whole time of the reading: a late reader can never produce a token.
* A claim's end is reported after its own reading has stopped, never before: from then on its blocks
  can be given to somebody else.
* While CLAIMED, prefill's blocks stay pinned until decode confirms, decode says that its reading
has
  stopped, decode is lost, or the lease expires. Cancelling a claimed offer therefore only withdraws
  it; the end comes with one of those four.
* Every state that is not an end has a deadline.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum

from kvferry.errors import (
    AbortedError,
    DeadlineError,
    KVFerryError,
    PeerLostError,
    RefusedError,
    UsageError,
)
from kvferry.protocol.messages import (
    Claim,
    Confirm,
    Confirmed,
    Granted,
    Message,
    Refused,
    Renew,
    Stopped,
    Withdrawn,
    clip,
)

Session = Hashable
"""Whatever names one connection to one incarnation; a new connection is a new name."""

REFUSALS = {
    "unknown_offer": "no such offer here: it was never made, or its end was long ago",
    "already_claimed": "another claim has this offer",
    "already_delivered": "this offer was delivered before; an offer serves one claim",
    "expired": "the offer's time was over before it was claimed or confirmed",
    "cancelled": "the offering side cancelled",
    "released": "the offer ended early",
}
"""Codes of Refused and Withdrawn, with what they mean."""

FINISHED_MAX = 8192
"""Ended offers that are remembered, so that a late peer hears why instead of 'unknown'."""


class OfferState(Enum):
    OFFERED = "offered"
    CLAIMED = "claimed"
    DELIVERED = "delivered"
    RELEASED = "released"


class ClaimState(Enum):
    CLAIMING = "claiming"
    READING = "reading"
    STOPPING = "stopping"
    CONFIRMING = "confirming"
    LOADED = "loaded"
    FAILED = "failed"


OFFER_TABLE: dict[tuple[OfferState, str], OfferState] = {
    (OfferState.OFFERED, "claim"): OfferState.CLAIMED,
    (OfferState.OFFERED, "cancel"): OfferState.RELEASED,
    (OfferState.OFFERED, "expire"): OfferState.RELEASED,
    (OfferState.CLAIMED, "confirm"): OfferState.DELIVERED,
    (OfferState.CLAIMED, "cancel"): OfferState.CLAIMED,
    (OfferState.CLAIMED, "stopped"): OfferState.RELEASED,
    (OfferState.CLAIMED, "expire"): OfferState.RELEASED,
    (OfferState.CLAIMED, "peer_lost"): OfferState.RELEASED,
}

CLAIM_TABLE: dict[tuple[ClaimState, str], ClaimState] = {
    (ClaimState.CLAIMING, "granted"): ClaimState.READING,
    (ClaimState.CLAIMING, "stop"): ClaimState.FAILED,
    (ClaimState.READING, "read_done"): ClaimState.CONFIRMING,
    (ClaimState.READING, "read_failed"): ClaimState.FAILED,
    (ClaimState.READING, "stop"): ClaimState.STOPPING,
    (ClaimState.STOPPING, "read_done"): ClaimState.FAILED,
    (ClaimState.STOPPING, "read_failed"): ClaimState.FAILED,
    (ClaimState.CONFIRMING, "confirmed"): ClaimState.LOADED,
    (ClaimState.CONFIRMING, "stop"): ClaimState.FAILED,
}

ENDS = {OfferState.DELIVERED, OfferState.RELEASED, ClaimState.LOADED, ClaimState.FAILED}


# -- what must be done ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` over ``session``. If that fails, the session is lost and will be told."""

    session: Session
    message: Message


@dataclass(frozen=True, slots=True)
class StartRead:
    """Read what ``granted`` describes into the claim's blocks; answer by ``read_ended``."""

    claim_id: bytes
    granted: Granted
    deadline: float


@dataclass(frozen=True, slots=True)
class AbortRead:
    """Stop the claim's reading soon; answer by ``read_ended`` when it has stopped."""

    claim_id: bytes


@dataclass(frozen=True, slots=True)
class OfferEnded:
    """The offer's blocks are free from now on. ``code`` is "delivered", or why not."""

    offer_id: bytes
    state: OfferState
    code: str
    message: str
    is_forced: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class ClaimEnded:
    """LOADED: the blocks hold the KV. FAILED: they hold garbage that nothing writes to any more."""

    claim_id: bytes
    state: ClaimState
    error: KVFerryError | None


Action = Send | StartRead | AbortRead | OfferEnded | ClaimEnded


# -- prefill's half ------------------------------------------------------------------------------


@dataclass(slots=True)
class _Offer:
    offer_id: bytes
    payload: bytes
    due: float
    state: OfferState = OfferState.OFFERED
    session: Session = None
    claim_id: bytes = b""
    withdrawn: str = ""


class Offers:
    """All live offers of one engine.

    lease_s: how long a claim stays good without a sign of life.
    offers_max: bound; one more is a BusyError at the caller.
    """

    def __init__(self, *, lease_s: float, offers_max: int = 65536) -> None:
        self.lease_s = lease_s
        self.offers_max = offers_max
        self._offers: dict[bytes, _Offer] = {}
        self._finished: OrderedDict[bytes, tuple[str, bytes, Session]] = OrderedDict()
        self._dues: list[tuple[float, bytes]] = []

    def __len__(self) -> int:
        return len(self._offers)

    def states(self) -> dict[str, int]:
        """Live offers by state."""
        counts = {OfferState.OFFERED.value: 0, OfferState.CLAIMED.value: 0}
        for offer in self._offers.values():
            counts[offer.state.value] += 1
        return counts

    def add(self, offer_id: bytes, payload: bytes, *, expires_at: float) -> None:
        """A new offer. ``payload`` is given to the claimer as it is."""
        if offer_id in self._offers or offer_id in self._finished:
            raise UsageError("an offer id is used once")
        self._offers[offer_id] = _Offer(offer_id, payload, expires_at)
        self._add_due(expires_at, offer_id)

    def claim(self, session: Session, message: Claim, now: float) -> list[Action]:
        offer = self._offers.get(message.offer_id)
        if offer is None:
            return [self._refuse(session, message.claim_id, message.offer_id)]
        if offer.state is OfferState.CLAIMED:
            if (offer.session, offer.claim_id) != (session, message.claim_id):
                return [self._refuse(session, message.claim_id, message.offer_id)]
        else:
            self._step(offer, "claim")
            offer.session, offer.claim_id = session, message.claim_id
            self._extend(offer, now)
        return [
            Send(session, Granted(message.claim_id, message.offer_id, self.lease_s, offer.payload))
        ]

    def renew(self, session: Session, message: Renew, now: float) -> list[Action]:
        for offer_id in message.offer_ids:
            offer = self._offers.get(offer_id)
            if offer and offer.state is OfferState.CLAIMED and offer.session == session:
                offer.due = now + self.lease_s
        return []

    def confirm(self, session: Session, message: Confirm, now: float) -> list[Action]:
        offer = self._offers.get(message.offer_id)
        mine = offer and (offer.session, offer.claim_id) == (session, message.claim_id)
        if not offer or not mine:
            ended = self._finished.get(message.offer_id)
            if ended == ("delivered", message.claim_id, session):
                return [Send(session, Confirmed(message.claim_id, message.offer_id))]
            return [self._refuse(session, message.claim_id, message.offer_id)]
        if offer.withdrawn or now >= offer.due:
            code = offer.withdrawn or "expired"
            actions = self._end(offer, "stopped" if offer.withdrawn else "expire", code)
            return [*actions, self._refuse(session, message.claim_id, message.offer_id)]
        actions = self._end(offer, "confirm", "delivered")
        return [Send(session, Confirmed(message.claim_id, message.offer_id)), *actions]

    def stopped(self, session: Session, message: Stopped, now: float) -> list[Action]:
        offer = self._offers.get(message.offer_id)
        if not offer or (offer.session, offer.claim_id) != (session, message.claim_id):
            return []
        return self._end(offer, "stopped", offer.withdrawn or "released", message.reason)

    def cancel(self, offer_id: bytes, now: float) -> list[Action]:
        """The offering side wants its blocks back. A claimed offer ends when its reader stopped."""
        offer = self._offers.get(offer_id)
        if offer is None or offer.withdrawn:
            return []
        if offer.state is OfferState.OFFERED:
            return self._end(offer, "cancel", "cancelled")
        self._step(offer, "cancel")
        offer.withdrawn = "cancelled"
        return [self._withdraw(offer, "cancelled")]

    def session_lost(self, session: Session) -> list[Action]:
        """The session is over: whoever claimed over it can never confirm."""
        actions: list[Action] = []
        for offer in list(self._offers.values()):
            if offer.state is OfferState.CLAIMED and offer.session == session:
                actions += self._end(offer, "peer_lost", "peer_lost", "the claiming side is gone")
        return actions

    def tick(self, now: float) -> list[Action]:
        """End what is over time, in any order of making and renewing."""
        actions: list[Action] = []
        while self._dues and self._dues[0][0] <= now:
            _, offer_id = heapq.heappop(self._dues)
            offer = self._offers.get(offer_id)
            if offer is None:
                continue
            if offer.due > now:
                heapq.heappush(self._dues, (offer.due, offer_id))
                continue
            if offer.state is OfferState.CLAIMED and not offer.withdrawn:
                actions.append(self._withdraw(offer, "expired"))
            actions += self._end(offer, "expire", offer.withdrawn or "expired")
        return actions

    def due(self) -> float:
        """When :meth:`tick` may have something to do."""
        return self._dues[0][0] if self._dues else float("inf")

    def _extend(self, offer: _Offer, now: float) -> None:
        offer.due = now + self.lease_s
        self._add_due(offer.due, offer.offer_id)

    def _add_due(self, due: float, offer_id: bytes) -> None:
        if len(self._dues) > 1024 + 2 * len(self._offers):
            # Most of these have ended: with far times they would stay for long.
            self._dues = [(offer.due, offer.offer_id) for offer in self._offers.values()]
            heapq.heapify(self._dues)
        heapq.heappush(self._dues, (due, offer_id))

    def _step(self, offer: _Offer, event: str) -> None:
        offer.state = OFFER_TABLE[offer.state, event]

    def _end(self, offer: _Offer, event: str, code: str, message: str = "") -> list[Action]:
        self._step(offer, event)
        del self._offers[offer.offer_id]
        self._finished[offer.offer_id] = (code, offer.claim_id, offer.session)
        while len(self._finished) > FINISHED_MAX:
            self._finished.popitem(last=False)
        text = message or REFUSALS.get(code, code)
        is_forced = event in ("expire", "peer_lost")
        return [OfferEnded(offer.offer_id, offer.state, code, text, is_forced)]

    def _withdraw(self, offer: _Offer, code: str) -> Send:
        return Send(offer.session, Withdrawn(offer.claim_id, offer.offer_id, code, REFUSALS[code]))

    def _refuse(self, session: Session, claim_id: bytes, offer_id: bytes) -> Send:
        if offer_id in self._offers:
            code = "already_claimed"
        elif offer_id in self._finished:
            code = self._finished[offer_id][0]
            code = "already_delivered" if code == "delivered" else code
        else:
            code = "unknown_offer"
        code = code if code in REFUSALS else "released"
        return Send(session, Refused(claim_id, offer_id, code, REFUSALS[code]))


# -- decode's half -------------------------------------------------------------------------------


@dataclass(slots=True)
class _Claim:
    claim_id: bytes
    offer_id: bytes
    deadline: float
    began_at: float
    state: ClaimState = ClaimState.CLAIMING
    session: Session = None
    renew_s: float = 0.0
    renew_at: float = float("inf")
    session_lost: bool = False
    failure: KVFerryError | None = None
    granted: Granted | None = field(default=None, repr=False)


class Claims:
    """All live claims of one engine."""

    def __init__(self) -> None:
        self._claims: dict[bytes, _Claim] = {}

    def __len__(self) -> int:
        return len(self._claims)

    def states(self) -> dict[str, int]:
        """Live claims by state."""
        counts = {state.value: 0 for state in ClaimState if state not in ENDS}
        for claim in self._claims.values():
            counts[claim.state.value] += 1
        return counts

    def add(self, claim_id: bytes, offer_id: bytes, *, deadline: float, now: float) -> None:
        """A new claim; it waits for :meth:`connected`."""
        self._claims[claim_id] = _Claim(claim_id, offer_id, deadline, now)

    def connected(self, claim_id: bytes, session: Session) -> list[Action]:
        """There is a session to the offering engine: ask."""
        claim = self._claims.get(claim_id)
        if claim is None or claim.session is not None:
            return []
        claim.session = session
        return [Send(session, Claim(claim_id, claim.offer_id))]

    def granted(self, session: Session, message: Granted, now: float) -> list[Action]:
        claim = self._mine(session, message.claim_id)
        if claim is None:
            # It ended meanwhile. Its Stopped is on the way, or was sent before this arrived; say it
            # again, since prefill must not wait for a lease to run out.
            gone = "the claim ended before the grant arrived"
            return [Send(session, Stopped(message.claim_id, message.offer_id, gone))]
        if claim.state is not ClaimState.CLAIMING:
            return []
        self._step(claim, "granted")
        claim.granted = message
        claim.renew_s = max(message.lease_s / 4, 0.01)
        claim.renew_at = now + claim.renew_s
        return [StartRead(claim.claim_id, message, claim.deadline)]

    def refused(self, session: Session, message: Refused) -> list[Action]:
        return self._denied(session, message, "refused")

    def withdrawn(self, session: Session, message: Withdrawn) -> list[Action]:
        return self._denied(session, message, "withdrawn")

    def confirmed(self, session: Session, message: Confirmed) -> list[Action]:
        claim = self._mine(session, message.claim_id)
        if claim is None or claim.state is not ClaimState.CONFIRMING:
            return []
        return self._end(claim, "confirmed")

    def read_ended(self, claim_id: bytes, error: KVFerryError | None) -> list[Action]:
        """The claim's reading has stopped: every byte is there, or ``error`` says why not."""
        claim = self._claims.get(claim_id)
        if claim is None or claim.state not in (ClaimState.READING, ClaimState.STOPPING):
            return []
        if claim.state is ClaimState.READING and error is None:
            self._step(claim, "read_done")
            return [Send(claim.session, Confirm(claim_id, claim.offer_id))]
        claim.failure = claim.failure or error
        return self._end(claim, "read_done" if error is None else "read_failed")

    def cancel(self, claim_id: bytes) -> list[Action]:
        return self._stop(claim_id, AbortedError("the claim was cancelled"))

    def failed(self, claim_id: bytes, error: KVFerryError) -> list[Action]:
        """Something else broke, such as the connection attempt."""
        return self._stop(claim_id, error)

    def session_lost(self, session: Session, error: KVFerryError) -> list[Action]:
        actions: list[Action] = []
        for claim in list(self._claims.values()):
            if claim.session == session:
                claim.session_lost = True
                claim.renew_at = float("inf")
                lost = PeerLostError(error.message, peer=error.peer, fix=error.fix)
                actions += self._stop(claim.claim_id, lost)
        return actions

    def tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        renew: dict[Session, list[bytes]] = {}
        for claim in list(self._claims.values()):
            if now >= claim.deadline and claim.failure is None:
                waited = now - claim.began_at
                actions += self._stop(
                    claim.claim_id,
                    DeadlineError(
                        f"the hand-off was not complete after {waited:.2f} s",
                        fix="raise the claim's deadline if the path is only slow",
                    ),
                )
            # One that is stopping still reads, so its lease must go on.
            if claim.claim_id in self._claims and now >= claim.renew_at:
                claim.renew_at = now + claim.renew_s
                renew.setdefault(claim.session, []).append(claim.offer_id)
        for session, ids in renew.items():
            actions += [Send(session, Renew(part)) for part in _parts(ids, 8192)]
        return actions

    def due(self) -> float:
        """When :meth:`tick` may have something to do."""
        return min((_due(claim) for claim in self._claims.values()), default=float("inf"))

    def _mine(self, session: Session, claim_id: bytes) -> _Claim | None:
        claim = self._claims.get(claim_id)
        return claim if claim is not None and claim.session == session else None

    def _denied(self, session: Session, message: Refused | Withdrawn, what: str) -> list[Action]:
        if self._mine(session, message.claim_id) is None:
            return []
        text = f"the offering side has {what} the hand-off: {message.message}"
        fix = "start again from prefill, or compute the prompt here"
        return self._stop(message.claim_id, RefusedError(text, code=message.code, fix=fix))

    def _stop(self, claim_id: bytes, error: KVFerryError) -> list[Action]:
        claim = self._claims.get(claim_id)
        if claim is None or claim.failure is not None:
            return []
        claim.failure = error.located(stage=claim.state.value)
        if claim.state is ClaimState.READING:
            self._step(claim, "stop")
            return [AbortRead(claim_id)]
        return self._end(claim, "stop")

    def _step(self, claim: _Claim, event: str) -> None:
        claim.state = CLAIM_TABLE[claim.state, event]

    def _end(self, claim: _Claim, event: str) -> list[Action]:
        self._step(claim, event)
        del self._claims[claim.claim_id]
        actions: list[Action] = []
        if claim.state is ClaimState.FAILED:
            assert claim.failure is not None
            if claim.session is not None and not claim.session_lost:
                reason = clip(claim.failure.message)
                actions.append(Send(claim.session, Stopped(claim.claim_id, claim.offer_id, reason)))
        actions.append(ClaimEnded(claim.claim_id, claim.state, claim.failure))
        return actions


def _due(claim: _Claim) -> float:
    """When a claim needs a tick. Its deadline says nothing any more once it is stopping."""
    return claim.renew_at if claim.failure else min(claim.deadline, claim.renew_at)


def _parts(ids: list[bytes], size: int) -> Iterable[list[bytes]]:
    return (ids[i : i + size] for i in range(0, len(ids), size))
