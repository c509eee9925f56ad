"""The scenarios: what is done, and what should happen. One function each, and the table below."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.base import KIB, MIB
from benchmarks.failures.verdict import Attempt, Expect, Step
from benchmarks.failures.world import FAR_S, LARGE, NEAR_S, SEED, SMALL, World

COMPLETE, FAIL, EITHER = Expect.COMPLETE, Expect.FAIL, Expect.EITHER

STOPPED = r"stopped|frozen|suspended"
LOST = (
    r"lost|gone|ended|closed|reset|broke|refused|died|disconnect|not connected|killed|end of file"
)
CUT_OFF = r"cut off|dropped|nothing heard|timed? ?out|no connection .*in time|no progress"
BEYOND = (
    r"outside|beyond|bounds|end at|not registered|unregistered|invalid address|not.found|rejected"
)
GONE = r"deregister|gone|stale|unregistered|not registered|rejected"
FOREIGN = r"not kvferry|not .*protocol|protocol|magic|version|malformed|handshake"
MOVING_S = 10.0
"""For a call that moves much on a small machine: there it is not the wait that counts."""
READING = {**LARGE, "times": 1 << 30, "for_s": 3.0}
"""Reads one after the other, until one fails or the time is over."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One row group of the table.

    right: what should happen, in words. pool_bytes: of each process. far: the two processes are
    on two hosts. by_port: it is about the port, so rivals without one are left out. only: the one
    rival it is for, by the beginning of its name.
    """

    name: str
    title: str
    right: str
    act: Callable[[World], None]
    pool_bytes: int = 64 * MIB
    far: bool = False
    by_port: bool = False
    only: str = ""


# -- the peer stops or dies -----------------------------------------------------------------------


def stopped_first(world: World) -> None:
    world.stop_source()
    world.reach(FAIL, cause=STOPPED)


def stopped_before(world: World) -> None:
    world.reach()
    world.stop_source()
    world.call(LARGE, EITHER, cause=STOPPED)


def stopped_during(world: World) -> None:
    world.reach()
    world.call(READING, EITHER, cause=STOPPED, meanwhile=world.stop_source)


def killed_first(world: World) -> None:
    world.kill_source()
    world.reach(FAIL, cause=LOST)


def killed_before(world: World) -> None:
    world.reach()
    world.kill_source()
    world.call(LARGE, EITHER, cause=LOST)


def killed_during(world: World) -> None:
    world.reach()
    world.call(READING, FAIL, cause=LOST, meanwhile=world.kill_source)


def restarted(world: World) -> None:
    """The old handle must not read the new process; a new one must work."""
    world.reach()
    world.replace_source(seed=SEED + 1)
    world.call(SMALL, FAIL, name="old handle", cause=f"restart|{LOST}")
    world.reach(name="connected again")


# -- the network ----------------------------------------------------------------------------------


def dropped_first(world: World) -> None:
    assert world.network is not None
    world.network.drop()
    world.reach(FAIL, cause=CUT_OFF)


def dropped_before(world: World) -> None:
    assert world.network is not None
    world.reach()
    world.network.drop()
    world.call(LARGE, FAIL, cause=CUT_OFF)


def dropped_during(world: World) -> None:
    assert world.network is not None
    world.reach()
    world.call({**READING, "for_s": 9.0}, FAIL, cause=CUT_OFF, meanwhile=world.network.drop)


def reset_during(world: World) -> None:
    """A broken connection is an end, or is mended unseen; afterwards all goes on."""
    network = world.network
    assert network is not None

    def cut() -> None:
        network.reset()
        time.sleep(0.5)
        network.mend()

    world.reach()
    world.call(READING, EITHER, cause=LOST, meanwhile=cut)
    world.reach(name="connected again")


# -- load -----------------------------------------------------------------------------------------


def threads_256(world: World) -> None:
    world.reach()
    world.call(
        {"blocks": 256, "block_bytes": 16 * KIB, "threads": 10, "times": 10}, within_s=MOVING_S
    )


def threads_1024(world: World) -> None:
    world.reach()
    world.call(
        {"blocks": 1024, "block_bytes": 16 * KIB, "threads": 10, "times": 5}, within_s=MOVING_S
    )


def oversized(world: World) -> None:
    world.reach()
    world.call({"blocks": 65536, "block_bytes": 2 * KIB}, name="65,536 blocks", within_s=MOVING_S)
    world.call(SMALL, name="64 blocks right after")


def same_process(world: World) -> None:
    answer = world.target.ask(do="twin", nbytes=64 * MIB, host="127.0.0.1", seed=SEED)
    world.facts = {**answer["facts"], "seed": SEED, "is_far": False}
    world.reach()
    world.call(LARGE)


# -- what must not be touched ---------------------------------------------------------------------


def read_beyond(world: World) -> None:
    world.reach()
    world.call({**SMALL, "blocks": 16, "beyond": True}, FAIL, cause=BEYOND)
    world.call(SMALL, name="a good read after it")


def write_beyond(world: World) -> None:
    world.reach()
    world.call({**SMALL, "blocks": 16, "beyond": True, "write": True}, FAIL, cause=BEYOND)
    if not world.source.ask(do="guard")["is_whole"]:
        world.notes.append("overwrites memory that was never registered")


def unregistered(world: World) -> None:
    """Whoever can do without a registration of the reader's memory may."""
    world.reach()
    world.call({**SMALL, "unregistered": True}, EITHER, cause=BEYOND + "|" + GONE)


