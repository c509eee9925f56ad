"""The engine's thread: it wakes for every event, sleeps otherwise, and ends in every case."""

import asyncio
import threading

import pytest

from kvferry.clock import SystemClock
from kvferry.engines.reference.connector import ClaimResult
from kvferry.engines.reference.loop import EngineLoop
from kvferry.engines.reference.sequence import State
from kvferry.errors import BusyError, ClosedError, DeadlineError, KVFerryError, UsageError

from .fakes import (
    DECODE_ELSEWHERE,
    PREFILL_ELSEWHERE,
    ManualClock,
    ManualConnector,
    Rig,
    expected,
)

LIMIT_S = 5.0


class Live:
    """A rig whose scheduler is run by a real thread."""

    def __init__(self, **settings):
        self.rig = Rig(**settings)
        self.queue = asyncio.Queue()
        self.engine = EngineLoop(self.rig.scheduler, asyncio.get_running_loop())
        self.hand_overs = 0

    def submit(self, *args, **kwargs):
        sequence = self.rig.sequence(*args, **kwargs)
        sequence.sink = self.queue.put_nowait
        self.engine.submit([sequence])
        return sequence

    async def tokens(self, *sequences):
        """The tokens of each, when all have ended; an error is raised."""
        got = {sequence: [] for sequence in sequences}
        open_ = set(sequences)
        while open_:
            output = await asyncio.wait_for(self.queue.get(), LIMIT_S)
            if output.error:
                raise output.error
            got[output.sequence] += output.tokens
            if output.is_last:
                open_.remove(output.sequence)
        return [got[sequence] for sequence in sequences]

    async def until(self, is_so):
        """Wait for something that the engine's thread does, by asking that thread."""
        loop = asyncio.get_running_loop()
        while True:
            asked = loop.create_future()
            self.rig.scheduler.inbox.post(
                lambda asked=asked: loop.call_soon_threadsafe(asked.set_result, is_so())
            )
            if await asyncio.wait_for(asked, LIMIT_S):
                return


def live(body, **settings):
    """Run ``body(Live)`` in a loop and check that the thread has ended afterwards."""

    async def run():
        life = Live(**settings)
        life.engine.start()
        try:
            await asyncio.wait_for(body(life), LIMIT_S)
        finally:
            life.engine.close()

    asyncio.run(run())
    assert not [t for t in threading.enumerate() if t.name == "kvferry-engine"]


def test_many_at_once_get_their_own_tokens():
    async def body(life):
        prompts = [[n, n + 1, 3 * n] for n in range(1, 33)]
        sequences = [life.submit(prompt, 6) for prompt in prompts]
        assert await life.tokens(*sequences) == [expected(prompt, 6) for prompt in prompts]
        await life.until(lambda: life.rig.scheduler.is_empty)
        life.rig.assert_clean()

    live(body)


def test_outputs_of_a_step_come_in_one_call():
    async def body(life):
        loop, calls = asyncio.get_running_loop(), []
        real = loop.call_soon_threadsafe
        gate = threading.Event()
        life.rig.model.before = lambda: gate.wait(LIMIT_S)
        sequences = [life.submit([n + 1], 5) for n in range(10)]
        loop.call_soon_threadsafe = lambda *args: (calls.append(args), real(*args))[1]
        gate.set()
        await life.tokens(*sequences)
        # One sequence may run a step ahead of the others, because it arrived first.
        assert len(calls) <= 6

    live(body)


def test_an_idle_engine_does_not_look_at_the_clock():
    class Counting(ManualClock):
        asked = 0

        def now(self):
            self.asked += 1
            return super().now()

    async def body(life):
        clock = Counting()
        life.rig.scheduler.inbox._clock = clock
        await life.tokens(life.submit([1], 2))
        before = clock.asked
        await asyncio.to_thread(threading.Event().wait, 0.05)
        assert clock.asked == before

    live(body)


def test_a_connector_callback_from_another_thread_wakes_the_idle_engine():
    async def body(life):
        sequence = life.submit([1, 2], 1, transfer=PREFILL_ELSEWHERE)
        await life.until(lambda: sequence in life.rig.connector.claims)
        on_end = life.rig.connector.claims[sequence]
        thread = threading.Thread(target=on_end, args=(ClaimResult(first_token=99),))
        thread.start()
        assert await life.tokens(sequence) == [[99]]
        thread.join()

    live(body)


def test_a_deadline_wakes_the_idle_engine():
    async def body(life):
        sequence = life.submit([1, 2], transfer=PREFILL_ELSEWHERE)
        await life.until(lambda: sequence.state is State.LOADING)
        life.rig.clock.advance(life.rig.config.load_s)
        with pytest.raises(DeadlineError):
            await life.tokens(sequence)

    live(body, on_load_failure="fail")


def test_a_real_clock_wakes_it_too():
    async def body(life):
        clock = SystemClock()
        for part in (life.rig.scheduler, life.rig.scheduler.inbox, life.rig.scheduler._ledger):
            for name in ("clock", "_clock"):
                if hasattr(part, name):
                    setattr(part, name, clock)
        sequence = life.submit([1, 2], transfer=PREFILL_ELSEWHERE)
        with pytest.raises(DeadlineError):
            await life.tokens(sequence)

    live(body, on_load_failure="fail", load_s=0.02)


