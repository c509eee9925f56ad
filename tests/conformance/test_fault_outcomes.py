"""Every transport under every fault: the table of right outcomes, in one process and in two; sound
results where a fault must not show; and the next path where there is one.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from kvferry.errors import CorruptError
from kvferry.testing import FAULTS, FaultyTransport, conformance
from kvferry.testing.fault_checks import FAULT_CHECKS, QUICK, attempts, run_fault_check
from kvferry.transports.inproc import InprocTransport
from kvferry.transports.shm import ShmTransport
from kvferry.transports.staged import StagedTransport
from kvferry.transports.tcp import TcpTransport

ALL = [InprocTransport, ShmTransport, StagedTransport, TcpTransport]
ACROSS = ("stall_seen", "drop_completion", "corrupt_seen", "close_midflight")
"""Rows in which the far process has a part."""
MOVING = [
    conformance.check_scattered,
    conformance.check_cut_differently,
    conformance.check_concurrent,
    conformance.check_abort,
    conformance.check_once,
    conformance.check_peer_closes,
    conformance.check_close_midway,
]
"""Checks that move bytes over the path; the others see it refuse."""
PATH_FAULTS = {
    "stall": QUICK,
    "corrupt": {"checksum": "full"},
    "truncate": {},
    "close_midflight": {},
    "fail_at_submit": {},
}
"""Faults after which another path takes over, and the settings with which they are seen."""


class Spare(TcpTransport):
    """A path that ranks last."""

    name = "spare"

    def capabilities(self):
        return replace(super().capabilities(), bytes_per_s=1e3)


def name_of(value: object) -> str:
    return getattr(value, "name", "") or getattr(value, "__name__", str(value))


def test_the_table_has_every_fault():
    assert {row.fault for row in FAULT_CHECKS} == set(FAULTS)


@pytest.mark.slow
@pytest.mark.parametrize("make", ALL, ids=name_of)
@pytest.mark.parametrize("row", FAULT_CHECKS, ids=name_of)
def test_outcome(row, make):
    run_fault_check(row, make)


@pytest.mark.slow
@pytest.mark.parametrize("make", [ShmTransport, StagedTransport, TcpTransport], ids=name_of)
@pytest.mark.parametrize(
    "row", [row for row in FAULT_CHECKS if row.name.removeprefix("fault_") in ACROSS], ids=name_of
)
def test_outcome_in_two_processes(row, make, children):
    run_fault_check(row, make, child=children[make.name])


@pytest.mark.slow
@pytest.mark.parametrize("make", ALL, ids=name_of)
@pytest.mark.parametrize("fault", ["slow", "duplicate_completion"])
@pytest.mark.parametrize("check", MOVING, ids=name_of)
def test_checks_hold_under(fault, check, make):
    wrap = partial(FaultyTransport, fault=fault, pause_s=0.0)
    conformance.run_check(check, make, wrap=wrap)


@pytest.mark.slow
@pytest.mark.parametrize("make", ALL, ids=name_of)
@pytest.mark.parametrize("fault", PATH_FAULTS)
def test_another_path_takes_over(fault, make):
    def check(pair):
        for attempt in attempts(pair):
            error = attempt.end()
            if fault == "corrupt" and attempt.write and error is not None:
                # What has spoilt the memory of a peer is not repeated; the path is demoted only.
                assert isinstance(error, CorruptError)
                continue
            assert error is None, f"{attempt} ended with {error!r}"
            assert attempt.transfer.path.startswith("spare/")
            assert np.array_equal(attempt.target, attempt.source)
        assert pair.transport.hits > 0, "the fault was never met"

    wrap = partial(FaultyTransport, fault=fault)
    conformance.run_check(check, make, wrap=wrap, spare=Spare, **PATH_FAULTS[fault])
