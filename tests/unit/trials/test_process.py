"""The far process: calls, errors, and the ways it can end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from kvferry.errors import KVFerryError
from kvferry.trials.attempt import FarEnded
from kvferry.trials.process import FarProcess, how_it_ended

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def far() -> Iterator[FarProcess]:
    far = FarProcess(60.0)
    yield far
    far.close()


def test_calls_reach_the_engine_there(far: FarProcess) -> None:
    address, ref = far.open(["tcp"], "host", 1 << 16)
    assert address.startswith(("tcp://", "unix:"))
    assert len(bytes.fromhex(ref)) > 8
    far.fill(1 << 16, 4096)
    far.wipe(1 << 16)
    assert far.compare(1 << 16, 4096) == "reported success and moved nothing"
    far.shut()


def test_an_error_there_is_an_error_here_and_the_process_goes_on(far: FarProcess) -> None:
    with pytest.raises(KVFerryError, match="the other end: ConfigError: there is no transport"):
        far.open(["nonsense"], "host", 1 << 16)
    far.shut()


def test_its_end_is_told() -> None:
    far = FarProcess(60.0)
    far.shut()
    os.kill(far.pid, signal.SIGKILL)
    with pytest.raises(FarEnded, match="SIGKILL"):
        far.shut()
    far.close()


@pytest.mark.parametrize(
    ("status", "words"), [(0, "exit status 0"), (-11, "SIGSEGV"), (-99, "signal 99")]
)
def test_exit_statuses_have_words(status: int, words: str) -> None:
    assert how_it_ended(status) == words
