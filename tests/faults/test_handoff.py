"""The hand-off over real engines when something breaks: one end on each side, no block is lost."""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.errors import (
    AbortedError,
    BoundsError,
    BusyError,
    ClosedError,
    DeadlineError,
    HandoffError,
    KVFerryError,
    PeerLostError,
    RefusedError,
    UnreachableError,
    UsageError,
)
from kvferry.handoff import PARAMS_KEY, HandOff
from kvferry.layout import KVGeometry, to_wire
from kvferry.protocol import messages
from kvferry.protocol.messages import Claim, Granted, Hello, Stopped
from kvferry.testing import Child, FakeClock

from .helpers import Ends, Held, frame, raw_connect, raw_hello, read_message, wait_until

GEOMETRY = KVGeometry(
    model="m", layers=2, kv_heads=2, head_dim=8, dtype="float16", block_tokens=4, blocks=16
)
TOKENS = 10
BLOCKS = [3, 1, 7]


@dataclass
class Side:
    """An engine with a pool and a hand-off."""

    engine: Any
    handoff: HandOff
    pool: Any


@pytest.fixture
def make_side(make_engine):
    def make(name, *transports, geometry=GEOMETRY, **settings):
        engine = make_engine(name, *transports, **settings)
        pool = engine.allocate(geometry.pool_nbytes)
        pool.array[:] = np.random.default_rng(len(name)).integers(0, 256, pool.array.size)
        return Side(engine, HandOff(engine, pool, geometry), pool)

    return make


def with_held(make_side, **settings):
    """Prefill, decode, and the transport whose transfers the test ends by hand."""
    prefill = make_side("prefill", "held", extra={"held": Held()}, **settings)
    held = Held()
    decode = make_side("decode", "held", extra={"held": held}, **settings)
    return prefill, decode, held


def assert_nothing_left(*sides):
    for side in sides:
        wait_until(lambda side=side: idle(side), f"{side.handoff.statistics()}")


def idle(side):
    figures = side.handoff.statistics()
    return not sum(figures["offers"].values()) and not sum(figures["claims"].values())


def test_all_tokens_arrive(make_side):
    prefill, decode = make_side("prefill"), make_side("decode")
    offered, claimed = Ends(), Ends()
    offer = prefill.handoff.offer(BLOCKS, TOKENS, on_end=offered, extra={"first_token": 42})
    decode.handoff.claim(offer.params, [9, 2, 4], TOKENS, on_end=claimed)
    end = claimed.one()
    assert end.error is None
    assert end.extra == {"first_token": 42}
    assert offered.one().delivered
    assert end.nbytes == GEOMETRY.token_bytes * TOKENS
    assert len(offered.all) == len(claimed.all) == 1
    source = prefill.pool.array[: GEOMETRY.pool_nbytes].reshape(2, 2, 16, 4, -1)
    target = decode.pool.array[: GEOMETRY.pool_nbytes].reshape(2, 2, 16, 4, -1)
    for theirs, ours, tokens in ((3, 9, 4), (1, 2, 4), (7, 4, 2)):
        assert np.array_equal(source[:, :, theirs, :tokens], target[:, :, ours, :tokens])


def test_no_tokens_is_a_delivery(make_side):
    prefill, decode = make_side("prefill"), make_side("decode")
    offered, claimed = Ends(), Ends()
    offer = prefill.handoff.offer([], 0, on_end=offered)
    decode.handoff.claim(offer.params, [], 0, on_end=claimed)
    assert claimed.one().error is None
    assert offered.one().code == "delivered"
    assert claimed.all[0].nbytes == 0


def test_an_offer_serves_once(make_side):
    prefill, decode = make_side("prefill"), make_side("decode")
    offered, first, second, third = Ends(), Ends(), Ends(), Ends()
    offer = prefill.handoff.offer(BLOCKS, TOKENS, on_end=offered)
    decode.handoff.claim(offer.params, [0, 1, 2], TOKENS, on_end=first)
    assert first.one().error is None
    decode.handoff.claim(offer.params, [0, 1, 2], TOKENS, on_end=second)
    error = second.one().error
    assert isinstance(error, RefusedError)
    assert error.code == "already_delivered"
    assert "compute the prompt here" in error.fix
    forged = {PARAMS_KEY: {**offer.params[PARAMS_KEY], "offer": "0" * 32}}
    decode.handoff.claim(forged, [0, 1, 2], TOKENS, on_end=third)
    assert third.one().error.code == "unknown_offer"
    assert third.all[0].error.fix
    assert_nothing_left(prefill, decode)


