"""The bounds of the scheduler: how many, how much, how long."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.engines.reference.sequence import Sequence, State
from kvferry.errors import ConfigError, DeadlineError, UsageError

ROLES = ("both", "prefill", "decode")
ON_LOAD_FAILURE = ("recompute", "fail")

LIMITS = {
    State.WAITING: "queue_s",
    State.LOADING: "load_s",
    State.RUNNING: "total_s",
    State.OFFERED: "offer_s",
    State.STOPPING: "stop_s",
}
"""Which setting bounds the time in each state. FINISHED alone needs none."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """How the scheduler behaves.

    vocab_size: token ids are 0 to ``vocab_size - 1``.
    context_tokens: prompt and output of one sequence together at most.
    eos_ids: tokens that end a sequence.
    blocks, block_tokens: size of the KV pool, and of one block.
    chunk_tokens: the grid on which prompts are computed; the model says.
    step_tokens: tokens computed in one step at most.
    running_max: sequences that hold blocks for work of their own at once.
    waiting_max: sequences in the queue at most; one more is a BusyError.
    role: ``"prefill"`` does not load KV, ``"decode"`` does not offer it, ``"both"`` does either.
    on_load_failure: what becomes of a request whose KV could not be loaded: ``"recompute"`` makes
        it an ordinary one, ``"fail"`` ends it with the error.
    queue_s: limit for the time in the queue.
    load_s: limit for loading KV; then the claim is cancelled.
    total_s: limit from arrival to the last token.
    offer_s: limit for an offer; then it is withdrawn. Longer than the connector's own.
    stop_s: limit for a connector to let go of blocks. They stay unused until it does.
    """

    vocab_size: int
    context_tokens: int
    eos_ids: frozenset[int]
    blocks: int
    chunk_tokens: int
    block_tokens: int = 16
    step_tokens: int = 512
    running_max: int = 32
    waiting_max: int = 256
    role: str = "both"
    on_load_failure: str = "recompute"
    queue_s: float = 60.0
    load_s: float = 30.0
    total_s: float = 600.0
    offer_s: float = 120.0
    stop_s: float = 10.0

    def __post_init__(self) -> None:
        for key in (
            *("vocab_size", "context_tokens", "blocks", "chunk_tokens", "block_tokens"),
            *("step_tokens", "running_max", "waiting_max", *LIMITS.values()),
        ):
            if getattr(self, key) <= 0:
                raise ConfigError(f"{key}={getattr(self, key)!r}: must be greater than 0")
        if self.role not in ROLES:
            raise ConfigError(f"role={self.role!r}: must be one of {', '.join(ROLES)}")
        if self.on_load_failure not in ON_LOAD_FAILURE:
            raise ConfigError(
                f"on_load_failure={self.on_load_failure!r}: must be one of "
                f"{', '.join(ON_LOAD_FAILURE)}"
            )
        if self.step_tokens < self.running_max + self.chunk_tokens:
            raise ConfigError(
                f"step_tokens={self.step_tokens}: a step with running_max={self.running_max} "
                f"sequences would have no room for a chunk of {self.chunk_tokens} prompt tokens",
                fix=f"set step_tokens to at least {self.running_max + self.chunk_tokens}",
            )

    def check(self, sequence: Sequence) -> None:
        """Raise UsageError for a sequence that can never run here. Changes nothing."""
        prompt = sequence.prompt
        if not len(prompt):
            raise UsageError("the prompt is empty: it needs at least one token")
        if prompt.min() < 0 or prompt.max() >= self.vocab_size:
            raise UsageError(f"the prompt has token ids outside 0 to {self.vocab_size - 1}")
        if sequence.max_tokens < 1:
            raise UsageError(f"max_tokens={sequence.max_tokens}: must be at least 1")
        total = len(prompt) + sequence.max_tokens
        if total > self.sequence_tokens_max:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens and max_tokens is {sequence.max_tokens}: "
                f"together {total}, and at most {self.sequence_tokens_max} fit "
                f"(context {self.context_tokens} tokens, KV cache {self.blocks} blocks of "
                f"{self.block_tokens})",
                fix="shorten the prompt or lower max_tokens",
            )
        refused = {"prefill": sequence.is_remote_prefill, "decode": sequence.is_remote_decode}
        if refused.get(self.role):
            raise UsageError(
                f"this engine has the role {self.role!r} and does not take this side of a hand-off",
                fix="send it to the other engine, or start this one with role both",
            )

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many positions."""
        return -(-tokens // self.block_tokens)

    @property
    def sequence_tokens_max(self) -> int:
        """Prompt and output of one sequence together: what the model and the pool both allow."""
        return min(self.context_tokens, self.blocks * self.block_tokens + 1)


def deadline_error(sequence: Sequence, now_s: float) -> DeadlineError:
    """What a sequence is answered whose time in its state is over."""
    state, waited_s = sequence.state, now_s - sequence.arrived_s
    fix = {
        State.WAITING: "retry later, or raise queue_s, blocks or running_max",
        State.RUNNING: "lower max_tokens, or raise total_s",
    }.get(state, "see the state of the prefill engine, or raise load_s")
    return DeadlineError(
        f"sequence {sequence.id} was {state.value} for too long: {waited_s:.3g} s after its "
        f"arrival it had {len(sequence.output)} of {sequence.max_tokens} tokens",
        stage=state.value,
        fix=fix,
        retryable=state is not State.RUNNING,
    )
