"""The table of scenarios: what is done to a fleet under load, and what it needs to be done."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvferry.testing.chaos.blows import SLACK_S
from kvferry.testing.chaos.namespaces import KV_LINK, NET_LINK, PORTS_DEFAULT, missing, private
from kvferry.testing.chaos.scene import BOUND_S, LOST_CODES, Scene
from kvferry.testing.chaos.wall import MEANS, Wall, offset_of
from kvferry.testing.chaos.watch import engines, handoffs

Act = Callable[[Scene], Awaitable[None]]

ONE_HOST, TWO_HOSTS = "one host", "two hosts"
_HOSTS = ("ip", "unshare", "nsenter", "mount")


@dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of fault. stage: which fleet it strikes. why_not: "" or why it cannot run here."""

    name: str
    stage: str
    summary: str
    act: Act
    why_not: Callable[[], str] = lambda: ""


# -- one host -----------------------------------------------------------------------------------


async def _kill_prefill(scene: Scene) -> None:
    await scene.kill(scene.pick("prefill"))


async def _kill_decode(scene: Scene) -> None:
    await scene.kill(scene.pick("decode"))


async def _kill_router(scene: Scene) -> None:
    await scene.kill("router")


async def _freeze_prefill(scene: Scene) -> None:
    await scene.freeze(scene.pick("prefill"), scene.limit_s + 3.0)


async def _freeze_decode(scene: Scene) -> None:
    await scene.freeze(scene.pick("decode"), scene.limit_s + 3.0)


async def _freeze_router(scene: Scene) -> None:
    await scene.freeze("router", scene.limit_s + 1.0)


async def _blink(scene: Scene) -> None:
    """Shorter than any limit: nobody may be given up."""
    await scene.freeze(scene.pick(scene.rng.choice(["prefill", "decode"])), scene.limit_s / 4)


async def _small_shm(scene: Scene) -> None:
    """Pools of 32 MiB where /dev/shm has 16: KV memory must not depend on that mount."""

    def dressing(argv: Sequence[str]) -> Sequence[str]:
        small = private(["-t tmpfs -o size=16m tmpfs /dev/shm"])
        return [*small, *argv, "--blocks", "4096"]

    names = [scene.pick("prefill"), scene.pick("decode")]
    for name in names:
        await scene.kill(name, dressing)
    for name in names:
        await scene.kill(name)


async def _few_descriptors(scene: Scene) -> None:
    victim = scene.pick(scene.rng.choice(["prefill", "decode", "router"]))
    await scene.starve(victim, scene.rng.randint(0, 3), 3.0)


async def _clock_jump(scene: Scene) -> None:
    with tempfile.TemporaryDirectory(prefix="kvferry-wall-") as directory:
        wall = Wall(Path(directory) / "offset")
        scene.say(MEANS)
        names = [scene.pick("prefill"), scene.pick("decode")]
        for name in names:
            await scene.kill(name, wall.dress)
        used = handoffs(scene.fleet, names[1])
        blow = await scene.begin("wall clock", scene.limit_s, all_of=True)
        for offset_s in (3600, -86_400, 10 * 365 * 86_400, 0):
            wall.set(offset_s)
            url = engines(scene.fleet)[scene.rng.choice(names)] + "/health"
            off_s = await asyncio.to_thread(offset_of, url) - offset_s
            if abs(off_s) > 5:
                scene.problems.append(
                    f"clock-jump: the clock is {off_s:.0f} s from where it was set"
                )
            await asyncio.sleep(1.0)
        blow.over = time.monotonic()
        await scene.await_use(names[1], used)
        for name in names:
            await scene.kill(name)


# -- two hosts ----------------------------------------------------------------------------------


async def _cut_for(scene: Scene, how: str, seconds: float, seen_limit_s: float) -> None:
    """Cut what decode hears and says over the KV link, then heal it."""
    pids = {name: process.pid for name, process in scene.fleet.processes.items()}
    used = handoffs(scene.fleet, "decode-0")
    pairs = (("decode-0", "prefill-0"), ("prefill-0", "decode-0"))
    linked = [
        (who, peer) for who, peer in pairs if who in scene.journal.linked_to(f"engine-{pids[peer]}")
    ]
    blow = await scene.begin(KV_LINK, (seen_limit_s or scene.limit_s) + 2 * SLACK_S, all_of=True)
    scene.say(scene.hosts.cut("right", how))
    if seen_limit_s:
        blow.seen_limit_s = seen_limit_s
        for who, peer in linked:
            rest_s = max(0.0, blow.at + seen_limit_s - time.monotonic())
            await scene.await_seen(blow, {who}, f"engine-{pids[peer]}", rest_s)
    await asyncio.sleep(max(0.0, blow.at + seconds - time.monotonic()))
    scene.hosts.heal("right")
    blow.over = time.monotonic() + SLACK_S
    await scene.await_use("decode-0", used + 20)


async def _cut(scene: Scene) -> None:
    await _cut_for(scene, "drop", scene.limit_s + 3.0, scene.limit_s + 0.5)


async def _cut_one_way(scene: Scene) -> None:
    await _cut_for(scene, "drop-in", scene.limit_s + 3.0, scene.limit_s + 0.5)


