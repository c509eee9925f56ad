import logging
import threading

import pytest

from kvferry.errors import BusyError, ClosedError
from kvferry.movers import Movers


@pytest.fixture
def make_movers():
    made = []

    def make(threads=2, waiting_max=4):
        made.append(Movers("test", threads=threads, waiting_max=waiting_max))
        return made[-1]

    yield make
    for movers in made:
        movers.close()


def names():
    return [t.name for t in threading.enumerate() if t.name.startswith("kvferry-test-mover")]


def test_threads_start_with_work_and_never_more_than_allowed(make_movers):
    movers, done, go = (
        make_movers(threads=2, waiting_max=100),
        threading.Semaphore(0),
        threading.Event(),
    )
    assert names() == []
    for _ in range(10):
        movers.run(lambda: (go.wait(5.0), done.release()))
    assert len(names()) == 2
    go.set()
    assert all(done.acquire(timeout=5.0) for _ in range(10))


def test_all_threads_can_be_started_before_there_is_work(make_movers, monkeypatch):
    make_movers(threads=3).start()
    assert len(names()) == 3
    movers = make_movers(threads=2)

    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        movers.start()
        with pytest.raises(BusyError, match="no thread can be started"):
            movers.run(lambda: None)
    done = threading.Event()
    movers.run(done.set)
    assert done.wait(5.0)


def test_the_queue_is_bounded(make_movers):
    movers, go, began = make_movers(threads=1, waiting_max=2), threading.Event(), threading.Event()
    movers.run(lambda: (began.set(), go.wait(5.0)))
    assert began.wait(5.0)
    movers.run(go.wait)
    movers.run(go.wait)
    with pytest.raises(BusyError, match="2 copies wait already; retry"):
        movers.run(go.wait)
    go.set()


def test_closing_finishes_what_waits(make_movers):
    movers, done = make_movers(threads=1, waiting_max=100), []
    for number in range(20):
        movers.run(lambda number=number: done.append(number))
    movers.close()
    assert done == list(range(20))
    with pytest.raises(ClosedError):
        movers.run(lambda: None)


def test_work_that_fails_does_not_end_the_thread(make_movers, caplog):
    movers, done = make_movers(threads=1), threading.Event()
    with caplog.at_level(logging.ERROR, "kvferry"):
        movers.run(lambda: 1 / 0)
        movers.run(done.set)
        assert done.wait(5.0)
    assert any("mover's work failed" in text for text in caplog.messages)


def test_no_thread_to_be_had(make_movers, monkeypatch):
    movers = make_movers()

    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(BusyError, match="can't start new thread; raise the limit"):
        movers.run(lambda: None)
    monkeypatch.undo()
    done = threading.Event()
    movers.run(done.set)
    assert done.wait(5.0)


def test_closing_from_a_mover_does_not_wait_for_itself(make_movers):
    movers, closed = make_movers(threads=1), threading.Event()
    movers.run(lambda: (movers.close(), closed.set()))
    assert closed.wait(5.0)
