"""Bad input from callers and from peers: each ends in a typed error that says what to do."""

from __future__ import annotations

import array
import logging
import os
import socket
import subprocess
import threading
from dataclasses import replace

import numpy as np
import pytest

from kvferry import sockets
from kvferry.errors import (
    BoundsError,
    BusyError,
    ClosedError,
    ConfigError,
    PeerLostError,
    RegistrationError,
    StaleRegionError,
    UnreachableError,
    UsageError,
    VersionError,
)
from kvferry.protocol import framing, messages
from kvferry.protocol.messages import Failure, Hello, Move, Notify, Ping, Pong, Reject
from kvferry.regions import Spans
from kvferry.testing import Child, FakeClock
from kvferry.transports.tcp import TcpTransport

from .helpers import MIB, WHOLE, frame, raw_connect, raw_hello, read_message, wait_until


def assert_alive(engine, make_engine):
    """The engine still takes connections and serves reads."""
    other = make_engine("probe", *engine.transports)
    registration = engine.allocate(4096)
    registration.array[:] = 7
    target = other.allocate(4096)
    region = other.connect(engine.addresses[0]).region(registration.ref)
    assert other.read(target, Spans.whole(4096), region, Spans.whole(4096)).wait(5.0) == 4096
    assert target.array.min() == 7
    other.close()


# -- callers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["inproc", "shm", "staged", "tcp"])
def test_spans_outside_are_refused_and_say_what_to_do(make_engine, transport):
    near, far = make_engine("near", transport), make_engine("far", transport)
    local = near.allocate(4096)
    remote = near.connect(far.addresses[0]).region(far.allocate(4096).ref)
    for bad in (Spans.of([4096], [1]), Spans.of([2**62], [8]), Spans.of([0], [4097])):
        good = Spans.whole(bad.nbytes) if bad.nbytes <= 4096 else Spans.of([0, 0], [4096, 1])
        for a, b in ((bad, good), (good, bad)):
            with pytest.raises(BoundsError, match="lies outside the region of 4096 bytes; check"):
                near.read(local, a, remote, b)


def test_forged_references(make_engine):
    near, far = make_engine("near"), make_engine("far")
    peer = near.connect(far.addresses[0])
    ref = far.allocate(4096).ref
    for forged in (ref[:8] + bytes(16), (99).to_bytes(8, "little") + ref[8:]):
        with pytest.raises(StaleRegionError, match="the reference is not from this engine"):
            peer.region(forged)
    with pytest.raises(UsageError, match="24 bytes, not 3"):
        peer.region(b"abc")


def test_a_transfer_of_nothing_ends_at_once(make_engine):
    near, far = make_engine("near"), make_engine("far")
    remote = near.connect(far.addresses[0]).region(far.allocate(4096).ref)
    for spans in (Spans.of([], []), Spans.of([0, 4096], [0, 0])):
        assert near.read(near.allocate(16), Spans.of([], []), remote, spans).wait(1.0) == 0


def test_an_old_description_is_never_mapped_again(make_engine):
    # Its descriptor was closed, and the number may mean another file by now.
    near, far = make_engine("near", "shm"), make_engine("far", "shm")
    peer = near.connect(far.addresses[0])
    local, gone = near.allocate(4096), far.allocate(4096)
    old = peer.region(gone.ref)
    gone.close()
    wait_until(lambda: not peer.regions, "the peer was not told")
    peer.region(far.allocate(4096).ref)
    whole = Spans.whole(4096)
    with pytest.raises(StaleRegionError, match="ask for it again"):
        near.read(local, whole, old, whole)
    assert not old.exports
    fresh = far.allocate(4096)
    before = peer.region(fresh.ref)
    near.connections.drop(peer, "for this test")
    again = near.connect(far.addresses[0])
    with pytest.raises(StaleRegionError, match="the connection is a new one"):
        near.read(local, whole, before, whole)
    near.read(local, whole, again.region(fresh.ref), whole).wait(5.0)


def test_a_local_region_that_was_closed_is_refused(make_engine):
    near, far = make_engine("near"), make_engine("far")
    remote = near.connect(far.addresses[0]).region(far.allocate(4096).ref)
    local = near.allocate(4096)
    local.close()
    with pytest.raises(StaleRegionError, match="register it again"):
        near.read(local, Spans.whole(4096), remote, Spans.whole(4096))


