"""The chaos kit on real processes: a few of its scenarios here, all of them with `make chaos`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvferry.errors import UsageError
from kvferry.testing.chaos import SCENARIOS, Options, Report, run
from kvferry.testing.chaos.namespaces import NET_LINK, Network, missing
from kvferry.testing.chaos.scenarios import TWO_HOSTS

WHY_NO_HOSTS = missing("ip", "unshare", "nsenter", "nft")
needs_hosts = pytest.mark.skipif(bool(WHY_NO_HOSTS), reason=WHY_NO_HOSTS)


def small(*scenarios: str) -> Report:
    report = run(Options(minutes=0, clients=16, scenarios=scenarios, lost_s=2.0), tell=print)
    print(report)
    return report


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_killed_router_and_a_cut_network_break_no_promise() -> None:
    """Without root only the first part."""
    report = run(
        Options(minutes=0, clients=16, scenarios=("kill-router", "cut"), lost_s=2.0), tell=print
    )
    print(report)
    assert report.ok, str(report)
    assert report.outcomes["broken"], "the router's death was not even noticed"
    faults = {fault["scenario"]: fault for fault in report.faults}
    assert faults.keys() | report.skipped.keys() == {"kill-router", "cut"}
    assert faults["kill-router"]["touched"] > 0
    if "cut" in faults:
        assert set(faults["cut"]["seen_s"]) == {"decode-0", "prefill-0"}
        # Silence is all that they had to go by, so the cut was real.
        assert min(faults["cut"]["seen_s"].values()) > 1.0


def test_without_root_scenarios_say_why_they_do_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    names = tuple(name for name, one in SCENARIOS.items() if one.stage == TWO_HOSTS)
    report = run(Options(scenarios=names))
    assert report.skipped == dict.fromkeys(names, "needs root")
    assert "cut-one-way       skipped: needs root" in str(report)


def test_an_unknown_scenario_is_refused_with_the_list() -> None:
    with pytest.raises(UsageError, match=r"no scenario is called nonsense.*kill-router"):
        Options(scenarios=("nonsense",))


REACH = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), 0.4)
except ConnectionRefusedError:
    print("refused")
except TimeoutError:
    print("silence")
"""


@needs_hosts
@pytest.mark.slow
def test_links_are_cut_and_healed_one_by_one_and_go_with_their_owner() -> None:
    with Network() as network:
        left, right = network.hosts.values()

        def reach(address: str) -> str:
            return right.run(sys.executable, "-I", "-S", "-c", REACH, address).strip()

        assert reach(left.kv_address) == "refused"
        network.cut("right", "drop")
        assert reach(left.kv_address) == "silence"
        network.heal("right")
        network.cut("right", "drop", NET_LINK)
        assert reach(left.kv_address) == "refused"
        network.cut("right", "reset")
        assert reach(left.kv_address) == "refused"
        network.heal("right")
        first = left.run("cat", "/proc/sys/kernel/random/boot_id")
        dressed = subprocess.run(
            [*left.dress(["/dev/shm"]), "sh", "-c",
             "cat /proc/sys/kernel/random/boot_id; ls /dev/shm | wc -l"],
            capture_output=True, text=True, check=True,
        ).stdout.split()  # fmt: skip
        assert dressed[0] != first.strip(), "one host must not look like the other"
        assert dressed[1] == "0"
        pid = left.pid
    assert not os.path.exists(f"/proc/{pid}")


def test_a_report_is_plain_json() -> None:
    report = Report(seed=1, clients=2)
    assert json.loads(json.dumps(report.as_dict()))["ok"]
    report.problems.append("a promise")
    assert not report.ok
    assert "1 broken promises:\n* a promise" in str(report)
