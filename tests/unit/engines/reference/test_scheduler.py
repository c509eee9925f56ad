"""The scheduler, stepped by hand: order, equality of results, hand-offs, aborts and deadlines."""

import dataclasses
import random

import pytest

from kvferry.engines.reference.connector import ClaimResult, NullConnector
from kvferry.engines.reference.limits import LIMITS
from kvferry.engines.reference.sequence import State, TextStream
from kvferry.errors import (
    BusyError,
    ConfigError,
    DeadlineError,
    HandoffError,
    KVFerryError,
    ProtocolError,
    RefusedError,
    UsageError,
)

from .fakes import (
    BLOCK,
    CONFIG,
    DECODE_ELSEWHERE,
    GRID,
    PREFILL_ELSEWHERE,
    CopyConnector,
    ManualConnector,
    Rig,
    counts,
    expected,
)

PROMPT = list(range(1, 20))


def prompts(count: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(97) for _ in range(draw.randint(1, 40))] for _ in range(count)]


# Ordinary requests.


def test_64_at_once_equal_64_alone():
    rig = Rig()
    batch = [rig.add(prompt, max_tokens=1 + n % 12) for n, prompt in enumerate(prompts(64, 1))]
    rig.run()
    for sequence in batch:
        alone = expected(sequence.prompt.tolist(), sequence.max_tokens)
        assert rig.tokens(sequence) == alone
        assert rig.last(sequence).finish == "length"
    assert max(len(step) for step in rig.model.steps) > 8
    rig.assert_clean()


def test_steps_keep_the_token_budget_and_the_grid():
    rig = Rig()
    for prompt in prompts(40, 2):
        rig.add(prompt, max_tokens=8)
    rig.run()
    sizes = [sum(len(chunk.tokens) for chunk in step) for step in rig.model.steps]
    assert max(sizes) <= CONFIG.step_tokens
    assert sum(sizes) / len(sizes) > CONFIG.step_tokens / 4
    for step in rig.model.steps:
        for chunk in step:
            assert len(chunk.tokens) <= GRID
            assert len(chunk.blocks) == -(-(chunk.start + len(chunk.tokens)) // BLOCK)


def test_decoding_goes_on_while_a_long_prompt_is_computed():
    rig = Rig()
    short = rig.add([1], max_tokens=30)
    rig.turn(2)
    rig.add(list(range(90)), max_tokens=2)
    before = len(rig.tokens(short))
    rig.turn(5)
    assert len(rig.tokens(short)) == before + 5


def test_admission_is_first_come_first_served_even_if_a_later_one_would_fit():
    rig = Rig(blocks=8)
    first = rig.add([1] * 12, max_tokens=8)  # 5 blocks
    large = rig.add([2] * 12, max_tokens=8)
    small = rig.add([3], max_tokens=2)  # 1 block
    rig.turn()
    assert (first.state, large.state, small.state) == (
        State.RUNNING,
        State.WAITING,
        State.WAITING,
    )
    rig.run()
    rig.assert_clean()


def test_exactly_the_pool_fits_and_one_more_token_does_not():
    rig = Rig(blocks=3)  # 12 positions; the last output token needs none
    fits = rig.add([1] * 9, max_tokens=4)
    rig.run()
    assert rig.tokens(fits) == expected([1] * 9, 4)
    with pytest.raises(UsageError, match=r"9 tokens and max_tokens is 5.*at most 13 fit"):
        rig.add([1] * 9, max_tokens=5)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "transfer", "role", "says"),
    [
        ([], 1, None, "both", "empty"),
        ([1, 260], 1, None, "both", "outside 0 to 259"),
        ([-1], 1, None, "both", "outside 0 to 259"),
        ([1] * 150, 51, None, "both", "at most 200 fit"),
        ([1], 1, PREFILL_ELSEWHERE, "prefill", "role 'prefill'"),
        ([1], 1, DECODE_ELSEWHERE, "decode", "role 'decode'"),
    ],
)
def test_what_can_never_run_is_refused_before_it_is_queued(
    prompt, max_tokens, transfer, role, says
):
    rig = Rig(role=role)
    with pytest.raises(UsageError, match=says):
        rig.add(prompt, max_tokens, transfer=transfer)
    rig.assert_clean()


def test_a_prefill_needs_room_for_its_prompt_only():
    rig = Rig(blocks=3)
    sequence = rig.add([1] * 12, max_tokens=150, transfer=DECODE_ELSEWHERE)
    rig.turn()
    assert len(sequence.blocks) == 3


