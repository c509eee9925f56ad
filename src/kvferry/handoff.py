"""The hand-off over an engine: what the author of an inference engine calls.

Prefill, when a prompt's KV is complete in its pool::

    offer = ferry.offer(blocks, n_tokens, extra={"first_token": 42}, on_end=free_the_blocks)
    response["kv_transfer_params"] = offer.params

Decode, with those parameters and blocks of its own::

    claim = ferry.claim(params, blocks, n_tokens, on_end=start_decoding_or_recompute)

Neither call blocks. Each ``on_end`` is called exactly once, from any thread, also inside ``claim``,
``cancel`` and ``close``: hold no lock around those that ``on_end`` takes. From then on nothing
touches the blocks. The states and their rules are in ``protocol.handoff``; this
file connects them with sessions and transfers.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
import numpy as np

from kvferry import layout
from kvferry.engine import Engine
from kvferry.errors import (
    AbortedError,
    BusyError,
    ClosedError,
    HandoffError,
    KVFerryError,
    PeerLostError,
    RefusedError,
    UsageError,
)
from kvferry.layout import KVGeometry
from kvferry.peers import Peer
from kvferry.planner import Plan
from kvferry.protocol import framing, messages
from kvferry.protocol.handoff import (
    AbortRead,
    Action,
    ClaimEnded,
    Claims,
    ClaimState,
    OfferEnded,
    Offers,
    Send,
    StartRead,
)
from kvferry.regions import I64, Spans
from kvferry.registry import Registration
from kvferry.sockets import Address
from kvferry.transfer import Transfer
from kvferry.transports.base import RemoteRegion

log = logging.getLogger(__name__)

PARAMS_VERSION = 1
PARAMS_KEY = "kvferry"
EXTRA_BYTES_MAX = 64 << 10
PAYLOAD_BYTES_MAX = framing.CONTROL_BYTES_MAX - (1 << 10)
"""What a Granted can carry: its other fields are small."""
CLAIMS_MAX = 65536
"""Claims under way at once; one more is a BusyError."""


class _Payload(msgspec.Struct, frozen=True):
    """What Granted carries: where the KV lies. Blocks are int64 array bytes."""

    ref: Annotated[bytes, msgspec.Meta(min_length=24, max_length=24)]
    geometry: dict[str, Any]
    blocks: bytes
    n_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
    extra: Annotated[dict[str, Any], msgspec.Meta(max_length=64)] = {}


class _Params(msgspec.Struct, frozen=True):
    """The part of ``kv_transfer_params`` that is ours. It crosses a router and a client's hands."""

    version: int
    offer: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    engine: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    addresses: Annotated[
        list[Annotated[str, msgspec.Meta(max_length=256)]],
        msgspec.Meta(min_length=1, max_length=16),
    ]
    n_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
    fingerprint: Annotated[str, msgspec.Meta(max_length=128)]


@dataclass(frozen=True, slots=True)
class OfferEnd:
    """How an offer ended. ``code``: "delivered", or "expired", "cancelled", "peer_lost" ..."""

    offer_id: bytes
    code: str
    message: str
    seconds: float

    @property
    def delivered(self) -> bool:
        return self.code == "delivered"


@dataclass(frozen=True, slots=True)
class ClaimEnd:
    """How a claim ended. With ``error`` None the blocks hold the KV; else they hold garbage.

    extra: what prefill gave to its offer. path: ``"shm/pull"``, "" if nothing was moved.
    seconds: from claim to end. move_s: of that, the moving of bytes.
    plan: why that path, and why not the others; None if nothing was moved.
    """

    claim_id: bytes
    error: KVFerryError | None
    extra: dict[str, Any]
    nbytes: int
    path: str
    seconds: float
    move_s: float
    plan: Plan | None


