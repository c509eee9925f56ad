"""Kinds of fault that leave a request without an end: each of these ends in time, on both sides."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time

import pytest

from faults.helpers import MIB, WHOLE, Ends, Held, wait_until
from kvferry.errors import KVFerryError, PeerLostError, TransferError
from kvferry.regions import Spans
from kvferry.testing import FaultyTransport
from kvferry.testing.conformance import failure
from kvferry.transports.tcp import TcpTransport


class Raising(Held):
    """A path whose submit raises what no transport should."""

    def submit(self, op):
        raise RuntimeError("made for this test")


@pytest.mark.parametrize("count", [1, 10])
@pytest.mark.parametrize("where", ["submit", "end"])
def test_a_transport_that_fails_ends_the_hand_offs_of_both_sides(make_side, where, count):
    held = Raising() if where == "submit" else Held()
    prefill = make_side("prefill", "held", extra={"held": Held()})
    decode = make_side("decode", "held", extra={"held": held})
    offered, claimed = [Ends() for _ in range(count)], []
    for number in range(count):
        blocks = range(3 * number, 3 * number + 3)
        claimed.append(decode.claim(prefill.offer(offered[number]), blocks))
    if where == "end":
        wait_until(lambda: len(held.ops) == count, "not all have begun")
        for op in list(held.ops):
            held.end(op, TransferError("made for this test"))
    for ends in claimed:
        assert isinstance(ends.one(2.0).error, KVFerryError)
    for ends in offered:
        assert not ends.one(2.0).delivered
    for side in (prefill, decode):
        wait_until(side.is_idle, "an offer or a claim is left")
    assert not held.ops


class FailingOwner(TcpTransport):
    """Serves the beginning of a transfer and then has a bug of its own."""

    def serve(self, sock, fd, hello):
        channel = super().serve(sock, fd, hello)

        def send_from(_place, addresses, lengths, watch):
            channel.send_spans(addresses[:1], lengths[:1], watch)
            raise RuntimeError("made for this test")

        channel.send_from = send_from
        return channel


def test_an_owner_that_fails_while_it_sends_is_known_at_once(make_side):
    prefill = make_side("prefill", "tcp", extra={"tcp": FailingOwner()})
    decode = make_side("decode", "tcp", transfer_s=60.0)
    offered = Ends()
    began = time.monotonic()
    error = decode.claim(prefill.offer(offered)).one().error
    assert isinstance(error, PeerLostError)
    assert "the lane was closed by the peer" in str(error)
    assert not offered.one().delivered
    # Far from the deadline, and sooner than any heart-beat would tell.
    assert time.monotonic() - began < 0.9


class PausingOwner(TcpTransport):
    """Stands still for a while in its thirtieth transfer."""

    def __init__(self):
        super().__init__()
        self._numbers = itertools.count(1)

    def serve(self, sock, fd, hello):
        channel = super().serve(sock, fd, hello)
        send = channel.send_from

        def send_from(*args):
            if next(self._numbers) == 30:
                threading.Event().wait(0.2)
            send(*args)

        channel.send_from = send_from
        return channel


@pytest.mark.slow
def test_a_closed_loop_over_tcp_with_every_trouble_at_once(make_engine):
    """A lost completion, lanes that are cut, and an owner that stands still for a while."""
    lossy = FaultyTransport(TcpTransport(), "drop_completion", times=1)
    near = make_engine("near", "tcp", extra={"tcp": lossy}, lanes_max=4)
    far = make_engine("far", "tcp", extra={"tcp": PausingOwner()})
    count, nbytes = 64, MIB // 8
    local, owned = near.allocate(count * nbytes), far.allocate(nbytes)
    owned.array[:] = 3
    remote, piece = near.connect(far.addresses[0]).region(owned.ref), Spans.whole(nbytes)
    targets = [Spans.of([number * nbytes], nbytes) for number in range(count)]
    transfers, ended = [], threading.Semaphore(0)
    for number, target in enumerate(targets):
        transfers.append(near.read(local, target, remote, piece, deadline_s=0.8))
        transfers[-1].add_done_callback(lambda _: ended.release())
        if number == 20:
            for server in list(far.transports["tcp"]._servers):
                server.channel.interrupt()
    for _ in transfers:
        assert ended.acquire(timeout=4.0), "a transfer without an end"
    failed = [error for t in transfers if (error := failure(t.result)) is not None]
    assert failed, "nothing went wrong"
    for error in failed:
        assert isinstance(error, KVFerryError)
        assert error.peer == "far"
        assert error.path == "tcp/pull"
        assert error.stage
    assert lossy.hits == 1
    lossy.release()
    wait_until(lambda: near.statistics()["quarantined"] == 0, "memory is kept")
    # The loop goes on as if nothing had been.
    for target in targets:
        near.read(local, target, remote, piece).wait(5.0)
    assert int(local.array.min()) == 3


@pytest.mark.parametrize("end", ["FIN", "RST"])
def test_a_lane_that_the_peer_closed_while_it_was_idle_is_made_anew_within_the_call(
    make_engine, end
):
    near, far = make_engine("near", "tcp"), make_engine("far", "tcp")
    local, owned = near.allocate(MIB), far.allocate(MIB)
    owned.array[:] = 4
    remote = near.connect(far.addresses[0]).region(owned.ref)
    for _ in range(3):
        local.array[:] = 0
        began = time.monotonic()
        assert near.read(local, WHOLE, remote, WHOLE).wait(5.0) == MIB
        assert time.monotonic() - began < 1.0
        assert int(local.array.min()) == 4
        servers = far.transports["tcp"]._servers
        wait_until(lambda servers=servers: servers, "no lane is kept")
        for server in list(servers):
            if end == "RST":
                reset_on_close(server.channel.sock)
            server.stop()
        wait_until(lambda servers=servers: not servers, "the lane was not closed")
    assert near.statistics()["failed"] == near.statistics()["demotions"] == 0


def reset_on_close(sock):
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
