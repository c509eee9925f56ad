"""The proof of the cluster key: only who has it gets in, and no old or borrowed proof does."""

from __future__ import annotations

import copy
import pickle
from itertools import count, pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import AuthError, BusyError, PeerLostError, ProtocolError, UnreachableError
from kvferry.protocol import framing, messages
from kvferry.protocol.auth import CalleeGreeting, CallerGreeting, Keys
from kvferry.protocol.messages import Challenge, Hello, Notify, Ping, Proof, Reject
from kvferry.protocol.session import Closed, Opened, State, Timing
from kvferry.testing.session import End, SessionPair, hello

ONE, TWO = b"the first key of all", b"the second key of all"
A, B = b"a" * 16, b"b" * 16


def keys(*which: bytes) -> Keys:
    return Keys(which or (ONE,))


def frame(message: messages.Message, descriptors: int = 0) -> bytes:
    return framing.encode(messages.pack(message), descriptors=descriptors)


def error_of(side: End) -> Exception:
    [closed] = side.closed
    assert side.session.state is State.CLOSED
    return closed.error


def is_open(pair: SessionPair) -> bool:
    return pair.caller.session.state is pair.callee.session.state is State.OPEN


class Halves:
    """The two halves of a greeting, and the messages between them, one at a time."""

    def __init__(self, ours: Hello | None = None, theirs: Hello | None = None) -> None:
        self.ours = ours or hello("caller", incarnation=A)
        self.theirs = theirs or hello("callee", incarnation=B)
        self.caller = CallerGreeting(self.ours, keys())
        self.callee = CalleeGreeting(self.theirs.incarnation, keys())

    def challenge(self) -> Challenge:
        return take(self.callee, self.caller.payload)

    def proof(self) -> Proof:
        return take(self.caller, messages.pack(self.challenge()))

    def answer(self) -> tuple[bytes, Proof]:
        """The callee's hello and its proof, after the caller's was good."""
        assert take(self.callee, messages.pack(self.proof())) is None
        payload = messages.pack(self.theirs)
        proof = self.callee.proof(payload)
        assert proof is not None
        return payload, proof


def take(half: CallerGreeting | CalleeGreeting, payload: bytes):  # type: ignore[no-untyped-def]
    return half.take(messages.unpack(payload), payload)


# -- sessions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece_bytes", [1, 13, 1 << 20])
def test_two_sides_with_the_key_open_a_session(piece_bytes: int) -> None:
    pair = SessionPair(keys=(keys(), keys()), piece_bytes=piece_bytes)
    pair.flow()
    assert is_open(pair)
    assert [type(event) for event in pair.caller.events] == [Opened]
    assert [type(event) for event in pair.callee.events] == [Opened]
    pair.send(pair.caller, Notify(b"hi"))
    pair.flow()
    assert pair.callee.received == [Notify(b"hi")]


def test_different_keys_are_refused_on_both_sides_and_say_what_to_set() -> None:
    pair = SessionPair(keys=(keys(ONE), keys(TWO)))
    pair.flow()
    for side in (pair.caller, pair.callee):
        error = error_of(side)
        assert isinstance(error, AuthError)
        assert "cluster keys of both sides differ" in str(error)
        assert "KVFERRY_CLUSTER_KEY" in str(error)
        assert not any(isinstance(event, Opened) for event in side.events)


@pytest.mark.parametrize(
    ("who", "text"),
    [
        ((None, keys()), "the caller has none"),
        ((keys(), None), "the engine that it called has none"),
    ],
    ids=["caller", "callee"],
)
def test_a_side_without_a_key_is_refused_on_both_sides(
    who: tuple[Keys | None, Keys | None], text: str
) -> None:
    pair = SessionPair(keys=who)
    pair.flow()
    for side in (pair.caller, pair.callee):
        error = error_of(side)
        assert isinstance(error, AuthError)
        assert text in str(error)
        assert "set the same cluster_key" in str(error)


def test_a_caller_with_a_key_believes_no_hello_without_a_proof() -> None:
    pair = SessionPair(keys=(keys(), None))
    pair.inject(pair.caller, frame(hello()))
    assert "gave no proof" in str(error_of(pair.caller))


def test_a_caller_without_a_key_says_so_when_asked_for_a_proof() -> None:
    pair = SessionPair()
    pair.inject(pair.caller, frame(Challenge(A, bytes(32))))
    assert "none is set here" in str(error_of(pair.caller))


