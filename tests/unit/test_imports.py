"""Imports point one way, cost nothing, and every module has its tests."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "kvferry"
TESTS = Path(__file__).parent

CORE = "connections dials engine integrity loop movers moves paths peers quarantine registry"
"""One layer in several files: the engine and what it is made of."""

# What each part may import, besides itself. A part is a module, or a package with all in it.
ALLOWED = {
    "errors": "",
    "clock": "",
    "deferring": "",
    "regions": "errors",
    "config": "errors",
    "sockets": "errors",
    "layout": "errors regions",
    "digests": "regions memory",
    "protocol": "errors",
    "memory": "errors regions",
    "tls": "errors",
    "security": "errors config sockets protocol tls",
    "telemetry": "errors clock protocol security",
    "lanes": "errors protocol sockets tls",
    "transports": "errors regions clock config sockets protocol memory lanes tls",
    "planner": "transports.base",
    "transfer": "errors planner",
    "prepared": "memory regions transfer transports.base",
    "loop": "clock",
    "movers": "errors",
    "paths": "clock regions planner transports.base trials.records",
    "trials": "errors config regions sockets memory planner transports engine registry kvferry",
    "doctor": "errors config sockets memory planner transports trials engine peers protocol "
    "kvferry",
    **dict.fromkeys(
        ("peers", "registry", "dials", "connections", "integrity", "moves", "quarantine", "engine"),
        "errors clock config regions sockets protocol memory transports planner transfer prepared "
        "deferring digests lanes security telemetry tls kvferry trials.cache trials.records "
        f"{CORE}",
    ),
    "handoff": "errors regions layout sockets planner transfer protocol engine peers registry "
    "transports.base",
    "connectors": "errors config layout engine handoff regions clock",
    "engines": "errors clock config layout engine handoff",
    "router": "errors",
    "launcher": "errors sockets",
    "cli": "errors config layout engine handoff engines router launcher planner telemetry testing "
    "trials doctor kvferry",
    "testing": "errors clock config regions layout protocol memory transports planner transfer "
    f"deferring handoff sockets launcher telemetry {CORE}",
    # The names that users import: loaded when first used, so they cost nothing and bind nobody.
    "kvferry": "config engine errors handoff layout peers planner regions registry transfer "
    "transports.base",
}

# The engine hands itself to its parts, which name its type and never import it at run time.
FOR_TYPES_ONLY = {
    (name, "engine") for name in ("peers", "dials", "connections", "registry", "integrity", "moves")
}

NO_TESTS_OF_THEIR_OWN = {
    "transports": "driven through an engine by tests/conformance, one row per transport",
    "dials": "driven with sockets by tests/faults/test_peers.py",
    "lanes": "driven through transports by tests/conformance and tests/faults",
    "handoff": "driven with two engines by tests/faults/test_handoff.py",
    "paths": "driven through an engine by tests/conformance and tests/faults",
    "integrity": "driven with two engines by tests/faults/test_integrity.py",
    "prepared": "driven with two engines by tests/conformance/test_device_memory.py",
    "moves": "driven through an engine by tests/conformance and tests/faults",
    "clock": "a fake and one line around time.monotonic; see testing/test_clock.py",
    "memory.cuda_driver": "calls of a real driver, made by tests/gpu",
    "router": "tested over HTTP in tests/router",
    "cli": "commands are tested by what they print, in cli/test_main.py",
    "engines.reference": "the rest of the reference engine is tested by test_server.py beside it",
    "testing": "conformance, leaks and the like are what the other suites run on",
}
"""Modules, or packages with all in them, that no file of tests/unit mirrors, and why."""


def modules() -> Iterator[tuple[str, Path]]:
    """(name without ``kvferry.``, file); the package itself is ``kvferry``."""
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        yield name or "kvferry", path


MODULES = dict(modules())


def part(name: str) -> str:
    return name.partition(".")[0]


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(module of kvferry, whether only for type checkers), as a file imports them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where they point"
            base = node.module or ""
            inner = [f"{base}.{alias.name}" for alias in node.names]
            names = [n if n.removeprefix("kvferry.") in MODULES else base for n in inner]
        for name in names:
            if name == "kvferry" or name.startswith("kvferry."):
                yield name.removeprefix("kvferry."), id(node) in for_types


def may_import(name: str, target: str) -> bool:
    allowed = ALLOWED[part(name)].split()
    return part(target) == part(name) or part(target) in allowed or target in allowed


def test_every_part_has_a_place_in_the_order() -> None:
    assert {part(name) for name in MODULES} - ALLOWED.keys() == set()


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_one_way(name: str) -> None:
    wrong = [
        target
        for target, for_types in imports(MODULES[name])
        if not may_import(name, target) or ((name, target) in FOR_TYPES_ONLY and not for_types)
    ]
    assert not wrong, f"{name} must not import {wrong}"


def test_the_order_has_no_circle() -> None:
    below = {
        name: {part(target) for target in allowed.split()} - {name}
        for name, allowed in ALLOWED.items()
        if name not in CORE.split() and name != "kvferry"
    }
    for targets in below.values():
        targets -= {*CORE.split(), "kvferry"}
    done: set[str] = set()
    while below:
        free = {name for name, targets in below.items() if targets <= done}
        assert free, f"these import each other in a circle: {sorted(below)}"
        done |= free
        below = {name: targets for name, targets in below.items() if name not in free}


def test_nothing_below_the_engine_imports_it() -> None:
    above = {*CORE.split(), "handoff", "connectors", "engines", "router", "launcher", "cli"}
    low = ["errors", "clock", "regions", "config", "sockets", "layout", "protocol", "memory",
           "lanes", "transports", "planner", "transfer", "tls", "security"]  # fmt: skip
    for name in low:
        assert not {part(target) for target in ALLOWED[name].split()} & above


@pytest.mark.slow
def test_importing_kvferry_loads_nothing_heavy() -> None:
    heavy = ["torch", "vllm", "cuda", "cupy", "aiohttp", "tokenizers", "gguf"]
    code = (
        "import sys, kvferry\n"
        "assert 'numpy' not in sys.modules, 'import kvferry must cost nothing'\n"
        "import kvferry.engine, kvferry.handoff\n"
        f"print([name for name in {heavy} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def mirror(name: str) -> Path:
    """Where the unit tests of a module are."""
    *packages, last = name.split(".")
    return TESTS.joinpath(*packages, f"test_{last}.py")


def excuse(name: str) -> str:
    """The entry that explains why a module has no tests of its own, or ""."""
    parts = name.split(".")
    prefixes = [".".join(parts[: i + 1]) for i in range(len(parts))]
    return next((prefix for prefix in prefixes if prefix in NO_TESTS_OF_THEIR_OWN), "")


def needs_tests() -> list[str]:
    return [name for name, path in MODULES.items() if path.name != "__init__.py"]


def test_every_module_has_tests_or_a_reason() -> None:
    missing = [name for name in needs_tests() if not mirror(name).exists() and not excuse(name)]
    assert not missing, f"write tests/unit for {missing}, or say why there are none"


def test_every_reason_is_still_needed() -> None:
    alive = {name for name in NO_TESTS_OF_THEIR_OWN if name in MODULES}
    used = {excuse(name) for name in needs_tests() if not mirror(name).exists()}
    stale = alive - used
    assert not stale, f"these have tests of their own now: {sorted(stale)}"


def test_every_unit_test_mirrors_a_module() -> None:
    mirrored = {mirror(name) for name in MODULES}
    others = {"test_imports.py", "test_docs.py"}
    stray = [p for p in TESTS.rglob("test_*.py") if p not in mirrored and p.name not in others]
    assert not stray
