"""The file in which results of trials outlive the processes that made them.

There is one file per boot of the host, version of the GPU driver and version of kvferry: what was
true of another combination says nothing about this one. It is JSON, small, and replaced whole.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from kvferry import __version__
from kvferry.sockets import host_id
from kvferry.trials.records import Trial, TrialBook

log = logging.getLogger(__name__)

FAILURE_AGE_MAX_S = 24 * 3600.0
"""A failure counts for so long: the machine may have been too busy. Wrong bytes count until the
next boot, and so does success."""
OLD_S = 30 * 24 * 3600.0
FILE_BYTES_MAX = 4 << 20
_DRIVER_FILES = ("/sys/module/nvidia/version", "/proc/driver/nvidia/version")


def driver_version() -> str:
    """The version of NVIDIA's kernel module, ``"none"`` without one. Loads no library."""
    for name in _DRIVER_FILES:
        with contextlib.suppress(OSError):
            found = re.search(r"\d+\.\d[\d.]*", Path(name).read_text(errors="replace"))
            if found:
                return found[0]
    return "none"


def file_of(directory: str) -> Path:
    """Where results are kept that hold for this boot, driver and version."""
    name = f"trials-{host_id()}-{driver_version()}-{__version__}.json"
    return Path(directory) / re.sub(r"[^\w.-]", "_", name)


def load(directory: str, *, now: float | None = None) -> TrialBook:
    """The results that still count; none when there is no file, or none that can be used.

    now: seconds since 1970, default is the present.
    """
    path = file_of(directory)
    try:
        with path.open("rb") as file:
            facts = os.fstat(file.fileno())
            if facts.st_uid not in (0, os.getuid()) or facts.st_mode & 0o022:
                raise ValueError("others can write to it")
            data = json.loads(file.read(FILE_BYTES_MAX))
        trials = [as_trial(item) for item in data["trials"]]
    except FileNotFoundError:
        return TrialBook()
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("results of trials in %s are not used: %s", path, error)
        return TrialBook()
    now = time.time() if now is None else now
    return TrialBook(trial for trial in trials if _counts(trial, now))


def save(directory: str, trials: Iterable[Trial]) -> str:
    """Add results to the file; those of the same paths are replaced. Returns why it could not be
    done, in a sentence, or ""."""
    book = load(directory)
    for trial in trials:
        book.add(trial)
    path = file_of(directory)
    text = json.dumps({"trials": [as_json(trial) for trial in book]}, indent=1)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_old(path)
        fd, unready = tempfile.mkstemp(dir=path.parent, prefix=".trials-")
        try:
            with open(fd, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(unready, path)
        except OSError:
            os.unlink(unready)
            raise
    except OSError as error:
        return f"results of trials cannot be kept in {directory}: {error.strerror}"
    return ""


def as_json(trial: Trial) -> dict[str, Any]:
    """A trial as plain JSON types."""
    return asdict(trial)


def as_trial(item: Any) -> Trial:
    """A trial from :func:`as_json`. Raises ValueError, TypeError or KeyError when it is none."""
    values = {field.name: item[field.name] for field in fields(Trial)}
    for name, value in values.items():
        wanted = {"is_wrong": (bool,), "at": (int, float)}.get(
            name, (int, float) if name.endswith("_s") else (str,)
        )
        if not isinstance(value, wanted):
            raise ValueError(f"{name} is {value!r}")
    trial = Trial(**values)
    if not trial.why and not trial.bytes_per_s > 0:
        raise ValueError("a speed is missing")
    return trial


def _counts(trial: Trial, now: float) -> bool:
    return not trial.why or trial.is_wrong or now - trial.at < FAILURE_AGE_MAX_S


def _remove_old(keep: Path) -> None:
    """Files of earlier boots and versions, when they are old."""
    for path in keep.parent.glob("trials-*.json"):
        with contextlib.suppress(OSError):
            if path != keep and time.time() - path.stat().st_mtime > OLD_S:
                path.unlink()
