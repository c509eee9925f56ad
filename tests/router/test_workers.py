"""The table of workers, with a clock that the test moves."""

from collections import Counter

from kvferry.router.workers import Sign, WorkerTable


def table(prefill=0, decode=0):
    made = WorkerTable(
        [f"http://p{i}:1" for i in range(prefill)],
        [f"http://d{i}:1" for i in range(decode)],
        lost_s=5.0,
        now=100.0,
    )
    for worker in made.workers:
        made.observe(worker, Sign.GOOD, "", 100.0)
    return made


def test_the_least_busy_is_chosen():
    made = table(decode=3)
    first, second, third = made.of("decode")
    first.inflight, second.inflight, third.inflight = 2, 1, 3
    assert made.choose("decode") is second


def test_equals_take_turns_whatever_the_candidates():
    made = table(prefill=2, decode=3)
    chosen = Counter()
    for _ in range(30):
        chosen[made.choose("prefill").name] += 1
        chosen[made.choose("decode").name] += 1
    assert chosen == {"p0:1": 15, "p1:1": 15, "d0:1": 10, "d1:1": 10, "d2:1": 10}


def test_the_tried_and_the_down_are_left_out():
    made = table(decode=3)
    first, second, third = made.of("decode")
    made.observe(second, Sign.REFUSED, "gone", 101.0)
    assert made.choose("decode", [first]) is third
    assert made.choose("decode", [first, third]) is None
    assert made.choose("prefill") is None


def test_a_worker_is_down_until_its_first_good_answer():
    made = WorkerTable([], ["http://d:1"], lost_s=5.0, now=0.0)
    (worker,) = made.workers
    assert made.choose("decode") is None
    assert made.observe(worker, Sign.GOOD, "", 1.0).came_up
    assert made.choose("decode") is worker


def test_refusal_is_down_at_once_but_never_loss():
    made = table(decode=1)
    (worker,) = made.workers
    change = made.observe(worker, Sign.REFUSED, "gone", 100.1)
    assert change.went_down
    assert not change.lost
    assert not made.observe(worker, Sign.REFUSED, "gone", 200.0).lost
    assert worker.reason == "gone"


def test_silence_is_loss_after_the_limit_and_not_before():
    made = table(decode=1)
    (worker,) = made.workers
    assert made.observe(worker, Sign.SILENT, "quiet", 104.9) == (False, False, False)
    change = made.observe(worker, Sign.SILENT, "quiet", 105.0)
    assert change.went_down
    assert change.lost


def test_an_unwell_worker_goes_down_but_keeps_its_requests():
    made = table(decode=1)
    (worker,) = made.workers
    assert not made.observe(worker, Sign.UNWELL, "503", 104.0).went_down
    change = made.observe(worker, Sign.UNWELL, "503", 106.0)
    assert change.went_down
    assert not change.lost


def test_silence_after_refusal_is_loss_in_the_end():
    made = table(decode=1)
    (worker,) = made.workers
    made.observe(worker, Sign.REFUSED, "gone", 101.0)
    assert not made.observe(worker, Sign.SILENT, "quiet", 105.9).lost
    assert made.observe(worker, Sign.SILENT, "quiet", 106.0).lost


def test_it_comes_back_by_itself():
    made = table(decode=1)
    (worker,) = made.workers
    made.observe(worker, Sign.SILENT, "quiet", 110.0)
    assert made.choose("decode") is None
    assert made.observe(worker, Sign.GOOD, "", 111.0).came_up
    assert made.choose("decode") is worker
    assert worker.reason == ""


def test_a_health_check_ends_when_silence_becomes_loss():
    made = table(decode=1)
    (worker,) = made.workers
    assert made.patience_s(worker, 100.5, 2.0) == 2.0
    assert made.patience_s(worker, 104.5, 2.0) == 0.5
    assert made.patience_s(worker, 109.0, 2.0) == 2.0
