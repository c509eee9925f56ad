"""Load on an OpenAI-compatible URL in which every single answer is checked.

Clients ask in a closed loop: each sends its next request when the last one has ended. First the
answers are learned from an engine that runs alone (:func:`learn`), then asked for under load
(:class:`Load`). A request ends in exactly one outcome:

* ``ok``: whole, and token for token the answer that is known;
* ``left``: the client closed the connection in mid-stream, on purpose;
* ``error``: an answer that says what went wrong, with its code;
* ``broken``: the connection ended without an ending and without a word;
* ``wrong``: a token, or a reason to finish, that is not the known one, in whatever came;
* ``hang``: no end within the client's own bound.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

PATH = "/v1/completions"
_PAUSE_S = 0.05
_LEAVE_AT_ONCE_S = 0.05


@dataclass(frozen=True, slots=True)
class Question:
    """What a client asks. prompt: token ids. temperature 0 is greedy; else ``seed`` decides."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0

    def body(self, *, stream: bool) -> dict[str, Any]:
        """The request's JSON."""
        body: dict[str, Any] = {
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": stream,
            "return_token_ids": True,
        }
        if self.temperature:
            body["seed"] = self.seed
        return body


@dataclass(frozen=True, slots=True)
class Known:
    """A question and the one right answer to it."""

    question: Question
    tokens: tuple[int, ...]
    finish: str


def make_questions(
    count: int,
    *,
    seed: int,
    block_tokens: int = 16,
    blocks_max: int = 6,
    vocab: tuple[int, int] = (32, 127),
    max_tokens: tuple[int, int] = (1, 24),
) -> list[Question]:
    """Seeded questions; most prompts end at the edge of a block, or one token beside it.

    blocks_max: longest prompt, in blocks, give or take one token. vocab: token ids from the first
    to before the second. max_tokens: fewest and most tokens of an answer. One question in three is
    sampled at temperature 0.8 with a seed, the others are greedy.
    """
    rng = random.Random(seed)
    edges = [n * block_tokens + d for n in range(1, blocks_max + 1) for d in (-1, 0, 1)]
    questions = []
    for at in range(count):
        length = edges[at % len(edges)] if at % 4 else rng.randint(1, edges[-1])
        prompt = tuple(rng.randrange(*vocab) for _ in range(max(length, 1)))
        sampled = at % 3 == 2
        questions.append(
            Question(
                prompt,
                rng.randint(*max_tokens),
                temperature=0.8 if sampled else 0.0,
                seed=rng.getrandbits(31) if sampled else 0,
            )
        )
    return questions


@dataclass(eq=False, slots=True)
class Record:
    """One request from its start to its one end. Times are seconds of ``time.monotonic``.

    label: the request's x-request-id. prefill, decode, handoff: what the answer's x-kvferry-*
    headers say, "" until they came. progress: when its head and each part of the answer came.
    ended: 0 while it runs.
    """

    label: str
    known: Known
    begun: float
    outcome: str = ""
    code: str = ""
    detail: str = ""
    prefill: str = ""
    decode: str = ""
    handoff: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: str = ""
    progress: list[float] = field(default_factory=list)
    ended: float = 0.0

    def was_running(self, at: float) -> bool:
        """Whether it was under way at a time."""
        return self.begun <= at and (not self.ended or self.ended > at)

    def next_sign_s(self, at: float) -> float:
        """From a time at which it ran to its end, or to the next part of its answer."""
        later = [t for t in self.progress if t > at]
        return min([*later, self.ended]) - at

    def explain(self) -> str:
        """All that one needs to send it again."""
        question = self.known.question
        return (
            f"{self.label}: {self.outcome} {self.code} after {self.ended - self.begun:.3f} s: "
            f"{self.detail}\n  workers: {self.prefill or '-'} -> {self.decode or '-'} "
            f"{self.handoff}\n  asked: {json.dumps(question.body(stream=True))}\n"
            f"  expected: {list(self.known.tokens)} {self.known.finish}\n"
            f"  got:      {self.tokens} {self.finish}"
        )


