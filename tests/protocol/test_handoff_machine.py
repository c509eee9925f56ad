"""The hand-off under any order of messages, losses, cuts, stalls and cancellations.

What must never happen is checked by the world at every step; that everything ends, at the end.
"""

from __future__ import annotations

import pytest
from handoff_world import LEASE_S, Wire, World
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvferry.errors import CorruptError, KVFerryError, PeerLostError

SETTINGS = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=80,
    stateful_step_count=50,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
UNKNOWN_OFFER = b"?" * 16

read_errors = st.sampled_from([None, None, CorruptError("spoilt"), PeerLostError("lane lost")])
durations = st.sampled_from([0.0, 0.01, 0.1, 0.3, 0.5, LEASE_S / 4, LEASE_S, 20.0])
seldom = st.sampled_from([False, False, False, True])


class Handoffs(RuleBasedStateMachine):
    """Steps that every kind of wire allows."""

    faithful = False

    @initialize(decodes=st.integers(1, 2), wires_work=st.booleans())
    def begin(self, decodes: int, wires_work: bool) -> None:
        self.world = World(decodes, faithful=self.faithful)
        self.wires_work = wires_work

    # -- users --------------------------------------------------------------------------------

    @rule(data=st.data(), others=st.integers(0, 1))
    def begin_hand_off(self, data: st.DataObject, others: int) -> None:
        """The ordinary beginning, as far as the reading; sometimes two claim the same offer."""
        offer_id = self.world.add_offer(60.0)
        for _ in range(1 + others):
            decode = data.draw(st.integers(0, len(self.world.decodes) - 1))
            self.world.connect(self.world.add_claim(decode, offer_id, 30.0))
        self.world.deliver_all()

    @rule(read=st.booleans())
    def proceed(self, read: bool) -> None:
        """All goes well for a while."""
        self.world.deliver_all()
        for claim_id in list(self.world.readings) if read else []:
            self.world.end_read(claim_id, None)

    @rule(wait_s=st.sampled_from([1.0, 10.0, 60.0]))
    def offer(self, wait_s: float) -> None:
        self.world.add_offer(wait_s)

    @precondition(lambda self: self.world.blocks)
    @rule(data=st.data(), patience_s=st.sampled_from([0.5, 8.0, 30.0]), connect=st.booleans())
    def claim(self, data: st.DataObject, patience_s: float, connect: bool) -> None:
        decode = data.draw(st.integers(0, len(self.world.decodes) - 1))
        offer_id = data.draw(st.sampled_from([*self.world.blocks, UNKNOWN_OFFER]))
        claim_id = self.world.add_claim(decode, offer_id, patience_s)
        if connect:
            self.world.connect(claim_id)

    @precondition(lambda self: self.world.claim_of)
    @rule(data=st.data())
    def connect(self, data: st.DataObject) -> None:
        self.world.connect(data.draw(st.sampled_from([*self.world.claim_of])))

    @precondition(lambda self: self.world.blocks)
    @rule(data=st.data(), really=seldom)
    def cancel_offer(self, data: st.DataObject, really: bool) -> None:
        if really:
            self.world.cancel_offer(data.draw(st.sampled_from([*self.world.blocks])))

    @precondition(lambda self: self.world.claim_of)
    @rule(data=st.data(), really=seldom, fail=st.booleans())
    def end_claim(self, data: st.DataObject, really: bool, fail: bool) -> None:
        if not really:
            return
        claim_id = data.draw(st.sampled_from([*self.world.claim_of]))
        if fail:
            self.world.fail_claim(claim_id)
        else:
            self.world.cancel_claim(claim_id)

    # -- reading ------------------------------------------------------------------------------

    @precondition(lambda self: self.world.readings)
    @rule(data=st.data())
    def read_some(self, data: st.DataObject) -> None:
        self.world.read_some(data.draw(st.sampled_from([*self.world.readings])))

    @precondition(lambda self: self.world.readings)
    @rule(data=st.data(), error=read_errors)
    def end_read(self, data: st.DataObject, error: KVFerryError | None) -> None:
        self.world.end_read(data.draw(st.sampled_from([*self.world.readings])), error)

    @precondition(lambda self: self.world.contents)
    @rule(data=st.data(), error=read_errors)
    def repeat_read_ended(self, data: st.DataObject, error: KVFerryError | None) -> None:
        self.world.repeat_read_ended(data.draw(st.sampled_from([*self.world.contents])), error)

    # -- time and the end ---------------------------------------------------------------------

    @rule(seconds=durations)
    def pass_time(self, seconds: float) -> None:
        """Nobody ticks: both processes may be stalled."""
        self.world.now += seconds

    @rule()
    def tick_prefill(self) -> None:
        self.world.tick_prefill()

    @rule(data=st.data())
    def tick_decode(self, data: st.DataObject) -> None:
        self.world.tick_decode(data.draw(st.integers(0, len(self.world.decodes) - 1)))

    @precondition(lambda self: self.world.wires)
    @rule(data=st.data(), really=seldom, first=st.booleans())
    def cut(self, data: st.DataObject, really: bool, first: bool) -> None:
        """One side learns of it now, the other later."""
        if not really:
            return
        wire = data.draw(st.sampled_from(self.world.wires))
        if first and not wire.prefill_knows:
            self.world.tell_prefill(wire)
        elif not wire.decode_knows:
            self.world.tell_decode(wire)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle(wires_work=self.wires_work)


