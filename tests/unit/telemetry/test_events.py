"""Events: each has a sentence, the code notes none that is unknown, and the page lists them all."""

from __future__ import annotations

import ast
import re
import string
from pathlib import Path

import pytest

from kvferry.planner import Plan, RankedPath
from kvferry.telemetry.events import EVENTS, facts_of, seconds, shown_fact, size, text_of

ROOT = Path(__file__).parents[3]
CALLS = {"note": 0, "peer": 1, "note_at": 1}
"""Methods that take an event, and where in their arguments it stands."""


def noted():
    """(file, event, number of facts, names of facts) of each event that the source notes."""
    for path in sorted((ROOT / "src" / "kvferry").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            place = CALLS.get(node.func.attr)
            if place is None or len(node.args) <= place:
                continue
            event = node.args[place]
            if isinstance(event, ast.Constant) and isinstance(event.value, str):
                names = [keyword.arg for keyword in node.keywords]
                yield path.name, event.value, len(node.args) - place - 1 + len(names), names


@pytest.mark.slow
def test_what_the_source_notes_is_known():
    seen = {
        (file, event, count, tuple(names))
        for file, event, count, names in noted()
        if "simulation" not in file and event in EVENTS
    }
    for file, event, count, names in seen:
        assert count == len(EVENTS[event].facts), f"{file}: {event}"
        assert set(names) <= set(EVENTS[event].facts), f"{file}: {event}"
    # A hook that is taken out, or misspelt, is missed here.
    assert {event for _, event, _, _ in seen} >= {
        "planned", "submitted", "began", "progress", "stalled", "failed_path", "fell_back", "abort",
        "comparing", "compared", "moved", "move_failed", "quarantined", "claimed", "offered",
        "cancelled", "peer_gone", "demoted", "arrived", "prefill_asked", "decode_asked",
        "first_byte", "answered",
    }  # fmt: skip


@pytest.mark.parametrize("name", EVENTS)
def test_sentences_use_facts_that_they_have(name):
    kind = EVENTS[name]
    used = {field for _, field, _, _ in string.Formatter().parse(kind.text) if field}
    assert used <= set(kind.facts)
    event = {"event": name, "at_s": 0.0, **dict.fromkeys(kind.facts, 1)}
    assert "{" not in text_of(event)


def test_an_event_of_another_release_is_shown_as_it_came():
    assert text_of({"event": "new_thing", "at_s": 1.0, "wait_s": 2.0}) == "new_thing wait_s=2.00 s"
    assert text_of({"event": "confirmed_by", "at_s": 1.0}) == "confirmed_by"
    assert text_of({"event": "moved", "at_s": 1.0}) == "moved"


def test_facts_become_json_types():
    plan = Plan((RankedPath("shm", "pull", 0.5, "12 GB/s"),), {"cma": "not enabled"})
    facts = facts_of("planned", (10, 2, plan))
    assert facts["plan"]["rejected"] == {"cma": "not enabled"}
    assert text_of({"event": "planned", **facts}) == (
        "plans 10 bytes in 2 spans: first shm/pull (12 GB/s); not cma (not enabled)"
    )
    assert facts_of("unheard_of", (object, 1))["fact_1"] == 1


def test_units():
    assert [seconds(value) for value in (0.0, 4e-6, 0.0123, 2.0, 250.0)] == [
        "0 us", "4 us", "12.3 ms", "2.00 s", "250 s"
    ]  # fmt: skip
    assert [size(value) for value in (0, 12, 4_200_000, 3e9)] == [
        "0 bytes", "12 bytes", "4.2 MB", "3 GB"
    ]  # fmt: skip
    assert shown_fact("bytes_done", 2048) == "2.05 kB"
    assert shown_fact("reason", "a\x1b[31mb\n") == "a?[31mb?"


def test_the_page_lists_every_event():
    page = (ROOT / "docs" / "reference" / "events.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", page, re.MULTILINE)
    listed = {name: re.findall(r"`(\w+)`", facts) for name, facts in rows}
    assert listed == {name: list(kind.facts) for name, kind in EVENTS.items()}
