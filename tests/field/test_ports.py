"""Kinds of fault around local ports: one connection per transfer, and none left."""

from __future__ import annotations

import errno

import pytest

from faults.helpers import MIB, WHOLE
from kvferry import sockets
from kvferry.errors import KVFerryError
from kvferry.regions import Spans
from kvferry.transports.tcp import TcpTransport


class Counting(TcpTransport):
    """Counts the lanes that it opens."""

    opened = 0

    def dial(self, *args, **options):
        self.opened += 1
        return super().dial(*args, **options)


def test_any_number_of_transfers_needs_no_more_connections_than_lanes(make_engine):
    counting = Counting()
    near = make_engine("near", "tcp", extra={"tcp": counting}, lanes_max=2)
    far = make_engine("far", "tcp")
    local, owned = near.allocate(MIB), far.allocate(MIB)
    remote = near.connect(far.addresses[0]).region(owned.ref)
    small = Spans.whole(4096)
    for _ in range(8):
        for transfer in [near.read(local, small, remote, small) for _ in range(25)]:
            transfer.wait(5.0)
    assert 1 <= counting.opened <= 2


def test_no_free_port_is_told_as_such_and_no_peer_is_called_dead(make_engine, monkeypatch):
    near, far = make_engine("near", "tcp"), make_engine("far", "tcp")
    local, owned = near.allocate(MIB), far.allocate(MIB)
    owned.array[:] = 1
    peer = near.connect(far.addresses[0])
    remote = peer.region(owned.ref)

    def start_connect(address, _timeout_s):
        raise sockets.unreachable(address, OSError(errno.EADDRNOTAVAIL, "made for this test"))

    with monkeypatch.context() as patch:
        patch.setattr(sockets, "start_connect", start_connect)
        with pytest.raises(KVFerryError) as caught:
            near.read(local, WHOLE, remote, WHOLE).wait(5.0)
    assert "no free local port" in str(caught.value)
    assert "ip_local_port_range" in caught.value.fix
    assert "dead" not in str(caught.value)
    peer.ping(5.0)
    assert near.read(local, WHOLE, remote, WHOLE).wait(5.0) == MIB
    assert int(local.array.min()) == 1
