"""Reading a GGUF file: its metadata and its tensors as float32.

The file's tables are read here, because that takes a tenth of a second where a vocabulary goes
through a general reader in five. The common tensor types are expanded here too; the rest is
left to the ``gguf`` package.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.errors import ConfigError

Floats = npt.NDArray[np.float32]
_Bytes = npt.NDArray[np.uint8]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_DIMENSIONS_MAX = 4
_ALIGNMENT = 32


class GGUFFile:
    """One GGUF file, little-endian, version 2 or 3. Reads tables at once, tensors on demand.

    metadata: key to value: int, float, bool, str or a list of these.
    tensors: name to shape, rows first (the file lists the fastest axis first).

    Raises ConfigError when the file cannot be opened, is no GGUF file or is cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the model file {path}: {error}") from error
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._at = 0
        try:
            self._read_tables()
        except (struct.error, UnicodeDecodeError, IndexError) as error:
            raise ConfigError(
                f"the model file {path} is cut short or damaged near byte {self._at}: {error}"
            ) from error

    def tensor(self, name: str) -> Floats:
        """float32 tensor, rows first, C-contiguous. Raises ConfigError when it is not there."""
        if name not in self.tensors:
            raise ConfigError(f"the model file {self.path} has no tensor {name!r}")
        shape = self.tensors[name]
        kind, at = self._places[name]
        elements = math.prod(shape)
        block_elements, block_bytes, expand = _kind(kind, name)
        nbytes = elements // block_elements * block_bytes
        if elements % block_elements or at + nbytes > len(self._data):
            raise ConfigError(
                f"tensor {name!r} of {self.path} does not fit: shape {list(shape)} "
                f"at byte {at} of {len(self._data)}"
            )
        raw = np.frombuffer(self._data, dtype=np.uint8, count=nbytes, offset=at)
        return expand(raw.reshape(-1, block_bytes)).reshape(shape)

    def _read_tables(self) -> None:
        if self._data[:4] != _MAGIC:
            raise ConfigError(f"{self.path} is not a GGUF file")
        self._at = 4
        version, tensor_count, key_count = self._take("IQQ")
        if version not in _VERSIONS:
            raise ConfigError(f"{self.path} is GGUF version {version}, known are {_VERSIONS}")
        for _ in range(key_count):
            key = self._string()
            self.metadata[key] = self._value(self._take("I")[0])
        places = [self._tensor_place() for _ in range(tensor_count)]
        alignment = int(self.metadata.get("general.alignment", _ALIGNMENT))
        base = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in places:
            self.tensors[name] = shape
            self._places[name] = (kind, base + offset)

    def _take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{layout}", self._data, self._at)
        self._at += struct.calcsize(f"<{layout}")
        return values

    def _string(self) -> str:
        (length,) = self._take("Q")
        raw = self._data[self._at : self._at + length]
        if len(raw) != length:
            raise IndexError(f"a string of {length} bytes does not fit")
        self._at += length
        return raw.decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item_kind, count = self._take("IQ")
            if item_kind in _SCALARS:
                return list(self._take(f"{count}{_SCALARS[item_kind]}"))
            if item_kind == _STRING:
                return [self._string() for _ in range(count)]
            raise IndexError(f"an array of items of type {item_kind}")
        if kind not in _SCALARS:
            raise IndexError(f"unknown value type {kind}")
        return self._take(_SCALARS[kind])[0]

    def _tensor_place(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (dimensions,) = self._take("I")
        if dimensions > _DIMENSIONS_MAX:
            raise IndexError(f"tensor {name!r} has {dimensions} dimensions")
        shape = self._take(f"{dimensions}Q")
        kind, offset = self._take("IQ")
        return name, tuple(reversed(shape)), kind, offset


def _kind(kind: int, name: str) -> tuple[int, int, Callable[[_Bytes], Floats]]:
    """(elements in a block, bytes of a block, expand uint8[blocks, bytes] to float32)."""
    known = _KINDS.get(kind)
    if known is not None:
        return known
    try:
        import gguf
        from gguf.quants import dequantize
    except ImportError as error:
        raise ConfigError(
            f"tensor {name!r} has GGUF type {kind}, which needs a package that is not installed",
            fix="pip install 'kvferry[reference]'",
        ) from error
    try:
        known_kind = gguf.GGMLQuantizationType(kind)
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[known_kind]
    except (ValueError, KeyError) as error:
        raise ConfigError(f"tensor {name!r} has the unknown GGUF type {kind}") from error
    return block_elements, block_bytes, lambda raw: dequantize(raw.reshape(-1), known_kind)


def _f32(raw: _Bytes) -> Floats:
    return raw.view("<f4").astype(np.float32)


def _f16(raw: _Bytes) -> Floats:
    return raw.view("<f2").astype(np.float32)


def bf16_to_float32(raw: _Bytes) -> Floats:
    """Widen little-endian bfloat16, given as bytes: the upper half of a float32."""
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q8_0(raw: _Bytes) -> Floats:
    """32 signed bytes with one half-precision scale in front."""
    values = raw[:, 2:].view(np.int8).astype(np.float32)
    values *= _f16(np.ascontiguousarray(raw[:, :2]))
    return values


def _q4_0(raw: _Bytes) -> Floats:
    """32 values of 4 bits around 8, with one half-precision scale in front."""
    values = _nibbles(raw[:, 2:])
    values -= np.float32(8)
    values *= _f16(np.ascontiguousarray(raw[:, :2]))
    return values


def _q4_1(raw: _Bytes) -> Floats:
    """32 values of 4 bits, with a half-precision scale and offset in front."""
    values = _nibbles(raw[:, 4:])
    scales = _f16(np.ascontiguousarray(raw[:, :4]))
    values *= scales[:, :1]
    values += scales[:, 1:]
    return values


def _nibbles(packed: _Bytes) -> Floats:
    """uint8[n, 16] to float32[n, 32]: all low halves, then all high halves."""
    values = np.empty((len(packed), 32), dtype=np.float32)
    values[:, :16] = packed & 15
    values[:, 16:] = packed >> 4
    return values


_KINDS: dict[int, tuple[int, int, Callable[[_Bytes], Floats]]] = {
    0: (1, 4, _f32),
    1: (1, 2, _f16),
    2: (32, 18, _q4_0),
    3: (32, 20, _q4_1),
    8: (32, 34, _q8_0),
    30: (1, 2, bf16_to_float32),
}
