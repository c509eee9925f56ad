"""Strangers, forgers and eavesdroppers against real engines: who gets in, and what they learn."""

from __future__ import annotations

import ast
import functools
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import trustme

from kvferry.errors import (
    AuthError,
    BoundsError,
    ConfigError,
    KVFerryError,
    StaleRegionError,
)
from kvferry.launcher import Fleet
from kvferry.protocol import framing, messages
from kvferry.protocol.auth import CallerGreeting, Keys
from kvferry.protocol.messages import (
    Challenge,
    Describe,
    Failure,
    Hello,
    Move,
    Notify,
    Proof,
    Reject,
)
from kvferry.regions import SPANS_MAX, Spans
from kvferry.sockets import Address
from kvferry.testing import conformance
from kvferry.testing.clock import FakeClock
from kvferry.transports.tcp import TcpTransport

from .helpers import MIB, WHOLE, frame, raw_connect, raw_hello, read_message, wait_until

KEY, OTHER = "a-key-for-the-tests-of-kvferry", "another-key-that-is-not-the-same"
SOURCE = Path(__file__).parents[2] / "src" / "kvferry"


def reads(near, far, nbytes=MIB, address=0):
    """One read of random bytes, compared."""
    source, target = far.allocate(nbytes), near.allocate(nbytes)
    source.array[:] = np.random.default_rng(5).integers(0, 256, nbytes, np.uint8)
    remote = near.connect(far.addresses[address]).region(source.ref)
    transfer = near.read(target, Spans.whole(nbytes), remote, Spans.whole(nbytes))
    assert transfer.wait(10.0) == nbytes
    return bool((source.array == target.array).all())


# -- the cluster key -----------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["inproc", "shm", "staged", "tcp"])
def test_engines_with_the_same_key_work_together(make_engine, transport):
    near = make_engine("near", transport, cluster_key=KEY)
    far = make_engine("far", transport, cluster_key=KEY)
    assert reads(near, far)


def test_a_key_is_replaced_while_engines_run(make_engine):
    old = make_engine("old", "tcp", cluster_key=KEY)
    both = make_engine("both", "tcp", cluster_key=f"{OTHER} {KEY}")
    assert reads(both, make_engine("new", "tcp", cluster_key=OTHER))
    # Its first key is unknown to the old engine, so the old one must call.
    assert reads(old, both)


@pytest.mark.parametrize("which", [0, 1], ids=["unix", "tcp"])
@pytest.mark.parametrize(
    ("ours", "theirs", "text"),
    [(KEY, OTHER, "keys of both sides differ"), ("", KEY, "the caller has none"),
     (KEY, "", "it called has none")],
    ids=["other", "caller", "callee"],
)  # fmt: skip
def test_a_wrong_or_missing_key_fails_on_both_sides(make_engine, caplog, which, ours, theirs, text):
    near, far = make_engine("near", cluster_key=ours), make_engine("far", cluster_key=theirs)
    with caplog.at_level(logging.DEBUG, "kvferry"):
        with pytest.raises(AuthError, match=text) as caught:
            near.connect(far.addresses[which])
        wait_until(lambda: any("refused a connection" in t for t in caplog.messages), "no log")
    assert "KVFERRY_CLUSTER_KEY" in str(caught.value)
    assert not caught.value.retryable
    (line,) = [text for text in caplog.messages if "refused a connection" in text]
    assert text in line
    shown = caplog.text + repr(caught.value.as_dict())
    assert KEY not in shown
    assert OTHER not in shown
    assert near.connections.count() == far.connections.count() == 0


def test_a_stranger_is_heard_no_further_than_its_hello(make_engine):
    engine = make_engine("secret-name", cluster_key=KEY)
    heard = []
    engine.on_notify = lambda *said: heard.append(said)
    owned = engine.allocate(4096)
    ask = frame(Describe(1, owned.region.region_id, owned.region.token)) + frame(Notify(b"x"))
    for address in engine.addresses:
        for hello in (raw_hello(), raw_hello(nonce=bytes(32))):
            with raw_connect(address) as sock:
                sock.sendall(hello)
                said = [read_message(sock)]
                if isinstance(said[0], Challenge):
                    sock.sendall(ask)
                    said.append(read_message(sock))
                assert isinstance(said[-1], Reject)
                assert read_message(sock) is None
                assert "secret-name" not in repr(said)
                assert str(Address.parse(engine.addresses[1]).port) not in repr(said)
    assert heard == []
    assert engine.connections.count() == 0


