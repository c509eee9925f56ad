"""Decode's table against a tiny model of the rules: any event, over any session, at any time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from fuzzing import stepping
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from test_properties_offers import Walked

from kvferry.errors import CorruptError, KVFerryError, PeerLostError
from kvferry.protocol import handoff
from kvferry.protocol.handoff import (
    CLAIM_TABLE,
    AbortRead,
    Action,
    ClaimEnded,
    Claims,
    ClaimState,
    Send,
    StartRead,
)
from kvferry.protocol.messages import Confirmed, Granted, Refused, Withdrawn

LEASE_S = 4.0
RENEW_S = LEASE_S / 4
FORGED = b"?" * 16

sessions = st.sampled_from(["prefill", "another prefill"])
senders = st.sampled_from(["its own", "its own", "its own", "anybody"])
seconds = st.sampled_from([0.0, 0.001, RENEW_S, LEASE_S, 30.0])


@dataclass
class Known:
    """What the rules need to know of one claim. ``reading``: bytes may arrive in its blocks."""

    deadline: float
    session: str | None = None
    phase: str = "claiming"
    reading: bool = False
    stopping: bool = False
    lost: bool = False
    renew_at: float = float("inf")


class ClaimsByTheRules(RuleBasedStateMachine):
    """Each rule is an event; ``expect`` compares the answer with what the rules demand."""

    made = Bundle("made")

    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.claims = Claims()
        self.known: dict[bytes, Known] = {}
        self.ends: dict[bytes, ClaimState] = {}
        self.count = 0

    def expect(self, actions: list[Action], *wanted: tuple[object, ...]) -> None:
        found: list[tuple[object, ...]] = []
        for action in actions:
            if isinstance(action, Send):
                ids = getattr(action.message, "offer_ids", None)
                what = sorted(ids) if ids is not None else action.message.offer_id
                found.append((type(action.message).__name__, action.session, what))
            elif isinstance(action, ClaimEnded):
                assert action.claim_id not in self.ends, "it ended twice"
                assert (action.error is None) == (action.state is ClaimState.LOADED)
                self.ends[action.claim_id] = action.state
                found.append((action.state.value, action.claim_id))
            else:
                assert isinstance(action, (StartRead, AbortRead))
                found.append((type(action).__name__, action.claim_id))
        assert sorted(found, key=repr) == sorted(wanted, key=repr)

    def failed(self, claim_id: bytes) -> list[tuple[object, ...]]:
        """The claim's end: prefill is told if it can be."""
        claim = self.known.pop(claim_id)
        told = claim.session is not None and not claim.lost
        end = [("failed", claim_id)]
        return [("Stopped", claim.session, claim_id), *end] if told else end

    def stop(self, claim_id: bytes) -> list[tuple[object, ...]]:
        """Whatever ends a claim early: at once, or when its reading has stopped."""
        claim = self.known.get(claim_id)
        if claim is None or claim.stopping:
            return []
        if not claim.reading:
            return self.failed(claim_id)
        claim.stopping = True
        return [("AbortRead", claim_id)]

    def sender(self, claim_id: bytes, session: str, by: str) -> str:
        claim = self.known.get(claim_id)
        return claim.session if claim and claim.session and by == "its own" else session

    def mine(self, claim_id: bytes, session: str) -> Known | None:
        claim = self.known.get(claim_id)
        return claim if claim is not None and claim.session == session else None

    # -- decode itself --------------------------------------------------------------------------

    @rule(target=made, patience_s=st.sampled_from([1.5, 30.0]))
    def claim(self, patience_s: float) -> bytes:
        """The offer has the same id as the claim: what is sent about it can be told apart."""
        self.count += 1
        claim_id = self.count.to_bytes(16, "big")
        deadline = self.now + patience_s
        self.claims.add(claim_id, claim_id, deadline=deadline, now=self.now)
        self.known[claim_id] = Known(deadline)
        return claim_id

    @rule(target=made, session=sessions, whole=st.booleans())
    def claim_and_read(self, session: str, whole: bool) -> bytes:
        """The ordinary beginning."""
        claim_id = self.claim(30.0)
        self.connect(claim_id, session)
        self.granted(claim_id, session, "its own")
        if whole:
            self.end_read(claim_id, None)
        return claim_id

    @rule(claim_id=made, session=sessions)
    def connect(self, claim_id: bytes, session: str) -> None:
        actions = self.claims.connected(claim_id, session)
        claim = self.known.get(claim_id)
        if claim is None or claim.session is not None:
            self.expect(actions)
        else:
            claim.session = session
            self.expect(actions, ("Claim", session, claim_id))

    @rule(claim_id=made, error=st.sampled_from([None, None, CorruptError("spoilt")]))
    def end_read(self, claim_id: bytes, error: KVFerryError | None) -> None:
        """Also for claims that do not read: a transfer may report its end late, or again."""
        claim = self.known.get(claim_id)
        actions = self.claims.read_ended(claim_id, error)
        if claim is None or not claim.reading:
            self.expect(actions)
            return
        claim.reading = False
        if claim.stopping or error is not None:
            self.expect(actions, *self.failed(claim_id))
        else:
            claim.phase = "confirming"
            self.expect(actions, ("Confirm", claim.session, claim_id))

    @rule(claim_id=made, broken=st.booleans())
    def give_up(self, claim_id: bytes, broken: bool) -> None:
        if broken:
            actions = self.claims.failed(claim_id, CorruptError("broken"))
        else:
            actions = self.claims.cancel(claim_id)
        self.expect(actions, *self.stop(claim_id))

    @rule(chance=st.integers(0, 9))
    def restart(self, chance: int) -> None:
        """The process dies and comes again: its blocks are gone, and with them every claim."""
        if chance == 0:
            self.claims = Claims()
            self.known.clear()

    # -- what arrives, over any session -----------------------------------------------------------

    @rule(claim_id=made | st.just(FORGED), session=sessions, by=senders)
    def granted(self, claim_id: bytes, session: str, by: str) -> None:
        session = self.sender(claim_id, session, by)
        actions = self.claims.granted(
            session, Granted(claim_id, claim_id, LEASE_S, b"where"), self.now
        )
        claim = self.mine(claim_id, session)
        if claim is None:
            self.expect(actions, ("Stopped", session, claim_id))
        elif claim.phase != "claiming":
            self.expect(actions)
        else:
            claim.phase, claim.reading = "reading", True
            claim.renew_at = self.now + RENEW_S
            self.expect(actions, ("StartRead", claim_id))

    @rule(claim_id=made | st.just(FORGED), session=sessions, by=senders)
    def confirmed(self, claim_id: bytes, session: str, by: str) -> None:
        session = self.sender(claim_id, session, by)
        actions = self.claims.confirmed(session, Confirmed(claim_id, claim_id))
        claim = self.mine(claim_id, session)
        if claim is None or claim.phase != "confirming":
            self.expect(actions)
        else:
            del self.known[claim_id]
            self.expect(actions, ("loaded", claim_id))

    @rule(claim_id=made | st.just(FORGED), session=sessions, by=senders, refuse=st.booleans())
    def denied(self, claim_id: bytes, session: str, by: str, refuse: bool) -> None:
        session = self.sender(claim_id, session, by)
        if refuse:
            message = Refused(claim_id, claim_id, "expired", "late")
            actions = self.claims.refused(session, message)
        else:
            actions = self.claims.withdrawn(
                session, Withdrawn(claim_id, claim_id, "cancelled", "why")
            )
        claim = self.mine(claim_id, session)
        self.expect(actions, *(self.stop(claim_id) if claim else ()))

    @rule(session=sessions)
    def lose(self, session: str) -> None:
        wanted = []
        for claim_id, claim in list(self.known.items()):
            if claim.session == session:
                claim.lost, claim.renew_at = True, float("inf")
                wanted += self.stop(claim_id)
        self.expect(self.claims.session_lost(session, PeerLostError("cut")), *wanted)

    # -- time -----------------------------------------------------------------------------------

    @rule(pause_s=seconds)
    def pass_time(self, pause_s: float) -> None:
        self.now += pause_s

    @rule()
    def tick(self) -> None:
        wanted = []
        renewed: dict[str, list[bytes]] = {}
        for claim_id, claim in list(self.known.items()):
            if self.now >= claim.deadline:
                wanted += self.stop(claim_id)
            if claim_id in self.known and self.now >= claim.renew_at:
                claim.renew_at = self.now + RENEW_S
                assert claim.session is not None
                renewed.setdefault(claim.session, []).append(claim_id)
        wanted += [("Renew", session, sorted(ids)) for session, ids in renewed.items()]
        self.expect(self.claims.tick(self.now), *wanted)
        assert self.claims.due() > self.now, "it would be called again at once, for ever"

    # -- what always holds ------------------------------------------------------------------------

    @invariant()
    def the_table_knows_what_the_model_knows(self) -> None:
        states = dict.fromkeys(("claiming", "reading", "stopping", "confirming"), 0)
        for claim in self.known.values():
            states["stopping" if claim.stopping else claim.phase] += 1
        assert self.claims.states() == states
        assert len(self.claims) == len(self.known)

    @invariant()
    def blocks_of_an_ended_claim_are_never_written(self) -> None:
        assert not [c for c, claim in self.known.items() if claim.reading and c in self.ends]

    @invariant()
    def no_deadline_is_missed(self) -> None:
        dues = [c.renew_at for c in self.known.values()]
        dues += [c.deadline for c in self.known.values() if not c.stopping]
        assert self.claims.due() == min(dues, default=float("inf"))

    def teardown(self) -> None:
        """Time stops every claim; those that read end with their reading."""
        self.now += 100.0
        self.tick()
        for claim_id in list(self.known):
            self.end_read(claim_id, None)
        assert not len(self.claims)
        assert not self.known


@pytest.mark.slow
def test_the_table_does_what_the_rules_say(monkeypatch: pytest.MonkeyPatch) -> None:
    walked = Walked(CLAIM_TABLE)  # type: ignore[arg-type]
    monkeypatch.setattr(handoff, "CLAIM_TABLE", walked)
    run_machine(ClaimsByTheRules, settings=stepping(100))
    assert walked.rows == set(CLAIM_TABLE), "some rows were never tried"
