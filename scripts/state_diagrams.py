"""Writes the state diagrams of docs/concepts/handoff.md from the tables in protocol.handoff.

``python scripts/state_diagrams.py`` rewrites the page; with ``--check`` it only says, by its exit
status, whether the page is up to date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TypeVar

from kvferry.protocol.handoff import CLAIM_TABLE, ENDS, OFFER_TABLE, ClaimState, OfferState

State = TypeVar("State", bound=Enum)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "concepts" / "handoff.md"


def diagram(table: Mapping[tuple[State, str], State], start: State) -> str:
    """One table as a mermaid state diagram; events between the same two states share an arrow."""
    arrows: dict[tuple[State, State], list[str]] = {}
    for (state, event), after in table.items():
        arrows.setdefault((state, after), []).append(event)
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {start.name}"]
    lines += [
        f"    {state.name} --> {after.name}: {', '.join(events)}"
        for (state, after), events in arrows.items()
    ]
    reached = dict.fromkeys(after for _, after in arrows)
    lines += [f"    {state.name} --> [*]" for state in reached if state in ENDS]
    return "\n".join([*lines, "```"])


def filled(page: str) -> str:
    """The page with both diagrams as they should be. Raises ValueError when a mark is missing."""
    for name, text in (
        ("offer", diagram(OFFER_TABLE, OfferState.OFFERED)),
        ("claim", diagram(CLAIM_TABLE, ClaimState.CLAIMING)),
    ):
        pattern = rf"(?<=<!-- begin {name} -->\n).*?(?=<!-- end {name} -->)"
        page, count = re.subn(pattern, f"{text}\n", page, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{PAGE} has no place for the diagram {name!r}")
    return page


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    wanted = filled(page)
    if "--check" in sys.argv[1:]:
        return int(page != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