def deregistered_during(world: World) -> None:
    """A read that begins after the owner has taken its memory back must fail."""
    world.reach()
    ended = [0.0]

    def take_back() -> None:
        ended[0] = world.source.ask(do="deregister")["ended"]

    step = world.call(READING, FAIL, cause=GONE, meanwhile=take_back)
    # What was under way meanwhile may have either bytes, so it does not count.
    counted = [
        attempt if attempt.begin > ended[0] else replace(attempt, is_correct=True)
        for attempt in step.attempts
    ]
    world.steps[-1] = replace(step, attempts=tuple(counted))


# -- strangers at the port ------------------------------------------------------------------------


def idle_100(world: World) -> None:
    with world.idle_connections(100):
        world.reach(by_port=world.port)


def idle_300(world: World) -> None:
    with world.idle_connections(300):
        world.reach(by_port=world.port)


def garbage(world: World) -> None:
    noise = random.Random(SEED).randbytes(4096)
    world.stranger("random bytes", noise, within_s=FAR_S)
    world.stranger("an HTTP request", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", within_s=FAR_S)
    world.reach(name="a peer after them", by_port=world.port)


def foreign_service(world: World) -> None:
    with world.service(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n") as port:
        world.reach(FAIL, by_port=port, cause=FOREIGN)


def silent_service(world: World) -> None:
    with world.service(None) as port:
        world.reach(FAIL, by_port=port, cause=STOPPED + "|no hello", within_s=FAR_S)


def other_version(world: World) -> None:
    """Both ways: a peer that answers so, and a caller that speaks so."""
    hello = b"KVFY" + bytes([99]) + bytes(7)
    with world.service(hello) as port:
        world.reach(FAIL, by_port=port, name="as callee", cause=r"version.*99|99.*version")
    began = time.monotonic()
    heard = talk_of_version(world, hello)
    error = "" if b"version" in heard and b"99" in heard else f"the caller hears {heard!r}"
    attempt = Attempt(began, time.monotonic() - began, error)
    world.steps.append(Step("as caller", COMPLETE, NEAR_S, (attempt,)))


def talk_of_version(world: World, hello: bytes) -> bytes:
    from benchmarks.failures.world import talk

    return talk(world.port, hello, 3.0)[0]


SCENARIOS = (
    Scenario(
        "stopped-first",
        "peer stopped (SIGSTOP) before first contact",
        "an error that says so",
        stopped_first,
    ),
    Scenario(
        "stopped-before",
        "peer stopped, then a read",
        "all bytes, or an error that says so",
        stopped_before,
    ),
    Scenario(
        "stopped-during",
        "peer stopped while it is read",
        "all bytes, or an error that says so",
        stopped_during,
    ),
    Scenario(
        "killed-first",
        "peer killed before first contact",
        "an error that says so",
        killed_first,
    ),
    Scenario(
        "killed-before",
        "peer killed, then a read",
        "all bytes, or an error that says so",
        killed_before,
    ),
    Scenario(
        "killed-during",
        "peer killed while it is read",
        "an error that says so",
        killed_during,
    ),
    Scenario(
        "restarted",
        "peer killed and started again on its port",
        "an error for the old handle; a new one works",
        restarted,
    ),
    Scenario(
        "dropped-first",
        "packets vanish before first contact",
        "an error that says so",
        dropped_first,
        far=True,
    ),
    Scenario(
        "dropped-before",
        "packets vanish, then a read",
        "an error that says so",
        dropped_before,
        far=True,
    ),
    Scenario(
        "dropped-during",
        "packets vanish during a read",
        "an error that says so",
        dropped_during,
        far=True,
    ),
    Scenario(
        "reset-during",
        "connections reset during a read, 0.5 s long",
        "all bytes, or an error; then it works again",
        reset_during,
        far=True,
    ),
    Scenario(
        "idle-100",
        "100 idle connections on each port",
        "a newcomer is served",
        idle_100,
    ),
    Scenario(
        "idle-300",
        "300 idle connections on each port",
        "a newcomer is served",
        idle_300,
    ),
    Scenario(
        "threads-256",
        "10 threads x 256 blocks of 16 KiB, 10 times",
        "all bytes",
        threads_256,
    ),
    Scenario(
        "threads-1024",
        "10 threads x 1,024 blocks of 16 KiB, 5 times",
        "all bytes",
        threads_1024,
        pool_bytes=160 * MIB,
    ),
    Scenario(
        "oversized",
        "65,536 blocks in one call, then 64",
        "all bytes of both",
        oversized,
        pool_bytes=128 * MIB,
    ),
    Scenario(
        "same-process",
        "both engines in one process",
        "all bytes",
        same_process,
    ),
    Scenario(
        "read-beyond",
        "a read of the peer's unregistered memory",
        "an error at once; the next read works",
        read_beyond,
    ),
    Scenario(
        "write-beyond",
        "a write to the peer's unregistered memory",
        "an error at once; nothing is touched",
        write_beyond,
    ),
    Scenario(
        "unregistered",
        "a read into the reader's own unregistered memory",
        "all bytes, or an error at once",
        unregistered,
    ),
    Scenario(
        "deregistered",
        "peer takes its memory back while it is read",
        "an error; no stale bytes",
        deregistered_during,
    ),
    Scenario(
        "garbage",
        "random bytes and an HTTP request at the port",
        "hangs up; a peer is served",
        garbage,
        by_port=True,
    ),
    Scenario(
        "foreign-service",
        "the peer's port is an HTTP server's",
        "an error that says so",
        foreign_service,
        by_port=True,
    ),
    Scenario(
        "silent-service",
        "the peer's port accepts and never answers",
        "an error that says so",
        silent_service,
        by_port=True,
    ),
    Scenario(
        "other-version",
        "a peer of another protocol version",
        "an error with both versions",
        other_version,
        by_port=True,
        only="kvferry",
    ),
)
