"""Prefill's table against a tiny model of the rules: any event, from anybody, at any time.

Sessions, claim ids and offer ids are drawn from small pools, so that duplicates, forged and late
messages come by themselves. The model is the rules in words of docs/concepts/handoff.md; it names
the answer to each event before the table gives it.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from fuzzing import stepping
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvferry.protocol import handoff
from kvferry.protocol.handoff import OFFER_TABLE, Action, OfferEnded, Offers, OfferState, Send
from kvferry.protocol.messages import Claim, Confirm, Renew, Stopped

LEASE_S = 5.0
FORGED = b"?" * 16
Holder = tuple[str, bytes]
"""Who has an offer: the session and the claim."""

sessions = st.sampled_from(["decode", "another decode", "stranger"])
claim_ids = st.sampled_from([b"1" * 16, b"2" * 16, FORGED])
senders = st.sampled_from(["its holder", "its holder", "anybody"])
seconds = st.sampled_from([0.0, 0.001, LEASE_S / 4, LEASE_S - 0.001, LEASE_S, 60.0])


@dataclass
class Known:
    """What the rules need to know of one offer. It is pinned exactly while ``end`` is empty."""

    due: float
    holder: Holder | None = None
    withdrawn: bool = False
    end: str = ""


def facts(actions: list[Action]) -> list[tuple[object, ...]]:
    """Actions as plain tuples, in an order of their own: a tick may end offers in any."""
    found: list[tuple[object, ...]] = []
    for action in actions:
        if isinstance(action, Send):
            message = action.message
            code = getattr(message, "code", "")
            kind = type(message).__name__
            found.append((kind, message.offer_id, action.session, message.claim_id, code))
        else:
            assert isinstance(action, OfferEnded)
            assert action.message, "an end says why"
            assert (action.state is OfferState.DELIVERED) == (action.code == "delivered")
            found.append(("ended", action.offer_id, action.code))
    return sorted(found, key=repr)


class OffersByTheRules(RuleBasedStateMachine):
    """Each rule is an event; ``expect`` compares the answer with what the rules demand."""

    offers_made = Bundle("offers_made")

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.offers = Offers(lease_s=LEASE_S)
        self.known: dict[bytes, Known] = {}
        self.pinned: set[bytes] = set()
        self.count = 0

    def expect(self, actions: list[Action], *wanted: tuple[object, ...]) -> None:
        assert facts(actions) == sorted(wanted, key=repr)
        for action in actions:
            if isinstance(action, OfferEnded):
                self.pinned.remove(action.offer_id)  # KeyError: it ended twice.

    def end(self, offer_id: bytes, code: str) -> tuple[object, ...]:
        self.known[offer_id].end = code
        return ("ended", offer_id, code)

    def refusal(self, offer_id: bytes, session: str, claim_id: bytes) -> tuple[object, ...]:
        offer = self.known.get(offer_id)
        code = "unknown_offer"
        if offer is not None:
            known = {"": "already_claimed", "delivered": "already_delivered"}
            code = known.get(offer.end, offer.end)
            code = "released" if code == "peer_lost" else code
        return ("Refused", offer_id, session, claim_id, code)

    def sender(self, session: str, claim_id: bytes, offer_id: bytes, by: str) -> Holder:
        """Most messages come from whoever has the offer; the rest from anybody about anything."""
        offer = self.known.get(offer_id)
        return offer.holder if offer and offer.holder and by != "anybody" else (session, claim_id)

    # -- prefill itself -----------------------------------------------------------------------

    @rule(target=offers_made, wait_s=st.sampled_from([1.0, 60.0]))
    def offer(self, wait_s: float) -> bytes:
        self.count += 1
        offer_id = self.count.to_bytes(16, "big")
        self.offers.add(offer_id, b"where", expires_at=self.now + wait_s)
        self.known[offer_id] = Known(self.now + wait_s)
        self.pinned.add(offer_id)
        return offer_id

    @rule(target=offers_made, session=sessions, claim_id=claim_ids)
    def offer_and_claim(self, session: str, claim_id: bytes) -> bytes:
        """The ordinary beginning."""
        offer_id = self.offer(60.0)
        self.claim(session, claim_id, offer_id)
        return offer_id

    @rule(offer_id=offers_made)
    def cancel(self, offer_id: bytes) -> None:
        actions = self.offers.cancel(offer_id, self.now)
        offer = self.known.get(offer_id)
        if offer is None or offer.end or offer.withdrawn:
            self.expect(actions)
        elif offer.holder is None:
            self.expect(actions, self.end(offer_id, "cancelled"))
        else:
            offer.withdrawn = True
            self.expect(actions, ("Withdrawn", offer_id, *offer.holder, "cancelled"))

    @rule(chance=st.integers(0, 9))
    def restart(self, chance: int) -> None:
        """The process dies and comes again: its memory is gone, and with it all that it knew."""
        if chance == 0:
            self.offers = Offers(lease_s=LEASE_S)
            self.known.clear()
            self.pinned.clear()

    @rule(pause_s=seconds)
    def pass_time(self, pause_s: float) -> None:
        """Nobody ticks: the process may be stalled."""
        self.now += pause_s

    @rule()
    def tick(self) -> None:
        wanted = []
        for offer_id, offer in self.known.items():
            if offer.end or offer.due > self.now:
                continue
            if offer.holder is not None and not offer.withdrawn:
                wanted.append(("Withdrawn", offer_id, *offer.holder, "expired"))
            wanted.append(self.end(offer_id, "cancelled" if offer.withdrawn else "expired"))
        self.expect(self.offers.tick(self.now), *wanted)
        assert self.offers.due() > self.now, "it would be called again at once, for ever"

    # -- what arrives, from anybody -------------------------------------------------------------

    @rule(session=sessions, claim_id=claim_ids, offer_id=offers_made | st.just(FORGED))
    def claim(self, session: str, claim_id: bytes, offer_id: bytes) -> None:
        actions = self.offers.claim(session, Claim(claim_id, offer_id), self.now)
        offer = self.known.get(offer_id)
        if offer is None or offer.end or offer.holder not in (None, (session, claim_id)):
            self.expect(actions, self.refusal(offer_id, session, claim_id))
            return
        if offer.holder is None:
            offer.holder, offer.due = (session, claim_id), self.now + LEASE_S
        self.expect(actions, ("Granted", offer_id, session, claim_id, ""))

    @rule(session=sessions, claim_id=claim_ids, offer_id=offers_made | st.just(FORGED), by=senders)
    def confirm(self, session: str, claim_id: bytes, offer_id: bytes, by: str) -> None:
        session, claim_id = self.sender(session, claim_id, offer_id, by)
        actions = self.offers.confirm(session, Confirm(claim_id, offer_id), self.now)
        self.expect_confirm(actions, offer_id, session, claim_id)

    @rule(offer_id=offers_made, late_s=st.sampled_from([0.0, -0.001]))
    def stall_and_confirm(self, offer_id: bytes, late_s: float) -> None:
        """Its holder wakes up as the lease ends, or just before, and nobody has ticked."""
        offer = self.known.get(offer_id)
        if offer is not None and offer.holder is not None and not offer.end:
            self.now = max(self.now, offer.due + late_s)
            self.confirm(*offer.holder, offer_id, "its holder")

    def expect_confirm(
        self, actions: list[Action], offer_id: bytes, session: str, claim_id: bytes
    ) -> None:
        offer = self.known.get(offer_id)
        mine = offer is not None and offer.holder == (session, claim_id)
        good = ("Confirmed", offer_id, session, claim_id, "")
        if offer is None or not mine or offer.end not in ("", "delivered"):
            self.expect(actions, self.refusal(offer_id, session, claim_id))
        elif offer.end:
            self.expect(actions, good)  # Said again: the answer may have been lost.
        elif offer.withdrawn or self.now >= offer.due:
            ended = self.end(offer_id, "cancelled" if offer.withdrawn else "expired")
            self.expect(actions, ended, self.refusal(offer_id, session, claim_id))
        else:
            self.expect(actions, good, self.end(offer_id, "delivered"))

    @rule(session=sessions, claim_id=claim_ids, offer_id=offers_made | st.just(FORGED), by=senders)
    def stopped(self, session: str, claim_id: bytes, offer_id: bytes, by: str) -> None:
        session, claim_id = self.sender(session, claim_id, offer_id, by)
        actions = self.offers.stopped(session, Stopped(claim_id, offer_id, "gave up"), self.now)
        offer = self.known.get(offer_id)
        if offer is None or offer.end or offer.holder != (session, claim_id):
            self.expect(actions)
        else:
            self.expect(actions, self.end(offer_id, "cancelled" if offer.withdrawn else "released"))

    @rule(session=sessions, offer_id=offers_made, by=senders)
    def renew(self, session: str, offer_id: bytes, by: str) -> None:
        session, _ = self.sender(session, FORGED, offer_id, by)
        self.expect(self.offers.renew(session, Renew([FORGED, offer_id]), self.now))
        offer = self.known.get(offer_id)
        if offer and not offer.end and offer.holder is not None and offer.holder[0] == session:
            offer.due = self.now + LEASE_S

    @rule(session=sessions)
    def lose(self, session: str) -> None:
        wanted = [
            self.end(offer_id, "peer_lost")
            for offer_id, offer in self.known.items()
            if not offer.end and offer.holder is not None and offer.holder[0] == session
        ]
        self.expect(self.offers.session_lost(session), *wanted)

    # -- what always holds ----------------------------------------------------------------------

    @invariant()
    def pinned_exactly_while_the_rules_say_so(self) -> None:
        live = {offer_id for offer_id, offer in self.known.items() if not offer.end}
        assert self.pinned == live
        assert len(self.offers) == len(live)
        claimed = sum(self.known[offer_id].holder is not None for offer_id in live)
        assert self.offers.states() == {"offered": len(live) - claimed, "claimed": claimed}

    @invariant()
    def no_deadline_is_missed(self) -> None:
        dues = [offer.due for offer in self.known.values() if not offer.end]
        assert self.offers.due() <= min(dues, default=float("inf"))

    def teardown(self) -> None:
        """With nobody left, time alone gives every block back."""
        for _ in range(2 * len(self.known) + 2):
            self.now = max(self.now, min(self.offers.due(), self.now + 1e6))
            self.tick()
        assert not self.pinned
        assert not len(self.offers)
        assert self.offers.due() == float("inf")


class Walked(dict):  # type: ignore[type-arg]
    """A table that remembers which of its rows were used."""

    def __init__(self, table: dict[object, object]) -> None:
        super().__init__(table)
        self.rows: set[object] = set()

    def __getitem__(self, row: object) -> object:
        self.rows.add(row)
        return super().__getitem__(row)


@pytest.mark.slow
def test_the_table_does_what_the_rules_say(monkeypatch: pytest.MonkeyPatch) -> None:
    walked = Walked(OFFER_TABLE)  # type: ignore[arg-type]
    monkeypatch.setattr(handoff, "OFFER_TABLE", walked)
    run_state_machine_as_test(OffersByTheRules, settings=stepping(100))
    assert walked.rows == set(OFFER_TABLE), "some rows were never tried"
