"""Sessions on any wire: bytes held back, cut anywhere, one way or both; time; restarts; keys.

The model is what a byte stream promises: what arrives is a beginning of what was sent, in order.
From it follow the rules of a session, which are checked at every step.
"""

from __future__ import annotations

from typing import Any

import pytest
from fuzzing import stepping
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from hypothesis.stateful import run_state_machine_as_test as run_machine

from kvferry.errors import AuthError, KVFerryError, PeerLostError, UnreachableError
from kvferry.protocol import framing, messages
from kvferry.protocol.messages import Notify
from kvferry.protocol.session import Opened, State, Timing
from kvferry.testing.session import End, SessionPair

TIMING = Timing(heartbeat_s=1.0, lost_s=5.0, hello_s=4.0)
SIDES = st.sampled_from(["caller", "callee"])
PAUSES = st.sampled_from([0.01, 0.5, 1.0, 4.0, 5.0])
ORDER = {State.HELLO: 0, State.OPEN: 1, State.CLOSED: 2}


class Sessions(RuleBasedStateMachine):
    """A caller and a callee; ``wires`` holds the bytes on their way to each."""

    @initialize()
    def begin(self) -> None:
        self.pair = SessionPair(timing=TIMING)
        self.wires: dict[str, bytearray] = {"caller": bytearray(), "callee": bytearray()}
        self.sealed: set[str] = set()
        self.sent: dict[str, list[Any]] = {"caller": [], "callee": []}
        self.noise: set[str] = set()
        self.was = {"caller": State.HELLO, "callee": State.HELLO}
        self.count = 0

    def side(self, name: str) -> End:
        return self.pair.caller if name == "caller" else self.pair.callee

    def collect(self) -> None:
        """Bytes leave both sides; a wire that is cut swallows them."""
        for sender, target in (("caller", "callee"), ("callee", "caller")):
            for data, _ in self.side(sender).session.data_to_send():
                if target not in self.sealed:
                    self.wires[target] += data

    @rule(to=SIDES, nbytes=st.integers(1, 40) | st.just(1 << 20))
    def deliver(self, to: str, nbytes: int) -> None:
        self.collect()
        data = bytes(self.wires[to][:nbytes])
        del self.wires[to][:nbytes]
        if data:
            self.pair.inject(self.side(to), data)

    @rule()
    def greet(self) -> None:
        """All that is under way arrives."""
        for _ in range(4):
            for to in ("callee", "caller"):
                self.deliver(to, 1 << 20)

    @rule(name=SIDES)
    def speak(self, name: str) -> None:
        other = "callee" if name == "caller" else "caller"
        self.count += 1
        message = Notify(self.count.to_bytes(4, "big"))
        if self.side(name).session.state is not State.OPEN:
            with pytest.raises(PeerLostError):
                self.pair.send(self.side(name), message)
            return
        self.pair.send(self.side(name), message)
        self.sent[other].append(message)

    @rule(to=SIDES, chance=st.integers(0, 5))
    def cut(self, to: str, chance: int) -> None:
        """One direction swallows everything from now on: half open."""
        if chance == 0:
            self.collect()
            self.sealed.add(to)

    @rule(to=SIDES, chance=st.integers(0, 5))
    def hang_up(self, to: str, chance: int) -> None:
        """One side sees the end of the stream: the other process ended."""
        if chance == 0:
            self.sealed.add(to)
            self.pair.hang_up(self.side(to))

    @rule(to=SIDES, chance=st.integers(0, 5), data=st.binary(min_size=1, max_size=20))
    def forge(self, to: str, chance: int, data: bytes) -> None:
        """Bytes that nobody sent, in the middle of the stream."""
        if chance == 0:
            self.noise.add(to)
            self.collect()
            self.wires[to] += data

    @rule(to=SIDES, chance=st.integers(0, 3))
    def duplicate(self, to: str, chance: int) -> None:
        """A message that could be the peer's own, twice."""
        if chance == 0 and self.sent[to]:
            self.collect()
            message = self.sent[to][-1]
            self.noise.add(to)
            self.wires[to] += framing.encode(messages.pack(message))

    @rule(
        seconds=st.sampled_from([0.01, 0.5, 1.0, 4.0, 5.0]), tick=st.sampled_from(["both", "one"])
    )
    def pass_time(self, seconds: float, tick: str) -> None:
        """One side may be frozen meanwhile."""
        self.pair.now += seconds
        for name in ("caller", "callee") if tick == "both" else ("caller",):
            side = self.side(name)
            due = side.session.due()
            was = side.session.state
            events = side.session.tick(self.pair.now)
            side.events += events
            if was is not State.CLOSED and self.pair.now < due:
                assert not events, "it ended before it was due"
            if side.session.state is not State.CLOSED:
                assert side.session.due() > self.pair.now, "it would be called again at once"

    @precondition(lambda self: hasattr(self, "pair"))
    @invariant()
    def the_rules_hold(self) -> None:
        for name in ("caller", "callee"):
            side = self.side(name)
            now = side.session.state
            assert ORDER[now] >= ORDER[self.was[name]], "a session never goes back"
            self.was[name] = now
            assert len(side.closed) == (now is State.CLOSED), "one end, and no more"
            assert not side.closed or side.events[-1] is side.closed[0], "and nothing after it"
            opened = [event for event in side.events if isinstance(event, Opened)]
            assert len(opened) <= 1
            assert not side.received or opened, "something was taken from a stranger"
            if name not in self.noise:
                begun = self.sent[name][: len(side.received)]
                assert side.received == begun, "not a beginning of what was sent"
            for closed in side.closed:
                self.blame(name, closed.error)

    def blame(self, name: str, error: KVFerryError) -> None:
        """Without forged bytes only the wire, or time, can end a session."""
        if not self.noise:
            assert isinstance(error, (PeerLostError, UnreachableError)), repr(error)
        assert not isinstance(error, AuthError), "no key is set"
        assert error.message

    def teardown(self) -> None:
        """Behind a cut wire both sides end by time alone, within what the settings say."""
        if not hasattr(self, "pair"):
            return
        self.sealed = {"caller", "callee"}
        for _ in range(20):
            self.pass_time(0.5, "both")
        for name in ("caller", "callee"):
            assert self.side(name).session.state is State.CLOSED
        self.the_rules_hold()


@pytest.mark.slow
def test_any_wire() -> None:
    run_machine(Sessions, settings=stepping(60))
