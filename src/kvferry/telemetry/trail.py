"""The trail of one transfer or one half of a hand-off: its last events, and how it ended.

A note costs well under a microsecond: it keeps what it is given, and whoever reads makes words of
it. Nothing here raises, since a data path calls it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

from kvferry.errors import KVFerryError
from kvferry.telemetry.events import facts_of

FIRST_MAX = 24
"""So many events from the beginning of a trail are kept whatever follows."""
LAST_MAX = 24
"""And so many of the latest."""
LABELS_MAX = 8
LABEL_CHARS_MAX = 128
HANDOFF_CHARS = 16
"""Digits of a hand-off's id that are shown: enough to find it, too few to claim it with."""
QUIET_CODES = frozenset({"aborted", "cancelled", "closed"})
"""Ends that somebody here asked for."""

INTERNAL = "internal error"
"""How the message of an AbortedError begins that nobody asked for."""

Event = tuple[float, str, tuple[Any, ...]]


def handoff_name(offer_id: bytes) -> str:
    """The name of a hand-off in trails, the same on both sides."""
    return offer_id.hex()[:HANDOFF_CHARS]


class Trail:
    """See the module. Made by :meth:`Recorder.begin`. Any thread.

    kind: ``"claim"``, ``"offer"`` or ``"transfer"``. key: its number or id. handoff: the offer's id
    on either side, or empty. labels: names that others know the request by. peer, peer_id: the
    other side, as soon as it is known.
    """

    # Defaults live in the class, so that a new trail costs little.
    peer = ""
    ended = 0.0
    outcome = "running"
    error: dict[str, Any] | None = None
    write = False
    nbytes = 0
    bytes_done = 0
    path = ""
    renewals = 0
    renewed_at = 0.0
    story = ""
    _last: deque[Event] | None = None
    _seen = 0

    def __init__(
        self,
        now: Callable[[], float],
        kind: str,
        key: Hashable,
        handoff: bytes,
        labels: tuple[str, ...],
        peer_id: bytes,
    ) -> None:
        self._now = now
        self._first: list[Event] = []
        self.kind = kind
        self.key = key
        self.offer_id = handoff
        self.labels = labels
        self.peer_id = peer_id
        self.began = now()

    @property
    def name(self) -> str:
        """Its number, or the beginning of its id."""
        return handoff_name(self.key) if isinstance(self.key, bytes) else str(self.key)

    @property
    def handoff(self) -> str:
        """See :func:`handoff_name`; "" for a transfer alone."""
        return handoff_name(self.offer_id) if self.offer_id else ""

    def note(self, event: str, *facts: Any) -> None:
        """Keep an event of :data:`EVENTS`, now. The facts are looked at when somebody reads."""
        try:
            first = self._first
            if len(first) < FIRST_MAX:
                first.append((self._now(), event, facts))
            else:
                self._note_late((self._now(), event, facts))
        except Exception:  # A recorder must never break what it records.
            return

    def note_at(self, at: float, event: str, *facts: Any) -> None:
        """The same for something that was at ``at``, in the engine's clock."""
        first = self._first
        if len(first) < FIRST_MAX:
            first.append((at, event, facts))
        else:
            self._note_late((at, event, facts))

    def _note_late(self, event: Event) -> None:
        last = self._last
        if last is None:
            last = self._last = deque(maxlen=LAST_MAX)
        last.append(event)
        self._seen += 1

    def planned(self, peer: str, nbytes: int, spans: int, write: bool, plan: Any) -> None:
        """A transfer has its plan: what it is about, and the first event."""
        self.peer, self.nbytes, self.write = peer, nbytes, write
        self.note("planned", nbytes, spans, plan)

    def renewed(self) -> None:
        """A sign of life of the reader; counted and not listed."""
        self.renewals += 1
        self.renewed_at = self._now()

    def finish(self, code: str, error: KVFerryError | None = None) -> None:
        """The end. Only the first counts. code: how, in a word; ``error`` gives the rest."""
        if self.ended:
            return
        if error is None and code in ("loaded", "delivered", "moved"):
            self.outcome = "ok"
        else:
            is_bug = error is not None and error.message.startswith(INTERNAL)
            self.outcome = "cancelled" if code in QUIET_CODES and not is_bug else "failed"
        if error is not None:
            self.error = error.as_dict()
            self.bytes_done = self.bytes_done or error.bytes_done
        elif self.outcome != "ok":
            self.error = {"code": code, "message": ""}
        self.note("ended", self.outcome, code)
        self.ended = self._now()

    # -- reading ----------------------------------------------------------------------------

    def answers_to(self, text: str) -> int:
        """How well ``text`` names this: 2 for a whole name, 1 for the beginning of one, else 0."""
        handoff = self.handoff
        names = (self.name, handoff, *self.labels)
        if text in names or (handoff and handoff == text[:HANDOFF_CHARS]):
            return 2
        return int(any(name.startswith(text) for name in names if name))

    def events(self) -> list[Event]:
        """What is kept, in order of time."""
        events = list(self._first)
        if self._last is not None:
            events += list(self._last)
        if self.renewals:
            events.append((self.renewed_at, "renewed", (self.renewals,)))
        return sorted(events, key=lambda event: event[0])

    @property
    def left_out(self) -> int:
        """Events that were not kept."""
        return max(self._seen - LAST_MAX, 0)

    def as_dict(self, engine: str, peers: list[Event] | None = None) -> dict[str, Any]:
        """Everything as JSON types. All times are since its beginning: no clock is shown."""
        now = self._now()
        end = self.ended or now
        events = sorted(itertools.chain(self.events(), peers or ()), key=lambda event: event[0])
        return {
            "kind": self.kind,
            "id": self.name,
            "handoff": self.handoff,
            "labels": list(self.labels),
            "engine": engine,
            "peer": self.peer,
            "outcome": self.outcome,
            "write": self.write,
            "seconds": end - self.began,
            "ended_ago_s": now - self.ended if self.ended else 0.0,
            "nbytes": self.nbytes,
            "bytes_done": self.bytes_done,
            "path": self.path,
            "error": self.error,
            "left_out": self.left_out,
            "story": self.story,
            "events": [
                {"at_s": at - self.began, "event": name, **facts_of(name, facts)}
                for at, name, facts in events
            ],
        }


def bounded_labels(labels: tuple[str, ...]) -> tuple[str, ...]:
    """Labels as they are kept: few and short. They may come from a client."""
    if len(labels) <= LABELS_MAX and len(max(labels, key=len)) <= LABEL_CHARS_MAX:
        return labels
    return tuple(label[:LABEL_CHARS_MAX] for label in labels[:LABELS_MAX])
