"""What the processes of a fleet hold, and waiting, with a bound, until they hold nothing more."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import urllib.request
from collections import Counter
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
    """What a process holds now. Raises OSError when it is gone."""
    mapped = set()
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            if "memfd:" in line:
                mapped.add(line.split()[4])  # the inode: one segment may have several mappings
    return Held(len(file_kinds(pid)), len(os.listdir(f"/proc/{pid}/task")), len(mapped))


def file_kinds(pid: int) -> list[str]:
    """What each descriptor is, sockets without their numbers."""
    kinds = []
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            kinds.append(os.readlink(f"/proc/{pid}/fd/{number}").split(":[")[0])
    return kinds


def holdings(fleet: Fleet) -> dict[str, Held]:
    """What each process of a fleet holds."""
    return {name: held(process.pid) for name, process in fleet.processes.items()}


def engines(fleet: Fleet) -> dict[str, str]:
    """URL by name, such as prefill-0."""
    named = {f"prefill-{i}": url for i, url in enumerate(fleet.prefill_urls)}
    return named | {f"decode-{i}": url for i, url in enumerate(fleet.decode_urls)}


def get_json(url: str, timeout_s: float = 10.0) -> Any:
    """The JSON at a URL. Raises OSError."""
    with urllib.request.urlopen(url, timeout=timeout_s) as answer:
        return json.load(answer)


def states(fleet: Fleet) -> dict[str, Any]:
    """Each engine's /debug/state."""
    return {name: get_json(url + "/debug/state") for name, url in engines(fleet).items()}


def handoffs(fleet: Fleet, name: str) -> int:
    """Hand-offs that an engine, in its present life, has completed with another one."""
    ended = get_json(engines(fleet)[name] + "/debug/state")["connector"]["handoff"]["ended"]
    key = "offer_delivered" if name.startswith("prefill") else "claim_loaded"
    return int(ended.get(key, 0))


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


def grown(fleet: Fleet, before: dict[str, Held]) -> list[str]:
    """Processes that hold more than any of their role did before, in words."""
    found = []
    for name, now in holdings(fleet).items():
        role = name.split("-")[0]
        alike = [had for other, had in before.items() if other.split("-")[0] == role]
        if not now.is_within(alike):
            kinds = Counter(file_kinds(fleet.processes[name].pid))
            found.append(f"{name} holds {now}, and before {alike}; {dict(kinds)}")
    return found


def left_over(check: Callable[[], list[str]], limit_s: float) -> list[str]:
    """Wait until ``check`` has nothing to complain of; returns what it still complains of.

    Blocks up to ``limit_s`` seconds.
    """
    give_up_at = time.monotonic() + limit_s
    pause = threading.Event()
    while (complaints := check()) and time.monotonic() < give_up_at:
        pause.wait(POLL_S)
    return complaints


def wait_until(check: Callable[[], list[str]], limit_s: float, what: str) -> float:
    """Wait until ``check`` has nothing to complain of; returns the seconds that took.

    Raises AssertionError.
    """
    begun = time.monotonic()
    complaints = left_over(check, limit_s)
    assert not complaints, f"{what} after {limit_s:g} s: " + "; ".join(complaints)
    return time.monotonic() - begun


def baseline(fleet: Fleet, limit_s: float = 30.0) -> dict[str, Held]:
    """What all hold when nothing is under way and idle connections are closed.

    It is the least that each of them held within some seconds: a health check comes and goes all
    the time, and on a busy machine one is always there.
    """
    wait_until(lambda: busy(fleet), limit_s, "not idle")
    least = holdings(fleet)
    until = time.monotonic() + QUIET_S

    def look() -> list[str]:
        for name, now in holdings(fleet).items():
            had = least[name]
            least[name] = Held(
                min(had.files, now.files),
                min(had.threads, now.threads),
                min(had.segments, now.segments),
            )
        return ["looking"] if time.monotonic() < until else []

    left_over(look, 2 * QUIET_S)
    return least


def leaks(fleet: Fleet, before: dict[str, Held], limit_s: float = 20.0) -> list[str]:
    """What is still under way, or held and was not before, after ``limit_s`` seconds to end it."""
    return left_over(lambda: busy(fleet), limit_s) + left_over(
        lambda: grown(fleet, before), limit_s
    )


def assert_clean(fleet: Fleet, before: dict[str, Held], limit_s: float = 20.0) -> str:
    """Nothing is under way and nothing is held that was not before. Returns what was found."""
    begun = time.monotonic()
    found = leaks(fleet, before, limit_s)
    assert not found, f"left over after {limit_s:g} s: " + "; ".join(found)
    took_s = time.monotonic() - begun
    return f"idle and back to the baseline after {took_s:.1f} s: {holdings(fleet)}"
