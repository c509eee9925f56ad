import errno
import os
import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from kvferry.errors import AbortedError, DeadlineError, PeerLostError, ProtocolError
from kvferry.protocol.messages import Done, Ready
from kvferry.regions import Spans
from kvferry.testing import FakeClock
from kvferry.transports.channel import Watch
from kvferry.transports.pool import Whole, broken, check_answer
from kvferry.transports.staged import cut
from kvferry.transports.tcp import CALL_BYTES, TcpChannel, make_iovecs


@pytest.fixture
def services():
    return SimpleNamespace(clock=FakeClock(), ended=[])


def operation(lengths):
    lengths = np.asarray(lengths, np.int64)
    return SimpleNamespace(lengths=lengths, nbytes=int(lengths.sum()), stop=None)


def test_a_watch_says_why(services):
    op = operation([1])
    watch = Watch(services, services.clock.now() + 5.0, op)
    watch.check()
    services.clock.advance(5.0)
    with pytest.raises(DeadlineError):
        watch.check()
    op.stop = AbortedError("enough")
    with pytest.raises(AbortedError, match="enough"):
        watch.check()


def test_parts_end_as_one_and_do_not_mark_the_operation(services):
    services.complete = lambda *end: services.ended.append(end)
    op = operation([8 << 20] * 4)
    whole = Whole(op, services)
    parts = whole.cut(2)
    assert [(part.begin, part.end) for part in parts] == [(0, 2), (2, 4)]
    error = PeerLostError("broken")
    whole.ended(5, error)
    assert services.ended == []
    assert whole.stop is error
    # Else no other path could take over.
    assert op.stop is None
    whole.ended(7, None)
    assert services.ended == [(op, 12, error)]
    assert error.bytes_done == 12


def test_small_transfers_are_not_cut(services):
    assert len(Whole(operation([1 << 20] * 4), services).cut(4)) == 1
    assert len(Whole(operation([1 << 30]), services).cut(4)) == 1


def test_answers_are_checked():
    check_answer(Ready(3, 10), Ready, 3, 10)
    for answer in (Done(3, 10), Ready(4, 10), Ready(3, 11), None):
        with pytest.raises(ProtocolError):
            check_answer(answer, Ready, 3, 10)


def test_slots_are_cut_at_their_size():
    addresses, lengths = np.array([100, 1000, 5000], np.uint64), np.array([10, 25, 5])
    out = cut(addresses, lengths, 16)
    assert [nbytes for _, _, nbytes in out] == [16, 16, 8]
    flat = [a + i for p, s, _ in out for a, n in zip(p, s, strict=True) for i in range(int(n))]
    wanted = [a + i for a, n in zip(addresses, lengths, strict=True) for i in range(int(n))]
    assert flat == wanted
    assert cut(addresses[:0], lengths[:0], 16) == []


def test_iovecs_cut_long_spans():
    iovecs = make_iovecs(np.array([10], np.uint64), np.array([2 * CALL_BYTES + 5]))
    assert iovecs[:, 1].tolist() == [CALL_BYTES, CALL_BYTES, 5]
    assert iovecs[:, 0].tolist() == [10, 10 + CALL_BYTES, 10 + 2 * CALL_BYTES]


def channels():
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = socket.create_connection(server.getsockname())
        second, _ = server.accept()
    return TcpChannel(first), TcpChannel(second)


def test_a_slow_drip_does_not_hide_the_deadline(services):
    near, far = channels()
    buffer = np.zeros(1 << 16, np.uint8)
    address, length = np.array([buffer.ctypes.data], np.uint64), np.array([buffer.size])
    watch = Watch(services, services.clock.now() + 5.0)
    far.sock.send(b"x")
    mover = threading.Timer(0.02, services.clock.advance, (6.0,))
    mover.start()
    with pytest.raises(DeadlineError):
        near.receive_spans(address, length, watch)
    mover.join()
    assert watch.bytes_done == 1
    near.close()
    far.close()


def test_closing_is_seen_at_the_other_end(services):
    near, far = channels()
    far.close()
    assert not near.is_fresh()
    buffer = np.zeros(16, np.uint8)
    address = np.array([buffer.ctypes.data], np.uint64)
    with pytest.raises(PeerLostError):
        near.receive_spans(address, np.array([16]), Watch(services, float("inf")))
    near.close()
    near.interrupt()


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOBUFS, "transfer"), (errno.ECONNRESET, "peer_lost")]
)
def test_a_broken_call_of_a_lane_is_called_by_its_name(services, monkeypatch, number, kind):
    """Also one that libc made: only a cut means that the peer may be gone."""
    near, far = socket.socketpair()
    with near, far:
        channel = TcpChannel.__new__(TcpChannel)
        channel.sock, channel._wakes_for = near, 1
        monkeypatch.setattr("kvferry.transports.tcp.ctypes.get_errno", lambda: number)
        watch = Watch(services, services.clock.now() + 5.0, None)
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            channel._explain(-1, watch)
    assert broken(caught.value).code == kind


def test_an_operation_that_is_stopped_on_its_way_to_the_queue_never_waits_there(make_engine):
    """All lanes are busy, and the stop comes between the first look and the queue."""
    near, far = make_engine("near", "tcp"), make_engine("far", "tcp")
    region = near.connect(far.addresses[0]).region(far.allocate(4096).ref)
    transport = near.transports["tcp"]
    whole = Spans.whole(4096)
    near.read(near.allocate(4096), whole, region, whole).wait(5.0)
    (pool,) = transport._clients.values()
    submit, queued = pool.submit, []

    def late(op):
        transport.abort(op, AbortedError("enough"))
        try:
            submit(op)
        finally:
            queued.extend(pool.waiting)

    pool.submit = late
    with pool.ready:  # No lane takes anything meanwhile.
        transfer = near.read(near.allocate(4096), whole, region, whole)
    with pytest.raises(AbortedError, match="enough"):
        transfer.wait(5.0)
    assert queued == []
