"""The failure benchmark's own judgement, and a few of its scenarios on kvferry."""

from __future__ import annotations

import socket

import pytest
from benchmarks.failures import report, system
from benchmarks.failures.__main__ import all_movers, run, why_not
from benchmarks.failures.scenarios import SCENARIOS
from benchmarks.failures.verdict import Attempt, Expect, Row, Step, in_words
from benchmarks.failures.world import last_line, talk

SCENARIO = {scenario.name: scenario for scenario in SCENARIOS}
MOVER = {mover.name: mover for mover in all_movers()}


def step(*attempts, expect=Expect.FAIL, **fields):
    return Step("read", expect, 2.0, attempts, cause="frozen", **fields)


def attempt(seconds=0.1, error="", **fields):
    return Attempt(0.0, seconds, error, **fields)


GOOD = attempt()
FROZEN = attempt(1.6, "the peer is frozen", cpu_s=0.05)


@pytest.mark.parametrize(
    ("seen", "outcome", "defects"),
    [
        (step(GOOD, FROZEN), "error", []),
        (step(attempt(2.2, "Frozen.")), "error", ["late"]),
        (step(attempt(0.1, "returned -1")), "error", ["vague"]),
        (step(attempt(1.0, "frozen", cpu_s=0.9)), "error", ["busy"]),
        (step(attempt(0.1, "frozen", cpu_s=0.1)), "error", []),
        (step(GOOD), "false success", ["false success"]),
        (step(GOOD, expect=Expect.EITHER), "completed", []),
        (step(FROZEN, expect=Expect.EITHER), "error", []),
        (step(GOOD, expect=Expect.COMPLETE), "completed", []),
        (step(GOOD, GOOD, FROZEN, expect=Expect.COMPLETE), "1 of 3 failed", ["failed"]),
        (
            step(attempt(is_correct=False), GOOD, expect=Expect.EITHER),
            "WRONG BYTES in 1 of 2",
            ["wrong bytes"],
        ),
        (
            step(end="no end within 20 s", waited_s=20.0, cpu_share=0.97),
            "no end within 20 s",
            ["hung", "busy"],
        ),
        (step(end="the process crashed (SIGSEGV)"), "the process crashed (SIGSEGV)", ["crashed"]),
    ],
)
def test_a_step_is_judged(seen, outcome, defects):
    assert (seen.outcome(), seen.defects()) == (outcome, defects)


def test_moving_many_bytes_is_not_waiting():
    busy = attempt(1.0, cpu_s=1.0)
    assert step(busy, expect=Expect.COMPLETE).waiting_share is None


def test_a_row_joins_its_steps():
    row = Row("x", "r", (step(FROZEN), step(attempt(3.0, "refused"))), notes=("gives away",))
    assert row.defects() == ["late", "vague", "gives away"]
    assert row.outcome() == "read: error; read: error"
    assert row.longest_s() == 3.0
    assert row.message() == "the peer is frozen"
    assert not row.is_right
    right, skipped = Row("x", "r", (step(FROZEN),)), Row("x", "r", skipped="for one host")
    assert right.is_right
    assert in_words([row, right, skipped]) == "1 of 2"


def test_the_page_has_a_table_for_each_scenario_that_ran():
    rows = [
        Row("stopped-before", "a", (step(FROZEN),)),
        Row("stopped-before", "b", (step(attempt(0.0, "a|b <c>")),)),
        Row("killed-before", "a", skipped="for one host"),
    ]
    text = report.markdown(SCENARIOS, rows)
    assert "| right | 1 of 1 | 0 of 1 |" in text
    assert "| a | right | error | 1.60 | 0.03 | the peer is frozen |" in text
    assert "| b | vague | error | 0.00 |  | a/b (c) |" in text
    assert SCENARIO["killed-before"].title not in text


def test_processor_time_is_read_from_behind_the_name():
    fields = ["S", *["0"] * 10, "150", "50", *["0"] * 30]
    stat = f"12 (a b) c) {' '.join(fields)}"
    assert system.cpu_s_of(stat) == pytest.approx(200 / system.os.sysconf("SC_CLK_TCK"))


def test_only_listening_sockets_have_ports():
    table = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"
        "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 0 0 0 77 1\n"
        "   1: 0100007F:1F91 0100007F:0016 01 00000000:00000000 00:00000000 0 0 0 78 1\n"
    )
    assert system.listening(table) == {"77": 8080}
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert server.getsockname()[1] in system.ports_of(system.os.getpid())


def test_the_log_line_loses_its_stamp(tmp_path):
    log = tmp_path / "x.log"
    log.write_text("before\nE20261201 12:00:00.123456 77 tcp_transport.cpp:10] no route\n")
    assert last_line(log, 7) == "no route"
    assert last_line(log, log.stat().st_size) == ""


def test_a_stranger_notices_that_it_is_kept():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert talk(port, b"x", 0.05) == (b"", True)
    assert talk(port, b"x", 0.05) == (b"", False)


def test_scenarios_apply_where_they_make_sense():
    shm, tcp, nixl = MOVER["kvferry shm"], MOVER["kvferry tcp"], MOVER["NIXL"]
    assert why_not(SCENARIO["dropped-first"], shm) == "for one host"
    assert why_not(SCENARIO["garbage"], nixl) == "is not reached by a port"
    assert why_not(SCENARIO["other-version"], MOVER["Mooncake tcp"]) == "for kvferry only"
    assert not why_not(SCENARIO["other-version"], tcp)
    assert len(SCENARIO) == len(SCENARIOS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "mover"),
    [
        ("killed-during", "kvferry shm"),
        ("stopped-before", "kvferry tcp"),
        ("write-beyond", "kvferry tcp"),
    ],
)
def test_kvferry_ends_right(scenario, mover, tmp_path):
    row = run(SCENARIO[scenario], MOVER[mover], 20.0, 0, tmp_path)
    assert row.is_right, report.line(row)


def test_a_rival_that_is_not_there_is_said_so(tmp_path):
    absent = system.Path("/nonexistent/python")
    mover = type(MOVER["NIXL"])("NIXL", "x", absent)
    row = run(SCENARIO["killed-first"], mover, 5.0, 0, tmp_path)
    assert row.skipped.startswith("not installed")