def test_prefill_is_gone(make_side):
    prefill, decode = make_side("prefill"), make_side("decode")
    claimed, offered = Ends(), Ends()
    offer = prefill.handoff.offer(BLOCKS, TOKENS, on_end=offered)
    prefill.engine.close()
    assert offered.one(1.0).code == "cancelled"
    decode.handoff.claim(offer.params, [0, 1, 2], TOKENS, on_end=claimed)
    error = claimed.one(2.0).error
    assert isinstance(error, UnreachableError)
    assert error.fix


def test_prefill_was_restarted_on_the_same_port(make_side):
    prefill, decode = make_side("prefill"), make_side("decode")
    claimed = Ends()
    offer = prefill.handoff.offer(BLOCKS, TOKENS, on_end=Ends())
    port = prefill.engine.addresses[1].rpartition(":")[2]
    prefill.engine.close()
    again = make_side("again", listen=f"127.0.0.1:{port}")
    decode.handoff.claim(offer.params, [0, 1, 2], TOKENS, on_end=claimed)
    error = claimed.one(2.0).error
    assert isinstance(error, PeerLostError)
    assert "it was restarted" in str(error)
    assert_nothing_left(decode, again)


@pytest.mark.parametrize("how", ["closes", "is cut off"])
def test_prefill_goes_while_decode_reads(make_side, how):
    prefill, decode, held = with_held(make_side)
    offered, claimed = Ends(), Ends()
    offer = prefill.handoff.offer(BLOCKS, TOKENS, on_end=offered)
    decode.handoff.claim(offer.params, [0, 1, 2], TOKENS, on_end=claimed)
    wait_until(lambda: held.ops, "no read began")
    if how == "closes":
        prefill.engine.close()
        assert isinstance(claimed.one(2.0).error, (PeerLostError, RefusedError))
    else:
        with prefill.engine.locked():
            for peer in prefill.engine.connections.open_peers():
                prefill.engine.connections.drop(peer, "for this test")
        assert isinstance(claimed.one(2.0).error, PeerLostError)
    assert claimed.all[0].error.fix
    assert not offered.one(2.0).delivered
    assert len(offered.all) == len(claimed.all) == 1


def test_the_claim_ends_only_when_its_reading_has_stopped(make_side):
    prefill, decode, held = with_held(make_side)
    held.ends_on_abort = False
    offered, claimed = Ends(), Ends()
    offer = prefill.handoff.offer(BLOCKS, TOKENS, on_end=offered)
    claim = decode.handoff.claim(offer.params, [0, 1, 2], TOKENS, on_end=claimed)
    wait_until(lambda: held.ops, "no read began")
    claim.cancel()
    claim.cancel()
    wait_until(lambda: held.aborted, "the reading was not stopped")
    assert not claimed.all
    assert not offered.all
    held.end(held.ops[0], held.ops[0].stop)
    assert isinstance(claimed.one().error, AbortedError)
    assert offered.one().code == "released"
    assert_nothing_left(prefill, decode)
    assert len(offered.all) == len(claimed.all) == 1


def test_blocks_that_may_still_be_written_to_are_not_given_back(make_side):
    prefill, decode, held = with_held(make_side)
    held.ends_on_abort = False
    decode.engine.moves.stop_s = 0.02
    offered, claimed = Ends(), Ends()
    offer = prefill.handoff.offer(BLOCKS, TOKENS, on_end=offered)
    decode.handoff.claim(offer.params, [0, 1, 2], TOKENS, on_end=claimed, deadline_s=0.05)
    # The hand-off is over on both sides; only decode's blocks are kept back.
    assert not offered.one(2.0).delivered
    assert_nothing_left(prefill, decode)
    assert decode.engine.statistics()["quarantined"] == 1
    assert not claimed.all
    (op,) = held.ops
    held.end(op)
    assert isinstance(claimed.one(2.0).error, DeadlineError)
    assert decode.engine.statistics()["quarantined"] == 0
    assert len(claimed.all) == 1


