import threading

import pytest

from kvferry.errors import RegistrationError, StaleRegionError
from kvferry.regions import Region
from kvferry.transports.base import RemoteRegion
from kvferry.transports.inproc import InprocTransport, _Directory

REGION = Region(1, "host", "", 4096, 64, 1, b"t" * 16)


def described(region, **changes):
    facts = {
        "peer": b"p" * 16,
        "region_id": region.region_id,
        "kind": "host",
        "device": "",
        "nbytes": region.nbytes,
        "generation": 1,
        "token": region.token,
        "access": "read",
        "exports": {},
    }
    return RemoteRegion(**{**facts, **changes})


def test_an_address_is_given_for_the_described_region_only():
    directory = _Directory()
    number = directory.add(REGION)
    assert directory.address(number, described(REGION)) == 4096
    for wrong in (
        (number + 1, described(REGION)),
        (number, described(REGION, token=bytes(16))),
        (number, described(REGION, nbytes=65)),
    ):
        with pytest.raises(StaleRegionError):
            directory.address(*wrong)


def test_removing_waits_for_copies_and_lets_none_begin():
    directory = _Directory()
    number = directory.add(REGION)
    directory.enter(number)
    assert not directory.remove(number, 0.0)
    with pytest.raises(StaleRegionError):
        directory.enter(number)
    ended = []
    waiting = threading.Thread(target=lambda: ended.append(directory.remove(number, 5.0)))
    waiting.start()
    directory.exit(number)
    waiting.join(5.0)
    assert ended == [True]


def test_deregistering_under_a_copy_is_refused_and_can_be_repeated(monkeypatch):
    monkeypatch.setattr("kvferry.transports.inproc.DEREGISTER_S", 0.0)
    transport = InprocTransport()
    export = transport.export(REGION, -1)
    mapping = transport.map(described(REGION, exports={"inproc": export}), writable=False)
    mapping.enter()
    with pytest.raises(RegistrationError, match="do not free its memory"):
        transport.deregister(REGION)
    mapping.exit()
    transport.deregister(REGION)
    transport.deregister(REGION)
