"""Two sessions and the wire between them, without a socket: for tests of what peers say."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from kvferry.protocol.auth import Keys
from kvferry.protocol.messages import Hello, Message
from kvferry.protocol.session import Closed, Event, Opened, Received, Session, State, Timing


def hello(name: str = "engine", *, purpose: str = "control", **fields: Any) -> Hello:
    """A hello of an engine that was started just now; ``fields`` replace what is made up."""
    made_up: dict[str, Any] = {"incarnation": os.urandom(16), "key": os.urandom(16)}
    return Hello(name=name, purpose=purpose, **{**made_up, **fields})


@dataclass(slots=True)
class End:
    """One side: its session and all that happened to it, in order."""

    session: Session
    events: list[Event] = field(default_factory=list)

    @property
    def closed(self) -> list[Closed]:
        """The ends of the session; a sound session has at most one."""
        return [event for event in self.events if isinstance(event, Closed)]

    @property
    def received(self) -> list[Any]:
        """The messages for the layer above."""
        return [event.message for event in self.events if isinstance(event, Received)]


class SessionPair:
    """A caller's and a callee's session, joined by a wire that a test can hold, cut or spoil.

    caller, callee: the two hellos. timing: of both. piece_bytes: how many bytes arrive at once.
    keys: the cluster keys of caller and callee.
    Time is the attribute ``now``; the callee answers a good hello at once, as an engine does.
    """

    def __init__(
        self,
        caller: Hello | None = None,
        callee: Hello | None = None,
        *,
        timing: Timing | None = None,
        piece_bytes: int = 1 << 20,
        now: float = 1000.0,
        keys: tuple[Keys | None, Keys | None] = (None, None),
    ) -> None:
        self.now = now
        self.piece_bytes = piece_bytes
        self.is_cut = False
        patience = timing or Timing()
        ours, theirs = caller or hello("caller"), callee or hello("callee")
        near, far = keys
        self.caller = End(Session(ours, caller=True, timing=patience, now=now, keys=near))
        self.callee = End(Session(theirs, caller=False, timing=patience, now=now, keys=far))

    def send(self, sender: End, message: Message, *, fds: tuple[int, ...] = ()) -> None:
        """Queue a message; :meth:`flow` carries it. Descriptors are counted, never passed."""
        sender.session.send(message, self.now, fds)

    def flow(self) -> None:
        """Carry bytes both ways until both sides are silent. A cut wire swallows them."""
        busy = True
        while busy:
            busy = self._carry(self.caller, self.callee) | self._carry(self.callee, self.caller)

    def inject(self, target: End, data: bytes) -> list[Event]:
        """Let ``target`` receive bytes that nobody sent."""
        new: list[Event] = []
        for begin in range(0, len(data), self.piece_bytes):
            piece = data[begin : begin + self.piece_bytes]
            new += self._happened(target, target.session.receive(piece, self.now))
        return new

    def advance(self, seconds: float) -> None:
        """Move the time, stopping wherever a session has something to do, and flow each time."""
        end = self.now + seconds
        while True:
            live = [e for e in (self.caller, self.callee) if e.session.state is not State.CLOSED]
            due = min([e.session.due() for e in live], default=end)
            self.now = min(max(due, self.now), end)
            for side in live:
                self._happened(side, side.session.tick(self.now))
            self.flow()
            if self.now >= end:
                return

    def hang_up(self, target: End) -> None:
        """Let ``target`` see the end of its stream."""
        self._happened(target, target.session.receive_eof())

    def _carry(self, sender: End, target: End) -> bool:
        data = b"".join(part for part, _ in sender.session.data_to_send())
        if data and not self.is_cut:
            self.inject(target, data)
        return bool(data)

    def _happened(self, side: End, events: list[Event]) -> list[Event]:
        side.events += events
        for event in events:
            opened = isinstance(event, Opened) and side.session.state is State.OPEN
            if opened and side is self.callee:
                side.session.accept(self.now)
        return events
