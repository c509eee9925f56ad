"""Runs scenarios on fleets under load and judges what came of it."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvferry.errors import KVFerryError, UsageError
from kvferry.launcher import Fleet
from kvferry.testing.chaos.blows import judge
from kvferry.testing.chaos.journal import Journal
from kvferry.testing.chaos.namespaces import Network
from kvferry.testing.chaos.report import Report
from kvferry.testing.chaos.scenarios import ONE_HOST, SCENARIOS, TWO_HOSTS, Scenario
from kvferry.testing.chaos.scene import BOUND_S, Scene, Wardrobe
from kvferry.testing.chaos.watch import Held, baseline, leaks
from kvferry.testing.load import Known, Load, LoadResult, learn, make_questions

WARM_REQUESTS = 160
BETWEEN_S = 1.0
"""Calm between two faults, so that what the first one did is not blamed on the second."""
QUESTIONS = 60
OFFER_S = 20.0
"""An offer whose router died between the two legs is pinned for so long."""
SCENARIO_S = 60.0
"""A scenario that goes on for longer hangs."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to run.

    minutes: time under load in all; each scenario runs at least once, whatever it is.
    clients: how many ask at once. scenarios: names; none means all.
    seed: of the questions, the order of the faults and their victims.
    lost_s: after so much silence an engine or a worker counts as lost; the default is the engines'.
    """

    minutes: float = 10.0
    clients: int = 64
    scenarios: tuple[str, ...] = ()
    seed: int = 0
    lost_s: float = 4.0

    def __post_init__(self) -> None:
        unknown = [name for name in self.scenarios if name not in SCENARIOS]
        if unknown:
            raise UsageError(
                f"no scenario is called {', '.join(unknown)}", fix=f"one of {', '.join(SCENARIOS)}"
            )
        if self.clients < 1 or self.minutes < 0 or self.lost_s < 1:
            raise UsageError("clients and lost_s must be at least 1, and minutes not negative")


def run(options: Options, tell: Callable[[str], None] = lambda _line: None) -> Report:
    """Run scenarios on real processes under load. Blocks for ``options.minutes`` and a little more.

    tell: is given a line at each step. Everything that was started has ended when it returns.
    Raises KVFerryError when a fleet or a namespace cannot be made at all.
    """
    report = Report(options.seed, options.clients)
    chosen = [SCENARIOS[name] for name in dict.fromkeys(options.scenarios or SCENARIOS)]
    able: list[Scenario] = []
    for scenario in chosen:
        if why := scenario.why_not():
            report.skipped[scenario.name] = why
            tell(f"{scenario.name} skipped: {why}")
        else:
            able.append(scenario)
    if not able:
        return report
    tell("learning the right answers from an engine that runs alone")
    with Fleet("tiny", prefill=0) as alone:
        questions = make_questions(QUESTIONS, seed=options.seed)
        known = asyncio.run(learn(alone.router_url, questions))
    before = _named_shared_memory()
    for stage in (ONE_HOST, TWO_HOSTS):
        here = [scenario for scenario in able if scenario.stage == stage]
        if here:
            share_s = 60 * options.minutes * len(here) / len(able)
            _Stage(options, stage, here, known, share_s, report, tell).run()
    left = [f"/dev/shm/{name} was left" for name in _named_shared_memory() - before]
    report.leaks += left
    report.problems += left
    return report


def _named_shared_memory() -> set[str]:
    try:
        return {name for name in os.listdir("/dev/shm") if "kvferry" in name}
    except OSError:
        return set()


@dataclass
class _Stage:
    """One fleet, from its start to its end."""

    options: Options
    stage: str
    scenarios: list[Scenario]
    known: list[Known]
    share_s: float
    report: Report
    tell: Callable[[str], None]

    def run(self) -> None:
        journal = Journal()
        count = 2 if self.stage == ONE_HOST else 1
        with _hosts(self.stage) as network:
            homes = {}
            if network is not None:
                homes = {"prefill-0": network.hosts["left"], "decode-0": network.hosts["right"]}
            wardrobe = Wardrobe(homes)
            fleet = self._fleet(count, journal, wardrobe)
            self.tell(f"{self.stage}: starting {count} prefill, {count} decode and a router")
            with fleet:
                known = self.known
                warm = Load(
                    fleet.router_url, known, clients=max(32, self.options.clients),
                    requests=WARM_REQUESTS, leave_share=0, seed=self.options.seed,
                )  # fmt: skip
                first = asyncio.run(warm.run())
                self.report.problems += judge(first.records, [])
                before = baseline(fleet)
                load = Load(
                    fleet.router_url, known, clients=self.options.clients, bound_s=BOUND_S,
                    seed=self.options.seed + 1,
                )  # fmt: skip
                rng = random.Random(f"{self.options.seed} {self.stage}")
                scene = Scene(
                    fleet, load, journal, rng, self.options.lost_s, wardrobe, network
                )  # fmt: skip
                result = asyncio.run(self._storm(scene))
                self._judge(scene, result, before)
            self._look_back(fleet, journal)

    def _fleet(self, count: int, journal: Journal, wardrobe: Wardrobe) -> Fleet:
        lost_s = self.options.lost_s
        env = {
            "KVFERRY_LOST_S": f"{lost_s:g}",
            "KVFERRY_HEARTBEAT_S": f"{lost_s / 5:g}",
            "KVFERRY_CONNECT_S": f"{lost_s:g}",
            "KVFERRY_OFFER_S": f"{OFFER_S:g}",
        }
        if self.stage == TWO_HOSTS:
            env["KVFERRY_INSECURE"] = "1"
        return Fleet(
            "tiny",
            prefill=count,
            decode=count,
            log=journal,
            env=env,
            engine_flags=("--blocks", "160", "--lease-s", f"{lost_s:g}"),
            router_flags=("--worker-lost-s", f"{lost_s:g}"),
            dress=wardrobe,
        )

    async def _storm(self, scene: Scene) -> LoadResult:
        """Faults one after the other, in rounds of a seeded order, while the load runs."""
        running = asyncio.create_task(scene.load.run())
        until = time.monotonic() + self.share_s
        is_first = True
        try:
            while is_first or time.monotonic() < until:
                for scenario in scene.rng.sample(self.scenarios, len(self.scenarios)):
                    if is_first or time.monotonic() < until:
                        await asyncio.sleep(BETWEEN_S)
                        await self._strike(scene, scenario)
                is_first = False
            await asyncio.sleep(BETWEEN_S)
        except (KVFerryError, OSError, TimeoutError) as error:
            # What it broke may not be whole again, so the stage ends here, with a verdict.
            why = f"{type(error).__name__}: {error}"
            scene.problems.append(f"{scene.name} could not go on: {why}")
        finally:
            scene.load.stop()
            result = await running
        return result

    async def _strike(self, scene: Scene, scenario: Scenario) -> None:
        scene.name = scenario.name
        begun = time.monotonic()
        async with asyncio.timeout(SCENARIO_S):
            await scenario.act(scene)
        self.tell(f"  {scenario.name}: {time.monotonic() - begun:.1f} s")

    def _judge(self, scene: Scene, result: LoadResult, before: dict[str, Held]) -> None:
        self.report.add(list(result.records), scene.blows, result.seconds)
        self.report.problems += judge(result.records, scene.blows) + scene.problems
        self.report.facts += scene.facts
        found = leaks(scene.fleet, before, OFFER_S + 10)
        self.report.leaks += found
        self.report.problems += found
        self.tell(f"{self.stage}: {result}; {len(found)} leaks")

    def _look_back(self, fleet: Fleet, journal: Journal) -> None:
        """What the fleet's end and its log say, after it has stopped."""
        problems = list(journal.complaints)
        for name, process in fleet.processes.items():
            if process.returncode:
                problems.append(f"{name} ended with {process.returncode} at an orderly stop")
        self.report.problems += problems
        if self.report.problems:
            self.tell(f"the last lines:\n{journal.last()}")


@contextmanager
def _hosts(stage: str) -> Iterator[Network | None]:
    if stage == ONE_HOST:
        yield None
        return
    with Network() as network:
        yield network
