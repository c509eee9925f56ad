"""A prefill, some decodes, and wires between them that lose, delay, repeat and reorder.

The world carries out what the tables ask for and checks, at every step, what must never happen.
Blocks are modelled by what is written in them: an offer's blocks hold its id until the offer ends
and garbage from then on, so reading them too late is seen in what was read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.errors import KVFerryError, PeerLostError, TransferError
from kvferry.protocol import messages
from kvferry.protocol.handoff import (
    AbortRead,
    Action,
    ClaimEnded,
    Claims,
    ClaimState,
    OfferEnded,
    Offers,
    OfferState,
    Send,
    StartRead,
)
from kvferry.protocol.messages import Message

GARBAGE = b"garbage"
LEASE_S = 5.0


@dataclass(eq=False, slots=True)
class Wire:
    """One session. ``prefill_knows``, ``decode_knows``: who was told that it is lost."""

    decode: int
    to_prefill: list[Message] = field(default_factory=list)
    to_decode: list[Message] = field(default_factory=list)
    cut: bool = False
    prefill_knows: bool = False
    decode_knows: bool = False


@dataclass(slots=True)
class Reading:
    """A running read: what it has seen in the offer's blocks so far."""

    offer_id: bytes
    seen: list[bytes]
    aborted: bool = False


@dataclass(slots=True)
class Decode:
    """One decode engine; its clock has nothing to do with prefill's."""

    clock_ahead_s: float
    claims: Claims = field(default_factory=Claims)
    wire: Wire | None = None