def test_a_stranger_that_never_proves_is_cut_off_in_time(make_engine):
    clock = FakeClock()
    engine = make_engine("far", clock=clock, cluster_key=KEY, connect_s=3.0)
    with raw_connect(engine.addresses[1]) as sock:
        sock.sendall(raw_hello(nonce=bytes(32)))
        assert isinstance(read_message(sock), Challenge)
        clock.advance(2.9)
        assert len(engine.connections._strangers) == 1
        clock.advance(0.2)
        assert read_message(sock) is None
    wait_until(lambda: not engine.connections._strangers, "still kept")


def test_a_flood_of_strangers_does_not_fill_the_log(make_engine, caplog):
    clock = FakeClock()
    engine = make_engine("far", clock=clock, cluster_key=KEY)

    def knock():
        with raw_connect(engine.addresses[1]) as sock:
            sock.sendall(raw_hello())
            assert isinstance(read_message(sock), Reject)
            assert read_message(sock) is None

    with caplog.at_level(logging.WARNING, "kvferry"):
        for _ in range(40):
            knock()
        wait_until(lambda: engine.connections._refusals._left_out == 30, "not left out")
        assert len(caplog.messages) == 10
        clock.advance(11.0)
        knock()
        wait_until(lambda: "(30 more were refused and not logged)" in caplog.text, "not counted")
    assert len(caplog.messages) == 11


def greet(sock, secret, **fields):
    """The caller's half over a raw socket; the callee's hello."""
    made_up = {"incarnation": os.urandom(16), "name": "raw", "purpose": "control", "key": bytes(16)}
    half = CallerGreeting(Hello(**{**made_up, **fields}), Keys([secret.encode()]))
    sock.sendall(framing.encode(half.payload))
    while half.hello is None:
        header = sock.recv(framing.HEADER.size, socket.MSG_WAITALL)
        nbytes, _ = framing.check_header(header, 1 << 20)
        payload = sock.recv(nbytes, socket.MSG_WAITALL)
        answer = half.take(messages.unpack(payload), payload)
        if answer is not None:
            sock.sendall(frame(answer))
    return half.hello


def test_a_recorded_conversation_opens_nothing(make_engine):
    """What a listener on the wire saw is sent again, byte for byte."""
    engine = make_engine("far", "tcp", cluster_key=KEY)
    near = make_engine("near", "tcp", cluster_key=KEY)
    with Relay(engine.addresses[1]) as relay:
        near.connect(relay.address)
        recorded = relay.wait_for(0, lambda said: said.count(b"Proof") == 1)
    near.close()
    with raw_connect(engine.addresses[1]) as sock:
        sock.sendall(recorded)
        assert isinstance(read_message(sock), Challenge)
        reply = read_message(sock)
        assert isinstance(reply, Reject)
        assert reply.code == "auth"


