"""A process under a wall clock that jumps, while its monotonic clock goes on."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvferry.testing.chaos.wall import Wall

PROBE = """
import sys, time
print(sys.argv[1], flush=True)
for line in sys.stdin:
    print(time.time(), time.time_ns() / 1e9, time.monotonic(), flush=True)
"""


@pytest.mark.slow
def test_the_wall_clock_jumps_and_the_monotonic_one_does_not(tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    wall = Wall(tmp_path / "offset")
    command = wall.dress([sys.executable, "-m", "probe", "an argument"])
    with subprocess.Popen(
        command, cwd=tmp_path, text=True, bufsize=1, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as probe:
        assert probe.stdin is not None
        assert probe.stdout is not None
        assert probe.stdout.readline() == "an argument\n"
        for offset_s in (0, 3600, -86_400, 0):
            wall.set(offset_s)
            probe.stdin.write("now\n")
            seconds, nanoseconds, monotonic = map(float, probe.stdout.readline().split())
            assert seconds - time.time() == pytest.approx(offset_s, abs=5)
            assert nanoseconds - time.time() == pytest.approx(offset_s, abs=5)
            assert monotonic == pytest.approx(time.monotonic(), abs=5)
        probe.stdin.close()
    assert probe.returncode == 0