@dataclass(frozen=True, slots=True)
class LoadResult:
    """How a load ended. seconds: how long it ran. records: every request, in order of start."""

    records: tuple[Record, ...]
    seconds: float

    def counts(self) -> dict[str, int]:
        """Requests by outcome; errors by their code, such as ``error:peer_lost``."""
        names = (f"error:{r.code}" if r.outcome == "error" else r.outcome for r in self.records)
        return dict(sorted(Counter(names).items()))

    def of(self, *outcomes: str) -> list[Record]:
        """The records that ended so."""
        return [record for record in self.records if record.outcome in outcomes]

    def latencies(self) -> list[float]:
        """Seconds that the right answers took, sorted."""
        return sorted(record.ended - record.begun for record in self.of("ok"))

    def longest_s(self) -> float:
        """The longest time to a terminal state, whichever that was."""
        return max((record.ended - record.begun for record in self.records), default=0.0)

    def explain(self, *outcomes: str, limit: int = 5) -> str:
        """The records that ended so, in full, at most ``limit`` of them."""
        found = self.of(*outcomes)
        return "\n".join([f"{len(found)} requests", *(r.explain() for r in found[:limit])])

    def __str__(self) -> str:
        latencies = self.latencies() or [0.0]
        counts = ", ".join(f"{name} {count}" for name, count in self.counts().items())
        return (
            f"{len(self.records)} requests in {self.seconds:.1f} s "
            f"({len(self.records) / max(self.seconds, 1e-9):.0f}/s): {counts}; median "
            f"{latencies[len(latencies) // 2]:.3f} s, longest to an end {self.longest_s():.3f} s"
        )


class Load:
    """Clients that ask a URL for answers that are known.

    url: base URL. known: the questions, each asked about equally often, in a seeded order.
    clients: how many ask at once. requests, duration_s: stop after so many, or so long, or at
    :meth:`stop`, whichever comes first; requests that are under way are awaited.
    leave_share: part of the requests that are left in mid-stream. whole_share: part of the others
    that ask for the answer in one piece. bound_s: a request that takes longer is a ``hang``.
    ``records`` may be looked at while it runs.
    """

    def __init__(
        self,
        url: str,
        known: Sequence[Known],
        *,
        clients: int,
        requests: int | None = None,
        duration_s: float | None = None,
        leave_share: float = 0.1,
        whole_share: float = 0.2,
        bound_s: float = 60.0,
        seed: int = 0,
    ) -> None:
        self.records: list[Record] = []
        self._url, self._known, self._clients = url, list(known), clients
        self._requests = requests
        self._duration_s = float("inf") if duration_s is None else duration_s
        self._leave_share, self._whole_share = leave_share, whole_share
        self._bound_s = bound_s
        self._rng = random.Random(seed)
        self._order: list[int] = []
        self._numbers = itertools.count()
        self._stopped = False

    def stop(self) -> None:
        """Begin no more requests."""
        self._stopped = True

    async def run(self) -> LoadResult:
        """Ask until the end. Returns after every request has ended; none takes over ``bound_s``."""
        begun = time.monotonic()
        until = begun + self._duration_s
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
            asyncio.TaskGroup() as clients,
        ):
            for _ in range(self._clients):
                clients.create_task(self._client(session, until))
        return LoadResult(tuple(self.records), time.monotonic() - begun)

    async def _client(self, session: aiohttp.ClientSession, until: float) -> None:
        while not self._stopped and time.monotonic() < until:
            number = next(self._numbers)
            if self._requests is not None and number >= self._requests:
                return
            record = Record(f"load-{number}", self._next(), time.monotonic())
            draw = self._rng.random()
            parts_max = self._rng.randint(0, 6) if draw < self._leave_share else -1
            stream = parts_max >= 0 or self._rng.random() >= self._whole_share
            self.records.append(record)
            await _ask(session, self._url, record, stream, parts_max, self._bound_s)
            if record.outcome not in ("ok", "left"):
                # Whoever is refused at once does not come back at once.
                await asyncio.sleep(_PAUSE_S)

    def _next(self) -> Known:
        if not self._order:
            self._order = list(range(len(self._known)))
            self._rng.shuffle(self._order)
        return self._known[self._order.pop()]


