"""Sixty-four clients at once over each transport, some leaving in mid-stream; nothing is left over.

Every request that does not leave gets the right tokens, and afterwards no process holds anything
that it did not hold after the first, warming round.
"""

from __future__ import annotations

import asyncio

import pytest
from fleet_watch import Log

from kvferry.launcher import Fleet
from kvferry.testing.chaos.watch import assert_clean, baseline, states
from kvferry.testing.load import Known, Load, LoadResult

CLIENTS = 64
WARM_REQUESTS = 150
POOL_BLOCKS = 80
"""Room for some ten of the sixty-four requests."""


def check_answers(result: LoadResult) -> None:
    bad = ("wrong", "broken", "hang", "error")
    assert not result.of(*bad), result.explain(*bad)
    left = [record for record in result.of("ok") if record.handoff != "remote"]
    assert not left, f"{len(left)} answers were not handed off, the first: {left[0].explain()}"
    share = len(result.of("left")) / len(result.records)
    assert 0.02 < share < 0.2, f"{share:.1%} of the clients left: {result}"


def check_paths(fleet: Fleet, transport: str, results: list[LoadResult]) -> None:
    """The hand-offs went the way that the test is about, and none was computed twice.

    A client that leaves while decode claims may cost one: prefill takes its offer back, and decode
    begins to compute the prompt before it hears that nobody waits for it.
    """
    loaded_min = sum(len(result.of("ok")) for result in results)
    left = sum(len(result.of("left")) for result in results)
    for name, state in states(fleet).items():
        connector = state["connector"]
        assert state["recomputed"] <= left, f"{name}: {connector['recent_claims']}"
        assert connector["demotions"] == 0, f"{name}: {connector}"
        ended = connector["handoff"]["ended"]
        if name.startswith("decode"):
            assert set(connector["bytes_by_path"]) == {f"{transport}/pull"}, f"{name}: {connector}"
            assert ended["claim_loaded"] >= loaded_min, ended
            assert set(ended) <= {"claim_loaded", "claim_aborted", "claim_cancelled"}, ended
        else:
            assert ended["offer_delivered"] >= loaded_min, ended
            # Those that nobody claimed were abandoned by name, not left to their time.
            assert "offer_expired" not in ended, ended


def stress(known: list[Known], transport: str, *, requests: int | None, seconds: float) -> None:
    flags = ("--blocks", str(POOL_BLOCKS))
    with (
        Log() as log,
        Fleet("tiny", log=log, transports=(transport,), engine_flags=flags) as fleet,
    ):
        warm = Load(fleet.router_url, known, clients=CLIENTS, requests=WARM_REQUESTS, seed=1)
        warmed = asyncio.run(warm.run())
        check_answers(warmed)
        before = baseline(fleet)
        load = Load(
            fleet.router_url,
            known,
            clients=CLIENTS,
            requests=requests,
            duration_s=seconds,
            seed=2,
        )
        result = asyncio.run(load.run())
        print(f"\n{transport}: {result}")
        check_answers(result)
        print(f"{transport}: {assert_clean(fleet, before)}")
        check_paths(fleet, transport, [warmed, result])


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "staged", "tcp"])
def test_sixty_four_clients_get_right_answers_and_leave_nothing(
    known: list[Known], transport: str
) -> None:
    stress(known, transport, requests=300, seconds=60)


@pytest.mark.stress
@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", ["shm", "staged", "tcp"])
def test_sixty_four_clients_for_minutes(known: list[Known], transport: str) -> None:
    stress(known, transport, requests=None, seconds=110)
