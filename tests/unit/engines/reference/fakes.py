"""A model whose next token is a hash of what the KV holds, so wrong KV shows; and connectors."""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from kvferry.engines.reference.connector import ClaimResult
from kvferry.engines.reference.limits import SchedulerConfig
from kvferry.engines.reference.model import Chunk
from kvferry.engines.reference.sampling import SamplingParams
from kvferry.engines.reference.scheduler import Scheduler
from kvferry.engines.reference.sequence import Output, Sequence, State
from kvferry.errors import UsageError

VOCAB = 260
EOS = 257
BLOCK = 4
GRID = 8

CONFIG = SchedulerConfig(
    vocab_size=VOCAB,
    context_tokens=200,
    eos_ids=frozenset({EOS}),
    blocks=64,
    block_tokens=BLOCK,
    chunk_tokens=GRID,
    step_tokens=32,
    running_max=16,
    waiting_max=128,
    queue_s=10,
    load_s=20,
    total_s=100,
    offer_s=50,
    stop_s=5,
)


class ManualClock:
    """Time that only tests move."""

    def __init__(self) -> None:
        self.time_s = 1000.0
        self._wakes: list[Callable[[], None]] = []

    def now(self) -> float:
        return self.time_s

    def on_jump(self, wake: Callable[[], None]) -> None:
        self._wakes.append(wake)

    def advance(self, seconds: float) -> None:
        self.time_s += seconds
        for wake in self._wakes:
            wake()


def next_token(tokens: list[int], eos_every: int = 0) -> int:
    """A letter that depends on every token so far, or sometimes EOS."""
    digest = zlib.crc32(np.array(tokens, dtype=np.int64).tobytes())
    if eos_every and digest % eos_every == 0:
        return EOS
    return 97 + digest % 26


