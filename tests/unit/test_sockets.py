"""Addresses, name service, listening and the sweep."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import subprocess
import threading
from contextlib import closing, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry import sockets
from kvferry.errors import ConfigError, RegistrationError, UnreachableError
from kvferry.sockets import Address

# -- addresses -------------------------------------------------------------------------------------

names = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True)
hosts = st.one_of(names, st.ip_addresses(v=4).map(str), st.ip_addresses(v=6).map(str))
paths = st.from_regex(r"/[^/\0][^\0]{0,40}", fullmatch=True)
addresses = st.one_of(
    st.builds(Address, st.just("tcp"), hosts, st.integers(0, 65535)),
    st.builds(Address, st.just("unix"), paths),
)


@given(addresses)
def test_an_address_survives_being_written(address: Address) -> None:
    assert Address.parse(str(address)) == address


@given(st.one_of(st.text(max_size=30), addresses.map(str).map(lambda text: text[:-1] + "²")))
def test_any_text_is_an_address_or_a_config_error(text: str) -> None:
    with suppress(ConfigError):
        assert isinstance(Address.parse(text), Address)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/x.sock", Address("unix", "/run/x.sock")),
        ("unix:///run/x.sock", Address("unix", "/run/x.sock")),
        ("tcp://[fd00::5]:7600", Address("tcp", "fd00::5", 7600)),
        ("tcp://10.0.0.5:7600", Address("tcp", "10.0.0.5", 7600)),
        ("node-1:7600", Address("tcp", "node-1", 7600)),
        (":7600", Address("tcp", "127.0.0.1", 7600)),
    ],
)
def test_the_ways_to_write_an_address(text: str, address: Address) -> None:
    assert Address.parse(text) == address


@pytest.mark.parametrize(
    "text",
    [
        "", "host", "host:", "host:x", "host:-1", "host:65536", "host:²", "host:٣",
        "host:" + "9" * 5000,
        "fd00::5:7600", "[fd00::5:7600", "fd00::5]:7600", "[[::1]]:1", "[a:1", "a\0b:1",
        "unix:", "unix:run/x.sock", "unix:/a\0b",
    ],
    ids=lambda text: repr(text[:20]),
)  # fmt: skip
def test_bad_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        Address.parse(text)


@pytest.mark.parametrize(
    ("host", "is_it"),
    [
        ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True),
        ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("node-1", False),
    ],
)  # fmt: skip
def test_loopback_hosts(host: str, is_it: bool) -> None:
    assert sockets.is_loopback(host) is is_it


# -- name service ----------------------------------------------------------------------------------


def answer(monkeypatch: pytest.MonkeyPatch, *numeric: str) -> None:
    """Let every name resolve to these addresses."""

    def look_up(_: str, port: int, **__: object) -> list[tuple[object, ...]]:
        found = []
        for text in numeric:
            v6 = ipaddress.ip_address(text).version == 6
            family = socket.AF_INET6 if v6 else socket.AF_INET
            found.append((family, socket.SOCK_STREAM, 6, "", (text, port)))
        return found

    monkeypatch.setattr(socket, "getaddrinfo", look_up)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_numeric_host_needs_no_thread(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, host)
    monkeypatch.setattr(threading, "Thread", None)
    [(_, where)] = sockets.resolve(host, 7600, 0.0)
    assert where[:2] == (host, 7600)


def test_a_name_service_that_hangs_costs_the_deadline_only(monkeypatch: pytest.MonkeyPatch) -> None:
    release, inside = threading.Event(), threading.Event()
    threads: list[threading.Thread] = []

    def hang(*_: object, **__: object) -> list[object]:
        threads.append(threading.current_thread())
        inside.set()
        release.wait(20.0)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    try:
        with pytest.raises(UnreachableError, match=r"'node-1' was not resolved within 0.01 s"):
            sockets.resolve("node-1", 1, 0.01)
        assert inside.wait(5.0)
    finally:
        release.set()
    threads[0].join(5.0)
    assert not threads[0].is_alive()


@pytest.mark.parametrize("name", ["a..b", "x" * 64 + ".example", "a\0b"], ids=repr)
def test_a_name_that_cannot_be_one_is_unreachable(name: str) -> None:
    with pytest.raises(UnreachableError, match=r"cannot be resolved: .+"):
        sockets.resolve(name, 1, 5.0)


def test_an_unknown_name_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(UnreachableError, match=r"'node-1'.*Name or service not known"):
        sockets.resolve("node-1", 1, 5.0)
    with pytest.raises(ConfigError, match=r"advertise: .*'node-1'"):
        sockets.advertised_host("0.0.0.0", "node-1", 5.0)


@pytest.mark.parametrize("listen", ["0.0.0.0", "10.0.0.5"])
def test_a_name_that_means_loopback_is_not_advertised(
    listen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, "127.0.1.1")
    with pytest.raises(ConfigError, match=r"'node-1' resolves to 127\.0\.1\.1") as caught:
        sockets.advertised_host(listen, "node-1", 5.0)
    assert "/etc/hosts" in caught.value.fix


def test_a_loopback_listener_may_advertise_loopback() -> None:
    assert sockets.advertised_host("127.0.0.1", "", 5.0) == "127.0.0.1"


@pytest.mark.parametrize(
    ("listen", "found", "told"),
    [
        ("0.0.0.0", ["127.0.1.1", "10.0.0.5"], "10.0.0.5"),
        ("0.0.0.0", ["fd00::5", "10.0.0.5"], "10.0.0.5"),
        ("::", ["fd00::5", "10.0.0.5"], "fd00::5"),
    ],
)
def test_a_wildcard_advertises_an_address_that_it_listens_on(
    listen: str, found: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, *found)
    assert sockets.advertised_host(listen, "", 5.0) == told


def test_an_ipv4_wildcard_never_advertises_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, "fd00::5")
    with pytest.raises(ConfigError, match="no IPv4 address"):
        sockets.advertised_host("0.0.0.0", "", 5.0)


# -- listening and connecting ----------------------------------------------------------------------


def test_a_taken_port_names_the_remedy() -> None:
    with closing(sockets.listen_tcp("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"listen=127.0.0.1:{port}") as caught:
            sockets.listen_tcp("127.0.0.1", port)
    assert "port 0" in caught.value.fix


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose path is short enough for Unix sockets."""
    path = tmp_path_factory.mktemp("s")
    assert len(str(path)) < 90
    return path


