import threading

import numpy as np
import pytest

from kvferry import registry as module
from kvferry.errors import BoundsError, RegistrationError, StaleRegionError, UsageError
from kvferry.regions import READ_WRITE, Spans


def access(engine, registration, spans, *, generation=1, write=False, token=None):
    region = registration.region
    return engine.registry.access(
        region.region_id, token or region.token, generation, spans, write=write
    )


def test_the_same_memory_is_one_registration_counted(make_engine):
    engine, memory = make_engine(), np.zeros(64, np.uint8)
    first = engine.register(memory)
    assert engine.register(memory) is first
    assert engine.register(memory, access="read-write") is not first
    first.close()
    assert engine.registry.has(first.region.region_id)
    first.close()
    assert not engine.registry.has(first.region.region_id)
    first.close()
    assert engine.register(memory).region.region_id != first.region.region_id


def test_access_is_checked_and_counted(make_engine):
    engine = make_engine()
    owned, whole = engine.allocate(64), Spans.whole(64)
    with access(engine, owned, Spans.of([8, 0], [4, 2])) as memory:
        assert owned.users == 1
        assert memory.nbytes == 6
        assert (memory.addresses - np.uint64(owned.region.address)).tolist() == [8, 0]
    assert owned.users == 0
    for arguments, kind in (
        ({"spans": Spans.whole(65)}, BoundsError),
        ({"spans": whole, "write": True}, BoundsError),
        ({"spans": whole, "generation": 2}, StaleRegionError),
        ({"spans": whole, "token": bytes(16)}, StaleRegionError),
    ):
        with pytest.raises(kind), access(engine, owned, **arguments):
            pytest.fail("it was let in")
    assert owned.users == 0
    writable = engine.allocate(64, access=READ_WRITE)
    with access(engine, writable, whole, write=True) as memory:
        assert memory.nbytes == 64


def test_renewing_refuses_the_old_generation(make_engine):
    engine = make_engine()
    owned = engine.allocate(64)
    owned.renew()
    refused = pytest.raises(StaleRegionError, match=r"in generation 2.*start again")
    with refused, access(engine, owned, Spans.whole(64)):
        pytest.fail("it was let in")
    with access(engine, owned, Spans.whole(64), generation=2):
        pass


def test_closing_waits_for_those_who_are_in(make_engine):
    engine = make_engine()
    owned = engine.allocate(64)
    with access(engine, owned, Spans.whole(64)):
        closing = threading.Thread(target=owned.close)
        closing.start()
        closing.join(0.02)
        assert closing.is_alive()
        assert owned.array is not None
    closing.join(5.0)
    assert not closing.is_alive()
    assert owned.array is None


def test_closing_gives_up_and_can_be_repeated(make_engine, monkeypatch):
    monkeypatch.setattr(module, "DEREGISTER_S", 0.01)
    engine = make_engine()
    owned = engine.allocate(64)
    with access(engine, owned, Spans.whole(64)):
        for _ in range(2):
            with pytest.raises(RegistrationError, match="do not free its memory"):
                owned.close()
        with pytest.raises(StaleRegionError), access(engine, owned, Spans.whole(64)):
            pytest.fail("it was let in")
    owned.close()
    assert owned.array is None


def test_the_engine_frees_what_could_not_be_closed(make_engine, monkeypatch):
    monkeypatch.setattr(module, "DEREGISTER_S", 0.01)
    engine = make_engine()
    owned = engine.allocate(64)
    with access(engine, owned, Spans.whole(64)), pytest.raises(RegistrationError):
        owned.close()
    engine.close()
    assert owned.memory.is_closed


def test_bad_arguments(make_engine):
    engine = make_engine()
    with pytest.raises(UsageError, match="access='all'"):
        engine.allocate(64, access="all")
    with pytest.raises(UsageError):
        engine.allocate(0)
    with pytest.raises(UsageError):
        engine.register(np.zeros((4, 4), np.uint8)[:, 1])
    with pytest.raises(UsageError):
        engine.register(object())
