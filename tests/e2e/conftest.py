"""Right answers, learned once from an engine that runs alone; and nothing left in this process."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import pytest

from kvferry.launcher import Fleet
from kvferry.testing.load import Known, learn, make_questions


@pytest.fixture(scope="session")
def known() -> list[Known]:
    with Fleet("tiny", prefill=0) as alone:
        return asyncio.run(learn(alone.router_url, make_questions(60, seed=11)))


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    before = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    yield
    left = set(threading.enumerate()) - before[0]
    assert not left, f"threads left over: {left}"
    assert len(os.listdir("/proc/self/fd")) <= before[1], "descriptors left over"
