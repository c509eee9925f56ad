"""Peers that die, freeze, come back as somebody else; paths that fail and are replaced."""

from __future__ import annotations

import logging
import socket
import threading
import time
from dataclasses import replace
from functools import partial

import pytest

from kvferry.errors import (
    AbortedError,
    BusyError,
    DeadlineError,
    KVFerryError,
    PeerLostError,
    ProtocolError,
    TransferError,
    UnreachableError,
)
from kvferry.paths import DEMOTED_S
from kvferry.regions import Spans
from kvferry.sockets import Address
from kvferry.testing import Child, FakeClock
from kvferry.testing.conformance import failure
from kvferry.transports.channel import Watch
from kvferry.transports.tcp import TcpChannel, TcpTransport

from .helpers import MIB, WHOLE, Held, Unmappable, wait_until

SETUP = """
from kvferry.config import EngineConfig
from kvferry.engine import Engine
engine = Engine(EngineConfig(name="child", directory={directory!r}, transports={transports!r},
                             listen={listen!r}, **{settings!r}))
region = engine.allocate({nbytes}, access="read-write")
region.array[:] = 5
result = {{"addresses": engine.addresses, "ref": region.ref.hex()}}
"""


@pytest.fixture
def child_directory(tmp_path):
    """Not the engines' own: the socket of an engine that is killed stays."""
    return str(tmp_path / "c")


def start_child(child, directory, *transports, nbytes=MIB, listen="127.0.0.1:0", **settings):
    facts = child.run(
        SETUP.format(
            directory=directory,
            transports=transports,
            listen=listen,
            settings=settings,
            nbytes=nbytes,
        )
    )
    return facts["addresses"], bytes.fromhex(facts["ref"])


def held(engine, name):
    figures = engine.statistics()["transports"][name]
    return figures.get("lanes", 0) + figures.get("mappings", 0)


# -- death ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "staged", "tcp"])
@pytest.mark.parametrize("write", [False, True])
def test_a_peer_that_is_killed_midway(make_engine, child_directory, transport, write):
    nbytes = 64 * MIB
    near = make_engine("near", transport)
    local = near.allocate(nbytes)
    whole = Spans.whole(nbytes)
    with Child() as child:
        addresses, ref = start_child(child, child_directory, transport, nbytes=nbytes)
        peer = near.connect(addresses[0])
        remote = peer.region(ref)
        move = near.write if write else near.read
        # In memory that is mapped the bytes stay reachable; a queue of transfers lasts longer.
        count = 60 if transport == "shm" else 12
        transfers = [move(local, whole, remote, whole) for _ in range(count)]
        child.kill()
        began = time.monotonic()
        for transfer in transfers:
            error = failure(transfer.wait, 2.0)
            assert error is None or isinstance(error, (PeerLostError, UnreachableError)), error
            assert error is None or (error.peer == "child" and error.path)
        assert time.monotonic() - began < 2.0
        assert transfers[-1].error is not None, "it was not killed midway"
    wait_until(lambda: held(near, transport) == 0, "lanes or mappings are left")
    assert near.connections.count() == 0
    with pytest.raises(PeerLostError, match=r"ended because: the connection .*peer child.*again"):
        near.read(local, whole, remote, whole)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["staged", "tcp"])
def test_a_peer_that_freezes_is_lost_and_can_come_back(make_engine, child_directory, transport):
    near = make_engine("near", transport, heartbeat_s=0.1, lost_s=0.4)
    sound = make_engine("sound", transport)
    local = near.allocate(MIB)
    good = near.connect(sound.addresses[0]).region(sound.allocate(MIB).ref)
    with Child() as child:
        addresses, ref = start_child(child, child_directory, transport)
        remote = near.connect(addresses[0]).region(ref)
        near.read(local, WHOLE, remote, WHOLE).wait(5.0)
        child.stop()
        transfer = near.read(local, WHOLE, remote, WHOLE)
        began = time.monotonic()
        while not transfer.is_done():
            near.read(local, WHOLE, good, WHOLE).wait(1.0)
            assert time.monotonic() - began < 3.0, "the frozen peer was not noticed"
        with pytest.raises(PeerLostError, match=r"process is stopped, as by SIGSTOP, and said no"):
            transfer.result()
        # A frozen process still accepts nothing, in bounded time.
        with pytest.raises(UnreachableError, match="is stopped, as by SIGSTOP, and said no hello"):
            near.connect(addresses[0])
        child.go_on()
        wait_until(partial(is_reachable, near, addresses[0]), "it did not come back")
        again = near.connect(addresses[0]).region(ref)
        near.read(local, WHOLE, again, WHOLE).wait(5.0)
        assert local.array.min() == 5