async def learn(
    url: str, questions: Iterable[Question], *, clients: int = 8, bound_s: float = 60.0
) -> list[Known]:
    """Ask an engine that runs alone, and take what it says for right. Raises ValueError."""
    waiting = [Record(f"learn-{i}", Known(q, (), ""), 0.0) for i, q in enumerate(questions)]
    queue = list(reversed(waiting))
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def client() -> None:
            while queue:
                record = queue.pop()
                record.begun = time.monotonic()
                await _ask(session, url, record, False, -1, bound_s)

        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
    for record in waiting:
        # With no answer known yet, a whole one is "wrong", and everything else is a failure.
        if record.outcome != "wrong" or not record.tokens:
            raise ValueError(f"no answer to learn from: {record.explain()}")
    return [Known(r.known.question, tuple(r.tokens), r.finish) for r in waiting]


async def _ask(
    session: aiohttp.ClientSession,
    url: str,
    record: Record,
    stream: bool,
    parts_max: int,
    bound_s: float,
) -> None:
    """One request to its end. parts_max: leave after so many parts of the answer; -1 never."""
    try:
        async with asyncio.timeout(bound_s):
            if parts_max == 0:
                try:
                    async with asyncio.timeout(_LEAVE_AT_ONCE_S):
                        await _exchange(session, url, record, stream, parts_max)
                except TimeoutError:
                    record.outcome = "left"
            else:
                await _exchange(session, url, record, stream, parts_max)
    except TimeoutError:
        record.outcome, record.detail = "hang", f"no end within {bound_s:g} s"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        record.outcome = record.outcome or "broken"
        record.detail = record.detail or f"{type(error).__name__}: {error}"
    record.ended = time.monotonic()
    _judge(record)


async def _exchange(
    session: aiohttp.ClientSession, url: str, record: Record, stream: bool, parts_max: int
) -> None:
    body = record.known.question.body(stream=stream)
    headers = {"x-request-id": record.label}
    async with session.post(url + PATH, json=body, headers=headers) as response:
        record.progress.append(time.monotonic())
        record.prefill = response.headers.get("x-kvferry-prefill", "")
        record.decode = response.headers.get("x-kvferry-decode", "")
        record.handoff = response.headers.get("x-kvferry-handoff", "")
        if response.status != 200 or not stream:
            _take_whole(record, response.status, await response.read())
        else:
            await _take_stream(record, response, parts_max)


def _take_whole(record: Record, status: int, data: bytes) -> None:
    body = json.loads(data)
    if status != 200:
        error = body["error"]
        record.outcome, record.code = "error", str(error["code"])
        record.detail = f"HTTP {status}: {error['message']}"
        return
    _take_choice(record, body["choices"][0])
    record.outcome = "ok"


async def _take_stream(record: Record, response: aiohttp.ClientResponse, parts_max: int) -> None:
    parts = 0
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        record.progress.append(time.monotonic())
        if line.strip() == b"data: [DONE]":
            record.outcome = record.outcome or "ok"
            continue
        event = json.loads(line[6:])
        if "error" in event:
            record.outcome, record.code = "error", str(event["error"]["code"])
            record.detail = f"in the stream: {event['error']['message']}"
            continue
        for choice in event["choices"]:
            _take_choice(record, choice)
        parts += 1
        if parts == parts_max and not record.finish:
            record.outcome = "left"
            response.close()
            return
    if not record.outcome:
        record.outcome, record.detail = "broken", "the stream ended before [DONE]"


def _take_choice(record: Record, choice: dict[str, Any]) -> None:
    record.tokens += choice["token_ids"]
    record.finish = choice["finish_reason"] or record.finish


def _judge(record: Record) -> None:
    """Compare what came, however it ended: not even half an answer may have a wrong token."""
    wanted = record.known.tokens
    is_whole = record.outcome == "ok"
    same = tuple(record.tokens) == wanted[: len(record.tokens)]
    if is_whole:
        same = same and len(record.tokens) == len(wanted) and record.finish == record.known.finish
    if not same:
        record.detail = f"instead of {record.outcome}: {record.detail}"
        record.outcome = "wrong"
