"""Runs trials: starts their processes, holds them to a strict limit, and names what a path did
that ended or hung them.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from kvferry.planner import Plan, RankedPath
from kvferry.trials.cache import as_json, as_trial, load, save
from kvferry.trials.process import COMMAND, how_it_ended
from kvferry.trials.records import Trial, TrialBook

PATH_S = 45.0
"""Limit for one path, opening devices included."""
STOP_S = 5.0

Pair = tuple[str, str]
"""(local place, remote place): the local side moves the bytes."""


@dataclass
class Outcome:
    """What trials found.

    book: everything known, that from before included. new: what was tried now, in order.
    plans: the ranking by (local, remote, direction) for every pair that was reached. failed: why
    there is none for a pair. notes: sentences on what was not tried, and why. unusable: transports
    that do not work on this machine, and why.
    problem: why not every pair was reached, in a sentence; "" if every one was.
    """

    book: TrialBook
    new: list[Trial] = field(default_factory=list)
    plans: dict[tuple[str, str, str], Plan] = field(default_factory=dict)
    failed: dict[Pair, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unusable: dict[str, str] = field(default_factory=dict)
    problem: str = ""


@dataclass
class _Round:
    """One pair of processes: how far they came, and how they ended."""

    path: tuple[str, str, str, str] | None = None
    is_complete: bool = False
    is_late: bool = False
    status: int = 0
    words: str = ""


def run(
    pairs: Iterable[Pair],
    *,
    known: TrialBook | None = None,
    transports: Sequence[str] = (),
    try_paths: bool = True,
    limit_s: float = 120.0,
    path_s: float = PATH_S,
    command: Sequence[str] = (*COMMAND, "near"),
    say: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Try every path between each pair that is not known, and rank the paths. Blocks.

    known: trials whose results stand. transports: allowed names, empty for all. try_paths: False
    only ranks. limit_s: for everything; path_s: for one path. say: told what is tried, for people.
    Never raises for what a path or its process does.
    """
    outcome = Outcome(TrialBook(known or ()))
    give_up_at = time.monotonic() + limit_s
    left = list(pairs)
    while left:
        rest_s = give_up_at - time.monotonic()
        if rest_s <= 0:
            outcome.problem = f"the limit of {limit_s:g} s passed before every pair was reached"
            break
        request = {
            "pairs": left,
            "known": [as_json(trial) for trial in outcome.book],
            "transports": list(transports),
            "try": try_paths,
            "limit_s": rest_s,
        }
        before = len(outcome.book), len(outcome.plans), len(outcome.failed)
        ended = _start(command, request, outcome, give_up_at, path_s, say)
        if ended.path is not None:
            _blame(ended, outcome, path_s, give_up_at)
        left = [p for p in left if (*p, "pull") not in outcome.plans and p not in outcome.failed]
        after = len(outcome.book), len(outcome.plans), len(outcome.failed)
        if left and before == after and time.monotonic() < give_up_at:
            outcome.problem = f"trials cannot be run: {ended.words}"
            break
    return outcome


def run_and_keep(directory: str, pairs: Iterable[Pair], *, again: bool, **how: Any) -> Outcome:
    """:func:`run`, with results kept in a directory: those there stand, unless ``again``."""
    known = load(directory)
    outcome = run(pairs, known=None if again else known, **how)
    if outcome.new:
        why = save(directory, outcome.new)
        outcome.notes += [why] if why else []
    return outcome


def _blame(ended: _Round, outcome: Outcome, path_s: float, give_up_at: float) -> None:
    """A path that was being tried when its process ended, or had to be ended."""
    assert ended.path is not None
    if ended.is_late and time.monotonic() >= give_up_at:
        return  # Its own limit had not passed.
    why = f"ended the process that used it: {how_it_ended(ended.status)}"
    if ended.is_late:
        why = f"did not end within {path_s:g} s"
    trial = Trial(*ended.path, at=time.time(), why=why)
    outcome.book.add(trial)
    outcome.new.append(trial)


def _start(
    command: Sequence[str],
    request: dict[str, Any],
    outcome: Outcome,
    give_up_at: float,
    path_s: float,
    say: Callable[[str], None],
) -> _Round:
    """Run one pair of processes and take in what they say."""
    ended = _Round()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # One signal ends both processes.
        )
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
            _listen(process, ended, outcome, give_up_at, path_s, say)
        finally:
            ended.status = _end(process)
        if not ended.is_complete:
            ended.words = ended.words or _last_words(errors) or how_it_ended(ended.status)
            if ended.is_late:
                ended.words = f"nothing was heard for {path_s:g} s"
    return ended


def _listen(
    process: subprocess.Popen[bytes],
    ended: _Round,
    outcome: Outcome,
    give_up_at: float,
    path_s: float,
    say: Callable[[str], None],
) -> None:
    assert process.stdout is not None
    fd, buffer = process.stdout.fileno(), b""
    while not ended.is_complete:
        silent_until = min(time.monotonic() + path_s, give_up_at)
        while b"\n" not in buffer:
            rest_s = silent_until - time.monotonic()
            if rest_s <= 0 or not select.select([fd], [], [], rest_s)[0]:
                ended.is_late = True
                return
            piece = os.read(fd, 1 << 16)
            if not piece:
                # It ends by itself; its status tells how.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_S)
                return
            buffer += piece
        line, _, buffer = buffer.partition(b"\n")
        try:
            _take(json.loads(line), ended, outcome, say)
        except (ValueError, TypeError, KeyError):
            ended.words = "its process says what nobody understands"
            return


def _take(
    message: dict[str, Any], ended: _Round, outcome: Outcome, say: Callable[[str], None]
) -> None:
    if "begin" in message:
        transport, direction, local, remote = map(str, message["begin"])
        ended.path = (transport, direction, local, remote)
        say(f"trying {transport}/{direction} between {local} and {remote}")
    elif "trial" in message:
        trial = as_trial(message["trial"])
        outcome.book.add(trial)
        outcome.new.append(trial)
        ended.path = None
    elif "not_tried" in message:
        if ended.path is None:
            raise ValueError("nothing was begun")
        transport, direction, local, remote = ended.path
        outcome.notes.append(
            f"{transport}/{direction} between {local} and {remote} was not tried: "
            f"{message['not_tried']}"
        )
        ended.path = None
    elif "no_plan" in message:
        outcome.failed[str(message["local"]), str(message["remote"])] = str(message["no_plan"])
    elif "plan" in message:
        for direction in ("pull", "push"):
            key = (str(message["local"]), str(message["remote"]), direction)
            outcome.plans[key] = plan_of(message["plan"][direction])
        outcome.unusable.update(message["plan"]["unusable"])
    elif "end" in message:
        ended.is_complete = True


def plan_of(data: dict[str, Any]) -> Plan:
    """A plan from :meth:`Plan.as_dict`."""
    paths = []
    for item in data["paths"]:
        transport, _, direction = item["path"].partition("/")
        paths.append(RankedPath(transport, direction, item["expected_s"], item["reason"]))
    return Plan(tuple(paths), dict(data["rejected"]))


def _end(process: subprocess.Popen[bytes]) -> int:
    """End the processes, whatever their state; the first one's exit status."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()
    status = process.poll()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        ended = process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        # It hangs in the kernel, where no signal reaches it; nobody must hang with it.
        return -int(signal.SIGKILL)
    return ended if status is None else status


def _last_words(errors: BinaryIO) -> str:
    """The last line that a process wrote to standard error."""
    size = errors.seek(0, os.SEEK_END)
    errors.seek(max(0, size - 4096))
    lines = errors.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else ""
