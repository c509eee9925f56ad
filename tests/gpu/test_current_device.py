"""The caller's current context, as a real driver keeps it."""

from __future__ import annotations

import threading

import pytest

from kvferry import Engine, EngineConfig

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("is_current", [False, True])
def test_the_callers_context_stays_what_it_was(cuda, tmp_path, is_current):
    seen = []

    def work():
        if is_current:
            cuda.use(0)
        seen.append(int(cuda.current()))
        with Engine(EngineConfig(directory=str(tmp_path), transports=("tcp",))) as engine:
            owned = engine.allocate(1 << 20, device="cuda")
            seen.append(int(cuda.current()))
            engine.register((owned.region.address, 4096), kind="cuda").close()
            seen.append(int(cuda.current()))
            owned.close()
            seen.append(int(cuda.current()))
        seen.append(int(cuda.current()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60.0)
    assert len(seen) == 5
    assert len(set(seen)) == 1, seen
    assert bool(seen[0]) == is_current
