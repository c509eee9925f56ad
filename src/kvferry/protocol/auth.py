"""Who may talk to whom: the hello, and the proof that both sides hold the cluster key. Sans-IO.

Without a key a hello is answered by a hello. With one, four messages are in between::

    caller                                    callee
    Hello with a nonce          ------------>
                                <------------ Challenge: incarnation and nonce
    Proof, by the key, over both ----------->
                                <------------ Hello, then Proof over all three

A proof is HMAC-SHA256 over the role of who proves, the protocol version and the very bytes of the
messages so far. They hold both nonces, both incarnations, the purpose of the connection and, for a
lane, the key of its session. So a proof is good for one connection, one role and one purpose only:
it can be neither replayed, nor reflected, nor moved to another session. The caller proves first: a
listener shows nothing of itself, but that it wants a proof, to who has no key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvferry.errors import AuthError, PeerLostError, ProtocolError, from_code
from kvferry.protocol import framing, messages
from kvferry.protocol.messages import NONCE_BYTES, Challenge, Hello, Message, Proof, Reject

SET_THE_KEY = (
    "set the same cluster_key (KVFERRY_CLUSTER_KEY or KVFERRY_CLUSTER_KEY_FILE) on both sides"
)


class Keys:
    """The cluster's secret, never shown: the first key is used, every other one is accepted too.

    keys: one or more byte strings. random: makes nonces of the length that it is given.
    """

    __slots__ = ("_keys", "_random")

    def __init__(
        self, keys: Sequence[bytes], *, random: Callable[[int], bytes] = os.urandom
    ) -> None:
        self._keys = tuple(keys)
        self._random = random

    def __repr__(self) -> str:
        return f"<Keys: {len(self._keys)}>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("cluster keys are not copied or pickled")

    def nonce(self) -> bytes:
        return self._random(NONCE_BYTES)

    def prove(self, role: str, transcript: Sequence[bytes], which: int = 0) -> bytes:
        """The proof of a role, by one of the keys."""
        mac = hmac.new(self._keys[which], digestmod=hashlib.sha256)
        for part in (b"kvferry", bytes([framing.VERSION]), role.encode(), *transcript):
            # With its length before it, no part can pass for the end of the one before.
            mac.update(len(part).to_bytes(8, "little"))
            mac.update(part)
        return mac.digest()

    def verify(self, role: str, transcript: Sequence[bytes], proof: bytes) -> int:
        """Which key the proof was made with, or -1. Takes the same time for any proof."""
        found = -1
        for which in range(len(self._keys)):
            if hmac.compare_digest(self.prove(role, transcript, which), proof):
                found = which
        return found


class CallerGreeting:
    """The caller's half. ``payload`` is to be sent first; ``hello`` is the callee's, at the end."""

    def __init__(self, hello: Hello, keys: Keys | None) -> None:
        if keys is not None:
            hello = msgspec.structs.replace(hello, nonce=keys.nonce())
        self.payload = messages.pack(hello)
        self.hello: Hello | None = None
        self._ours = hello
        self._keys = keys
        self._challenge: tuple[Challenge, bytes] | None = None
        self._answer: tuple[Hello, bytes] | None = None

    def take(self, message: Any, payload: bytes) -> Message | None:
        """The next message of the callee, as it was unpacked and as it came; returns an answer.

        Raises AuthError, what the callee refused with, PeerLostError, ProtocolError.
        """
        if isinstance(message, Reject):
            raise from_code(message.code, message.message, stage="connect")
        if self._keys is None:
            if isinstance(message, Challenge):
                raise _auth_error("the peer wants a proof of the cluster key; none is set here")
            self._accept(_expect(Hello, message))
            return None
        if self._challenge is None:
            if isinstance(message, Hello):
                raise _auth_error("the peer gave no proof of the cluster key: it has none")
            challenge = _expect(Challenge, message)
            if challenge.incarnation == self._ours.incarnation:
                raise _auth_error("the peer sent this engine's own challenge back")
            self._challenge = challenge, payload
            return Proof(self._keys.prove("caller", (self.payload, payload)))
        if self._answer is None:
            self._answer = _expect(Hello, message), payload
            return None
        proof = _expect(Proof, message)
        hello, answer = self._answer
        transcript = (self.payload, self._challenge[1], answer)
        if self._keys.verify("callee", transcript, proof.mac) < 0:
            raise _auth_error("the peer's proof of the cluster key is wrong")
        if hello.incarnation != self._challenge[0].incarnation:
            raise ProtocolError("the hello is not from the engine that sent the challenge")
        self._accept(hello)
        return None

    def _accept(self, hello: Hello) -> None:
        _check_expected(self._ours.expected, hello.incarnation)
        self.hello = hello


class CalleeGreeting:
    """The callee's half. ``hello`` is the caller's, once it may be believed."""

    def __init__(self, incarnation: bytes, keys: Keys | None) -> None:
        self.hello: Hello | None = None
        self._incarnation = incarnation
        self._keys = keys
        self._theirs: tuple[Hello, bytes] | None = None
        self._challenge = b""
        self._which = 0

    def take(self, message: Any, payload: bytes) -> Message | None:
        """The next message of the caller; returns an answer. Raises as the caller's half does."""
        if self._theirs is None:
            return self._take_hello(_expect(Hello, message), payload)
        assert self._keys is not None
        hello, greeting = self._theirs
        proof = _expect(Proof, message)
        self._which = self._keys.verify("caller", (greeting, self._challenge), proof.mac)
        if self._which < 0:
            raise _auth_error("the cluster keys of both sides differ")
        self._accept(hello)
        return None

    def _take_hello(self, hello: Hello, payload: bytes) -> Message | None:
        if self._keys is None:
            if hello.nonce:
                raise _auth_error(
                    "the caller has a cluster key; the engine that it called has none"
                )
            self._accept(hello)
            return None
        if not hello.nonce:
            raise _auth_error("a cluster key is set where the call arrived; the caller has none")
        self._theirs = hello, payload
        challenge = Challenge(self._incarnation, self._keys.nonce())
        self._challenge = messages.pack(challenge)
        return challenge

    def proof(self, answer: bytes) -> Proof | None:
        """What follows our own hello, which is packed in ``answer``; None without a key."""
        if self._keys is None or self._theirs is None:
            return None
        transcript = (self._theirs[1], self._challenge, answer)
        # By the caller's key: while keys are being replaced, it may not know our first one yet.
        return Proof(self._keys.prove("callee", transcript, self._which))

    def _accept(self, hello: Hello) -> None:
        _check_expected(hello.expected, self._incarnation)
        self.hello = hello


def _expect(kind: type[Any], message: Any) -> Any:
    if not isinstance(message, kind):
        wanted = "hello" if kind is Hello else f"{kind.__name__.lower()} after it"
        raise ProtocolError(f"expected a {wanted}, got {type(message).__name__}")
    return message


def _check_expected(wanted: bytes, actual: bytes) -> None:
    if wanted and wanted != actual:
        raise PeerLostError(
            "another engine answers at this address now: the one that was meant is gone",
            stage="connect",
            fix="it was restarted; what it offered is lost and must be computed again",
        )


def _auth_error(what: str) -> AuthError:
    return AuthError(what, stage="connect", fix=SET_THE_KEY)
