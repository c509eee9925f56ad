"""The hand-off tables, row by row, and the answers to everything that is not in them."""

from __future__ import annotations

from itertools import product

import pytest

from kvferry.errors import AbortedError, CorruptError, DeadlineError, PeerLostError, UsageError
from kvferry.protocol import handoff
from kvferry.protocol.handoff import (
    CLAIM_TABLE,
    ENDS,
    OFFER_TABLE,
    REFUSALS,
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
from kvferry.protocol.messages import (
    Claim,
    Confirm,
    Confirmed,
    Granted,
    Refused,
    Renew,
    Stopped,
    Withdrawn,
)

OFFER, CLAIM, OTHER = b"o" * 16, b"c" * 16, b"x" * 16
LEASE_S = 5.0


def sent(actions: list[Action]) -> list[type]:
    return [type(action.message) for action in actions if isinstance(action, Send)]


def ended(actions: list[Action]) -> list[Action]:
    return [action for action in actions if isinstance(action, (OfferEnded, ClaimEnded))]


def offers_in(state: str) -> Offers:
    """Offers whose one offer is in a state, at time 0, claimed by CLAIM over the session "s"."""
    offers = Offers(lease_s=LEASE_S)
    if state == "unknown":
        return offers
    offers.add(OFFER, b"where", expires_at=60.0)
    if state == "offered":
        return offers
    offers.claim("s", Claim(CLAIM, OFFER), 0.0)
    if state == "withdrawn":
        offers.cancel(OFFER, 0.0)
    elif state == "delivered":
        offers.confirm("s", Confirm(CLAIM, OFFER), 0.0)
    elif state == "released":
        offers.stopped("s", Stopped(CLAIM, OFFER, "gave up"), 0.0)
    return offers


def claims_in(state: str, *, deadline: float = 30.0) -> Claims:
    """Claims whose one claim is in a state, at time 0, over the session "s"."""
    claims = Claims()
    if state == "unknown":
        return claims
    claims.add(CLAIM, OFFER, deadline=deadline, now=0.0)
    if state == "unconnected":
        return claims
    claims.connected(CLAIM, "s")
    if state == "claiming":
        return claims
    claims.granted("s", Granted(CLAIM, OFFER, LEASE_S, b"where"), 0.0)
    if state == "stopping":
        claims.cancel(CLAIM)
    elif state in ("confirming", "loaded"):
        claims.read_ended(CLAIM, None)
    if state == "loaded":
        claims.confirmed("s", Confirmed(CLAIM, OFFER))
    return claims


# -- the tables themselves -------------------------------------------------------------------------


@pytest.mark.parametrize("table", [OFFER_TABLE, CLAIM_TABLE], ids=["offer", "claim"])
def test_no_row_leaves_an_end_and_every_end_is_reached(
    table: dict[tuple[object, str], object],
) -> None:
    begins = {state for state, _ in table}
    assert not begins & ENDS
    kind = type(next(iter(begins)))
    assert set(table.values()) | {next(iter(kind))} == set(kind)
    assert begins == set(kind) - ENDS


def test_only_a_confirm_delivers_and_only_its_answer_loads() -> None:
    assert [k for k, v in OFFER_TABLE.items() if v is OfferState.DELIVERED] == [
        (OfferState.CLAIMED, "confirm")
    ]
    assert [k for k, v in CLAIM_TABLE.items() if v is ClaimState.LOADED] == [
        (ClaimState.CONFIRMING, "confirmed")
    ]


def test_every_offer_state_has_a_deadline() -> None:
    for state in set(OfferState) - ENDS:
        assert OFFER_TABLE[state, "expire"] is OfferState.RELEASED


@pytest.mark.parametrize("state", ["offered", "claimed", "withdrawn"])
def test_time_alone_ends_every_offer(state: str) -> None:
    offers = offers_in(state)
    due = offers.due()
    assert offers.tick(due - 0.001) == []
    [end] = ended(offers.tick(due))
    assert isinstance(end, OfferEnded)
    assert end.state is OfferState.RELEASED
    assert offers.due() > due or not len(offers)


@pytest.mark.parametrize("state", ["unconnected", "claiming", "reading", "confirming"])
def test_time_alone_stops_every_claim(state: str) -> None:
    claims = claims_in(state)
    assert ended(claims.tick(29.999)) == []
    actions = claims.tick(30.0)
    if state == "reading":
        assert AbortRead(CLAIM) in actions
        actions = claims.read_ended(CLAIM, None)
    [end] = ended(actions)
    assert isinstance(end, ClaimEnded)
    assert end.state is ClaimState.FAILED
    assert isinstance(end.error, DeadlineError)
    assert "30.00 s" in end.error.message
    assert claims.due() == float("inf")


# -- every event in every state --------------------------------------------------------------------

OFFER_EVENTS = {
    "claim": lambda o, s, c: o.claim(s, Claim(c, OFFER), 1.0),
    "renew": lambda o, s, _c: o.renew(s, Renew([OFFER]), 1.0),
    "confirm": lambda o, s, c: o.confirm(s, Confirm(c, OFFER), 1.0),
    "stopped": lambda o, s, c: o.stopped(s, Stopped(c, OFFER, "gave up"), 1.0),
    "cancel": lambda o, _s, _c: o.cancel(OFFER, 1.0),
    "session_lost": lambda o, s, _c: o.session_lost(s),
    "tick": lambda o, _s, _c: o.tick(1.0),
}
OFFER_STATES = ["unknown", "offered", "claimed", "withdrawn", "delivered", "released"]
STRANGERS = {
    "its own": ("s", CLAIM),
    "another claim": ("s", OTHER),
    "another session": ("t", CLAIM),
}

# What an event from the offer's own claim does: the messages sent, and the end's code if it ends.
OFFER_ANSWERS: dict[tuple[str, str], tuple[list[type], str]] = {
    ("unknown", "claim"): ([Refused], ""),
    ("unknown", "confirm"): ([Refused], ""),
    ("offered", "claim"): ([Granted], ""),
    ("offered", "confirm"): ([Refused], ""),
    ("offered", "cancel"): ([], "cancelled"),
    ("claimed", "claim"): ([Granted], ""),
    ("claimed", "confirm"): ([Confirmed], "delivered"),
    ("claimed", "stopped"): ([], "released"),
    ("claimed", "cancel"): ([Withdrawn], ""),
    ("claimed", "session_lost"): ([], "peer_lost"),
    ("withdrawn", "claim"): ([Granted], ""),
    ("withdrawn", "confirm"): ([Refused], "cancelled"),
    ("withdrawn", "stopped"): ([], "cancelled"),
    ("withdrawn", "session_lost"): ([], "peer_lost"),
    ("delivered", "claim"): ([Refused], ""),
    ("delivered", "confirm"): ([Confirmed], ""),
    ("released", "claim"): ([Refused], ""),
    ("released", "confirm"): ([Refused], ""),
}


@pytest.mark.parametrize(("state", "event"), list(product(OFFER_STATES, OFFER_EVENTS)))
def test_every_event_of_its_own_claim_has_its_answer(state: str, event: str) -> None:
    actions = OFFER_EVENTS[event](offers_in(state), "s", CLAIM)
    codes = [action.code for action in actions if isinstance(action, OfferEnded)]
    messages, code = OFFER_ANSWERS.get((state, event), ([], ""))
    assert (sent(actions), codes) == (messages, [code] if code else [])


@pytest.mark.parametrize("who", ["another claim", "another session"])
@pytest.mark.parametrize(
    ("state", "event"), list(product(OFFER_STATES, ["claim", "confirm", "stopped"]))
)
def test_nobody_else_can_move_a_claimed_offer(state: str, event: str, who: str) -> None:
    offers = offers_in(state)
    before = offers.states()
    actions = OFFER_EVENTS[event](offers, *STRANGERS[who])
    assert ended(actions) == []
    assert sent(actions) in ([], [Refused]) or (state, event) == ("offered", "claim")
    assert offers.states() == before or (state, event) == ("offered", "claim")


CLAIM_EVENTS = {
    "connected": lambda c, s: c.connected(CLAIM, s),
    "granted": lambda c, s: c.granted(s, Granted(CLAIM, OFFER, LEASE_S, b"where"), 1.0),
    "refused": lambda c, s: c.refused(s, Refused(CLAIM, OFFER, "expired", "late")),
    "withdrawn": lambda c, s: c.withdrawn(s, Withdrawn(CLAIM, OFFER, "cancelled", "why")),
    "confirmed": lambda c, s: c.confirmed(s, Confirmed(CLAIM, OFFER)),
    "read_done": lambda c, _s: c.read_ended(CLAIM, None),
    "read_failed": lambda c, _s: c.read_ended(CLAIM, CorruptError("spoilt")),
    "cancel": lambda c, _s: c.cancel(CLAIM),
    "failed": lambda c, _s: c.failed(CLAIM, CorruptError("no peer")),
    "session_lost": lambda c, s: c.session_lost(s, PeerLostError("cut")),
    "tick": lambda c, _s: c.tick(1.0),
}
CLAIM_STATES = [
    "unknown", "unconnected", "claiming", "reading", "stopping", "confirming", "loaded",
]  # fmt: skip
STOPS = ("refused", "withdrawn", "cancel", "failed")
GONE = ("unknown", "loaded")

# What an event over the claim's own session does: kinds of actions, in order.
CLAIM_ANSWERS: dict[tuple[str, str], list[str]] = {
    **{(state, "granted"): ["Stopped"] for state in (*GONE, "unconnected")},
    ("unconnected", "connected"): ["Claim"],
    ("unconnected", "cancel"): ["failed"],
    ("unconnected", "failed"): ["failed"],
    ("claiming", "granted"): ["StartRead"],
    **{("claiming", stop): ["Stopped", "failed"] for stop in STOPS},
    ("claiming", "session_lost"): ["failed"],
    ("reading", "read_done"): ["Confirm"],
    ("reading", "read_failed"): ["Stopped", "failed"],
    **{("reading", stop): ["AbortRead"] for stop in (*STOPS, "session_lost")},
    ("stopping", "read_done"): ["Stopped", "failed"],
    ("stopping", "read_failed"): ["Stopped", "failed"],
    ("confirming", "confirmed"): ["loaded"],
    **{("confirming", stop): ["Stopped", "failed"] for stop in STOPS},
    ("confirming", "session_lost"): ["failed"],
}


def kinds(actions: list[Action]) -> list[str]:
    names = []
    for action in actions:
        if isinstance(action, Send):
            names.append(type(action.message).__name__)
        elif isinstance(action, ClaimEnded):
            names.append(action.state.value)
        else:
            names.append(type(action).__name__)
    return names


@pytest.mark.parametrize(("state", "event"), list(product(CLAIM_STATES, CLAIM_EVENTS)))
def test_every_event_has_its_answer(state: str, event: str) -> None:
    actions = CLAIM_EVENTS[event](claims_in(state), "s")
    assert kinds(actions) == CLAIM_ANSWERS.get((state, event), [])


@pytest.mark.parametrize("state", CLAIM_STATES)
@pytest.mark.parametrize("event", ["refused", "withdrawn", "confirmed", "session_lost"])
def test_another_session_cannot_move_a_claim(state: str, event: str) -> None:
    assert CLAIM_EVENTS[event](claims_in(state), "t") == []


# -- the rules in words ----------------------------------------------------------------------------


def test_a_confirm_after_the_lease_is_refused_though_nobody_has_ticked() -> None:
    offers = offers_in("claimed")
    actions = offers.confirm("s", Confirm(CLAIM, OFFER), LEASE_S)
    assert sent(actions) == [Refused]
    assert [a.code for a in ended(actions) if isinstance(a, OfferEnded)] == ["expired"]


def test_a_renewal_moves_the_lease() -> None:
    offers = offers_in("claimed")
    offers.renew("s", Renew([OFFER, OTHER]), 4.0)
    offers.renew("t", Renew([OFFER]), 8.0)
    assert offers.tick(8.999) == []
    assert sent(offers.tick(9.0)) == [Withdrawn]


@pytest.mark.parametrize(
    ("end", "is_forced"),
    [
        (lambda offers: offers.stopped("s", Stopped(CLAIM, OFFER, ""), 1.0), False),
        (lambda offers: offers.confirm("s", Confirm(CLAIM, OFFER), 1.0), False),
        (lambda offers: offers.tick(LEASE_S), True),
        (lambda offers: offers.session_lost("s"), True),
    ],
    ids=["stopped", "confirm", "lease", "session lost"],
)
def test_an_end_without_the_readers_word_is_called_forced(end, is_forced) -> None:
    """Withdrawn or not: the code says why it was wanted back, not how that came about."""
    (released,) = ended(end(offers_in("withdrawn")))
    assert released.is_forced is is_forced


def test_a_withdrawn_offer_stays_pinned_for_as_long_as_its_reader_renews() -> None:
    offers = offers_in("withdrawn")
    offers.renew("s", Renew([OFFER]), 4.0)
    assert offers.tick(8.0) == []
    assert len(offers) == 1


@pytest.mark.parametrize("state", ["reading", "stopping", "confirming"])
def test_a_claim_renews_its_lease_several_times_within_it(state: str) -> None:
    claims = claims_in(state)
    times = []
    while claims.due() < LEASE_S:
        times.append(claims.due())
        assert sent(claims.tick(claims.due())) == [Renew]
    assert len(times) == 3


def test_a_stopping_claim_past_its_deadline_is_not_due_at_once_and_still_renews() -> None:
    claims = claims_in("reading", deadline=1.25)
    actions = claims.tick(1.25)
    assert AbortRead(CLAIM) in actions
    assert sent(actions) == [Renew]
    assert claims.due() == 2.5
    assert sent(claims.tick(2.5)) == [Renew]


def test_a_claim_whose_session_is_lost_renews_no_more() -> None:
    claims = claims_in("reading")
    claims.session_lost("s", PeerLostError("cut"))
    assert claims.due() == float("inf")
    assert claims.tick(20.0) == []


def test_prefill_is_told_when_only_the_reading_lost_the_peer() -> None:
    claims = claims_in("reading")
    actions = claims.read_ended(CLAIM, PeerLostError("the lane broke"))
    assert sent(actions) == [Stopped]
    [end] = ended(actions)
    assert isinstance(end, ClaimEnded)
    assert isinstance(end.error, PeerLostError)


def test_the_first_reason_of_a_failure_is_kept() -> None:
    claims = claims_in("reading")
    claims.cancel(CLAIM)
    [end] = ended(claims.read_ended(CLAIM, CorruptError("later")))
    assert isinstance(end, ClaimEnded)
    assert isinstance(end.error, AbortedError)
    assert end.error.stage == "reading"


def test_a_granted_claim_reads_what_the_offer_says_until_its_deadline() -> None:
    claims = claims_in("claiming")
    grant = Granted(CLAIM, OFFER, LEASE_S, b"where")
    assert claims.granted("s", grant, 1.0) == [StartRead(CLAIM, grant, 30.0)]


def test_many_renewals_fit_their_messages() -> None:
    claims = Claims()
    for i in range(8193):
        claim_id = i.to_bytes(16, "big")
        claims.add(claim_id, claim_id, deadline=99.0, now=0.0)
        claims.connected(claim_id, "s")
        claims.granted("s", Granted(claim_id, claim_id, LEASE_S, b""), 0.0)
    sizes = [len(a.message.offer_ids) for a in claims.tick(1.25) if isinstance(a, Send)]
    assert sizes == [8192, 1]


@pytest.mark.parametrize("state", ["offered", "delivered"])
def test_an_offer_id_is_used_once(state: str) -> None:
    with pytest.raises(UsageError, match="used once"):
        offers_in(state).add(OFFER, b"", expires_at=1.0)


def test_only_the_latest_ends_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "FINISHED_MAX", 1)
    offers = offers_in("delivered")
    offers.add(OTHER, b"", expires_at=9.0)
    offers.cancel(OTHER, 0.0)
    codes = []
    for offer_id in (OFFER, OTHER):
        [action] = offers.claim("s", Claim(CLAIM, offer_id), 0.0)
        assert isinstance(action, Send)
        codes.append(action.message.code)
    assert codes == ["unknown_offer", "cancelled"]


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ("unknown", "unknown_offer"),
        ("claimed", "already_claimed"),
        ("delivered", "already_delivered"),
        ("released", "released"),
    ],
)
def test_a_refusal_says_what_became_of_the_offer(state: str, code: str) -> None:
    [action] = offers_in(state).claim("t", Claim(OTHER, OFFER), 1.0)
    assert isinstance(action, Send)
    assert action.message == Refused(OTHER, OFFER, code, REFUSALS[code])


def test_times_of_offers_that_ended_do_not_pile_up() -> None:
    """They would stay until their time, which may be hours away."""
    offers = Offers(lease_s=LEASE_S)
    offers.add(OFFER, b"where", expires_at=7.0)
    for number in range(10_000):
        offer_id = number.to_bytes(16, "big")
        offers.add(offer_id, b"where", expires_at=3600.0)
        offers.claim("s", Claim(CLAIM, offer_id), 0.0)
        offers.confirm("s", Confirm(CLAIM, offer_id), 0.0)
    assert len(offers) == 1
    assert len(offers._dues) < 2000
    assert offers.due() <= 7.0
    assert [end.code for end in ended(offers.tick(7.0))] == ["expired"]
