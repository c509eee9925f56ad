"""Every error that kvferry raises, in one tree.

::

    KVFerryError
    |-- UsageError              the caller passed something that can never work
    |   `-- ConfigError         a setting or an environment value is bad; names the key
    |-- BusyError               a bounded queue is full; nothing was started, retry later
    |-- ClosedError             you closed this engine, session or transfer
    |-- DeviceError             a GPU, its driver or its compiler refused or failed
    |-- PeerError               something about the other process
    |   |-- UnreachableError    could not connect before the deadline
    |   |-- PeerLostError       was connected; died, froze or was cut off
    |   |-- ProtocolError       it sent bytes that the protocol forbids
    |   |-- VersionError        it speaks another protocol version
    |   `-- AuthError           one side could not prove that it belongs to the cluster
    |-- RegionError             something about registered memory
    |   |-- RegistrationError   memory could not be allocated, registered, exported or mapped
    |   |-- StaleRegionError    the region, its token or its generation is no longer valid
    |   `-- BoundsError         spans lie outside the region, or the two sides differ in length
    |-- TransferError           one transfer ended without moving all of its bytes
    |   |-- DeadlineError       the deadline passed
    |   |-- StallError          nothing moved for too long, although the peer lives
    |   |-- AbortedError        it was cancelled
    |   |-- CorruptError        bytes arrived that are not those that were sent
    |   `-- NoPathError         no transport can serve this pair; carries the planner's reasons
    `-- HandoffError            a hand-off was refused or ended early
        `-- RefusedError        the offering side said no; ``code`` says why

Assertions in kvferry are for kvferry's own bugs. What a peer sends never trips one.
"""

from __future__ import annotations

from typing import Any


