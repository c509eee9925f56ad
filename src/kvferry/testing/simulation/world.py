"""A run: processes, the network between them, the router, and what the plan does to them."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType

from kvferry.protocol.messages import Message
from kvferry.testing.simulation import plan as plans
from kvferry.testing.simulation.invariants import Violation, Watch
from kvferry.testing.simulation.network import Network
from kvferry.testing.simulation.plan import Action, Plan
from kvferry.testing.simulation.pool import BlockPool
from kvferry.testing.simulation.process import Process
from kvferry.testing.simulation.router import Router
from kvferry.testing.simulation.schedule import Schedule

SETTLE_S = 40.0
"""After the last action all is healed, and so much later nothing may be left."""
BLOCKS = (6, 8, 12)
Spoil = Callable[[Process], None]
"""Changes a process just after its start: how tests seed a bug."""


@dataclass(frozen=True, slots=True)
class Report:
    """One run. ``trace``: each thing that was said or ended: second, who, what."""

    plan: Plan
    violation: Violation | None
    trace_hash: str
    trace: list[tuple[float, str, str]] = field(repr=False)
    counts: dict[str, int]
    events: int
    virtual_s: float


class World:
    """See the module. ``run`` it once."""

    def __init__(self, plan: Plan, spoil: Spoil | None = None) -> None:
        self.plan = plan
        self.seed = str(plan.seed)
        self.spoil: Spoil = spoil or _leave_as_it_is
        self.schedule = Schedule()
        self.network = Network(self.schedule, self.seed)
        self.watch = Watch(self)
        self.router = Router(self)
        self.memories: dict[bytes, tuple[Process, BlockPool]] = {}
        self.trace: list[tuple[float, str, str]] = []
        rng = random.Random(f"{self.seed}/world")
        self.lease_s = rng.choice((0.4, 1.0, 2.0))
        self._shapes = {
            host: (rng.choice(BLOCKS), rng.choice((2, 2, 4)))
            for host in [
                *map(plans.prefill, range(plan.prefills)),
                *map(plans.decode, range(plan.decodes)),
            ]
        }
        self._hash = hashlib.blake2b(digest_size=8)
        self._starts = 0
        self._holders = 0
        self._times: dict[str, int] = {}
        self._processes: dict[str, Process] = {}
        self._heal: list[Callable[[], None]] = []

    # -- what the others ask ---------------------------------------------------------------------

    def at(self, host: str) -> Process | None:
        return self._processes.get(host)

    def processes(self) -> list[Process]:
        """Those that live."""
        return [process for process in self._processes.values() if not process.is_gone]

    def new_holder(self) -> int:
        self._holders += 1
        return self._holders

    def note(self, who: str, what: str, about: Message | str) -> None:
        """One line of the trace."""
        text = about if isinstance(about, str) else self._words(about)
        line = (self.schedule.now, who, f"{what} {text}")
        self.trace.append(line)
        self._hash.update(repr(line).encode())

    def disturbed(self, listeners: list[Process], hosts: tuple[str, str], since: float) -> bool:
        """Whether anything kept news from going between two hosts since a time."""
        return any(
            end.is_gone or end.is_frozen or end.disturbed_at >= since for end in listeners
        ) or any(
            link.black or link.slow or link.disturbed_at >= since
            for link in self.network.both(*hosts)
        )

    def _words(self, message: Message) -> str:
        kind = type(message).__name__
        offer_ids = getattr(message, "offer_ids", None) or [getattr(message, "offer_id", b"")]
        names = [self.watch.ids.get(made, made.hex()) for made in offer_ids if made]
        code = getattr(message, "code", "")
        return " ".join([kind, *names[:3], *([f"({code})"] if code else [])])

    # -- running ---------------------------------------------------------------------------------

    def run(self) -> Report:
        """Let everything happen, to the end or to the first violation."""
        with _Errors(self.watch):
            for host in self._shapes:
                self._start(host)
            for action in self.plan.actions:
                self.schedule.after(action.at_s, lambda action=action: self._do(action))  # type: ignore[misc]
            last = max((action.at_s for action in self.plan.actions), default=0.0)
            self._run_until(last + 0.001)
            self._settle(last)
        return Report(
            self.plan,
            self.watch.violation,
            self._hash.hexdigest(),
            self.trace,
            self.watch.counts,
            self.schedule.count,
            self.schedule.now,
        )

    def _run_until(self, until: float, *, is_over: Callable[[], bool] | None = None) -> None:
        while self.watch.violation is None and self.schedule.step(until):
            if is_over is not None and self.schedule.count % 16 == 0 and is_over():
                return

    def _settle(self, last: float) -> None:
        """Heal everything, wait until all has ended, then close and look for what is left."""
        for heal in list(self._heal):
            heal()
        self._run_until(last + SETTLE_S, is_over=lambda: not self._live())
        if self.watch.violation is None and self._live():
            self.watch.violated("end", "never ended: " + ", ".join(self._live()))
        # What is still on its way may begin something: an answer that is late, an abandonment.
        self._run_until(self.schedule.now + 4.0)
        for process in self.processes():
            self._check_empty(process)
            process.engine.close()
        self._run_until(self.schedule.now + 3.0)
        for process in self.processes():
            self._check_closed(process)

    def _live(self) -> list[str]:
        """What has not ended, in words."""
        live = [f"request {r.number}" for r in self.router.requests.values() if not r.outcome]
        for host, process in self._processes.items():
            if process.is_gone:
                live += [f"the restart of {plans.name(host)}"] if host in self._shapes else []
                continue
            tables = process.ferry
            counts = {
                "offers": len(tables._offers),
                "claims": len(tables._claims),
                "reads": len(process.reads.running),
                "waiting requests": len(process.serving),
                "blocks": process.pool.blocks - process.pool.free_count,
            }
            live += [f"{n} {what} of {process.name}" for what, n in counts.items() if n]
        return live

    def _check_empty(self, process: Process) -> None:
        connections = process.engine.connections
        left = {
            "dials": len(connections._dialling),
            "dialled sockets": len(connections._dials),
            "strangers": len(connections._strangers),
            "requests to peers": sum(len(p._pending) for p in connections.all_peers()),
            "unsent bytes": sum(p._outbox_bytes for p in connections.all_peers()),
        }
        for what, count in left.items():
            if count:
                self.watch.violated("leak", f"{process.name}: {count} {what} are left")

    def _check_closed(self, process: Process) -> None:
        left = {
            "connections": process.engine.connections.count(),
            "watched sockets": len(process.engine.loop.watched),  # type: ignore[attr-defined]
            "open sockets": len(self.network.sockets_of(process)),
            "offers": len(process.ferry._offers),
            "claims": len(process.ferry._claims),
        }
        for what, count in left.items():
            if count:
                self.watch.violated("leak", f"{process.name}: {count} {what} after its close")

    # -- what the plan does ----------------------------------------------------------------------

    def _start(self, host: str) -> None:
        self._starts += 1
        times = self._times[host] = self._times.get(host, 0) + 1
        name = plans.name(host) + (f"'{times}" if times > 1 else "")
        self.network.down.discard(host)
        pool = BlockPool(*self._shapes[host], self._starts)
        self._processes[host] = Process(self, host, name, self._starts, pool)
        self.note(name, "starts at", host)

    def _do(self, action: Action) -> None:
        self.note("plan", action.kind, action.words())
        getattr(self, f"_do_{action.kind}")(action)

    def _do_request(self, action: Action) -> None:
        self.router.start(action.number, action.n_tokens, action.one, action.two)

    def _do_leave(self, action: Action) -> None:
        self.router.leave(action.about)

    def _do_repeat(self, action: Action) -> None:
        self.router.repeat(action.about, action.two)

    def _do_withdraw(self, action: Action) -> None:
        request = self.router.requests.get(action.about)
        process = self.at(request.prefill) if request is not None else None
        if process is not None:
            process.after(0.0, lambda: process.serving.abandon(action.about))

    def _do_freeze(self, action: Action) -> None:
        process = self.at(action.one)
        if process is None or process.is_gone or process.is_frozen:
            return
        process.freeze()
        self._later(action.seconds, process.thaw)

    def _do_kill(self, action: Action) -> None:
        self._end(action, power=False)

    def _do_power(self, action: Action) -> None:
        self._end(action, power=True)

    def _end(self, action: Action, *, power: bool) -> None:
        process = self.at(action.one)
        if process is None or process.is_gone:
            return
        if power:
            self.network.down.add(action.one)
        else:
            self.watch.died(process)
        process.die(power=power)
        self.router.lost(action.one)
        self._later(action.seconds, lambda: self._start(action.one))

    def _do_close(self, action: Action) -> None:
        process = self.at(action.one)
        if process is None or process.is_gone or process.is_frozen or process.engine.is_closed:
            return
        process.engine.close()
        process.disturbed_at = self.schedule.now

        def exit_() -> None:
            if process.is_gone:
                return
            if process.reads.running or process.is_frozen:
                self.schedule.after(0.1, exit_)
                return
            process.die(power=False)
            self.router.lost(action.one)
            self._later(action.seconds, lambda: self._start(action.one))

        self.schedule.after(0.05, exit_)

    def _do_cut(self, action: Action) -> None:
        self.network.cut(action.one, action.two, half=False)
        self._disturb(action.one, action.two)

    def _do_half(self, action: Action) -> None:
        self.network.cut(action.one, action.two, half=True)
        self._disturb(action.one, action.two)

    def _do_black(self, action: Action) -> None:
        for one, two in ((action.one, action.two), (action.two, action.one)):
            self._later(action.seconds, self.network.blacken(one, two))

    def _do_mute(self, action: Action) -> None:
        self._later(action.seconds, self.network.blacken(action.one, action.two))

    def _do_slow(self, action: Action) -> None:
        link = self.network.link(action.one, action.two)
        link.slow += 1

        def mend() -> None:
            link.slow -= 1
            link.disturbed_at = self.schedule.now

        self._later(action.seconds, mend)

    def _disturb(self, one: str, two: str) -> None:
        for link in self.network.both(one, two):
            link.disturbed_at = self.schedule.now

    def _later(self, seconds: float, work: Callable[[], None]) -> None:
        """In ``seconds``, or when everything is healed; once."""

        def once() -> None:
            if once in self._heal:
                self._heal.remove(once)
                work()

        self._heal.append(once)
        self.schedule.after(seconds, once)


class _Errors(AbstractContextManager[None]):
    """What kvferry logs as an error during a run is a violation: it names itself a bug."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._log = logging.getLogger("kvferry")
        self._handler = logging.Handler(logging.ERROR)
        self._handler.emit = self._emit  # type: ignore[method-assign]
        self._was = (self._log.level, self._log.propagate)

    def __enter__(self) -> None:
        self._log.addHandler(self._handler)
        self._log.setLevel(logging.ERROR)
        self._log.propagate = False

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._log.removeHandler(self._handler)
        self._log.level, self._log.propagate = self._was
        self._log.setLevel(self._log.level)

    def _emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            failure = record.exc_info[1]
            text += f" [{type(failure).__name__}: {failure}]"
        self._watch.violated("internal", text)


def _leave_as_it_is(_process: Process) -> None:
    return None