def test_a_deadline_that_is_no_number(make_engine):
    near, far = make_engine("near"), make_engine("far")
    remote = near.connect(far.addresses[0]).region(far.allocate(4096).ref)
    whole = Spans.whole(4096)
    with pytest.raises(UsageError, match="deadline_s"):
        near.read(near.allocate(4096), whole, remote, whole, deadline_s=float("nan"))
    for endless in (float("inf"), 1e12):
        near.read(near.allocate(4096), whole, remote, whole, deadline_s=endless).wait(5.0)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["inproc", "shm", "staged", "tcp"])
def test_more_than_two_gigabytes_in_one_span(make_engine, transport):
    nbytes = (1 << 31) + 4096 + 3
    near, far = make_engine("near", transport), make_engine("far", transport)
    try:
        # One page of memory serves as the whole source where it can: it reads as zeros.
        if transport == "shm":
            source = far.allocate(nbytes)
        else:
            source = far.register(np.zeros(nbytes, np.uint8))
        target = np.empty(nbytes, np.uint8)
    except (RegistrationError, MemoryError) as error:
        pytest.skip(f"not enough memory: {error}")
    held = source.array if source.array is not None else source._keep
    marks = [0, (1 << 31) - 1, 1 << 31, nbytes - 1]
    held[marks] = [1, 2, 3, 4]
    target[marks] = 9
    remote = near.connect(far.addresses[0]).region(source.ref)
    whole = Spans.whole(nbytes)
    registration = near.register(target)
    assert near.read(registration, whole, remote, whole, deadline_s=60).wait(60.0) == nbytes
    assert target[marks].tolist() == [1, 2, 3, 4]
    assert not target[1 : 1 << 20].any()


# -- peers that say the wrong thing --------------------------------------------------------------


def test_another_version_is_told_both_versions(make_engine):
    engine = make_engine("far")
    for address in engine.addresses:
        with raw_connect(address) as sock:
            hello = bytearray(raw_hello())
            hello[4] = framing.VERSION + 1
            sock.sendall(hello)
            reply = read_message(sock)
            assert isinstance(reply, Reject)
            assert reply.code == VersionError.code
            assert f"version {framing.VERSION + 1}" in reply.message