def test_a_full_queue_refuses_the_whole_group():
    rig = Rig(waiting_max=3)
    kept = [rig.add([n + 1]) for n in range(2)]
    group = [rig.sequence([7]), rig.sequence([8])]
    rig.scheduler.add(group)
    rig.run()
    for sequence in group:
        error = rig.last(sequence).error
        assert isinstance(error, BusyError)
        assert error.retryable
    assert all(rig.last(sequence).finish for sequence in kept)
    rig.assert_clean()


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_eos_ends_a_sequence_unless_it_is_ignored(ignore_eos):
    rig = Rig(eos_every=3)
    batch = [rig.add(p, max_tokens=20, ignore_eos=ignore_eos) for p in prompts(20, 3)]
    rig.run()
    finishes = {rig.last(sequence).finish for sequence in batch}
    if ignore_eos:
        assert finishes == {"length"}
    else:
        assert "stop" in finishes
        for sequence in batch:
            assert rig.tokens(sequence) == expected(sequence.prompt.tolist(), 20, 3)
    rig.assert_clean()


def test_min_tokens_rules_eos_out_until_then():
    rig = Rig(eos_every=1)  # the model only ever wants to end
    sequence = rig.add([1, 2], max_tokens=9, min_tokens=5)
    rig.run()
    assert len(rig.tokens(sequence)) == 6
    assert 257 not in rig.tokens(sequence)[:5]
    assert rig.last(sequence).finish == "stop"


class Letters:
    def push(self, token, /):
        return chr(token)

    def flush(self):
        return ""


def test_a_stop_string_ends_the_sequence_and_is_not_shown():
    rig = Rig()
    text = "".join(map(chr, expected([5], 20)))
    stop = text[6:9]
    sequence = rig.sequence([5], 20, stop=(stop,))
    sequence.text = TextStream(Letters(), (stop,))
    rig.scheduler.add([sequence])
    rig.run()
    assert "".join(out.text for out in rig.of(sequence)) == text[: text.index(stop)]
    assert rig.last(sequence).finish == "stop"
    assert len(rig.tokens(sequence)) == text.index(stop) + 3


def test_text_that_only_looks_like_a_stop_string_comes_out_later():
    stream = TextStream(Letters(), ("abc", "bd"))
    assert [stream.push(ord(c)) for c in "xabab"] == ["x", "", "", "ab", ""]
    assert stream.flush() == "ab"
    again = TextStream(Letters(), ("abc", "bd"))
    assert "".join(again.push(ord(c)) for c in "xabd") == "xa"
    assert again.is_stopped
    assert again.flush() == ""


def test_logprobs_come_with_each_token():
    rig = Rig()
    sequence = rig.add([1], max_tokens=3, logprobs=2)
    rig.run()
    for out in rig.of(sequence):
        assert out.logprobs is not None
        assert out.logprobs.token == out.tokens[0] == out.logprobs.top[0][0]
        assert len(out.logprobs.top) == 2
        assert -0.1 < out.logprobs.logprob < 0


def test_seeded_sampling_is_the_same_in_any_company():
    alone, crowd = Rig(), Rig()
    crowd_rest = [crowd.add(p, max_tokens=9) for p in prompts(10, 4)]
    runs = []
    for rig in (alone, crowd):
        sequence = rig.sequence(PROMPT, 12, seed=5)
        sequence.params = dataclasses.replace(sequence.params, temperature=4.0)
        rig.scheduler.add([sequence])
        rig.run()
        runs.append(rig.tokens(sequence))
    assert runs[0] == runs[1]
    assert runs[0] != expected(PROMPT, 12)
    assert crowd_rest


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_output_that_is_no_number_fails_that_sequence_alone(bad):
    rig = Rig()
    real = rig.model.forward

    def forward(chunks):
        logits = real(chunks)
        for row, chunk in zip(logits, chunks, strict=True):
            if chunk.tokens[0] == 5 and chunk.start == 0:
                row[3] = bad
        return logits

    rig.scheduler._forward = forward
    broken, fine = rig.add([5, 6]), rig.add([7, 8])
    rig.run()
    assert "not a number" in str(rig.last(broken).error)
    assert rig.tokens(fine) == expected([7, 8], 4)
    rig.assert_clean()


# Hand-offs.


