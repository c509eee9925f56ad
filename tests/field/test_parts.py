"""Kinds of fault in transfers of several parts, of which one fails before the others."""

from __future__ import annotations

import threading

import pytest

from faults.helpers import MIB, WHOLE, Ends, wait_until
from kvferry.errors import PeerLostError
from kvferry.transports.tcp import TcpTransport


class Uneven(TcpTransport):
    """Its first part fails at once; the others write on until ``go``, whatever they are told."""

    def __init__(self) -> None:
        super().__init__()
        self.writing = threading.Semaphore(0)
        self.go = threading.Event()
        self._parts = 0

    def dial(self, *args, **options):
        channel = super().dial(*args, **options)
        receive = channel.receive_into
        with self._lock:
            first, self._parts = self._parts == 0, self._parts + 1

        def receive_into(place, addresses, lengths, watch):
            if first:
                # Only when the others are at it.
                assert all(self.writing.acquire(timeout=5.0) for _ in range(3))
                raise PeerLostError("made for this test")
            self.writing.release()
            self.go.wait(5.0)
            receive(place, addresses, lengths, watch)

        channel.receive_into = receive_into
        return channel


@pytest.fixture
def uneven(monkeypatch):
    monkeypatch.setattr("kvferry.transports.pool.SPLIT_FROM_BYTES", 1024)
    made = Uneven()
    yield made
    made.go.set()


LANES = {"split_lanes": 4, "lanes_max": 4}


def test_a_transfer_has_not_ended_while_one_of_its_parts_may_still_write(make_engine, uneven):
    near = make_engine("near", "tcp", extra={"tcp": uneven}, **LANES)
    far = make_engine("far", "tcp")
    local, owned = near.allocate(MIB), far.allocate(MIB)
    remote = near.connect(far.addresses[0]).region(owned.ref)
    spans = WHOLE.of([i * MIB // 4 for i in range(4)], MIB // 4)
    scattered = WHOLE.of([i * MIB // 4 for i in (2, 0, 3, 1)], MIB // 4)
    transfer = near.read(local, spans, remote, scattered)
    pool = next(iter(uneven._clients.values()))
    wait_until(lambda: pool.idle == 1, "none has failed")
    assert not transfer.is_done()
    uneven.go.set()
    with pytest.raises(PeerLostError, match="made for this test"):
        transfer.wait(5.0)
    assert not any(lane.op for lane in pool.lanes)


def test_the_blocks_of_a_failed_claim_come_back_only_when_no_part_writes_any_more(
    make_side, uneven
):
    prefill = make_side("prefill", "tcp")
    decode = make_side("decode", "tcp", extra={"tcp": uneven}, **LANES)
    offered = Ends()
    offer = prefill.handoff.offer(range(0, 64, 2), 128, on_end=offered)
    claimed = Ends()
    decode.handoff.claim(offer.params, range(1, 64, 2), 128, on_end=claimed)
    wait_until(lambda: uneven._clients, "nothing is read")
    pool = next(iter(uneven._clients.values()))
    wait_until(lambda: uneven._parts == 4, "it was not cut")
    wait_until(lambda: pool.idle == 1, "none has failed")
    assert not claimed.all
    assert not offered.all
    uneven.go.set()
    assert isinstance(claimed.one().error, PeerLostError)
    assert not offered.one().delivered
