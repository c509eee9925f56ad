"""What HandOff does beyond the tables: declining, closing, and reads that cannot even begin."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import pytest

from kvferry.errors import (
    AbortedError,
    BusyError,
    ClosedError,
    DeadlineError,
    PeerLostError,
    UsageError,
)
from kvferry.handoff import ClaimEnd, HandOff, OfferEnd
from kvferry.layout import KVGeometry
from kvferry.testing.conformance import wait_until

GEOMETRY = KVGeometry(
    model="m", layers=1, kv_heads=1, head_dim=8, dtype="float16", block_tokens=4, blocks=4
)


class Ends:
    """An ``on_end`` that keeps what came."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._came = threading.Semaphore(0)

    def __call__(self, end: OfferEnd | ClaimEnd) -> None:
        self.all.append(end)
        self._came.release()

    def one(self) -> Any:
        assert self._came.acquire(timeout=5.0), "on_end was never called"
        (end,) = self.all
        return end


@pytest.fixture
def sides(make_engine: Any) -> tuple[HandOff, HandOff]:
    """Prefill's hand-off and decode's."""
    made = []
    for name in ("prefill", "decode"):
        engine = make_engine(name)
        pool = engine.allocate(GEOMETRY.pool_nbytes)
        pool.array[:] = np.arange(pool.array.size) % 251
        made.append(HandOff(engine, pool, GEOMETRY))
    return made[0], made[1]


def idle(side: HandOff) -> bool:
    figures = side.statistics()
    return not sum(figures["offers"].values()) + sum(figures["claims"].values())


def test_an_offer_that_is_declined_ends_at_once(sides: tuple[HandOff, HandOff]) -> None:
    prefill, decode = sides
    offered = Ends()
    offer = prefill.offer([1, 2], 8, on_end=offered)
    decode.decline(offer.params)
    assert offered.one().code == "released"
    wait_until(lambda: idle(prefill) and idle(decode), "something is left")
    with pytest.raises(UsageError):
        decode.decline({})


def test_nothing_begins_after_the_close(sides: tuple[HandOff, HandOff]) -> None:
    prefill, decode = sides
    offer = prefill.offer([1], 4, on_end=Ends())
    for side in sides:
        side.close()
    with pytest.raises(ClosedError, match="hand-off is closed"):
        prefill.offer([1], 4, on_end=Ends())
    with pytest.raises(ClosedError, match="hand-off is closed"):
        decode.claim(offer.params, [1], 4, on_end=Ends())


def test_a_read_that_raises_anything_ends_the_claim(
    sides: tuple[HandOff, HandOff], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    prefill, decode = sides

    def broken(*_args: Any, **_settings: Any) -> Any:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(decode.engine, "read", broken)
    offered, claimed = Ends(), Ends()
    offer = prefill.offer([1, 2], 8, on_end=offered)
    with caplog.at_level(logging.CRITICAL):
        decode.claim(offer.params, [0, 3], 8, on_end=claimed)
        error = claimed.one().error
    assert isinstance(error, AbortedError)
    assert "ZeroDivisionError: a bug" in error.message
    assert offered.one().code == "released"


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_claim_that_is_cancelled_as_its_read_begins(
    sides: tuple[HandOff, HandOff], monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The cancel comes from another thread, so it may fall on either side of the beginning."""
    prefill, decode = sides
    begun: list[Any] = []
    describe, read = decode.engine.describe, decode.engine.read

    def cancel() -> None:
        with decode.engine.locked():
            for claim in list(decode._claim_of.values()):
                claim.cancel()

    def describe_late(peer: Any, ref: bytes, deadline: float, reply: Any) -> None:
        def late(answer: Any, error: Any) -> None:
            if when == "before":
                cancel()
            reply(answer, error)

        describe(peer, ref, deadline, late)

    def read_late(*args: Any, **settings: Any) -> Any:
        begun.append(args)
        transfer = read(*args, **settings)
        cancel()
        return transfer

    monkeypatch.setattr(decode.engine, "describe", describe_late)
    monkeypatch.setattr(decode.engine, "read", read_late)
    offered, claimed = Ends(), Ends()
    offer = prefill.offer([1, 2], 8, on_end=offered)
    decode.claim(offer.params, [0, 3], 8, on_end=claimed)
    assert isinstance(claimed.one().error, AbortedError)
    assert offered.one().code == "released"
    assert len(begun) == (0 if when == "before" else 1)
    wait_until(lambda: idle(prefill) and idle(decode), "something is left")


def test_a_peer_that_is_lost_before_it_is_asked(
    sides: tuple[HandOff, HandOff], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = sides
    connect = decode.engine.connect_nowait

    def lose_it(addresses: Any, incarnation: bytes, reply: Any, deadline: float) -> None:
        def late(peer: Any, error: Any) -> None:
            with decode.engine.locked():
                peer.end(peer.session.receive_eof())
            reply(peer, error)

        connect(addresses, incarnation, late, deadline)

    monkeypatch.setattr(decode.engine, "connect_nowait", lose_it)
    claimed = Ends()
    offer = prefill.offer([1], 4, on_end=Ends())
    decode.claim(offer.params, [0], 4, on_end=claimed)
    error = claimed.one().error
    assert isinstance(error, PeerLostError)
    assert error.stage == "connect"
    assert len(decode._claims) == 0


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_claim_whose_description_never_comes_ends_when_it_is_told_to(
    sides: tuple[HandOff, HandOff], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Prefill was frozen after its grant: nothing is read yet, so nothing need be waited for."""
    prefill, decode = sides
    replies: list[Any] = []
    asked = threading.Event()

    def describe_never(_peer: Any, _ref: bytes, _deadline: float, reply: Any) -> None:
        replies.append(reply)
        asked.set()

    monkeypatch.setattr(decode.engine, "describe", describe_never)
    offered, claimed = Ends(), Ends()
    offer = prefill.offer([1, 2], 8, on_end=offered)
    limit_s = 0.1 if how == "deadline" else 30.0
    claim = decode.claim(offer.params, [0, 3], 8, on_end=claimed, deadline_s=limit_s)
    assert asked.wait(5.0)
    if how == "cancel":
        claim.cancel()
    error = claimed.one().error
    assert isinstance(error, DeadlineError if how == "deadline" else AbortedError)
    assert offered.one().code == "released"
    replies[0](None, PeerLostError("it came after all"))
    assert len(claimed.all) == 1
    assert idle(decode)


def test_a_description_that_cannot_be_asked_for_ends_the_claim(
    sides: tuple[HandOff, HandOff], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else: what came in the same packet is still heard."""
    prefill, decode = sides
    monkeypatch.setattr("kvferry.peers.PENDING_MAX", 0)
    offered, claimed = Ends(), Ends()
    offer = prefill.offer([1, 2], 8, on_end=offered)
    decode.claim(offer.params, [0, 3], 8, on_end=claimed, deadline_s=30.0)
    assert isinstance(claimed.one().error, BusyError)
    assert offered.one().code == "released"


def test_a_claim_that_meets_the_close_is_refused_and_has_no_end(
    sides: tuple[HandOff, HandOff], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The close may begin at any point of a claim; it is either refused or ended, not both."""
    prefill, decode = sides
    offer = prefill.offer([1], 4, on_end=Ends())
    claimed = Ends()
    new_id = decode._new_id

    def close_begins() -> bytes:
        decode.engine._closed = True
        return new_id()

    monkeypatch.setattr(decode, "_new_id", close_begins)
    with pytest.raises(ClosedError):
        decode.claim(offer.params, [1], 4, on_end=claimed)
    decode.close()
    decode.engine._closed = False
    assert claimed.all == []