def is_reachable(engine, address):
    try:
        engine.connect(address, 1.0).ping(1.0)
    except KVFerryError:
        return False
    return True


def test_silence_is_noticed_by_the_clock(make_engine):
    clock = FakeClock()
    near = make_engine("near", clock=clock)
    far = make_engine("far")
    peer = near.connect(far.addresses[0])
    # Its loop stands still: it neither reads nor sends.
    blocked, go = threading.Event(), threading.Event()

    def block(_peer, _body):
        blocked.set()
        go.wait(10.0)

    far.on_notify = block
    near.notify(peer, b"")
    assert blocked.wait(5.0)
    for _ in range(6):
        clock.advance(1.0)
    wait_until(lambda: peer.lost is not None, "silence was not noticed")
    go.set()
    assert isinstance(peer.lost, PeerLostError)
    assert "nothing heard for" in str(peer.lost)


def test_another_engine_on_the_same_port(make_engine):
    near, first = make_engine("near", "tcp"), make_engine("first", "tcp")
    address = first.addresses[1]
    port = address.rpartition(":")[2]
    remote = near.connect(address).region(first.allocate(4096).ref)
    old = first.incarnation
    first.close()
    wait_until(lambda: near.connections.count() == 0, "the end was not noticed")
    second = make_engine("second", "tcp", listen=f"127.0.0.1:{port}")
    fresh = near.connect(address)
    assert fresh.incarnation == second.incarnation
    local, whole = near.allocate(4096), Spans.whole(4096)
    with pytest.raises(PeerLostError, match="if its process was restarted, its regions are new"):
        near.read(local, whole, remote, whole)
    owned = second.allocate(4096)
    near.read(local, whole, fresh.region(owned.ref), whole).wait(5.0)
    # Who expects the first one is told at once.
    box = []
    came = threading.Event()

    def reply(peer, error):
        box.extend((peer, error))
        came.set()

    near.connect_nowait([Address.parse(address)], old, reply, near.clock.now() + 60)
    assert came.wait(5.0)
    assert box[0] is None
    assert isinstance(box[1], PeerLostError)
    assert "restarted" in str(box[1])


# -- what waits ----------------------------------------------------------------------------------


def test_what_waits_behind_a_slow_transfer_ends_at_its_own_deadline(make_engine, monkeypatch):
    near = make_engine("near", "tcp", lanes_max=1)
    far = make_engine("far", "tcp")
    remote = near.connect(far.addresses[0]).region(far.allocate(MIB).ref)
    local = near.allocate(MIB)
    entered, leave = threading.Event(), threading.Event()
    receive = TcpChannel.receive_spans

    def slow(self, addresses, lengths, watch):
        entered.set()
        leave.wait(10.0)
        receive(self, addresses, lengths, watch)

    monkeypatch.setattr(TcpChannel, "receive_spans", slow)
    first = near.read(local, WHOLE, remote, WHOLE)
    assert entered.wait(5.0)
    late = near.read(local, WHOLE, remote, WHOLE, deadline_s=0.05)
    cancelled = near.read(local, WHOLE, remote, WHOLE)
    cancelled.cancel()
    with pytest.raises(AbortedError):
        cancelled.wait(2.0)
    with pytest.raises(DeadlineError, match="not complete after"):
        late.wait(2.0)
    assert not first.is_done()
    leave.set()
    assert first.wait(5.0) == MIB


