"""A path on which nothing moves is given up in time, and is told apart from a frozen peer."""

from __future__ import annotations

import socket
import threading

import pytest

from kvferry.errors import PeerLostError, StallError
from kvferry.regions import Spans
from kvferry.testing.clock import FakeClock
from kvferry.testing.conformance import wait_until
from kvferry.transports.staged import _FULL as FULL
from kvferry.transports.staged import RingChannel

from .helpers import WHOLE, Held

STALL_S = 4.0


class Stalled(Held):
    """Takes operations, and never moves a byte."""

    name = "stalled"

    def submit(self, op):
        op.moved_at = self._services.clock.now()
        super().submit(op)


class Second(Stalled):
    """One more of them."""

    name = "second"

    def capabilities(self):
        return super().capabilities().__class__(family="remote", bytes_per_s=9e11, latency_s=2e-9)


@pytest.fixture
def pair(make_engine):
    """Two engines on one clock, ``paths`` of theirs, and ``start(**options)`` for a read."""

    def make(*paths, **settings):
        clock = FakeClock()
        settings = {"heartbeat_s": 1.0, "lost_s": 100.0, "stall_s": STALL_S, **settings}
        names = [path.name for path in paths]
        held = {path.name: path for path in paths}
        near = make_engine("near", *names, "tcp", clock=clock, extra=held, **settings)
        # The peer's own time goes on while ours is moved, unless a test freezes it.
        theirs = {path.name: type(path)() for path in paths}
        far = make_engine("far", *names, "tcp", clock=clock, extra=theirs, **settings)
        local, owned = near.allocate(WHOLE.nbytes), far.allocate(WHOLE.nbytes)
        owned.array[:] = 7
        peer = near.connect(far.addresses[0])
        remote = peer.region(owned.ref)

        def start(**options):
            return near.read(local, WHOLE, remote, WHOLE, **options)

        return clock, near, far, local, start

    return make


def pass_time(clock, seconds, until, step_s=0.2):
    """Let both engines live through ``seconds``, a little at a time, or until it is true."""
    for _ in range(round(seconds / step_s)):
        if until():
            return
        clock.advance(step_s)
        threading.Event().wait(0.002)


def test_a_stalled_path_is_left_for_the_next_within_the_deadline(pair):
    stalled = Stalled()
    clock, near, _, local, start = pair(stalled)
    began = clock.now()
    transfer = start(deadline_s=20.0)
    assert transfer.path == "stalled/pull"
    pass_time(clock, STALL_S - 0.5, transfer.is_done)
    assert not stalled.aborted, "given up too early"
    pass_time(clock, 4.0, lambda: bool(stalled.aborted))
    assert transfer.wait(5.0) == WHOLE.nbytes
    assert (transfer.path, int(local.array.min())) == ("tcp/pull", 7)
    assert clock.now() - began < STALL_S + 4.5
    # It is tried last for a while, and in its own place again after that.
    assert start().path == "tcp/pull"
    assert "nothing moved for" in near.plan(local, transfer_remote(near)).explain()
    pass_time(clock, 40.0, lambda: False, step_s=2.0)
    again = start()
    assert again.path == "stalled/pull"
    again.cancel()


def transfer_remote(near):
    (peer,) = [peer for peer in near.connections.open_peers() if peer.regions]
    return next(iter(peer.regions.values()))


def test_each_path_is_tried_once_and_the_last_error_names_all(pair):
    first, second = Stalled(), Second()
    clock, _, far, _, start = pair(first, second)
    for listener in far.connections._listeners:
        if listener.family != socket.AF_UNIX:
            far.loop.remove(listener.fileno())
            listener.shutdown(socket.SHUT_RDWR)
    transfer = start(deadline_s=60.0)
    pass_time(clock, 30.0, transfer.is_done)
    with pytest.raises(Exception) as caught:
        transfer.wait(5.0)
    error = caught.value
    assert [attempt.partition(":")[0] for attempt in error.attempts] == [
        "stalled/pull",
        "second/pull",
    ]
    assert len(first.aborted) == len(second.aborted) == 1
    assert "before it: stalled/pull: nothing moved for" in str(error)
    assert error.path == "tcp/pull"


def test_the_last_path_that_stalls_ends_the_transfer_with_a_stall(pair):
    stalled = Stalled()
    clock, near, _, _, start = pair(stalled)
    near.moves._paths._transports.pop("tcp")
    transfer = start(deadline_s=60.0)
    pass_time(clock, 20.0, transfer.is_done)
    with pytest.raises(StallError, match=r"nothing moved for 4\.\d s") as caught:
        transfer.wait(5.0)
    assert caught.value.fix
    assert caught.value.as_dict()["code"] == "stall"


