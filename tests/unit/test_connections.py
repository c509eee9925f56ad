import os
import socket
import threading

import pytest

from kvferry.errors import BusyError, ClosedError, PeerLostError
from kvferry.sockets import Address
from kvferry.testing.conformance import wait_until


def test_sessions_of_one_peer_are_bounded(make_engine, monkeypatch):
    monkeypatch.setattr("kvferry.connections.SESSIONS_PER_PEER_MAX", 0)
    near, far = make_engine("near"), make_engine("far")
    with pytest.raises(BusyError, match="sessions already; connect once"):
        near.connect(far.addresses[0])


def test_dials_to_one_incarnation_are_shared_and_last_as_long_as_the_longest(make_engine):
    near, far = make_engine("near"), make_engine("far")
    found, came = [], threading.Semaphore(0)

    def reply(peer, error):
        found.append((peer, error))
        came.release()

    address = [Address.parse(text) for text in far.addresses]
    now = near.clock.now()
    with near.locked():
        for after in (1.0, 60.0):
            near.connect_nowait(address, far.incarnation, reply, now + after)
        (dial,) = near.connections._dialling
        assert dial.deadline == now + 60.0
    assert came.acquire(timeout=5.0)
    assert came.acquire(timeout=5.0)
    assert found[0] == found[1]
    assert found[0][0].incarnation == far.incarnation
    near.connect_nowait(address, far.incarnation, reply, now)
    assert came.acquire(timeout=5.0)
    assert found[2] == found[0]


def test_dialling_ends_when_the_engine_closes(make_engine):
    near, far = make_engine("near"), make_engine("far")
    said = []
    with far.locked():
        with near.locked():
            near.connect_nowait(
                [Address.parse(far.addresses[0])],
                far.incarnation,
                lambda *answer: said.append(answer),
                near.clock.now() + 60,
            )
        near.close()
    assert len(said) == 1
    assert said[0][0] is None
    assert "closed" in str(said[0][1])
    with pytest.raises(ClosedError):
        near.connect_nowait([], b"", lambda *_: None, 0.0)


def test_both_sides_may_dial(make_engine):
    near, far = make_engine("near"), make_engine("far")
    there, back = near.connect(far.addresses[0]), far.connect(near.addresses[0])
    assert there.incarnation == far.incarnation
    assert back.incarnation == near.incarnation
    assert near.connections.find(far.incarnation) is there
    wait_until(lambda: near.connections.count() == 2, "a session is missing")
    near.connections.drop(there, "for this test")
    # The other session is not ours to ask over, but the peer is not lost.
    assert near.connections.has(far.incarnation)
    again = near.connect(far.addresses[0])
    assert again is not there


def test_why_a_peer_went_is_kept_of_a_bounded_number(make_engine, monkeypatch):
    monkeypatch.setattr("kvferry.connections.ENDINGS_MAX", 2)
    near = make_engine("near")
    fars = [make_engine(f"far-{i}") for i in range(3)]
    for far in fars:
        near.connect(far.addresses[0])
        far.close()
        wait_until(lambda: near.connections.count() == 0, "the end was not noticed")
    with pytest.raises(
        PeerLostError, match=r"owns this region;.*the connection was closed"
    ) as told:
        near.connections.find(fars[2].incarnation)
    assert told.value.peer == "far-2"
    with pytest.raises(PeerLostError, match=r"owns this region \(stage") as untold:
        near.connections.find(fars[0].incarnation)
    assert untold.value.peer == ""


@pytest.mark.parametrize("how", ["claim", "connect"])
def test_a_connection_that_is_about_to_be_replaced_is_given_to_nobody(
    make_engine, engine_directory, monkeypatch, how
):
    """It ends as soon as the better one is there, and everything on it with it."""
    near, far = make_engine("near"), make_engine("far")
    tcp = next(text for text in far.addresses if text.startswith("tcp"))
    answers, came = [], threading.Semaphore(0)

    def reply(peer, _error):
        answers.append(peer)
        came.release()

    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(os.path.join(engine_directory, "mute"))
        mute.listen(8)
        place = Address("unix", mute.getsockname())
        monkeypatch.setattr(near.connections, "unix_address_of", lambda _peer: place)
        near.connect_nowait([Address.parse(tcp)], far.incarnation, reply, near.clock.now() + 30)
        wait_until(lambda: near.connections.count() == 1, "the first connection never came")
        if how == "claim":
            near.connect_nowait([Address.parse(tcp)], far.incarnation, reply, near.clock.now() + 30)
        else:
            caller = threading.Thread(target=lambda: reply(near.connect(tcp), None))
            caller.start()
        assert not came.acquire(timeout=0.05)
    # Nobody answers at the better address after all.
    for _ in range(2):
        assert came.acquire(timeout=5.0)
    if how == "connect":
        caller.join(5.0)
    assert answers[0] is answers[1]
    assert answers[0].is_open()
