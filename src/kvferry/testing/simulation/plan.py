"""What happens in a run, as a list: it is made from a seed, cut down by the shrinker, and told."""

from __future__ import annotations

import random
from dataclasses import dataclass

FAULTS = {
    "leave": 6,
    "withdraw": 4,
    "repeat": 5,
    "freeze": 6,
    "kill": 3,
    "power": 1,
    "close": 1,
    "cut": 3,
    "half": 2,
    "black": 3,
    "mute": 2,
    "slow": 3,
}
"""Kinds of faults, and how often each is chosen."""
FAULTS_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that happens.

    number: stays the same when others are left out. at_s: when. one, two: hosts it happens to.
    about: the request that it is about. seconds: how long it lasts. n_tokens: of a request.
    """

    number: int
    kind: str
    at_s: float
    one: str = ""
    two: str = ""
    about: int = -1
    seconds: float = 0.0
    n_tokens: int = 0

    def words(self) -> str:
        """One line for people."""
        one, two = name(self.one), name(self.two)
        about, long = self.about, f"{self.seconds:.2f} s"
        return {
            "request": f"request {self.number} ({self.n_tokens} tokens) from {one} to {two}",
            "leave": f"the client of request {about} leaves",
            "withdraw": f"prefill withdraws its offer of request {about}",
            "repeat": f"the parameters of request {about} are sent to {two} as well",
            "freeze": f"{one} is frozen for {long}",
            "kill": f"{one} is killed, and started again after {long}",
            "power": f"the host of {one} loses its power, and is back after {long}",
            "close": f"{one} is stopped as it should be, and started again after {long}",
            "cut": f"every connection between {one} and {two} is reset",
            "half": f"{one} sees its connections to {two} end, {two} does not",
            "black": f"nothing passes between {one} and {two} for {long}",
            "mute": f"nothing passes from {one} to {two} for {long}",
            "slow": f"the way from {one} to {two} is slow for {long}",
        }[self.kind]


@dataclass(frozen=True, slots=True)
class Plan:
    """A run: the seed of all that is small, how many processes, and what happens."""

    seed: int
    prefills: int
    decodes: int
    actions: tuple[Action, ...]


def make_plan(seed: int, steps: int) -> Plan:
    """``steps`` actions, of which about seven in ten are requests."""
    rng = random.Random(f"plan/{seed}")
    prefills, decodes = rng.randint(1, 3), rng.randint(1, 3)
    fault_share = rng.choice((FAULTS_SHARE / 3, FAULTS_SHARE, FAULTS_SHARE, FAULTS_SHARE * 1.5))
    hosts = [prefill(i) for i in range(prefills)], [decode(i) for i in range(decodes)]
    actions: list[Action] = []
    begun: list[tuple[int, float]] = []
    now = 0.0
    for number in range(steps):
        now += rng.expovariate(1 / rng.choice((0.01, 0.1, 0.25)))
        if not begun or rng.random() >= fault_share:
            begun.append((number, now))
            n_tokens = rng.choice((0, 1, 2, 3, 4, 5, 6, 8, 8))
            one, two = map(rng.choice, hosts)
            actions.append(Action(number, "request", now, one, two, n_tokens=n_tokens))
        else:
            actions.append(_fault(rng, number, now, hosts, begun))
    actions.sort(key=lambda action: (action.at_s, action.number))
    return Plan(seed, prefills, decodes, tuple(actions))


def _fault(
    rng: random.Random,
    number: int,
    now: float,
    hosts: tuple[list[str], list[str]],
    begun: list[tuple[int, float]],
) -> Action:
    kind = rng.choices(list(FAULTS), list(FAULTS.values()))[0]
    about, since = begun[-rng.randint(1, min(4, len(begun)))]
    one, two = map(rng.choice, hosts)
    if rng.random() < 0.5 and kind != "repeat":
        one, two = two, one
    if kind in ("leave", "withdraw", "repeat"):
        # Soon after the request, when it is in the middle of something.
        now = max(since, now - 0.1) + rng.choice((0.002, 0.01, 0.03, 0.1, 0.5)) * rng.random() * 2
    seconds = rng.choice((0.02, 0.2, 1.0, 2.5, 6.0)) * rng.uniform(0.5, 1.5)
    return Action(number, kind, now, one, two, about, seconds)


def prefill(index: int) -> str:
    """The host of a prefill; addresses are numbers, as the hand-off wants them."""
    return f"10.0.1.{index}"


def decode(index: int) -> str:
    return f"10.0.2.{index}"


def name(host: str) -> str:
    """``P0`` or ``D1``."""
    return ("P" if host.startswith("10.0.1.") else "D") + host.rpartition(".")[2]