class LossyHandoffs(Handoffs):
    """Wires that lose, delay, repeat and reorder."""

    @precondition(lambda self: any(w.to_prefill or w.to_decode for w in self.world.wires))
    @rule(data=st.data(), keep=st.booleans(), lose=st.integers(0, 9))
    def deliver(self, data: st.DataObject, keep: bool, lose: int) -> None:
        ways = [(w, True) for w in self.world.wires if w.to_prefill]
        ways += [(w, False) for w in self.world.wires if w.to_decode]
        wire, to_prefill = data.draw(st.sampled_from(ways))
        queue = wire.to_prefill if to_prefill else wire.to_decode
        index = data.draw(st.integers(0, len(queue) - 1))
        if lose == 0:
            queue.pop(index)
        else:
            self.world.deliver(wire, to_prefill=to_prefill, index=index, keep=keep and lose < 4)

    @precondition(lambda self: self.world.readings)
    @rule(seconds=st.sampled_from([LEASE_S / 2, LEASE_S, LEASE_S * 2]), ticks=st.booleans())
    def stall(self, seconds: float, ticks: bool) -> None:
        """Decode neither renews nor hears of anything until its readings are done."""
        self.world.now += seconds
        if ticks:
            self.world.tick_prefill()
        for wire in self.world.wires:
            wire.to_decode.clear()
        for claim_id in list(self.world.readings):
            self.world.end_read(claim_id, None)
        self.world.deliver_all()


class OrderedHandoffs(Handoffs):
    """Wires as sessions really are: in order, nothing lost before a cut, any delay."""

    @precondition(lambda self: any(w.to_prefill or w.to_decode for w in self.world.wires))
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        ways: list[tuple[Wire, bool]] = [(w, True) for w in self.world.wires if w.to_prefill]
        ways += [(w, False) for w in self.world.wires if w.to_decode]
        wire, to_prefill = data.draw(st.sampled_from(ways))
        self.world.deliver(wire, to_prefill=to_prefill)


class FaithfulHandoffs(Handoffs):
    """Wires without delay: whatever happens, both sides know at once and agree."""

    faithful = True

    @invariant()
    def both_sides_agree(self) -> None:
        if hasattr(self, "world") and not any(w.cut for w in self.world.wires):
            self.world.check_agreement()


TestLossyHandoffs = LossyHandoffs.TestCase
TestOrderedHandoffs = OrderedHandoffs.TestCase
TestFaithfulHandoffs = FaithfulHandoffs.TestCase
for case in (TestLossyHandoffs, TestOrderedHandoffs, TestFaithfulHandoffs):
    case.settings = SETTINGS
    case.pytestmark = [pytest.mark.slow]
del case
