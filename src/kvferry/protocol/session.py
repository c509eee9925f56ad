"""One connection between two engines: hello, heart-beats, closing. Sans-IO.

Bytes go in by :meth:`Session.receive`, time by :meth:`Session.tick`; what happened comes out as
events, and what must be sent by :meth:`Session.data_to_send`. Nothing here blocks or fails for
reasons of the network; a bad peer closes the session with an error that says what it did.

States: ``HELLO`` (hellos and proofs are exchanged) -> ``OPEN`` -> ``CLOSED``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from kvferry.errors import (
    KVFerryError,
    PeerLostError,
    ProtocolError,
    UnreachableError,
)
from kvferry.protocol import framing, messages
from kvferry.protocol.auth import CalleeGreeting, CallerGreeting, Keys
from kvferry.protocol.messages import (
    Challenge,
    Hello,
    Message,
    Ping,
    Pong,
    Proof,
    Reject,
)


class State(Enum):
    HELLO = "hello"
    OPEN = "open"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Opened:
    """The peer's hello was accepted, and its proof where a cluster key is set."""

    hello: Hello


class Received(NamedTuple):
    """A message for the layer above, and how many descriptors came with it."""

    message: Any
    descriptors: int


@dataclass(frozen=True, slots=True)
class Closed:
    """The session is over. Always the last event, and there is exactly one."""

    error: KVFerryError


Event = Opened | Received | Closed


@dataclass(frozen=True, slots=True)
class Timing:
    """How patient a session is. All in seconds.

    heartbeat_s: silence after which we say something.
    lost_s: silence after which the peer counts as lost; several heart-beats.
    hello_s: how long the hello may take, proofs included.
    """

    heartbeat_s: float = 1.0
    lost_s: float = 5.0
    hello_s: float = 5.0


