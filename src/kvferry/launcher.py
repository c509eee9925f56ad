"""Starts prefill, decode and router processes on this machine, and stops them.

Each child takes its port from the kernel and reports it in one line on its standard output,
``ready http://host:port``; no port is looked up first and hoped to be still free later.

Children never outlive the launcher, not even when it is killed: on Linux the kernel kills them
(PR_SET_PDEATHSIG). Elsewhere there is no such call, and only an orderly end stops them.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import http.client
import logging
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from urllib.parse import urlsplit

from kvferry.errors import ClosedError, DeadlineError, PeerLostError, UsageError
from kvferry.sockets import is_loopback, split_host_port

log = logging.getLogger(__name__)

LogLine = Callable[[str, str], None]
"""Takes the name of a process, such as ``prefill-0``, and one line without its end."""

Dress = Callable[[str, Sequence[str]], Sequence[str]]
"""Takes the name of a process and its command; returns what is started instead."""

_READY = "ready http"
_LINE_BYTES_MAX = 64 << 10
_LAST_LINES = 15
_POLL_S = 0.05
_PROGRESS_S = 5.0
_BACK_OFF_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
_STEADY_S = 60.0

# Runs in the child before the command it becomes. The parent may be gone before prctl was called,
# so it is looked at again afterwards.
_GUARD = """
import ctypes, os, signal, sys
if sys.platform.startswith("linux"):
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the launcher is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


@dataclass(eq=False)
class _Child:
    """One process of the fleet; the same object lives through its restarts."""

    name: str
    argv: list[str]
    port: int
    popen: subprocess.Popen[bytes]
    url: str = ""
    started: float = 0.0
    failures: int = 0
    restart_at: float = 0.0
    last_lines: collections.deque[str] = field(
        default_factory=lambda: collections.deque(maxlen=_LAST_LINES)
    )


