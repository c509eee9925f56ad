import os
import socket

import pytest

from kvferry.dials import _most_telling
from kvferry.errors import BusyError, DeadlineError, UnreachableError
from kvferry.peers import _Outgoing
from kvferry.protocol.messages import Ping
from kvferry.testing import FakeClock
from kvferry.testing.conformance import wait_until


def test_descriptors_that_wait_are_copied_and_closed():
    owned = os.open(os.devnull, os.O_RDONLY)
    waiting = _Outgoing(memoryview(b"x"), (owned,))
    waiting.keep()
    (copy,) = waiting.fds
    waiting.keep()
    assert waiting.fds == (copy,)
    assert copy != owned
    os.close(owned)
    assert os.fstat(copy)
    waiting.drop()
    waiting.drop()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(copy)


def test_descriptors_that_were_sent_at_once_stay_with_their_owner():
    owned = os.open(os.devnull, os.O_RDONLY)
    sent = _Outgoing(memoryview(b"x"), (owned,))
    sent.drop()
    assert sent.fds == ()
    os.close(owned)


def test_what_an_engine_said_is_told_before_what_networks_did():
    refused, busy = UnreachableError("refused"), BusyError("full")
    assert _most_telling([refused, busy, refused]) is busy
    assert "refused; gone" in str(_most_telling([refused, UnreachableError("gone")]))
    assert "no address" in str(_most_telling([]))


def test_requests_that_are_not_answered_end_at_their_deadline(make_engine):
    clock = FakeClock()
    near, far = make_engine("near", clock=clock), make_engine("far")
    peer = near.connect(far.addresses[0])
    said = []
    with far.locked():  # It cannot answer meanwhile.
        with near.locked():
            peer.request(lambda n: Ping(n), clock.now() + 2.0, lambda *a: said.append(a))
        clock.advance(2.0)
        wait_until(lambda: said, "the request never ended")
    assert isinstance(said[0][1], DeadlineError)
    assert said[0][1].fix
    peer.ping()


def test_requests_are_bounded(make_engine, monkeypatch):
    monkeypatch.setattr("kvferry.peers.PENDING_MAX", 1)
    near, far = make_engine("near"), make_engine("far")
    peer = near.connect(far.addresses[0])
    with far.locked():
        with near.locked():
            peer.request(lambda n: Ping(n), near.clock.now() + 60, lambda *_: None)
        with pytest.raises(BusyError, match="1 requests wait for answers"):
            peer.ping()


def test_regions_are_described_once(make_engine):
    near, far = make_engine("near"), make_engine("far")
    peer, owned = near.connect(far.addresses[0]), far.allocate(64)
    region = peer.region(owned.ref)
    assert peer.region(owned.ref) is region
    assert (region.nbytes, region.access, region.kind) == (64, "read", "host")


def test_what_a_peer_shows(make_engine):
    near, far = make_engine("near"), make_engine("far")
    peer = near.connect(far.addresses[1])
    assert peer.is_open()
    assert peer.incarnation == far.incarnation
    assert "far" in repr(peer)
    assert peer.sock.family == socket.AF_UNIX
    far.close()
    wait_until(lambda: not peer.is_open(), "the end was not noticed")
    assert "lost" in repr(peer)