def test_closing_gives_back_what_was_in_quarantine(make_side):
    prefill, decode, held = with_held(make_side)
    held.ends_on_abort = False
    decode.engine.moves.stop_s = 0.02
    claimed = Ends()
    offer = prefill.handoff.offer(BLOCKS, TOKENS, on_end=Ends())
    decode.handoff.claim(offer.params, [0, 1, 2], TOKENS, on_end=claimed, deadline_s=0.05)
    wait_until(lambda: decode.engine.statistics()["quarantined"], "it never ended")
    held.ops.clear()  # It is lost for ever.
    decode.engine.close()
    assert isinstance(claimed.one().error, DeadlineError)


def test_prefill_withdraws_while_decode_reads(make_side):
    prefill, decode, held = with_held(make_side)
    offered, claimed = Ends(), Ends()
    offer = prefill.handoff.offer(BLOCKS, TOKENS, on_end=offered)
    decode.handoff.claim(offer.params, [0, 1, 2], TOKENS, on_end=claimed)
    wait_until(lambda: held.ops, "no read began")
    offer.cancel()
    offer.cancel()
    error = claimed.one().error
    assert isinstance(error, RefusedError)
    assert error.code == "cancelled"
    assert offered.one().code == "cancelled"
    assert len(offered.all) == len(claimed.all) == 1


def test_an_offer_that_nobody_claims_is_cancelled_or_expires(make_side):
    clock = FakeClock()
    prefill = make_side("prefill", clock=clock)
    cancelled, expired = Ends(), Ends()
    offer = prefill.handoff.offer(BLOCKS, TOKENS, on_end=cancelled)
    offer.cancel()
    assert cancelled.one().code == "cancelled"
    prefill.handoff.offer(BLOCKS, TOKENS, on_end=expired, expires_s=2.0)
    clock.advance(1.9)
    assert not expired.all
    clock.advance(0.2)
    assert expired.one().code == "expired"
    offer.cancel()
    assert len(cancelled.all) == len(expired.all) == 1


def test_a_claim_is_cancelled_before_it_is_connected(make_side):
    prefill, decode = make_side("prefill"), make_side("decode")
    claimed = Ends()
    offer = prefill.handoff.offer(BLOCKS, TOKENS, on_end=Ends())
    with decode.engine.locked():
        claim = decode.handoff.claim(offer.params, [0, 1, 2], TOKENS, on_end=claimed)
        claim.cancel()
    assert isinstance(claimed.one().error, AbortedError)
    offer.cancel()
    assert_nothing_left(prefill, decode)
    assert len(claimed.all) == 1


def test_the_lease_runs_out_while_decode_is_silent(make_side):
    clock = FakeClock()
    prefill = make_side("prefill", clock=clock, lost_s=100.0, lease_s=5.0)
    offered = Ends()
    offer = prefill.handoff.offer(BLOCKS, TOKENS, on_end=offered)
    with raw_connect(prefill.engine.addresses[0]) as decode:
        decode.sendall(raw_hello())
        assert isinstance(read_message(decode), Hello)
        decode.sendall(frame(Claim(bytes(16), offer.offer_id)))
        assert isinstance(read_message(decode), Granted)
        clock.advance(4.9)
        decode.sendall(frame(messages.Renew([offer.offer_id])))
        decode.sendall(frame(messages.Ping(7)))
        skip_to(decode, messages.Pong)
        clock.advance(4.9)
        assert not offered.all
        clock.advance(0.2)
        assert offered.one().code == "expired"
        assert skip_to(decode, messages.Withdrawn).code == "expired"
        # What was read meanwhile may have been overwritten: it must never be used.
        decode.sendall(frame(messages.Confirm(bytes(16), offer.offer_id)))
        assert skip_to(decode, messages.Refused).code == "expired"
    assert len(offered.all) == 1


def skip_to(sock, kind):
    """The next message of a kind; heart-beats and others are skipped."""
    while not isinstance(message := read_message(sock), kind):
        assert message is not None, f"the connection ended before a {kind.__name__}"
        if isinstance(message, kind):
            break
    return message


