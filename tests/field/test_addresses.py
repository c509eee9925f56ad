"""Kinds of fault around several addresses of one engine, some of which lead nowhere."""

from __future__ import annotations

import socket

import pytest

from faults.helpers import wait_until
from kvferry.handoff import PARAMS_KEY
from kvferry.testing import FakeClock

CONNECT_S = 4.0


class Nowhere:
    """Addresses that do not lead to the engine: one that refuses, one that swallows packets."""

    def __init__(self) -> None:
        self._full = socket.create_server(("127.0.0.1", 0), backlog=0)
        self._waiting = []
        for _ in range(4):
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(self._full.getsockname())
            self._waiting.append(sock)
        self.silent = f"tcp://127.0.0.1:{self._full.getsockname()[1]}"
        with socket.create_server(("127.0.0.1", 0)) as closed:
            self.refusing = f"tcp://127.0.0.1:{closed.getsockname()[1]}"

    def close(self) -> None:
        for sock in [self._full, *self._waiting]:
            sock.close()


@pytest.fixture
def nowhere():
    made = Nowhere()
    yield made
    made.close()


@pytest.mark.parametrize("kind", ["refusing", "silent"])
@pytest.mark.parametrize("where", ["first", "last"])
def test_the_address_that_works_is_found_in_any_order(make_side, nowhere, kind, where):
    clock = FakeClock()
    prefill = make_side("prefill", "tcp")
    decode = make_side("decode", "tcp", clock=clock, connect_s=CONNECT_S, lost_s=100.0)
    offer = prefill.offer()
    good, bad = prefill.engine.addresses[1], getattr(nowhere, kind)
    offer.params[PARAMS_KEY]["addresses"] = [bad, good] if where == "first" else [good, bad]
    claimed = decode.claim(offer)
    if (kind, where) == ("silent", "first"):
        wait_until(lambda: decode.engine.connections._dialling, "it does not dial")
        clock.advance(CONNECT_S / 2)
    assert claimed.one().error is None


def test_an_address_that_leads_nowhere_does_not_harm_a_connection_that_is_there(make_side, nowhere):
    prefill, decode = make_side("prefill", "tcp"), make_side("decode", "tcp")
    assert decode.claim(prefill.offer()).one().error is None
    (before,) = decode.engine.connections.open_peers()
    offer = prefill.offer()
    offer.params[PARAMS_KEY]["addresses"] = [nowhere.silent, nowhere.refusing]
    assert decode.claim(offer).one().error is None
    assert decode.engine.connections.open_peers() == [before]


def test_all_addresses_that_failed_are_named(make_side, nowhere):
    prefill, decode = make_side("prefill", "tcp"), make_side("decode", "tcp", connect_s=0.2)
    offer = prefill.offer()
    offer.params[PARAMS_KEY]["addresses"] = [nowhere.silent, nowhere.refusing]
    text = str(decode.claim(offer).one().error)
    assert nowhere.silent in text
    assert nowhere.refusing in text