async def _cut_short(scene: Scene) -> None:
    """Shorter than the limit: TCP sends again, and nobody may be given up."""
    await _cut_for(scene, "drop", scene.limit_s / 4, 0.0)


async def _reset(scene: Scene) -> None:
    await _cut_for(scene, "reset", scene.limit_s + 1.0, scene.limit_s)


async def _cut_from_router(scene: Scene) -> None:
    """The router does not hear decode any more, while KV still could move."""
    used = handoffs(scene.fleet, "decode-0")
    limit_s = scene.limit_s + SLACK_S
    blow = await scene.begin("decode-0", limit_s, may=LOST_CODES, all_of=True)
    blow.seen_limit_s = limit_s
    scene.say(scene.hosts.cut("right", "drop", NET_LINK))
    await scene.await_seen(blow, set(), "", limit_s)
    await asyncio.sleep(max(0.0, blow.at + scene.limit_s + 3.0 - time.monotonic()))
    scene.hosts.heal("right", NET_LINK)
    blow.over = time.monotonic() + scene.limit_s
    await scene.await_use("decode-0", used + 20)


async def _kill_across(scene: Scene) -> None:
    await scene.kill(f"{scene.rng.choice(['prefill', 'decode'])}-0")


async def _few_ports(scene: Scene) -> None:
    """One or two local ports for decode, when all its connections must be made anew."""
    count = scene.rng.choice([1, 2])
    right = scene.hosts.hosts["right"]
    right.set_ports(50_000, 50_000 + count - 1)
    try:
        process = scene.fleet.processes["prefill-0"]
        observers = scene.journal.linked_to(f"engine-{process.pid}")
        blow = await scene.begin(f"{count} local ports", scene.limit_s + 2 * SLACK_S, all_of=True)
        process.kill()
        await scene.await_seen(blow, observers, f"engine-{process.pid}", 1.0)
        await asyncio.to_thread(scene.fleet.restart, "prefill-0")
        await asyncio.sleep(3.0)
    finally:
        right.set_ports(*PORTS_DEFAULT)
    blow.over = time.monotonic() + scene.limit_s
    await scene.await_use("prefill-0", 0)


async def _slow_network(scene: Scene) -> None:
    blow = await scene.begin("kv0", BOUND_S / 2, all_of=True)
    for side in ("left", "right"):
        scene.say(scene.hosts.slow(side, mbit=8, delay_ms=20))
    await asyncio.sleep(5.0)
    for side in ("left", "right"):
        scene.hosts.hasten(side)
    blow.over = time.monotonic() + SLACK_S
    await scene.await_use("decode-0", handoffs(scene.fleet, "decode-0"))


def _on_hosts(*tools: str, kernel: Sequence[str] = ()) -> Callable[[], str]:
    return lambda: missing(*_HOSTS, *tools, kernel=kernel)


_TABLE = (
    Scenario("kill-prefill", ONE_HOST, "SIGKILL, and the same port again", _kill_prefill),
    Scenario("kill-decode", ONE_HOST, "SIGKILL, and the same port again", _kill_decode),
    Scenario("kill-router", ONE_HOST, "SIGKILL, and the same port again", _kill_router),
    Scenario("freeze-prefill", ONE_HOST, "SIGSTOP beyond the limit, SIGCONT", _freeze_prefill),
    Scenario("freeze-decode", ONE_HOST, "SIGSTOP beyond the limit, SIGCONT", _freeze_decode),
    Scenario("freeze-router", ONE_HOST, "SIGSTOP beyond the limit, SIGCONT", _freeze_router),
    Scenario("blink", ONE_HOST, "SIGSTOP for less than the limit, SIGCONT", _blink),
    Scenario("small-shm", ONE_HOST, "16 MiB of /dev/shm, pools of 32 MiB", _small_shm,
             lambda: missing("unshare", "mount")),
    Scenario("few-descriptors", ONE_HOST, "hardly a descriptor left, for 3 s", _few_descriptors),
    Scenario("clock-jump", ONE_HOST, "the wall clock jumps by up to ten years", _clock_jump),
    Scenario("cut", TWO_HOSTS, "packets vanish beyond the limit", _cut, _on_hosts()),
    Scenario("cut-one-way", TWO_HOSTS, "packets vanish in one direction", _cut_one_way,
             _on_hosts("nft")),
    Scenario("cut-short", TWO_HOSTS, "packets vanish for less than the limit", _cut_short,
             _on_hosts()),
    Scenario("reset", TWO_HOSTS, "each packet is answered with a reset", _reset, _on_hosts("nft")),
    Scenario("cut-from-router", TWO_HOSTS, "the router's packets to decode vanish",
             _cut_from_router, _on_hosts()),
    Scenario("kill-across", TWO_HOSTS, "SIGKILL of one side, on another host", _kill_across,
             _on_hosts()),
    Scenario("few-ports", TWO_HOSTS, "one or two local ports for decode", _few_ports,
             _on_hosts("sysctl")),
    Scenario("slow-network", TWO_HOSTS, "8 Mbit/s, and late if the kernel can", _slow_network,
             _on_hosts("tc", kernel=("netem", "tbf"))),
)  # fmt: skip

SCENARIOS = {scenario.name: scenario for scenario in _TABLE}
"""Every scenario by its name."""
