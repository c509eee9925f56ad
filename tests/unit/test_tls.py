"""TLS without a network: what two tunnels say to each other, and whom they believe."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import trustme

from kvferry.errors import AuthError, ConfigError
from kvferry.tls import CHUNK_BYTES, Contexts, TlsSocket, Tunnel


class Files(NamedTuple):
    """Paths of one engine's certificate, its key and the authority."""

    cert: str
    key: str
    ca: str


def write(folder: Path, authority: trustme.CA, name: str) -> Files:
    issued = authority.issue_cert(name)
    files = Files(*(str(folder / f"{name}.{kind}") for kind in Files._fields))
    issued.cert_chain_pems[0].write_to_path(files.cert)
    issued.private_key_pem.write_to_path(files.key)
    authority.cert_pem.write_to_path(files.ca)
    return files


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write(tmp_path_factory.mktemp("ours"), trustme.CA(), "engine.local")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write(tmp_path_factory.mktemp("theirs"), trustme.CA(), "other.local")


def tunnels(near: Files, far: Files) -> tuple[Tunnel, Tunnel]:
    return Contexts(*near).tunnel(caller=True), Contexts(*far).tunnel(caller=False)


def flow(near: Tunnel, far: Tunnel) -> tuple[bytes, bytes]:
    """Carry bytes until both are silent; what each of them read."""
    got = [b"", b""]
    while True:
        there, back = near.seal(b""), far.seal(b"")
        if not there and not back:
            return got[0], got[1]
        if there:
            got[1] += far.open(there)
        if back:
            got[0] += near.open(back)


def test_what_is_said_before_the_handshake_arrives_after_it(ours: Files) -> None:
    near, far = tunnels(ours, ours)
    first = near.seal(b"hello")
    assert b"hello" not in first
    assert far.open(first) == b""
    answer = far.seal(b"and you")
    assert near.open(answer) == b""
    assert flow(near, far) == (b"and you", b"hello")
    assert "TLSv1.3" in repr(near)


def test_an_idle_tunnel_says_nothing(ours: Files) -> None:
    near, far = tunnels(ours, ours)
    flow(near, far)
    assert near.seal(b"") == far.seal(b"") == b""
    assert near.is_empty()
    assert far.is_empty()


@pytest.mark.parametrize("stranger", ["caller", "callee"])
def test_a_certificate_of_another_authority_is_refused(
    ours: Files, theirs: Files, stranger: str
) -> None:
    pair = (theirs, ours) if stranger == "caller" else (ours, theirs)
    near, far = tunnels(*pair)
    with pytest.raises(AuthError, match="TLS") as caught:
        flow(near, far)
    assert "tls_ca on both sides" in caught.value.fix


def test_who_shows_no_certificate_is_refused(ours: Files) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(ours.ca)
    far = Contexts(*ours).tunnel(caller=False)
    with pytest.raises(AuthError, match="did not return a certificate"):
        flow(Tunnel(context, caller=True), far)


def test_an_older_version_is_refused(ours: Files) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(ours.ca)
    context.load_cert_chain(ours.cert, ours.key)
    with pytest.raises(AuthError, match="TLS"):
        flow(Tunnel(context, caller=True), Contexts(*ours).tunnel(caller=False))


@pytest.mark.parametrize("noise", [b"KVFY" + bytes(60), b"GET / HTTP/1.1\r\n\r\n", bytes(100)])
def test_noise_is_refused(ours: Files, noise: bytes) -> None:
    with pytest.raises(AuthError, match="TLS"):
        Contexts(*ours).tunnel(caller=False).open(noise)


def test_one_wrong_bit_is_noticed(ours: Files) -> None:
    near, far = tunnels(ours, ours)
    flow(near, far)
    sealed = bytearray(near.seal(b"x" * 100))
    sealed[50] ^= 1
    with pytest.raises(AuthError, match="TLS"):
        far.open(bytes(sealed))


@pytest.mark.parametrize(
    ("which", "text"), [("ca", "tls_ca="), ("cert", "tls_cert="), ("key", "tls_key=")]
)
def test_a_bad_file_names_its_setting(ours: Files, tmp_path: Path, which: str, text: str) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_text("nonsense")
    for path in (str(bad), str(tmp_path / "missing")):
        with pytest.raises(ConfigError) as caught:
            Contexts(**ours._replace(**{which: path})._asdict())
        assert text in str(caught.value)


def test_a_key_of_another_certificate_is_refused(ours: Files, theirs: Files) -> None:
    with pytest.raises(ConfigError, match="mismatch"):
        Contexts(ours.cert, theirs.key, ours.ca)


@pytest.fixture
def joined(ours: Files) -> Iterator[tuple[TlsSocket, TlsSocket]]:
    server = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(server.getsockname())
    far, _ = server.accept()
    server.close()
    a, b = tunnels(ours, ours)
    with TlsSocket(near, a) as left, TlsSocket(far, b) as right:
        yield left, right


def exactly(sock: socket.socket, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    view = memoryview(data)
    while view:
        got = sock.recv_into(view)
        assert got
        view = view[got:]
    return bytes(data)


def test_sockets_carry_bytes_both_ways_and_never_plain(
    joined: tuple[TlsSocket, TlsSocket],
) -> None:
    near, far = joined
    payload = os.urandom(3 * CHUNK_BYTES + 17)
    got: list[bytes] = []

    def answer() -> None:
        got.append(exactly(far, len(payload)))
        far.send(b"done")

    thread = threading.Thread(target=answer)
    thread.start()
    view = memoryview(payload)
    # The handshake needs the other side's words, and comes with the first receive.
    near.send(b"")
    while view:
        view = view[near.send(view) :]
    assert exactly(near, 4) == b"done"
    thread.join()
    assert got == [payload]


def test_a_full_socket_takes_the_same_bytes_later(joined: tuple[TlsSocket, TlsSocket]) -> None:
    near, far = joined
    thread = threading.Thread(target=lambda: exactly(far, 1))
    thread.start()
    near.send(b"a")
    far_said = threading.Event()
    reader = threading.Thread(target=lambda: (near.recv(1), far_said.set()))
    reader.start()
    thread.join()
    far.send(b"b")
    reader.join()
    assert far_said.is_set()
    near.setblocking(False)
    payload = os.urandom(CHUNK_BYTES)
    sent = b""
    stalls = 0
    while stalls < 2:
        try:
            near.send(payload)
            sent += payload
        except BlockingIOError:
            stalls += 1
    received: list[bytes] = []
    thread = threading.Thread(
        target=lambda: received.append(exactly(far, len(sent) + len(payload)))
    )
    thread.start()
    near.setblocking(True)
    # The call that raised is made again, and its bytes arrive once.
    assert near.send(payload) == len(payload)
    thread.join()
    assert received == [sent + payload]


def test_the_end_of_the_stream_is_empty(joined: tuple[TlsSocket, TlsSocket]) -> None:
    near, far = joined
    far.shutdown(socket.SHUT_RDWR)
    assert near.recv_into(bytearray(1)) == 0
