"""Every transport against the public checks, with each kind of memory on each side, in one process
and in two.
"""

import pytest

from kvferry.testing import conformance
from kvferry.testing.conformance import CHECKS
from kvferry.transports.inproc import InprocTransport
from kvferry.transports.shm import ShmTransport
from kvferry.transports.staged import StagedTransport
from kvferry.transports.tcp import TcpTransport

ROWS = [
    (InprocTransport, "allocated", "allocated"),
    (InprocTransport, "plain", "plain"),
    (ShmTransport, "allocated", "allocated"),
    (StagedTransport, "plain", "plain"),
    (TcpTransport, "plain", "plain"),
]
TWO_PROCESSES = [
    (ShmTransport, "plain", "allocated"),
    (StagedTransport, "allocated", "allocated"),
    (TcpTransport, "allocated", "allocated"),
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
@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_transport(check, make, local, remote):
    conformance.run_check(check, make, local=local, remote=remote)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "local", "remote"), TWO_PROCESSES, ids=name_of)
@pytest.mark.parametrize("check", CHECKS, ids=name_of)
def test_two_processes(check, make, local, remote, children):
    child = children[make.name]
    conformance.run_check(check, make, local=local, remote=remote, child=child)


@pytest.mark.parametrize(("make", "local", "remote"), MIXED, ids=name_of)
@pytest.mark.parametrize("check", CONTENT, ids=name_of)
def test_mixed_memory(check, make, local, remote):
    conformance.run_check(check, make, local=local, remote=remote)