def test_a_path_on_which_something_moves_now_and_then_has_not_stalled(pair):
    stalled = Stalled()
    clock, _, _, _, start = pair(stalled)
    transfer = start(deadline_s=60.0)
    (op,) = stalled.ops
    for _ in range(4):
        pass_time(clock, STALL_S - 1.0, transfer.is_done)
        op.moved_at = clock.now()
    assert not stalled.aborted
    stalled.end(op)
    assert transfer.wait(5.0) == WHOLE.nbytes


def test_a_cancel_while_a_stalled_path_stops_is_final(pair):
    stalled = Stalled()
    stalled.ends_on_abort = False
    clock, _, _, _, start = pair(stalled)
    transfer = start(deadline_s=60.0)
    pass_time(clock, 10.0, lambda: bool(stalled.aborted))
    transfer.cancel()
    (op,) = stalled.ops
    stalled.end(op, op.stop)
    wait_until(transfer.is_done, "it did not end")
    assert (transfer.error.code, transfer.path) == ("aborted", "stalled/pull")


def test_a_frozen_peer_is_no_stalled_path(pair):
    stalled = Stalled()
    clock, near, far, _, start = pair(stalled, lost_s=8.0)
    transfer = start(deadline_s=60.0)
    far.loop.close()
    pass_time(clock, STALL_S + 2.0, transfer.is_done)
    assert not stalled.aborted
    pass_time(clock, 6.0, transfer.is_done)
    with pytest.raises(PeerLostError, match="nothing heard for"):
        transfer.wait(5.0)
    assert near.statistics()["demotions"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "staged"])
def test_a_lane_whose_owner_does_not_answer_stalls(make_engine, monkeypatch, transport):
    """Real sockets, real time: the callee takes the move and stays silent."""
    quick = {"heartbeat_s": 0.05, "lost_s": 30.0, "stall_s": 0.1}
    near, far = (make_engine(name, transport, **quick) for name in ("near", "far"))
    held = threading.Event()
    monkeypatch.setattr(far, "access", lambda *_a, **_k: held.wait(10.0) and None)
    local, owned = near.allocate(WHOLE.nbytes), far.allocate(WHOLE.nbytes)
    remote = near.connect(far.addresses[0]).region(owned.ref)
    transfer = near.read(local, WHOLE, remote, WHOLE, deadline_s=20.0)
    try:
        with pytest.raises(StallError, match="although the peer answers") as caught:
            transfer.wait(5.0)
    finally:
        held.set()
    assert (caught.value.path, caught.value.bytes_done) == (f"{transport}/pull", 0)
    assert transfer.seconds < 1.0


@pytest.mark.slow
def test_a_lane_that_stops_in_the_middle_is_left_for_the_next_path(
    make_engine, monkeypatch, caplog
):
    quick = {"heartbeat_s": 0.05, "lost_s": 30.0, "stall_s": 0.1}
    near, far = (make_engine(name, "staged", "tcp", **quick) for name in ("near", "far"))
    half = 4 << 20
    held = threading.Event()
    ring, rung = RingChannel._ring_bell, []

    def stop_at_half(channel, kind, slot, nbytes, watch):
        if kind == FULL:
            rung.append(nbytes)
            if sum(rung) > half:
                held.wait(10.0)
        ring(channel, kind, slot, nbytes, watch)

    monkeypatch.setattr(RingChannel, "_ring_bell", stop_at_half)
    whole = Spans.whole(2 * half)
    local, owned = near.allocate(2 * half), far.allocate(2 * half)
    owned.array[:] = 7
    remote = near.connect(far.addresses[0]).region(owned.ref)
    try:
        transfer = near.read(local, whole, remote, whole, deadline_s=20.0)
        assert transfer.plan.paths[0].transport == "staged"
        assert transfer.wait(10.0) == 2 * half
    finally:
        held.set()
    assert (transfer.path, int(local.array.min())) == ("tcp/pull", 7)
    assert "nothing moved for" in caplog.text
    assert f"{half} bytes done" in caplog.text
    assert near.statistics()["demotions"] == 1


def test_one_look_is_not_enough_since_this_process_may_have_been_frozen(pair):
    clock, near, _, _, start = pair(Stalled())
    transfer = start(deadline_s=60.0)
    move = near.moves._running[transfer.transfer_id]
    now = clock.now()
    assert not move.is_quiet(now + 10.0, STALL_S), "that was the first look"
    move.op.moved_at = now + 9.99
    assert not move.is_quiet(now + 10.2, STALL_S), "its lanes went on"
    assert not move.is_quiet(now + 20.0, STALL_S)
    assert move.is_quiet(now + 20.2, STALL_S)
    transfer.cancel()
