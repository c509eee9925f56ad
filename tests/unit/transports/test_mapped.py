import os
import threading

import numpy as np
import pytest

from kvferry.errors import AbortedError, PeerLostError, StaleRegionError
from kvferry.regions import Spans
from kvferry.testing.conformance import wait_until
from kvferry.transports import mapped
from kvferry.transports.mapped import cut_long, pieces
from kvferry.transports.shm import ShmTransport


def test_pieces_cover_all_spans_in_order(monkeypatch):
    monkeypatch.setattr(mapped, "PIECE_BYTES", 100)
    lengths = np.random.default_rng(0).integers(1, 100, 57)
    total = int(lengths.sum())
    found = pieces(lengths, total)
    assert [begin for begin, _, _ in found] == [0, *[end for _, end, _ in found[:-1]]]
    assert found[-1][1] == lengths.size
    assert sum(nbytes for _, _, nbytes in found) == total
    assert all(nbytes <= 200 for _, _, nbytes in found)
    assert pieces(np.array([], np.int64), 0) == []
    assert pieces(np.array([7]), 7) == [(0, 1, 7)]


def test_long_spans_are_cut(monkeypatch):
    monkeypatch.setattr(mapped, "PIECE_BYTES", 100)
    local = np.array([1000, 5000], np.uint64)
    remote = np.array([70, 10], np.uint64)
    a, b, sizes = cut_long(local, remote, np.array([250, 30]))
    assert a.tolist() == [1000, 1100, 1200, 5000]
    assert b.tolist() == [70, 170, 270, 10]
    assert sizes.tolist() == [100, 100, 50, 30]
    same = cut_long(local, remote, np.array([100, 100]))
    assert same[0] is local


class SlowShm(ShmTransport):
    """Mapping waits until the test lets it."""

    def __init__(self):
        super().__init__()
        self.began, self.go, self.count = threading.Event(), threading.Event(), 0
        self.aborted = set()

    def map(self, remote, *, writable):
        self.count += 1
        self.began.set()
        assert self.go.wait(5.0)
        return super().map(remote, writable=writable)

    def abort(self, op, error):
        super().abort(op, error)
        self.aborted.add(op.op_id)


@pytest.fixture
def slow(make_engine):
    transport = SlowShm()
    near = make_engine("near", "shm", extra={"shm": transport})
    far = make_engine("far", "shm")
    owned = far.allocate(4096)
    owned.array[:] = 3
    peer = near.connect(far.addresses[0])
    yield near, transport, peer, owned
    transport.go.set()


def test_mapping_blocks_neither_its_caller_nor_others(slow):
    near, transport, peer, owned = slow
    local, whole = near.allocate(4096), Spans.whole(4096)
    remote = peer.region(owned.ref)
    transfers = [near.read(local, whole, remote, whole) for _ in range(4)]
    assert transport.began.wait(5.0)
    assert not any(transfer.is_done() for transfer in transfers)
    peer.ping()
    assert transport.statistics()["mappings"] == 0
    transport.go.set()
    assert [transfer.wait(5.0) for transfer in transfers] == [4096] * 4
    assert transport.count == 1
    assert local.array.min() == 3


def test_a_region_that_goes_while_it_is_mapped_leaves_no_mapping(slow):
    near, transport, peer, owned = slow
    local, whole = near.allocate(4096), Spans.whole(4096)
    near.read(local, whole, peer.region(owned.ref), whole)
    assert transport.began.wait(5.0)
    owned.close()
    transport.go.set()
    wait_until(lambda: not peer.regions, "the peer was not told")
    wait_until(lambda: transport.statistics() == {"mappings": 0, "operations": 0}, "it is kept")


def test_a_description_without_exports_is_stale(make_engine):
    near, far = make_engine("near", "shm"), make_engine("far", "shm")
    peer, owned = near.connect(far.addresses[0]), far.allocate(4096)
    region = peer.region(owned.ref)
    transport, blocked = near.transports["shm"], near.transports["shm"].blocked
    transport.blocked = lambda *_: region.exports.clear() or ""
    fds = [export.fd for export in region.exports.values()]
    transfer = near.read(near.allocate(4096), Spans.whole(4096), region, Spans.whole(4096))
    with pytest.raises(StaleRegionError):
        transfer.wait(5.0)
    transport.blocked = blocked
    for fd in fds:
        os.close(fd)


def test_a_region_that_went_with_its_peer_is_a_lost_peer(slow):
    near, transport, peer, owned = slow
    local, whole = near.allocate(4096), Spans.whole(4096)
    remote = peer.region(owned.ref)
    transfers = [near.read(local, whole, remote, whole) for _ in range(3)]
    assert transport.began.wait(5.0)

    def cut():
        with near.locked():
            near.connections.drop(peer, "the test cut it")

    # It waits until the descriptor that is being mapped can be closed.
    cutting = threading.Thread(target=cut)
    cutting.start()
    wait_until(lambda: len(transport.aborted) == 3, "a transfer was not told")
    transport.go.set()
    cutting.join(5.0)
    assert not remote.exports or not peer.regions
    for transfer in transfers:
        with pytest.raises(PeerLostError, match="the test cut it"):
            transfer.wait(5.0)


class BrokenShm(ShmTransport):
    def map(self, remote, *, writable):
        raise ZeroDivisionError("a bug")


def test_a_bug_in_a_transport_ends_the_transfer(make_engine, caplog):
    near = make_engine("near", "shm", extra={"shm": BrokenShm()})
    far = make_engine("far", "shm")
    peer, owned = near.connect(far.addresses[0]), far.allocate(4096)
    whole = Spans.whole(4096)
    transfer = near.read(near.allocate(4096), whole, peer.region(owned.ref), whole)
    with pytest.raises(AbortedError, match="internal error: a bug"):
        transfer.wait(5.0)
    assert "a copy failed" in caplog.text


class BrokenRelease(ShmTransport):
    def map(self, remote, *, writable):
        mapping = super().map(remote, writable=writable)
        mapping.exit = lambda: 1 / 0
        return mapping


def test_a_mapping_that_cannot_be_let_go_still_ends_its_transfer(make_engine, caplog):
    near = make_engine("near", "shm", extra={"shm": BrokenRelease()})
    far = make_engine("far", "shm")
    peer, owned = near.connect(far.addresses[0]), far.allocate(4096)
    whole = Spans.whole(4096)
    assert near.read(near.allocate(4096), whole, peer.region(owned.ref), whole).wait(5.0) == 4096
    assert "was not let go" in caplog.text
