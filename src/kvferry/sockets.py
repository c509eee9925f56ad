"""Addresses and sockets: the effects that sessions and lanes share. No protocol in here.

Addresses are written ``unix:/path/to/socket`` or ``tcp://host:port``, an IPv6 host in brackets.
"""

from __future__ import annotations

import array
import errno
import ipaddress
import os
import re
import socket
import stat
import struct
import threading
import time
from dataclasses import dataclass

from kvferry.errors import (
    ConfigError,
    KVFerryError,
    ProtocolError,
    RegistrationError,
    UnreachableError,
)

RECEIVE_BYTES = 32 << 10
"""One read of a control socket. Larger buffers are mapped anew for each read."""
UNREADY_S = 60.0
"""A socket that does not listen so long after it was made was left by a killed process."""
_UNREADY = re.compile(r"\.[0-9a-f]{16}")
_NOSIGNAL = int(socket.MSG_NOSIGNAL)
_CTRUNC = int(socket.MSG_CTRUNC)
_CLOEXEC = int(socket.MSG_CMSG_CLOEXEC)
_SPACE = socket.CMSG_SPACE(16 * 4)


@dataclass(frozen=True, slots=True)
class Address:
    """Where an engine listens: a Unix socket's path, or host and port."""

    scheme: str
    host: str
    port: int = 0

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix:{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """From text; ``host:port`` alone means TCP. Raises ConfigError saying what is expected."""
        if text.startswith("unix:"):
            path = text.removeprefix("unix:").removeprefix("//")
            if not path.startswith("/") or "\0" in path:
                raise ConfigError(f"address {text!r}: a Unix socket needs an absolute path")
            return cls("unix", path)
        host, port = split_host_port(text.removeprefix("tcp://"))
        return cls("tcp", host, port)


def split_host_port(text: str) -> tuple[str, int]:
    """``host:port``, with IPv6 hosts in brackets."""
    host, sep, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    name = host[1:-1] if bracketed else host
    # isdigit() alone is true for digits of other scripts, and for those that int() refuses.
    numeric = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65535
    if not sep or not numeric or set(name) & set("[]\0") or (":" in host and not bracketed):
        raise ConfigError(
            f"address {text!r} is not host:port",
            fix="write tcp://10.0.0.5:7600, tcp://[fd00::5]:7600 or unix:/run/kvferry/x.sock",
        )
    return name or "127.0.0.1", int(port)


def is_loopback(host: str) -> bool:
    """Whether a numeric host is of this machine only. A name is not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def resolve(host: str, port: int, timeout_s: float) -> list[tuple[int, tuple[object, ...]]]:
    """(family, socket address) of a host, numeric or a name, in bounded time.

    Name service has no time limit of its own, so a name is looked up in a thread that is left
    behind when it takes too long. Blocks up to ``timeout_s``. Raises UnreachableError.
    """
    found: list[tuple[int, tuple[object, ...]]] = []
    failure: list[str] = []

    def look_up() -> None:
        try:
            for family, _, _, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                found.append((int(family), where))
        except OSError as error:
            failure.append(error.strerror or str(error))
        except ValueError as error:
            failure.append(str(error))  # A name that cannot be one, such as "a..b".

    try:
        ipaddress.ip_address(host.split("%")[0])
        look_up()
    except ValueError:
        thread = threading.Thread(target=look_up, name="kvferry-resolve", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            raise UnreachableError(
                f"the name {host!r} was not resolved within {timeout_s:g} s",
                stage="connect",
                fix="use a numeric address or mend name service",
            ) from None
    if not found:
        why = failure[0] if failure else "no address"
        raise UnreachableError(
            f"the name {host!r} cannot be resolved: {why}",
            stage="connect",
            fix="use a numeric address or mend name service",
        )
    return found


def advertised_host(listen_host: str, advertise: str, timeout_s: float) -> str:
    """The numeric host that peers are told.

    A name is resolved once, here. Raises ConfigError when the result is loopback although the
    engine listens for other machines: Debian maps a machine's own name to 127.0.1.1.
    """
    wanted = advertise or listen_host
    wildcard = wanted in ("0.0.0.0", "::")
    name = socket.gethostname() if wildcard else wanted
    try:
        found = resolve(name, 0, timeout_s)
    except UnreachableError as error:
        raise ConfigError(
            f"advertise: {error.message}", fix="set advertise to the address of one interface"
        ) from error
    hosts = [
        str(where[0])
        for family, where in found
        if listen_host != "0.0.0.0" or not wildcard or family == socket.AF_INET
    ]
    numeric = next((host for host in hosts if not is_loopback(host)), hosts[0] if hosts else "")
    if not numeric:
        raise ConfigError(
            f"the name {name!r} has no IPv4 address, and 0.0.0.0 listens on IPv4 only",
            fix="set advertise to the address of one interface, or listen on [::]",
        )
    if is_loopback(numeric) and not is_loopback(listen_host):
        raise ConfigError(
            f"the name {name!r} resolves to {numeric}, which no other machine can reach",
            fix="set advertise to the address of the interface that peers should use, or remove "
            "the name's 127.* line from /etc/hosts",
        )
    return numeric


def listen_tcp(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises ConfigError that names the holder's remedy."""
    try:
        family, where = resolve(host, port, 5.0)[0]
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    except UnreachableError as error:
        raise ConfigError(f"listen: {error.message}", fix=error.fix) from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and host == "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(where)
        sock.listen(512)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        fix = "another process holds the port: use port 0, or stop it (ss -ltnp shows it)"
        raise ConfigError(f"listen={host}:{port}: {error.strerror}", fix=fix) from error
    return sock


def listen_unix(directory: str, stem: str) -> tuple[socket.socket, str]:
    """A listening Unix socket in ``directory`` (made with mode 0700 if missing), and its path.

    Sockets that dead engines left in the directory are removed; those of live ones never are.
    """
    # Peers are told the path, and their working directory is another one.
    directory = "/" + os.path.abspath(directory).lstrip("/")
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        _check_owner(directory)
        sweep(directory)
    except OSError as error:
        raise ConfigError(f"directory={directory!r}: {error.strerror}") from error
    path = os.path.join(directory, f"{stem}.sock")
    if len(path.encode()) > 107:
        raise ConfigError(
            f"directory={directory!r} is too long: a Unix socket's path has at most 107 bytes"
        )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    unready = os.path.join(directory, f".{stem}")
    try:
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        # It gets its name only when it listens: until then a sweep would take it for a dead one.
        sock.bind(unready)
        sock.listen(512)
        sock.setblocking(False)
        os.rename(unready, path)
    except OSError as error:
        sock.close()
        raise ConfigError(f"directory={directory!r}: {error.strerror}") from error
    return sock, path


def _check_owner(directory: str) -> None:
    """Refuse a directory where another user could put sockets in place of ours."""
    facts = os.stat(directory)
    if facts.st_uid not in (0, os.getuid()):
        why = f"belongs to user {facts.st_uid}, not to user {os.getuid()} or root"
    elif facts.st_mode & 0o022 and not facts.st_mode & stat.S_ISVTX:
        why = "can be written to by other users"
    else:
        return
    raise ConfigError(
        f"directory={directory!r} {why}",
        fix="set directory (KVFERRY_DIRECTORY) to one that only this user can write to",
    )


def sweep(directory: str) -> list[str]:
    """Remove Unix sockets that nobody listens on any more; returns their paths."""
    removed = []
    for entry in os.scandir(directory):
        try:
            facts = entry.stat(follow_symlinks=False)
            # One that is about to listen has a name like this for a moment only.
            is_unready = entry.name.startswith(".") and time.time() - facts.st_mtime < UNREADY_S
            is_ours = entry.name.endswith(".sock") or _UNREADY.fullmatch(entry.name)
            if not is_ours or is_unready or not stat.S_ISSOCK(facts.st_mode):
                continue
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.setblocking(False)
                probe.connect(entry.path)
        except ConnectionRefusedError:
            try:
                os.unlink(entry.path)
                removed.append(entry.path)
            except OSError:
                pass
        except OSError:
            continue
    return removed


def start_connect(address: Address, timeout_s: float) -> socket.socket:
    """A non-blocking socket whose connection is under way.

    Blocks only for a name that must be resolved. Raises UnreachableError, and ProtocolError when
    another user listens on the Unix socket.
    """
    try:
        if address.scheme == "unix":
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            where: object = address.host
        else:
            family, where = resolve(address.host, address.port, timeout_s)[0]
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise unreachable(address, error) from error
    sock.setblocking(False)
    try:
        if address.scheme == "tcp":
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.connect(where)  # type: ignore[arg-type]
        objection = stranger(sock) if address.scheme == "unix" else None
        if objection is not None:
            sock.close()
            raise objection
    except BlockingIOError as error:
        # TCP goes on by itself; a Unix socket says that the queue is full, and has done nothing.
        if address.scheme == "unix":
            sock.close()
            raise unreachable(address, error) from error
    except OSError as error:
        sock.close()
        raise unreachable(address, error) from error
    return sock


_FIXES = {
    errno.ECONNREFUSED: "nothing listens there: check that the engine runs and the port is right",
    errno.ENOENT: "the Unix socket is gone: the engine ended, or both sides do not share its "
    "directory (mount it into both containers)",
    errno.EACCES: "the directory of the Unix socket is not accessible to this user",
    errno.EHOSTUNREACH: "no route: check the network and the peer's advertised address",
    errno.ENETUNREACH: "no route: check the network and the peer's advertised address",
    errno.EADDRNOTAVAIL: "this host has no free local port left: lower the connection rate or "
    "widen net.ipv4.ip_local_port_range",
    errno.EMFILE: "no free file descriptor: raise the limit (ulimit -n)",
    errno.EAGAIN: "the peer's queue of new connections is full: it is frozen or overloaded",
    errno.ETIMEDOUT: "packets are dropped: a firewall, or the host is down",
}


def unreachable(address: Address | str, error: OSError) -> KVFerryError:
    """The typed error for a failed connection attempt."""
    number = error.errno or 0
    return UnreachableError(
        f"cannot connect to {address}: {os.strerror(number) if number else error}",
        stage="connect",
        fix=_FIXES.get(number, "check the address and the peer's log"),
    )


def receive(sock: socket.socket, *, is_unix: bool) -> tuple[bytes, list[int]]:
    """Bytes and descriptors that are there. Empty bytes mean the end of the stream.

    is_unix: whether ``sock`` is a Unix socket; asking the socket itself takes a microsecond.

    The caller owns the descriptors. Raises BlockingIOError when there is nothing, OSError for a
    broken socket, and RegistrationError when the kernel dropped descriptors for want of room.
    """
    if not is_unix:
        return sock.recv(RECEIVE_BYTES), []
    data, ancillary, flags, _ = sock.recvmsg(RECEIVE_BYTES, _SPACE, _CLOEXEC)
    fds: list[int] = []
    for level, kind, body in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received = array.array("i")
            received.frombytes(body[: len(body) - len(body) % received.itemsize])
            fds.extend(received)
    if flags & _CTRUNC:
        for fd in fds:
            os.close(fd)
        raise RegistrationError(
            "descriptors from the peer were dropped: this process has no free file descriptor",
            stage="describe",
            fix="raise the limit of open files (ulimit -n) of this process",
        )
    return data, fds


def send(sock: socket.socket, data: bytes | memoryview, fds: tuple[int, ...]) -> int:
    """Send what fits, the descriptors with the first byte. Returns bytes sent, 0 if none fits."""
    try:
        if fds:
            packed = array.array("i", fds)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)
            return sock.sendmsg([data], [rights], _NOSIGNAL)
        return sock.send(data, _NOSIGNAL)
    except BlockingIOError:
        return 0


