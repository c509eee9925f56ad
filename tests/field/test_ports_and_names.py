"""Kinds of fault around reaching a peer: ports, names, IPv6, and what a refusal says."""

from __future__ import annotations

import os
import socket
import threading
from functools import partial

import numpy as np
import pytest

from kvferry.errors import ConfigError, PeerLostError, UnreachableError
from kvferry.protocol import framing, messages
from kvferry.protocol.messages import Describe, Hello, Move
from kvferry.regions import Spans
from kvferry.sockets import Address
from kvferry.testing import FakeClock
from kvferry.testing.conformance import failure, wait_until

NBYTES = 1 << 20
WHOLE = Spans.whole(NBYTES)


def has_ipv6() -> bool:
    """Whether this machine has the IPv6 loopback."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


def in_threads(count, work):
    """Run ``work(i)`` in as many threads, begun at one moment. Raises the first error."""
    barrier, failures = threading.Barrier(count), []

    def run(i):
        barrier.wait(5.0)
        try:
            work(i)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


@pytest.mark.slow
def test_engines_that_start_at_one_moment_get_ports_of_their_own(make_engine):
    engines, lock = {}, threading.Lock()

    def start(i):
        engine = make_engine(f"engine-{i}", "tcp")
        with lock:
            engines[engine.addresses[1]] = engine

    in_threads(24, start)
    assert len(engines) == 24
    assert len({engine.incarnation for engine in engines.values()}) == 24
    caller = make_engine("caller", "tcp")
    for address, engine in engines.items():
        peer = caller.connect(address)
        assert (peer.incarnation, peer.name) == (engine.incarnation, engine.config.name)


def test_a_transfer_never_reaches_whoever_took_over_the_port(make_engine):
    near, old = make_engine("near", "tcp"), make_engine("old", "tcp")
    source = old.allocate(NBYTES)
    remote = near.connect(old.addresses[1]).region(source.ref)
    port = old.addresses[1].rpartition(":")[2]
    old.close()
    wait_until(lambda: near.connections.count() == 0, "the end was not noticed")
    new = make_engine("new", "tcp", listen=f"127.0.0.1:{port}")
    theirs = new.allocate(NBYTES)
    assert theirs.region.region_id == remote.region_id
    theirs.array[:] = 1
    local = near.allocate(NBYTES)
    # Also when the newcomer is connected, so that it is not for want of a lane.
    near.connect(new.addresses[1])
    error = failure(near.read, local, WHOLE, remote, WHOLE)
    assert isinstance(error, PeerLostError)
    assert not local.array.any()


# -- IPv6 ----------------------------------------------------------------------------------------


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_everything_works_on_ipv6_alone(make_engine, tmp_path):
    # Directories of their own, so that no Unix socket is shared.
    near, far = (
        make_engine(name, "tcp", listen="[::1]:0", directory=str(tmp_path / name))
        for name in ("near", "far")
    )
    (address,) = [text for text in far.addresses if text.startswith("tcp")]
    assert address.startswith("tcp://[::1]:")
    source = far.allocate(NBYTES)
    source.array[:] = 5
    local, peer = near.allocate(NBYTES), near.connect(address)
    assert near.read(local, WHOLE, peer.region(source.ref), WHOLE).wait(5.0) == NBYTES
    assert local.array.min() == 5


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_a_listener_on_all_addresses_is_reached_over_both_families(make_engine, tmp_path):
    far = make_engine("far", "tcp", listen="[::]:0", insecure=True, advertise="192.0.2.7")
    port = far.addresses[-1].rpartition(":")[2]
    for number, host in enumerate(("127.0.0.1", "[::1]")):
        near = make_engine(f"near-{number}", "tcp", directory=str(tmp_path / str(number)))
        assert near.connect(f"tcp://{host}:{port}").incarnation == far.incarnation


@pytest.mark.parametrize(
    "text", ["tcp://[fe80::1%eth0]:7600", "tcp://[fd00::5]:1", "tcp://h:65535"]
)
def test_an_address_with_brackets_and_zone_comes_back_as_it_went(text):
    assert str(Address.parse(text)) == text


# -- three ways not to answer ----------------------------------------------------------------------


def test_refused_silent_and_unroutable_peers_are_told_apart(make_engine):
    clock = FakeClock()
    near = make_engine("near", "tcp", clock=clock, connect_s=3.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    texts = [str(failure(near.connect, f"tcp://127.0.0.1:{port}"))]
    silent, full = socket.create_server(("127.0.0.1", 0)), socket.socket()
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    waiting = [socket.socket() for _ in range(4)]
    for sock in waiting:
        sock.setblocking(False)
        sock.connect_ex(full.getsockname())
    for server in (silent, full):
        port, errors = server.getsockname()[1], []
        attempt = partial(failure, near.connect, f"tcp://127.0.0.1:{port}", 2.0)
        thread = threading.Thread(target=lambda f=attempt, into=errors: into.append(f()))
        thread.start()
        wait_until(lambda: near.connections._dialling, "it does not dial")
        if server is silent:
            accepted, _ = silent.accept()
            waiting.append(accepted)
            assert len(accepted.recv(16)) == 16  # The hello is there, and nobody answers it.
        clock.advance(5.1)
        thread.join(5.0)
        texts.append(str(errors[0]))
    for sock in (silent, full, *waiting):
        sock.close()
    for text in texts:
        assert "127.0.0.1:" in text, text
        assert "stage connect" in text or "stage hello" in text, text
        assert "; " in text, text
    assert len({text.split("127.0.0.1")[0] for text in texts}) >= 2, texts
    assert len({text.partition("; ")[2] for text in texts}) == 3, texts


def test_a_transfer_that_ends_names_peer_path_stage_and_bytes(make_engine):
    near, far = make_engine("near", "tcp"), make_engine("far", "tcp")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        far.connections.addresses[1] = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        remote = near.connect(far.addresses[0]).region(far.allocate(NBYTES).ref)
        transfer = near.read(near.allocate(NBYTES), WHOLE, remote, WHOLE, deadline_s=0.1)
        error = failure(transfer.wait, 5.0)
    assert (error.peer, error.path) == ("far", "tcp/pull")
    assert error.stage in ("connect", "move")
    assert error.bytes_done == 0
    assert error.code == "deadline"


# -- clients that vanish -------------------------------------------------------------------------


def frame(message):
    return framing.encode(messages.pack(message), limit=1 << 30)


def hello(incarnation, **fields):
    made_up = {"incarnation": incarnation, "name": "gone", "purpose": "control", "key": bytes(16)}
    return frame(Hello(**{**made_up, **fields}))


def receive(sock):
    header = sock.recv(framing.HEADER.size, socket.MSG_WAITALL)
    nbytes, _ = framing.check_header(header, 1 << 30)
    return messages.unpack(sock.recv(nbytes, socket.MSG_WAITALL))


def dial(engine):
    where = Address.parse(engine.addresses[1])
    return socket.create_connection((where.host, where.port), 5.0)


def test_clients_that_vanish_at_any_step_leave_nothing(make_engine):
    far = make_engine("far", "tcp")
    owned = far.allocate(8 * NBYTES, access="read-write")
    region, me = owned.region, os.urandom(16)

    def move(write):
        return frame(
            Move(
                transfer_id=1,
                write=write,
                region_id=region.region_id,
                token=region.token,
                generation=region.generation,
                offsets=np.array([0], "<i8").tobytes(),
                lengths=np.array([8 * NBYTES], "<i8").tobytes(),
                deadline_s=5.0,
            )
        )

    greeting = hello(me)
    asked = frame(Describe(1, region.region_id, region.token))
    for cut in (0, 3, 11, len(greeting) - 1, len(greeting)):
        with dial(far) as sock:
            sock.sendall(greeting[:cut])
    for cut in (1, 12, len(asked) - 1, len(asked)):
        with dial(far) as sock:
            sock.sendall(greeting)
            receive(sock)
            sock.sendall(asked[:cut])
    for write in (False, True):
        head = move(write)
        for cut in (0, 5, len(head) // 2, len(head)):
            with dial(far) as control, dial(far) as lane:
                control.sendall(greeting)
                key = receive(control).key
                lane.sendall(hello(me, purpose="tcp", key=key))
                receive(lane)
                lane.sendall(head[:cut])
                if cut == len(head):
                    receive(lane)  # Ready: now bytes would flow.
                    if write:
                        lane.sendall(bytes(1000))
                    else:
                        assert len(lane.recv(1000)) > 0
    wait_until(lambda: owned.users == 0, "the region stays in use")
    wait_until(lambda: far.connections.count() == 0, "a peer is left")
    wait_until(lambda: far.transports["tcp"].statistics()["lanes_served"] == 0, "a lane is left")
    near = make_engine("near", "tcp")
    remote, local = near.connect(far.addresses[0]).region(owned.ref), near.allocate(8 * NBYTES)
    whole = Spans.whole(8 * NBYTES)
    assert near.read(local, whole, remote, whole).wait(5.0) == 8 * NBYTES


# -- how many sockets ------------------------------------------------------------------------------


def sockets():
    """How many sockets this process has."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        except OSError:
            continue  # It was the descriptor of the listing itself.
    return found