@pytest.mark.parametrize("eos_every", [0, 2])
def test_prefill_here_and_decode_there_equals_one_process(eos_every):
    ferry = CopyConnector()
    prefill, decode = Rig(ferry, eos_every=eos_every), Rig(ferry, eos_every=eos_every)
    for n, prompt in enumerate(prompts(30, 5)):
        first = prefill.add(prompt, max_tokens=1, transfer=DECODE_ELSEWHERE)
        prefill.run()
        answer = prefill.last(first)
        assert answer.finish
        assert counts(prefill) == {State.OFFERED: 1}
        rest = decode.add(prompt, max_tokens=1 + n % 6, transfer=answer.transfer)
        decode.run()
        assert decode.tokens(rest) == expected(prompt, 1 + n % 6, eos_every)
        assert decode.last(rest).finish
        prefill.turn()
        prefill.assert_clean()
        decode.assert_clean()
    assert all(len(c.tokens) == 1 for step in decode.model.steps for c in step)


def test_offered_blocks_stay_pinned_until_the_connector_lets_go():
    rig = Rig(blocks=6)
    sequence = rig.add(PROMPT, transfer=DECODE_ELSEWHERE)  # 5 blocks
    other = rig.add([1] * 8)
    rig.run()
    assert rig.last(sequence).transfer == {
        "do_remote_prefill": True,
        "first": expected(PROMPT, 1)[0],
    }
    assert rig.scheduler.statistics()["blocks_pinned"] == 5
    assert other.state is State.WAITING
    rig.connector.offers[sequence]("delivered")
    rig.run()
    assert rig.tokens(other) == expected([1] * 8, 4)
    rig.assert_clean()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("how", ["raises", "raises a stranger", "fails", "brings no token"])
def test_a_load_that_fails_follows_the_policy(policy, how):
    rig = Rig(on_load_failure=policy)
    if how.startswith("raises"):
        stranger = how == "raises a stranger"
        rig.connector.error = KeyError("x") if stranger else RefusedError("no", code="expired")
    sequence = rig.add(PROMPT, transfer=PREFILL_ELSEWHERE)
    rig.turn()
    if how == "fails":
        rig.connector.claims[sequence](ClaimResult(error=RefusedError("no", code="expired")))
    elif how == "brings no token":
        rig.connector.claims[sequence](ClaimResult())
    rig.run()
    if policy == "recompute":
        assert rig.tokens(sequence) == expected(PROMPT, 4)
        assert rig.scheduler.statistics()["recomputed"] == 1
    else:
        error = rig.last(sequence).error
        wanted = {"raises a stranger": HandoffError, "brings no token": ProtocolError}
        assert isinstance(error, wanted.get(how, RefusedError))
    rig.assert_clean()


def test_a_token_outside_the_vocabulary_is_a_failed_load():
    rig = Rig()
    sequence = rig.add(PROMPT, transfer=PREFILL_ELSEWHERE)
    rig.turn()
    rig.connector.claims[sequence](ClaimResult(first_token=260))
    rig.run()
    assert rig.tokens(sequence) == expected(PROMPT, 4)


@pytest.mark.parametrize("transfer", [DECODE_ELSEWHERE, PREFILL_ELSEWHERE])
def test_an_engine_that_runs_alone_refuses_both_sides(transfer):
    rig = Rig(NullConnector())
    sequence = rig.add(PROMPT, transfer=transfer)
    rig.run()
    assert isinstance(rig.last(sequence).error, UsageError)
    assert "runs alone" in str(rig.last(sequence).error)
    rig.assert_clean()


def test_an_offer_that_fails_is_an_error_and_frees_the_blocks():
    rig = Rig()
    rig.connector.error = RuntimeError("boom")
    sequence = rig.add(PROMPT, transfer=DECODE_ELSEWHERE)
    rig.run()
    assert isinstance(rig.last(sequence).error, HandoffError)
    assert "boom" in str(rig.last(sequence).error)
    rig.assert_clean()


@pytest.mark.parametrize("side", ["offer", "claim"])
def test_a_connector_that_ends_twice_does_no_harm(side, caplog):
    rig = Rig()
    sequence = rig.add(PROMPT, transfer=DECODE_ELSEWHERE if side == "offer" else PREFILL_ELSEWHERE)
    rig.run()
    for _ in range(2):
        if side == "offer":
            rig.connector.offers[sequence]("delivered")
        else:
            rig.connector.claims[sequence](ClaimResult(first_token=97))
    rig.run()
    assert "twice" in caplog.text
    rig.assert_clean()


def test_loading_does_not_hold_up_those_that_run():
    rig = Rig()
    rig.add(PROMPT, transfer=PREFILL_ELSEWHERE)
    other = rig.add([4, 5], max_tokens=6)
    rig.run()
    assert rig.tokens(other) == expected([4, 5], 6)
    assert counts(rig) == {State.LOADING: 1}


# Aborts and deadlines, in every state.


