"""The error tree is the one that is drawn, and every error can travel and be shown."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import re

import pytest

from kvferry import errors
from kvferry.errors import KVFerryError, NoPathError, RefusedError, from_code

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, KVFerryError)
]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)

WHERE = {
    "peer": "decode-1", "path": "shm/pull", "stage": "move", "bytes_done": 7, "fix": "look there",
}  # fmt: skip


def make(kind: type[KVFerryError], message: str = "it broke", **where: object) -> KVFerryError:
    own = {NoPathError: {"reasons": {"tcp": "off"}}, RefusedError: {"code": "expired"}}
    return kind(message, **own.get(kind, {}), **where)  # type: ignore[arg-type]


def drawn_tree() -> dict[str, str]:
    """Class name to parent's name, as the docstring draws them."""
    parents: dict[str, str] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"    ((?:[| ]   )*)(?:[|`]-- )?(\w+Error)\b", line)
        if found is None:
            continue
        root = not re.search(r"[|`]-- ", line)
        depth = 0 if root else len(found[1]) // 4 + 1
        del above[depth:]
        parents[found[2]] = above[-1] if above else "Exception"
        above.append(found[2])
    return parents


def test_the_drawn_tree_is_the_real_one() -> None:
    assert drawn_tree() == {kind.__name__: kind.__bases__[0].__name__ for kind in KINDS}


@each_kind
def test_every_error_says_everything_it_knows(kind: type[KVFerryError]) -> None:
    error = make(kind, **WHERE)
    assert str(error) == (
        "it broke (peer decode-1, path shm/pull, stage move, 7 bytes done); look there"
    )
    assert str(make(kind)) == "it broke"


@each_kind
def test_every_error_is_plain_json(kind: type[KVFerryError]) -> None:
    shown = json.loads(json.dumps(make(kind, **WHERE).as_dict()))
    assert shown.items() >= {"type": kind.__name__, "message": "it broke", **WHERE}.items()
    assert shown["code"] == make(kind).code
    assert shown["retryable"] is kind.retryable


@each_kind
def test_every_error_has_a_code_of_its_own(kind: type[KVFerryError]) -> None:
    if kind is not RefusedError:
        assert [other for other in KINDS if other.__dict__.get("code") == kind.code] == [kind]


@pytest.mark.parametrize("code", sorted(errors._BY_CODE))
def test_an_error_that_travelled_is_the_same_again(code: str) -> None:
    kind = type(from_code(code, "it broke", stage="connect"))
    assert kind.code == code
    again = from_code(code, "it broke", stage="connect", peer="p")
    assert (again.message, again.stage, again.peer) == ("it broke", "connect", "p")


@pytest.mark.parametrize("code", ["expired", "", "x" * 500, "no_path", "refused"])
def test_an_unknown_code_is_a_refusal_that_keeps_it(code: str) -> None:
    error = from_code(code, "no")
    assert isinstance(error, RefusedError)
    assert error.code == code[:64]


def test_the_reasons_of_a_missing_path_are_shown() -> None:
    assert make(NoPathError).as_dict()["reasons"] == {"tcp": "off"}


def test_places_are_filled_in_once() -> None:
    error = make(errors.TransferError, peer="first")
    assert error.located(peer="second", path="tcp/pull", stage="move", bytes_done=3) is error
    error.located(path="late", stage="late", bytes_done=9)
    found = (error.peer, error.path, error.stage, error.bytes_done)
    assert found == ("first", "tcp/pull", "move", 3)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.UsageError, ValueError),
        (errors.BoundsError, ValueError),
    ],
)
def test_some_errors_are_built_in_ones_too(kind: type[KVFerryError], builtin: type) -> None:
    assert issubclass(kind, builtin)


def test_whether_a_retry_may_help_can_be_said_per_error() -> None:
    assert make(errors.BusyError).retryable
    assert not make(errors.BusyError, retryable=False).retryable
    assert make(errors.CorruptError, retryable=True).retryable


@pytest.mark.parametrize(
    "error",
    [
        errors.DeadlineError("late", peer="p", bytes_done=3),
        errors.RefusedError("no", code="expired", fix="again"),
        errors.NoPathError("none", reasons={"shm": "far away"}),
    ],
)
def test_errors_survive_copying_and_pickling(error: KVFerryError) -> None:
    for twin in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(twin) is type(error)
        assert (str(twin), twin.as_dict()) == (str(error), error.as_dict())
