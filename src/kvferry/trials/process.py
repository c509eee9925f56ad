"""The two processes of a trial. ``python -m kvferry.trials.process near`` reads a request in JSON
from its standard input, tries the paths it names and writes what it finds, a line each; it starts
``... far`` itself, which answers calls.

Both end by themselves: the far one when the near one does, and each by an alarm of the system when
the request's limit has passed, whatever hangs.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from kvferry.errors import KVFerryError
from kvferry.trials.attempt import Attempt, FarEnded, FarEngine, NotTried
from kvferry.trials.cache import as_json, as_trial
from kvferry.trials.records import TrialBook, TrialKey

ANSWER_S = 30.0
"""A call to the far process takes so long at most: the first opens a device and compiles."""
GRACE_S = 5.0

COMMAND = (sys.executable, "-m", "kvferry.trials.process")


class FarProcess:
    """The far engine in a process of its own. Used by one thread."""

    def __init__(self, limit_s: float) -> None:
        self._process = subprocess.Popen(
            [*COMMAND, "far", str(limit_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._buffer = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def open(self, transports: list[str], place: str, nbytes: int) -> tuple[str, str]:
        address, ref = self._call("open", transports, place, nbytes)
        return str(address), str(ref)

    def fill(self, nbytes: int, block: int) -> None:
        self._call("fill", nbytes, block)

    def wipe(self, nbytes: int) -> None:
        self._call("wipe", nbytes)

    def compare(self, nbytes: int, block: int) -> str:
        return str(self._call("compare", nbytes, block))

    def shut(self) -> None:
        self._call("shut")

    def close(self) -> None:
        """End the process, whatever its state."""
        self._process.kill()
        self._process.communicate()

    def _call(self, name: str, *arguments: Any) -> Any:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([name, arguments]).encode() + b"\n")
            self._process.stdin.flush()
            answer = json.loads(self._line())
        except (BrokenPipeError, EOFError):
            status = self._process.wait()
            raise FarEnded(how_it_ended(status)) from None
        if answer["error"]:
            raise KVFerryError(f"the process at the other end: {answer['error']}")
        return answer["result"]

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        give_up_at = time.monotonic() + ANSWER_S
        while b"\n" not in self._buffer:
            left = give_up_at - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                raise FarEnded(f"it did not answer within {ANSWER_S:g} s")
            piece = os.read(fd, 1 << 16)
            if not piece:
                raise EOFError
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def how_it_ended(status: int) -> str:
    """An exit status in words."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def far(out: int) -> None:
    """Answer calls until standard input ends."""
    engine = FarEngine()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        result, error = None, ""
        try:
            result = getattr(engine, name)(*arguments)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        os.write(out, json.dumps({"result": result, "error": error}).encode() + b"\n")
    engine.shut()


def near(out: int, request: dict[str, Any]) -> None:
    """Try what the request names and say what is found, a line of JSON each.

    ``{"begin": [transport, direction, local, remote]}`` comes before a path is tried,
    ``{"trial": {...}}`` or ``{"not_tried": why}`` after it, ``{"plan": {...}}`` when a pair is
    done, or ``{"no_plan": why}``, and ``{"end": true}`` when all are. After a failure it stops:
    devices and processes may be unusable then.
    """

    def say(**what: Any) -> None:
        os.write(out, json.dumps(what).encode() + b"\n")

    book = TrialBook(as_trial(item) for item in request["known"])
    allowed = tuple(request["transports"])
    other = FarProcess(float(request["limit_s"]))
    attempt = Attempt(other)
    try:
        for local, remote in request["pairs"]:
            try:
                plans = attempt.plans(local, remote, allowed, book)
                for path in _untried(plans, local, remote, book) if request["try"] else ():
                    if not _try(attempt, path, book, say):
                        return
                plans = attempt.plans(local, remote, allowed, book)
            except (KVFerryError, FarEnded) as error:
                say(no_plan=str(error), local=local, remote=remote)
                if isinstance(error, FarEnded):
                    return
            else:
                say(plan=plans, local=local, remote=remote)
        say(end=True)
    finally:
        other.close()


def _try(attempt: Attempt, path: TrialKey, book: TrialBook, say: Callable[..., None]) -> bool:
    """Whether one can go on after it."""
    say(begin=path)
    try:
        trial = attempt.run(*path)
    except NotTried as error:
        say(not_tried=str(error))
        return True
    book.add(trial)
    say(trial=as_json(trial))
    return not trial.why


def _untried(plans: dict[str, Any], local: str, remote: str, book: TrialBook) -> list[TrialKey]:
    paths = [
        (path["path"].partition("/")[0], direction, local, remote)
        for direction in ("pull", "push")
        for path in plans[direction]["paths"]
    ]
    return [path for path in paths if book.get(path) is None]


def main() -> None:
    """Entry point of both processes."""
    out = os.dup(1)
    os.dup2(2, 1)  # What a library prints must not look like an answer.
    if sys.argv[1] == "far":
        signal.alarm(int(float(sys.argv[2]) + GRACE_S))
        far(out)
    else:
        request = json.loads(sys.stdin.readline())
        signal.alarm(int(request["limit_s"] + GRACE_S))
        near(out, request)


if __name__ == "__main__":
    main()