def test_copies_that_wait_for_a_mover_end_at_their_own_deadline(make_engine):
    near, far = make_engine("near", "inproc"), make_engine("far", "inproc")
    size = 2 * MIB
    remote = near.connect(far.addresses[0]).region(far.allocate(size).ref)
    local, whole = near.allocate(size), Spans.whole(size)
    release = threading.Event()
    for _ in range(8):
        near.run(lambda: release.wait(10.0))
    late = near.read(local, whole, remote, whole, deadline_s=0.05)
    cancelled = near.read(local, whole, remote, whole)
    cancelled.cancel()
    with pytest.raises(AbortedError):
        cancelled.wait(2.0)
    with pytest.raises(DeadlineError):
        late.wait(2.0)
    release.set()
    assert near.read(local, whole, remote, whole).wait(5.0) == size


def test_a_lane_that_never_says_hello_is_left_when_it_is_cancelled(make_engine):
    near, far = make_engine("near", "tcp"), make_engine("far", "tcp")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        far.connections.addresses[1] = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        remote = near.connect(far.addresses[0]).region(far.allocate(MIB).ref)
        transfer = near.read(near.allocate(MIB), WHOLE, remote, WHOLE)
        accepted, _ = silent.accept()
        with accepted:
            transfer.cancel()
            began = time.monotonic()
            with pytest.raises(AbortedError):
                transfer.wait(2.0)
            short = near.read(near.allocate(MIB), WHOLE, remote, WHOLE, deadline_s=0.1)
            with pytest.raises(DeadlineError):
                short.wait(2.0)
            assert time.monotonic() - began < 2.0
            near.close()
            assert time.monotonic() - began < 2.0


def test_too_many_transfers(make_engine):
    transport = Held()
    near = make_engine("near", "held", extra={"held": transport}, transfers_max=3)
    far = make_engine("far", "held", extra={"held": Held()})
    remote = near.connect(far.addresses[0]).region(far.allocate(MIB).ref)
    local = near.allocate(MIB)
    running = [near.read(local, WHOLE, remote, WHOLE) for _ in range(3)]
    with pytest.raises(BusyError, match="3 transfers are in flight; wait for some"):
        near.read(local, WHOLE, remote, WHOLE)
    transport.end(transport.ops[0])
    running[0].wait(1.0)
    near.read(local, WHOLE, remote, WHOLE)
    assert near.statistics()["transfers"] == 4


def test_far_deadlines_do_not_pile_up(make_engine):
    near, far = make_engine("near", "inproc"), make_engine("far", "inproc")
    remote = near.connect(far.addresses[0]).region(far.allocate(64).ref)
    local, whole = near.allocate(64), Spans.whole(64)
    for _ in range(1500):
        near.read(local, whole, remote, whole, deadline_s=1e6)
    assert len(near.moves._deadlines) < 1100


def test_a_submit_after_the_peer_is_lost_leaves_no_lane(make_engine):
    near, far = make_engine("near", "tcp"), make_engine("far", "tcp")
    remote = near.connect(far.addresses[0]).region(far.allocate(MIB).ref)
    transport = near.transports["tcp"]
    submit = transport.submit

    def late(op):
        far.close()
        wait_until(lambda: near.connections.count() == 0, "the end was not noticed")
        submit(op)

    transport.submit = late
    transfer = near.read(near.allocate(MIB), WHOLE, remote, WHOLE)
    with pytest.raises(PeerLostError):
        transfer.wait(5.0)
    assert transport.statistics()["lanes"] == 0


def test_each_transfer_has_an_error_of_its_own(make_engine):
    near = make_engine("near", "held", extra={"held": Held()})
    names = ["one", "two"]
    transfers = []
    for name in names:
        far = make_engine(name, "held", extra={"held": Held()})
        remote = near.connect(far.addresses[0]).region(far.allocate(MIB).ref)
        transfers.append(near.read(near.allocate(MIB), WHOLE, remote, WHOLE))
    near.close()
    errors = [failure(transfer.wait, 1.0) for transfer in transfers]
    assert all(isinstance(error, AbortedError) for error in errors)
    assert errors[0] is not errors[1]