def reach(rig: Rig, state: State):
    """A sequence that is in this state and stays there by itself."""
    if state is State.WAITING:
        rig.add([9] * 8, max_tokens=8 * BLOCK * 4 - 8)  # takes the whole pool
        rig.turn()
        return rig.add(PROMPT)
    if state is State.RUNNING:
        sequence = rig.add(PROMPT, max_tokens=100)
    elif state is State.OFFERED:
        sequence = rig.add(PROMPT, transfer=DECODE_ELSEWHERE)
    else:
        sequence = rig.add(PROMPT, transfer=PREFILL_ELSEWHERE)
    rig.turn(4)
    if state is State.STOPPING:
        rig.clock.advance(rig.config.load_s)
        rig.turn()
    return sequence


LIVE = [state for state in State if state is not State.FINISHED]


def end_by_connector(rig: Rig, sequence, success: bool = False) -> None:
    if sequence in rig.connector.offers:
        rig.connector.offers[sequence]("cancelled")
    if sequence in rig.connector.claims:
        error = None if success else RefusedError("cancelled", code="cancelled")
        token = expected(PROMPT, 1)[0] if success else None
        rig.connector.claims[sequence](ClaimResult(first_token=token, error=error))


@pytest.mark.parametrize("success", [False, True])
@pytest.mark.parametrize("state", LIVE)
def test_abort_in_every_state_frees_everything_once(state, success):
    rig = Rig(blocks=32)
    sequence = reach(rig, state)
    assert sequence.state is state
    told = len(rig.of(sequence))
    for _ in range(2):
        rig.scheduler.abort(sequence)
    rig.turn()
    connector = rig.connector
    if state in (State.OFFERED, State.LOADING, State.STOPPING):
        assert len(sequence.blocks) > 0
        assert sequence.state is State.STOPPING
        asked = connector.withdrawn if state is State.OFFERED else connector.cancelled
        assert asked == [sequence]
        end_by_connector(rig, sequence, success)
    rig.turn()
    assert sequence.state is State.FINISHED
    assert len(sequence.blocks) == 0
    assert len(rig.of(sequence)) == told
    rig.scheduler.abort(sequence)
    rig.run()
    rig.assert_clean()


@pytest.mark.parametrize("connector_fails", [False, True])
def test_who_leaves_the_queue_before_its_claim_declines_the_offer(connector_fails):
    rig = Rig(blocks=8, running_max=1)
    rig.add(PROMPT, max_tokens=4)
    rig.turn()
    waiting = rig.add(PROMPT, transfer=PREFILL_ELSEWHERE)
    rig.turn()
    assert waiting.state is State.WAITING
    rig.connector.error = RuntimeError("broken") if connector_fails else None
    rig.scheduler.abort(waiting)
    assert waiting.state is State.FINISHED
    assert rig.connector.declined == ([] if connector_fails else [PREFILL_ELSEWHERE])
    rig.run()
    rig.assert_clean()


def test_every_state_but_the_last_has_a_deadline():
    assert set(LIMITS) == set(LIVE)
    for name in LIMITS.values():
        with pytest.raises(ConfigError, match=name):
            dataclasses.replace(CONFIG, **{name: 0})


@pytest.mark.parametrize("state", LIVE)
def test_in_every_state_the_deadline_brings_an_end(state):
    """Also with a connector that never answers: the client is, and the engine goes on."""
    rig = Rig(blocks=32)
    sequence = reach(rig, state)
    assert sequence.state is state
    limit_s = getattr(rig.config, LIMITS[state])
    assert sequence.deadline_s - rig.clock.now() == pytest.approx(limit_s)
    rig.clock.advance(limit_s)
    rig.turn()
    assert sequence.state is not state or sequence.is_overdue
    for _ in range(3):
        rig.clock.advance(rig.config.total_s)
        rig.turn()
    last = rig.last(sequence)
    if state is State.OFFERED:
        assert last.transfer
    else:
        assert isinstance(last.error, DeadlineError)
        assert sequence.id in str(last.error)
    held = state in (State.LOADING, State.STOPPING, State.OFFERED)
    assert rig.scheduler.statistics()["overdue"] == int(held)
    assert rig.scheduler.next_deadline_s() is None
    end_by_connector(rig, sequence)
    rig.run()
    rig.assert_clean()


def test_the_engine_goes_on_beside_blocks_that_a_connector_never_leaves():
    rig = Rig(blocks=16)
    reach(rig, State.LOADING)
    rig.clock.advance(1000)
    rig.turn()
    rig.clock.advance(1000)
    rig.turn()
    other = rig.add([3] * 10)
    rig.run()
    assert rig.tokens(other) == expected([3] * 10, 4)