def test_a_reading_decode_keeps_its_lease(make_side):
    clock = FakeClock()
    settings = {"clock": clock, "lost_s": 1000.0, "lease_s": 4.0, "transfer_s": 500.0}
    prefill, decode, held = with_held(make_side, **settings)
    offered, claimed = Ends(), Ends()
    offer = prefill.handoff.offer(BLOCKS, TOKENS, on_end=offered)
    decode.handoff.claim(offer.params, [0, 1, 2], TOKENS, on_end=claimed)
    wait_until(lambda: held.ops, "no read began")
    for _ in range(8):
        due = prefill.handoff._offers._offers[offer.offer_id].due
        clock.advance(2.0)
        wait_until(lambda due=due: renewed(prefill, offer, due), "the lease was not renewed")
    held.end(held.ops[0])
    assert claimed.one().error is None
    assert offered.one().delivered


def renewed(prefill, offer, due):
    return prefill.handoff._offers._offers[offer.offer_id].due > due


def test_a_claim_ends_at_its_deadline(make_side):
    clock = FakeClock()
    prefill, decode, held = with_held(make_side, clock=clock, lost_s=1000.0, lease_s=1000.0)
    offered, claimed = Ends(), Ends()
    offer = prefill.handoff.offer(BLOCKS, TOKENS, on_end=offered)
    decode.handoff.claim(offer.params, [0, 1, 2], TOKENS, on_end=claimed, deadline_s=3.0)
    wait_until(lambda: held.ops, "no read began")
    clock.advance(3.0)
    assert isinstance(claimed.one().error, DeadlineError)
    assert claimed.all[0].error.peer == "prefill"
    assert offered.one().code == "released"


@pytest.mark.slow
def test_decode_is_killed_while_it_reads(make_side, tmp_path):
    prefill = make_side("prefill")
    offered = Ends()
    offer = prefill.handoff.offer(BLOCKS, TOKENS, on_end=offered)
    with Child() as child:
        child.run(
            "import socket, sys\n"
            "from kvferry.config import EngineConfig\n"
            "from kvferry.engine import Engine\n"
            "from kvferry.handoff import HandOff\n"
            "from kvferry.layout import KVGeometry\n"
            f"geometry = KVGeometry(**{to_wire(GEOMETRY)!r})\n"
            f"engine = Engine(EngineConfig(name='child', directory={str(tmp_path / 'c')!r}))\n"
            "pool = engine.allocate(geometry.pool_nbytes)\n"
            "handoff = HandOff(engine, pool, geometry)\n"
            "handoff._read = lambda *arguments: None  # Its reading never ends.\n"
            f"claim = handoff.claim({offer.params!r}, [0, 1, 2], {TOKENS}, on_end=print)"
        )
        wait_until(
            lambda: prefill.handoff.statistics()["offers"]["claimed"] == 1, "it was not claimed"
        )
        assert not offered.all
        child.kill()
        end = offered.one(2.0)
    assert end.code == "peer_lost"
    assert_nothing_left(prefill)


def test_callbacks_that_raise(make_side, caplog):
    prefill, decode = make_side("prefill"), make_side("decode")

    def broken(_end):
        raise RuntimeError("a mistake of the caller")

    with caplog.at_level(logging.CRITICAL, "kvferry"):
        offer = prefill.handoff.offer(BLOCKS, TOKENS, on_end=broken)
        decode.handoff.claim(offer.params, [0, 1, 2], TOKENS, on_end=broken)
        assert_nothing_left(prefill, decode)
    claimed = Ends()
    offer = prefill.handoff.offer(BLOCKS, TOKENS, on_end=Ends())
    decode.handoff.claim(offer.params, [0, 1, 2], TOKENS, on_end=claimed)
    assert claimed.one().error is None


def test_closing_ends_everything_once(make_side):
    prefill, decode, held = with_held(make_side)
    offered = [Ends() for _ in range(3)]
    claimed = [Ends() for _ in range(2)]
    offers = [prefill.handoff.offer(BLOCKS, TOKENS, on_end=end) for end in offered]
    for offer, end in zip(offers, claimed, strict=False):
        decode.handoff.claim(offer.params, [0, 1, 2], TOKENS, on_end=end)
    wait_until(lambda: len(held.ops) == 2, "the reads did not begin")
    decode.engine.close()
    assert all(isinstance(end.one(0.1).error, KVFerryError) for end in claimed)
    for end in offered[:2]:
        assert not end.one(2.0).delivered
    prefill.engine.close()
    offered[2].one(0.1)
    assert [len(end.all) for end in [*offered, *claimed]] == [1] * 5
    with pytest.raises(ClosedError):
        prefill.handoff.offer(BLOCKS, TOKENS, on_end=Ends())
    with pytest.raises(ClosedError):
        decode.handoff.claim(offers[2].params, [0, 1, 2], TOKENS, on_end=Ends())


