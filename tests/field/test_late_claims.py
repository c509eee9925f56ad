"""Kinds of fault in leases and descriptions: what comes late, behind others, or half."""

from __future__ import annotations

import itertools
import os
import threading

import numpy as np
import pytest

from faults.helpers import Ends, raw_connect, read_message
from kvferry.errors import KVFerryError, RefusedError, StaleRegionError
from kvferry.peers import REF
from kvferry.protocol import framing, messages
from kvferry.protocol.handoff import Claims, OfferEnded, Offers, Send
from kvferry.protocol.messages import Claim, Describe, Description, Granted, Hello, Renew
from kvferry.regions import Spans
from kvferry.testing import FakeClock
from kvferry.testing.conformance import failure, wait_until

# -- leases --------------------------------------------------------------------------------------


def ended(actions):
    return {action.offer_id for action in actions if isinstance(action, OfferEnded)}


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_leases_behind_a_renewed_one_are_all_reclaimed_in_one_sweep(order):
    """Claimed in any order; the first is renewed for ever, one waits unclaimed for longer."""
    offers = Offers(lease_s=4.0)
    ids = [bytes([i]) * 16 for i in range(4)]
    for number in order:
        offers.add(ids[number], b"", expires_at=100.0 if number == 3 else 60.0)
    for number in order:
        if number != 3:
            offers.claim("s", Claim(bytes([64 + number]) * 16, ids[number]), 0.0)
    for now in (1.0, 2.0, 3.0, 3.9):
        offers.renew("s", Renew([ids[0]]), now)
        assert not ended(offers.tick(now))
    assert ended(offers.tick(4.0)) == {ids[1], ids[2]}
    for now in range(5, 100):
        offers.renew("s", Renew([ids[0]]), float(now))
        assert not ended(offers.tick(float(now)))
    assert ended(offers.tick(100.0)) == {ids[3]}
    assert ended(offers.tick(103.0)) == {ids[0]}
    assert not len(offers)


def test_what_a_claim_renews_is_what_its_lease_is_kept_under():
    offers, claims = Offers(lease_s=2.0), Claims()
    offer_id, claim_id = os.urandom(16), os.urandom(16)
    offers.add(offer_id, b"", expires_at=60.0)
    claims.add(claim_id, offer_id, deadline=1000.0, now=0.0)
    (asked,) = claims.connected(claim_id, "s")
    (answer,) = offers.claim("s", asked.message, 0.0)
    assert isinstance(answer.message, Granted)
    claims.granted("s", answer.message, 0.0)
    renewed = 0
    for step in range(1, 1000):
        now = step / 4
        for action in claims.tick(now):
            assert isinstance(action, Send)
            offers.renew("s", action.message, now)
            renewed += 1
        assert not offers.tick(now), f"the lease ended after {now} s"
    assert renewed > 400


# -- late claims -----------------------------------------------------------------------------------


def test_a_claim_whose_connection_comes_after_the_offers_end_reads_nothing(make_side):
    clock = FakeClock()
    settings = {"clock": clock, "lost_s": 1000.0, "connect_s": 500.0, "transfer_s": 900.0}
    prefill, decode = make_side("prefill", **settings), make_side("decode", **settings)
    held = []
    connect = decode.engine.connect_nowait
    decode.engine.connect_nowait = lambda *arguments: held.append(arguments)
    offered = Ends()
    offer = prefill.offer(offered)
    claimed = decode.claim(offer)
    clock.advance(61.0)
    assert offered.one().code == "expired"
    before = decode.pool.array.copy()
    prefill.pool.array[:] = 0xEE  # The blocks belong to somebody else now.
    (arguments,) = held
    connect(*arguments)
    error = claimed.one().error
    assert isinstance(error, RefusedError)
    assert error.code == "expired"
    assert np.array_equal(decode.pool.array, before)
    assert decode.engine.statistics()["transfers"] == 0
    assert prefill.is_idle()
    assert decode.is_idle()


def test_a_grant_that_arrives_after_the_lease_never_becomes_a_load(make_side):
    clock = FakeClock()
    settings = {"clock": clock, "lost_s": 1000.0, "transfer_s": 900.0}
    prefill, decode = make_side("prefill", **settings), make_side("decode", **settings)
    held, came = [], threading.Event()
    hear = decode.handoff.on_message

    def keep(peer, message):
        if isinstance(message, Granted):
            held.append((peer, message))
            came.set()
        else:
            hear(peer, message)

    decode.handoff.on_message = keep
    offered = Ends()
    claimed = decode.claim(prefill.offer(offered))
    assert came.wait(5.0)
    clock.advance(5.1)
    assert offered.one().code == "expired"
    prefill.pool.array[:] = 0xEE
    decode.handoff.on_message = hear
    with decode.engine.locked():
        hear(*held[0])
    error = claimed.one().error
    assert isinstance(error, RefusedError)
    assert error.code == "expired"
    assert decode.is_idle()


# -- descriptions ----------------------------------------------------------------------------------


def test_what_is_registered_after_connecting_is_found(make_engine):
    near, far = make_engine("near"), make_engine("far")
    peer = near.connect(far.addresses[0])
    for _ in range(3):
        gone = far.allocate(64)
        ref = gone.ref
        gone.close()
        # Too early or too late is the same for the owner: it says no, and nothing is kept of it.
        assert isinstance(failure(peer.region, ref), StaleRegionError)
        assert not peer.regions
        again = far.allocate(64)
        local = near.allocate(64)
        spans = Spans.whole(64)
        assert near.read(local, spans, peer.region(again.ref), spans).wait(5.0) == 64
        again.close()
        wait_until(lambda: not peer.regions, "the peer was not told")


def description(number, region_id, **fields):
    made_up = {
        "kind": "host",
        "device": "",
        "nbytes": 64,
        "generation": 1,
        "access": "read",
        "exports": {"tcp": b""},
    }
    return Description(request_id=number, region_id=region_id, **{**made_up, **fields})


@pytest.mark.parametrize(
    "spoil",
    [{"nbytes": 0}, {"region_id": 99}, {"fd_owners": ["shm"]}],
    ids=["of nothing", "of another", "without its descriptor"],
)
def test_half_a_description_is_refused_and_nothing_of_it_is_kept(make_engine, spoil):
    near = make_engine("near")
    region_id, token = 7, os.urandom(16)
    # The owner is a peer that dialled us, played by hand.
    with raw_connect(near.addresses[0]) as sock:

        def send(message):
            sock.sendall(framing.encode(messages.pack(message), limit=1 << 20))

        send(Hello(incarnation=os.urandom(16), name="owner", purpose="control", key=bytes(16)))
        assert isinstance(read_message(sock), Hello)
        wait_until(lambda: near.connections.count() == 1, "not connected")
        (peer,) = near.connections.open_peers()
        found = []
        thread = threading.Thread(
            target=lambda: found.append(failure(peer.region, REF.pack(region_id, token)))
        )
        thread.start()
        asked = read_message(sock)
        assert isinstance(asked, Describe)
        fields = {"number": asked.request_id, "region_id": region_id, **spoil}
        send(description(**fields))
        thread.join(10.0)
        assert isinstance(found[0], KVFerryError), found
        assert found[0].peer == "owner"
        assert not peer.regions