class Fleet:
    """Prefill and decode engines and their router, as processes of this machine.

    ``with Fleet("tiny") as fleet:`` starts them, waits until each is healthy, and stops them all.
    ``start``, ``restart``, ``wait`` and ``stop`` block and are for one thread at a time;
    ``interrupt`` and ``kill`` may be called from anywhere, signal handlers included.

    model: what each engine gets as --model.
    prefill, decode: how many of each; prefill may be 0.
    transports: names that each engine gets as --transport; none leaves the choice to it.
    host, port: where the router listens; port 0 takes a free one. Engines listen on 127.0.0.1.
    env: environment variables to add for every child. Engines that listen beyond loopback get a
        random cluster key, unless a key, TLS or ``insecure`` is set.
    log: is given every line that a child writes, and the launcher's own under "kvferry".
    engine_flags, router_flags: more arguments for each engine, for the router.
    start_s, stop_s: deadlines, in seconds, for all to become healthy and for all to end.
    command: the program whose ``engine`` and ``route`` commands are started.
    dress: is given a process's name and its command, at each of its starts, and returns what to
        start instead: the same within a namespace, with more flags, under other limits. What it
        puts in front must become the command (``exec``) and not start it as a child.
    """

    def __init__(
        self,
        model: str,
        *,
        prefill: int = 1,
        decode: int = 1,
        transports: Sequence[str] = (),
        host: str = "127.0.0.1",
        port: int = 0,
        env: Mapping[str, str] | None = None,
        log: LogLine | None = None,
        engine_flags: Sequence[str] = (),
        router_flags: Sequence[str] = (),
        start_s: float = 180.0,
        stop_s: float = 15.0,
        command: Sequence[str] = (sys.executable, "-m", "kvferry.cli.main"),
        dress: Dress | None = None,
    ) -> None:
        if prefill < 0 or decode < 1:
            raise UsageError(
                f"{prefill} prefill and {decode} decode processes cannot serve",
                fix="start at least one decode process",
            )
        self.model = model
        self._counts = {"prefill": prefill, "decode": decode}
        self._transports = tuple(transports)
        self._host, self._port = host, port
        self._env = {**_shared_cores(prefill + decode), **os.environ, **(env or {})}
        self._env.update(_key_of_its_own(self._env, engine_flags))
        self._log = _ignore if log is None else log
        self._engine_flags, self._router_flags = list(engine_flags), list(router_flags)
        self._start_s, self._stop_s = start_s, stop_s
        self._command = list(command)
        self._dress = dress
        self._children: dict[str, _Child] = {}
        self._interrupted = False
        self._socket_dir = ""
        self._pump: _LogPump | None = None
        # The kernel ties a child's life to the thread that made it, so one thread that lives as
        # long as the fleet makes them all.
        self._spawner: concurrent.futures.ThreadPoolExecutor | None = None

    # What runs

    @property
    def router_url(self) -> str:
        return self._children["router"].url

    @property
    def prefill_urls(self) -> list[str]:
        return self._urls("prefill-")

    @property
    def decode_urls(self) -> list[str]:
        return self._urls("decode-")

    @property
    def socket_dir(self) -> str:
        """Where the engines' Unix sockets lie; "" while nothing runs."""
        return self._socket_dir

    @property
    def processes(self) -> dict[str, subprocess.Popen[bytes]]:
        """``prefill-0`` ..., ``decode-0`` ..., ``router``; a restart puts a new process there."""
        return {name: child.popen for name, child in self._children.items()}

    def _urls(self, prefix: str) -> list[str]:
        return [child.url for name, child in self._children.items() if name.startswith(prefix)]

    # Start

    def __enter__(self) -> Fleet:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start everything and wait until each answers /health with 200.

        Raises PeerLostError when a child ends early (with its last lines), DeadlineError after
        ``start_s``, ClosedError when interrupted. After an error nothing is left running.
        """
        if self._pump is not None:
            raise UsageError("this fleet is already running")
        deadline = time.monotonic() + self._start_s
        try:
            self._pump = _LogPump(self._take_line)
            self._spawner = concurrent.futures.ThreadPoolExecutor(1, "kvferry-spawner")
            self._socket_dir = tempfile.mkdtemp(prefix="kvferry-")
            engines = [
                self._add(f"{role}-{index}", self._engine_argv(role), 0)
                for role, count in self._counts.items()
                for index in range(count)
            ]
            self._await_healthy(engines, deadline)
            router = self._add("router", self._router_argv(), self._port)
            self._await_healthy([router], deadline)
        except BaseException:
            self.stop()
            raise

    def restart(self, name: str) -> None:
        """End one process if it still runs, start it anew on the same port, wait for its health.

        Raises as ``start`` does; after an error the others still run.
        """
        child = self._children[name]
        self._end([child], time.monotonic() + self._stop_s)
        self._respawn(child)
        self._await_healthy([child], time.monotonic() + self._start_s)

    def _engine_argv(self, role: str) -> list[str]:
        argv = [*self._command, "engine", "--model", self.model, "--role", role]
        argv += ["--host", "127.0.0.1", "--socket-dir", self._socket_dir]
        # Offers that nobody claims any more must not use up the time that ends in a kill.
        argv += ["--drain-s", f"{self._stop_s / 4:g}"]
        for transport in self._transports:
            argv += ["--transport", transport]
        return argv + self._engine_flags

    def _router_argv(self) -> list[str]:
        argv = [*self._command, "route", "--host", self._host]
        for url in self.prefill_urls:
            argv += ["--prefill", url]
        for url in self.decode_urls:
            argv += ["--decode", url]
        argv += ["--drain-s", f"{self._stop_s / 4:g}"]
        return argv + self._router_flags

    def _add(self, name: str, argv: list[str], port: int) -> _Child:
        child = _Child(name, argv, port, self._popen(name, argv, port))
        self._children[name] = child
        self._watch(child)
        return child

    def _respawn(self, child: _Child) -> None:
        child.port = urlsplit(child.url).port or child.port
        child.url = ""
        child.popen = self._popen(child.name, child.argv, child.port)
        self._watch(child)

    def _popen(self, name: str, argv: list[str], port: int) -> subprocess.Popen[bytes]:
        assert self._spawner is not None
        guard = [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid())]
        if self._dress is not None:
            argv = list(self._dress(name, argv))
        self._log("kvferry", f"starting {name}")

        def spawn() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                [*guard, *argv, "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._env,
                bufsize=0,
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which passes it on
            )

        return self._spawner.submit(spawn).result()

    def _watch(self, child: _Child) -> None:
        assert self._pump is not None
        child.started, child.restart_at = time.monotonic(), 0.0
        self._pump.add(child, child.popen)

    def _take_line(self, child: _Child, line: str) -> None:
        child.last_lines.append(line)
        if not child.url and line.startswith(_READY):
            child.url = line.removeprefix("ready ").strip()
        self._log(child.name, line)

    # Wait

    def _await_healthy(self, children: Sequence[_Child], deadline: float) -> None:
        started = told = time.monotonic()
        waiting = list(children)
        while waiting := [child for child in waiting if not _is_healthy(child)]:
            now = time.monotonic()
            for child in waiting:
                if child.popen.poll() is not None:
                    raise self._early_end(child)
            names = ", ".join(child.name for child in waiting)
            if self._interrupted:
                raise ClosedError(f"interrupted while waiting for {names}")
            if now >= deadline:
                last = " | ".join(waiting[0].last_lines) or "nothing"
                raise DeadlineError(
                    f"{names} not healthy after {now - started:.0f} s; "
                    f"{waiting[0].name} wrote last: {last}",
                    fix="look at its log, or allow more time to start",
                )
            if now - told >= _PROGRESS_S:
                told = now
                self._log("kvferry", f"waiting for {names} ({now - started:.0f} s)")
            self._pause()
        took_s = time.monotonic() - started
        self._log("kvferry", f"{', '.join(c.name for c in children)} ready after {took_s:.1f} s")

    def _early_end(self, child: _Child) -> PeerLostError:
        self._settle(child)
        last = " | ".join(child.last_lines) or "nothing"
        return PeerLostError(
            f"{child.name} {_end_of(child)} before it was healthy; it wrote last: {last}",
            peer=child.name,
            stage="start",
        )

    def _settle(self, child: _Child) -> None:
        """Give the last lines of an ended child a moment to arrive."""
        if self._pump is not None:
            self._pump.drain(child.popen, 1.0)

    def wait(self, *, restart: bool = False) -> None:
        """Block until ``interrupt`` is called. Raises PeerLostError when a child ends by itself.

        With ``restart`` a child that ended is started again on its port instead, after 0.5 s at
        first and up to 30 s when it keeps ending.
        """
        while not self._interrupted:
            now = time.monotonic()
            for child in self._children.values():
                if child.popen.poll() is None:
                    continue
                if not restart:
                    raise PeerLostError(f"{child.name} {_end_of(child)}", peer=child.name)
                self._bring_back(child, now)
            self._pause()

    def _bring_back(self, child: _Child, now: float) -> None:
        if not child.restart_at:
            if now - child.started > _STEADY_S:
                child.failures = 0
            delay_s = _BACK_OFF_S[min(child.failures, len(_BACK_OFF_S) - 1)]
            child.failures += 1
            child.restart_at = now + delay_s
            self._log(
                "kvferry", f"{child.name} {_end_of(child)}; starting it again in {delay_s:g} s"
            )
        elif now >= child.restart_at:
            self._respawn(child)

    def interrupt(self) -> None:
        """Make ``start`` and ``wait`` return soon. Only sets a flag, so signal handlers may."""
        self._interrupted = True

    def _pause(self) -> None:
        time.sleep(_POLL_S)

    # Stop

    def kill(self) -> None:
        """SIGKILL every child now; ``stop`` then has only to collect them."""
        for child in list(self._children.values()):
            _kill(child)

    def stop(self) -> None:
        """End every child, the router first so that it can finish what it has. May be repeated.

        A child that is not gone by ``stop_s`` is killed. Leaves no process, thread or file.
        """
        now = time.monotonic()
        router = [child for child in self._children.values() if child.name == "router"]
        engines = [child for child in self._children.values() if child.name != "router"]
        self._end(router, now + self._stop_s / 2)
        self._end(engines, now + self._stop_s)
        if self._spawner is not None:
            self._spawner.shutdown()
            self._spawner = None
        if self._pump is not None:
            self._pump.close()
            self._pump = None
        if self._socket_dir:
            shutil.rmtree(self._socket_dir, ignore_errors=True)
            self._socket_dir = ""

    def _end(self, children: Iterable[_Child], deadline: float) -> None:
        children = list(children)
        for child in children:
            if child.popen.poll() is None:
                # A stopped process takes SIGTERM only once it goes on.
                for number in (signal.SIGTERM, signal.SIGCONT):
                    child.popen.send_signal(number)
        for child in children:
            try:
                child.popen.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._log("kvferry", f"{child.name} does not end; killing it")
                _kill(child)
                child.popen.wait()


def _shared_cores(engines: int) -> dict[str, str]:
    """Defaults for the children: each engine's BLAS gets its share of the cores.

    Threads of several engines on one core wait for each other, which costs a factor of ten.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // engines)
    return {"PYTHONUNBUFFERED": "1", "OPENBLAS_NUM_THREADS": str(threads)}


