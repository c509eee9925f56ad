"""The flight recorder of one engine: the trails of its latest transfers and hand-offs.

Bounded whatever happens: trails that ended well go first, failed ones are kept longer. Whatever
goes wrong in here stays in here, since it must never be the reason why a transfer fails.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

from kvferry.clock import Clock
from kvferry.errors import ConfigError, KVFerryError
from kvferry.protocol import messages
from kvferry.security import Sparing
from kvferry.telemetry import story
from kvferry.telemetry.events import facts_of
from kvferry.telemetry.trail import Event, Trail, bounded_labels

log = logging.getLogger(__name__)

TRAILS_MAX = 2048
"""Half of them, those that failed last, outlive those that ended well."""
PEER_EVENTS_MAX = 512
PLACES_MAX = 1024
"""Addresses for which the last process is remembered, to see a restart."""
FOUND_MAX = 16
"""Trails in one answer."""
REASONS_MAX = 256
STORIES_BURST, STORIES_PER_S = 3, 10.0
"""So many failures of one reason are told in full per so many seconds; the rest are counted."""
BEFORE_S, AFTER_S = 1.0, 0.5
"""What a peer did so long before and after belongs to the story of a trail."""
DUMPS_MAX = 8
DUMP_PAUSE_S = 60.0
"""After an internal error the next dump waits so long, and the ninth replaces the first."""
LAST_FAILURE = "last-failure"

P = ParamSpec("P")


def _harmless(call: Callable[P, None]) -> Callable[P, None]:
    """The same call, but for that it never raises."""

    @wraps(call)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            call(*args, **kwargs)
        except Exception:
            log.debug("the flight recorder failed", exc_info=True)

    return guarded


class Recorder:
    """See the module. Any thread; it takes no lock but its own, and never blocks.

    name: of the engine. dump_dir: where :meth:`internal_error` leaves a dump; "" for nowhere.
    """

    def __init__(
        self, clock: Clock, name: str, *, dump_dir: str = "", trails_max: int = TRAILS_MAX
    ) -> None:
        self._now = clock.now
        self.name = name
        self.dump_dir = dump_dir
        self._trails_max = trails_max
        self._failed_max = max(trails_max // 2, 1)
        self._trails: dict[Hashable, Trail] = {}
        self._well: deque[Hashable] = deque()
        self._failed: deque[Hashable] = deque()
        self._peers: deque[tuple[bytes, Event]] = deque(maxlen=PEER_EVENTS_MAX)
        self._places: OrderedDict[str, bytes] = OrderedDict()
        self._sparing: dict[tuple[str, str], Sparing] = {}
        self._lock = threading.Lock()
        self._dumps = itertools.count()
        self._dumped_at = float("-inf")

    def __len__(self) -> int:
        return len(self._trails)

    # -- what the engine and the hand-off note -----------------------------------------------

    def begin(
        self,
        kind: str,
        key: Hashable,
        *,
        handoff: bytes = b"",
        labels: tuple[str, ...] = (),
        peer_id: bytes = b"",
    ) -> Trail:
        """A new trail, found again by ``key``. handoff: the offer's id on either side."""
        try:
            labels = bounded_labels(labels) if labels else labels
        except Exception:  # Whatever a caller took for labels.
            labels = ()
        trail = Trail(self._now, kind, key, handoff, labels, peer_id)
        self._trails[key] = trail
        if len(self._trails) > self._trails_max:
            self._evict()
        return trail

    def trail(self, key: Hashable) -> Trail:
        """The trail that was begun under ``key``; one that nobody will read if it is gone."""
        return self._trails.get(key) or Trail(self._now, "lost", 0, b"", (), b"")

    def _evict(self) -> None:
        with self._lock:
            while len(self._trails) > self._trails_max:
                if len(self._failed) > self._failed_max or (self._failed and not self._well):
                    key = self._failed.popleft()
                elif self._well:
                    key = self._well.popleft()
                else:
                    key = next(iter(self._trails))
                self._trails.pop(key, None)

    def finish(
        self, key: Hashable, code: str, error: KVFerryError | None = None, message: str = ""
    ) -> None:
        """The end of a trail; see Trail.finish. Cheap enough for under the engine's lock."""
        trail = self._trails.get(key)
        if trail is None or trail.ended:
            return
        try:
            trail.finish(code, error)
            if error is None and trail.error is not None:
                trail.error["message"] = message
        finally:
            (self._failed if trail.outcome == "failed" else self._well).append(key)

    @_harmless
    def tell(self, key: Hashable, error: KVFerryError | None = None) -> None:
        """Log the story of a failure, and put it into ``error.story``. Not under a lock."""
        trail = self._trails.get(key)
        if trail is None or trail.outcome not in ("failed", "cancelled"):
            return
        trail.story = story.tell(self._dict(trail))
        if error is not None:
            error.story = trail.story
        code = str((trail.error or {}).get("code", ""))
        if trail.outcome == "cancelled" or code == "released":
            # Somebody asked for it, or the other side knows why and tells its own story.
            log.debug("%s", trail.story)
            return
        passes, left_out = self._passes((trail.kind, code))
        if passes:
            more = f" ({left_out} more like it were not told)" if left_out else ""
            log.warning("%s%s", trail.story, more)

    def _passes(self, reason: tuple[str, str]) -> tuple[bool, int]:
        with self._lock:
            if reason not in self._sparing and len(self._sparing) >= REASONS_MAX:
                self._sparing.clear()
            sparing = self._sparing.setdefault(reason, Sparing(STORIES_BURST, STORIES_PER_S))
            return sparing.passes(self._now())

    # -- messages of the hand-off --------------------------------------------------------------

    def heard(self, peer: Any, message: Any) -> None:
        """A message of the hand-off has come from ``peer``."""
        try:
            what = _HEARD.get(type(message))
            if what is not None:
                self._note(what, peer, message)
            elif type(message) is messages.Renew:
                for offer_id in message.offer_ids:
                    trail = self._trails.get(offer_id)
                    if trail is not None:
                        trail.renewed()
        except Exception:
            log.debug("the flight recorder failed", exc_info=True)

    def said(self, peer: Any, message: Any) -> None:
        """A message of the hand-off is on its way to ``peer``."""
        try:
            what = _SAID.get(type(message))
            if what is not None:
                self._note(what, peer, message)
        except Exception:
            log.debug("the flight recorder failed", exc_info=True)

    def _note(self, what: _What, peer: Any, message: Any) -> None:
        event, by_offer, facts = what
        trail = self._trails.get(message.offer_id if by_offer else message.claim_id)
        if trail is None:
            return
        if not facts:
            values: tuple[Any, ...] = facts
        elif facts is _PEER:
            if not trail.peer:
                trail.peer, trail.peer_id = peer.name, peer.incarnation
            values = (peer.name,)
        else:
            values = tuple([getattr(message, name) for name in facts])
        trail.note(event, *values)

    # -- peers ------------------------------------------------------------------------------

    @_harmless
    def peer(self, peer_id: bytes, event: str, *facts: Any) -> None:
        """Something about a peer, which every trail with it at that time is shown with."""
        self._peers.append((peer_id, (self._now(), event, facts)))

    @_harmless
    def peer_up(self, peer_id: bytes, name: str, address: str, is_caller: bool) -> None:
        """A connection to a peer; it is noticed when another process answers at its address."""
        self.peer(peer_id, "peer_up", name, address)
        if not is_caller:
            return
        with self._lock:
            known = self._places.pop(address, peer_id)
            self._places[address] = peer_id
            if len(self._places) > PLACES_MAX:
                self._places.popitem(last=False)
        if known != peer_id:
            self.peer(peer_id, "peer_restarted", name, address)
            self.peer(known, "peer_restarted", name, address)

    # -- reading ----------------------------------------------------------------------------

    def find(self, text: str) -> list[Trail]:
        """The trails that ``text`` names: whole names first, else all that begin so.

        text: a hand-off's id, a transfer's number, a label, the beginning of one, or
        ``"last-failure"``. Both halves of one hand-off may come.
        """
        trails = list(self._trails.values())
        if text == LAST_FAILURE:
            failed = [trail for trail in trails if trail.outcome == "failed"]
            return sorted(failed, key=lambda trail: trail.ended)[-1:]
        scored = [(trail.answers_to(text), trail) for trail in trails] if text else []
        best = max((score for score, _ in scored), default=0)
        return [trail for score, trail in scored if score == best > 0]

    def why(self, text: str) -> dict[str, Any]:
        """What ``/debug/why`` answers: up to 16 trails, and the engine's name. JSON types."""
        found = self.find(text)
        return {
            "kind": "engine",
            "name": self.name,
            "found": len(found),
            "trails": [self._dict(trail, tell=True) for trail in found[-FOUND_MAX:]],
        }

    def _dict(self, trail: Trail, *, tell: bool = False) -> dict[str, Any]:
        since, until = trail.began - BEFORE_S, (trail.ended or self._now()) + AFTER_S
        peers = [
            event
            for peer_id, event in list(self._peers)
            if peer_id == trail.peer_id and since <= event[0] <= until
        ]
        plain = trail.as_dict(self.name, peers)
        if tell:
            plain["story"] = story.tell(plain)
        return plain

    # -- dumps ------------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """All trails and the latest of peers, as JSON types; what :meth:`dump` writes."""
        now = self._now()
        return {
            "kind": "dump",
            "name": self.name,
            "pid": os.getpid(),
            "trails": [self._dict(trail, tell=True) for trail in list(self._trails.values())],
            "peers": [
                {"ago_s": now - at, "event": event, **facts_of(event, facts)}
                for _, (at, event, facts) in list(self._peers)
            ],
        }

    def dump(self, path: str | os.PathLike[str]) -> Path:
        """Write everything to a JSON file that only its owner can read. Blocks.

        The file is there whole or not at all. Raises ConfigError when it cannot be written.
        """
        target = Path(path)
        draft = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
        text = json.dumps(self.as_dict(), indent=1)
        try:
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(fd, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(draft, target)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise ConfigError(
                f"the dump cannot be written to {target}: {error.strerror or error}",
                fix="name a directory that exists and can be written to",
            ) from error
        return target

    def dump_to(self, directory: str) -> Path:
        """:meth:`dump` under a name of its own; each process keeps its latest eight there."""
        number = next(self._dumps) % DUMPS_MAX
        name = "".join(c if c.isalnum() or c in "-_" else "_" for c in self.name)[:64]
        return self.dump(Path(directory) / f"kvferry-{name}-{os.getpid()}-{number}.json")

    @_harmless
    def internal_error(self, where: str) -> None:
        """A bug has shown: leave a dump in ``dump_dir``, if there is one. Not under a lock."""
        if not self.dump_dir:
            return
        with self._lock:
            now = self._now()
            if now - self._dumped_at < DUMP_PAUSE_S:
                return
            self._dumped_at = now
        log.error("after an internal error (%s): see %s", where, self.dump_to(self.dump_dir))


_What = tuple[str, bool, tuple[str, ...]]
"""Event, whether the offer's side notes it, and the fields of the message that are facts."""

_PEER = ("",)
"""The fact is the peer itself."""

_HEARD: dict[type, _What] = {
    messages.Claim: ("claim_arrived", True, _PEER),
    messages.Confirm: ("confirm_arrived", True, ()),
    messages.Stopped: ("stop_arrived", True, ("reason",)),
    messages.Granted: ("granted", False, ("lease_s",)),
    messages.Confirmed: ("confirmed", False, ()),
    messages.Refused: ("refused", False, ("code", "message")),
    messages.Withdrawn: ("withdrawn", False, ("code", "message")),
}
_SAID: dict[type, _What] = {
    messages.Claim: ("claim_asked", False, _PEER),
    messages.Confirm: ("confirm_asked", False, ()),
    messages.Stopped: ("stop_said", False, ("reason",)),
    messages.Granted: ("claim_granted", True, ()),
    messages.Confirmed: ("confirm_granted", True, ()),
    messages.Refused: ("claim_refused", True, ("code", "message")),
    messages.Withdrawn: ("withdrawal_said", True, ("code",)),
}
