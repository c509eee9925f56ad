"""Kinds of fault between containers of one host: other namespaces of processes and of IPC."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from faults.helpers import MIB, WHOLE
from kvferry.testing import Child

APART = ["unshare", "--ipc", "--pid", "--fork", "--kill-child"]


def can_be_apart():
    if shutil.which("unshare") is None:
        return False
    done = subprocess.run([*APART, "true"], capture_output=True, check=False)
    return done.returncode == 0


class ChildApart(Child):
    """A child in namespaces of its own; it shares files with this process, and nothing else."""

    def __init__(self) -> None:
        program = "from kvferry.testing.child import serve; serve()"
        self._process = subprocess.Popen(
            [*APART, sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._buffer = b""


SETUP = """
from kvferry.config import EngineConfig
from kvferry.engine import Engine
engine = Engine(EngineConfig(name="child", directory={directory!r}))
region = engine.allocate({nbytes})
region.array[:] = 5
result = {{"addresses": engine.addresses, "ref": region.ref.hex()}}
"""


@pytest.mark.slow
@pytest.mark.skipif(not can_be_apart(), reason="namespaces need a right that this user lacks")
@pytest.mark.parametrize("shared", [True, False], ids=["shared directory", "no shared directory"])
def test_memory_is_mapped_across_namespaces_if_a_directory_is_shared(make_engine, tmp_path, shared):
    near = make_engine("near")
    local = near.allocate(MIB)
    with ChildApart() as child:
        directory = tmp_path / "c"
        facts = child.run(SETUP.format(directory=str(directory), nbytes=MIB))
        if not shared:
            directory.rename(tmp_path / "elsewhere")
        remote = near.connect(facts["addresses"][-1]).region(bytes.fromhex(facts["ref"]))
        transfer = near.read(local, WHOLE, remote, WHOLE)
        assert transfer.wait(5.0) == MIB
        assert int(local.array.min()) == 5
        assert transfer.path == ("shm/pull" if shared else "tcp/pull")
        if not shared:
            # Slower, and it says so and what would change it.
            assert "mount" in transfer.plan.explain()
