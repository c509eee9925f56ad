"""Counts lines of code (no blanks, comments, docstrings) and fails over the budgets.

Budgets keep files readable in one sitting: so many lines a file, a function, and the core.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 60
CORE_LINES_MAX = 11000
SOURCE = Path(__file__).resolve().parent.parent / "src" / "kvferry"
OUTSIDE_CORE = ("engines", "router", "cli", "connectors", "testing", "doctor", "launcher.py")


def code_lines(text: str) -> int:
    """Lines that hold code."""
    tree = ast.parse(text)
    docs: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docs.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped and token.type != tokenize.ENDMARKER:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docs)


def long_functions(path: Path, text: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = ast.get_source_segment(text, node) or ""
            count = code_lines_of(body)
            if count > FUNCTION_LINES_MAX:
                found.append(f"{path}:{node.lineno} {node.name}: {count} lines")
    return found


def code_lines_of(body: str) -> int:
    """Code lines of a function's source, which may be indented."""
    first, *rest = body.splitlines()
    indent = min((len(line) - len(line.lstrip()) for line in rest if line.strip()), default=4)
    shift = max(indent - 4, 0)
    return code_lines("\n".join([first, *(line[shift:] for line in rest)]))


def main() -> int:
    """Print a table of packages and what is over budget; 1 if anything is."""
    totals: dict[str, int] = {}
    problems: list[str] = []
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        count = code_lines(text)
        name = path.relative_to(SOURCE)
        top = name.parts[0] if len(name.parts) > 1 else str(name)
        totals[top] = totals.get(top, 0) + count
        if count > FILE_LINES_MAX:
            problems.append(f"{name}: {count} lines of code; at most {FILE_LINES_MAX}")
        problems += [f"{p}; at most {FUNCTION_LINES_MAX}" for p in long_functions(name, text)]
    core = sum(count for top, count in totals.items() if top not in OUTSIDE_CORE)
    print(f"{sum(totals.values())} lines of code, of which core {core} of {CORE_LINES_MAX}")
    print("  " + ", ".join(f"{top} {count}" for top, count in sorted(totals.items())))
    if core > CORE_LINES_MAX:
        problems.append(f"the core has {core} lines of code; at most {CORE_LINES_MAX}")
    for problem in problems:
        print(f"over budget: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
