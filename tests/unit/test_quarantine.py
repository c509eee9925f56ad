"""Memory that ended transfers may still write to is kept from other use."""

import itertools

import numpy as np
import pytest

from kvferry.errors import BusyError
from kvferry.quarantine import Quarantine, write_same_bytes
from kvferry.regions import Region
from kvferry.transfer import Transfer
from kvferry.transports.base import Operation, PeerView, RemoteRegion

numbers = itertools.count(1)


def operation(local, remote, lengths, *, write=False, address=1 << 47, region_id=1, remote_id=5):
    region = Region(region_id, "host", "", address, 1 << 20, 1, b"t" * 16, "read-write")
    there = RemoteRegion(b"p", remote_id, "host", "", 1 << 20, 1, b"t" * 16, "read-write", {})
    peer = PeerView(b"p", "peer", b"", "", "", "", b"")
    arrays = [np.array(values, np.int64) for values in (local, remote, lengths)]
    return Operation(next(numbers), write, region, there, peer, *arrays, sum(lengths), 0.0)


def transfer_of(op):
    return Transfer(op.op_id, op.nbytes, write=op.write, peer_name="peer", cancel=lambda _: None)


@pytest.mark.parametrize(
    ("begin", "length", "common"),
    [(0, 100, False), (0, 101, True), (150, 1, True), (199, 9, True), (200, 9, False),
     (50, 500, True), (290, 10, False), (290, 11, True)],
)  # fmt: skip
def test_bytes_in_common(begin, length, common):
    held = operation([300, 100], [0, 1000], [20, 100])
    assert write_same_bytes(operation([begin], [0], [length]), held) is common


def test_a_long_span_is_not_hidden_by_a_short_one_behind_it():
    held = operation([0, 10], [0, 1000], [500, 1])
    assert write_same_bytes(operation([400], [0], [1]), held)


def test_the_target_counts_and_not_the_source():
    read = operation([0], [0], [100])
    write = operation([0], [0], [100], write=True)
    assert not write_same_bytes(read, write)
    assert write_same_bytes(operation([5000], [50], [1], write=True), write)
    assert not write_same_bytes(operation([0], [100], [1], write=True), write)
    assert not write_same_bytes(operation([0], [0], [100], write=True, remote_id=6), write)


def test_the_same_memory_in_another_region_is_the_same():
    held = operation([100], [0], [50])
    again = operation([0], [0], [50], address=(1 << 47) + 120, region_id=2)
    assert write_same_bytes(again, held)


def test_it_holds_until_that_very_operation_has_stopped():
    quarantine = Quarantine()
    op = operation([0], [0], [100])
    transfer = transfer_of(op)
    quarantine.add(transfer, op)
    assert len(quarantine) == 1
    assert quarantine.uses(1)
    assert not quarantine.uses(2)
    with pytest.raises(BusyError, match=f"transfer {op.op_id} .*is_quiet"):
        quarantine.check(operation([50], [0], [10]))
    quarantine.check(operation([100], [0], [10]))
    earlier = operation([0], [0], [100])
    earlier.op_id = op.op_id
    assert quarantine.release(earlier) is None
    assert quarantine.release(op) is transfer
    assert quarantine.release(op) is None
    quarantine.check(operation([50], [0], [10]))
    quarantine.add(transfer, op)
    assert quarantine.release_all() == [transfer]
    assert not len(quarantine)
