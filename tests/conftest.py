"""Fixtures of all tests: engines in a directory of their own, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvferry.config import EngineConfig
from kvferry.engine import Engine
from kvferry.testing.leaks import Snapshot

MakeEngine = Callable[..., Engine]

# What trials on this machine showed must not change what tests see, nor the reverse.
_caches = tempfile.TemporaryDirectory(prefix="kvferry-cache-")
os.environ["XDG_CACHE_HOME"] = _caches.name


@pytest.fixture
def engine_directory(tmp_path: Any) -> Iterator[str]:
    """A directory for Unix sockets; their paths have at most 107 bytes."""
    directory = str(tmp_path)
    if len(directory.encode()) < 80:
        yield directory
        return
    directory = tempfile.mkdtemp(prefix="kvferry-")
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Threads, descriptors, mappings and sockets are the same after a test as before it."""
    directory = ""
    if "engine_directory" in request.fixturenames:
        directory = request.getfixturevalue("engine_directory")
    before = Snapshot.take(directory)
    yield
    left = before.leaked()
    assert not left, f"left behind: {left}"


@pytest.fixture
def make_engine(request: pytest.FixtureRequest, engine_directory: str) -> Iterator[MakeEngine]:
    """``make_engine(name, *transports, clock=, extra=, **settings)``; all are closed at the end.

    Other keywords are settings of EngineConfig.
    """
    # Set up after it, so that engines are closed before it looks.
    request.getfixturevalue("no_leaks")
    engines: list[Engine] = []

    def make(
        name: str = "engine",
        *transports: str,
        clock: Any = None,
        extra: Any = None,
        **settings: Any,
    ) -> Engine:
        settings.setdefault("directory", engine_directory)
        config = EngineConfig(name=name, transports=transports, **settings)
        engines.append(Engine(config, clock=clock, extra=extra))
        return engines[-1]

    yield make
    for engine in reversed(engines):
        engine.close()
