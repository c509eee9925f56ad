"""Sessions: hello, heart-beats, and exactly one end whatever the peer, the wire or time do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import (
    BusyError,
    PeerLostError,
    ProtocolError,
    UnreachableError,
    VersionError,
)
from kvferry.protocol import framing, messages
from kvferry.protocol.messages import Notify, Ping, Pong, Reject
from kvferry.protocol.session import Closed, Opened, Received, Session, State, Timing
from kvferry.testing.session import End, SessionPair, hello

A, B = b"a" * 16, b"b" * 16


def opened(**settings: object) -> SessionPair:
    pair = SessionPair(**settings)  # type: ignore[arg-type]
    pair.flow()
    assert pair.caller.session.state is pair.callee.session.state is State.OPEN
    return pair


def frame(message: messages.Message, descriptors: int = 0) -> bytes:
    return framing.encode(messages.pack(message), descriptors=descriptors)


def another_version(data: bytes) -> bytes:
    return data[:4] + bytes([framing.VERSION + 1]) + data[5:]


def end_of(side: End) -> Closed:
    """The one end of a session."""
    assert len(side.closed) == 1
    assert side.events[-1] is side.closed[0]
    assert side.session.state is State.CLOSED
    return side.closed[0]


# -- hello ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece_bytes", [1, 7, 1 << 20])
def test_both_sides_learn_each_others_hello(piece_bytes: int) -> None:
    caller, callee = hello("left"), hello("right")
    pair = opened(caller=caller, callee=callee, piece_bytes=piece_bytes)
    assert pair.caller.events == [Opened(callee)]
    assert pair.callee.events == [Opened(caller)]


def test_a_listener_tells_a_stranger_nothing() -> None:
    session = Session(hello(), caller=False, timing=Timing(), now=0.0)
    session.receive(b"KVF", 1.0)
    session.tick(2.0)
    assert session.data_to_send() == []


def test_the_engine_that_is_meant_is_reached() -> None:
    opened(caller=hello(expected=A), callee=hello(incarnation=A))


def test_another_incarnation_is_refused_and_the_caller_is_told_why() -> None:
    pair = SessionPair(hello(expected=A), hello(incarnation=B))
    pair.flow()
    for side in (pair.callee, pair.caller):
        error = end_of(side).error
        assert isinstance(error, PeerLostError)
        assert "another engine answers" in error.message


def test_a_caller_checks_the_incarnation_itself_when_the_callee_does_not() -> None:
    pair = SessionPair(hello(expected=A))
    pair.inject(pair.caller, frame(hello(incarnation=B)))
    assert isinstance(end_of(pair.caller).error, PeerLostError)


def test_a_callee_of_another_version_tells_both_versions() -> None:
    pair = SessionPair()
    [(data, _)] = pair.caller.session.data_to_send()
    pair.inject(pair.callee, another_version(data))
    error = end_of(pair.callee).error
    assert isinstance(error, VersionError)
    assert "version 2, this side 1" in error.message
    pair.flow()
    told = end_of(pair.caller).error
    assert isinstance(told, VersionError)
    assert "version 2, this side 1" in told.message


def test_a_caller_of_another_version_tells_both_versions() -> None:
    pair = SessionPair()
    pair.inject(pair.caller, another_version(frame(hello())))
    error = end_of(pair.caller).error
    assert isinstance(error, VersionError)
    assert "version 2, this side 1" in error.message


def test_a_refusal_arrives_as_the_error_that_it_was() -> None:
    pair = SessionPair()
    pair.callee.events += pair.callee.session.reject(BusyError("no room for you"))
    pair.flow()
    told = end_of(pair.caller).error
    assert isinstance(told, BusyError)
    assert (told.message, told.stage) == ("no room for you", "connect")
    assert isinstance(end_of(pair.callee).error, BusyError)


def test_a_refusal_of_any_length_can_be_sent() -> None:
    pair = SessionPair()
    pair.callee.events += pair.callee.session.reject(BusyError("x" * 9000))
    pair.flow()
    assert end_of(pair.caller).error.message.endswith("[cut]")


def test_a_caller_may_not_refuse() -> None:
    pair = SessionPair()
    pair.inject(pair.callee, frame(Reject("busy", "no")))
    assert isinstance(end_of(pair.callee).error, ProtocolError)


@pytest.mark.parametrize("message", [Ping(0), Notify(b"x")], ids=["ping", "notify"])
def test_nothing_comes_before_the_hello(message: messages.Message) -> None:
    for side in ("caller", "callee"):
        pair = SessionPair()
        pair.inject(getattr(pair, side), frame(message))
        error = end_of(getattr(pair, side)).error
        assert isinstance(error, ProtocolError)
        assert "expected a hello" in error.message


def test_nothing_can_be_sent_before_the_hello_or_after_the_end() -> None:
    pair = SessionPair()
    with pytest.raises(PeerLostError):
        pair.send(pair.caller, Ping(1))
    pair.flow()
    pair.hang_up(pair.caller)
    with pytest.raises(PeerLostError):
        pair.send(pair.caller, Ping(1))


def test_a_second_hello_ends_the_session() -> None:
    pair = opened()
    pair.inject(pair.callee, frame(hello()))
    assert "second hello" in end_of(pair.callee).error.message


def test_a_stranger_cannot_make_us_keep_a_large_message() -> None:
    pair = SessionPair()
    header = framing.HEADER.pack(b"KVFY", 1, 0, 0, framing.HELLO_BYTES_MAX + 1)
    pair.inject(pair.callee, header)
    assert isinstance(end_of(pair.callee).error, ProtocolError)


def test_a_large_message_may_follow_the_hello_in_one_piece() -> None:
    big = Notify(bytes(messages.NOTIFY_BYTES_MAX))
    pair = SessionPair()
    pair.inject(pair.caller, frame(hello()) + frame(big))
    assert pair.caller.received == [big]


def test_an_oversized_control_message_ends_the_session() -> None:
    pair = opened()
    pair.inject(pair.caller, framing.HEADER.pack(b"KVFY", 1, 0, 0, framing.CONTROL_BYTES_MAX + 1))
    error = end_of(pair.caller).error
    assert isinstance(error, ProtocolError)
    assert error.peer == "callee"


def test_what_precedes_bad_bytes_is_delivered() -> None:
    pair = opened()
    pair.inject(pair.caller, frame(Notify(b"good")) + b"HTTP/1.1")
    assert pair.caller.received == [Notify(b"good")]
    assert isinstance(end_of(pair.caller).error, ProtocolError)


# -- descriptors ---------------------------------------------------------------------------------


def test_descriptors_are_counted_to_the_message_that_they_came_with() -> None:
    pair = opened()
    pair.send(pair.caller, Notify(b"two"), fds=(7, 8))
    assert pair.caller.session.data_to_send()[0][1] == (7, 8)
    pair.inject(pair.callee, frame(Notify(b"two"), 2))
    assert pair.callee.events[-1] == Received(Notify(b"two"), 2)


@pytest.mark.parametrize("message", [Ping(0), Pong(0)], ids=["ping", "pong"])
def test_a_heart_beat_with_descriptors_ends_the_session(message: messages.Message) -> None:
    pair = opened()
    pair.inject(pair.callee, frame(message, 1))
    assert "descriptors" in end_of(pair.callee).error.message


def test_a_control_hello_with_descriptors_is_refused_and_a_lanes_is_not() -> None:
    control, lane, answer = SessionPair(), SessionPair(), SessionPair()
    control.inject(control.callee, frame(hello(), 1))
    assert "descriptors" in end_of(control.callee).error.message
    answer.inject(answer.caller, frame(hello(purpose="staged"), 1))
    assert "descriptors" in end_of(answer.caller).error.message
    lane.inject(lane.callee, frame(hello(purpose="staged"), 1))
    assert isinstance(lane.callee.events[-1], Opened)


# -- heart-beats ---------------------------------------------------------------------------------


def test_two_silent_sides_keep_each_other_alive() -> None:
    pair = opened()
    pair.advance(600.0)
    assert pair.caller.session.state is pair.callee.session.state is State.OPEN
    assert pair.caller.received == pair.callee.received == []


def test_a_heart_beat_is_sent_after_silence_and_not_before() -> None:
    pair = opened(timing=Timing(heartbeat_s=1.0, lost_s=5.0))
    session, now = pair.caller.session, pair.now
    assert session.tick(now + 0.999) == []
    assert session.data_to_send() == []
    session.tick(now + 1.0)
    [(data, _)] = session.data_to_send()
    assert data == frame(Ping(0))
    session.tick(now + 1.5)
    assert session.data_to_send() == []


def test_whoever_speaks_sends_no_heart_beat() -> None:
    pair = opened()
    session, now = pair.caller.session, pair.now
    session.send(Notify(b"x"), now + 0.9)
    session.data_to_send()
    session.tick(now + 1.8)
    assert session.data_to_send() == []


def test_a_numbered_pong_is_for_the_layer_above() -> None:
    pair = opened()
    pair.send(pair.caller, Ping(3))
    pair.flow()
    assert pair.caller.received == [Pong(3)]
    assert pair.callee.received == []


def test_silence_is_the_end_after_lost_s_exactly() -> None:
    pair = opened(timing=Timing(heartbeat_s=1.0, lost_s=5.0))
    pair.is_cut = True
    session = pair.caller.session
    assert session.tick(pair.now + 4.999) == []
    [event] = session.tick(pair.now + 5.0)
    assert isinstance(event, Closed)
    assert isinstance(event.error, PeerLostError)
    assert "5.0 s (limit 5 s)" in event.error.message
    assert event.error.peer == "callee"


def test_a_frozen_peer_is_noticed_by_both_sides() -> None:
    pair = opened()
    pair.is_cut = True
    pair.advance(10.0)
    for side in (pair.caller, pair.callee):
        assert isinstance(end_of(side).error, PeerLostError)


@given(st.floats(0, 1e6), st.floats(1e-3, 1e3), st.floats(2, 10))
def test_a_tick_at_the_time_that_due_names_is_never_too_early(
    now: float, heartbeat_s: float, times: float
) -> None:
    timing = Timing(heartbeat_s, heartbeat_s * times, heartbeat_s)
    pair = opened(timing=timing, now=now)
    fresh = Session(hello(), caller=True, timing=timing, now=now)
    assert isinstance(fresh.tick(fresh.due())[0], Closed)
    session = pair.caller.session
    for _ in range(100):
        due = session.due()
        if session.tick(due):
            break
        assert session.data_to_send()
    assert session.state is State.CLOSED


@pytest.mark.parametrize("caller", [True, False])
def test_the_hello_has_a_deadline_that_trickled_bytes_do_not_move(caller: bool) -> None:
    session = Session(hello(), caller=caller, timing=Timing(hello_s=3.0), now=10.0)
    assert session.receive(b"KV", 12.0) == []
    assert session.tick(12.999) == []
    assert session.due() == 13.0
    [event] = session.tick(13.0)
    assert isinstance(event, Closed)
    assert isinstance(event.error, UnreachableError)
    assert "no hello within 3 s" in event.error.message


# -- the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["caller", "callee"])
def test_the_end_of_the_stream_before_the_hello_means_unreachable(side: str) -> None:
    pair = SessionPair()
    pair.hang_up(getattr(pair, side))
    assert isinstance(end_of(getattr(pair, side)).error, UnreachableError)


@pytest.mark.parametrize("side", ["caller", "callee"])
def test_the_end_of_the_stream_after_the_hello_means_lost(side: str) -> None:
    pair = opened()
    pair.hang_up(getattr(pair, side))
    error = end_of(getattr(pair, side)).error
    assert isinstance(error, PeerLostError)
    assert error.peer


steps = st.one_of(
    st.tuples(st.just("bytes"), st.binary(max_size=20)),
    st.tuples(
        st.just("bytes"),
        st.sampled_from(
            [
                frame(hello()),
                frame(Ping(0)),
                frame(Pong(9)),
                frame(Reject("busy", "no")),
                frame(Notify(b"n")),
                another_version(frame(hello())),
            ]
        ),
    ),
    st.tuples(st.just("flow"), st.none()),
    st.tuples(st.just("eof"), st.none()),
    st.tuples(st.just("reject"), st.none()),
    st.tuples(st.just("time"), st.floats(0, 6)),
)


@given(st.booleans(), st.lists(steps, max_size=12))
def test_there_is_exactly_one_end_and_nothing_after_it(
    caller: bool, events: list[tuple[str, object]]
) -> None:
    pair = SessionPair()
    side = pair.caller if caller else pair.callee
    for what, argument in [*events, ("eof", None), ("eof", None), ("time", 9.0)]:
        if what == "bytes":
            pair.inject(side, argument)  # type: ignore[arg-type]
        elif what == "flow":
            pair.flow()
        elif what == "eof":
            pair.hang_up(side)
        elif what == "reject":
            side.events += side.session.reject(BusyError("full"))
        else:
            pair.advance(argument)  # type: ignore[arg-type]
    end_of(side)
    assert sum(isinstance(event, Opened) for event in side.events) <= 1


def test_a_stopped_process_is_unreachable_before_its_hello_and_lost_after_it() -> None:
    pair = opened()
    session, now = pair.caller.session, 10.0
    end = session.suspended(now - session.silence_s(now) + 1.5)[-1]
    assert isinstance(end, Closed)
    assert isinstance(end.error, PeerLostError)
    assert "is stopped, as by SIGSTOP, and said nothing for 1.5 s" in str(end.error)
    assert session.suspended(9.0) == []
    waiting = Session(hello(), caller=True, timing=Timing(), now=4.0)
    assert waiting.silence_s(5.5) == 1.5
    (unreachable,) = waiting.suspended(5.5)
    assert isinstance(unreachable, Closed)
    assert isinstance(unreachable.error, UnreachableError)
    assert "said no hello for 1.5 s" in str(unreachable.error)
