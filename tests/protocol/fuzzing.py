"""How many examples the property tests and the fuzz targets draw, and values that are nearly right.

A plain run draws few examples, the same ones each time. With ``FUZZ_EXAMPLES=20000``, which is what
``make fuzz`` sets, each target draws as many new ones at each run, and remembers those that failed.
"""

from __future__ import annotations

import os
import typing
from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

FUZZ_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
STEPS_PER_EXAMPLE = 50
"""An example of a state machine has about this many steps, so that many fewer are drawn."""


def drawing(examples: int) -> settings:
    """Settings of one fuzz target. examples: of a plain run."""
    unhurried = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    if FUZZ_EXAMPLES:
        return settings(max_examples=FUZZ_EXAMPLES, deadline=None, suppress_health_check=unhurried)
    return settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=examples,
        suppress_health_check=unhurried,
    )


def stepping(examples: int, *, steps: int = STEPS_PER_EXAMPLE) -> settings:
    """Settings of one state machine. steps: at most, in one example."""
    drawn = drawing(examples)
    if FUZZ_EXAMPLES:
        fewer = max(examples, FUZZ_EXAMPLES // STEPS_PER_EXAMPLE)
        return settings(drawn, max_examples=fewer, stateful_step_count=2 * steps)
    # Shrinking is for whoever looks at a failure, with FUZZ_EXAMPLES set.
    return settings(drawn, stateful_step_count=steps, phases=[Phase.explicit, Phase.generate])


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
"""Any value that msgpack carries."""

as_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
"""Any value that JSON carries."""


@st.composite
def spoilt(draw: st.DrawFn, whole: bytes) -> bytes:
    """``whole`` with a few bytes changed, inserted, removed or repeated."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        to = draw(st.integers(at, min(len(data), at + 8)))
        how = draw(st.sampled_from(("change", "insert", "remove", "repeat", "cut")))
        if how == "change":
            data[at:to] = draw(st.binary(min_size=to - at, max_size=to - at))
        elif how == "insert":
            data[at:at] = draw(st.binary(max_size=8))
        elif how == "remove":
            del data[at:to]
        elif how == "repeat":
            data[at:at] = data[at:to]
        else:
            del data[at:]
    return bytes(data)


def nest(value: str, depth: int, kind: str = "list") -> str:
    """JSON text of ``value`` inside ``depth`` lists or objects."""
    begin, end = ("[", "]") if kind == "list" else ('{"a":', "}")
    return begin * depth + value + end * depth


def near(hint: Any) -> st.SearchStrategy[Any]:
    """Values of an annotated type: most within the limits that it states, some just beyond."""
    meta = msgspec.Meta()
    if typing.get_origin(hint) is typing.Annotated:
        hint, meta = typing.get_args(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is bool:
        return st.booleans()
    if hint is int:
        low, high = meta.ge or 0, (meta.lt or 1 << 63) - 1
        return _mostly(st.integers(low, high), (low - 1, low, high, high + 1))
    if hint is float:
        edges = (0.0, -0.0, meta.le or 1.0, -1.0, float("nan"), float("inf"), 1e300)
        return _mostly(st.floats(meta.ge, meta.le), edges)
    least = meta.min_length or 0
    most = min(least + 20, least + 20 if meta.max_length is None else meta.max_length)
    limits = [n + d for n in (least, meta.max_length or 0) for d in (-1, 0, 1)]
    sizes = [n for n in limits if 0 <= n <= 3000]
    if hint is str:
        return _mostly(st.text(min_size=least, max_size=most), ["\u00e9" * n for n in sizes])
    if hint is bytes:
        return _mostly(st.binary(min_size=least, max_size=most), [bytes(n) for n in sizes])
    if origin is list:
        inner = near(arguments[0])
        return st.lists(inner, max_size=3) | st.tuples(inner, st.sampled_from(sizes)).map(
            lambda pair: [pair[0]] * pair[1]
        )
    assert origin is dict, f"say what is near {hint}"
    return st.dictionaries(near(arguments[0]), near(arguments[1]), max_size=3)


def _mostly(good: st.SearchStrategy[Any], edges: Sequence[Any]) -> st.SearchStrategy[Any]:
    edge = st.sampled_from(edges)
    return st.integers(0, 15).flatmap(lambda n: edge if n == 15 else good)