@pytest.mark.slow
def test_many_senders_share_few_sockets_and_a_dead_peers_go_at_once(make_engine):
    near = make_engine("near", "tcp", lanes_max=2)
    far = make_engine("far", "tcp")
    port = far.addresses[1].rpartition(":")[2]
    start, local = sockets(), near.allocate(NBYTES)

    def storm(owner):
        remote = near.connect(owner.addresses[1]).region(owner.allocate(NBYTES).ref)
        seen = []

        def work(_):
            for _ in range(20):
                near.read(local, Spans.whole(4096), remote, Spans.whole(4096)).wait(5.0)
                seen.append(sockets())

        in_threads(10, work)
        return max(seen)

    # Two lanes and one session, both of whose ends are in this process.
    assert storm(far) <= start + 2 * (2 + 1)
    far.close()
    wait_until(lambda: sockets() <= start - 2, "sockets of a dead peer are left")
    again = make_engine("again", "tcp", listen=f"127.0.0.1:{port}")
    assert storm(again) <= start + 2 * (2 + 1)


def test_a_port_that_is_taken_is_no_random_other_one(make_engine):
    first = make_engine("first", "tcp")
    port = first.addresses[1].rpartition(":")[2]
    with pytest.raises(ConfigError, match="another process holds the port: use port 0"):
        make_engine("second", "tcp", listen=f"127.0.0.1:{port}")
    assert isinstance(failure(first.connect, "tcp://127.0.0.1:1"), UnreachableError)
