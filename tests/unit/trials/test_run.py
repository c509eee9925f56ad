"""Running trials: children that crash, hang, babble or never start, under a limit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry.trials import cache
from kvferry.trials.records import Trial, TrialBook
from kvferry.trials.run import Outcome, plan_of, run, run_and_keep

HOST = ("host", "host")
PLAN = {
    "pull": {"paths": [{"path": "b/pull", "expected_s": 0.5, "reason": "fine"}], "rejected": {}},
    "push": {"paths": [], "rejected": {"b": "no"}},
    "unusable": {"c": "not here"},
}
GOOD = Trial("b", "pull", *HOST, at=1.8e9, bytes_per_s=1e9)

# A child that tries two paths, a and b, unless their results are known already.
CHILD = """
import json, os, signal, sys, time
request = json.loads(sys.stdin.readline())
known = {(item["transport"], item["direction"]) for item in request["known"]}
def say(**what): print(json.dumps(what), flush=True)
for local, remote in request["pairs"]:
    if ("a", "pull") not in known:
        say(begin=["a", "pull", local, remote])
        DO
    if ("b", "pull") not in known:
        say(begin=["b", "pull", local, remote])
        say(trial=GOOD)
    say(plan=PLAN, local=local, remote=remote)
say(end=True)
"""


def attempt(do: str, *, path_s: float = 20.0, limit_s: float = 20.0, **how: Any) -> Outcome:
    good = cache.as_json(GOOD)
    code = CHILD.replace("DO", do).replace("GOOD", repr(good)).replace("PLAN", repr(PLAN))
    command = [sys.executable, "-S", "-c", code]
    return run([HOST], command=command, path_s=path_s, limit_s=limit_s, **how)


def test_what_the_child_says_is_taken_in() -> None:
    said: list[str] = []
    outcome = attempt("say(not_tried='memory is short')", say=said.append)
    assert (outcome.problem, outcome.new, list(outcome.book)) == ("", [GOOD], [GOOD])
    assert outcome.plans == {
        (*HOST, "pull"): plan_of(PLAN["pull"]),  # type: ignore[arg-type]
        (*HOST, "push"): plan_of(PLAN["push"]),  # type: ignore[arg-type]
    }
    assert outcome.plans[(*HOST, "pull")].paths[0].name == "b/pull"
    assert outcome.unusable == {"c": "not here"}
    assert outcome.notes == ["a/pull between host and host was not tried: memory is short"]
    assert said == [f"trying {path}/pull between host and host" for path in "ab"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("do", "why"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended the process that used it: SIGSEGV"),
        ("os._exit(7)", "ended the process that used it: exit status 7"),
        ("while True: time.sleep(1)", "did not end within 0.5 s"),
    ],
)
def test_a_path_that_ends_or_hangs_its_process_is_named_and_the_rest_is_tried(
    do: str, why: str
) -> None:
    outcome = attempt(do, path_s=0.5 if "sleep" in do else 20.0)
    assert [(trial.path, trial.why, trial.is_wrong) for trial in outcome.new] == [
        ("a/pull", why, False),
        ("b/pull", "", False),
    ]
    assert (outcome.problem, len(outcome.plans)) == ("", 2)


@pytest.mark.slow
def test_the_limit_for_all_blames_no_path() -> None:
    outcome = attempt("time.sleep(30)", limit_s=0.3)
    assert outcome.new == []
    assert outcome.problem == "the limit of 0.3 s passed before every pair was reached"


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("raise SystemExit('no module named x')", "no module named x"),
        ("print('hello')", "its process says what nobody understands"),
        ("print('{\"trial\": 3}')", "its process says what nobody understands"),
        ('print(\'{"not_tried": "x"}\')', "its process says what nobody understands"),
        ("import os; os.abort()", "SIGABRT"),
    ],
)
def test_a_child_that_never_begins_is_a_problem_and_not_a_path(code: str, problem: str) -> None:
    outcome = run([HOST], command=[sys.executable, "-S", "-c", code])
    assert outcome.problem == f"trials cannot be run: {problem}"
    assert (outcome.new, outcome.plans) == ([], {})


def test_a_pair_without_a_plan_says_why() -> None:
    code = (
        "import json, sys; pairs = json.loads(sys.stdin.readline())['pairs']\n"
        "for a, b in pairs: print(json.dumps({'no_plan': 'hidden', 'local': a, 'remote': b}))\n"
        "print('{\"end\": true}')"
    )
    outcome = run([HOST, ("host", "GPU-1")], command=[sys.executable, "-S", "-c", code])
    assert (outcome.problem, outcome.failed) == ("", {HOST: "hidden", ("host", "GPU-1"): "hidden"})


def test_known_results_stand() -> None:
    bad = Trial("a", "pull", *HOST, at=1.8e9, why="brought zeros", is_wrong=True)
    outcome = attempt("os.abort()", known=TrialBook([bad, GOOD]))
    assert (outcome.new, set(outcome.book)) == ([], {bad, GOOD})


def test_results_are_kept_unless_they_cannot_be(tmp_path: Path) -> None:
    plan, good = json.dumps({"plan": PLAN, "local": "host", "remote": "host"}), cache.as_json(GOOD)
    lines = [{"begin": list(GOOD.key)}, {"trial": good}]
    text = "".join(json.dumps(line) + "\n" for line in lines) + plan + '\n{"end": true}'
    command = [sys.executable, "-S", "-c", f"print({text!r})"]
    outcome = run_and_keep(str(tmp_path), [HOST], again=False, command=command)
    assert outcome.notes == []
    assert list(cache.load(str(tmp_path), now=1.8e9)) == [GOOD]
    (tmp_path / "file").touch()
    outcome = run_and_keep(str(tmp_path / "file"), [HOST], again=True, command=command)
    assert outcome.notes[0].startswith("results of trials cannot be kept in")


@pytest.mark.slow
def test_real_processes_prove_the_paths_of_host_memory() -> None:
    outcome = run([HOST], transports=("shm",))
    assert outcome.problem == ""
    assert [(trial.path, trial.why) for trial in outcome.new] == [
        ("shm/pull", ""),
        ("shm/push", ""),
    ]
    [path] = outcome.plans[(*HOST, "pull")].paths
    assert " in a trial on " in path.reason
    assert set(outcome.unusable) >= {"tcp", "staged"}
