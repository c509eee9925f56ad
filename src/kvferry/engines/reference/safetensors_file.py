"""Reading .safetensors files as float32, without a package: a JSON header, then the bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.engines.reference.gguf_file import bf16_to_float32
from kvferry.engines.reference.rows import Floats
from kvferry.errors import ConfigError

_HEADER_BYTES_MAX = 100 << 20

_TYPES: dict[str, tuple[int, Callable[[Any], Floats]]] = {
    "F32": (4, lambda raw: raw.view("<f4").astype(np.float32)),
    "F16": (2, lambda raw: raw.view("<f2").astype(np.float32)),
    "BF16": (2, bf16_to_float32),
}


def open_tensors(path: Path) -> dict[str, Callable[[], Floats]]:
    """Tensor name to a function that reads it; nothing but the header is read here.

    The functions return float32 arrays of the tensor's shape. Both they and this function raise
    ConfigError, naming the file and the tensor, when the file is damaged or of another type.
    """
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the model file {path}: {error}") from error
    header_bytes = int.from_bytes(data[:8].tobytes(), "little")
    if not 2 <= header_bytes <= min(len(data) - 8, _HEADER_BYTES_MAX):
        raise ConfigError(f"{path} is no safetensors file, or cut short")
    try:
        header: dict[str, Any] = json.loads(data[8 : 8 + header_bytes].tobytes())
    except ValueError as error:
        raise ConfigError(f"the header of {path} is damaged: {error}") from error
    if not isinstance(header, dict):
        raise ConfigError(f"the header of {path} is no JSON object")
    base = 8 + header_bytes

    def reader(name: str, entry: Any) -> Callable[[], Floats]:
        def read() -> Floats:
            try:
                kind, shape = entry["dtype"], [int(count) for count in entry["shape"]]
                start, stop = map(int, entry["data_offsets"])
            except (KeyError, TypeError, ValueError) as error:
                raise ConfigError(f"the entry of tensor {name!r} in {path} is damaged") from error
            if kind not in _TYPES:
                known = ", ".join(_TYPES)
                raise ConfigError(f"tensor {name!r} of {path} is {kind}; supported are {known}")
            element_bytes, widen = _TYPES[kind]
            fits = 0 <= start <= stop <= len(data) - base and min(shape, default=0) >= 0
            if not fits or stop - start != math.prod(shape) * element_bytes:
                raise ConfigError(f"tensor {name!r} of {path} does not fit its place in the file")
            # Tensors may start at any byte; a copy is aligned.
            return widen(np.array(data[base + start : base + stop])).reshape(shape)

        return read

    return {name: reader(name, entry) for name, entry in header.items() if name != "__metadata__"}