def test_an_impostor_that_has_no_key_is_not_believed(make_engine):
    near = make_engine("near", cluster_key=KEY)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend():
            sock, _ = server.accept()
            with sock:
                assert isinstance(read_message(sock), Hello)
                sock.sendall(frame(Challenge(b"i" * 16, bytes(32))))
                assert isinstance(read_message(sock), Proof)
                sock.sendall(raw_hello(incarnation=b"i" * 16) + frame(Proof(bytes(32))))
                sock.recv(1)

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(AuthError, match="proof of the cluster key is wrong"):
            near.connect(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        thread.join()


# -- lanes ---------------------------------------------------------------------------------------


def test_a_lane_needs_a_proof_of_its_own(make_engine):
    engine = make_engine("far", "tcp", cluster_key=KEY)
    ours, stranger = os.urandom(16), os.urandom(16)
    with raw_connect(engine.addresses[1]) as control:
        lane_key = greet(control, KEY, incarnation=ours).key
        for fields in ({}, {"nonce": bytes(32)}):
            with raw_connect(engine.addresses[1]) as lane:
                lane.sendall(raw_hello(incarnation=ours, purpose="tcp", key=lane_key, **fields))
                reply = read_message(lane)
                if isinstance(reply, Challenge):
                    lane.sendall(frame(Proof(bytes(32))))
                    reply = read_message(lane)
                assert reply.code == "auth"
        # A proof for one session's lane is none for another's, nor without a session.
        with raw_connect(engine.addresses[1]) as other:
            greet(other, KEY, incarnation=stranger)
            for fields in (
                {"incarnation": stranger, "key": lane_key},
                {"incarnation": ours, "key": bytes(16)},
                {"incarnation": os.urandom(16), "key": lane_key},
            ):
                with raw_connect(engine.addresses[1]) as lane, pytest.raises(KVFerryError) as why:
                    greet(lane, KEY, purpose="tcp", **fields)
                assert "needs an open session of the same peer" in str(why.value)
        with raw_connect(engine.addresses[1]) as lane:
            assert greet(lane, KEY, incarnation=ours, purpose="tcp", key=lane_key).purpose


def test_a_peer_gets_no_lane_key_of_another(make_engine):
    engine = make_engine("far", "tcp")
    keys = set()
    for _ in range(3):
        with raw_connect(engine.addresses[1]) as sock:
            sock.sendall(raw_hello())
            keys.add(read_message(sock).key)
    assert len(keys) == 3


# -- regions -------------------------------------------------------------------------------------


@pytest.fixture
def lane(make_engine):
    """(engine, its region, a function that sends a Move and returns the answer)."""
    engine = make_engine("far", "tcp")
    owned = engine.allocate(4096, access="read-write")
    incarnation = os.urandom(16)
    with raw_connect(engine.addresses[1]) as control, raw_connect(engine.addresses[1]) as sock:
        control.sendall(raw_hello(incarnation=incarnation))
        key = read_message(control).key
        sock.sendall(raw_hello(incarnation=incarnation, purpose="tcp", key=key))
        assert isinstance(read_message(sock), Hello)

        def ask(offsets, lengths, **fields):
            region = owned.region
            values = {
                "transfer_id": 1,
                "write": False,
                "region_id": region.region_id,
                "token": region.token,
                "generation": region.generation,
                "offsets": np.array(offsets, "<i8").tobytes(),
                "lengths": np.array(lengths, "<i8").tobytes(),
                "deadline_s": 5.0,
            }
            sock.sendall(frame(Move(**{**values, **fields})))
            return read_message(sock)

        yield engine, owned, ask


HUGE = 2**63 - 1


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize(
    ("offsets", "lengths"),
    [([4096], [1]), ([0], [4097]), ([HUGE], [1]), ([HUGE], [HUGE]), ([1], [HUGE]), ([-1], [2]),
     ([-8], [4]), ([0], [-1]), ([2**62] * 4, [2**62] * 4), ([0, 4090], [8, 8]),
     ([0] * 9, [HUGE] * 9), ([-HUGE - 1], [HUGE]), ([0, 0], [4096, -4096])],
    ids=str,
)  # fmt: skip
def test_spans_outside_are_refused_by_the_owner(lane, offsets, lengths, write):
    _, owned, ask = lane
    owned.array[:] = 9
    reply = ask(offsets, lengths, write=write)
    assert isinstance(reply, Failure)
    assert reply.code in ("bounds", "usage")
    # The lane is still in step, and nothing was written.
    assert ask([0], [0]).nbytes == 0
    assert owned.array.min() == 9


def test_too_many_spans_are_refused(lane):
    _, _, ask = lane
    many = np.zeros(SPANS_MAX + 1, "<i8")
    reply = ask(many, many)
    assert reply.code == "usage"


def test_a_token_opens_its_own_region_only(make_engine, lane):
    engine, owned, ask = lane
    second = engine.allocate(4096)
    elsewhere = make_engine("elsewhere").allocate(4096)
    flipped = bytes([owned.region.token[0] ^ 1, *owned.region.token[1:]])
    answers = [
        ask([0], [8], **fields)
        for fields in (
            {"token": flipped},
            {"token": bytes(16)},
            {"token": second.region.token},
            {"token": elsewhere.region.token},
            {"region_id": second.region.region_id},
            {"region_id": 2**61},
            {"generation": owned.region.generation + 1},
        )
    ]
    assert {reply.code for reply in answers} == {"stale_region"}
    # Whether there is such a region at all is not told.
    assert len({reply.message for reply in answers[:4]}) == 1


def test_a_region_of_another_engine_cannot_be_described(make_engine):
    near, far, third = (make_engine(name) for name in ("near", "far", "third"))
    ref = third.allocate(4096).ref
    far.allocate(4096)
    with pytest.raises(StaleRegionError):
        near.connect(far.addresses[0]).region(ref)


def test_what_is_read_only_cannot_be_written(lane):
    engine, _, ask = lane
    read_only = engine.allocate(4096).region
    fields = {"region_id": read_only.region_id, "token": read_only.token}
    reply = ask([0], [8], write=True, generation=read_only.generation, **fields)
    assert reply.code == BoundsError.code


# -- TLS -----------------------------------------------------------------------------------------


def certificates(folder, authority):
    """Settings of an engine with a certificate of an authority."""
    issued = authority.issue_cert("engine.local")
    paths = {name: str(folder / f"{name}.pem") for name in ("tls_cert", "tls_key", "tls_ca")}
    issued.cert_chain_pems[0].write_to_path(paths["tls_cert"])
    issued.private_key_pem.write_to_path(paths["tls_key"])
    authority.cert_pem.write_to_path(paths["tls_ca"])
    return paths


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    return certificates(tmp_path_factory.mktemp("tls"), trustme.CA())


@pytest.fixture(scope="module")
def other_tls(tmp_path_factory):
    return certificates(tmp_path_factory.mktemp("other"), trustme.CA())


class Relay:
    """A wire tap: passes every connection on to an engine, and keeps what both sides say.

    said: bytes from the callers, and from the engine.
    """

    def __init__(self, target, change=None):
        self.said = [b"", b""]
        self._target = Address.parse(target)
        self._change = change or (lambda _direction, data: data)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._came = threading.Condition()
        self._sockets = []
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def _run(self):
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            far = socket.create_connection((self._target.host, self._target.port))
            self._sockets += [near, far]
            for direction, (source, target) in enumerate(((near, far), (far, near))):
                thread = threading.Thread(target=self._pass, args=(direction, source, target))
                self._threads.append(thread)
                thread.start()

    def _pass(self, direction, source, target):
        try:
            while data := source.recv(1 << 16):
                with self._came:
                    self.said[direction] += data
                    self._came.notify_all()
                target.sendall(self._change(direction, data))
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def wait_for(self, direction, condition):
        with self._came:
            assert self._came.wait_for(lambda: condition(self.said[direction]), 5.0)
            return self.said[direction]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for sock in self._sockets:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        for thread in self._threads:
            thread.join(5.0)
        for sock in self._sockets:
            sock.close()


def without_unix(monkeypatch):
    """Keep a dial on TCP although the engines share a directory."""
    monkeypatch.setattr("kvferry.connections.Connections.unix_address_of", lambda *_: None)


@pytest.mark.parametrize("key", ["", KEY], ids=["", "key"])
def test_tls_carries_sessions_and_lanes(make_engine, monkeypatch, tls, key):
    without_unix(monkeypatch)
    near = make_engine("near", "tcp", cluster_key=key, **tls)
    far = make_engine("far", "tcp", cluster_key=key, **tls)
    assert reads(near, far, 5 * MIB + 3, address=1)
    (peer,) = near.connections.open_peers()
    assert peer.address.startswith("tcp:")
    assert peer.ping() < 5.0


def test_nothing_is_readable_on_the_wire_with_tls_and_is_without(make_engine, monkeypatch, tls):
    without_unix(monkeypatch)
    mark = b"the prompt of a user "
    for settings in (tls, {}):
        near = make_engine("near", "tcp", **settings)
        far = make_engine("secret-name", "tcp", **settings)
        with Relay(far.addresses[1]) as relay:
            # The lane goes through the tap as well.
            far.connections.addresses[1] = relay.address
            source, target = far.allocate(4200), near.allocate(4200)
            source.array[:] = np.frombuffer(mark * 200, np.uint8)
            remote = near.connect(relay.address).region(source.ref)
            assert near.read(target, Spans.whole(4200), remote, Spans.whole(4200)).wait(5.0)
            assert target.array.tobytes() == mark * 200
            seen = relay.said[0] + relay.said[1]
            near.close()
            far.close()
        secrets = [mark, b"secret-name", b"KVFY", source.ref[8:]]
        assert [secret in seen for secret in secrets] == [not settings] * len(secrets)


def test_bytes_that_were_changed_on_the_way_end_the_lane(make_engine, monkeypatch, tls):
    without_unix(monkeypatch)
    near, far = make_engine("near", "tcp", **tls), make_engine("far", "tcp", **tls)
    spoil = threading.Event()

    def change(direction, data):
        if direction == 1 and spoil.is_set() and len(data) > 1000:
            return data[:500] + bytes([data[500] ^ 1]) + data[501:]
        return data

    with Relay(far.addresses[1], change) as relay:
        far.connections.addresses[1] = relay.address
        source, target = far.allocate(MIB), near.allocate(MIB)
        source.array[:] = 7
        remote = near.connect(relay.address).region(source.ref)
        spoil.set()
        with pytest.raises(AuthError, match="TLS"):
            near.read(target, WHOLE, remote, WHOLE).wait(5.0)
        near.close()
        far.close()


def test_a_certificate_of_another_authority_fails_on_both_sides(
    make_engine, caplog, tls, other_tls
):
    near, far = make_engine("near", **other_tls), make_engine("far", **tls)
    with caplog.at_level(logging.WARNING, "kvferry"):
        with pytest.raises(AuthError, match="TLS: certificate") as caught:
            near.connect(far.addresses[1])
        wait_until(lambda: "refused a connection" in caplog.text, "not logged")
    assert "tls_cert, tls_key and tls_ca on both sides" in str(caught.value)
    assert "TLS" in caplog.text


@pytest.mark.parametrize("with_tls", ["caller", "callee"])
def test_tls_on_one_side_only_says_so(make_engine, caplog, tls, with_tls):
    near = make_engine("near", **(tls if with_tls == "caller" else {}))
    far = make_engine("far", **(tls if with_tls == "callee" else {}))
    with caplog.at_level(logging.WARNING, "kvferry"):
        with pytest.raises(AuthError, match="TLS") as caught:
            near.connect(far.addresses[1])
        wait_until(lambda: "refused a connection" in caplog.text, "not logged")
    assert "on both sides" in str(caught.value)
    assert "TLS" in caplog.text


def test_the_plan_says_that_a_path_is_encrypted(make_engine, monkeypatch, tls):
    without_unix(monkeypatch)
    for settings, wanted in ((tls, True), ({}, False)):
        near, far = make_engine("near", "tcp", **settings), make_engine("far", "tcp", **settings)
        remote = near.connect(far.addresses[1]).region(far.allocate(4096).ref)
        plan = near.plan(near.allocate(4096), remote, nbytes=4096)
        assert ("encrypted by TLS" in plan.explain()) == wanted
        near.close()
        far.close()


@pytest.mark.slow
@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_tcp_with_tls_passes_the_checks_of_every_transport(check, monkeypatch, tls):
    from kvferry.testing import pairs

    without_unix(monkeypatch)
    config = functools.partial(pairs.EngineConfig, **tls)
    monkeypatch.setattr(pairs, "EngineConfig", config)
    conformance.run_check(check, TcpTransport, local="plain", remote="plain")


# -- where to listen, and the secret in the open -------------------------------------------------


def test_an_engine_refuses_to_listen_beyond_loopback_unless_secured(make_engine, tls):
    with pytest.raises(ConfigError, match="beyond loopback") as caught:
        make_engine("far", listen="0.0.0.0:0", advertise="127.0.0.2")
    assert "KVFERRY_CLUSTER_KEY" in caught.value.fix
    for settings in ({"cluster_key": KEY}, tls, {"insecure": True}):
        # 127.0.0.0/8 does not count as beyond, so the advertised one stands for this machine.
        engine = make_engine("far", listen="0.0.0.0:0", advertise="192.0.2.1", **settings)
        assert engine.addresses[1].startswith("tcp://192.0.2.1:")
        engine.close()


@pytest.mark.slow
def test_the_command_refuses_too_and_says_what_to_set():
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KVFERRY_")}
    command = [sys.executable, "-m", "kvferry.cli.main", "engine", "--listen", "0.0.0.0:0"]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "beyond loopback" in said
    assert "KVFERRY_CLUSTER_KEY" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_fleet_that_listens_beyond_loopback_makes_a_key_and_shows_it_nowhere(monkeypatch):
    monkeypatch.setenv("KVFERRY_ADVERTISE", "192.0.2.1")
    for name in ("KVFERRY_CLUSTER_KEY", "KVFERRY_INSECURE"):
        monkeypatch.delenv(name, raising=False)
    lines = []
    flags = ["--listen", "0.0.0.0:0", "--log-level", "debug"]
    fleet = Fleet("tiny", log=lambda *line: lines.append(line[1]), engine_flags=flags)
    key = fleet._env["KVFERRY_CLUSTER_KEY"]
    assert len(key) == 64
    with fleet:
        body = json.dumps({"prompt": "The ferry", "max_tokens": 4}).encode()
        done = fetch(fleet.router_url + "/v1/completions", body)
        state = fetch(fleet.decode_urls[0] + "/debug/state")
        shown = [state, fetch(fleet.decode_urls[0] + "/metrics"), done, "\n".join(lines)]
        for process in fleet.processes.values():
            with open(f"/proc/{process.pid}/cmdline", encoding="utf-8") as file:
                shown.append(file.read())
    assert json.loads(state)["connector"]["recent_claims"], "nothing was handed off"
    assert not any(key in text for text in shown)


def fetch(url, body=None):
    import urllib.request

    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return response.read().decode()


def test_a_fleet_makes_no_key_where_none_is_needed():
    bare = {"KVFERRY_CLUSTER_KEY": "", "KVFERRY_INSECURE": ""}
    beyond = {**bare, "KVFERRY_LISTEN": "0.0.0.0:7600"}
    assert not Fleet("tiny", env=bare)._env["KVFERRY_CLUSTER_KEY"]
    assert not Fleet("tiny", env=bare, engine_flags=["--listen", "127.0.0.1:0"])._env[
        "KVFERRY_CLUSTER_KEY"
    ]
    assert Fleet("tiny", env=beyond)._env["KVFERRY_CLUSTER_KEY"]
    assert Fleet("tiny", env=bare, engine_flags=["--listen=0.0.0.0:0"])._env["KVFERRY_CLUSTER_KEY"]
    for name in ("INSECURE", "CLUSTER_KEY_FILE", "TLS_CERT"):
        fleet = Fleet("tiny", env={**beyond, f"KVFERRY_{name}": "1"})
        assert not fleet._env["KVFERRY_CLUSTER_KEY"]
    mine = Fleet("tiny", env={**beyond, "KVFERRY_CLUSTER_KEY": KEY})
    assert mine._env["KVFERRY_CLUSTER_KEY"] == KEY


def test_an_engines_state_shows_no_key(make_engine):
    near, far = make_engine("near", cluster_key=KEY), make_engine("far", cluster_key=KEY)
    reads(near, far)
    shown = [near.config, near.statistics(), near.connections, near.connections.security,
             near.connections.security.keys, *near.connections.open_peers()]  # fmt: skip
    assert KEY not in repr([repr(item) for item in shown])


# -- no code from outside ------------------------------------------------------------------------

FORBIDDEN = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: p.stem)
def test_nothing_is_unpickled_or_evaluated(path):
    # The child of the tests runs what its parent, the test, sends it; no product code uses it.
    may_execute = path.relative_to(SOURCE).as_posix() == "testing/child.py"
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        assert not FORBIDDEN & {name.partition(".")[0] for name in names}, ast.unparse(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not may_execute:
            assert node.func.id not in ("eval", "exec"), ast.unparse(node)
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert ast.unparse(node.value) == "False"