def test_abort_reaches_a_running_and_a_loading_sequence():
    async def body(life):
        gate = threading.Event()
        life.rig.model.before = lambda: gate.wait(LIMIT_S)
        running = life.submit([1], 100)
        loading = life.submit([2], transfer=PREFILL_ELSEWHERE)
        life.engine.abort([running, loading])
        gate.set()
        await life.until(lambda: running.state is State.FINISHED)
        assert loading.state in (State.STOPPING, State.FINISHED)
        assert not [out for out in _drain(life.queue) if out.is_last]

    live(body)


def _drain(queue):
    while not queue.empty():
        yield queue.get_nowait()


def test_a_crash_in_a_step_fails_everybody_and_later_ones():
    async def body(life):
        def crash():
            raise ZeroDivisionError("bad weights")

        loading = life.submit([2], transfer=PREFILL_ELSEWHERE)
        await life.until(lambda: loading.state is State.LOADING)
        life.rig.model.before = crash
        running = life.submit([1])
        errors = {}
        for _ in range(2):
            output = await life.queue.get()
            errors[output.sequence] = str(output.error)
        assert all("bad weights" in errors[sequence] for sequence in (loading, running))
        assert "bad weights" in str(life.engine.failure)
        with pytest.raises(KVFerryError, match="bad weights"):
            life.submit([3])
        # The claim still ends in good order, and deadlines still pass.
        life.rig.connector.claims[loading](ClaimResult(first_token=1))
        await life.until(lambda: life.rig.scheduler.is_empty)
        life.rig.assert_clean()

    live(body)


def test_after_a_crash_a_silent_connector_does_not_keep_the_thread_busy():
    async def body(life):
        sequence = life.submit([2], transfer=PREFILL_ELSEWHERE)
        await life.until(lambda: sequence.state is State.LOADING)
        life.engine._crash(ZeroDivisionError("x"))
        life.rig.clock.advance(1000)
        await life.until(lambda: sequence.is_overdue)
        assert life.rig.scheduler.next_deadline_s() is None

    live(body)


def test_close_fails_what_is_left_and_refuses_the_rest():
    async def body(life):
        sequence = life.submit([1, 2], transfer=PREFILL_ELSEWHERE)
        life.engine.close()
        life.engine.close()
        with pytest.raises(ClosedError):
            await life.tokens(sequence)
        with pytest.raises(ClosedError):
            life.submit([1])

    live(body)


def test_close_without_start_and_with_a_dead_loop():
    rig = Rig()

    async def make():
        return EngineLoop(rig.scheduler, asyncio.get_running_loop())

    asyncio.run(make()).close()
    engine = asyncio.run(make())
    engine.start()
    engine.submit([rig.sequence([1])])
    engine.close()
    assert not [t for t in threading.enumerate() if t.name == "kvferry-engine"]


def test_what_can_never_run_is_refused_in_the_callers_thread():
    async def body(life):
        with pytest.raises(UsageError):
            life.submit([1] * 500)
        assert life.rig.scheduler.is_empty

    live(body)


def test_arrivals_are_bounded_while_a_step_runs():
    async def body(life):
        gate, started = threading.Event(), threading.Event()
        life.rig.model.before = lambda: (started.set(), gate.wait(LIMIT_S))
        first = life.submit([1])
        await asyncio.to_thread(started.wait, LIMIT_S)
        more = [life.submit([n + 2]) for n in range(4)]
        with pytest.raises(BusyError):
            life.submit([9])
        gate.set()
        await life.tokens(first, *more)

    live(body, waiting_max=4)


def test_drain_waits_for_running_ones_and_for_offers():
    async def body(life):
        offered = life.submit([1], transfer=DECODE_ELSEWHERE)
        await life.tokens(offered)
        assert not await life.engine.drain(0.01)
        with pytest.raises(ClosedError, match="shutting down"):
            life.submit([1])
        drained = asyncio.create_task(life.engine.drain(LIMIT_S))
        life.rig.connector.offers[offered]("delivered")
        assert await drained

    live(body)


def test_a_drain_that_is_asked_for_while_another_one_ends_is_answered_too():
    async def body(life):
        held, hold, gate, started, later = (threading.Event() for _ in range(5))
        life.rig.model.before = lambda: (started.set(), gate.wait(LIMIT_S))
        life.rig.scheduler.inbox.post(lambda: (held.set(), hold.wait(LIMIT_S)))
        await asyncio.to_thread(held.wait, LIMIT_S)
        life.submit([1], 1)
        first = asyncio.create_task(life.engine.drain(LIMIT_S))
        await asyncio.sleep(0)
        hold.set()
        # The last step is running with the first drain taken in. The second one arrives now, and
        # is taken in after the first one was answered.
        await asyncio.to_thread(started.wait, LIMIT_S)
        life.rig.scheduler.inbox.post(lambda: later.wait(LIMIT_S))
        second = asyncio.create_task(life.engine.drain(LIMIT_S))
        await asyncio.sleep(0)
        gate.set()
        assert await first
        later.set()
        assert await second

    live(body)


def test_drain_of_an_idle_engine_ends_at_once():
    async def body(life):
        assert await life.engine.drain(LIMIT_S)
        assert isinstance(life.rig.connector, ManualConnector)

    live(body)