def test_a_listener_shows_nothing_but_a_challenge_to_who_has_no_proof() -> None:
    pair = SessionPair(callee=hello("secret-name", addresses=["tcp://10.1.2.3:1"]),
                       keys=(None, keys()))  # fmt: skip
    pair.caller.session.data_to_send()
    pair.inject(pair.callee, frame(hello(nonce=bytes(32))))
    said = b"".join(data for data, _ in pair.callee.session.data_to_send())
    assert isinstance(messages.unpack(said[framing.HEADER.size :]), Challenge)
    pair.inject(pair.callee, frame(Proof(bytes(32))))
    said += b"".join(data for data, _ in pair.callee.session.data_to_send())
    assert b"secret-name" not in said
    assert b"10.1.2.3" not in said


@pytest.mark.parametrize("message", [Ping(0), Notify(b"x"), Challenge(A, bytes(32)), hello()],
                         ids=lambda m: type(m).__name__)  # fmt: skip
def test_nothing_is_taken_between_challenge_and_proof(message: messages.Message) -> None:
    pair = SessionPair(keys=(keys(), keys()))
    pair.inject(pair.callee, frame(hello(nonce=bytes(32))))
    pair.inject(pair.callee, frame(message))
    error = error_of(pair.callee)
    assert isinstance(error, ProtocolError)
    assert "expected a proof after it" in str(error)
    assert pair.callee.received == []


def test_what_is_sent_along_with_a_bad_proof_is_never_taken() -> None:
    pair = SessionPair(keys=(keys(), keys()))
    pair.inject(pair.callee, frame(hello(nonce=bytes(32))))
    pair.inject(pair.callee, frame(Proof(bytes(32))) + frame(Notify(b"x")))
    assert pair.callee.received == []
    assert isinstance(error_of(pair.callee), AuthError)


@pytest.mark.parametrize("message", [Challenge(A, bytes(32)), Proof(bytes(32))],
                         ids=lambda m: type(m).__name__)  # fmt: skip
def test_a_greeting_after_the_greeting_ends_the_session(message: messages.Message) -> None:
    pair = SessionPair(keys=(keys(), keys()))
    pair.flow()
    pair.inject(pair.callee, frame(message))
    assert "second" in str(error_of(pair.callee))


@pytest.mark.parametrize("after", [0, 1])
def test_a_peer_that_never_answers_has_a_deadline(after: int) -> None:
    pair = SessionPair(keys=(keys(), keys()), timing=Timing(hello_s=3.0))
    if after:
        # The caller's hello arrives and its proof never does.
        pair.inject(pair.callee, pair.caller.session.data_to_send()[0][0])
    pair.is_cut = True
    pair.advance(2.9)
    assert pair.callee.session.state is pair.caller.session.state is State.HELLO
    pair.advance(0.2)
    for side in (pair.callee, pair.caller):
        assert isinstance(error_of(side), UnreachableError)


def test_a_stranger_cannot_make_us_keep_much_before_the_proof() -> None:
    pair = SessionPair(keys=(keys(), keys()))
    pair.inject(pair.callee, frame(hello(nonce=bytes(32))))
    header = framing.HEADER.pack(b"KVFY", framing.VERSION, 0, 0, framing.HELLO_BYTES_MAX + 1)
    pair.inject(pair.callee, header)
    assert "the limit is" in str(error_of(pair.callee))


def test_a_proof_with_descriptors_is_refused() -> None:
    pair = SessionPair(keys=(keys(), keys()))
    pair.inject(pair.callee, frame(hello(nonce=bytes(32), purpose="staged"), 1))
    pair.inject(pair.callee, frame(Proof(bytes(32)), 1))
    assert "descriptors" in str(error_of(pair.callee))


def test_the_greeting_of_a_restarted_peer_is_refused_as_without_a_key() -> None:
    pair = SessionPair(hello(expected=A), hello(incarnation=B), keys=(keys(), keys()))
    pair.flow()
    for side in (pair.caller, pair.callee):
        assert isinstance(error_of(side), PeerLostError)
        assert "another engine answers" in str(error_of(side))


def test_a_refusal_after_the_proofs_arrives_as_what_it_was() -> None:
    pair = SessionPair(keys=(keys(), keys()))
    [(first, _)] = pair.caller.session.data_to_send()
    pair.inject(pair.callee, first)
    pair.callee.events += pair.callee.session.reject(BusyError("no room"))
    pair.flow()
    assert isinstance(error_of(pair.caller), BusyError)


def test_a_key_can_be_replaced_without_a_gap() -> None:
    """Old, then old and new accepted, then new used, then new only: neighbours always agree."""
    steps = [keys(ONE), keys(ONE, TWO), keys(TWO, ONE), keys(TWO)]
    for near, far in [*zip(steps, steps, strict=True), *pairwise(steps)]:
        for pair in (SessionPair(keys=(near, far)), SessionPair(keys=(far, near))):
            pair.flow()
            assert is_open(pair)
    # A callee answers by the key that the caller used, which may not be its own first.
    ahead = SessionPair(keys=(steps[0], steps[2]))
    ahead.flow()
    assert is_open(ahead)
    apart = SessionPair(keys=(steps[0], steps[3]))
    apart.flow()
    assert not is_open(apart)


