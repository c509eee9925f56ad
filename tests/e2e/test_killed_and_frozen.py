"""Processes are killed and frozen under load: known ends in bounded time, and no wrong token ever.

Which requests touched the victim is what the router says of each (its list of requests just before
the blow, and the headers of the answers). Those may end in an error that names the victim's role,
or go on by computing the prompt where it is decoded; all others must not notice.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest
from fleet_watch import Log

from kvferry.launcher import Fleet
from kvferry.testing.chaos.blows import judge, summary
from kvferry.testing.chaos.scene import ABSENCE_S, DEATH_WAIT_S, Scene
from kvferry.testing.chaos.watch import Held, assert_clean, baseline, handoffs, states
from kvferry.testing.load import Known, Load, LoadResult, Record

Warm = tuple[Fleet, Log, dict[str, Held]]


@contextmanager
def warm_fleet(
    known: list[Known], counts: tuple[int, int], limit_s: float, transport: str, clients: int
) -> Iterator[Warm]:
    """A fleet whose limits for silence are ``limit_s``, and what it holds after a first round."""
    with (
        Log() as log,
        Fleet(
            "tiny",
            log=log,
            prefill=counts[0],
            decode=counts[1],
            transports=(transport,),
            env={
                "KVFERRY_LOST_S": f"{limit_s:g}",
                "KVFERRY_HEARTBEAT_S": f"{limit_s / 5:g}",
                "KVFERRY_CONNECT_S": f"{limit_s:g}",
            },
            engine_flags=("--blocks", "160", "--lease-s", f"{limit_s:g}"),
            router_flags=("--worker-lost-s", f"{limit_s:g}"),
        ) as fleet,
    ):
        # Nobody leaves: decode may find the offer of a client that left withdrawn, and recompute.
        load = Load(
            fleet.router_url, known, clients=max(32, clients), requests=160, leave_share=0, seed=3
        )
        problems = judge(asyncio.run(load.run()).records, [])
        assert not problems, "\n".join(problems)
        for name, state in states(fleet).items():
            assert handoffs(fleet, name) > 0, f"{name} was not used at all: {state}"
            assert state["recomputed"] == 0, f"{name}: {state}"
        yield fleet, log, baseline(fleet)


def under(load: Load, act: Callable[[], Awaitable[None]]) -> LoadResult:
    """Do something while a load runs, and end the load after it."""

    async def scene() -> LoadResult:
        running = asyncio.create_task(load.run())
        try:
            await act()
        finally:
            load.stop()
            result = await running
        return result

    return asyncio.run(scene())


def go_through(
    known: list[Known], transport: str, *, clients: int, freeze_s: float, limit_s: float
) -> None:
    """Under load: kill a decode, then a prefill, then freeze one of each."""
    print(f"\n{transport}:")
    with warm_fleet(known, (2, 2), limit_s, transport, clients) as (fleet, log, before):
        load = Load(fleet.router_url, known, clients=clients, bound_s=60, seed=4)
        scene = Scene(fleet, load, log, random.Random(4), limit_s, name=transport)

        async def act() -> None:
            await asyncio.sleep(1.0)
            await scene.kill("decode-0")
            await scene.kill("prefill-0")
            await scene.freeze("decode-1", freeze_s)
            await scene.freeze("prefill-1", freeze_s)

        result = under(load, act)
        print(f"  {result}")
        for blow in scene.blows:
            print(f"  {summary(result.records, blow)}")
        problems = judge(result.records, scene.blows) + scene.problems
        assert not problems, "\n".join(problems)
        print(f"  {assert_clean(fleet, before)}")


@pytest.mark.slow
def test_requests_survive_kills_and_freezes_or_fail_clearly(known: list[Known]) -> None:
    go_through(known, "shm", clients=32, freeze_s=4.0, limit_s=2.0)


@pytest.mark.stress
@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", ["shm", "staged", "tcp"])
def test_kills_and_freezes_of_twenty_seconds(known: list[Known], transport: str) -> None:
    go_through(known, transport, clients=64, freeze_s=20.0, limit_s=5.0)


# One of each: nobody else can take over.


def kill_the_only(
    known: list[Known], fleet: Fleet, log: Log, name: str
) -> tuple[LoadResult, list[Record], list[Record]]:
    """Kill it under a little load, start it again, and go on until it is used.

    Returns all that happened, the requests that lived while it was dead, and those that were made
    after it was used again. Asserts that nobody waited for longer than a death may take.
    """
    load = Load(fleet.router_url, known, clients=8, leave_share=0.0, bound_s=30, seed=5)
    scene = Scene(fleet, load, log, random.Random(5), 2.0, name="the only one")
    again_at = float("inf")

    async def act() -> None:
        nonlocal again_at
        await asyncio.sleep(0.5)
        await scene.kill(name)
        again_at = time.monotonic()
        await asyncio.sleep(0.5)

    result = under(load, act)
    print(f"\n  {result}")
    (blow,) = scene.blows
    assert not scene.problems + blow.late()
    waits = [r.next_sign_s(blow.at) for r in result.records if r.was_running(blow.at)]
    print(f"  {name}: {len(waits)} requests were running, longest wait {max(waits):.3f} s")
    assert max(waits) <= DEATH_WAIT_S
    dead = [r for r in result.records if blow.at < r.begun and r.ended < blow.at + ABSENCE_S]
    again = [r for r in result.records if r.begun > again_at]
    assert dead
    assert again
    return result, dead, again


@pytest.mark.slow
def test_alone_a_decode_goes_on_and_without_one_requests_fail_clearly(known: list[Known]) -> None:
    """One fleet for both, since most of the time goes into its start and the closing look."""
    with warm_fleet(known, (1, 1), 2.0, "shm", 8) as (fleet, log, before):
        result, dead, again = kill_the_only(known, fleet, log, "prefill-0")
        assert set(result.counts()) == {"ok"}, result.explain("error", "wrong", "hang", "broken")
        assert {record.handoff for record in dead} == {"local"}
        assert {record.handoff for record in again} == {"remote"}

        result, dead, again = kill_the_only(known, fleet, log, "decode-0")
        assert not result.of("wrong", "hang", "broken"), result.explain("wrong", "hang", "broken")
        assert {r.code for r in result.of("error")} <= {"peer_lost", "unreachable"}, result
        assert {record.outcome for record in dead} == {"error"}
        assert {(record.outcome, record.handoff) for record in again} == {("ok", "remote")}
        print(f"  {assert_clean(fleet, before)}")
