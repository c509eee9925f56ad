"""The trail of one transfer or one half of a hand-off: its last events, and how it ended.

A note costs well under a microsecond: it keeps what it is given, and whoever reads makes words of
it. Nothing here raises, since a data path calls it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
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

Event = tuple[float, str, tuple[Any, ...]]


def handoff_name(offer_id: bytes) -> str:
    """The name of a hand-off in trails, the same on both sides."""
    return offer_id.hex()[:HANDOFF_CHARS]


class Trail:
    """See the module. Made by :meth:`Recorder.begin`. Any thread.

    kind: ``"claim"``, ``"offer"`` or ``"transfer"``. name: its number or id, for people. handoff:
    see :func:`handoff_name`, "" for a transfer alone. labels: names that others know the request
    by. peer, peer_id: the other side, as soon as it is known.
    """

    __slots__ = (
        "_first",
        "_last",
        "_now",
        "_seen",
        "began",
        "bytes_done",
        "ended",
        "error",
        "handoff",
        "kind",
        "labels",
        "name",
        "nbytes",
        "outcome",
        "path",
        "peer",
        "peer_id",
        "renewals",
        "renewed_at",
        "story",
        "write",
    )

    def __init__(
        self,
        now: Callable[[], float],
        kind: str,
        name: str,
        handoff: str,
        labels: tuple[str, ...],
        peer_id: bytes,
    ) -> None:
        self._now = now
        self._first: list[Event] = []
        self._last: deque[Event] | None = None
        self._seen = 0
        self.kind = kind
        self.name = name
        self.handoff = handoff
        self.labels = labels
        self.peer = ""
        self.peer_id = peer_id
        self.began = now()
        self.ended = 0.0
        self.outcome = "running"
        self.error: dict[str, Any] | None = None
        self.write = False
        self.nbytes = 0
        self.bytes_done = 0
        self.path = ""
        self.renewals = 0
        self.renewed_at = 0.0
        self.story = ""

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
            self.outcome = "cancelled" if code in QUIET_CODES else "failed"
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
        names = (self.name, self.handoff, *self.labels)
        if text in names or (self.handoff and self.handoff == text[:HANDOFF_CHARS]):
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


def clean_labels(labels: tuple[str, ...]) -> tuple[str, ...]:
    """Labels as they are kept: few, short, printable. They may come from a client."""
    texts = (str(label)[:LABEL_CHARS_MAX] for label in labels[:LABELS_MAX])
    return tuple(text if text.isprintable() else ascii(text) for text in texts if text)