def test_a_load_over_its_deadline_is_cancelled_and_then_recomputed():
    rig = Rig()
    sequence = reach(rig, State.STOPPING)
    assert rig.connector.cancelled == [sequence]
    assert not rig.of(sequence)
    end_by_connector(rig, sequence)
    rig.run()
    assert rig.tokens(sequence) == expected(PROMPT, 4)
    rig.assert_clean()


def test_a_load_over_its_deadline_fails_at_once_where_that_is_the_policy():
    rig = Rig(on_load_failure="fail")
    sequence = reach(rig, State.LOADING)
    rig.clock.advance(rig.config.load_s)
    rig.turn()
    assert isinstance(rig.last(sequence).error, DeadlineError)
    assert rig.scheduler.statistics()["blocks_pinned"] == len(sequence.blocks) > 0
    end_by_connector(rig, sequence, success=True)
    rig.turn()
    rig.assert_clean()


def test_a_success_that_was_on_its_way_when_the_load_was_cancelled_counts():
    rig = Rig()
    sequence = reach(rig, State.STOPPING)
    blocks = sequence.prompt_blocks
    flat = rig.model.kv[blocks].reshape(-1)
    flat[: len(PROMPT)] = PROMPT
    rig.model.kv[blocks] = flat.reshape(-1, BLOCK)
    end_by_connector(rig, sequence, success=True)
    rig.run()
    assert rig.tokens(sequence) == expected(PROMPT, 4)
    assert rig.scheduler.statistics()["recomputed"] == 0
    rig.assert_clean()


def test_fail_all_answers_each_once_and_asks_the_connector_to_stop():
    rig = Rig(blocks=48)
    by_state = {state: reach(rig, state) for state in (State.RUNNING, State.LOADING, State.OFFERED)}
    waiting = rig.add([1] * 60, max_tokens=120)
    rig.turn()
    error = KVFerryError("over")
    rig.scheduler.fail_all(error)
    rig.turn()
    for sequence in (by_state[State.RUNNING], by_state[State.LOADING], waiting):
        assert rig.last(sequence).error is error
    assert rig.connector.withdrawn == [by_state[State.OFFERED]]
    assert rig.connector.cancelled == [by_state[State.LOADING]]
    for sequence in by_state.values():
        end_by_connector(rig, sequence)
    rig.turn()
    rig.assert_clean()


def test_a_connector_that_fails_to_stop_does_not_break_the_step():
    class Broken(ManualConnector):
        def withdraw(self, sequence):
            raise RuntimeError("no")

    rig = Rig(Broken())
    sequence = reach(rig, State.OFFERED)
    rig.scheduler.abort(sequence)
    rig.turn()
    assert sequence.state is State.STOPPING


@pytest.mark.slow
def test_random_life_never_leaks_and_never_lies():
    """Hundreds of sequences with random ends; every token that is seen is the right one."""
    draw = random.Random(11)
    rig = Rig(blocks=40, waiting_max=20)
    ferry: list = []
    everyone = []
    for _ in range(1500):
        if draw.random() < 0.4:
            prompt = [draw.randrange(97) for _ in range(draw.randint(1, 30))]
            transfer = draw.choice([None, None, DECODE_ELSEWHERE, PREFILL_ELSEWHERE])
            everyone.append(rig.add(prompt, draw.randint(1, 9), transfer=transfer))
        if everyone and draw.random() < 0.1:
            rig.scheduler.abort(draw.choice(everyone[-20:]))
        if draw.random() < 0.05:
            rig.clock.advance(draw.choice([1, 15, 60]))
        for calls in (rig.connector.offers, rig.connector.claims):
            for sequence in list(calls):
                if draw.random() < 0.15:
                    ferry.append(sequence)
                    if calls is rig.connector.offers:
                        calls.pop(sequence)("delivered")
                    else:
                        error = RefusedError("no", code="expired")
                        calls.pop(sequence)(ClaimResult(error=error))
        rig.turn()
    for _ in range(50):
        for sequence in list(rig.connector.claims):
            rig.connector.claims.pop(sequence)(ClaimResult(error=HandoffError("end")))
        for sequence in list(rig.connector.offers):
            rig.connector.offers.pop(sequence)("expired")
        rig.turn(10)
    rig.assert_clean()
    complete = 0
    for sequence in everyone:
        tokens = rig.tokens(sequence)
        assert tokens == expected(sequence.prompt.tolist(), len(tokens))
        assert sum(out.is_last for out in rig.of(sequence)) <= 1
        complete += any(out.finish for out in rig.of(sequence))
    assert complete > len(everyone) / 4
    assert len(ferry) > 20
