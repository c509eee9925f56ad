"""The seam between the scheduler and whatever moves KV between processes.

The scheduler knows blocks and sequences; a connector knows peers and transfers. One rule joins
them: **from the call of ``offer`` or ``claim`` until ``on_end``, the blocks belong to the
connector.** The scheduler neither writes to them nor gives them to anybody else, not even when the
request is aborted or its deadline is over. Then it only asks the connector to stop early, and waits
for ``on_end``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kvferry.engines.reference.sequence import Sequence, TokenLogprobs
from kvferry.errors import HandoffError, KVFerryError, UsageError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClaimResult:
    """How a claim ended: loaded if ``error`` is None, and then ``first_token`` is given.

    first_token: the token that prefill sampled, the sequence's first output token.
    first_logprobs: its log-probabilities, if prefill was asked for them.
    nbytes: bytes of KV that were moved; 0 or more, also on failure.
    seconds: from the claim to its end.
    path: transport and direction, such as ``"shm/pull"``, or "".
    """

    first_token: int | None = None
    first_logprobs: TokenLogprobs | None = None
    error: KVFerryError | None = None
    nbytes: int = 0
    seconds: float = 0.0
    path: str = ""


class ClaimHandle(Protocol):
    """A claim under way."""

    def cancel(self) -> None:
        """Ask the claim to stop early. Does not block; ``on_end`` still comes, once.

        It may come with a success that was already on its way. Does nothing after the end.
        """
        ...


class KVConnector(Protocol):
    """Moves KV. The engine's thread calls it; none of the calls may block.

    A connector may also have ``statistics() -> dict``, which ``/debug/state`` then shows,
    ``why(text) -> dict`` for ``/debug/why``, and ``dump() -> Path`` for SIGUSR1.
    """

    def offer(
        self, sequence: Sequence, first_token: int, on_end: Callable[[str], None]
    ) -> dict[str, Any]:
        """Prefill's side: the prompt's KV is complete in ``sequence.prompt_blocks``; offer it.

        ``sequence.first_logprobs`` should travel along if it is set.

        Returns: JSON-able ``kv_transfer_params`` for the response; they reach decode unchanged.
        on_end: called exactly once, from any thread, also during this call, with the outcome in a
            word (``"delivered"``, ``"expired"`` ...); from then on the blocks may be reused.
        Raises: any KVFerryError; then nothing was offered and ``on_end`` never comes. UsageError
            means that the request can never work here.
        """
        ...

    def withdraw(self, sequence: Sequence) -> None:
        """Ask an offer to end early, because nobody will claim it. ``on_end`` still comes, once.

        Does nothing for a sequence whose offer has ended.
        """
        ...

    def claim(
        self,
        sequence: Sequence,
        params: dict[str, Any],
        on_end: Callable[[ClaimResult], None],
    ) -> ClaimHandle:
        """Decode's side: load the prompt's KV into ``sequence.prompt_blocks``.

        params: the request's ``kv_transfer_params``, as the client sent them: not to be trusted.
        on_end: called exactly once, from any thread, also during this call; from then on nothing
            writes to the blocks any more.
        Raises: any KVFerryError; then nothing was started and ``on_end`` never comes. UsageError
            means that ``params`` can never work here; other errors count as a failed load.
        """
        ...

    def decline(self, params: dict[str, Any]) -> None:
        """Decode's side: nobody will claim what these ``kv_transfer_params`` offer; tell prefill.

        Does not block. Raises what ``claim`` raises; the offer then ends by its own time.
        """
        ...

    def close(self) -> None:
        """End every offer and claim, telling each ``on_end``, and give everything back."""
        ...


class NullConnector:
    """For an engine that runs alone: refuses to offer and to claim."""

    def offer(
        self, sequence: Sequence, first_token: int, on_end: Callable[[str], None]
    ) -> dict[str, Any]:
        raise _no_connector("do_remote_decode")

    def withdraw(self, sequence: Sequence) -> None:
        return None

    def claim(
        self,
        sequence: Sequence,
        params: dict[str, Any],
        on_end: Callable[[ClaimResult], None],
    ) -> ClaimHandle:
        raise _no_connector("do_remote_prefill")

    def decline(self, params: dict[str, Any]) -> None:
        return None

    def close(self) -> None:
        return None


def _no_connector(key: str) -> UsageError:
    return UsageError(
        f"kv_transfer_params asks for {key}, but this engine runs alone and cannot move KV",
        fix="start the engine with a connector, or send the request without kv_transfer_params",
    )


def as_handoff_error(error: Exception, stage: str) -> KVFerryError:
    """What a connector raised, as an error of kvferry; a stranger is logged and wrapped."""
    if isinstance(error, KVFerryError):
        return error
    log.error("the connector's %s raised", stage, exc_info=error)
    wrapped = HandoffError(f"the connector failed: {type(error).__name__}: {error}", stage=stage)
    wrapped.__cause__ = error
    return wrapped
