"""A process whose wall clock jumps while it runs, as one does when a clock is set.

The command runs in an interpreter whose ``time.time`` is shifted (``python -m
kvferry.testing.chaos.wall OFFSET_FILE MODULE ARGUMENT...``); the offset is read from a file, and
the monotonic clocks are left alone, as a jump of the real clock leaves them. The two ways without a
change inside the process are no use here: a time namespace has no wall clock of its own, and
libfaketime breaks the interpreter's own timed waits (``time.sleep`` then fails with EINVAL).
"""

from __future__ import annotations

import email.utils
import runpy
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

MEANS = "time.time is replaced in the process"


class Wall:
    """The wall clock of processes that are dressed in it. ``set`` lets it jump.

    path: a file that lives as long as they do; made at once.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.set(0)

    def set(self, offset_s: int) -> None:
        """From now on the clock is off by so many seconds. Takes effect at once."""
        unready = self._path.with_suffix(".new")
        unready.write_text(f"{offset_s:+d}\n")
        unready.replace(self._path)

    def dress(self, argv: Sequence[str]) -> list[str]:
        """The command of a Python program (``python -m module ...``), under this clock."""
        module = argv.index("-m") + 1
        return [*argv[:module], "kvferry.testing.chaos.wall", str(self._path), *argv[module:]]


def offset_of(url: str) -> float:
    """Seconds by which a server's wall clock is ahead of this one, as its Date header says."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        there = email.utils.parsedate_to_datetime(answer.headers["Date"]).timestamp()
    return there - time.time()


def main() -> None:
    """Shift this interpreter's wall clock, then become the module that the arguments name."""
    path, module = Path(sys.argv[1]), sys.argv[2]
    true_time, true_time_ns = time.time, time.time_ns

    def offset_s() -> int:
        return int(path.read_text())

    time.time = lambda: true_time() + offset_s()
    time.time_ns = lambda: true_time_ns() + offset_s() * 10**9
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