class World:
    """See the module. ``faithful``: wires deliver everything at once and in order."""

    def __init__(self, decodes: int, *, faithful: bool = False) -> None:
        self.now = 100.0
        self.faithful = faithful
        self.offers = Offers(lease_s=LEASE_S)
        self.decodes = [Decode(1e5 * (i + 1)) for i in range(decodes)]
        self.wires: list[Wire] = []
        self.blocks: dict[bytes, bytes] = {}
        self.offer_ends: dict[bytes, str] = {}
        self.claim_ends: dict[bytes, ClaimState] = {}
        self.claim_of: dict[bytes, tuple[int, bytes]] = {}
        self.readings: dict[bytes, Reading] = {}
        self.contents: dict[bytes, list[bytes]] = {}
        self.errors: dict[bytes, KVFerryError | None] = {}
        self._ids = 0

    # -- what users do ------------------------------------------------------------------------

    def add_offer(self, wait_s: float) -> bytes:
        offer_id = self._new_id()
        self.offers.add(offer_id, b"payload", expires_at=self.now + wait_s)
        self.blocks[offer_id] = offer_id
        return offer_id

    def cancel_offer(self, offer_id: bytes) -> None:
        self._do_prefill(self.offers.cancel(offer_id, self.now))

    def add_claim(self, decode: int, offer_id: bytes, patience_s: float) -> bytes:
        claim_id = self._new_id()
        now = self._time(decode)
        self.decodes[decode].claims.add(claim_id, offer_id, deadline=now + patience_s, now=now)
        self.claim_of[claim_id] = (decode, offer_id)
        return claim_id

    def connect(self, claim_id: bytes) -> None:
        """The claim's engine has a session to prefill, a new one if the last is known lost."""
        decode, _ = self.claim_of[claim_id]
        side = self.decodes[decode]
        if side.wire is None or side.wire.decode_knows:
            side.wire = Wire(decode)
            self.wires.append(side.wire)
        self._do_decode(decode, side.claims.connected(claim_id, side.wire))

    def cancel_claim(self, claim_id: bytes) -> None:
        decode, _ = self.claim_of[claim_id]
        self._do_decode(decode, self.decodes[decode].claims.cancel(claim_id))

    def fail_claim(self, claim_id: bytes) -> None:
        decode, _ = self.claim_of[claim_id]
        error = TransferError("something else broke")
        self._do_decode(decode, self.decodes[decode].claims.failed(claim_id, error))

    # -- what reading does ----------------------------------------------------------------------

    def read_some(self, claim_id: bytes) -> None:
        """The reader looks at prefill's blocks, and writes into decode's: they must be its own."""
        reading = self.readings[claim_id]
        assert claim_id not in self.claim_ends, "the blocks of an ended claim were written to"
        reading.seen.append(self.blocks[reading.offer_id])

    def end_read(self, claim_id: bytes, error: KVFerryError | None) -> None:
        self.read_some(claim_id)
        self.contents[claim_id] = self.readings.pop(claim_id).seen
        self.repeat_read_ended(claim_id, error)

    def repeat_read_ended(self, claim_id: bytes, error: KVFerryError | None) -> None:
        decode, _ = self.claim_of[claim_id]
        self._do_decode(decode, self.decodes[decode].claims.read_ended(claim_id, error))

    # -- what wires do --------------------------------------------------------------------------

    def deliver(self, wire: Wire, *, to_prefill: bool, index: int = 0, keep: bool = False) -> None:
        """Deliver one message, out of order if ``index`` says so; ``keep`` leaves a duplicate."""
        queue = wire.to_prefill if to_prefill else wire.to_decode
        message = queue[index] if keep else queue.pop(index)
        if to_prefill and not wire.prefill_knows:
            self._do_prefill(self._at_prefill(wire, message))
        elif not to_prefill and not wire.decode_knows:
            self._do_decode(wire.decode, self._at_decode(wire, message))

    def deliver_all(self) -> None:
        """Deliver in order until every wire is empty."""
        while any(wire.to_prefill or wire.to_decode for wire in self.wires):
            for wire in self.wires:
                if wire.to_prefill:
                    self.deliver(wire, to_prefill=True)
                if wire.to_decode:
                    self.deliver(wire, to_prefill=False)

    def tell_prefill(self, wire: Wire) -> None:
        wire.cut = wire.prefill_knows = True
        self._do_prefill(self.offers.session_lost(wire))

    def tell_decode(self, wire: Wire) -> None:
        wire.cut = wire.decode_knows = True
        lost = PeerLostError("the wire was cut")
        self._do_decode(wire.decode, self.decodes[wire.decode].claims.session_lost(wire, lost))

    # -- what time does ---------------------------------------------------------------------------

    def tick_prefill(self) -> None:
        self._do_prefill(self.offers.tick(self.now))
        assert self.offers.due() > self.now, "prefill would be called again at once, for ever"

    def tick_decode(self, decode: int) -> None:
        claims = self.decodes[decode].claims
        self._do_decode(decode, claims.tick(self._time(decode)))
        assert claims.due() > self._time(decode), "decode would be called again at once, for ever"

    def settle(self, *, wires_work: bool) -> None:
        """Let much time pass, with every tick and every read in bounded time; all must end."""
        for _ in range(400):
            if not self.live():
                break
            if wires_work:
                self.deliver_all()
            else:
                for wire in self.wires:
                    wire.to_prefill.clear()
                    wire.to_decode.clear()
            for claim_id in list(self.readings):
                self.end_read(claim_id, TransferError("the deadline passed"))
            for wire in self.wires:
                if wire.cut and not wire.prefill_knows:
                    self.tell_prefill(wire)
                if wire.cut and not wire.decode_knows:
                    self.tell_decode(wire)
            self.now += 0.5
            self.tick_prefill()
            for decode in range(len(self.decodes)):
                self.tick_decode(decode)
        assert not self.live(), "something never ends"
        self.check_ends()

    def live(self) -> int:
        """Offers and claims that have not ended."""
        return len(self.offers) + sum(len(decode.claims) for decode in self.decodes)

    # -- what must hold -----------------------------------------------------------------------

    def check_ends(self) -> None:
        """After the end of everything: each began thing ended, and nobody was given two lives."""
        assert self.offer_ends.keys() == self.blocks.keys()
        assert self.claim_ends.keys() == self.claim_of.keys()
        loaded = [self.claim_of[c][1] for c, s in self.claim_ends.items() if s is ClaimState.LOADED]
        assert len(loaded) == len(set(loaded)), "one offer was loaded twice"

    def check_agreement(self) -> None:
        """On faithful wires no offer stays claimed whose claim has ended.

        The reverse may be: an offer ends with its lease while its claim is still stopping.
        """
        reading = sum(
            count
            for decode in self.decodes
            for state, count in decode.claims.states().items()
            if state in ("reading", "stopping", "confirming")
        )
        assert self.offers.states()["claimed"] <= reading, "nobody told prefill of the end"

    def _offer_ended(self, action: OfferEnded) -> None:
        assert action.offer_id not in self.offer_ends, "an offer ended twice"
        assert action.state in (OfferState.DELIVERED, OfferState.RELEASED)
        assert (action.code == "delivered") == (action.state is OfferState.DELIVERED)
        assert action.message
        if action.code not in ("expired", "peer_lost"):
            reading = [r for r in self.readings.values() if r.offer_id == action.offer_id]
            assert not reading, "an offer ended while its blocks were read, and nothing forced it"
        self.offer_ends[action.offer_id] = action.code
        self.blocks[action.offer_id] = GARBAGE

    def _claim_ended(self, action: ClaimEnded) -> None:
        claim_id = action.claim_id
        assert claim_id not in self.claim_ends, "a claim ended twice"
        assert claim_id not in self.readings, "a claim ended while it was still reading"
        assert (action.error is None) == (action.state is ClaimState.LOADED)
        self.claim_ends[claim_id] = action.state
        self.errors[claim_id] = action.error
        if action.state is ClaimState.LOADED:
            _, offer_id = self.claim_of[claim_id]
            assert self.offer_ends.get(offer_id) == "delivered", "loaded, but not delivered"
            assert set(self.contents[claim_id]) == {offer_id}, "loaded bytes of another generation"

    # -- inside -------------------------------------------------------------------------------

    def _new_id(self) -> bytes:
        self._ids += 1
        return self._ids.to_bytes(16, "big")

    def _time(self, decode: int) -> float:
        return self.now + self.decodes[decode].clock_ahead_s

    def _at_prefill(self, wire: Wire, message: Message) -> list[Action]:
        offers, now = self.offers, self.now
        if isinstance(message, messages.Claim):
            return offers.claim(wire, message, now)
        if isinstance(message, messages.Confirm):
            return offers.confirm(wire, message, now)
        if isinstance(message, messages.Renew):
            return offers.renew(wire, message, now)
        assert isinstance(message, messages.Stopped)
        return offers.stopped(wire, message, now)

    def _at_decode(self, wire: Wire, message: Message) -> list[Action]:
        claims = self.decodes[wire.decode].claims
        if isinstance(message, messages.Granted):
            return claims.granted(wire, message, self._time(wire.decode))
        if isinstance(message, messages.Confirmed):
            return claims.confirmed(wire, message)
        if isinstance(message, messages.Refused):
            return claims.refused(wire, message)
        assert isinstance(message, messages.Withdrawn)
        return claims.withdrawn(wire, message)

    def _do_prefill(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                assert isinstance(action.session, Wire)
                assert messages.unpack(messages.pack(action.message)) == action.message
                action.session.to_decode.append(action.message)
            else:
                assert isinstance(action, OfferEnded)
                self._offer_ended(action)
        if self.faithful:
            self.deliver_all()

    def _do_decode(self, decode: int, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                assert isinstance(action.session, Wire)
                assert action.session.decode == decode
                assert messages.unpack(messages.pack(action.message)) == action.message
                action.session.to_prefill.append(action.message)
            elif isinstance(action, StartRead):
                assert action.claim_id not in self.contents, "a claim was read twice"
                _, offer_id = self.claim_of[action.claim_id]
                self.readings[action.claim_id] = Reading(offer_id, [self.blocks[offer_id]])
            elif isinstance(action, AbortRead):
                self.readings[action.claim_id].aborted = True
            else:
                assert isinstance(action, ClaimEnded)
                self._claim_ended(action)
        if self.faithful:
            self.deliver_all()
