"""Which sequence computes what in the next step: continuous batching with chunked prefill.

All methods belong to the engine's thread, except :meth:`Scheduler.statistics`. Other threads reach
the scheduler through its inbox. It knows no thread, socket or tokenizer; time comes from the clock
that it is given.

Rules:

* First come, first served: the head of the queue is admitted when blocks for its whole life are
  free, so nothing that runs ever has to give way.
* A prompt is computed in chunks of ``chunk_tokens`` that begin at position 0, whatever else runs,
  so the same prompt gives the same bits alone, in a batch, here or in another engine.
* Blocks that a connector works with are freed after its ``on_end``, and never before.
* Every state but FINISHED has a deadline (``LIMITS``), and each sequence is answered once.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.clock import Clock
from kvferry.engines.reference.connector import ClaimResult, KVConnector, as_handoff_error
from kvferry.engines.reference.inbox import Inbox
from kvferry.engines.reference.ledger import Ledger
from kvferry.engines.reference.limits import SchedulerConfig, deadline_error
from kvferry.engines.reference.model import Chunk
from kvferry.engines.reference.observer import Observer
from kvferry.engines.reference.sampling import sample, top_logprobs
from kvferry.engines.reference.sequence import Output, Sequence, State, TokenLogprobs
from kvferry.errors import (
    BusyError,
    HandoffError,
    KVFerryError,
    ProtocolError,
    UsageError,
)

log = logging.getLogger(__name__)

Logits = NDArray[np.float32]
Forward = Callable[[list[Chunk]], Logits]
"""One pass of the model: chunks in, float32 ``[len(chunks), vocab]`` out, KV written on the way."""


class Scheduler:
    """Takes sequences from the queue to their last token.

    forward: computes a batch; the KV behind it has ``config.blocks`` blocks.
    connector: moves KV for sequences with ``kv_transfer_params``.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        forward: Forward,
        connector: KVConnector,
        clock: Clock,
        observer: Observer | None = None,
    ) -> None:
        self.config = config
        self.clock = clock
        self.inbox = Inbox(clock)
        self._forward = forward
        self._connector = connector
        self._observer = observer or Observer()
        self._ledger = Ledger(config, clock)
        self._waiting: deque[Sequence] = deque()
        self._active: dict[Sequence, None] = {}
        self._outputs: list[Output] = []
        self._recomputed_count = 0

    def statistics(self) -> dict[str, Any]:
        """Counts of this moment as plain JSON types. Any thread."""
        return {**self._ledger.statistics(), "recomputed": self._recomputed_count}

    # What the engine's thread does.

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing at all, pinned blocks included."""
        return not self._ledger.live

    @property
    def is_runnable(self) -> bool:
        """Whether a step would compute or admit something now."""
        running = any(sequence.state is State.RUNNING for sequence in self._active)
        return running or self._can_admit()

    def next_deadline_s(self) -> float | None:
        """When a step is needed although nothing else happens; None for never."""
        return self._ledger.next_deadline_s()

    def add(self, sequences: list[Sequence]) -> None:
        """Queue all of these, which passed ``config.check``, or fail them all with BusyError."""
        room = self.config.waiting_max - len(self._waiting)
        for sequence in sequences:
            self._ledger.add(sequence)
            self._waiting.append(sequence)
            self._observer.started(len(sequence.prompt))
        if len(sequences) > room:
            error = BusyError(
                f"the queue is full: {self.config.waiting_max} sequences are waiting",
                stage="queue",
                fix="retry later, or raise waiting_max",
            )
            for sequence in sequences:
                self._fail(sequence, error)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence that nobody waits for any more. Nothing happens if it has ended."""
        if sequence.state is State.OFFERED:
            self._withdraw(sequence)
        elif not sequence.is_answered:
            sequence.is_answered = True
            self._observer.answered("aborted")
            self._leave(sequence)

    def fail_all(self, error: KVFerryError) -> None:
        """Answer every sequence with ``error`` and withdraw every offer."""
        for sequence in list(self._ledger.live):
            try:
                if sequence.state is State.OFFERED:
                    self._withdraw(sequence)
                elif not sequence.is_answered:
                    self._fail(sequence, error)
            except Exception:
                log.exception("%s could not be ended cleanly; this is a bug", sequence.id)

    def step(self) -> None:
        """End what is overdue, admit what fits, and compute one batch. Outputs: ``take_outputs``.

        An exception of the model leaves the batch's KV undefined: call ``fail_all`` then.
        """
        self.expire()
        while self._can_admit():
            self._admit(self._waiting.popleft())
        batch = self._batch()
        if not batch:
            return
        logits = self._forward([chunk for _, chunk in batch])
        for (sequence, chunk), row in zip(batch, logits, strict=True):
            sequence.computed_tokens += len(chunk.tokens)
            if sequence.computed_tokens < len(sequence.prompt):
                continue
            if not np.isfinite(row.max()):
                self._fail(sequence, _not_a_number(sequence))
            else:
                token, logprobs = self._sample(sequence, row)
                self._append(sequence, token, logprobs)

    def take_outputs(self) -> list[Output]:
        """The outputs since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # From the queue to the last token.

    def _can_admit(self) -> bool:
        if not self._waiting or len(self._active) >= self.config.running_max:
            return False
        return self._ledger.has_room(self._waiting[0])

    def _admit(self, sequence: Sequence) -> None:
        self._ledger.reserve(sequence)
        self._active[sequence] = None
        if sequence.is_remote_prefill:
            self._claim(sequence)
        else:
            self._ledger.enter(sequence, State.RUNNING)

    def _batch(self) -> list[tuple[Sequence, Chunk]]:
        """Every sequence that decodes, then prompt chunks in order of admission while they fit."""
        batch: list[tuple[Sequence, Chunk]] = []
        prompts: list[Sequence] = []
        for sequence in self._active:
            if sequence.state is not State.RUNNING:
                continue
            if sequence.computed_tokens < len(sequence.prompt):
                prompts.append(sequence)
            else:
                last = np.array(sequence.output[-1:], dtype=np.int64)
                batch.append((sequence, self._chunk(sequence, last)))
        room = self.config.step_tokens - len(batch)
        for sequence in prompts:
            start = sequence.computed_tokens
            tokens = sequence.prompt[start : start + self.config.chunk_tokens]
            room -= len(tokens)
            if room < 0:
                break
            batch.append((sequence, self._chunk(sequence, tokens)))
        return batch

    def _chunk(self, sequence: Sequence, tokens: NDArray[np.int64]) -> Chunk:
        start = sequence.computed_tokens
        needed = self.config.blocks_for(start + len(tokens))
        return Chunk(tokens, start, sequence.blocks[:needed])

    def _sample(self, sequence: Sequence, row: Logits) -> tuple[int, TokenLogprobs | None]:
        params, made = sequence.params, len(sequence.output)
        if made < params.min_tokens and not params.ignore_eos and self.config.eos_ids:
            row = row.copy()
            row[list(self.config.eos_ids)] = -np.inf
        token = sample(row, params, step=made, request_seed=sequence.request_seed)
        if params.logprobs is None:
            return token, None
        logprob, top = top_logprobs(row, token, params.logprobs)
        return token, TokenLogprobs(token, logprob, tuple(top))

    def _append(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> None:
        """Give the sequence its next output token, and end it if that was the last one."""
        sequence.output.append(token)
        if len(sequence.output) == 1:
            self._observer.first_token(self.clock.now() - sequence.arrived_s)
        self._observer.token()
        params, text = sequence.params, ""
        may_stop = len(sequence.output) >= params.min_tokens
        finish = ""
        if token in self.config.eos_ids and not params.ignore_eos and may_stop:
            finish = "stop"
        elif sequence.text is not None:
            text = sequence.text.push(token, may_stop=may_stop)
            finish = "stop" if sequence.text.is_stopped else ""
        if not finish and len(sequence.output) >= sequence.max_tokens:
            finish = "length"
        if finish and sequence.text is not None:
            text += sequence.text.flush()
        transfer = None
        if finish and sequence.is_remote_decode:
            sequence.first_logprobs = logprobs
            transfer = self._offer(sequence, token)
            if sequence.is_answered:
                return
        if finish:
            self._answer(sequence, finish)
        tokens = (token,)
        self._outputs.append(Output(sequence, tokens, text, logprobs, finish, None, transfer))

    # The two sides of a hand-off.

    def _offer(self, sequence: Sequence, token: int) -> dict[str, Any] | None:
        """Give the blocks to the connector. If it refuses, the sequence is answered with that."""
        sequence.ticket = ticket = object()
        ended = partial(self._post_offer_ended, sequence, ticket)
        try:
            return self._connector.offer(sequence, token, ended)
        except Exception as error:
            sequence.ticket = None
            self._fail(sequence, as_handoff_error(error, "offer"))
            return None

    def _post_offer_ended(self, sequence: Sequence, ticket: object, outcome: str) -> None:
        self.inbox.post(partial(self._offer_ended, sequence, ticket, outcome))

    def _offer_ended(self, sequence: Sequence, ticket: object, outcome: str) -> None:
        if sequence.ticket is not ticket:
            log.error("the connector ended the offer of %s twice; this is a bug", sequence.id)
            return
        sequence.ticket = None
        self._observer.offer_ended(outcome)
        self._ledger.release(sequence)

    def _withdraw(self, sequence: Sequence) -> None:
        self._ledger.enter(sequence, State.STOPPING)
        try:
            self._connector.withdraw(sequence)
        except Exception:
            log.exception("the connector failed to withdraw the offer of %s", sequence.id)

    def _claim(self, sequence: Sequence) -> None:
        self._ledger.enter(sequence, State.LOADING)
        sequence.ticket = ticket = object()
        ended = partial(self._post_claim_ended, sequence, ticket)
        try:
            handle = self._connector.claim(sequence, dict(sequence.transfer or {}), ended)
        except UsageError as error:
            sequence.ticket = None
            self._fail(sequence, error)
        except Exception as error:
            sequence.ticket = None
            self._load_failed(sequence, as_handoff_error(error, "claim"))
        else:
            sequence.handle = handle

    def _post_claim_ended(self, sequence: Sequence, ticket: object, result: ClaimResult) -> None:
        self.inbox.post(partial(self._claim_ended, sequence, ticket, result))

    def _claim_ended(self, sequence: Sequence, ticket: object, result: ClaimResult) -> None:
        if sequence.ticket is not ticket:
            log.error("the connector ended the claim of %s twice; this is a bug", sequence.id)
            return
        sequence.ticket = sequence.handle = None
        token, error = result.first_token, result.error
        if error is None and (token is None or not 0 <= token < self.config.vocab_size):
            error = ProtocolError(f"the hand-off brought {token!r} as its first token")
        outcome = "loaded" if error is None else error.code
        self._observer.claim_ended(outcome, result.seconds, result.nbytes)
        if sequence.is_answered:
            self._ledger.release(sequence)
        elif error is not None or token is None:
            self._load_failed(sequence, error or HandoffError("the hand-off failed"))
        else:
            self._ledger.enter(sequence, State.RUNNING)
            sequence.computed_tokens = len(sequence.prompt)
            logprobs = None
            if sequence.params.logprobs is not None:
                logprobs = result.first_logprobs or TokenLogprobs(token, None)
            self._append(sequence, token, logprobs)

    def _load_failed(self, sequence: Sequence, error: KVFerryError) -> None:
        """Nothing works with the blocks any more, and they hold nothing of use."""
        if self.config.on_load_failure == "fail":
            self._fail(sequence, error)
            return
        log.info("%s: its KV was not loaded and is computed here: %s", sequence.id, error)
        sequence.is_recomputed = True
        self._recomputed_count += 1
        self._observer.recomputed()
        self._ledger.enter(sequence, State.RUNNING)

    # The end of a sequence.

    def _answer(self, sequence: Sequence, outcome: str) -> None:
        sequence.is_answered = True
        self._observer.answered(outcome)
        self._leave(sequence)

    def _fail(self, sequence: Sequence, error: KVFerryError) -> None:
        self._outputs.append(Output(sequence, error=error))
        self._answer(sequence, error.code)

    def _leave(self, sequence: Sequence) -> None:
        """The sequence is answered: free its blocks, or wait until the connector has left them."""
        self._active.pop(sequence, None)
        if sequence.state is State.WAITING:
            try:
                self._waiting.remove(sequence)
            except ValueError:
                pass
            if sequence.is_remote_prefill:
                self._decline(sequence)
        if sequence.ticket is None:
            self._ledger.release(sequence)
        elif sequence.state is State.RUNNING:
            self._ledger.enter(sequence, State.OFFERED)
        elif sequence.state is State.LOADING:
            self._cancel(sequence)

    def _decline(self, sequence: Sequence) -> None:
        """It ends before its claim began: prefill need not keep its blocks any longer."""
        try:
            self._connector.decline(dict(sequence.transfer or {}))
        except KVFerryError as error:
            log.info("the offer for %s was not declined: %s", sequence.id, error)
        except Exception:
            log.exception("the connector failed to decline the offer for %s", sequence.id)

    def _cancel(self, sequence: Sequence) -> None:
        self._ledger.enter(sequence, State.STOPPING)
        try:
            if sequence.handle is not None:
                sequence.handle.cancel()
        except Exception:
            log.exception("the connector failed to cancel the claim of %s", sequence.id)

    # Deadlines.

    def expire(self) -> None:
        """End everything whose deadline has passed."""
        for sequence in self._ledger.expired():
            self._expired(sequence)

    def _expired(self, sequence: Sequence) -> None:
        state = sequence.state
        if state is State.OFFERED:
            self._withdraw(sequence)
        elif state is State.STOPPING:
            self._stuck(sequence)
        elif state is State.LOADING and self.config.on_load_failure == "recompute":
            self._cancel(sequence)
        else:
            self._fail(sequence, deadline_error(sequence, self.clock.now()))

    def _stuck(self, sequence: Sequence) -> None:
        """The connector does not let go of the blocks: answer, and leave them unused."""
        log.error(
            "%s: the connector still holds %d blocks %g s after it was asked to stop; they stay "
            "unused until it lets go",
            sequence.id,
            len(sequence.blocks),
            self.config.stop_s,
        )
        self._ledger.mark_overdue(sequence)
        if not sequence.is_answered:
            self._fail(sequence, deadline_error(sequence, self.clock.now()))


def _not_a_number(sequence: Sequence) -> KVFerryError:
    return KVFerryError(
        f"{sequence.id}: the model's output for token {sequence.computed_tokens} is not a number",
        stage="step",
        fix="check the weights, and the KV if it came from another engine",
    )