def test_a_callback_that_raises_harms_nobody(make_engine, caplog):
    near, far = make_engine("near"), make_engine("far")
    remote = near.connect(far.addresses[0]).region(far.allocate(MIB).ref)
    seen = threading.Event()
    with caplog.at_level(logging.ERROR, "kvferry"):
        held_up = threading.Event()
        near.run(lambda: held_up.wait(5.0))
        near.run(lambda: held_up.wait(5.0))
        local, whole = near.allocate(2 * MIB), Spans.of([0, 0], MIB)
        transfer = near.read(local, Spans.whole(2 * MIB), remote, whole)
        transfer.add_done_callback(lambda _: 1 / 0)
        transfer.add_done_callback(lambda _: seen.set())
        held_up.set()
        assert transfer.wait(5.0) == 2 * MIB
        assert seen.wait(5.0)
    assert any("callback" in text for text in caplog.messages)


def test_deregistering_waits_also_for_transfers_of_an_older_generation(make_engine):
    transport = Held()
    transport.ends_on_abort = False
    near = make_engine("near", "held", extra={"held": transport})
    far = make_engine("far", "held", extra={"held": Held()})
    remote = near.connect(far.addresses[0]).region(far.allocate(MIB).ref)
    local = near.allocate(MIB)
    transfer = near.read(local, WHOLE, remote, WHOLE)
    local.renew()
    closing = threading.Thread(target=local.close)
    closing.start()
    wait_until(lambda: not near.registry.has(local.region.region_id), "it does not close")
    closing.join(0.05)
    assert closing.is_alive(), "the memory was freed under a transfer"
    transport.end(transport.ops[0])
    closing.join(5.0)
    assert transfer.wait(1.0) == MIB


# -- fall-back -----------------------------------------------------------------------------------


def test_a_path_that_fails_is_replaced_and_tried_again_later(make_engine, caplog):
    clock = FakeClock()
    fast = Unmappable()
    near = make_engine(
        "near", "unmappable", "tcp", extra={"unmappable": fast}, clock=clock, lost_s=100.0
    )
    far = make_engine("far", "unmappable", "tcp", extra={"unmappable": Unmappable()})
    source = far.allocate(MIB)
    source.array[:] = 9
    remote = near.connect(far.addresses[0]).region(source.ref)
    local = near.allocate(MIB)
    assert near.plan(local, remote).paths[0].name == "unmappable/pull"
    with caplog.at_level(logging.WARNING, "kvferry"):
        transfer = near.read(local, WHOLE, remote, WHOLE)
        assert transfer.wait(5.0) == MIB
        assert transfer.path == "tcp/pull"
        assert local.array.min() == 9
        for _ in range(3):
            near.read(local, WHOLE, remote, WHOLE).wait(5.0)
    assert fast.tried == 1
    assert sum("unmappable/pull to far failed" in text for text in caplog.messages) == 1
    plan = near.plan(local, remote)
    assert plan.paths[-1].name == "unmappable/pull"
    assert "tried last, because it failed lately: no address space is left" in plan.explain()
    fast.broken = False
    clock.advance(DEMOTED_S + 0.1)
    transfer = near.read(local, WHOLE, remote, WHOLE)
    transfer.wait(5.0)
    assert transfer.path == "unmappable/pull"
    assert near.statistics()["demotions"] == 1


class Refused(TcpTransport):
    """A streamed path whose lanes are refused, the fastest by its own account."""

    name = "refused"

    def capabilities(self):
        return replace(super().capabilities(), bytes_per_s=1e12, latency_s=1e-9)

    def serve(self, sock, fd, hello):
        raise ProtocolError("no lanes today")


@pytest.mark.parametrize("write", [False, True])
def test_a_streamed_path_that_is_refused_is_replaced(make_engine, write):
    near = make_engine("near", "refused", "tcp", extra={"refused": Refused()})
    far = make_engine("far", "refused", "tcp", extra={"refused": Refused()})
    remote = near.connect(far.addresses[0]).region(far.allocate(24 * MIB, access="read-write").ref)
    local, whole = near.allocate(24 * MIB), Spans.whole(24 * MIB)
    transfer = (near.write if write else near.read)(local, whole, remote, whole)
    assert transfer.wait(5.0) == 24 * MIB
    assert transfer.path.startswith("tcp/")


