"""The book of trials: what it finds for a pair, and what replaces what."""

from __future__ import annotations

from kvferry.regions import Region
from kvferry.trials.records import Trial, TrialBook, place_of

A = Trial("shm", "pull", "host", "host", at=1.8e9, bytes_per_s=5e9)


def test_a_later_trial_of_the_same_path_replaces_the_earlier_one() -> None:
    later = Trial("shm", "pull", "host", "host", at=1.8e9 + 60, why="brought zeros", is_wrong=True)
    book = TrialBook([A, later])
    assert list(book) == [later]
    assert book.get(A.key) == later
    assert book.between("host", "host")["shm", "pull"].why == "brought zeros"


def test_only_trials_between_the_same_places_count() -> None:
    book = TrialBook([A])
    assert dict(book.between("host", "GPU-1")) == {}
    tried = book.between("host", "host")["shm", "pull"]
    assert (tried.bytes_per_s, tried.why, tried.day[:5]) == (5e9, "", "2027-")


def test_a_region_lies_on_its_device_or_in_host_memory() -> None:
    facts = {"region_id": 1, "address": 4096, "nbytes": 1, "generation": 0, "token": b""}
    assert place_of(Region(kind="host", device="", **facts)) == "host"  # type: ignore[arg-type]
    assert place_of(Region(kind="cuda", device="GPU-1", **facts)) == "GPU-1"  # type: ignore[arg-type]