def expected(prompt: list[int], count: int, eos_every: int = 0) -> list[int]:
    """What a single process makes of the prompt."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(next_token(tokens, eos_every))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


class FakeModel:
    """Keeps tokens where a real model keeps keys and values, and reads them back."""

    def __init__(self, config: SchedulerConfig = CONFIG, eos_every: int = 0) -> None:
        self.kv = np.full((config.blocks, config.block_tokens), -1, dtype=np.int64)
        self.steps: list[list[Chunk]] = []
        self.before: Callable[[], None] = lambda: None
        self._config = config
        self._eos_every = eos_every

    def forward(self, chunks: list[Chunk]) -> np.ndarray:
        self.before()
        self.steps.append(chunks)
        logits = np.full((len(chunks), VOCAB), -5, dtype=np.float32)
        for row, chunk in enumerate(chunks):
            end = chunk.start + len(chunk.tokens)
            assert len(chunk.tokens) == 1 or chunk.start % self._config.chunk_tokens == 0
            at = np.arange(end)
            where = (chunk.blocks[at // BLOCK], at % BLOCK)
            new = slice(chunk.start, end)
            self.kv[where[0][new], where[1][new]] = chunk.tokens
            logits[row, next_token(self.kv[where].tolist(), self._eos_every)] = 5
        return logits


class ManualConnector:
    """Records what it is asked; the test decides when and how it ends."""

    def __init__(self) -> None:
        self.offers: dict[Sequence, Callable[[str], None]] = {}
        self.claims: dict[Sequence, Callable[[ClaimResult], None]] = {}
        self.withdrawn: list[Sequence] = []
        self.declined: list[dict[str, Any]] = []
        self.cancelled: list[Sequence] = []
        self.error: Exception | None = None
        self.is_closed = False

    def offer(
        self, sequence: Sequence, first_token: int, on_end: Callable[[str], None]
    ) -> dict[str, Any]:
        if self.error:
            raise self.error
        self.offers[sequence] = on_end
        return {"do_remote_prefill": True, "first": first_token}

    def withdraw(self, sequence: Sequence) -> None:
        self.withdrawn.append(sequence)

    def claim(
        self, sequence: Sequence, params: dict[str, Any], on_end: Callable[[ClaimResult], None]
    ) -> Handle:
        if self.error:
            raise self.error
        self.claims[sequence] = on_end
        return Handle(self, sequence)

    def decline(self, params: dict[str, Any]) -> None:
        if self.error:
            raise self.error
        self.declined.append(params)

    def close(self) -> None:
        self.is_closed = True

    def statistics(self) -> dict[str, Any]:
        return {"offers": len(self.offers)}


@dataclasses.dataclass
class Handle:
    connector: ManualConnector
    sequence: Sequence

    def cancel(self) -> None:
        self.connector.cancelled.append(self.sequence)


class CopyConnector:
    """Both sides of a hand-off in one process: a claim copies the offered blocks at once."""

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._offers: dict[int, tuple[FakeModel, Sequence, int, Callable[[str], None]]] = {}
        self.model: FakeModel | None = None

    def side(self, model: FakeModel) -> CopyConnector:
        """The same connector as another engine sees it."""
        side = CopyConnector()
        side._ids, side._offers, side.model = self._ids, self._offers, model
        return side

    def offer(
        self, sequence: Sequence, first_token: int, on_end: Callable[[str], None]
    ) -> dict[str, Any]:
        assert self.model is not None
        number = next(self._ids)
        self._offers[number] = (self.model, sequence, first_token, on_end)
        return {"do_remote_prefill": True, "do_remote_decode": False, "number": number}

    def withdraw(self, sequence: Sequence) -> None:
        for number, (_, offered, _, on_end) in list(self._offers.items()):
            if offered is sequence:
                del self._offers[number]
                on_end("withdrawn")

    def claim(
        self, sequence: Sequence, params: dict[str, Any], on_end: Callable[[ClaimResult], None]
    ) -> Handle:
        if params.get("number") not in self._offers:
            raise UsageError("no such offer")
        source, offered, first_token, offer_ended = self._offers.pop(params["number"])
        assert self.model is not None
        self.model.kv[sequence.prompt_blocks] = source.kv[offered.prompt_blocks]
        offer_ended("delivered")
        on_end(ClaimResult(first_token=first_token, nbytes=1, seconds=0.001, path="copy"))
        return Handle(ManualConnector(), sequence)

    def decline(self, params: dict[str, Any]) -> None:
        _, _, _, offer_ended = self._offers.pop(params["number"])
        offer_ended("released")

    def close(self) -> None:
        return None


class Rig:
    """A scheduler with everything around it, stepped by hand."""

    def __init__(self, connector: Any = None, *, eos_every: int = 0, **settings: Any) -> None:
        self.config = dataclasses.replace(CONFIG, **settings)
        self.clock = ManualClock()
        self.model = FakeModel(self.config, eos_every)
        self.connector = connector if connector is not None else ManualConnector()
        if isinstance(self.connector, CopyConnector):
            self.connector = self.connector.side(self.model)
        self.scheduler = Scheduler(self.config, self.model.forward, self.connector, self.clock)
        self.outputs: list[Output] = []
        self._ids = itertools.count()

    def sequence(
        self, prompt: list[int], max_tokens: int = 4, *, transfer: Any = None, **params: Any
    ) -> Sequence:
        made = SamplingParams(max_tokens=max_tokens, temperature=0, **params)
        tokens = np.array(prompt, dtype=np.int64)
        return Sequence(f"s{next(self._ids)}", tokens, made, transfer=transfer)

    def add(self, *args: Any, **kwargs: Any) -> Sequence:
        sequence = self.sequence(*args, **kwargs)
        self.config.check(sequence)
        self.scheduler.add([sequence])
        return sequence

    def turn(self, steps: int = 1) -> None:
        """What the engine's thread does: events, then a step."""
        for _ in range(steps):
            for event in self.scheduler.inbox.take():
                event()
            self.scheduler.step()
            self.outputs += self.scheduler.take_outputs()

    def run(self) -> None:
        """Turn until nothing more happens by itself."""
        for _ in range(1000):
            self.turn()
            if not self.scheduler.is_runnable:
                self.turn()  # for events that came during the last turn
                if not self.scheduler.is_runnable:
                    return
        raise AssertionError("the scheduler does not come to rest")

    def tokens(self, sequence: Sequence) -> list[int]:
        return [token for out in self.of(sequence) for token in out.tokens]

    def of(self, sequence: Sequence) -> list[Output]:
        return [out for out in self.outputs if out.sequence is sequence]

    def last(self, sequence: Sequence) -> Output:
        outs = self.of(sequence)
        assert [out.is_last for out in outs] == [False] * (len(outs) - 1) + [True]
        return outs[-1]

    def assert_clean(self) -> None:
        """Nothing is left: no sequence, no block."""
        now = self.scheduler.statistics()
        assert not any(now["sequences"].values())
        assert now["blocks_free"] == now["blocks_total"]
        assert self.scheduler.is_empty


DECODE_ELSEWHERE = {"do_remote_decode": True, "do_remote_prefill": False}
PREFILL_ELSEWHERE = {"do_remote_prefill": True, "do_remote_decode": False}


def counts(rig: Rig) -> dict[State, int]:
    """How many sequences are in each state, without the zeros."""
    return {State(name): n for name, n in rig.scheduler.statistics()["sequences"].items() if n}
