import logging
import threading

import pytest

from kvferry.deferring import DeferringLock


def test_actions_run_in_order_when_the_outermost_lock_is_free():
    lock, done = DeferringLock(), []

    def first():
        free = []
        other = threading.Thread(target=lambda: free.append(lock._lock.acquire(timeout=0)))
        other.start()
        other.join()
        done.append(free)

    with lock:
        lock.later(first)
        with lock:
            lock.later(lambda: done.append(2))
        assert done == []
    assert done == [[True], 2]


def test_actions_run_also_when_the_body_fails(caplog):
    lock, done = DeferringLock(), []

    def fail():
        with lock:
            lock.later(lambda: 1 / 0)
            lock.later(lambda: done.append(1))
            raise KeyError

    with caplog.at_level(logging.ERROR, "kvferry"), pytest.raises(KeyError):
        fail()
    assert done == [1]
    assert any("a callback failed" in text for text in caplog.messages)
