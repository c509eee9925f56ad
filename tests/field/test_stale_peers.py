"""Kinds of fault around partners that were replaced, cut off, or failed just once."""

from __future__ import annotations

import pytest

from faults.helpers import MIB, WHOLE, Ends, Held, wait_until
from kvferry.errors import KVFerryError, PeerLostError
from kvferry.testing import FaultyTransport
from kvferry.testing.conformance import failure
from kvferry.transports.tcp import TcpTransport


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_everybody_who_knew_the_old_one_works_with_its_successor_at_once(make_side, transport):
    decodes = [make_side(f"decode{number}", transport) for number in range(3)]
    old = make_side("old", transport)
    for decode in decodes:
        assert decode.claim(old.offer()).one().error is None
    left_over = old.offer()
    port = old.engine.addresses[1].rpartition(":")[2]
    old.engine.close()
    new = make_side("successor", transport, listen=f"127.0.0.1:{port}")
    for decode in decodes:
        # What the old one promised is refused by the new one, and does not spoil what follows.
        assert isinstance(decode.claim(left_over).one().error, PeerLostError)
        for _ in range(3):
            assert decode.claim(new.offer()).one().error is None
    assert new.handoff.statistics()["ended"] == {"offer_delivered": 9}
    for side in [*decodes, new]:
        wait_until(side.is_idle, "an offer or a claim is left")


def test_a_link_that_breaks_again_and_again_is_made_anew_by_the_next_claim(make_side):
    held = Held()
    prefill = make_side("prefill", "held", "tcp", extra={"held": Held()})
    decode = make_side("decode", "held", "tcp", extra={"held": held})
    for _ in range(4):
        offered = Ends()
        claimed = decode.claim(prefill.offer(offered))
        wait_until(lambda: held.ops, "no read began")
        with prefill.engine.locked():
            for peer in prefill.engine.connections.open_peers():
                prefill.engine.connections.drop(peer, "for this test")
        assert isinstance(claimed.one().error, PeerLostError), "an answer from bytes that are not"
        assert not offered.one().delivered
        # Without being told anything, the same two engines go on.
        offered = Ends()
        claimed = decode.claim(prefill.offer(offered))
        wait_until(lambda: held.ops, "no read began")
        held.end(held.ops[0])
        assert claimed.one().error is None
        assert offered.one().delivered
    assert decode.engine.connections.count() == 1


def test_a_healthy_peer_is_used_again_right_after_one_failure(make_engine):
    once = FaultyTransport(TcpTransport(), "close_midflight", times=1)
    near, far = make_engine("near", "tcp", extra={"tcp": once}), make_engine("far", "tcp")
    local, owned = near.allocate(MIB), far.allocate(MIB)
    owned.array[:] = 6
    remote = near.connect(far.addresses[0]).region(owned.ref)
    assert isinstance(failure(near.read(local, WHOLE, remote, WHOLE).wait, 5.0), KVFerryError)
    for _ in range(100):
        assert near.read(local, WHOLE, remote, WHOLE, deadline_s=5.0).wait(5.0) == MIB
    assert int(local.array.min()) == 6
    assert near.statistics()["failed"] == 1
