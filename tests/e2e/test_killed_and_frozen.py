"""Processes are killed and frozen under load: known ends in bounded time, and no wrong token ever.

Which requests touched the victim is what the router says of each (its list of requests just before
the blow, and the headers of the answers). Those may end in an error that names the victim's role,
or go on by computing the prompt where it is decoded; all others must not notice.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from fleet_watch import (
    Held,
    Log,
    assert_clean,
    baseline,
    engines,
    get_json,
    states,
    wait_until,
)

from kvferry.launcher import Fleet
from kvferry.testing.load import Known, Load, LoadResult, Record

DEATH_S = 2.0
"""A request that touched a killed process ends, or goes on, within this."""
SLACK_S = 1.5
"""Health checks, timers and a busy machine, on top of the limits that are configured."""
ABSENCE_S = 1.0
AGAIN_S = 20.0
"""Longest wait until a process that is back takes part in hand-offs."""


@dataclass
class Blow:
    """One process, killed or frozen. Times of time.monotonic; worker: its host:port."""

    name: str
    worker: str
    at: float
    limit_s: float
    labels: set[str] = field(default_factory=set)
    over: float = 0.0

    def touched(self, record: Record) -> bool:
        """Whether a request had to do with the victim while it was dead or frozen."""
        named = self.worker in (record.prefill, record.decode) or record.label in self.labels
        return named and record.begun <= self.over and (not record.ended or record.ended > self.at)

    def wait_s(self, record: Record) -> float:
        """From the blow, or the request's later start, to its end or the next part of it."""
        return record.next_sign_s(max(self.at, record.begun))


class Storm:
    """A fleet under load, and what is done to it."""

    def __init__(self, fleet: Fleet, load: Load) -> None:
        self.fleet, self.load = fleet, load
        self.blows: list[Blow] = []

    def worker(self, name: str) -> str:
        return urlsplit(engines(self.fleet)[name]).netloc

    async def kill(self, name: str) -> None:
        """SIGKILL, a moment of absence, the same port again, and hand-offs with it again."""
        blow = await self._hit(name, signal.SIGKILL, DEATH_S)
        await asyncio.sleep(ABSENCE_S)
        await asyncio.to_thread(self.fleet.restart, name)
        blow.over = time.monotonic()
        await asyncio.to_thread(self._await_use, name, 0)

    async def freeze(self, name: str, seconds: float, limit_s: float) -> None:
        """SIGSTOP for so long, SIGCONT, and hand-offs with it again."""
        used = handoffs(self.fleet, name)
        blow = await self._hit(name, signal.SIGSTOP, limit_s)
        await asyncio.sleep(seconds)
        os.kill(self.fleet.processes[name].pid, signal.SIGCONT)
        blow.over = time.monotonic()
        # What it may finish of the time before does not count.
        await asyncio.to_thread(self._await_use, name, used + 20)

    async def _hit(self, name: str, number: signal.Signals, limit_s: float) -> Blow:
        worker = self.worker(name)
        running = await asyncio.to_thread(get_json, self.fleet.router_url + "/debug/requests")
        blow = Blow(name, worker, time.monotonic(), limit_s)
        os.kill(self.fleet.processes[name].pid, number)
        blow.labels = {r["label"] for r in running["running"] if worker in _workers_of(r)}
        self.blows.append(blow)
        return blow

    def _await_use(self, name: str, above: int) -> None:
        def unused() -> list[str]:
            count = handoffs(self.fleet, name)
            if count > above:
                return []
            return [f"{name}: {count} hand-offs, not above {above}: {states(self.fleet)}"]

        took_s = wait_until(unused, AGAIN_S, "not used again")
        print(f"  {name} takes part in hand-offs again after {took_s:.1f} s")


def _workers_of(request: dict[str, Any]) -> tuple[str, str]:
    return request["prefill"], request["decode"]


def handoffs(fleet: Fleet, name: str) -> int:
    """Hand-offs that this process, in its present life, has completed with another one."""
    ended = get_json(engines(fleet)[name] + "/debug/state")["connector"]["handoff"]["ended"]
    key = "offer_delivered" if name.startswith("prefill") else "claim_loaded"
    return int(ended.get(key, 0))


