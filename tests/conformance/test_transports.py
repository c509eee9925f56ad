"""Every transport against the public checks, with each kind of memory on each side."""

import pytest

from kvferry.testing import conformance
from kvferry.transports.inproc import InprocTransport
from kvferry.transports.shm import ShmTransport
from kvferry.transports.staged import StagedTransport
from kvferry.transports.tcp import TcpTransport

ROWS = [
    (InprocTransport, "allocated", "allocated"),
    (InprocTransport, "plain", "plain"),
    (ShmTransport, "allocated", "allocated"),
    (ShmTransport, "plain", "allocated"),
    (StagedTransport, "allocated", "allocated"),
    (StagedTransport, "plain", "plain"),
    (TcpTransport, "allocated", "allocated"),
    (TcpTransport, "plain", "plain"),
]
MIXED = [
    (transport, *kinds)
    for transport in (InprocTransport, StagedTransport, TcpTransport)
    for kinds in (("plain", "allocated"), ("allocated", "plain"))
]
CONTENT = [
    conformance.check_sizes,
    conformance.check_scattered,
    conformance.check_cut_differently,
]


def name_of(value: object) -> str:
    return getattr(value, "name", "") or getattr(value, "__name__", str(value))


@pytest.mark.slow
@pytest.mark.parametrize(("make", "local", "remote"), ROWS, ids=name_of)
@pytest.mark.parametrize("check", conformance.CHECKS, ids=name_of)
def test_transport(check, make, local, remote):
    conformance.run_check(check, make, local=local, remote=remote)


@pytest.mark.parametrize(("make", "local", "remote"), MIXED, ids=name_of)
@pytest.mark.parametrize("check", CONTENT, ids=name_of)
def test_mixed_memory(check, make, local, remote):
    conformance.run_check(check, make, local=local, remote=remote)
