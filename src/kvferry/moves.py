"""The transfers under way: each is tried on one path after the other until it ends, once.

The tables belong to the engine and change under its lock. A path is tried at most once per
transfer, so the number of paths bounds the attempts, and all of them share one deadline.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvferry.clock import Clock
from kvferry.errors import (
    AbortedError,
    BusyError,
    CorruptError,
    DeadlineError,
    KVFerryError,
    NoPathError,
    PeerLostError,
    RegistrationError,
    StaleRegionError,
    StallError,
)
from kvferry.integrity import Verification
from kvferry.loop import TICK_S
from kvferry.memory.cuda import ResidentSpans
from kvferry.paths import Paths
from kvferry.planner import Plan, RankedPath
from kvferry.quarantine import Quarantine
from kvferry.regions import PairedSpans, Region
from kvferry.telemetry.trail import Trail
from kvferry.transfer import Transfer
from kvferry.transports.base import Operation, PeerView, RemoteRegion, Transport

if TYPE_CHECKING:
    from kvferry.engine import Engine

log = logging.getLogger(__name__)

STOP_S = 1.0
"""A transport that was told to stop has so long to say that it did. Copies notice a stop within
milliseconds, lanes within a tenth of a second; memory of what takes longer is quarantined.
"""
RATE_FROM_BYTES = 1 << 20
"""Smaller transfers say nothing about a path's speed."""
MARK_S = 0.1
"""Progress is noted first after so long, and then each time that twice as much has passed."""
PATH_FAULTS = frozenset({"unreachable", "protocol", "stall", "corrupt", "transfer"})
"""Error codes that are a fault of the path and not of the request."""


class Move:
    """A transfer and the path it is on.

    op: the attempt that runs now; each attempt has its own, so that what a transport says of an
    earlier one is known for that. place: its path's index in the plan. attempts: how the paths
    before it failed. stop: why the whole transfer should end, not only the attempt. checksum:
    whether its bytes are compared with the owner's when they have moved.
    """

    def __init__(
        self,
        transfer: Transfer,
        op: Operation,
        plan: Plan,
        began: float,
        checksum: str,
        trail: Trail,
    ) -> None:
        self.transfer = transfer
        self.trail = trail
        self.mark_at = began + MARK_S
        self.op = op
        self.plan = plan
        self.began = began
        self.place = 0
        self.checksum = checksum
        self.verification: Verification | None = None
        self.moving_s = 0.0
        self.was_corrupt = False
        self.attempts: list[str] = []
        self.stop: KVFerryError | None = None
        self._quiet: tuple[float, float] = (0.0, 0.0)
        self.stop_by = math.inf  # Set when it is told to stop: it is waited for so long.

    @property
    def path(self) -> RankedPath:
        return self.plan.paths[self.place]

    def is_quiet(self, now: float, limit_s: float) -> bool:
        """Whether nothing has moved for ``limit_s``, seen twice.

        When this very process was frozen, the first look comes before its lanes could read what
        has arrived meanwhile.
        """
        moved_at = self.op.moved_at
        if (
            not moved_at
            or self.verification is not None
            or now - moved_at < limit_s
            or self.op.stop is not None
        ):
            return False
        if self._quiet[0] != moved_at:
            self._quiet = (moved_at, now)
        return now - self._quiet[1] >= TICK_S