def test_when_all_paths_fail_the_last_reason_is_told(make_engine):
    near = make_engine("near", "unmappable", extra={"unmappable": Unmappable()})
    far = make_engine("far", "unmappable", extra={"unmappable": Unmappable()})
    remote = near.connect(far.addresses[0]).region(far.allocate(MIB).ref)
    transfer = near.read(near.allocate(MIB), WHOLE, remote, WHOLE)
    with pytest.raises(KVFerryError, match=r"no address space is left \(peer far, path unmap"):
        transfer.wait(5.0)


def test_a_deadline_is_not_a_fault_of_the_path(make_engine):
    clock, transport = FakeClock(), Held()
    near = make_engine("near", "held", "tcp", extra={"held": transport}, clock=clock)
    far = make_engine("far", "held", "tcp", extra={"held": Held()})
    remote = near.connect(far.addresses[0]).region(far.allocate(MIB).ref)
    transfer = near.read(near.allocate(MIB), WHOLE, remote, WHOLE, deadline_s=3.0)
    assert transfer.path == "held/pull"
    clock.advance(3.0)
    with pytest.raises(TransferError, match=r"not complete after 3\.00 s"):
        transfer.wait(5.0)
    assert near.statistics()["demotions"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "staged"])
def test_an_idle_lane_sleeps_until_it_is_used_or_closed(make_engine, monkeypatch, transport):
    near, far = make_engine("near", transport), make_engine("far", transport)
    local, remote = near.allocate(MIB), near.connect(far.addresses[0]).region(far.allocate(MIB).ref)
    near.read(local, WHOLE, remote, WHOLE).wait(5.0)
    woken = []
    monkeypatch.setattr(Watch, "check", lambda _self: woken.append(threading.current_thread().name))
    threading.Event().wait(0.35)
    assert not woken
    monkeypatch.undo()
    near.read(local, WHOLE, remote, WHOLE).wait(5.0)
    began = time.monotonic()
    far.close()
    assert time.monotonic() - began < 1.0


class Slowly(Unmappable):
    """A mapped path whose mapping takes as long as the test likes."""

    name = "slowly"

    def __init__(self):
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()

    def map(self, remote, *, writable):
        self.begun.set()
        assert self.go_on.wait(10.0)
        self.broken = False
        return super().map(remote, writable=writable)


@pytest.mark.parametrize("what", ["peer", "region"])
def test_a_mapping_in_the_making_keeps_nobody_waiting_but_its_own(make_engine, what):
    """To map a large pool takes seconds, in which other peers must not count as silent, nor this
    engine for them."""
    slowly = Slowly()
    near = make_engine("near", "slowly", extra={"slowly": slowly})
    far = make_engine("far", "slowly", extra={"slowly": Slowly()})
    other = make_engine("other", "tcp")
    owned = far.allocate(MIB)
    remote = near.connect(far.addresses[0]).region(owned.ref)
    alive = near.connect(other.addresses[0])
    transfer = near.read(near.allocate(MIB), WHOLE, remote, WHOLE)
    try:
        assert slowly.begun.wait(5.0)
        if what == "peer":
            far.close()
            wait_until(lambda: not near.connections.has(far.incarnation), "the end went unnoticed")
        else:
            owned.close()
            wait_until(lambda: not remote.exports, "the end went unnoticed")
        assert alive.ping(2.0) < 2.0
    finally:
        slowly.go_on.set()
    wait_until(transfer.is_done, "the transfer has no end")
    wait_until(lambda: slowly.statistics()["mappings"] == 0, "a mapping is left")


def test_the_rate_of_a_path_to_a_peer_that_is_gone_is_not_kept(make_engine):
    near = make_engine("near", "held", extra={"held": (held := Held())})
    far = make_engine("far", "held", extra={"held": Held()})
    held.ends_on_abort = False
    remote = near.connect(far.addresses[0]).region(far.allocate(MIB).ref)
    transfer = near.read(near.allocate(MIB), WHOLE, remote, WHOLE)
    (op,) = held.ops
    op.began_at = near.clock.now() - 0.5
    far.close()
    wait_until(lambda: held.aborted, "the loss was not noticed")
    held.end(op)
    assert transfer.wait(5.0) == MIB
    assert near.moves._paths._rates == {}
