"""The checks find what they are for: transports that are broken on purpose."""

import threading

import pytest

from kvferry.errors import KVFerryError
from kvferry.testing import ConformanceError, check_transport, conformance, pairs
from kvferry.transports import mapped
from kvferry.transports.base import Operation, RemoteRegion
from kvferry.transports.inproc import InprocTransport
from kvferry.transports.staged import StagedTransport


class OffByOne(InprocTransport):
    """Reads from one byte too far."""

    def map(self, remote: RemoteRegion, *, writable: bool) -> mapped.Mapping:
        made = super().map(remote, writable=writable)
        made.address += 1
        return made


class Deaf(InprocTransport):
    """Does not look at aborts and deadlines."""

    def abort(self, op: Operation, error: KVFerryError) -> None:
        return None

    def _check(self, op: Operation, services: object) -> None:
        return None


class Littering(InprocTransport):
    """Leaves a thread behind."""

    over = threading.Event()

    def open(self, services: object) -> None:
        super().open(services)
        threading.Thread(target=self.over.wait, name="kvferry-litter", daemon=True).start()


class Blurting(InprocTransport):
    """Reports success before anything was copied."""

    def submit(self, op: Operation) -> None:
        self._services.complete(op, op.nbytes, None)


@pytest.mark.parametrize(
    ("make", "check"),
    [
        (OffByOne, conformance.check_sizes),
        (OffByOne, conformance.check_scattered),
        (Deaf, conformance.check_deadline),
        (Blurting, conformance.check_sizes),
    ],
)
def test_a_broken_transport_is_found(make, check):
    with pytest.raises(AssertionError):
        conformance.run_check(check, make)


def test_a_thread_left_behind_is_found(monkeypatch):
    monkeypatch.setattr(pairs.Snapshot.leaked, "__defaults__", (0.05,))
    with pytest.raises(AssertionError, match="kvferry-litter"):
        conformance.run_check(conformance.check_bounds, Littering)
    Littering.over.set()


def test_the_report_names_what_failed(monkeypatch):
    monkeypatch.setattr(conformance, "CHECKS", (conformance.check_bounds, conformance.check_sizes))
    with pytest.raises(ConformanceError, match=r"FAILED sizes: [^!]*wrong from byte"):
        check_transport(OffByOne, faults=False)
    report = check_transport(InprocTransport, skip={"bounds": "for this test"}, faults=False)
    assert report.passed == ["sizes"]
    assert report.skipped == {"bounds": "for this test"}


def test_unknown_memory_is_refused():
    with pytest.raises(ValueError, match="plain"):
        check_transport(InprocTransport, local="gold")


def test_two_processes_need_a_class_that_can_be_found():
    with pytest.raises(ValueError, match="import"):
        check_transport(lambda: StagedTransport(), processes=2)
    with pytest.raises(ValueError, match="one process"):
        check_transport(InprocTransport, processes=2)
    with pytest.raises(ValueError, match="1 or 2"):
        check_transport(StagedTransport, processes=3)


@pytest.mark.slow
def test_a_report_of_two_processes(monkeypatch):
    rows = tuple(row for row in conformance.FAULT_CHECKS if row.fault == "truncate")
    monkeypatch.setattr(conformance, "CHECKS", (conformance.check_cut_differently,))
    monkeypatch.setattr(conformance, "FAULT_CHECKS", rows)
    report = check_transport(StagedTransport, remote="plain", processes=2)
    assert report.passed == ["cut_differently", "fault_truncate"]


@pytest.mark.slow
def test_an_engine_left_open_in_the_other_process_is_found(children, monkeypatch):
    look = "result = hosted._before.leaked(0.05)"
    monkeypatch.setattr(pairs.FarChild, "close", lambda _: None)
    monkeypatch.setattr(pairs.FarChild, "leaked", lambda far: far.call(look))
    with pytest.raises(AssertionError, match="left behind in the other process"):
        conformance.run_check(
            conformance.check_cut_differently, StagedTransport, child=children["staged"]
        )
    children["staged"].run("hosted.close()")
