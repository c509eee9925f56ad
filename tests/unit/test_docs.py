"""The documentation is true: links lead somewhere, snippets run, tables say what the code says."""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import fields
from pathlib import Path

import click
import pytest

import kvferry
from kvferry import errors, transports
from kvferry.cli.main import cli
from kvferry.config import ENVIRONMENT_PREFIX, EngineConfig
from kvferry.handoff import HandOff, _Params, _Payload
from kvferry.protocol import framing, messages
from kvferry.protocol.handoff import REFUSALS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
FENCE = re.compile(r"((?:^<!-- [^\n]* -->\n)?)^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
START_S = 20.0

FORBIDDEN = {
    "a path of one machine": re.compile(r"/work\b|/home/|(?<![\w-])shared/"),
    "a package registry's host": re.compile(
        r"pypi\.org|pythonhosted|registry\.npmjs|huggingface\.co"
    ),
}


def short(page):
    return page.relative_to(ROOT).as_posix()


def prose(page):
    """The page without its fenced blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def snippets(page):
    """(mark, code) of each Python block that is meant to run."""
    text = page.read_text(encoding="utf-8")
    return [(mark.strip(), code) for mark, kind, code in FENCE.findall(text) if kind == "python"]


def marked(page, mark):
    (code,) = [code for found, code in snippets(page) if found == f"<!-- {mark} -->"]
    return code


def table(page, heading=""):
    """The rows of the page's tables as lists of cells, those after a heading only."""
    text = page.read_text(encoding="utf-8")
    if heading:
        assert heading in text, f"{short(page)} has no {heading!r}"
        text = re.split(r"^## ", text.split(heading, 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row.strip()[1:-1].split("|")] for row in rows]
    return [row for row in cells if set(row[0]) != {"-"}]


def anchors(page):
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def run(code, folder, **environment):
    """Run a snippet in a process of its own, in ``folder``."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=folder,
        env={
            **os.environ,
            "KVFERRY_DIRECTORY": str(folder / "s"),
            "PYTHONPATH": ".",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# -- every page ----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_links_resolve(page):
    for target in LINK.findall(prose(page)):
        if target.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), f"{short(page)} links to {target}"
        if anchor:
            assert anchor in anchors(place), f"{short(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_nothing_that_belongs_elsewhere(page):
    text = page.read_text(encoding="utf-8")
    for what, pattern in FORBIDDEN.items():
        found = pattern.search(text)
        assert not found, f"{short(page)} names {what}: {found and found[0]!r}"


def test_every_page_can_be_reached():
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in PAGES
        for target in LINK.findall(prose(page))
        if "://" not in target
    }
    # The README points at the folder of references.
    lost = [short(page) for page in PAGES[2:] if page not in linked and page.parent not in linked]
    assert not lost, f"no page links to {lost}"


@pytest.mark.parametrize("page", PAGES, ids=short)
def test_paths_in_the_source_exist(page):
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"\b(?:src|tests|scripts)/[\w/.-]+\.(?:py|c|sh)\b", text):
        assert (ROOT / path).exists(), f"{short(page)} names {path}"


# -- snippets ------------------------------------------------------------------------------------

PLAIN = [
    pytest.param(page, code, id=f"{short(page)}:{number}")
    for page in PAGES
    for number, (mark, code) in enumerate(snippets(page))
    if not mark.startswith("<!-- run:") and mark != "<!-- slow -->"
]
ADD_A_TRANSPORT = DOCS / "howto" / "add-a-transport.md"


@pytest.mark.slow
@pytest.mark.parametrize(("page", "code"), PLAIN)
def test_snippet_runs(page, code, tmp_path):
    if page == ADD_A_TRANSPORT:
        (tmp_path / "procfd.py").write_text(marked(page, "run: procfd.py"))
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_example_transport_passes_the_checks(tmp_path):
    (tmp_path / "procfd.py").write_text(marked(ADD_A_TRANSPORT, "run: procfd.py"))
    done = run(marked(ADD_A_TRANSPORT, "slow"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout in ADD_A_TRANSPORT.read_text(), "the page shows another outcome"


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["", "tcp"])
def test_tutorial_hands_over(tmp_path, transport):
    page = DOCS / "tutorial.md"
    environment = {**os.environ, "KVFERRY_DIRECTORY": str(tmp_path / "s")}
    prefill = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", marked(page, "run: prefill.py")],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    with prefill:
        try:
            assert prefill.stdout.readline() == "offered\n"
            decode = run(marked(page, "run: decode.py"), tmp_path, KVFERRY_TRANSPORTS=transport)
            assert decode.returncode == 0, decode.stderr
            path = f"{transport or 'shm'}/pull"
            assert decode.stdout.startswith(f"loaded 10240 bytes by {path} first token 42\n")
            assert prefill.communicate(timeout=START_S)[0] == "offer ended: delivered\n"
        finally:
            prefill.kill()
    again = run(marked(page, "run: decode.py"), tmp_path)
    assert again.stdout.startswith("claim failed: cannot connect to "), again.stderr


def test_quoted_code_is_still_there():
    """What the integration guide quotes from the reference engine is what the engine does."""
    page = DOCS / "howto" / "integrate-an-engine.md"
    source = (ROOT / "src/kvferry/engines/reference/handoff.py").read_text()
    quotes = re.findall(r"^```py\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    have = {ast.dump(node) for node in ast.walk(ast.parse(source))}
    checked = 0
    for quote in quotes:
        for statement in ast.parse(textwrap.dedent(quote)).body:
            text = ast.unparse(statement)
            if "..." in text or "EngineConfig" in text or "inbox" in text:
                continue
            value = getattr(statement, "value", None)
            wanted = value if isinstance(value, ast.Call) else statement
            if "KVGeometry(" in text or "ferry" in text:
                assert ast.dump(wanted) in have, f"not in the source any more: {text}"
                checked += 1
    assert checked >= 4


# -- generated parts and tables ------------------------------------------------------------------


def test_state_diagrams_are_up_to_date():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        script = importlib.import_module("state_diagrams")
    finally:
        sys.path.pop(0)
    page = script.PAGE.read_text(encoding="utf-8")
    assert page == script.filled(page), "run python scripts/state_diagrams.py"
    with pytest.raises(ValueError, match="no place for the diagram 'offer'"):
        script.filled("a page without marks")


def test_settings_are_all_there():
    rows = table(DOCS / "reference" / "settings.md")[1:]
    wanted = {}
    for field in fields(EngineConfig):
        is_text = isinstance(field.default, str)
        default = json.dumps(field.default) if is_text else repr(field.default)
        key = ENVIRONMENT_PREFIX + field.name.upper()
        wanted[f"`{field.name}`"] = (f"`{default}`", f"`{key}`")
    assert {row[0]: (row[1], row[2]) for row in rows} == wanted


def test_errors_are_all_there():
    page = DOCS / "reference" / "errors.md"
    rows = {row[0]: row for row in table(page, "# Errors")[1:]}
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.KVFerryError)
    ]
    assert set(rows) == {f"`{kind.__name__}`" for kind in kinds}
    for kind in kinds:
        row = rows[f"`{kind.__name__}`"]
        parent = kind.__mro__[1]
        assert row[1] == ("" if parent is Exception else f"`{parent.__name__}`"), row
        code = "see below" if kind is errors.RefusedError else f"`{kind.code}`"
        assert row[2] == code, row


def test_refusal_codes_are_all_there():
    rows = table(DOCS / "reference" / "errors.md", "## Codes of a refused hand-off")[1:]
    assert {row[0] for row in rows} == {f"`{code}`" for code in [*REFUSALS, "geometry"]}


def test_messages_are_all_there():
    page = DOCS / "reference" / "wire.md"
    rows = {row[0]: row[1] for row in table(page, "## Messages")[1:]}
    wanted = {
        f"`{kind.__name__}`": ", ".join(kind.__struct_fields__)
        for kind in messages.Message.__subclasses__()
    }
    assert rows == wanted


def test_wire_numbers_are_right():
    text = (DOCS / "reference" / "wire.md").read_text()
    assert f"Protocol version {framing.VERSION}." in text
    assert framing.HEADER.size == 12
    limits = [row[1] for row in table(DOCS / "reference" / "wire.md", "## Frames")[-4:]]
    assert limits == [
        str(framing.HELLO_BYTES_MAX),
        str(framing.CONTROL_BYTES_MAX),
        str(framing.LANE_BYTES_MAX),
        str(messages.NOTIFY_BYTES_MAX),
    ]
    for name in _Payload.__struct_fields__:
        assert f"`{name}`" in text
    for name in _Params.__struct_fields__:
        assert f"`kvferry.{name}`" in text


def test_commands_and_options_are_all_there():
    page = DOCS / "reference" / "cli.md"
    context = click.Context(cli)
    names = cli.list_commands(context)
    heads = re.findall(r"^## `kvferry (\S+?)(?: .*)?`$", page.read_text(), re.MULTILINE)
    assert heads == names
    for name in names:
        (heading,) = re.findall(rf"^## `kvferry {name}[` ].*$", page.read_text(), re.MULTILINE)
        rows = {row[0]: row[1] for row in table(page, heading)[1:]}
        command = cli.get_command(context, name)
        options = [p for p in command.params if isinstance(p, click.Option)]
        assert set(rows) == {f"`{option.opts[0]}`" for option in options}, name
        for option in options:
            if option.show_default:
                assert rows[f"`{option.opts[0]}`"] == f"`{option.default}`", option.opts


def test_public_names_are_all_there():
    text = (DOCS / "reference" / "api.md").read_text()
    testing = importlib.import_module("kvferry.testing")
    for module in (kvferry, transports, testing):
        for name in module.__all__:
            assert f"`{name}`" in text, f"{module.__name__}.{name}"
    calls = [name for name in vars(kvferry.Engine) if not name.startswith("_")]
    for name in ("allocate", "register", "connect", "read", "write", "plan", "notify", "close"):
        assert name in calls
        assert f"`{name}(" in text
    for name in ("offer", "claim", "decline", "statistics"):
        assert hasattr(HandOff, name)
        assert f"`{name}(" in text


def test_faults_of_the_field_have_a_status_and_their_tests_exist():
    page = DOCS / "reference" / "field-faults.md"
    rows = [row for row in table(page) if row[0].startswith("F-")]
    assert [row[0] for row in rows] == [f"F-{number:03}" for number in range(1, len(rows) + 1)]
    assert len(rows) >= 66
    for row in rows:
        assert len(row) == 4, row
        assert all(row), row
        number, _, _, status = row
        assert re.match(r"(covered by `|does not apply: \w|left: \w)", status), (number, status)
        for path, name in re.findall(r"`(tests/[^`:]+)::(\w+)`", status):
            tests = re.findall(r"^(?:async )?def (\w+)", (ROOT / path).read_text(), re.MULTILINE)
            assert name in tests, f"{number} cites {path}::{name}"


def test_structure_names_every_module():
    text = (DOCS / "structure.md").read_text()
    source = ROOT / "src" / "kvferry"
    for path in source.iterdir():
        if path.name.startswith("__") or path.suffix not in ("", ".py") or path.name == "py.typed":
            continue
        name = f"{path.name}/" if path.is_dir() else path.name
        assert name in text, f"docs/structure.md does not name {name}"
    assert len(text.splitlines()) <= 65
