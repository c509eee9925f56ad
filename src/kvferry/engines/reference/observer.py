"""What the scheduler reports as it happens, for metrics. Every call here does nothing."""

from __future__ import annotations


class Observer:
    """Override what is of interest. Calls come from the engine's thread and must not raise."""

    def started(self, tokens: int) -> None:
        """A sequence with a prompt of so many tokens was admitted to the queue."""

    def first_token(self, seconds: float) -> None:
        """A sequence has its first token, so long after it arrived."""

    def token(self) -> None:
        """A sequence has another output token, the first one included."""

    def answered(self, outcome: str) -> None:
        """A sequence got its answer: ``stop``, ``length``, ``aborted`` or an error's code."""

    def claim_ended(self, outcome: str, seconds: float, nbytes: int) -> None:
        """A claim ended: ``loaded`` or an error's code."""

    def offer_ended(self, outcome: str) -> None:
        """An offer ended with the connector's word for it."""

    def recomputed(self) -> None:
        """A prompt is computed here because its KV could not be loaded."""
