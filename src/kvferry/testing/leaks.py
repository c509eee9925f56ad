"""What an engine may leave behind: threads, descriptors, mappings, sockets in its directory."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

GRACE_S = 5.0
"""Serving threads end a moment after their peer does; so long is waited for them."""

_WATCHED = ("socket:", "/memfd:kvferry", "pipe:", "anon_inode:[eventpoll]", "anon_inode:[pidfd]")


def threads() -> Counter[str]:
    """Names of the threads that kvferry started."""
    alive = (thread.name for thread in threading.enumerate())
    return Counter(name for name in alive if name.startswith("kvferry-"))


def descriptors() -> Counter[str]:
    """Open descriptors of the kinds that kvferry opens, by what they are."""
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue  # It was the descriptor of the listing itself.
        if target.startswith(_WATCHED):
            found[f"{fd} -> {target}"] += 1
    return found


def mappings() -> Counter[str]:
    """Shared memory of kvferry in this address space, by its name."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        lines = (line.split(maxsplit=5) for line in file)
        names = (parts[5].strip() for parts in lines if len(parts) == 6)
        return Counter(name for name in names if name.startswith("/memfd:kvferry"))


def sockets_in(directory: str) -> Counter[str]:
    """Unix sockets that lie in an engine's directory."""
    if not directory or not os.path.isdir(directory):
        return Counter()
    return Counter(name for name in os.listdir(directory) if name.endswith(".sock"))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What this process holds now. Compare two by :meth:`leaked`.

    directory: also look for Unix sockets there.
    """

    directory: str = ""
    held: dict[str, Counter[str]] = field(default_factory=dict)

    @classmethod
    def take(cls, directory: str = "") -> Snapshot:
        """Look around now. Costs about a millisecond."""
        return cls(directory, _look(directory))

    def leaked(self, grace_s: float = GRACE_S) -> dict[str, list[str]]:
        """What is held now and was not then, by kind; empty when all was given back.

        Blocks up to ``grace_s`` while something is left.
        """
        give_up_at = time.monotonic() + grace_s
        pause = threading.Event()
        while True:
            more = {kind: now - self.held[kind] for kind, now in _look(self.directory).items()}
            left = {kind: sorted(extra.elements()) for kind, extra in more.items() if extra}
            if not left or time.monotonic() >= give_up_at:
                return left
            gc.collect()
            pause.wait(0.01)


def _look(directory: str) -> dict[str, Counter[Any]]:
    return {
        "threads": threads(),
        "descriptors": descriptors(),
        "mappings": mappings(),
        "sockets": sockets_in(directory),
    }
