"""Looking at GPUs: on a fake driver, from the kernel's list, and through a child that fails."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from kvferry.doctor import devices
from kvferry.doctor.devices import from_json, look, look_in_child
from kvferry.doctor.records import Gpu
from kvferry.errors import DeviceError
from kvferry.memory.cuda_driver import CudaDriver
from kvferry.testing.cuda import FakeCuda

INFORMATION = """Model: \t\t NVIDIA H200
IRQ:   \t\t 16
GPU UUID: \t {uuid}
Bus Location: \t 0000:17:00.0
"""
HIDDEN = Gpu("GPU-00000000-0000-0000-0000-000000000009", "NVIDIA H200", bus="0000:17:00.0")


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "KERNEL_LIST", tmp_path)
    for place, uuid in enumerate([HIDDEN.uuid, FakeCuda(1).facts[0].uuid, "GPU-????????"]):
        (tmp_path / str(place)).mkdir()
        (tmp_path / str(place) / "information").write_text(INFORMATION.format(uuid=uuid))


@pytest.mark.usefixtures("kernel")
def test_what_the_driver_says_and_what_it_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    fake = FakeCuda(2)
    facts = look(lambda: fake)
    assert [(gpu.uuid, gpu.ordinal) for gpu in facts.gpus] == [
        (fake.facts[0].uuid, 0),
        (fake.facts[1].uuid, 1),
        (HIDDEN.uuid, -1),
    ]
    assert (facts.visible, facts.missing, facts.cuda) == ("0,1", "", "0.0")
    assert [claim.why_not for claim in facts.claims] == ["", ""]
    fake.peers = False
    assert all("no peer access" in claim.why_not for claim in look(lambda: fake).claims)
    assert from_json(json.loads(json.dumps(dataclasses.asdict(facts)))) == facts


@pytest.mark.usefixtures("kernel")
def test_without_a_driver_the_kernel_still_names_gpus() -> None:
    def refuse() -> CudaDriver:
        raise DeviceError("there is no usable driver")

    facts = look(refuse)
    assert (facts.missing, facts.seen) == ("there is no usable driver", ())
    assert HIDDEN in facts.hidden
    assert look(lambda: FakeCuda(0)).missing == "this process sees no GPU"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import time; time.sleep(30)", "the GPU driver did not answer within 0.3 s"),
        ("import os; os.abort()", "looking for GPUs ended with status -6: "),
        ("raise SystemExit('no luck')", "looking for GPUs ended with status 1: no luck"),
        ("print('{}')", "looking for GPUs ended with status 0: "),
    ],
)
def test_a_child_that_fails_is_a_reason(code: str, why: str) -> None:
    limit_s = 0.3 if "sleep" in code else 30.0
    facts = look_in_child((sys.executable, "-S", "-c", code), limit_s)
    assert (facts.missing, facts.seen) == (why, ())


@pytest.mark.slow
def test_the_real_child_answers() -> None:
    facts = look_in_child()
    assert facts.missing or facts.seen
    assert "looking for GPUs" not in facts.missing