def test_a_unix_socket_listens_under_an_absolute_path(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(short)
    sock, path = sockets.listen_unix("run", "engine")
    with closing(sock):
        assert path == f"{short}/run/engine.sock"
        assert os.listdir(short / "run") == ["engine.sock"]
        assert os.stat(short / "run").st_mode & 0o777 == 0o700
        with closing(sockets.start_connect(Address.parse(f"unix:{path}"), 1.0)) as there:
            there.send(b"x")
            here, _ = sock.accept()
            here.close()


def test_the_path_is_one_that_an_address_can_carry(short: Path) -> None:
    sock, path = sockets.listen_unix(f"/{short}", "engine")
    sock.close()
    assert Address.parse(str(Address("unix", path))).host == path


def test_a_live_sockets_name_is_not_taken_over(short: Path) -> None:
    sock, path = sockets.listen_unix(str(short), "engine")
    with closing(sock), pytest.raises(ConfigError, match="File exists"):
        sockets.listen_unix(str(short), "engine")
    assert os.path.exists(path)


def test_a_directory_that_cannot_be_is_named(short: Path) -> None:
    (short / "file").touch()
    for directory in (short / "file", short / "file" / "below", short / ("d" * 100)):
        with pytest.raises(ConfigError, match=r"directory='/"):
            sockets.listen_unix(str(directory), "engine")


def test_the_sweep_removes_dead_sockets_only(short: Path) -> None:
    live, live_path = sockets.listen_unix(str(short), "live")
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    dead.bind(str(short / "dead.sock"))
    dead.close()
    other = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    other.bind(str(short / "other-program"))
    other.close()
    (short / "file.sock").touch()
    (short / "link.sock").symlink_to(short / "other-program")
    with closing(live):
        assert sockets.sweep(str(short)) == [str(short / "dead.sock")]
    left = sorted(os.listdir(short))
    assert left == ["file.sock", "link.sock", "live.sock", "other-program"]
    assert live_path.endswith("live.sock")


def test_the_sweep_removes_what_a_process_left_that_was_killed_before_it_listened(
    short: Path,
) -> None:
    old, young, other = (short / name for name in (".0123456789abcdef", "." + "f" * 16, ".other"))
    for path in (old, young, other):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.bind(str(path))
    for path in (old, other):
        os.utime(path, (0, 0))
    assert sockets.sweep(str(short)) == [str(old)]
    assert young.exists()
    assert other.exists()


def test_a_sweep_spares_a_socket_that_is_bound_but_does_not_listen_yet(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept: list[str] = []

    class Slow(socket.socket):
        def listen(self, backlog: int = 0) -> None:  # type: ignore[override]
            swept.extend(sockets.sweep(str(short)))
            super().listen(backlog)

    monkeypatch.setattr(socket, "socket", Slow)
    sock, path = sockets.listen_unix(str(short), "engine")
    sock.close()
    assert (swept, os.path.exists(path)) == ([], True)


def test_a_socket_that_nobody_serves_is_refused_at_once(short: Path) -> None:
    with pytest.raises(UnreachableError, match="No such file") as caught:
        sockets.start_connect(Address("unix", str(short / "none.sock")), 1.0)
    assert "the engine ended" in caught.value.fix


def test_a_unix_socket_with_a_full_queue_is_refused_at_once(short: Path) -> None:
    path = str(short / "full.sock")
    waiting: list[socket.socket] = []
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listener:
        listener.bind(path)
        listener.listen(0)
        address = Address("unix", path)
        with pytest.raises(UnreachableError) as caught:
            waiting.extend(sockets.start_connect(address, 1.0) for _ in range(1000))
    for sock in waiting:
        sock.close()
    assert 0 < len(waiting) < 1000
    assert "queue of new connections is full" in caught.value.fix


def test_an_overlong_unix_path_is_unreachable_and_leaks_nothing() -> None:
    with pytest.raises(UnreachableError, match="too long"):
        sockets.start_connect(Address("unix", "/" + "x" * 200), 1.0)


# -- bytes and descriptors -------------------------------------------------------------------------


def test_descriptors_arrive_with_their_first_byte() -> None:
    left, right = socket.socketpair()
    with left, right, open(os.devnull, "rb") as file:
        assert sockets.send(left, b"abc", (file.fileno(), file.fileno())) == 3
        data, fds = sockets.receive(right, is_unix=True)
        assert data == b"abc"
        assert [os.path.sameopenfile(fd, file.fileno()) for fd in fds] == [True, True]
        assert not any(os.get_inheritable(fd) for fd in fds)
        for fd in fds:
            os.close(fd)
        left.close()
        assert sockets.receive(right, is_unix=True) == (b"", [])


def test_dropped_descriptors_are_an_error_and_none_is_kept() -> None:
    left, right = socket.socketpair()
    with left, right, open(os.devnull, "rb") as file:
        before = len(os.listdir("/proc/self/fd"))
        sockets.send(left, b"abc", (file.fileno(),) * 17)
        with pytest.raises(RegistrationError, match="dropped"):
            sockets.receive(right, is_unix=True)
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_full_socket_takes_nothing_and_does_not_block() -> None:
    left, right = socket.socketpair()
    with left, right:
        left.setblocking(False)
        while sockets.send(left, bytes(1 << 16), ()):
            pass
        assert sockets.send(left, b"x", ()) == 0


def test_the_user_of_a_unix_peer_is_known_and_of_a_tcp_peer_is_not() -> None:
    left, right = socket.socketpair()
    with left, right:
        assert sockets.peer_uid(left) == os.getuid()
    with closing(sockets.listen_tcp("127.0.0.1", 0)) as tcp:
        assert sockets.peer_uid(tcp) is None


def test_the_host_is_the_same_each_time() -> None:
    assert sockets.host_id() == sockets.host_id() != ""


def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    if os.stat(tmp_path).st_uid == 0:
        os.chown(tmp_path, 54321, -1)
    with pytest.raises(ConfigError, match="belongs to user") as caught:
        sockets.listen_unix(str(tmp_path), "a")
    assert "KVFERRY_DIRECTORY" in caught.value.fix


def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="written to by other users"):
        sockets.listen_unix(str(tmp_path), "a")
    tmp_path.chmod(0o1777)
    sock, path = sockets.listen_unix(str(tmp_path), "a")
    sock.close()
    os.unlink(path)


@pytest.mark.parametrize(
    ("theirs", "ours", "is_trusted"),
    [(7, 7, True), (0, 7, True), (7, 0, True), (7, 8, False), (None, 8, True)],
)
def test_only_the_same_user_or_root_is_trusted(
    theirs: int | None, ours: int, is_trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "peer_uid", lambda _sock: theirs)
    monkeypatch.setattr(os, "getuid", lambda: ours)
    left, right = socket.socketpair()
    with left, right:
        assert (sockets.stranger(left) is None) == is_trusted


def test_the_process_of_a_unix_peer_is_known_and_of_a_tcp_peer_is_not() -> None:
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there, socket.socket() as tcp:
        assert sockets.peer_pid(here) == os.getpid()
        assert sockets.peer_pid(tcp) == 0


def test_a_stopped_process_is_told_from_a_sleeping_one() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not sockets.is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert sockets.is_stopped(process.pid)
        process.kill()
    assert not sockets.is_stopped(process.pid)
    assert not sockets.is_stopped(0)