@dataclass(slots=True)
class Offer:
    """Prefill's half of a hand-off, from :meth:`HandOff.offer`.

    params: JSON-able; put it into the response as ``kv_transfer_params``, unchanged.
    """

    offer_id: bytes
    params: dict[str, Any]
    on_end: Callable[[OfferEnd], None] = field(repr=False)
    began: float
    owner: HandOff = field(repr=False)

    def cancel(self) -> None:
        """Ask it to end early. A claimed offer ends when its reader has stopped. Never blocks."""
        self.owner.cancel_offer(self.offer_id)


@dataclass(slots=True)
class Claim:
    """Decode's half of a hand-off, from :meth:`HandOff.claim`."""

    claim_id: bytes
    offer_id: bytes
    blocks: I64 = field(repr=False)
    n_tokens: int
    on_end: Callable[[ClaimEnd], None] = field(repr=False)
    began: float
    deadline: float
    owner: HandOff = field(repr=False)
    peer: Peer | None = None
    transfer: Transfer | None = None
    is_reading: bool = False
    stop: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def cancel(self) -> None:
        """Ask it to end early; ``on_end`` comes when its reading has stopped. Never blocks."""
        self.owner.cancel_claim(self.claim_id)


class HandOff:
    """Offers and claims of one KV pool.

    engine: carries the bytes; it has one HandOff. pool: the registration of the pool's memory.
    geometry: what lies where in it.
    """

    def __init__(self, engine: Engine, pool: Registration, geometry: KVGeometry) -> None:
        if engine.handoff is not None:
            raise UsageError("this engine has a HandOff already")
        if geometry.pool_nbytes > pool.region.nbytes:
            raise UsageError(
                f"the geometry needs {geometry.pool_nbytes} bytes, the pool has "
                f"{pool.region.nbytes}"
            )
        self.engine = engine
        self.pool = pool
        self.geometry = geometry
        self._wire_geometry = layout.to_wire(geometry)
        self._fingerprint = layout.fingerprint(geometry)
        self._offers = Offers(lease_s=engine.config.lease_s)
        self._claims = Claims()
        self._offer_of: dict[bytes, Offer] = {}
        self._claim_of: dict[bytes, Claim] = {}
        self._ends: dict[str, int] = {}
        self._closed = False
        engine.handoff = self

    def _new_id(self) -> bytes:
        """An id that is used once, in the whole world; the simulator makes its own."""
        return os.urandom(16)

    # -- prefill ----------------------------------------------------------------------------

    def offer(
        self,
        blocks: Any,
        n_tokens: int,
        *,
        on_end: Callable[[OfferEnd], None],
        extra: dict[str, Any] | None = None,
        expires_s: float | None = None,
        labels: tuple[str, ...] = (),
    ) -> Offer:
        """Offer the KV of the first ``n_tokens`` tokens in ``blocks`` (block numbers of the pool).

        The KV must be complete: whoever claims may read at once. The blocks must stay untouched
        until ``on_end``. extra: small JSON-able facts for decode, such as the first sampled token.
        expires_s: how long it may wait to be claimed; default is the engine's ``offer_s``.
        labels: names that the request is known by elsewhere, under which its trail is found.
        Raises UsageError, BoundsError for blocks outside the pool, BusyError, ClosedError.
        """
        table = layout.check_blocks(self.geometry, blocks, n_tokens)
        payload = msgspec.msgpack.encode(
            _Payload(
                self.pool.ref, self._wire_geometry, table.tobytes(), n_tokens, dict(extra or {})
            )
        )
        if len(payload) - table.nbytes > EXTRA_BYTES_MAX:
            raise UsageError(
                f"extra is over {EXTRA_BYTES_MAX} bytes", fix="send large facts by another way"
            )
        if len(payload) > PAYLOAD_BYTES_MAX:
            raise UsageError(
                f"a table of {len(table)} blocks does not fit into one message",
                fix="offer fewer blocks at once, or make blocks larger",
            )
        engine = self.engine
        engine.check_open()
        offer_id = self._new_id()
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            PARAMS_KEY: {
                "version": PARAMS_VERSION,
                "offer": offer_id.hex(),
                "engine": engine.incarnation.hex(),
                "addresses": engine.addresses,
                "n_tokens": n_tokens,
                "fingerprint": self._fingerprint,
            },
        }
        now = engine.clock.now()
        wait_s = engine.config.offer_s if expires_s is None else expires_s
        offer = Offer(offer_id, params, on_end, now, self)
        with engine.locked():
            if self._closed:
                raise ClosedError("the hand-off is closed")
            if len(self._offers) >= self._offers.offers_max:
                raise BusyError(f"{len(self._offers)} offers wait", fix="are decodes claiming?")
            self._offers.add(offer_id, payload, expires_at=now + wait_s)
            self._offer_of[offer_id] = offer
            trail = engine.recorder.begin("offer", offer_id, handoff=offer_id, labels=labels)
            trail.note("offered", n_tokens, len(table), wait_s)
        return offer

    def cancel_offer(self, offer_id: bytes) -> None:
        with self.engine.locked():
            if offer_id in self._offer_of:
                self.engine.recorder.trail(offer_id).note("cancelled", "this engine")
            self._do(self._offers.cancel(offer_id, self.engine.clock.now()))

    # -- decode -----------------------------------------------------------------------------

    def claim(
        self,
        params: dict[str, Any],
        blocks: Any,
        n_tokens: int,
        *,
        on_end: Callable[[ClaimEnd], None],
        deadline_s: float | None = None,
        labels: tuple[str, ...] = (),
    ) -> Claim:
        """Load the KV of an offer into ``blocks`` of this pool.

        params: as they came, not trusted. n_tokens: tokens that the caller expects; another number
        fails the claim, since the prompts then differ. deadline_s: for the whole hand-off; default
        is the engine's ``transfer_s``. labels: see :meth:`offer`. The blocks must stay untouched
        until ``on_end``, which comes later than the deadline only if a transport does not say that
        it has stopped. Raises
        UsageError for parameters that can never work, with the key named, and ClosedError;
        whatever fails later arrives as ``ClaimEnd.error``.
        """
        ours = parse_params(params)
        if ours.fingerprint != self._fingerprint:
            raise RefusedError(
                f"prefill's KV has the fingerprint {ours.fingerprint}, this engine's "
                f"{self._fingerprint}: model, heads, head size or dtype differ",
                code="geometry",
                fix="run the same model in the same KV dtype on both sides",
            )
        if ours.n_tokens != n_tokens:
            raise UsageError(
                f"prefill offers {ours.n_tokens} tokens, decode's prompt has {n_tokens}: the two "
                "sides tokenised differently",
                fix="use the same tokenizer and chat template on both sides",
            )
        table = layout.check_blocks(self.geometry, blocks, n_tokens)
        limit_s = self.engine.config.transfer_s if deadline_s is None else deadline_s
        return self._claim(ours, table, n_tokens, on_end, limit_s, labels)

    def _claim(
        self,
        ours: _Params,
        table: I64,
        n_tokens: int,
        on_end: Callable[[ClaimEnd], None],
        limit_s: float,
        labels: tuple[str, ...] = (),
    ) -> Claim:
        engine = self.engine
        now = engine.clock.now()
        deadline = now + limit_s
        claim_id = self._new_id()
        offer_id = bytes.fromhex(ours.offer)
        claim = Claim(claim_id, offer_id, table, n_tokens, on_end, now, deadline, self)
        addresses = [_numeric(text) for text in ours.addresses]
        with engine.locked():
            # Under the lock, or the close could come before the dial: an error here, and an end.
            engine.check_open()
            if self._closed:
                raise ClosedError("the hand-off is closed")
            if len(self._claims) >= CLAIMS_MAX:
                raise BusyError(
                    f"{len(self._claims)} claims are under way", fix="wait for some to end"
                )
            self._claims.add(claim_id, offer_id, deadline=deadline, now=now)
            self._claim_of[claim_id] = claim
            trail = engine.recorder.begin(
                "claim",
                claim_id,
                handoff=offer_id,
                labels=labels,
                peer_id=bytes.fromhex(ours.engine),
            )
            trail.note("claimed", n_tokens, limit_s)
            connect_by = min(deadline, now + engine.config.connect_s)
            engine.connect_nowait(
                addresses,
                bytes.fromhex(ours.engine),
                lambda peer, error: self._connected(claim, peer, error),
                connect_by,
            )
        return claim

    def cancel_claim(self, claim_id: bytes) -> None:
        with self.engine.locked():
            if claim_id in self._claim_of:
                self.engine.recorder.trail(claim_id).note("cancelled", "this engine")
            self._do(self._claims.cancel(claim_id))

    def decline(self, params: dict[str, Any]) -> None:
        """Let go of an offer that will not be claimed, so that prefill gets its blocks back now.

        Never blocks. What goes wrong is not told: the offer then ends by its own time. Raises
        UsageError for parameters that are not kvferry's, BusyError, ClosedError.
        """
        ours = parse_params(params)
        nothing = np.empty(0, dtype=np.int64)
        with self.engine.locked():
            self._claim(ours, nothing, 0, lambda _end: None, self.engine.config.connect_s).cancel()

    def _connected(self, claim: Claim, peer: Peer | None, error: KVFerryError | None) -> None:
        with self.engine.locked():
            if peer is not None and not peer.is_open():
                error = peer.lost
            if error is not None or peer is None:
                error = error or PeerLostError("the peer is gone")
                self._do(self._claims.failed(claim.claim_id, error.located(stage="connect")))
                return
            if claim.stop:
                # It ended while there was nobody to tell: take the offer, and leave it at once.
                peer.send(messages.Claim(claim.claim_id, claim.offer_id))
                gone = "the claim ended before it was made"
                peer.send(messages.Stopped(claim.claim_id, claim.offer_id, gone))
                return
            claim.peer = peer
            self._do(self._claims.connected(claim.claim_id, peer))

    # -- what the engine calls, under its lock ------------------------------------------------

    def on_message(self, peer: Peer, message: Any) -> None:
        now = self.engine.clock.now()
        self.engine.recorder.heard(peer, message)
        kind = type(message)
        if kind is messages.Claim:
            self._do(self._offers.claim(peer, message, now))
        elif kind is messages.Granted:
            self._do(self._claims.granted(peer, message, now))
        elif kind is messages.Confirm:
            self._do(self._offers.confirm(peer, message, now))
        elif kind is messages.Confirmed:
            self._do(self._claims.confirmed(peer, message))
        elif kind is messages.Refused:
            self._do(self._claims.refused(peer, message))
        elif kind is messages.Withdrawn:
            self._do(self._claims.withdrawn(peer, message))
        elif kind is messages.Stopped:
            self._do(self._offers.stopped(peer, message, now))
        elif kind is messages.Renew:
            self._do(self._offers.renew(peer, message, now))

    def on_peer_lost(self, peer: Peer) -> None:
        error = peer.lost or PeerLostError("the peer is gone")
        self._do(self._offers.session_lost(peer))
        self._do(self._claims.session_lost(peer, error))

    def tick(self, now: float) -> None:
        self._do(self._offers.tick(now))
        self._do(self._claims.tick(now))

    def due(self) -> float:
        return min(self._offers.due(), self._claims.due())

    def statistics(self) -> dict[str, Any]:
        """Live offers and claims by state, and how the ended ones ended."""
        with self.engine.locked():
            return {
                "offers": self._offers.states(),
                "claims": self._claims.states(),
                "ended": dict(self._ends),
            }

    def close(self) -> None:
        """Cancel what lives; every ``on_end`` has been called, or will be by the engine's close."""
        with self.engine.locked():
            self._closed = True
            now = self.engine.clock.now()
            for offer_id in list(self._offer_of):
                self._do(self._offers.cancel(offer_id, now))
            for claim_id in list(self._claim_of):
                self._do(self._claims.cancel(claim_id))

    # -- effects ----------------------------------------------------------------------------

    def _do(self, actions: list[Action]) -> None:
        """Carry out what the tables ask for."""
        for action in actions:
            if isinstance(action, Send):
                assert isinstance(action.session, Peer)
                self.engine.recorder.said(action.session, action.message)
                action.session.send(action.message)
            elif isinstance(action, StartRead):
                self._start_read(action)
            elif isinstance(action, AbortRead):
                self._abort_read(action.claim_id)
            elif isinstance(action, OfferEnded):
                self._offer_ended(action)
            else:
                self._claim_ended(action)

    def _start_read(self, action: StartRead) -> None:
        """Find out what to read, get the region's description if it is new, and read."""
        claim = self._claim_of[action.claim_id]
        peer = claim.peer
        assert peer is not None
        try:
            payload, mine, theirs = self._read_plan(claim, action.granted)
        except KVFerryError as error:
            error.fix = error.fix or "run the same kvferry release on both sides"
            self._read_ended(claim, error)
            return
        claim.extra = payload.extra
        if mine.nbytes == 0:
            self.engine.later(lambda: self._finish_read(claim, None))
            return

        def read(region: Any, error: KVFerryError | None) -> None:
            # Runs without the lock: a short copy happens right here.
            if error is None:
                error = self._read(claim, mine, region, theirs)
            if error is not None:
                self._finish_read(claim, error.located(stage="describe"))

        try:
            self.engine.describe(peer, payload.ref, claim.deadline, read)
        except KVFerryError as error:
            self._read_ended(claim, error.located(stage="describe"))

    def _read_plan(self, claim: Claim, granted: messages.Granted) -> tuple[_Payload, Spans, Spans]:
        """What prefill says lies where, checked, and the spans on both sides."""
        try:
            payload = msgspec.msgpack.decode(granted.payload, type=_Payload)
        except (msgspec.DecodeError, RecursionError) as error:
            raise HandoffError(
                f"prefill's grant cannot be read: {error}",
                fix="run the same kvferry release on both sides",
            ) from error
        source = layout.from_wire(payload.geometry)
        differences = layout.compatible(self.geometry, source)
        if differences:
            raise HandoffError(
                "the two KV pools do not fit: " + "; ".join(differences),
                fix="run the same model in the same KV dtype on both sides",
            )
        if payload.n_tokens != claim.n_tokens or len(payload.blocks) % 8:
            raise HandoffError(
                f"prefill grants {payload.n_tokens} tokens in {len(payload.blocks)} bytes of block "
                f"numbers, not {claim.n_tokens} tokens",
                fix="copy prefill's kv_transfer_params verbatim, to the request they belong to",
            )
        blocks = np.frombuffer(payload.blocks, "<i8")
        theirs, mine = layout.transfer_spans(
            source, blocks, self.geometry, claim.blocks, claim.n_tokens
        )
        return payload, mine, theirs

    def _read(
        self, claim: Claim, mine: Spans, region: RemoteRegion, theirs: Spans
    ) -> KVFerryError | None:
        left = claim.deadline - self.engine.clock.now()
        with self.engine.locked():
            if claim.stop:
                return None  # It has ended: see _abort_read.
            claim.is_reading = True
        try:
            transfer = self.engine.read(
                self.pool,
                mine,
                region,
                theirs,
                deadline_s=max(left, 0.001),
                trail=self.engine.recorder.trail(claim.claim_id),
            )
        except KVFerryError as error:
            return error
        except Exception as failure:
            # A claim has no other end than the one that its read reports.
            log.exception("the read of a claim did not start; this is a bug")
            self.engine.recorder.internal_error("the read of a claim")
            return AbortedError(f"internal error: {type(failure).__name__}: {failure}")
        claim.transfer = transfer
        if claim.stop:
            transfer.cancel()
        transfer.add_done_callback(lambda done: self._finish_read(claim, done.error))
        return None

    def _finish_read(self, claim: Claim, error: KVFerryError | None) -> None:
        with self.engine.locked():
            self._read_ended(claim, error)

    def _read_ended(self, claim: Claim, error: KVFerryError | None) -> None:
        self._do(self._claims.read_ended(claim.claim_id, error))

    def _abort_read(self, claim_id: bytes) -> None:
        claim = self._claim_of[claim_id]
        claim.stop = True
        if claim.transfer is not None:
            claim.transfer.cancel()
        elif not claim.is_reading:
            # It waits for a description, which a frozen peer does not send, and will not begin.
            self._read_ended(claim, None)

    def _offer_ended(self, action: OfferEnded) -> None:
        offer = self._offer_of.pop(action.offer_id)
        self._ends["offer_" + action.code] = self._ends.get("offer_" + action.code, 0) + 1
        self.engine.recorder.finish(action.offer_id, action.code, message=action.message)
        if action.code != "delivered":
            self.engine.later(lambda: self.engine.recorder.tell(action.offer_id))
        seconds = self.engine.clock.now() - offer.began
        end = OfferEnd(action.offer_id, action.code, action.message, seconds)
        self.engine.later(lambda: offer.on_end(end))

    def _claim_ended(self, action: ClaimEnded) -> None:
        claim = self._claim_of.pop(action.claim_id)
        claim.stop = True
        transfer = claim.transfer
        loaded = action.state is ClaimState.LOADED
        code = "loaded" if loaded or action.error is None else action.error.code
        self._ends["claim_" + code] = self._ends.get("claim_" + code, 0) + 1
        end = ClaimEnd(
            claim_id=claim.claim_id,
            error=action.error,
            extra=claim.extra if loaded else {},
            nbytes=transfer.bytes_done if transfer else 0,
            path=transfer.path if transfer else "",
            seconds=self.engine.clock.now() - claim.began,
            move_s=transfer.seconds if transfer else 0.0,
            plan=transfer.plan if transfer else None,
        )
        if action.error is not None and claim.peer is not None:
            action.error.located(peer=claim.peer.name)
        self.engine.recorder.finish(action.claim_id, code, action.error)
        if action.error is not None:
            self.engine.later(lambda: self.engine.recorder.tell(action.claim_id, action.error))
        if transfer is None:
            self.engine.later(lambda: claim.on_end(end))
        else:
            # The caller may use its blocks again from then on, so nothing may still write there.
            self.engine.later(lambda: transfer.when_quiet(lambda: claim.on_end(end)))