def stranger(sock: socket.socket) -> ProtocolError | None:
    """Why the process at the other end of a Unix socket is not to be trusted; None if it is.

    The kernel says who it is: the same user, or one side is root.
    """
    theirs, ours = peer_uid(sock), os.getuid()
    if theirs is None or theirs in (0, ours) or ours == 0:
        return None
    return ProtocolError(
        f"the process at the other end belongs to user {theirs}, this one to user {ours}",
        stage="connect",
        fix="run both sides as the same user",
    )


def hang_up(sock: socket.socket) -> None:
    """Close, so that the other end sees it now, even if a forked child holds a copy."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # It was never connected, or the other end was faster.
    sock.close()


def peer_uid(sock: socket.socket) -> int | None:
    """User id of the process at the other end of a Unix socket; None where it cannot be told."""
    found = _credentials(sock)
    return found[1] if found else None


def peer_pid(sock: socket.socket) -> int:
    """Process id at the other end of a Unix socket; 0 where it cannot be told.

    That is so for TCP, and for a process of a container whose processes are not seen here.
    """
    found = _credentials(sock)
    return found[0] if found else 0


def _credentials(sock: socket.socket) -> tuple[int, int] | None:
    if sock.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return None
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(pid), int(uid)


def is_stopped(pid: int) -> bool:
    """Whether a process of this host is stopped by a signal, as by SIGSTOP. False if unknown."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            # The name comes before, in brackets, and may hold anything.
            return file.read().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def host_id() -> str:
    """Equal for two processes that share a kernel: the boot's id, or the host's name without it."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()