class Session:
    """The state of one connection.

    hello: what we say. ``caller`` is the side that connected; it speaks first, so that a listener
    tells a stranger nothing. With ``keys`` both sides must prove that they hold the cluster key.
    """

    def __init__(
        self,
        hello: Hello,
        *,
        caller: bool,
        timing: Timing,
        now: float,
        keys: Keys | None = None,
    ) -> None:
        self.state = State.HELLO
        self.peer_name = ""
        self._hello = hello
        self._caller = caller
        self._timing = timing
        self._decoder = framing.FrameDecoder(framing.HELLO_BYTES_MAX)
        self._out: list[tuple[bytes, tuple[int, ...]]] = []
        self._heard_at = now
        self._spoke_at = now
        self._began_at = now
        self._calling = CallerGreeting(hello, keys) if caller else None
        self._answering = None if caller else CalleeGreeting(hello.incarnation, keys)
        if self._calling is not None:
            self._queue_payload(self._calling.payload)

    # -- what happened ----------------------------------------------------------------------

    def receive(self, data: bytes, now: float) -> list[Event]:
        """Bytes arrived. Returns what they mean; never raises for what a peer sent."""
        if self.state is State.CLOSED:
            return []
        self._heard_at = now
        events: list[Event] = []
        try:
            for frame in self._decoder.feed(data):
                message = messages.unpack(frame.payload)
                if self.state is State.HELLO:
                    self._greet(message, frame, events)
                else:
                    self._take(message, frame.descriptors, events, now)
        except KVFerryError as error:
            if self.state is State.HELLO and not self._caller:
                self._queue(Reject(error.code, messages.explain(error)))
            events.append(self._close(error))
        return events

    def receive_eof(self, why: str = "the connection was closed") -> list[Event]:
        """The stream ended or broke."""
        if self.state is State.CLOSED:
            return []
        if self.state is State.HELLO:
            error: KVFerryError = UnreachableError(
                f"{why} before the hello was complete",
                fix="check that a kvferry engine listens there and its log says why it refused",
            )
        else:
            error = PeerLostError(
                why, fix="the peer's process ended or cut the connection; see its log"
            )
        return [self._close(error)]

    def silence_s(self, now: float) -> float:
        """How long nothing has come from the peer."""
        return now - self._heard_at

    def suspended(self, now: float) -> list[Event]:
        """The system says that the peer's process does not run: no word will come from it."""
        if self.state is State.CLOSED:
            return []
        what = "said no hello" if self.state is State.HELLO else "said nothing"
        kind = UnreachableError if self.state is State.HELLO else PeerLostError
        error = kind(
            f"the peer's process is stopped, as by SIGSTOP, and {what} "
            f"for {self.silence_s(now):.1f} s",
            fix="have it go on (kill -CONT), then connect again",
        )
        return [self._close(error)]

    def tick(self, now: float) -> list[Event]:
        """Time passed: send a heart-beat if due, notice silence."""
        if self.state is State.CLOSED:
            return []
        if self.state is State.HELLO:
            if now >= self._began_at + self._timing.hello_s:
                return [
                    self._close(
                        UnreachableError(
                            f"no hello within {self._timing.hello_s:g} s",
                            fix="the peer's process may be stopped, or the port is not kvferry's",
                        )
                    )
                ]
            return []
        # Compared as in due(), so that a tick at the very time due() names is never too early.
        if now >= self._heard_at + self._timing.lost_s:
            silence = now - self._heard_at
            return [
                self._close(
                    PeerLostError(
                        f"nothing heard for {silence:.1f} s (limit {self._timing.lost_s:g} s)",
                        fix="the peer is frozen, overloaded or cut off",
                    )
                )
            ]
        if now >= self._spoke_at + self._timing.heartbeat_s:
            self._queue(Ping(0))
            self._spoke_at = now
        return []

    def due(self) -> float:
        """When :meth:`tick` has something to do, at the latest."""
        if self.state is State.HELLO:
            return self._began_at + self._timing.hello_s
        return min(self._heard_at + self._timing.lost_s, self._spoke_at + self._timing.heartbeat_s)

    @property
    def heard_at(self) -> float:
        """When the peer was last heard, by the clock of the caller."""
        return self._heard_at

    # -- what to send -----------------------------------------------------------------------

    def send(self, message: Message, now: float, fds: tuple[int, ...] = ()) -> None:
        """Queue a message; ``fds`` travel with its first byte. Raises if it is over the limit."""
        if self.state is not State.OPEN:
            raise PeerLostError("the session is closed")
        self._queue(message, fds)
        self._spoke_at = now

    def accept(self, now: float, hello: Hello | None = None) -> None:
        """Answer an accepted hello (callee only) with our own, or the one given instead."""
        assert self._answering is not None
        payload = messages.pack(hello or self._hello)
        self._queue_payload(payload)
        proof = self._answering.proof(payload)
        if proof is not None:
            self._queue(proof)
        self._spoke_at = now

    def reject(self, error: KVFerryError) -> list[Event]:
        """Refuse the peer, saying why. Nothing happens to a session that is over."""
        if self.state is State.CLOSED:
            return []
        self._queue(Reject(error.code, messages.explain(error)))
        return [self._close(error)]

    def data_to_send(self) -> list[tuple[bytes, tuple[int, ...]]]:
        """Byte strings to send in order, each with the descriptors that go with its first byte."""
        out, self._out = self._out, []
        return out

    # -- inside -----------------------------------------------------------------------------

    def _take(self, message: Any, descriptors: int, events: list[Event], now: float) -> None:
        if isinstance(message, Ping):
            _no_descriptors(message, descriptors)
            self._queue(Pong(message.request_id))
            self._spoke_at = now
        elif isinstance(message, (Hello, Challenge, Proof)):
            raise ProtocolError(f"a second {type(message).__name__.lower()} on an open session")
        elif isinstance(message, Pong) and message.request_id == 0:
            _no_descriptors(message, descriptors)
        else:
            events.append(Received(message, descriptors))

    def _greet(self, message: Any, frame: framing.Frame, events: list[Event]) -> None:
        """One message of the greeting; opens the session after the last."""
        greeting = self._calling or self._answering
        assert greeting is not None
        # Only who opens a lane may pass descriptors, and only with its hello.
        is_lane = isinstance(message, Hello) and message.purpose != "control"
        if self._caller or not is_lane:
            _no_descriptors(message, frame.descriptors)
        answer = greeting.take(message, frame.payload)
        if answer is not None:
            self._queue(answer)
        if greeting.hello is not None:
            self.state = State.OPEN
            self.peer_name = greeting.hello.name
            self._decoder.limit = framing.CONTROL_BYTES_MAX
            events.append(Opened(greeting.hello))

    def _queue(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        self._queue_payload(messages.pack(message), fds)

    def _queue_payload(self, payload: bytes, fds: tuple[int, ...] = ()) -> None:
        self._out.append((framing.encode(payload, descriptors=len(fds)), fds))

    def _close(self, error: KVFerryError) -> Closed:
        stage = "hello" if self.state is State.HELLO else ""
        self.state = State.CLOSED
        return Closed(error.located(peer=self.peer_name, stage=stage))


def _no_descriptors(message: Message, descriptors: int) -> None:
    """Refuse descriptors with a message that the layer above never sees.

    It would count them to the next message that does have some, and map the wrong memory.
    """
    if descriptors:
        kind = type(message).__name__.lower()
        raise ProtocolError(f"{descriptors} descriptors came with a {kind}")
