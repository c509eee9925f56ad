"""Seeded bugs: each changes a process just after its start, as a wrong line of code would.

The simulation must find every one of them; see test_simulation_mutants.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvferry.errors import KVFerryError
from kvferry.protocol.handoff import (
    Action,
    ClaimEnded,
    ClaimState,
    OfferEnded,
    OfferState,
    Send,
)
from kvferry.protocol.messages import (
    Confirm,
    Confirmed,
    Granted,
    Hello,
    Message,
    Refused,
    Stopped,
    Withdrawn,
)
from kvferry.protocol.session import Session
from kvferry.testing.simulation.process import Process


def skip_the_confirm(process: Process) -> None:
    """Decode uses what it has read, and tells prefill without waiting for the answer."""
    claims = process.ferry._claims
    honest = claims.read_ended

    def read_ended(claim_id: bytes, error: KVFerryError | None) -> list[Action]:
        claim = claims._claims.get(claim_id)
        actions = honest(claim_id, error)
        if claim is not None and claim.state is ClaimState.CONFIRMING:
            actions += claims.confirmed(claim.session, Confirmed(claim_id, claim.offer_id))
        return actions

    claims.read_ended = read_ended  # type: ignore[method-assign]


def free_targets_at_abort(process: Process) -> None:
    """Decode gives its blocks away when a read is told to stop, and not when it has."""
    claims = process.ferry._claims
    honest = claims._stop

    def stop(claim_id: bytes, error: KVFerryError) -> list[Action]:
        claim = claims._claims.get(claim_id)
        actions = honest(claim_id, error)
        if claim is not None and claim.state is ClaimState.STOPPING:
            actions += claims._end(claim, "read_failed")
        return actions

    claims._stop = stop  # type: ignore[method-assign]


def free_sources_at_abort(process: Process) -> None:
    """Prefill gives its blocks away when it withdraws a claimed offer."""
    offers = process.ferry._offers
    honest = offers.cancel

    def cancel(offer_id: bytes, now: float) -> list[Action]:
        offer = offers._offers.get(offer_id)
        actions = honest(offer_id, now)
        if offer is not None and offer.state is OfferState.CLAIMED:
            actions += offers._end(offer, "stopped", "cancelled")
        return actions

    offers.cancel = cancel  # type: ignore[method-assign]


def forget(kind: type[Message]) -> Callable[[Process], None]:
    """One kind of message is never sent."""

    def spoil(process: Process) -> None:
        honest = process.ferry._do

        def do(actions: list[Any]) -> None:
            honest(
                [a for a in actions if not (isinstance(a, Send) and isinstance(a.message, kind))]
            )

        process.ferry._do = do  # type: ignore[method-assign]

    return spoil


def forget_end(kind: type[OfferEnded] | type[ClaimEnded], nth: int) -> Callable[[Process], None]:
    """One report of an end, of many, gets lost."""

    def spoil(process: Process) -> None:
        honest = process.ferry._do
        seen = 0

        def do(actions: list[Any]) -> None:
            nonlocal seen
            kept = []
            for action in actions:
                seen += isinstance(action, kind)
                if not (isinstance(action, kind) and seen == nth):
                    kept.append(action)
            honest(kept)

        process.ferry._do = do  # type: ignore[method-assign]

    return spoil


def forget_lost_sessions(process: Process) -> None:
    """Claims are not told that the session to their prefill is over."""
    process.ferry._claims.session_lost = lambda *_: []  # type: ignore[method-assign]


def forget_lost_readers(process: Process) -> None:
    """Offers are not told that the session of their reader is over."""
    process.ferry._offers.session_lost = lambda *_: []  # type: ignore[method-assign]


def reuse_ids(process: Process) -> None:
    """The fourth id is the first again."""
    honest = process.new_id
    made: list[bytes] = []

    def new_id() -> bytes:
        made.append(made[-3] if len(made) % 4 == 3 else honest())
        return made[-1]

    process.new_id = new_id  # type: ignore[method-assign]


def confirm_any_generation(process: Process) -> None:
    """Prefill ends an offer without a word, and confirms without a look at whether it stands.

    One of the two alone does no harm: words come in order over one session, so decode hears of the
    end before it hears the confirmation that it should not have had.
    """
    forget(Withdrawn)(process)
    offers = process.ferry._offers
    honest = offers.confirm

    def confirm(session: Any, message: Confirm, now: float) -> list[Action]:
        if message.offer_id not in offers._offers:
            return [Send(session, Confirmed(message.claim_id, message.offer_id))]
        return honest(session, message, now)

    offers.confirm = confirm  # type: ignore[method-assign]


def take_any_incarnation(process: Process) -> None:
    """Whoever answers at the address is taken for the engine that was meant."""
    connections = process.engine.connections
    honest = connections.new_session

    def new_session(hello: Hello, *, caller: bool) -> Session:
        return honest(msgspec.structs.replace(hello, expected=b""), caller=caller)

    connections.new_session = new_session  # type: ignore[method-assign]


def end_twice(process: Process) -> None:
    """An end that comes twice, as from two callbacks of one transfer."""
    honest = process.ferry._claim_ended

    def claim_ended(action: ClaimEnded) -> None:
        claim = process.ferry._claim_of[action.claim_id]
        honest(action)
        process.ferry._claim_of[action.claim_id] = claim
        honest(action)

    process.ferry._claim_ended = claim_ended  # type: ignore[method-assign]


MUTANTS: dict[str, Callable[[Process], None]] = {
    "skip the confirm": skip_the_confirm,
    "free the target blocks at abort": free_targets_at_abort,
    "free the source blocks at abort": free_sources_at_abort,
    "forget to say that reading stopped": forget(Stopped),
    "forget to say that the offer is withdrawn": forget(Withdrawn),
    "forget to grant": forget(Granted),
    "forget to refuse": forget(Refused),
    "forget to confirm": forget(Confirmed),
    "forget the end of one offer": forget_end(OfferEnded, 7),
    "forget the end of one claim": forget_end(ClaimEnded, 7),
    "forget lost sessions": forget_lost_sessions,
    "forget lost readers": forget_lost_readers,
    "reuse an id": reuse_ids,
    "drop the generation check: confirm what has ended": confirm_any_generation,
    "drop the generation check: take any incarnation": take_any_incarnation,
    "report an end twice": end_twice,
}