def _key_of_its_own(env: Mapping[str, str], engine_flags: Sequence[str]) -> dict[str, str]:
    """A random cluster key for engines that listen beyond loopback, unless they are secured.

    It travels in the environment: arguments can be seen by every user of the machine.
    """
    listen = env.get("KVFERRY_LISTEN", "")
    for flag, value in zip(engine_flags, [*engine_flags, ""][1:], strict=True):
        if flag == "--listen" or flag.startswith("--listen="):
            listen = flag.partition("=")[2] or value
    chosen = ("CLUSTER_KEY", "CLUSTER_KEY_FILE", "TLS_CERT", "INSECURE")
    if not listen or any(env.get("KVFERRY_" + name) for name in chosen):
        return {}
    host, _ = split_host_port(listen)
    return {} if is_loopback(host) else {"KVFERRY_CLUSTER_KEY": secrets.token_hex(32)}


def _ignore(_name: str, _line: str) -> None:
    return None


def _kill(child: _Child) -> None:
    if child.popen.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.popen.pid, signal.SIGKILL)


def _end_of(child: _Child) -> str:
    code = child.popen.returncode
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _is_healthy(child: _Child) -> bool:
    """Whether the child has reported its URL and answers /health with 200. Blocks up to 1 s."""
    if not child.url:
        return False
    parts = urlsplit(child.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=1.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class _LogPump:
    """One thread that reads what all children write, line by line, for as long as the fleet lives.

    It does not depend on a child's end to end itself: a grandchild may hold the pipe open.
    """

    def __init__(self, take: Callable[[_Child, str], None]) -> None:
        self._take = take
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._changed = threading.Condition()
        self._new: list[tuple[_Child, subprocess.Popen[bytes]]] = []
        self._open: set[subprocess.Popen[bytes]] = set()
        self._closing_at = float("inf")
        self._partial: dict[subprocess.Popen[bytes], bytes] = {}  # the thread's own
        self._thread = threading.Thread(target=self._run, name="kvferry-logs", daemon=True)
        self._thread.start()

    def add(self, child: _Child, popen: subprocess.Popen[bytes]) -> None:
        with self._changed:
            self._open.add(popen)
            self._new.append((child, popen))
        os.write(self._wake_write, b".")

    def drain(self, popen: subprocess.Popen[bytes], limit_s: float) -> None:
        """Wait until all that an ended process wrote was taken, at most ``limit_s`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: popen not in self._open, limit_s)

    def close(self) -> None:
        """Take what is left, for at most a second, and end the thread."""
        self._closing_at = time.monotonic() + 1.0
        os.write(self._wake_write, b".")
        self._thread.join()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _run(self) -> None:
        while True:
            left_s = self._closing_at - time.monotonic()
            if left_s <= 0 or (left_s < float("inf") and not self._open):
                break
            for key, _ in self._selector.select(None if left_s == float("inf") else left_s):
                if key.fd == self._wake_read:
                    os.read(self._wake_read, 4096)
                    self._register_new()
                else:
                    self._read(*key.data)
        for key in list(self._selector.get_map().values()):
            if key.fd != self._wake_read:
                self._drop(key.data[1])

    def _register_new(self) -> None:
        with self._changed:
            new, self._new = self._new, []
        for child, popen in new:
            assert popen.stdout is not None
            self._selector.register(popen.stdout, selectors.EVENT_READ, (child, popen))

    def _read(self, child: _Child, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stdout is not None
        data = os.read(popen.stdout.fileno(), _LINE_BYTES_MAX)
        *lines, rest = (self._partial.get(popen, b"") + data).split(b"\n")
        if rest and (not data or len(rest) > _LINE_BYTES_MAX):
            lines.append(rest)
            rest = b""
        self._partial[popen] = rest
        for line in lines:
            try:
                self._take(child, line.decode(errors="replace").rstrip("\r"))
            except Exception:
                # A reader that ended would stop the child at its next full pipe.
                log.exception("a line of %s could not be passed on", child.name)
        if not data:
            self._drop(popen)

    def _drop(self, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stdout is not None
        self._selector.unregister(popen.stdout)
        popen.stdout.close()
        self._partial.pop(popen, None)
        with self._changed:
            self._open.discard(popen)
            self._changed.notify_all()
