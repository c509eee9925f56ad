"""A fleet under load and the hands that strike it. Each method is one fault, from start to heal."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from kvferry.launcher import Fleet
from kvferry.testing.chaos.blows import SLACK_S, Blow
from kvferry.testing.chaos.journal import Journal
from kvferry.testing.chaos.namespaces import Host, Network
from kvferry.testing.chaos.watch import engines, get_json, handoffs, left_over
from kvferry.testing.load import Load

Dressing = Callable[[Sequence[str]], Sequence[str]]

DEATH_SEEN_S = 1.0
"""A killed process is known to be gone by all who had to do with it, on one host."""
DEATH_WAIT_S = 2.0
"""A request that touched a killed process ends, or goes on, within this."""
ABSENCE_S = 1.0
BOUND_S = 30.0
"""A client that has no end after this has none."""
AGAIN_S = 20.0
"""Longest wait until a process that is back takes part in hand-offs."""
LOST_CODES = frozenset({"peer_lost", "deadline", "unreachable"})
"""How a request may end whose decode engine was taken away."""


class Wardrobe:
    """How each process of a fleet starts: on its host, and in what a scenario puts on it."""

    def __init__(self, homes: dict[str, Host] | None = None) -> None:
        self._homes = homes or {}
        self._worn: dict[str, Dressing] = {}

    def __call__(self, name: str, argv: Sequence[str]) -> Sequence[str]:
        """See launcher.Dress."""
        worn = self._worn.get(name)
        argv = argv if worn is None else worn(argv)
        home = self._homes.get(name)
        if home is None:
            return argv
        network = ["--host", home.address, "--listen", f"{home.kv_address}:0"]
        hidden = [argv[argv.index("--socket-dir") + 1]]
        return [*home.dress(hidden), *argv, *network]

    def wear(self, name: str, dressing: Dressing | None) -> None:
        """What the process puts on at its next start; None for its plain self."""
        if dressing is None:
            self._worn.pop(name, None)
        else:
            self._worn[name] = dressing


@dataclass
class Scene:
    """What a scenario has in hand.

    limit_s: after so much silence a peer or a worker counts as lost.
    network: the two hosts, prefill on ``left`` and decode on ``right``; None on one host.
    problems: what a scenario found broken by itself. facts: by which means things were done.
    """

    fleet: Fleet
    load: Load
    journal: Journal
    rng: random.Random
    limit_s: float
    wardrobe: Wardrobe = field(default_factory=Wardrobe)
    network: Network | None = None
    name: str = ""
    blows: list[Blow] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)

    # -- choosing ---------------------------------------------------------------------------

    def pick(self, role: str) -> str:
        """One process of a role, by the seed."""
        names = [name for name in self.fleet.processes if name.split("-")[0] == role]
        return self.rng.choice(names)

    @property
    def hosts(self) -> Network:
        """The network; only for scenarios of two hosts."""
        assert self.network is not None
        return self.network

    def say(self, fact: str) -> None:
        """Note by which means something was done, once."""
        text = f"{self.name}: {fact}"
        if text not in self.facts:
            self.facts.append(text)

    # -- striking ---------------------------------------------------------------------------

    async def begin(
        self, victim: str, wait_s: float, *, may: frozenset[str] = frozenset(), all_of: bool = False
    ) -> Blow:
        """Note who has to do with a victim, just before it is hit.

        victim: a process, or the name of a link. all_of: every request is touched.
        """
        worker, labels = "", set()
        if victim in engines(self.fleet):
            worker = urlsplit(engines(self.fleet)[victim]).netloc
            url = self.fleet.router_url + "/debug/requests"
            running = (await asyncio.to_thread(get_json, url))["running"]
            labels = {r["label"] for r in running if worker in (r["prefill"], r["decode"])}
        blow = Blow(self.name, victim, time.monotonic(), wait_s, worker, may, all_of, labels=labels)
        self.blows.append(blow)
        return blow

    async def kill(self, victim: str, dressing: Dressing | None = None) -> Blow:
        """SIGKILL, noticed by all, a moment of absence, the same port again, and used again.

        dressing: what it puts on when it starts again.
        """
        process = self.fleet.processes[victim]
        observers = self.journal.linked_to(f"engine-{process.pid}")
        is_router = victim == "router"
        may = {"router": frozenset({"broken"}), "decode": LOST_CODES}
        blow = await self.begin(
            victim,
            DEATH_WAIT_S,
            may=may.get(victim.split("-")[0], frozenset()),
            all_of=is_router or self.fleet.decode_urls == [engines(self.fleet).get(victim)],
        )
        blow.seen_limit_s = DEATH_SEEN_S
        os.kill(process.pid, signal.SIGKILL)
        if not is_router:
            await self.await_seen(blow, observers, f"engine-{process.pid}", blow.seen_limit_s)
        await asyncio.sleep(max(0.0, blow.at + ABSENCE_S - time.monotonic()))
        self.wardrobe.wear(victim, dressing)
        await asyncio.to_thread(self.fleet.restart, victim)
        if blow.worker:
            await self.await_up(blow.worker)
        blow.over = time.monotonic()
        if not is_router:
            await self.await_use(victim, 0)
        return blow

    async def freeze(self, victim: str, seconds: float) -> Blow:
        """SIGSTOP for so long, SIGCONT, and used again. Longer than the limit, it is noticed."""
        process = self.fleet.processes[victim]
        observers = self.journal.linked_to(f"engine-{process.pid}")
        is_router, is_long = victim == "router", seconds > self.limit_s + SLACK_S
        used = 0 if is_router else await asyncio.to_thread(handoffs, self.fleet, victim)
        blow = await self.begin(
            victim,
            SLACK_S + (min(seconds, self.limit_s) if not is_router else seconds),
            may=LOST_CODES if is_long and victim.startswith("decode") else frozenset(),
            all_of=is_router,
        )
        os.kill(process.pid, signal.SIGSTOP)
        if is_long and not is_router:
            blow.seen_limit_s = self.limit_s + SLACK_S
            await self.await_seen(blow, observers, f"engine-{process.pid}", blow.seen_limit_s)
        await asyncio.sleep(max(0.0, blow.at + seconds - time.monotonic()))
        os.kill(process.pid, signal.SIGCONT)
        blow.over = time.monotonic()
        if not is_router:
            # What it may finish of the time before does not count.
            await self.await_use(victim, used + 20)
        return blow

    async def starve(self, victim: str, spare: int, seconds: float) -> Blow:
        """Leave a running process so few descriptors, then all of them again, and used again."""
        process = self.fleet.processes[victim]
        limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        is_router = victim == "router"
        used = 0 if is_router else await asyncio.to_thread(handoffs, self.fleet, victim)
        blow = await self.begin(
            victim,
            seconds + self.limit_s + SLACK_S,
            may=LOST_CODES | {"broken"} if is_router else LOST_CODES,
            all_of=is_router,
        )
        few = len(os.listdir(f"/proc/{process.pid}/fd")) + spare
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (few, limits[1]))
        await asyncio.sleep(seconds)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)
        blow.over = time.monotonic() + self.limit_s
        if not is_router:
            await self.await_use(victim, used + 20)
        return blow

    # -- watching ---------------------------------------------------------------------------

    async def await_seen(self, blow: Blow, observers: set[str], peer: str, limit_s: float) -> None:
        """Wait until observers, and the router if the victim is a worker, wrote that it is gone.

        peer: what the engines call it. Fills in ``blow.seen``.
        """
        wanted = {(who, peer) for who in observers if who != blow.victim}
        if blow.worker:
            wanted.add(("router", blow.worker))

        def seen() -> dict[str, float]:
            return {
                loss.observer: loss.at - blow.at
                for loss in reversed(self.journal.losses(blow.at))
                if (loss.observer, loss.peer) in wanted
            }

        # A little longer than allowed: late is something else than never.
        await asyncio.to_thread(
            self.journal.wait_for, lambda: len(seen()) == len(wanted), limit_s + 1.0
        )
        found = seen()
        blow.seen |= {who: found.get(who) for who, _ in wanted}

    async def await_up(self, worker: str) -> None:
        """Wait until the router sends a worker requests again. Notes a problem."""

        def down() -> list[str]:
            # Not 200 while no decode worker is up, and then it is not up either.
            try:
                workers = get_json(self.fleet.router_url + "/health")["workers"]
            except OSError as error:
                return [f"the router: {error}"]
            return [str(one) for one in workers if one["worker"] == worker and not one["up"]]

        left = await asyncio.to_thread(left_over, down, AGAIN_S)
        self.problems += [f"{self.name}: not up again after {AGAIN_S:g} s: {one}" for one in left]

    async def await_use(self, name: str, above: int) -> None:
        """Wait until an engine has completed more than so many hand-offs. Notes a problem."""

        def unused() -> list[str]:
            count = handoffs(self.fleet, name)
            return [] if count > above else [f"{name}: {count} hand-offs, not above {above}"]

        left = await asyncio.to_thread(left_over, unused, AGAIN_S)
        self.problems += [f"{self.name}: not used again after {AGAIN_S:g} s: {one}" for one in left]
