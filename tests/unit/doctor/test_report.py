"""The reports of fake systems, compared with what they were.

After a change that is meant, ``UPDATE_GOLDEN=1 pytest tests/unit/doctor`` renews them; read what
differs.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvferry.doctor import report
from kvferry.doctor.findings import find
from kvferry.doctor.records import Service
from kvferry.planner import Plan, RankedPath
from kvferry.trials.records import HOST, Trial, TrialBook

from .systems import LAPTOP, examine, systems

GOLDEN = Path(__file__).parent / "golden"


def compare(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert path.exists(), f"there is no {path}: run with UPDATE_GOLDEN=1"
    assert text == path.read_text(), f"another report than in {path}: UPDATE_GOLDEN=1 renews it"


@pytest.mark.slow
@pytest.mark.parametrize("name", systems())
def test_a_system_is_reported_as_before(name: str, engine_directory: str) -> None:
    facts, services, outcome = examine(systems()[name](), engine_directory)
    findings = find(facts, services, outcome.book)
    doctor = report.doctor_text(facts, findings, services, outcome.book)
    explain = report.explain_text(facts, services, outcome.book, outcome.notes)
    compare(name, f"$ kvferry doctor\n{doctor}\n$ kvferry explain\n{explain}")
    whole = report.as_json(facts, services, outcome.book, findings=findings)
    assert json.loads(json.dumps(whole))["paths"][0]["names"] == [HOST, HOST]
    assert [item["level"] for item in whole["findings"]] == [each.level for each in findings]


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(systems())


def test_what_is_not_known_or_not_proven_is_said() -> None:
    plan = Plan((RankedPath("tcp", "push", 1.0, "fine"),), {"shm": "no Unix socket is shared"})
    services = [
        Service(HOST, "GPU-1", why="hidden"),
        Service("GPU-1", HOST, pull=Plan((), {}), push=plan),
        Service(HOST, HOST, pull=Plan((), {"tcp": "no"})),
    ]
    text = report.explain_text(LAPTOP, services, TrialBook(), ["be careful"])
    assert "host -> GPU-1\n  served by not known: hidden" not in text
    assert "host -> GPU-1\n  not known: hidden\n" in text
    assert "GPU-1 -> host\n  served by tcp/push, not proven\n" in text
    assert "host -> host\n  nothing serves it\n" in text
    assert text.endswith("\n\nnote: be careful\n")
    shown = report.as_json(LAPTOP, services, TrialBook())["paths"]
    assert [item["path"] for item in shown] == [None, "tcp/push", None]
    assert shown[1]["missed"][0]["transport"] == "shm"


def test_a_trial_proves_the_path_of_its_own_direction_only() -> None:
    path = RankedPath("shm", "push", 1.0, "fine")
    service = Service("a", "b", push=Plan((path,), {}))
    wrong = Trial("shm", "push", "b", "a", 1.8e9, 1e9)
    right = Trial("shm", "push", "a", "b", 1.8e9, 1e9)
    assert report.trial_of(service, TrialBook([wrong])) is None
    assert report.trial_of(service, TrialBook([wrong, right])) == right


def test_a_trial_of_a_stand_in_proves_the_path_too() -> None:
    path = RankedPath("shm", "push", 1.0, "fine")
    trial = Trial("shm", "push", HOST, HOST, 1.8e9, 1e9)
    service = Service(HOST, "unix:/x", push=Plan((path,), {}))
    assert report.trial_of(service, TrialBook([trial])) is None
    service = Service(HOST, "unix:/x", push=Plan((path,), {}), stand_in=HOST)
    assert report.trial_of(service, TrialBook([trial])) == trial