# -- what can never work -------------------------------------------------------------------------


def test_other_geometry_is_refused_with_both_values(make_side):
    prefill, decode = make_side("prefill"), make_side("decode")
    offer = prefill.handoff.offer(BLOCKS, TOKENS, on_end=Ends())
    forged = {PARAMS_KEY: {**offer.params[PARAMS_KEY], "fingerprint": "0123456789abcdef"}}
    with pytest.raises(RefusedError, match=r"fingerprint 0123456789abcdef.*dtype differ.*run the"):
        decode.handoff.claim(forged, [0, 1, 2], TOKENS, on_end=Ends())


def test_another_number_of_tokens(make_side):
    prefill, decode = make_side("prefill"), make_side("decode")
    offer = prefill.handoff.offer(BLOCKS, TOKENS, on_end=Ends())
    with pytest.raises(UsageError, match=r"offers 10 tokens, decode's prompt has 9.*tokenizer"):
        decode.handoff.claim(offer.params, [0, 1, 2], 9, on_end=Ends())
    with pytest.raises(BoundsError):
        decode.handoff.claim(offer.params, [0, 1], TOKENS, on_end=Ends())
    with pytest.raises(BoundsError):
        prefill.handoff.offer([99], 1, on_end=Ends())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "version 2"),
        ({"offer": "xyz"}, "offer"),
        ({"engine": 7}, "engine"),
        ({"addresses": []}, "addresses"),
        ({"addresses": ["nonsense"]}, "not host:port"),
        ({"addresses": ["tcp://evil.example:80"]}, "'evil.example' is not a number"),
        ({"n_tokens": -1}, "n_tokens"),
    ],
)
def test_parameters_that_were_tampered_with(make_side, change, said):
    decode = make_side("decode")
    good = {
        "version": 1,
        "offer": "0" * 32,
        "engine": "0" * 32,
        "addresses": ["tcp://127.0.0.1:1"],
        "n_tokens": TOKENS,
        "fingerprint": decode.handoff._fingerprint,
    }
    with pytest.raises(UsageError) as caught:
        decode.handoff.claim({PARAMS_KEY: {**good, **change}}, [0, 1, 2], TOKENS, on_end=Ends())
    assert said in str(caught.value)
    assert caught.value.fix
    for nothing in ({}, None, {PARAMS_KEY: "x"}):
        with pytest.raises(UsageError, match="verbatim"):
            decode.handoff.claim(nothing, [0, 1, 2], TOKENS, on_end=Ends())
    assert idle(decode)


def test_bounds_on_offers_and_claims(make_side, monkeypatch):
    prefill, decode = make_side("prefill"), make_side("decode")
    prefill.handoff._offers.offers_max = 2
    offers = [prefill.handoff.offer(BLOCKS, TOKENS, on_end=Ends()) for _ in range(2)]
    with pytest.raises(BusyError, match="2 offers wait"):
        prefill.handoff.offer(BLOCKS, TOKENS, on_end=Ends())
    monkeypatch.setattr("kvferry.handoff.CLAIMS_MAX", 0)
    with pytest.raises(BusyError, match="0 claims are under way; wait"):
        decode.handoff.claim(offers[0].params, [0, 1, 2], TOKENS, on_end=Ends())
    with pytest.raises(UsageError, match="extra is over"):
        prefill.handoff.offer(BLOCKS, TOKENS, on_end=Ends(), extra={"x": "y" * 70000})


