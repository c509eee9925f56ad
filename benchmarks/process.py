"""A rival made of processes: started, asked with deadlines, paused, and killed when they hang."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.base import Case, HungError, MissingError, Rival, RivalError, Sample

ROOT = Path(__file__).resolve().parent.parent
BENCH_PYTHON = ROOT / ".venv-bench" / "bin" / "python"
OWN_PYTHON = Path(sys.executable)

DEADLINE_S = 60.0
"""For one command. The slowest honest one here takes a few seconds."""


def core_halves() -> tuple[str, str]:
    """Processors for the target's process and for the source's; empty when there is only one."""
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    if len(cores) < 2:
        return "", ""
    half = len(cores) // 2
    return ",".join(cores[:half]), ",".join(cores[half:])


class Child:
    """One worker process. Every method ends within its deadline."""

    def __init__(
        self,
        python: Path,
        module: str,
        role: str,
        cores: str,
        env: dict[str, str],
        log: Path,
        wrap: tuple[str, ...] = (),
    ) -> None:
        self.role = role
        self._log = log
        read_fd, write_fd = os.pipe()
        command = [*wrap, str(python), "-m", module, role, cores, str(write_fd)]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **env},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(write_fd,),
                start_new_session=True,
            )
        os.close(write_fd)
        self._answers_fd = read_fd
        self._buffer = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, deadline_s: float = DEADLINE_S, **command: Any) -> dict[str, Any]:
        """Send one command and wait for its answer. HungError, or RivalError if it failed."""
        self.send(**command)
        return self.answer(command["do"], deadline_s)

    def send(self, **command: Any) -> None:
        """Send one command. RivalError if the process is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._dead(command["do"]) from None

    def answer(self, what: str, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """Wait for the answer to the command ``what``, sent before. Raises as :meth:`ask`."""
        end = time.monotonic() + deadline_s
        while b"\n" not in self._buffer:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._answers_fd], [], [], left)[0]:
                raise HungError(f"hung: no answer to {what} in {deadline_s:.0f} s")
            data = os.read(self._answers_fd, 1 << 16)
            if not data:
                raise self._dead(what)
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            kind = MissingError if "ImportError" in answer["error"] else RivalError
            kind = MissingError if "ModuleNotFoundError" in answer["error"] else kind
            raise kind(answer["error"])
        return answer

    def signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def stop(self, deadline_s: float = 3.0) -> None:
        """Ask to close, then kill. Never raises."""
        self.signal(signal.SIGCONT)
        try:
            self.ask(deadline_s, do="close")
            self._process.wait(deadline_s)
        except (RivalError, subprocess.TimeoutExpired):
            self.signal(signal.SIGKILL)
            self._process.wait()
        if self._process.stdin:
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                pass
        os.close(self._answers_fd)

    def _dead(self, command: str) -> RivalError:
        try:
            code = self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            return RivalError(f"the {self.role} closed its answers during {command}")
        end = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
        lines = self._log.read_text(errors="replace").strip().splitlines()
        last = f": {lines[-1][:160]}" if lines else ""
        return RivalError(f"the {self.role} died during {command} ({end}){last}")


class ProcessRival(Rival):
    """A rival whose two processes run ``module`` with the roles ``source`` and ``target``.

    name: row of the table. module: such as ``"benchmarks.rival_nixl"``, which calls
    :func:`benchmarks.worker.serve`. env: added to the environment of both. alone: there is only a
    target, as for memcpy. sleeps: idle processes use no processor time, so they are not stopped
    during the turns of others.
    """

    def __init__(
        self,
        name: str,
        module: str,
        *,
        python: Path = BENCH_PYTHON,
        env: dict[str, str] | None = None,
        alone: bool = False,
        sleeps: bool = False,
        note: str = "",
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.name = name
        self.note = note
        self._module = module
        self._python = python
        self._env = env or {}
        self._alone = alone
        self._sleeps = sleeps
        self._deadline_s = deadline_s
        self._children: list[Child] = []
        self._case: Case | None = None
        self._facts: dict[str, Any] = {}

    def start(self, pool_bytes: int) -> None:
        if not self._python.exists():
            raise MissingError("not installed: run scripts/bench_setup.sh")
        target_cores, source_cores = core_halves()
        remote: dict[str, Any] = {}
        if not self._alone:
            remote = self._child("source", source_cores).ask(
                self._deadline_s, do="open", pool_bytes=pool_bytes, remote={}
            )
        self._facts = self._child("target", target_cores).ask(
            self._deadline_s, do="open", pool_bytes=pool_bytes, remote=remote
        )

    def prepare(self, case: Case) -> None:
        self._case = case
        for child in self._children:
            child.ask(self._deadline_s, do="prepare", case=case.as_dict())

    def run(self) -> Sample:
        before = sum(child.ask(self._deadline_s, do="cpu")["cpu_s"] for child in self._children)
        seconds = self._children[-1].ask(self._deadline_s, do="move")["seconds"]
        after = sum(child.ask(self._deadline_s, do="cpu")["cpu_s"] for child in self._children)
        return Sample(seconds, after - before)

    def verify(self) -> bool | None:
        assert self._case is not None
        answer = self._children[-1].ask(self._deadline_s, do="verify", case=self._case.as_dict())
        return bool(answer["ok"])

    def pause(self) -> None:
        if self._sleeps:
            return
        for child in self._children:
            child.signal(signal.SIGSTOP)

    def resume(self) -> None:
        for child in self._children:
            child.signal(signal.SIGCONT)

    def stop(self) -> None:
        # The target first: it is the one that reaches into the other.
        for child in reversed(self._children):
            child.stop()
        self._children = []

    def figures(self) -> dict[str, float]:
        return self._children[-1].ask(self._deadline_s, do="figures")

    def facts(self) -> dict[str, Any]:
        return self._facts

    def _child(self, role: str, cores: str) -> Child:
        log = ROOT / "bench-results" / "logs" / f"{self.name.replace(' ', '-')}-{role}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        child = Child(self._python, self._module, role, cores, self._env, log)
        self._children.append(child)
        return child