def check(result: LoadResult, blows: list[Blow]) -> None:
    """No wrong token and no hang; errors only where a blow explains them, and in time."""
    print(f"  {result}")
    assert not result.of("wrong", "hang", "broken"), result.explain("wrong", "hang", "broken")
    for record in result.of("error"):
        blame = [b for b in blows if b.name.startswith("decode") and b.touched(record)]
        assert blame, f"an error that no blow explains: {record.explain()}"
        assert record.code in ("peer_lost", "deadline"), record.explain()
    for blow in blows:
        touched = [record for record in result.records if blow.touched(record)]
        others = [r for r in result.records if r.was_running(blow.at) and r not in touched]
        waits = sorted(((blow.wait_s(r), r) for r in touched), key=lambda pair: pair[0])
        ends = [r.outcome for r in touched]
        longest_s, slowest = waits[-1]
        print(
            f"  {blow.name}: {len(touched)} requests touched it ({ends.count('ok')} ok, "
            f"{ends.count('error')} errors, {ends.count('left')} left), longest wait "
            f"{longest_s:.3f} s of {blow.limit_s:g}; {len(others)} others, longest wait "
            f"{max((r.next_sign_s(blow.at) for r in others), default=0.0):.3f} s"
        )
        assert longest_s <= blow.limit_s, f"{blow.name}: {longest_s:.3f} s: {slowest.explain()}"


@contextmanager
def warm_fleet(
    known: list[Known], counts: tuple[int, int], limit_s: float, transport: str, clients: int
) -> Iterator[tuple[Fleet, dict[str, Held]]]:
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
        check(asyncio.run(load.run()), [])
        for name, state in states(fleet).items():
            assert handoffs(fleet, name) > 0, f"{name} was not used at all: {state}"
            assert state["recomputed"] == 0, f"{name}: {state}"
        yield fleet, baseline(fleet)


async def storm(
    known: list[Known], fleet: Fleet, *, clients: int, freeze_s: float, limit_s: float
) -> tuple[LoadResult, list[Blow]]:
    """Under load: kill a decode, then a prefill, then freeze one of each."""
    load = Load(fleet.router_url, known, clients=clients, bound_s=60, seed=4)
    storm = Storm(fleet, load)
    running = asyncio.create_task(load.run())
    try:
        await asyncio.sleep(1.0)
        await storm.kill("decode-0")
        await storm.kill("prefill-0")
        await storm.freeze("decode-1", freeze_s, limit_s + SLACK_S)
        await storm.freeze("prefill-1", freeze_s, limit_s + SLACK_S)
    finally:
        load.stop()
        result = await running
    return result, storm.blows


def go_through(
    known: list[Known], transport: str, *, clients: int, freeze_s: float, limit_s: float
) -> None:
    print(f"\n{transport}:")
    with warm_fleet(known, (2, 2), limit_s, transport, clients) as (fleet, before):
        result, blows = asyncio.run(
            storm(known, fleet, clients=clients, freeze_s=freeze_s, limit_s=limit_s)
        )
        check(result, blows)
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
    known: list[Known], fleet: Fleet, name: str
) -> tuple[LoadResult, list[Record], list[Record]]:
    """Kill it under a little load, start it again, and go on until it is used.

    Returns all that happened, the requests that lived while it was dead, and those that were made
    after it was used again. Asserts that nobody waited for longer than a death may take.
    """
    load = Load(fleet.router_url, known, clients=8, leave_share=0.0, bound_s=30, seed=5)
    storm = Storm(fleet, load)
    again_at = float("inf")

    async def scene() -> LoadResult:
        nonlocal again_at
        running = asyncio.create_task(load.run())
        try:
            await asyncio.sleep(0.5)
            await storm.kill(name)
            again_at = time.monotonic()
            await asyncio.sleep(0.5)
        finally:
            load.stop()
            result = await running
        return result

    result = asyncio.run(scene())
    print(f"\n  {result}")
    blow = storm.blows[0]
    waits = [r.next_sign_s(blow.at) for r in result.records if r.was_running(blow.at)]
    print(f"  {name}: {len(waits)} requests were running, longest wait {max(waits):.3f} s")
    assert max(waits) <= DEATH_S
    dead = [r for r in result.records if blow.at < r.begun and r.ended < blow.at + ABSENCE_S]
    again = [r for r in result.records if r.begun > again_at]
    assert dead
    assert again
    return result, dead, again


@pytest.mark.slow
def test_alone_a_decode_goes_on_and_without_one_requests_fail_clearly(known: list[Known]) -> None:
    """One fleet for both, since most of the time goes into its start and the closing look."""
    with warm_fleet(known, (1, 1), 2.0, "shm", 8) as (fleet, before):
        result, dead, again = kill_the_only(known, fleet, "prefill-0")
        assert set(result.counts()) == {"ok"}, result.explain("error", "wrong", "hang", "broken")
        assert {record.handoff for record in dead} == {"local"}
        assert {record.handoff for record in again} == {"remote"}

        result, dead, again = kill_the_only(known, fleet, "decode-0")
        assert not result.of("wrong", "hang", "broken"), result.explain("wrong", "hang", "broken")
        assert {r.code for r in result.of("error")} <= {"peer_lost", "unreachable"}, result
        assert {record.outcome for record in dead} == {"error"}
        assert {(record.outcome, record.handoff) for record in again} == {("ok", "remote")}
        print(f"  {assert_clean(fleet, before)}")