# -- replay, reflection, splicing ----------------------------------------------------------------


def test_a_recorded_greeting_does_not_work_again() -> None:
    halves = Halves()
    recorded = [halves.caller.payload, messages.pack(halves.proof())]
    again = CalleeGreeting(B, keys())
    assert isinstance(take(again, recorded[0]), Challenge)
    with pytest.raises(AuthError, match="differ"):
        take(again, recorded[1])


def test_a_recorded_answer_does_not_work_again() -> None:
    halves = Halves()
    challenge = halves.challenge()
    proof = take(halves.caller, messages.pack(challenge))
    take(halves.callee, messages.pack(proof))
    answer = messages.pack(halves.theirs)
    old = halves.callee.proof(answer)
    fresh = CallerGreeting(halves.ours, keys())
    take(fresh, messages.pack(challenge))
    take(fresh, answer)
    with pytest.raises(AuthError, match="proof of the cluster key is wrong"):
        take(fresh, messages.pack(old))
    assert fresh.hello is None


def test_an_engine_does_not_answer_its_own_challenge() -> None:
    """Who has no key lets the engine itself make the proof, by calling it while it calls."""
    victim = CallerGreeting(hello("victim", incarnation=A), keys())
    listener = CalleeGreeting(A, keys())
    challenge = take(listener, victim.payload)
    with pytest.raises(AuthError, match="own challenge"):
        take(victim, messages.pack(challenge))


def test_the_proof_of_one_role_is_not_that_of_the_other() -> None:
    halves = Halves()
    proof = halves.proof()
    take(halves.caller, messages.pack(halves.theirs))
    with pytest.raises(AuthError):
        take(halves.caller, messages.pack(proof))
    transcript = [b"x", b"y"]
    assert keys().verify("callee", transcript, keys().prove("caller", transcript)) == -1


@pytest.mark.parametrize(
    "change",
    [{"purpose": "tcp"}, {"incarnation": b"c" * 16}, {"expected": B}, {"key": b"k" * 16},
     {"name": "other"}, {"nonce": b"n" * 32}, {"ring_bytes": 1}],
    ids=lambda c: next(iter(c)),
)  # fmt: skip
def test_no_part_of_the_callers_hello_can_be_changed_on_the_way(change: dict[str, object]) -> None:
    halves = Halves()
    changed = msgspec.structs.replace(messages.unpack(halves.caller.payload), **change)
    challenge = take(halves.callee, messages.pack(changed))
    proof = take(halves.caller, messages.pack(challenge))
    with pytest.raises(AuthError):
        take(halves.callee, messages.pack(proof))
    assert halves.callee.hello is None


@pytest.mark.parametrize("change", [{"nonce": b"n" * 32}, {"incarnation": b"c" * 16}], ids=str)
def test_no_part_of_the_challenge_can_be_changed_on_the_way(change: dict[str, bytes]) -> None:
    halves = Halves()
    changed = msgspec.structs.replace(halves.challenge(), **change)
    proof = take(halves.caller, messages.pack(changed))
    with pytest.raises(AuthError):
        take(halves.callee, messages.pack(proof))


@pytest.mark.parametrize(
    "change",
    [{"key": b"k" * 16}, {"addresses": ["tcp://6.6.6.6:6"]}, {"name": "x"}, {"incarnation": A}],
    ids=lambda c: next(iter(c)),
)
def test_no_part_of_the_callees_hello_can_be_changed_on_the_way(change: dict[str, object]) -> None:
    halves = Halves()
    payload, proof = halves.answer()
    changed = msgspec.structs.replace(messages.unpack(payload), **change)
    take(halves.caller, messages.pack(changed))
    with pytest.raises(AuthError):
        take(halves.caller, messages.pack(proof))
    assert halves.caller.hello is None


def test_a_callee_with_the_key_cannot_answer_as_somebody_else() -> None:
    halves = Halves(theirs=hello("callee", incarnation=B))
    halves.callee = CalleeGreeting(b"c" * 16, keys())
    payload, proof = halves.answer()
    take(halves.caller, payload)
    with pytest.raises(ProtocolError, match="sent the challenge"):
        take(halves.caller, messages.pack(proof))


def test_parts_of_a_transcript_cannot_be_moved_over_their_border() -> None:
    assert keys().prove("caller", [b"ab", b"c"]) != keys().prove("caller", [b"a", b"bc"])


def test_another_protocol_version_makes_another_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    before = keys().prove("caller", [b"x"])
    monkeypatch.setattr("kvferry.protocol.framing.VERSION", framing.VERSION + 1)
    assert keys().prove("caller", [b"x"]) != before


