"""What the processes of a fleet hold, and waiting, with a bound, until they hold nothing more."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import urllib.request
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kvferry.launcher import Fleet

POLL_S = 0.1
IDLE_MOVERS_MAX = max(2, min(4, os.cpu_count() or 1)) - 1
"""An engine starts its movers, a fixed number, as copies first meet: not all in a first round."""
QUIET_S = 3.6
"""Longer than the router keeps an idle connection to a worker."""


@dataclass(frozen=True)
class Held:
    """What one process holds of the system: descriptors, threads, shared segments."""

    files: int
    threads: int
    segments: int

    def is_within(self, others: Iterable[Held]) -> bool:
        """Whether it is no more than the most that these held, but for movers not yet started."""
        others = list(others)
        return (
            self.files <= max(other.files for other in others)
            and self.threads <= max(other.threads for other in others) + IDLE_MOVERS_MAX
            and self.segments <= max(other.segments for other in others)
        )


def held(pid: int) -> Held:
    files = Counter(file_kinds(pid))
    mapped = set()
    with open(f"/proc/{pid}/maps") as maps:
        for line in maps:
            if "memfd:" in line:
                mapped.add(line.split()[4])  # the inode: one segment may have several mappings
    return Held(sum(files.values()), len(os.listdir(f"/proc/{pid}/task")), len(mapped))


def file_kinds(pid: int) -> list[str]:
    """What each descriptor is, sockets without their numbers."""
    kinds = []
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            kinds.append(os.readlink(f"/proc/{pid}/fd/{number}").split(":[")[0])
    return kinds


def holdings(fleet: Fleet) -> dict[str, Held]:
    return {name: held(process.pid) for name, process in fleet.processes.items()}


def engines(fleet: Fleet) -> dict[str, str]:
    """URL by name, such as prefill-0."""
    named = {f"prefill-{i}": url for i, url in enumerate(fleet.prefill_urls)}
    return named | {f"decode-{i}": url for i, url in enumerate(fleet.decode_urls)}


def get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)


def states(fleet: Fleet) -> dict[str, Any]:
    """Each engine's /debug/state."""
    return {name: get_json(url + "/debug/state") for name, url in engines(fleet).items()}


def busy(fleet: Fleet) -> list[str]:
    """Everything that is still under way, in words; nothing after the last request."""
    found = []
    for name, state in states(fleet).items():
        connector = state["connector"]
        handoff = connector.get("handoff", {"offers": {}, "claims": {}})
        facts = {
            **state["sequences"],
            "blocks not free": state["blocks_total"] - state["blocks_free"],
            "pinned blocks": state["blocks_pinned"],
            "overdue": state["overdue"],
            "transfers": connector["running"],
            **{f"offers {key}": count for key, count in handoff["offers"].items()},
            **{f"claims {key}": count for key, count in handoff["claims"].items()},
        }
        found += [f"{name}: {count} {what}" for what, count in facts.items() if count]
    running = get_json(fleet.router_url + "/debug/requests")["running"]
    found += [f"router: {request}" for request in running]
    for worker in get_json(fleet.router_url + "/health")["workers"]:
        if worker["inflight"]:
            found.append(f"router: {worker['inflight']} in flight on {worker['worker']}")
    return found


def wait_until(check: Callable[[], list[str]], limit_s: float, what: str) -> float:
    """Wait until ``check`` has nothing to complain of; returns the seconds that took."""
    begun = time.monotonic()
    pause = threading.Event()
    while complaints := check():
        if time.monotonic() - begun > limit_s:
            raise AssertionError(f"{what} after {limit_s:g} s: " + "; ".join(complaints))
        pause.wait(POLL_S)
    return time.monotonic() - begun


def baseline(fleet: Fleet, limit_s: float = 30.0) -> dict[str, Held]:
    """What all hold when nothing is under way and idle connections are closed."""
    wait_until(lambda: busy(fleet), limit_s, "not idle")
    last: dict[str, Held] = {}
    since = time.monotonic()

    def moving() -> list[str]:
        nonlocal last, since
        now = holdings(fleet)
        if now != last:
            last, since = now, time.monotonic()
        return [] if time.monotonic() - since > QUIET_S else ["what is held still changes"]

    wait_until(moving, limit_s, "not quiet")
    return last


def assert_clean(fleet: Fleet, before: dict[str, Held], limit_s: float = 20.0) -> str:
    """Nothing is under way and nothing is held that was not before. Returns what was found."""
    took_s = wait_until(lambda: busy(fleet), limit_s, "something is left over")

    def leaks() -> list[str]:
        found = []
        for name, now in holdings(fleet).items():
            role = name.split("-")[0]
            alike = [had for other, had in before.items() if other.split("-")[0] == role]
            if not now.is_within(alike):
                kinds = Counter(file_kinds(fleet.processes[name].pid))
                found.append(f"{name} holds {now}, and before {alike}; {dict(kinds)}")
        return found

    took_s += wait_until(leaks, limit_s, "more is held than before")
    return f"idle and back to the baseline after {took_s:.1f} s: {holdings(fleet)}"


class Log:
    """The last lines that a fleet's processes wrote; printed when the block ends in an error."""

    def __init__(self, lines_max: int = 200) -> None:
        self._lines: deque[str] = deque(maxlen=lines_max)

    def __call__(self, name: str, line: str) -> None:
        self._lines.append(f"[{name}] {line}")

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            print("\n".join(self._lines))
