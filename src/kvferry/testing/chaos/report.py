"""What a run of chaos found: for people, for programs, and as an exit status."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kvferry.testing.chaos.blows import Blow, outcome, summary
from kvferry.testing.load import Record

SHOWN_MAX = 20


@dataclass(eq=False)
class Report:
    """The result of :func:`kvferry.testing.chaos.run`; it fills while the run goes on.

    outcomes: requests by how they ended. longest_s: longest time to an end, whichever.
    faults: one entry per blow (see ``blows.summary``). skipped: scenarios that cannot run here, and
    why. leaks: what was left, in words. problems: every broken promise, leaks among them.
    facts: by which means faults were made. seconds: time under load.
    """

    seed: int
    clients: int
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0
    faults: list[dict[str, Any]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    leaks: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every promise was kept."""
        return not self.problems

    def add(self, records: list[Record], blows: list[Blow], seconds: float) -> None:
        """Take in one load and what was done to it."""
        self.seconds += seconds
        self.outcomes.update(
            f"error:{r.code}" if r.outcome == "error" else outcome(r) for r in records
        )
        longest_s = max((r.ended - r.begun for r in records), default=0.0)
        self.longest_s = max(self.longest_s, longest_s)
        self.faults += [summary(records, blow) for blow in blows]

    def as_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "ok": self.ok,
            "seed": self.seed,
            "clients": self.clients,
            "seconds": round(self.seconds, 1),
            "requests": sum(self.outcomes.values()),
            "outcomes": dict(sorted(self.outcomes.items())),
            "wrong_tokens": self.outcomes["wrong"],
            "without_an_end": self.outcomes["hang"],
            "longest_s": round(self.longest_s, 3),
            "leaks": self.leaks,
            "problems": self.problems,
            "faults": self.faults,
            "skipped": self.skipped,
            "facts": self.facts,
        }

    def __str__(self) -> str:
        lines = [f"{'fault':<17}{'times':>6}{'touched':>9}{'longest wait':>14}{'seen within':>13}"]
        lines += self._rows()
        lines += [f"{name:<17} skipped: {why}" for name, why in self.skipped.items()]
        lines += ["", *self.facts]
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.outcomes.items()))
        lines += [
            "",
            f"{sum(self.outcomes.values())} requests of {self.clients} clients in "
            f"{self.seconds:.0f} s, seed {self.seed}: {counts}",
            f"longest time to an end {self.longest_s:.2f} s; leaks {len(self.leaks)}; "
            f"wrong tokens {self.outcomes['wrong']}; without an end {self.outcomes['hang']}",
        ]
        if self.ok:
            return "\n".join([*lines, "every promise was kept"])
        lines.append(f"{len(self.problems)} broken promises:")
        lines += [f"* {problem}" for problem in self.problems[:SHOWN_MAX]]
        return "\n".join(lines)

    def _rows(self) -> list[str]:
        """One line per scenario and kind of victim, the worst of its blows."""
        groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for fault in self.faults:
            groups.setdefault((fault["scenario"], fault["victim"].split("-")[0]), []).append(fault)
        rows = []
        for (scenario, victim), faults in groups.items():
            times = [took_s for fault in faults for took_s in fault["seen_s"].values()]
            seen = "never" if None in times else f"{max(times):.2f} s" if times else "-"
            rows.append(
                f"{scenario:<17}{len(faults):>6}{sum(f['touched'] for f in faults):>9}"
                f"{max(f['longest_wait_s'] for f in faults):>12.2f} s{seen:>13}  {victim}"
            )
        return rows