def test_every_greeting_has_fresh_nonces() -> None:
    seen = set()
    for _ in range(50):
        halves = Halves()
        seen.add(messages.unpack(halves.caller.payload).nonce)
        seen.add(halves.challenge().nonce)
    assert len(seen) == 100


# -- broken bytes --------------------------------------------------------------------------------


def conversation() -> tuple[list[bytes], list[bytes]]:
    """(what the caller says, what the callee says) in a good greeting."""
    numbers = count(1)
    fixed = Keys([ONE], random=lambda nbytes: next(numbers).to_bytes(nbytes, "little"))
    pair = SessionPair(hello("caller", incarnation=A, key=A), hello("callee", incarnation=B, key=B),
                       keys=(fixed, fixed))  # fmt: skip
    said: tuple[list[bytes], list[bytes]] = ([], [])
    for _ in range(3):
        for which, side, other in ((0, pair.caller, pair.callee), (1, pair.callee, pair.caller)):
            data = b"".join(part for part, _ in side.session.data_to_send())
            if data:
                said[which].append(data)
                pair.inject(other, data)
    assert is_open(pair)
    return said


@given(st.data())
def test_one_wrong_bit_anywhere_never_opens_a_session(data: st.DataObject) -> None:
    pair = SessionPair(hello("caller", incarnation=A), hello("callee", incarnation=B),
                       keys=(keys(), keys()))  # fmt: skip
    spoil_at = data.draw(st.integers(0, 3), label="message")
    place = data.draw(st.integers(0, 10_000), label="bit")
    for number in range(4):
        sender, target = (
            (pair.caller, pair.callee) if number % 2 == 0 else (pair.callee, pair.caller)
        )
        sent = bytearray(b"".join(part for part, _ in sender.session.data_to_send()))
        if number == spoil_at and sent:
            bit = place % (8 * len(sent))
            sent[bit // 8] ^= 1 << bit % 8
        pair.inject(target, bytes(sent))
    assert not is_open(pair)
    for side in (pair.caller, pair.callee):
        assert side.received == []
    opened = [side for side in (pair.caller, pair.callee)
              if any(isinstance(event, Opened) for event in side.events)]  # fmt: skip
    # The callee may have been sure of its caller before its own answer was spoiled.
    assert opened == ([pair.callee] if spoil_at == 3 else [])


@pytest.mark.parametrize("which", [0, 1])
def test_a_truncated_greeting_opens_nothing(which: int) -> None:
    said = conversation()
    whole = b"".join(said[which])
    for end in range(0, len(whole), 7):
        numbers = count(1 if which else 2)
        fixed = Keys([ONE], random=lambda nbytes: next(numbers).to_bytes(nbytes, "little"))  # noqa: B023
        pair = SessionPair(keys=(fixed, fixed))
        side = pair.callee if which == 0 else pair.caller
        pair.inject(side, whole[:end])
        assert side.session.state is State.HELLO
        pair.hang_up(side)
        assert isinstance(error_of(side), UnreachableError)


@given(st.lists(st.one_of(st.binary(max_size=40), st.sampled_from(
    [frame(hello(nonce=bytes(32))), frame(hello()), frame(Challenge(A, bytes(32))),
     frame(Proof(bytes(32))), frame(Reject("auth", "no")), frame(Ping(1)), frame(Notify(b"n"))])),
    max_size=6), st.booleans())  # fmt: skip
def test_nobody_gets_in_without_the_key(parts: list[bytes], caller: bool) -> None:
    pair = SessionPair(keys=(keys(), keys()))
    side = pair.caller if caller else pair.callee
    for part in parts:
        pair.inject(side, part)
    assert side.session.state is not State.OPEN
    assert all(isinstance(event, Closed) for event in side.events)


@pytest.mark.parametrize("nbytes", [0, 31, 33])
def test_a_proof_or_nonce_of_another_length_is_malformed(nbytes: int) -> None:
    for message in (Proof(bytes(nbytes)), Challenge(A, bytes(nbytes))):
        with pytest.raises(ProtocolError, match="malformed"):
            messages.unpack(messages.pack(message))


# -- the secret stays one ------------------------------------------------------------------------


def test_a_key_is_never_shown_copied_or_pickled() -> None:
    secret = keys(ONE, TWO)
    for text in (repr(secret), str(secret), f"{secret}"):
        assert text == "<Keys: 2>"
    for take_out in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="not copied"):
            take_out(secret)


def test_no_error_of_a_greeting_holds_the_key() -> None:
    for pair in (SessionPair(keys=(keys(ONE), keys(TWO))), SessionPair(keys=(keys(ONE), None))):
        pair.flow()
        for side in (pair.caller, pair.callee):
            error = error_of(side)
            assert b"key of all" not in repr((str(error), error.__dict__)).encode()
