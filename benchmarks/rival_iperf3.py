"""iperf3: what one TCP connection over the loopback carries. It has no blocks and no bytes."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from typing import Any

from benchmarks.base import Case, HungError, MissingError, Rival, RivalError, Sample
from benchmarks.process import core_halves

DEADLINE_S = 30.0


class Iperf3(Rival):
    """A server that stays, and a client per run; the same stream whatever the block size.

    It takes part in every case, so that tcp can be compared with it within one round.
    """

    name = "iperf3"
    note = "one connection, contiguous 1 MiB writes in every column; nothing to verify"

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._total_bytes = 0

    def start(self, pool_bytes: int) -> None:
        if shutil.which("iperf3") is None:
            raise MissingError("not installed: iperf3 is not on the path")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self._port = probe.getsockname()[1]
        command = [*self._pinned(core_halves()[0]), "iperf3", "-s", "-B", "127.0.0.1"]
        self._server = subprocess.Popen(
            [*command, "-p", str(self._port), "--forceflush"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._server.stdout is not None
        # It prints a banner once it listens.
        if not self._server.stdout.readline():
            raise RivalError("the server ended at once")

    def prepare(self, case: Case) -> None:
        self._total_bytes = case.total_bytes

    def run(self) -> Sample:
        command = [*self._pinned(core_halves()[1]), "iperf3", "-c", "127.0.0.1", "-J"]
        command += ["-p", str(self._port), "-n", str(self._total_bytes), "-l", "1M"]
        try:
            done = subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=False)
        except subprocess.TimeoutExpired:
            raise HungError(f"hung: no result in {DEADLINE_S:.0f} s") from None
        report: dict[str, Any] = json.loads(done.stdout or b"{}")
        if done.returncode or "error" in report:
            raise RivalError(f"iperf3: {report.get('error', done.stderr[:160])}")
        received = report["end"]["sum_received"]
        seconds = received["seconds"] * self._total_bytes / received["bytes"]
        used = report["end"]["cpu_utilization_percent"]
        return Sample(seconds, seconds * (used["host_total"] + used["remote_total"]) / 100)

    def verify(self) -> bool | None:
        self.run()
        return None

    def stop(self) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.communicate()
            self._server = None

    def facts(self) -> dict[str, Any]:
        done = subprocess.run(["iperf3", "--version"], capture_output=True, text=True, check=False)
        return {"iperf3": done.stdout.split("\n")[0]}

    @staticmethod
    def _pinned(cores: str) -> list[str]:
        return ["taskset", "-c", cores] if cores and shutil.which("taskset") else []


def rivals() -> list[Rival]:
    return [Iperf3()]
