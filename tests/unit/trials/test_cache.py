"""The file of trials: what is kept, what is ignored, and what expires."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry import Engine
from kvferry.engine import PROCESS
from kvferry.trials import cache
from kvferry.trials.records import Trial

NOW = 1.8e9
GOOD = Trial("shm", "pull", "host", "host", NOW, 5e9, 1e-4)
HUNG = Trial("tcp", "pull", "host", "host", NOW, why="did not end within 10 s")
ZEROS = Trial("cuda_ipc", "pull", "GPU-1", "GPU-2", NOW, why="brought zeros", is_wrong=True)


def test_results_come_back_and_are_added_to(tmp_path: Path) -> None:
    folder = str(tmp_path / "new" / "folder")
    assert len(cache.load(folder)) == 0
    assert cache.save(folder, [GOOD]) == ""
    assert cache.save(folder, [ZEROS]) == ""
    assert set(cache.load(folder, now=NOW)) == {GOOD, ZEROS}
    assert [path.name for path in Path(folder).iterdir()] == [cache.file_of(folder).name]


def test_failures_expire_but_wrong_bytes_and_success_do_not(tmp_path: Path) -> None:
    text = json.dumps({"trials": [cache.as_json(trial) for trial in (GOOD, HUNG, ZEROS)]})
    cache.file_of(str(tmp_path)).write_text(text)
    late = NOW + cache.FAILURE_AGE_MAX_S
    assert set(cache.load(str(tmp_path), now=late - 1)) == {GOOD, HUNG, ZEROS}
    assert set(cache.load(str(tmp_path), now=late + 1)) == {GOOD, ZEROS}


@pytest.mark.parametrize(
    "change", ["driver_version", "host_id", "__version__"], ids=["driver", "boot", "kvferry"]
)
def test_another_boot_driver_or_version_has_another_file(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.save(str(tmp_path), [GOOD])
    monkeypatch.setattr(cache, change, "9.9" if change == "__version__" else lambda: "other")
    assert len(cache.load(str(tmp_path))) == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"trials": [{}]}',
        '{"trials": 3}',
        json.dumps({"trials": [{**cache.as_json(GOOD), "at": "now"}]}),
        json.dumps({"trials": [{**cache.as_json(GOOD), "bytes_per_s": 0}]}),
        json.dumps({"trials": [{**cache.as_json(GOOD), "is_wrong": 1}]}),
    ],
)
def test_a_file_that_is_no_good_is_ignored_aloud(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.file_of(str(tmp_path)).write_text(text)
    with caplog.at_level(logging.WARNING):
        assert len(cache.load(str(tmp_path))) == 0
    assert "results of trials in" in caplog.text


def test_a_file_that_others_can_write_to_is_not_believed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.save(str(tmp_path), [GOOD])
    os.chmod(cache.file_of(str(tmp_path)), 0o666)
    assert len(cache.load(str(tmp_path))) == 0
    assert "others can write to it" in caplog.text


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    why = cache.save(str(tmp_path / "file" / "folder"), [GOOD])
    assert why.startswith("results of trials cannot be kept in ")


@pytest.mark.parametrize("same_process", [False, True])
def test_engines_plan_by_what_is_kept_for_peers_in_other_processes(
    same_process: bool, make_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    zeros = Trial("shm", "pull", "host", "host", NOW, why="brought zeros", is_wrong=True)
    slow = Trial("tcp", "pull", "host", "host", NOW, 1e9)
    cache.save(str(tmp_path), [zeros, slow])
    near = make_engine("near", "shm", "tcp", cache_dir=str(tmp_path))
    if not same_process:
        PROCESS.renew()
    far = make_engine("far", "shm", "tcp")
    local, owned = near.allocate(4096), far.allocate(4096, access="read-write")
    there = near.connect(far.addresses[0]).region(owned.ref)
    reading, writing = near.plan(local, there), near.plan(local, there, write=True)
    assert writing.paths[0].name == "shm/push"
    if same_process:
        assert reading.paths[0].name == "shm/pull"
    else:
        assert reading.rejected["shm"] == "a trial on 2027-01-15 brought zeros"
        assert reading.paths[0].reason.startswith("1 GB/s in a trial on 2027-01-15")


def test_old_files_go_away(tmp_path: Path) -> None:
    old, new = tmp_path / "trials-a.json", tmp_path / "trials-b.json"
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    cache.save(str(tmp_path), [GOOD])
    assert (old.exists(), new.exists()) == (False, True)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("550.54.15\n", "550.54.15"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.1  Tue\n", "535.1"),
        ("", "none"),
    ],
)
def test_the_driver_version_is_read_from_the_kernel(
    text: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "version").write_text(text)
    names = (str(tmp_path / "missing"), str(tmp_path / "version"))
    monkeypatch.setattr(cache, "_DRIVER_FILES", names)
    assert cache.driver_version() == version
