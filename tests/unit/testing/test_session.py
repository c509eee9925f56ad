"""The pair of sessions: its wire does what its methods say."""

from __future__ import annotations

from kvferry.protocol.messages import Notify
from kvferry.protocol.session import Opened, State
from kvferry.testing.session import SessionPair, hello


def test_the_two_sides_open_with_each_other() -> None:
    pair = SessionPair(hello("left"), hello("right"))
    pair.flow()
    assert [type(e) for e in pair.caller.events + pair.callee.events] == [Opened, Opened]
    assert (pair.caller.session.peer_name, pair.callee.session.peer_name) == ("right", "left")


def test_a_cut_wire_swallows_what_is_sent() -> None:
    pair = SessionPair()
    pair.flow()
    pair.is_cut = True
    pair.send(pair.caller, Notify(b"lost"))
    pair.flow()
    pair.is_cut = False
    pair.send(pair.caller, Notify(b"kept"))
    pair.flow()
    assert pair.callee.received == [Notify(b"kept")]


def test_time_stops_at_every_moment_at_which_a_session_is_due() -> None:
    pair = SessionPair(now=0.0)
    pair.flow()
    pair.advance(60.0)
    assert pair.now == 60.0
    assert pair.caller.session.state is pair.callee.session.state is State.OPEN


def test_what_is_injected_arrives_in_pieces_of_the_asked_size() -> None:
    pair = SessionPair(piece_bytes=3)
    pair.flow()
    pair.send(pair.callee, Notify(b"0123456789"))
    pair.flow()
    assert pair.caller.received == [Notify(b"0123456789")]
