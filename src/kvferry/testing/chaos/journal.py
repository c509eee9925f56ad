"""What a fleet's processes write, with the time at which it came: who saw what, and when."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Answer = TypeVar("Answer")

_UP = re.compile(r"kvferry\.connections: \S+: peer (\S+) is up ")
_GONE = re.compile(r"kvferry\.connections: \S+: peer (\S+) is gone: ")
_DOWN = re.compile(r" worker (\S+) is down: ")
_STARTING = re.compile(r"starting (\S+)")
_TRACE = "Traceback (most recent call last)"
_COMPLAINTS = ("this is a bug", "does not end; killing it")
COMPLAINTS_MAX = 20


@dataclass(frozen=True, slots=True)
class Loss:
    """One process wrote that another one is gone. at: ``time.monotonic`` when the line came.

    observer: name of the process that wrote it. peer: an engine's name, or a worker's host:port.
    """

    at: float
    observer: str
    peer: str


class Journal:
    """Takes the lines of a fleet (give it as ``log``) and answers questions about them.

    lines_max: how many of the last lines are kept, for people. Any thread may call any method.
    """

    def __init__(self, lines_max: int = 400) -> None:
        self._changed = threading.Condition()
        self._lines: deque[str] = deque(maxlen=lines_max)
        self._losses: deque[Loss] = deque(maxlen=1000)
        self._links: dict[str, Counter[str]] = {}
        self._complaints: list[str] = []
        self._traces: dict[str, str] = {}
        self._clock = time.monotonic

    def __call__(self, process: str, line: str) -> None:
        """Take one line of a process. Never blocks for long."""
        with self._changed:
            self._lines.append(f"[{process}] {line}")
            self._complain(process, line)
            self._read(process, line)
            self._changed.notify_all()

    def _complain(self, process: str, line: str) -> None:
        """Note a bug's confession, and of a trace its last two lines: where and what."""
        if _TRACE in line:
            self._traces[process] = "nowhere"
        elif process in self._traces and line.startswith(" "):
            self._traces[process] = line.strip(" ^~") or self._traces[process]
        elif process in self._traces:
            where = self._traces.pop(process)
            # asyncio logs a trace when it has no descriptor for a new connection, and tries again.
            if not ("accept" in where and "Too many open files" in line):
                self._note(f"{process} wrote: {where}: {line}")
        if any(text in line for text in _COMPLAINTS):
            self._note(f"{process} wrote: {line}")

    def _note(self, complaint: str) -> None:
        if complaint not in self._complaints and len(self._complaints) < COMPLAINTS_MAX:
            self._complaints.append(complaint)

    def _read(self, process: str, line: str) -> None:
        if process == "kvferry" and (found := _STARTING.match(line)):
            self._links[found[1]] = Counter()
        elif found := _UP.search(line):
            self._links.setdefault(process, Counter())[found[1]] += 1
        elif found := _GONE.search(line):
            links = self._links.setdefault(process, Counter())
            links[found[1]] -= 1
            if links[found[1]] <= 0:
                del links[found[1]]
                self._losses.append(Loss(self._clock(), process, found[1]))
        elif found := _DOWN.search(line):
            self._losses.append(Loss(self._clock(), process, found[1]))

    def linked_to(self, peer: str) -> set[str]:
        """Names of the processes that have a connection to an engine of this name."""
        with self._changed:
            return {name for name, peers in self._links.items() if peers[peer] > 0}

    def losses(self, since: float) -> list[Loss]:
        """Who was found to be gone after a time, oldest first."""
        with self._changed:
            return [loss for loss in self._losses if loss.at >= since]

    def wait_for(self, ask: Callable[[], Answer], limit_s: float) -> Answer:
        """Ask again at each new line until the answer is true; returns the last answer.

        Blocks up to ``limit_s`` seconds.
        """
        with self._changed:
            self._changed.wait_for(ask, limit_s)
            return ask()

    @property
    def complaints(self) -> list[str]:
        """Lines that no process may write whatever is done to it: traces, confessed bugs."""
        with self._changed:
            return list(self._complaints)

    def last(self) -> str:
        """The last lines of all processes, in the order in which they came."""
        with self._changed:
            return "\n".join(self._lines)