class KVFerryError(Exception):
    """Root of all errors of kvferry.

    ``str(error)`` is one sentence for people: what failed, where, how far it got, what to do.
    The same facts are attributes, for programs:

    peer: name of the other side as it is logged, or "".
    path: transport and direction, such as ``"shm/pull"``, or "".
    stage: what was going on (``"connect"``, ``"claim"``, ``"move"``, ``"confirm"`` ...), or "".
    bytes_done: bytes known to have arrived before the failure; 0 or more.
    fix: the likely remedy, a sentence, or "".
    retryable: whether the same call may succeed later without any change.
    attempts: why earlier paths of the same transfer failed, a sentence each, in order.
    story: a paragraph of the flight recorder about what failed, or "" for what has no trail.
    """

    retryable = False
    code = "error"
    attempts: tuple[str, ...] = ()
    story = ""

    def __init__(
        self,
        message: str,
        *,
        peer: str = "",
        path: str = "",
        stage: str = "",
        bytes_done: int = 0,
        fix: str = "",
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.peer = peer
        self.path = path
        self.stage = stage
        self.bytes_done = bytes_done
        self.fix = fix
        if retryable is not None:
            self.retryable = retryable

    def __str__(self) -> str:
        where = [
            f"{key} {value}"
            for key, value in (("peer", self.peer), ("path", self.path), ("stage", self.stage))
            if value
        ]
        if self.bytes_done:
            where.append(f"{self.bytes_done} bytes done")
        text = self.message
        if where:
            text += f" ({', '.join(where)})"
        if self.attempts:
            text += f"; before it: {', '.join(self.attempts)}"
        if self.fix:
            text += f"; {self.fix}"
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle by attributes: subclasses have keywords that ``args`` does not hold."""
        return _restored, (type(self), self.args, self.__dict__)

    def as_dict(self) -> dict[str, Any]:
        """The error as plain JSON types; what ``--json`` and HTTP bodies show."""
        return {
            "type": type(self).__name__,
            "code": self.code,
            "message": self.message,
            "peer": self.peer,
            "path": self.path,
            "stage": self.stage,
            "bytes_done": self.bytes_done,
            "fix": self.fix,
            "retryable": self.retryable,
            "attempts": list(self.attempts),
        }

    def located(
        self, *, peer: str = "", path: str = "", stage: str = "", bytes_done: int = 0
    ) -> KVFerryError:
        """Fill in the places that are still empty and return self. Set facts are kept."""
        self.peer = self.peer or peer
        self.path = self.path or path
        self.stage = self.stage or stage
        self.bytes_done = self.bytes_done or bytes_done
        return self


class UsageError(KVFerryError, ValueError):
    """The call can never work as written; nothing was started."""

    code = "usage"


class ConfigError(UsageError):
    """A setting is bad. The message names the key, the value and what is allowed."""

    code = "config"


class BusyError(KVFerryError):
    """A bounded queue is full. Nothing was started; wait for something to finish and retry."""

    code = "busy"
    retryable = True


class ClosedError(KVFerryError):
    """This side closed the object before or during the call."""

    code = "closed"


class DeviceError(KVFerryError):
    """A GPU, its driver or its compiler refused or failed.

    After a failed copy the device's context is mostly lost, and the process must be restarted.
    """

    code = "device"


class PeerError(KVFerryError):
    """Something about the other process."""

    code = "peer"


class UnreachableError(PeerError):
    """No connection before the deadline; nothing was sent."""

    code = "unreachable"
    retryable = True


class PeerLostError(PeerError):
    """The peer was connected and is gone: it died, froze past its heart-beat, or was cut off."""

    code = "peer_lost"
    retryable = True


class ProtocolError(PeerError):
    """The peer sent bytes that the protocol forbids. The session was closed."""

    code = "protocol"


class VersionError(PeerError):
    """The peer speaks another protocol version. Both versions are in the message."""

    code = "version"


class AuthError(PeerError):
    """Cluster key or certificate is missing or wrong on one side. Nothing else was exchanged."""

    code = "auth"


class RegionError(KVFerryError):
    """Something about registered memory."""

    code = "region"


class RegistrationError(RegionError):
    """Memory could not be allocated, registered, exported or mapped."""

    code = "registration"


class StaleRegionError(RegionError):
    """The region is gone, or its token or generation does not match. Ask for a new description."""

    code = "stale_region"


class BoundsError(RegionError, ValueError):
    """Spans lie outside their region, or the local and remote totals differ. Nothing was moved."""

    code = "bounds"


class TransferError(KVFerryError):
    """One transfer ended without moving all of its bytes.

    The destination's bytes are undefined; nothing writes to them any more, but with stage
    ``"stop"``: then the transport has not said that it stopped, see Transfer.is_quiet.
    """

    code = "transfer"


class DeadlineError(TransferError):
    """The deadline passed. The transfer has stopped; its destination bytes are undefined."""

    code = "deadline"


class StallError(TransferError):
    """No byte moved on a path for ``stall_s``, although the peer answers on its session.

    The path is demoted, and the rest of the deadline is given to the next one; this error is left
    when there is none.
    """

    code = "stall"
    retryable = True


class AbortedError(TransferError):
    """The transfer was cancelled and has stopped; its destination bytes are undefined."""

    code = "aborted"


class CorruptError(TransferError):
    """What arrived is not what was sent."""

    code = "corrupt"


class NoPathError(TransferError):
    """No transport serves this pair of regions.

    ``reasons`` maps each transport's name to the sentence that says why it was rejected.
    """

    code = "no_path"

    def __init__(self, message: str, *, reasons: dict[str, str], **where: Any) -> None:
        super().__init__(message, **where)
        self.reasons = reasons

    def as_dict(self) -> dict[str, Any]:
        return {**super().as_dict(), "reasons": self.reasons}


class HandoffError(KVFerryError):
    """A hand-off was refused or ended early. The destination blocks must not be used."""

    code = "handoff"


class RefusedError(HandoffError):
    """The hand-off was refused. ``code`` is one of the refusal codes of protocol.handoff, or
    ``"geometry"`` when the two KV pools do not fit and the claim was not even sent.
    """

    def __init__(self, message: str, *, code: str, **where: Any) -> None:
        super().__init__(message, **where)
        self.code = code


def from_code(code: str, message: str, **where: Any) -> KVFerryError:
    """Rebuild an error that travelled over the wire as (code, message)."""
    kind = _BY_CODE.get(code)
    if kind is None:
        return RefusedError(message, code=code[:64], **where)
    return kind(message, **where)


def _restored(
    kind: type[KVFerryError], args: tuple[Any, ...], facts: dict[str, Any]
) -> KVFerryError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(facts)
    return error


_BY_CODE: dict[str, type[KVFerryError]] = {
    kind.code: kind
    for kind in (
        UsageError,
        BusyError,
        ClosedError,
        DeviceError,
        PeerLostError,
        ProtocolError,
        VersionError,
        AuthError,
        RegistrationError,
        StaleRegionError,
        BoundsError,
        TransferError,
        DeadlineError,
        StallError,
        AbortedError,
        CorruptError,
    )
}