def _numeric(text: str) -> Address:
    """An address out of parameters that anybody may have written.

    Raises UsageError for a host's name: to look it up would block, and a peer only tells numbers.
    """
    address = Address.parse(text)
    if address.scheme == "tcp":
        try:
            ipaddress.ip_address(address.host.partition("%")[0])
        except ValueError:
            raise UsageError(
                f"kv_transfer_params.{PARAMS_KEY}.addresses: {address.host!r} is not a number",
                fix="copy prefill's kv_transfer_params verbatim into decode's request",
            ) from None
    return address


def parse_params(params: Any) -> _Params:
    """The checked part of ``kv_transfer_params`` that is kvferry's.

    Raises UsageError that names the key, also for parameters of another release.
    """
    body = params.get(PARAMS_KEY) if isinstance(params, dict) else None
    if not isinstance(body, dict):
        raise UsageError(
            f"kv_transfer_params has no {PARAMS_KEY!r} part",
            fix="copy prefill's kv_transfer_params verbatim into decode's request",
        )
    if body.get("version") != PARAMS_VERSION:
        raise UsageError(
            f"kv_transfer_params has version {reprlib.repr(body.get('version'))}, this side "
            f"understands {PARAMS_VERSION}",
            fix="run the same kvferry release on both sides",
        )
    try:
        return msgspec.convert(body, _Params)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"kv_transfer_params.{PARAMS_KEY}: {error}",
            fix="copy prefill's kv_transfer_params verbatim into decode's request",
        ) from error
