from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from kvferry.engines.reference.safetensors_file import open_tensors
from kvferry.errors import ConfigError

from . import checkpoints

VALUES = {
    "a": np.array([[1.0, -0.5], [2.0, 0.25]], dtype=np.float32),
    "b": np.array([3.0], dtype=np.float32),
}


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_values_come_back_as_float32(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.safetensors"
    checkpoints.write_safetensors(path, VALUES, kind)
    read = {name: get() for name, get in open_tensors(path).items()}
    assert set(read) == {"a", "b"}
    for name, value in VALUES.items():
        assert read[name].dtype == np.float32
        np.testing.assert_array_equal(read[name], value)


def test_agrees_with_the_safetensors_package(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "x.safetensors"
    package.save_file(VALUES, path)
    np.testing.assert_array_equal(open_tensors(path)["a"](), VALUES["a"])


def test_other_types_are_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    checkpoints.write_safetensors(path, VALUES, "I32")
    with pytest.raises(ConfigError, match=r"'a'.*is I32"):
        open_tensors(path)["a"]()


def test_every_cut_of_a_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    checkpoints.write_safetensors(path, {"b": VALUES["b"]})
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"x\.safetensors"):
            open_tensors(path)["b"]()


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]},
        {"dtype": "F32", "shape": [1]},
        [],
    ],
)
def test_lying_headers_are_errors(tmp_path: Path, entry: object) -> None:
    path = tmp_path / "x.safetensors"
    text = json.dumps({"b": entry}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    with pytest.raises(ConfigError, match="'b'"):
        open_tensors(path)["b"]()