def test_a_callee_of_another_version(make_engine):
    engine = make_engine("near")
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_answer_in_version, args=(server, 9))
        thread.start()
        with pytest.raises(VersionError, match=r"version 9, this side 1.*run the same"):
            engine.connect(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        thread.join()


def _answer_in_version(server, version):
    sock, _ = server.accept()
    with sock:
        sock.recv(1 << 16)
        hello = bytearray(raw_hello())
        hello[4] = version
        sock.sendall(hello)
        sock.recv(1)


@pytest.mark.parametrize("which", [0, 1])
def test_noise_does_no_harm_and_is_logged(make_engine, caplog, which):
    engine = make_engine("far")
    rng = np.random.default_rng(3)
    with caplog.at_level(logging.WARNING, "kvferry"):
        for size in (4, 12, 300, 70000):
            with raw_connect(engine.addresses[which]) as sock:
                try:
                    sock.sendall(rng.bytes(size))
                    while sock.recv(1 << 16):
                        pass
                except ConnectionError:
                    pass
        wait_until(
            lambda: sum("not a kvferry peer" in text for text in caplog.messages) == 4,
            "not logged",
        )
    assert_alive(engine, make_engine)


def test_a_message_over_the_limit(make_engine, caplog):
    engine = make_engine("far")
    header = framing.HEADER.pack(framing.MAGIC, framing.VERSION, 0, 0, framing.HELLO_BYTES_MAX + 1)
    with caplog.at_level(logging.WARNING, "kvferry"), raw_connect(engine.addresses[0]) as sock:
        sock.sendall(header)
        reply = read_message(sock)
        assert "the limit is" in reply.message
        wait_until(lambda: any("the limit is" in text for text in caplog.messages), "not logged")
    assert_alive(engine, make_engine)


def test_a_hello_that_trickles_in_is_cut_off_in_time(make_engine):
    clock = FakeClock()
    engine = make_engine("far", clock=clock, connect_s=3.0)
    hello = raw_hello()
    with raw_connect(engine.addresses[0]) as sock:
        for at in range(4):
            sock.sendall(hello[at : at + 1])
            wait_until(lambda: len(engine.connections._strangers) == 1, "not accepted")
            clock.advance(0.5)
        clock.advance(1.1)
        assert sock.recv(1) == b""
    wait_until(lambda: not engine.connections._strangers, "still kept")


def test_strangers_are_bounded(make_engine, monkeypatch):
    monkeypatch.setattr("kvferry.connections.STRANGERS_MAX", 3)
    engine = make_engine("far")
    silent = [raw_connect(engine.addresses[0]) for _ in range(3)]
    # Who came first goes first, so that a peer is served beside those that say nothing.
    assert_alive(engine, make_engine)
    reply = read_message(silent[0])
    assert reply.code == BusyError.code
    assert "has not said hello" in reply.message
    assert len(engine.connections._strangers) == 2
    for sock in silent:
        sock.close()


def test_descriptors_that_nobody_asked_for_are_closed(make_engine):
    engine = make_engine("far")
    before = len(os.listdir("/proc/self/fd"))
    with raw_connect(engine.addresses[0]) as sock:
        sock.sendall(raw_hello())
        assert isinstance(read_message(sock), Hello)
        for number in range(1, 40):
            with open(os.devnull) as null:
                rights = array.array("i", [null.fileno()] * 8)
                sock.sendmsg(
                    [frame(Notify(b""), 8)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
                )
            sock.sendall(frame(Ping(number)))
            assert read_message(sock) == Pong(number)
            # Our end of the socket, and the engine's.
            assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_descriptors_without_a_message_end_the_connection(make_engine):
    engine = make_engine("far")
    before = len(os.listdir("/proc/self/fd"))
    with raw_connect(engine.addresses[0]) as sock:
        sock.sendall(raw_hello())
        assert isinstance(read_message(sock), Hello)
        with open(os.devnull) as null:
            rights = array.array("i", [null.fileno()] * 16)
            with pytest.raises(OSError, match=r"Broken pipe|reset"):  # noqa: PT012
                for number in range(1, 100):
                    sock.sendmsg(
                        [frame(Ping(number))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
                    )
                    if read_message(sock) is None:
                        raise BrokenPipeError("Broken pipe")
    wait_until(lambda: len(os.listdir("/proc/self/fd")) == before, "descriptors are left")
    assert_alive(engine, make_engine)


def test_a_peer_that_never_reads_is_left(make_engine, monkeypatch):
    monkeypatch.setattr("kvferry.peers.OUTBOX_BYTES_MAX", 1 << 20)
    engine = make_engine("far")
    sock = raw_connect(engine.addresses[0])
    sock.sendall(raw_hello(name="deaf"))
    assert isinstance(read_message(sock), Hello)
    wait_until(lambda: engine.connections.count() == 1, "not connected")
    (peer,) = engine.connections.open_peers()
    with pytest.raises(PeerLostError):  # noqa: PT012
        for _ in range(100):
            engine.notify(peer, bytes(60 << 10))
    assert "bytes unread" in str(peer.lost)
    assert not peer._outbox
    sock.close()
    assert_alive(engine, make_engine)


# -- lanes ---------------------------------------------------------------------------------------


def hostile_lanes(engine, count, purpose="tcp"):
    """The session of a peer, and raw lanes of it."""
    incarnation = os.urandom(16)
    control = raw_connect(engine.addresses[1])
    control.sendall(raw_hello(incarnation=incarnation))
    key = read_message(control).key
    lanes = [raw_connect(engine.addresses[1]) for _ in range(count)]
    for lane in lanes:
        lane.sendall(raw_hello(incarnation=incarnation, purpose=purpose, key=key))
    return control, *lanes


def hostile_lane(engine, purpose="tcp"):
    """A raw lane of a peer that has a session."""
    return hostile_lanes(engine, 1, purpose)


def test_lanes_of_one_peer_are_bounded(make_engine, monkeypatch, caplog):
    """Each takes a thread. Other peers still get theirs."""
    monkeypatch.setattr("kvferry.transports.stream.SERVED_MAX", 2)
    engine = make_engine("far", "tcp")
    socks = hostile_lanes(engine, 3)
    assert all(isinstance(read_message(lane), Hello) for lane in socks[1:])
    wait_until(lambda: "2 lanes of this peer are served" in caplog.text, "nobody was refused")
    assert engine.transports["tcp"].statistics()["lanes_served"] == 2
    others = hostile_lanes(engine, 2)
    assert all(isinstance(read_message(lane), Hello) for lane in others[1:])
    wait_until(lambda: engine.transports["tcp"].statistics()["lanes_served"] == 4, "not served")
    for sock in (*socks, *others):
        sock.close()
    wait_until(lambda: engine.transports["tcp"].statistics()["lanes_served"] == 0, "a lane is left")


def test_hostile_moves_are_refused_by_the_owner(make_engine):
    engine = make_engine("far", "tcp")
    owned = engine.allocate(4096)
    control, lane = hostile_lane(engine)
    assert isinstance(read_message(lane), Hello)

    def ask(offsets, sizes, *, write=False, **fields):
        region = owned.region
        move = Move(
            transfer_id=1,
            write=write,
            region_id=region.region_id,
            token=region.token,
            generation=region.generation,
            offsets=np.array(offsets, "<i8").tobytes(),
            lengths=np.array(sizes, "<i8").tobytes(),
            deadline_s=5.0,
        )
        for name, value in fields.items():
            move = messages.msgspec.structs.replace(move, **{name: value})
        lane.sendall(frame(move))
        return read_message(lane)

    for offsets, lengths in (([4096], [1]), ([-1], [8]), ([2**63 - 1], [8]), ([0], [2**63 - 1])):
        reply = ask(offsets, lengths)
        assert isinstance(reply, Failure)
        assert reply.code in ("bounds", "usage")
    assert "check block numbers" in ask([5000], [1]).message
    assert ask([0], [1], token=bytes(16)).code == "stale_region"
    assert ask([0], [1], generation=7).code == "stale_region"
    assert ask([0], [1], write=True).code == "bounds"
    # The lane itself is still good.
    assert ask([0], [16]).nbytes == 16
    assert len(lane.recv(16, socket.MSG_WAITALL)) == 16
    # Broken arrays end it.
    assert ask([0], [1], lengths=b"abc") is None
    lane.close()
    control.close()
    wait_until(lambda: owned.users == 0, "the region stays in use")
    assert_alive(engine, make_engine)


def test_lanes_need_a_session_and_a_transport(make_engine):
    engine = make_engine("far", "tcp")
    for fields in ({"purpose": "tcp"}, {"purpose": "shm"}, {"purpose": "nonsense"}):
        with raw_connect(engine.addresses[1]) as sock:
            sock.sendall(raw_hello(**fields))
            assert isinstance(read_message(sock), Reject)
    control, lane = hostile_lane(engine, "staged")
    assert isinstance(read_message(lane), Reject)
    lane.close()
    control.close()
    assert_alive(engine, make_engine)


def test_a_tcp_lane_over_a_unix_socket_is_refused(make_engine):
    engine = make_engine("far", "tcp")
    incarnation = os.urandom(16)
    with raw_connect(engine.addresses[0]) as control, raw_connect(engine.addresses[0]) as lane:
        control.sendall(raw_hello(incarnation=incarnation))
        key = read_message(control).key
        lane.sendall(raw_hello(incarnation=incarnation, purpose="tcp", key=key))
        assert isinstance(read_message(lane), Hello)
        assert read_message(lane) is None
    assert_alive(engine, make_engine)


def test_a_staged_lane_without_a_ring_is_refused(make_engine):
    engine = make_engine("far", "staged")
    incarnation = os.urandom(16)
    with raw_connect(engine.addresses[0]) as control:
        control.sendall(raw_hello(incarnation=incarnation))
        key = read_message(control).key
        for ring in ((0, 0), (1, 1 << 20), (1 << 61, 4), (4096, 4)):
            with raw_connect(engine.addresses[0]) as lane:
                fields = {"ring_bytes": ring[0], "ring_slots": ring[1]}
                lane.sendall(
                    raw_hello(incarnation=incarnation, purpose="staged", key=key, **fields)
                )
                assert isinstance(read_message(lane), Hello)
                assert read_message(lane) is None
    assert_alive(engine, make_engine)


def test_lanes_do_not_count_as_peers(make_engine):
    far = make_engine("far", "tcp", peers_max=1)
    near = make_engine("near", "tcp")
    remote = near.connect(far.addresses[0]).region(far.allocate(MIB).ref)
    assert near.read(near.allocate(MIB), WHOLE, remote, WHOLE).wait(5.0) == MIB
    third = make_engine("third", "tcp")
    with pytest.raises(BusyError, match="raise peers_max"):
        third.connect(far.addresses[0])


# -- addresses -----------------------------------------------------------------------------------


def test_a_port_where_nobody_listens(make_engine):
    engine = make_engine("near")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(UnreachableError, match=r"Connection refused.*nothing listens there"):
        engine.connect(f"tcp://127.0.0.1:{port}")
    with pytest.raises(UnreachableError, match="the Unix socket is gone"):
        engine.connect("unix:/nowhere/at/all.sock")
    with pytest.raises(ConfigError, match="write tcp://"):
        engine.connect("nonsense")


def full_backlog():
    """A listener whose queue is full: further connection attempts are dropped without an answer."""
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen(0)
    waiting = []
    for _ in range(4):
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(server.getsockname())
        waiting.append(sock)
    return server, waiting


def test_dropped_packets_are_bounded_by_the_deadline(make_engine):
    clock = FakeClock()
    engine = make_engine("near", clock=clock)
    server, waiting = full_backlog()
    box = []

    def connect():
        try:
            engine.connect(f"tcp://127.0.0.1:{server.getsockname()[1]}", 2.0)
        except UnreachableError as error:
            box.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    wait_until(lambda: engine.connections._dialling, "it does not dial")
    clock.advance(2.1)
    thread.join(5.0)
    assert "packets are dropped" in box[0].fix
    for sock in [server, *waiting]:
        sock.close()


def test_a_unix_socket_whose_queue_is_full(make_engine, engine_directory):
    engine = make_engine("near")
    path = f"{engine_directory}/full"
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as waiting:
        server.bind(path)
        server.listen(0)
        waiting.connect(path)
        with pytest.raises(UnreachableError, match="queue of new connections is full"):
            engine.connect(f"unix:{path}")


def resolve_to(monkeypatch, host):
    real = socket.getaddrinfo

    def resolver(name, port, *args, **kwargs):
        return real(host if name == "worker-3" else name, port, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", resolver)


def test_connecting_to_a_name_that_means_127_0_1_1(make_engine, monkeypatch):
    resolve_to(monkeypatch, "127.0.1.1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(UnreachableError, match=r"'worker-3' resolves to 127\.0\.1\.1.*use the"):
        make_engine("near").connect(f"tcp://worker-3:{port}")


def test_listening_by_a_name_that_means_127_0_1_1(make_engine, monkeypatch):
    resolve_to(monkeypatch, "127.0.1.1")
    monkeypatch.setattr(socket, "gethostname", lambda: "worker-3")
    with pytest.raises(ConfigError, match=r"resolves to 127\.0\.1\.1.*set advertise"):
        make_engine("far", listen="0.0.0.0:0", insecure=True)
    with pytest.raises(ConfigError, match=r"anybody could read.*set insecure"):
        make_engine("far", listen="0.0.0.0:0")


def test_one_connection_per_engine_however_it_is_reached(make_engine):
    near, far = make_engine("near"), make_engine("far")
    by_tcp = near.connect(far.addresses[1])
    assert by_tcp.sock.family == socket.AF_UNIX
    assert near.connect(far.addresses[1]) is by_tcp
    assert near.connect(far.addresses[0]) is by_tcp
    wait_until(lambda: far.connections.count() == 1, "a connection was left open")
    assert near.connections.count() == 1


def test_many_threads_that_connect_at_once_share_one_connection(make_engine):
    near, far = make_engine("near"), make_engine("far")
    found = []
    threads = [
        threading.Thread(target=lambda i=i: found.append(near.connect(far.addresses[i % 2])))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    wait_until(lambda: near.connections.count() == 1, "connections are left open")
    near.connect(far.addresses[0]).ping()


# -- short of something --------------------------------------------------------------------------


def test_not_enough_memory_says_how_much(make_engine):
    engine = make_engine("far")
    with pytest.raises(
        RegistrationError, match=r"\d+ bytes.*4503599627370496 are needed; .*memory"
    ):
        engine.allocate(1 << 52)
    assert engine.statistics()["regions"] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_file_system_for_shared_memory(tmp_path):
    from kvferry.memory.host import allocate_shared

    where = tmp_path / "tiny"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs: {mounted.stderr.decode()}")
    try:
        with pytest.raises(RegistrationError, match=r"1048576 bytes free, but 2097152 are needed"):
            allocate_shared(2 << 20, directory=str(where))
    finally:
        subprocess.run(["umount", str(where)], check=True)


def test_a_transport_that_cannot_export_leaves_nothing(make_engine, monkeypatch):
    engine = make_engine("far", "shm", "tcp")

    def no_descriptor(_fd):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "dup", no_descriptor)
    with pytest.raises(RegistrationError, match="Too many open files; raise the limit"):
        engine.allocate(4096, access="read-write")
    monkeypatch.undo()
    assert engine.statistics()["regions"] == 0
    engine.allocate(4096, access="read-write").close()


SHORT = """
import os, resource, time
from kvferry.config import EngineConfig
from kvferry.engine import Engine
from kvferry.regions import Spans
engine = Engine(EngineConfig(name="short", directory={directory!r}, transports={transports!r}))
region = engine.allocate(1 << 20)
target = engine.allocate(1 << 20)
held = []
def exhaust():
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass
def relax():
    while held:
        os.close(held.pop())
def failure(call, *arguments):
    try:
        call(*arguments)
    except Exception as error:
        return type(error).__name__ + ": " + str(error)
    return ""
result = {{"addresses": engine.addresses, "ref": region.ref.hex()}}
"""


@pytest.mark.slow
def test_no_free_descriptor_at_accept(make_engine, engine_directory):
    near = make_engine("near")
    with Child(SHORT.format(directory=engine_directory, transports=())) as child:
        facts = child.run("result = {'addresses': engine.addresses}")
        child.run("exhaust()")
        for address in facts["addresses"]:
            with pytest.raises((BusyError, UnreachableError)):
                near.connect(address, 1.0)
        # Not even the spare one is left: the listener rests instead of keeping a core busy.
        child.run("exhaust(); engine.connections._accept; ")
        with pytest.raises((BusyError, UnreachableError)):
            near.connect(facts["addresses"][0], 1.0)
        used = child.run(
            "a = time.process_time(); time.sleep(0.5); result = time.process_time() - a"
        )
        assert used < 0.25, f"{used:.2f} s of work in 0.5 s without descriptors"
        child.run("relax()")
        wait_until(lambda: connects(near, facts["addresses"][0]), "it never recovered")
        child.run("engine.close()")


def connects(engine, address):
    try:
        engine.connect(address, 1.0)
    except (BusyError, UnreachableError):
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "staged", "tcp"])
def test_no_free_descriptor_at_connect_and_describe(make_engine, engine_directory, transport):
    far = make_engine("far", transport)
    first, second = far.allocate(MIB), far.allocate(MIB)
    second.array[:] = 3
    other = make_engine("other", transport)
    setup = SHORT.format(directory=engine_directory, transports=(transport,))
    with Child(setup) as child:
        child.run(f"peer = engine.connect({far.addresses[0]!r}); w = Spans.whole(1 << 20)")
        child.run(f"known = peer.region({first.ref!r}); exhaust()")
        said = child.run(f"result = failure(engine.connect, {other.addresses[0]!r})")
        assert "UnreachableError" in said
        assert "ulimit -n" in said
        if transport == "shm":
            said = child.run(f"result = failure(peer.region, {second.ref!r})")
            assert "RegistrationError" in said
        else:
            said = child.run(
                "result = failure(lambda: engine.read(target, w, known, w, deadline_s=5).wait())"
            )
            assert "Error" in said
        assert "ulimit -n" in said
        child.run("relax()")
        child.run(
            f"peer = engine.connect({far.addresses[0]!r}); again = peer.region({second.ref!r})\n"
            "engine.read(target, w, again, w, deadline_s=5).wait()\n"
            "assert target.array.min() == 3; engine.close()"
        )


# -- forks ---------------------------------------------------------------------------------------


def in_fork(work):
    """Run ``work`` in a forked child; the text it returns."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = work()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return text


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_is_refused_and_the_parent_goes_on(make_engine):
    near, far = make_engine("near"), make_engine("far")
    peer = near.connect(far.addresses[0])
    local, owned = near.allocate(4096), far.allocate(4096)
    remote, whole = peer.region(owned.ref), Spans.whole(4096)

    def in_child():
        calls = [
            lambda: near.allocate(1),
            lambda: near.read(local, whole, remote, whole),
            lambda: near.connect(far.addresses[0]),
            lambda: near.notify(peer, b""),
            lambda: peer.ping(),
            lambda: peer.region(owned.ref),
        ]
        refusals = []
        for call in calls:
            try:
                call()
            except ClosedError as error:
                refusals.append(str(error))
        if len(refusals) != len(calls) or any("before a fork" not in text for text in refusals):
            return f"not refused: {refusals}"
        local.close()
        near.close()
        return "ok"

    assert in_fork(in_child) == "ok"
    peer.ping()
    assert near.read(local, whole, remote, whole).wait(5.0) == 4096


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_keep_connections_alive(make_engine):
    near, far = make_engine("near", "tcp"), make_engine("far", "tcp")
    remote = near.connect(far.addresses[1]).region(far.allocate(MIB).ref)
    near.read(near.allocate(MIB), WHOLE, remote, WHOLE).wait(5.0)
    addresses = far.addresses
    release_r, release_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(release_w)
        os.read(release_r, 1)
        os._exit(0)
    try:
        far.close()
        wait_until(lambda: near.connections.count() == 0, "the peer's end was not seen")
        for address in addresses:
            with pytest.raises(UnreachableError):
                near.connect(address, 2.0)
    finally:
        os.close(release_w)
        os.close(release_r)
        os.waitpid(pid, 0)


def test_closing_in_a_callback_is_refused(make_engine):
    near, far = make_engine("near"), make_engine("far")
    said = []
    done = threading.Event()

    def on_notify(peer, _body):
        for call in (near.close, lambda: near.connect(far.addresses[0]), peer.ping):
            try:
                call()
            except UsageError as error:
                said.append(str(error))
        done.set()

    near.on_notify = on_notify
    far.connect(near.addresses[0])
    (peer,) = far.connections.open_peers()
    far.notify(peer, b"hello")
    assert done.wait(5.0)
    assert len(said) == 3
    near.connect(far.addresses[0]).ping()


def test_addresses_of_a_hello_are_only_hints(make_engine):
    # A peer that claims a Unix socket which does not lead to it is kept by TCP.
    near = make_engine("near")
    liar = make_engine("liar")
    liar.connections.addresses[0] = make_engine("third").addresses[0]
    peer = near.connect(liar.addresses[1])
    assert peer.incarnation == liar.incarnation
    assert peer.sock.family != socket.AF_UNIX
    peer.ping()


def test_an_export_cannot_name_memory_of_somebody_else(make_engine):
    # Who claims to be in this process still reaches no memory but what it was given.
    near, far = make_engine("near", "inproc"), make_engine("far", "inproc")
    given, secret = far.allocate(4096), far.allocate(4096)
    peer = near.connect(far.addresses[0])
    region, hidden = peer.region(given.ref), peer.region(secret.ref)
    forged = replace(region, exports={"inproc": hidden.exports["inproc"]})
    peer.regions[region.region_id] = forged
    target, whole = near.allocate(4096), Spans.whole(4096)
    transfer = near.read(target, whole, forged, whole)
    with pytest.raises(StaleRegionError, match="ask for it again"):
        transfer.wait(5.0)


def test_the_host_is_the_same_for_all_processes():
    assert sockets.host_id() == sockets.host_id() != ""
    assert isinstance(TcpTransport().unavailable(), str)