def good_payload():
    return {
        "ref": bytes(24),
        "geometry": to_wire(GEOMETRY),
        "blocks": np.array(BLOCKS, "<i8").tobytes(),
        "n_tokens": TOKENS,
        "extra": {},
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (None, "cannot be read"),
        ({"ref": b"short"}, "cannot be read"),
        ({"geometry": {}}, "model is missing"),
        ({"geometry": {**to_wire(GEOMETRY), "layers": -1}}, "layers"),
        ({"geometry": {**to_wire(GEOMETRY), "dtype": "float32"}}, "float16 here, float32 there"),
        ({"geometry": {**to_wire(GEOMETRY), "blocks": 1 << 32, "layers": 1 << 16}}, "fit"),
        ({"n_tokens": 11}, "grants 11 tokens"),
        ({"blocks": b"1234567"}, "7 bytes of block"),
        ({"blocks": b""}, "do not hold 10 tokens"),
        ({"blocks": np.array([-1, 2, 3], "<i8").tobytes()}, "outside the pool"),
        ({"blocks": np.array([1 << 62, 2, 3], "<i8").tobytes()}, "outside the pool"),
        ({}, "no region"),
    ],
)
def test_a_hostile_prefill(make_side, change, said):
    decode = make_side("decode")
    incarnation, claimed = os.urandom(16), Ends()
    with socket.create_server(("127.0.0.1", 0)) as server:
        params = {
            "version": 1,
            "offer": "0" * 32,
            "engine": incarnation.hex(),
            "addresses": [f"tcp://127.0.0.1:{server.getsockname()[1]}"],
            "n_tokens": TOKENS,
            "fingerprint": decode.handoff._fingerprint,
        }
        decode.handoff.claim({PARAMS_KEY: params}, [0, 1, 2], TOKENS, on_end=claimed)
        sock, _ = server.accept()
        with sock:
            assert isinstance(read_message(sock), Hello)
            sock.sendall(raw_hello(incarnation=incarnation))
            claim = skip_to(sock, Claim)
            payload = (
                b"\xc1" if change is None else msgspec.msgpack.encode({**good_payload(), **change})
            )
            sock.sendall(frame(Granted(claim.claim_id, claim.offer_id, 5.0, payload)))
            if change == {}:
                asked = skip_to(sock, messages.Describe)
                failed = messages.Failure(asked.request_id, "stale_region", "there is no region")
                sock.sendall(frame(failed))
            error = claimed.one().error
            assert isinstance(error, KVFerryError)
            assert said in str(error)
            assert error.fix or change == {}
            # Prefill hears of it at once, so that its blocks are free.
            assert isinstance(skip_to(sock, Stopped), Stopped)
    assert len(claimed.all) == 1
    assert idle(decode)


def test_one_engine_has_one_handoff(make_side):
    prefill = make_side("prefill")
    with pytest.raises(UsageError, match="has a HandOff already"):
        HandOff(prefill.engine, prefill.pool, GEOMETRY)


def test_a_pool_that_is_too_small(make_engine):
    engine = make_engine("prefill")
    with pytest.raises(UsageError, match="the geometry needs"):
        HandOff(engine, engine.allocate(16), GEOMETRY)


def test_many_claims_of_a_new_region_share_its_description(make_side):
    prefill, decode = make_side("prefill", "shm"), make_side("decode", "shm")
    ends = [Ends() for _ in range(20)]
    offers = [prefill.handoff.offer(BLOCKS, TOKENS, on_end=Ends()) for _ in ends]
    for number, (offer, end) in enumerate(zip(offers, ends, strict=True)):
        blocks = [number % 5 * 3 + i for i in range(3)]
        decode.handoff.claim(offer.params, blocks, TOKENS, on_end=end)
    for end in ends:
        error = end.one().error
        assert error is None, error
    assert decode.engine.statistics()["transports"]["shm"]["mappings"] == 1
    assert isinstance(HandoffError("x"), KVFerryError)


@pytest.mark.parametrize("sends_first", [True, False])
def test_claims_that_wait_unread_when_the_session_breaks_release_their_offers(
    make_side, sends_first
):
    """As after a freeze: claims and the hanging up lie in the socket, and every send fails."""
    prefill = make_side("prefill")
    ends = [Ends() for _ in range(3)]
    offers = [prefill.handoff.offer(BLOCKS, TOKENS, on_end=ended) for ended in ends]
    decode = raw_connect(prefill.engine.addresses[0])
    decode.sendall(raw_hello())
    assert isinstance(read_message(decode), Hello)
    engine = prefill.engine
    wait_until(lambda: engine.connections.open_peers(), "no session")
    with engine.locked():
        (peer,) = engine.connections.open_peers()
        for offer in offers:
            offer_id = bytes.fromhex(offer.params[PARAMS_KEY]["offer"])
            decode.sendall(frame(Claim(os.urandom(16), offer_id)))
        decode.close()
        if sends_first:
            peer.send(messages.Notify(b"anybody there?"))
            assert peer.lost is not None
    assert [ended.one().code for ended in ends] == ["peer_lost"] * 3
    assert_nothing_left(prefill)
