from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from kvferry.engines.reference.gguf_file import GGUFFile, bf16_to_float32
from kvferry.errors import ConfigError

from . import checkpoints


def one(tmp_path: Path, kind: int, shape: tuple[int, ...], raw: bytes) -> GGUFFile:
    path = checkpoints.write_gguf(tmp_path / "one.gguf", {"a": 1}, {"t": (kind, shape, raw)})
    return GGUFFile(path)


def test_metadata_of_all_types(tmp_path: Path) -> None:
    given = {"n": 7, "x": 0.5, "yes": True, "s": "tëxt", "list": [1, 2], "texts": ["a", ""]}
    file = GGUFFile(checkpoints.write_gguf(tmp_path / "m.gguf", given, {}))
    assert file.metadata == given


def test_plain_types(tmp_path: Path) -> None:
    values = np.array([[1.5, -2.0, 0.25], [0.0, 3.0, -0.125]], dtype=np.float32)
    for kind, name in ((0, "F32"), (1, "F16"), (30, "BF16")):
        read = one(tmp_path, kind, (2, 3), checkpoints.encoded(values, name)).tensor("t")
        assert read.dtype == np.float32
        np.testing.assert_array_equal(read, values)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q6_K"])
def test_block_types_agree_with_the_gguf_package(tmp_path: Path, name: str) -> None:
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType[name]
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(3).integers(0, 60, (2, 512 // elements * nbytes), dtype=np.uint8)
    expected = gguf.quants.dequantize(raw, kind)
    read = one(tmp_path, int(kind), (2, 512), raw.tobytes()).tensor("t")
    np.testing.assert_array_equal(read, expected)
    assert np.count_nonzero(read) > 100


def test_rare_type_without_the_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvferry\[reference\]'"):
        one(tmp_path, 14, (256,), b"\0" * 210).tensor("t")


def test_unknown_type_and_missing_tensor(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = one(tmp_path, 999, (1,), b"\0" * 4)
    with pytest.raises(ConfigError, match="999"):
        file.tensor("t")
    with pytest.raises(ConfigError, match="no tensor 'u'"):
        file.tensor("u")


def test_every_cut_of_a_file_is_an_error(tmp_path: Path) -> None:
    whole = checkpoints.write_gguf(
        tmp_path / "w.gguf", {"k": "v", "l": ["a", "b"]}, {"t": (0, (2, 2), b"\1" * 16)}
    ).read_bytes()
    path = tmp_path / "cut.gguf"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError):
            GGUFFile(path).tensor("t")


def test_lying_counts_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "lie.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + checkpoints.gguf_string("k")
    for value in (
        struct.pack("<IIQ", 9, 4, 1 << 60),
        struct.pack("<IIQ", 9, 8, 1 << 60),
        struct.pack("<IIQ", 9, 9, 1),
        struct.pack("<IQ", 8, 1 << 60),
        struct.pack("<I", 99),
    ):
        path.write_bytes(head + value)
        with pytest.raises(ConfigError, match=r"lie\.gguf"):
            GGUFFile(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 9, 0, 0))
    with pytest.raises(ConfigError, match="version 9"):
        GGUFFile(path)
    path.write_bytes(b"NOPE" + bytes(20))
    with pytest.raises(ConfigError, match="not a GGUF"):
        GGUFFile(path)


def test_bf16_is_the_upper_half_of_float32() -> None:
    raw = np.array([0x3F80, 0xC000, 0x7F80], dtype="<u2").view(np.uint8)
    assert bf16_to_float32(raw).tolist() == [1.0, -2.0, np.inf]
