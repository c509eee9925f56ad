"""One scenario on one rival: its two processes, what is done to them, and what was seen."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.base import HungError, RivalError
from benchmarks.failures import system
from benchmarks.failures.system import Network
from benchmarks.failures.verdict import Attempt, Expect, Step
from benchmarks.process import BENCH_PYTHON, Child

START_S = 30.0
"""For opening an engine, with the import of its libraries."""
NEAR_S, FAR_S = 2.0, 5.0
"""How long anybody may wait for an end: on one host, and across a network."""
MIDWAY_S = 0.4
"""After so long of moving, something happens."""
SEED = 7
TERSE_CHARS = 60
"""An error as short as that says little; what was logged meanwhile is shown with it."""
SMALL = {"blocks": 64, "block_bytes": 16 << 10}
LARGE = {"blocks": 1024, "block_bytes": 64 << 10}
POOL_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Mover:
    """One row of every scenario.

    module: what its processes run. has_port: whether it is reached by a TCP port that one may
    name. crosses: whether the row is for two hosts; the others are for one.
    """

    name: str
    module: str
    python: Path = BENCH_PYTHON
    env: dict[str, str] = field(default_factory=dict)
    has_port: bool = False
    crosses: bool = False


class EndedError(Exception):
    """A step hung or killed its process: nothing more can be done in this scenario."""


class World:
    """See the module. A context manager: everything it started is gone afterwards.

    steps: what was seen until now. notes: defects that no step shows.
    """

    def __init__(self, mover: Mover, limit_s: float, network: Network | None, logs: Path) -> None:
        self.mover = mover
        self.network = network
        self.steps: list[Step] = []
        self.notes: list[str] = []
        self.versions: dict[str, str] = {}
        self.facts: dict[str, Any] = {}
        self.port = 0
        self._limit_s = limit_s
        self._logs = logs
        self._children: list[Child] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> World:
        self._directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="kvf-"))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in self._children:
            end(child)
        self._stack.close()

    # -- the processes ----------------------------------------------------------------------

    def start(self, nbytes: int = POOL_BYTES) -> None:
        """Both processes, their engines open, and not yet connected."""
        self.source, self.target = self._child("source"), self._child("target")
        host = self.network.host if self.network else "127.0.0.1"
        self._send_open(self.source, nbytes, port=0, seed=SEED)
        self.target.send(do="open", nbytes=nbytes, host=host, port=0, seed=0)
        self.versions = self.target.answer("open", START_S)["versions"]
        self._take_source(SEED)

    def replace_source(self, nbytes: int = POOL_BYTES, *, seed: int) -> None:
        """Kill the source and start another on its port, if it has a say in that."""
        self._children.remove(self.source)
        end(self.source)
        self.source = self._child("source")
        self._send_open(self.source, nbytes, port=self.port, seed=seed)
        self._take_source(seed)

    def _send_open(self, source: Child, nbytes: int, *, port: int, seed: int) -> None:
        host = self.network.peer if self.network else "127.0.0.1"
        source.send(do="open", nbytes=nbytes, host=host, port=port, seed=seed)

    def _take_source(self, seed: int) -> None:
        facts = self.source.answer("open", START_S)["facts"]
        self.facts = {**facts, "seed": seed, "is_far": self.network is not None}
        self.port = facts.get("port", 0)

    def _child(self, role: str) -> Child:
        directory = os.path.join(self._directory, role if self.network else "both")
        os.makedirs(directory, mode=0o700, exist_ok=True)
        wrap: tuple[str, ...] = ()
        if self.network and role == "source":
            wrap = self.network.wrap(directory)
        env = {**self.mover.env, "KVFERRY_DIRECTORY": directory}
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{role}.log"
        child = Child(self.mover.python, self.mover.module, role, "", env, log, wrap)
        self._children.append(child)
        return child

    def stop_source(self) -> None:
        self.source.signal(signal.SIGSTOP)

    def kill_source(self) -> None:
        self.source.signal(signal.SIGKILL)

    # -- steps ------------------------------------------------------------------------------

    def reach(self, expect: Expect = Expect.COMPLETE, **options: Any) -> None:
        """Connect, and read a little: some rivals connect with the first transfer."""
        by_port = options.pop("by_port", 0)
        seed = self.facts["seed"]
        name = options.pop("name", "first contact")
        step = self._ask(
            name, expect, options, do="reach", facts=self.facts, by_port=by_port, seed=seed
        )
        if not step.errors and not step.end:
            more = self._ask(name, expect, options, do="call", spec=SMALL)
            attempts = (*step.attempts, *more.attempts)
            step = Step(
                name,
                expect,
                more.within_s,
                attempts,
                more.cause,
                more.end,
                more.waited_s,
                more.cpu_share,
            )
        self._add(step)

    def call(
        self,
        spec: dict[str, Any],
        expect: Expect = Expect.COMPLETE,
        *,
        name: str = "read",
        meanwhile: Callable[[], None] | None = None,
        **options: Any,
    ) -> Step:
        """Have the target make calls; ``meanwhile`` happens after MIDWAY_S of them."""
        step = self._ask(name, expect, options, meanwhile, do="call", spec=spec)
        self._add(step)
        return step

    def _add(self, step: Step) -> None:
        self.steps.append(step)
        if step.end:
            raise EndedError

    def _ask(
        self,
        name: str,
        expect: Expect,
        options: dict[str, Any],
        meanwhile: Callable[[], None] | None = None,
        **command: Any,
    ) -> Step:
        within_s = options.get("within_s", FAR_S if self.network else NEAR_S)
        cause = options.get("cause", "")
        log = self._logs / "target.log"
        read_until = log.stat().st_size
        began, cpu = time.monotonic(), system.cpu_s(self.target.pid)
        end, attempts = "", []
        try:
            self.target.send(**command)
            if meanwhile is not None:
                time.sleep(MIDWAY_S)
                began, cpu = time.monotonic(), system.cpu_s(self.target.pid)
                meanwhile()
            attempts = self.target.answer(command["do"], self._limit_s)["attempts"]
        except HungError:
            end = f"no end within {self._limit_s:g} s"
        except RivalError as error:
            found = re.search(r"\((signal \w+|exit \d+)\)", str(error))
            if found is None:
                raise
            end = f"the process crashed ({found[1]})"
        waited_s = time.monotonic() - began
        share = (system.cpu_s(self.target.pid) - cpu) / waited_s
        logged = last_line(log, read_until)
        seen = tuple(_attempt(record, logged) for record in attempts)
        waited = (waited_s, share) if end else (0.0, 0.0)
        return Step(name, expect, within_s, seen, cause, end, *waited)

    # -- strangers --------------------------------------------------------------------------

    @contextlib.contextmanager
    def idle_connections(self, count: int) -> Iterator[None]:
        """So many connections to each port of the source, on which nobody says anything."""
        with contextlib.ExitStack() as stack:
            for port in system.ports_of(self.source.pid):
                for _ in range(count):
                    sock = stack.enter_context(socket.socket())
                    sock.settimeout(1.0)
                    try:
                        sock.connect(("127.0.0.1", port))
                    except OSError:
                        break  # It takes no more of them: its queue is full, or it hangs up.
            yield

    def stranger(self, name: str, data: bytes, *, within_s: float) -> None:
        """Send ``data`` to each port of the source, and see when it hangs up and what it says."""
        secret = self._secret()
        for port in system.ports_of(self.source.pid):
            began = time.monotonic()
            heard, is_open = talk(port, data, within_s + 1.0)
            error = "the stranger's connection is kept" if is_open else ""
            if len(heard) >= 16 and heard[-16:] in secret:
                self.notes.append("gives memory away")
            attempt = Attempt(began, time.monotonic() - began, error)
            self._add(Step(name, Expect.COMPLETE, within_s, (attempt,)))

    def _secret(self) -> bytes:
        from benchmarks.failures.mover import pattern

        return pattern(SEED, POOL_BYTES).tobytes()

    @contextlib.contextmanager
    def service(self, answer: bytes | None) -> Iterator[int]:
        """A port of something else: it answers each caller so, or never (None), and hangs up."""
        with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
            server.settimeout(0.1)
            over = threading.Event()
            accepted: list[socket.socket] = []

            def serve() -> None:
                while not over.is_set():
                    try:
                        caller, _ = server.accept()
                    except TimeoutError:
                        continue
                    accepted.append(caller)
                    if answer is not None:
                        caller.settimeout(1.0)
                        with contextlib.suppress(OSError):
                            caller.recv(1 << 16)
                            caller.sendall(answer)
                            caller.shutdown(socket.SHUT_WR)

            thread = threading.Thread(target=serve)
            thread.start()
            try:
                yield server.getsockname()[1]
            finally:
                over.set()
                thread.join()
                for sock in accepted:
                    sock.close()


def end(child: Child) -> None:
    """Kill a process, whatever its state."""
    child.signal(signal.SIGKILL)
    child.stop(0.1)


def talk(port: int, data: bytes, patience_s: float) -> tuple[bytes, bool]:
    """Send bytes to a port of this host: what it said, and whether it still held on at the end."""
    heard = b""
    end = time.monotonic() + patience_s
    try:
        with socket.create_connection(("127.0.0.1", port), 2.0) as sock:
            sock.sendall(data)
            while (left := end - time.monotonic()) > 0:
                sock.settimeout(left)
                piece = sock.recv(1 << 16)
                if not piece:
                    return heard, False
                heard += piece
    except TimeoutError:
        return heard, True
    except OSError:
        return heard, False
    return heard, True


def last_line(log: Path, begin: int) -> str:
    """The last line that a process has logged since ``begin`` bytes, without its time stamp."""
    with log.open("rb") as file:
        file.seek(begin)
        lines = file.read().decode(errors="replace").strip().splitlines()
    text = lines[-1] if lines else ""
    return re.sub(r"^[IWEF]\d{4,8} [\d:.]+ +\d+ [\w./-]+:\d+\] ", "", text).strip()


def _attempt(record: dict[str, Any], logged: str) -> Attempt:
    if logged and 0 < len(record["error"]) < TERSE_CHARS:
        record = {**record, "error": f"{record['error']} [log: {logged}]"}
    return Attempt(**record)
