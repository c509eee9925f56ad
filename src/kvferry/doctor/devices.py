"""Looks at the GPUs, in a process of its own: a driver that hangs or crashes must not take the
doctor with it. ``python -m kvferry.doctor.devices`` prints one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry.doctor.records import DeviceFacts, Gpu, PeerClaim
from kvferry.memory.cuda_driver import CudaDriver, driver
from kvferry.memory.devices import Devices
from kvferry.trials.cache import driver_version

LOOK_S = 30.0
KERNEL_LIST = Path("/proc/driver/nvidia/gpus")


def look_in_child(command: tuple[str, ...] = (), limit_s: float = LOOK_S) -> DeviceFacts:
    """The GPUs as another process of this one's environment sees them. Never raises."""
    command = command or (sys.executable, "-m", "kvferry.doctor.devices")
    nothing = DeviceFacts(
        driver=driver_version(), visible=os.environ.get("CUDA_VISIBLE_DEVICES"), gpus=_of_kernel()
    )
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, check=False
        )
        return from_json(json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        why = f"the GPU driver did not answer within {limit_s:g} s"
    except (ValueError, TypeError, KeyError):
        words = done.stderr.decode(errors="replace").strip().splitlines()
        why = f"looking for GPUs ended with status {done.returncode}: {words[-1] if words else ''}"
    return dataclasses.replace(nothing, missing=why)


def look(load: Callable[[], CudaDriver] = driver) -> DeviceFacts:
    """The GPUs as this process sees them."""
    facts = DeviceFacts(driver=driver_version(), visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
    devices, named = Devices(load), _of_kernel()
    try:
        missing = devices.missing()
        if missing:
            return dataclasses.replace(facts, missing=missing, gpus=named)
        cuda = load()
        gpus = tuple(
            Gpu(found.uuid, found.name, found.ordinal, found.nbytes, found.bus)
            for found in cuda.devices()
        )
        uuids = [gpu.uuid for gpu in gpus]
        claims = tuple(
            PeerClaim(a, b, devices.can_reach(a, b)) for a in uuids for b in uuids if a != b
        )
        hidden = tuple(gpu for gpu in named if gpu.uuid not in uuids)
        return dataclasses.replace(facts, cuda=cuda.version(), gpus=gpus + hidden, claims=claims)
    finally:
        devices.close()


def _of_kernel() -> tuple[Gpu, ...]:
    """The GPUs that the kernel's module names, whatever CUDA shows to this process."""
    found = []
    try:
        for path in sorted(KERNEL_LIST.glob("*/information")):
            text = path.read_text(errors="replace")
            facts = dict(re.findall(r"^([^:\n]+):[ \t]*(\S.*?)\s*$", text, re.MULTILINE))
            if facts.get("GPU UUID", "").startswith("GPU-") and "?" not in facts["GPU UUID"]:
                bus = facts.get("Bus Location", "")
                found.append(Gpu(facts["GPU UUID"], facts.get("Model", "GPU"), bus=bus))
    except OSError:
        return ()
    return tuple(found)


def from_json(data: dict[str, Any]) -> DeviceFacts:
    """The counterpart of dataclasses.asdict. Raises TypeError or KeyError."""
    gpus = tuple(Gpu(**item) for item in data["gpus"])
    claims = tuple(PeerClaim(**item) for item in data["claims"])
    return DeviceFacts(**{**data, "gpus": gpus, "claims": claims})


def main() -> None:
    """Entry point of the process."""
    out = os.dup(1)
    os.dup2(2, 1)  # What a library prints must not look like an answer.
    os.write(out, json.dumps(dataclasses.asdict(look())).encode())


if __name__ == "__main__":
    main()