class Moves:
    """See the module. One per engine."""

    def __init__(
        self, engine: Engine, transports: dict[str, Transport], paths: Paths, clock: Clock
    ) -> None:
        self._engine = engine
        self._transports = transports
        self._paths = paths
        self._clock = clock
        self._running: dict[int, Move] = {}
        self.quarantine = Quarantine()
        self.stop_s = STOP_S
        self._deadlines: list[tuple[float, int]] = []
        self._numbers = itertools.count(1)
        self.counts = {"transfers": 0, "failed": 0, "bytes": 0, "demotions": 0}
        self.counts |= {"verified": 0, "corrupt": 0}
        self.bytes_by_path: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._running)

    def uses(self, region_id: int) -> bool:
        """Whether a transfer under way touches this region of ours."""
        if any(move.op.local.region_id == region_id for move in self._running.values()):
            return True
        return self.quarantine.uses(region_id)

    # -- start ------------------------------------------------------------------------------

    def start(
        self,
        local: Region,
        remote: RemoteRegion,
        spans: PairedSpans,
        write: bool,
        deadline: float,
        checksum: str,
        trail: Trail | None = None,
        resident: ResidentSpans | None = None,
    ) -> Transfer:
        """Begin a transfer of paired spans. ``resident``: the same for devices, if prepared.

        See Engine.read for the errors. May do a short copy before it returns.
        """
        engine = self._engine
        lengths, nbytes = spans.lengths, spans.nbytes
        with engine.locked():
            engine.check_open()
            view = engine.connections.view_for(remote)
            if not engine.registry.has(local.region_id):
                raise StaleRegionError(
                    f"local region {local.region_id} was deregistered", fix="register it again"
                )
            number = next(self._numbers)
            transfer = Transfer(
                number, nbytes, write=write, peer_name=view.name, cancel=self._cancel
            )
            if nbytes == 0:
                self.counts["transfers"] += 1
                engine.later(lambda: transfer._finish(0, None, 0.0))
                return transfer
            in_flight = len(self._running) + len(self.quarantine)
            if in_flight >= engine.config.transfers_max:
                raise BusyError(
                    f"{in_flight} transfers are in flight",
                    fix="wait for some to end, or raise transfers_max",
                )
            plan = self.plan(local, remote, view, write, nbytes, lengths.size)
            if not plan.paths:
                raise _no_path(plan, view.name)
            transfer.plan = plan
            op = Operation(
                number,
                write,
                local,
                remote,
                view,
                spans.local,
                spans.remote,
                lengths,
                nbytes,
                deadline,
                length=spans.length,
                resident=resident,
            )
            self.quarantine.check(op)
            self.counts["transfers"] += 1
            trail = trail or engine.recorder.begin("transfer", number, peer_id=remote.peer)
            trail.planned(view.name, nbytes, lengths.size, write, plan)
            self._running[number] = Move(transfer, op, plan, self._clock.now(), checksum, trail)
            self._add_deadline(deadline, number)
        self._submit(number)
        return transfer

    def plan(
        self,
        local: Region,
        remote: RemoteRegion,
        view: PeerView,
        write: bool,
        nbytes: int,
        spans: int,
    ) -> Plan:
        """The ranked paths, under the lock."""
        plan = self._paths.plan(local, remote, view, write=write, nbytes=nbytes, spans=spans)
        plan.rejected.update(self._engine.unusable)
        return plan

    def _add_deadline(self, deadline: float, number: int) -> None:
        if len(self._deadlines) > 1024 + 2 * len(self._running):
            # Most of these have ended: with far deadlines they would stay for ever.
            self._deadlines = [item for item in self._deadlines if item[1] in self._running]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline, number))

    def _submit(self, number: int) -> None:
        """Start a transfer on its current path, or on the next that takes it."""
        with self._engine.locked():
            move = self._running.get(number)
        if move is None:
            return
        path, op = move.path, move.op
        move.transfer.path = move.trail.path = path.name
        move.trail.note("submitted", path.name)
        try:
            self._transports[path.transport].submit(op)
        except KVFerryError as error:
            error.located(peer=op.peer.name, path=path.name, stage="submit")
            self.complete(op, 0, error)
        except Exception as failure:
            log.exception("%s did not start; this is a bug in its transport", path.name)
            self._engine.recorder.internal_error(f"{path.name} did not start")
            self.complete(op, 0, AbortedError(f"internal error: {failure}"))

    # -- ends -------------------------------------------------------------------------------

    def complete(self, op: Operation, bytes_done: int, error: KVFerryError | None) -> None:
        """See transports.base.Services."""
        again = False
        with self._engine.locked():
            move = self._running.get(op.op_id)
            if move is None or move.op is not op or move.verification is not None:
                self._complete_late(op)
                return
            if error is None and bytes_done != op.nbytes:
                error = CorruptError(
                    f"{move.path.name} moved {bytes_done} of {op.nbytes} bytes and called that "
                    "success",
                    fix="allow another transport: this one has a bug",
                )
            move.moving_s = self._clock.now() - (op.began_at or move.began)
            if op.began_at:
                move.trail.note_at(op.began_at, "began", move.path.name)
            if error is not None:
                move.trail.note("failed_path", move.path.name, error.code, str(error), bytes_done)
            if error is None and move.checksum != "off":
                if move.stop is None:
                    self._verify(move)
                    return
                error = move.stop  # Bytes that nobody will compare are no success.
            if isinstance(error, StallError):
                error = move.stop or error
            if error is not None:
                again = self._fall_back(move, error)
            if not again:
                self._settle(move, bytes_done, error)
        if again:
            self._submit(op.op_id)

    def _verify(self, move: Move) -> None:
        """Compare what was moved with the owner's bytes; under the lock."""
        move.verification = Verification(
            self._engine,
            move.op,
            sampled=move.checksum == "sampled",
            ended=lambda error: self._verified(move, error),
        )
        move.trail.note("comparing")
        move.verification.start()

    def _verified(self, move: Move, error: KVFerryError | None) -> None:
        """A comparison has ended; under the lock."""
        move.verification = None
        op = move.op
        if isinstance(error, CorruptError):
            self.counts["corrupt"] += 1
            move.trail.note("failed_path", move.path.name, error.code, str(error), op.nbytes)
            again = self._fall_back(move, error, may_repeat=not (op.write or move.was_corrupt))
            move.was_corrupt = True
            if again:
                self._engine.later(lambda: self._submit(op.op_id))
                return
        elif error is None:
            self.counts["verified"] += 1
            move.trail.note("compared")
        self._settle(move, op.nbytes, error)

    def _complete_late(self, op: Operation) -> None:
        """A completion that nobody waits for any more, under the lock."""
        transfer = self.quarantine.release(op)
        if transfer is None:
            log.error("transfer %d ended twice; this is a bug in its transport", op.op_id)
            recorder = self._engine.recorder
            self._engine.later(lambda: recorder.internal_error("a transfer ended twice"))
            return
        log.info("transfer %d has stopped at last; its memory is free again", op.op_id)
        self._engine.later(transfer._fall_quiet)

    def _fall_back(self, move: Move, error: KVFerryError, may_repeat: bool = True) -> bool:
        """Whether another path takes over. Only for faults of the path, not of the request.

        may_repeat: False if the path is only demoted.
        """
        op, path = move.op, move.path
        fault = isinstance(error, (PeerLostError, RegistrationError)) or error.code in PATH_FAULTS
        stopped = move.stop or (None if isinstance(op.stop, StallError) else op.stop)
        if not fault or stopped is not None or self._engine.is_closed:
            return False
        if not self._engine.connections.has(op.remote.peer):
            return False
        self.counts["demotions"] += 1
        is_news = self._paths.demote(
            op.peer.incarnation, path.transport, path.direction, error.message
        )
        if is_news:
            self._engine.recorder.peer(op.remote.peer, "demoted", path.name, error.message)
        log.log(
            logging.WARNING if is_news else logging.DEBUG,
            "%s to %s failed and is tried last now: %s",
            path.name,
            op.peer.name,
            str(error),  # The error itself would keep its frames alive with the record.
        )
        is_last = move.place + 1 >= len(move.plan.paths)
        if is_last or not may_repeat or self._clock.now() >= op.deadline:
            return False
        move.attempts.append(f"{path.name}: {error.message}")
        move.place += 1
        move.trail.note("fell_back", move.path.name, error.message)
        move.stop_by = math.inf
        move.op = replace(op, stop=None, began_at=0.0, moved_at=0.0, bytes_done=0)
        return True

    def _settle(self, move: Move, bytes_done: int, error: KVFerryError | None) -> None:
        """The end of a transfer, under the lock."""
        op, transfer, path = move.op, move.transfer, move.path
        del self._running[op.op_id]
        now = self._clock.now()
        seconds = now - move.began
        if error is None:
            self.counts["bytes"] += op.nbytes
            self.bytes_by_path[path.name] = self.bytes_by_path.get(path.name, 0) + op.nbytes
            is_known = self._engine.connections.has(op.remote.peer)  # Else it is forgotten already.
            if op.nbytes >= RATE_FROM_BYTES and move.moving_s > 0 and is_known:
                key = (op.peer.incarnation, path.transport, path.direction)
                self._paths.measured(*key, op.nbytes / move.moving_s)
        else:
            self.counts["failed"] += 1
            error.located(
                peer=op.peer.name, path=transfer.path, stage="move", bytes_done=bytes_done
            )
            error.attempts = tuple(move.attempts)
        self._note_end(move, bytes_done, error)
        self._engine.later(lambda: transfer._finish(bytes_done, error, seconds))

    def _note_end(self, move: Move, bytes_done: int, error: KVFerryError | None) -> None:
        """The end in the move's trail; the trail's own end if it is about nothing else."""
        trail, path, recorder = move.trail, move.transfer.path, self._engine.recorder
        trail.bytes_done = bytes_done
        if error is None:
            trail.note("moved", path, bytes_done, move.moving_s)
        else:
            trail.note("move_failed", path, error.code, bytes_done)
        if trail.kind == "transfer":
            number = move.op.op_id
            recorder.finish(number, error.code if error else "moved", error)
            if error is not None:
                self._engine.later(lambda: recorder.tell(number, error))

    # -- aborts and time ----------------------------------------------------------------------

    def _cancel(self, transfer: Transfer) -> None:
        with self._engine.locked():
            move = self._running.get(transfer.transfer_id)
            if move is not None:
                self._abort(move, AbortedError("the transfer was cancelled", stage="move"))

    def _abort(self, move: Move, error: KVFerryError) -> None:
        """End a transfer as soon as its path has stopped."""
        if move.stop is None:
            move.trail.note("abort", error.code, error.message)
        move.stop = move.stop or error
        if move.verification is not None:
            move.verification.stop(error)
        else:
            self._abort_attempt(move, error)

    def _abort_attempt(self, move: Move, error: KVFerryError) -> None:
        transport = self._transports[move.path.transport]
        op = move.op
        op.stop = op.stop or error
        if move.stop_by == math.inf:
            move.stop_by = self._clock.now() + self.stop_s
            self._add_deadline(move.stop_by, op.op_id)
        self._engine.later(lambda: transport.abort(op, error))

    def _abandon(self, move: Move) -> None:
        """End a transfer although its transport does not say that it stopped; under the lock."""
        op, stop = move.op, move.op.stop
        assert stop is not None
        del self._running[op.op_id]
        self.quarantine.add(move.transfer, op)
        self.counts["failed"] += 1
        error = type(stop)(
            f"{stop.message}, and {move.path.transport} has not said within {self.stop_s:g} s that "
            "it stopped",
            peer=op.peer.name,
            path=move.path.name,
            stage="stop",
            fix="its memory stays reserved until the transport says so or the engine closes; this "
            "is a bug in the transport, or its device lost a completion",
        )
        move.trail.note("quarantined", move.path.name)
        self._note_end(move, 0, error)
        log.warning("transfer %d is over, its memory in quarantine: %s", op.op_id, str(error))
        seconds = self._clock.now() - move.began
        self._engine.later(lambda: move.transfer._finish(0, error, seconds, quiet=False))

    def end_left(self) -> None:
        """Every transport is closed, so nothing moves: whatever is left ends. Under the lock."""
        for move in list(self._running.values()):
            stop = move.op.stop or AbortedError("the engine is closing", stage="move")
            self._settle(move, 0, stop)
        for transfer in self.quarantine.release_all():
            self._engine.later(transfer._fall_quiet)

    def abort_all(self) -> None:
        """The engine is closing; under the lock."""
        for move in list(self._running.values()):
            self._abort(move, AbortedError("the engine is closing", stage="move"))

    def on_peer_lost(self, peer: Any, lost: KVFerryError) -> None:
        """No connection to this incarnation is left; under the lock."""
        for move in list(self._running.values()):
            if move.op.remote.peer == peer.incarnation:
                self._abort(
                    move, PeerLostError(lost.message, peer=peer.name, stage="move", fix=lost.fix)
                )
        self._paths.forget(peer.incarnation)

    def tick(self, now: float) -> None:
        """Deadlines and stalls; under the lock."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heapq.heappop(self._deadlines)
            move = self._running.get(number)
            if move is not None and move.stop_by <= now:
                self._abandon(move)
            elif move is not None and move.op.deadline <= now:
                took = now - move.began
                self._abort(move, DeadlineError(f"not complete after {took:.2f} s", stage="move"))

        config = self._engine.config
        limit_s = max(config.stall_s, 1.5 * config.heartbeat_s + 2 * TICK_S)
        for move in self._running.values():
            if now >= move.mark_at:
                move.mark_at = now + (now - move.began)
                move.trail.note("progress", move.op.bytes_done, move.op.nbytes)
            if move.is_quiet(now, limit_s):
                self._end_stall(move, now, limit_s)

    def _end_stall(self, move: Move, now: float, limit_s: float) -> None:
        """Give up a path that stands still; not if it is the peer that does.

        A frozen peer is silent on its session too, and would be on any other path: the session
        ends it in time, or it thaws. A live one is heard at each heart-beat, give or take the
        ticks of both sides.
        """
        op = move.op
        if now - self._engine.connections.heard_at(op.remote.peer) >= limit_s:
            return
        move.trail.note("stalled", move.path.name, now - op.moved_at, op.bytes_done)
        self._abort_attempt(
            move,
            StallError(
                f"nothing moved for {now - op.moved_at:.1f} s, although the peer answers on its "
                "session",
                stage="move",
                fix="something between the two drops this path's packets (a firewall, an MTU "
                "that differs), or the peer is overloaded: then raise stall_s",
            ),
        )

    def due(self) -> float:
        """When :meth:`tick` has a deadline to look at; infinity if there is none."""
        return self._deadlines[0][0] if self._deadlines else float("inf")


def _no_path(plan: Plan, peer_name: str) -> NoPathError:
    reasons = "; ".join(f"{name}: {why}" for name, why in plan.rejected.items())
    return NoPathError(
        f"no transport can serve this pair: {reasons}",
        reasons=plan.rejected,
        peer=peer_name,
        stage="plan",
        fix="make one of the reasons go away; 'tcp' needs the least",
    )
