"""From what was seen to what it means: outcomes in words, and defects. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

BUSY_SHARE = 0.5
"""Of one core, by a process that waits."""
SLACK_S = 0.1
"""Nobody is late by what the scheduler takes."""
WAIT_MIN_S = 0.5
"""A shorter wait says nothing about its processor time."""


class Expect(Enum):
    """How a step should end."""

    COMPLETE = "complete"
    FAIL = "fail"
    EITHER = "either"
    """All bytes, or an error: for a peer that may have sent everything before it fell silent."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One call that was made.

    begin: on the monotonic clock, which all processes of a host share. error: empty for success.
    is_correct: after success, whether every byte was right; after an error, whether nothing was
    touched that must not be. cpu_s: processor time of the whole process meanwhile.
    """

    begin: float
    seconds: float
    error: str = ""
    is_correct: bool = True
    cpu_s: float = 0.0

    @property
    def cpu_share(self) -> float:
        return self.cpu_s / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """Calls made for one purpose, and how they should have ended.

    cause: pattern that an error's text must match to count as naming the cause.
    end: why no answer came: ``"no end within 20 s"``, or how the process died. Empty if it came.
    """

    name: str
    expect: Expect
    within_s: float
    attempts: tuple[Attempt, ...]
    cause: str = ""
    end: str = ""
    waited_s: float = 0.0
    cpu_share: float = 0.0

    @property
    def errors(self) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.error]

    @property
    def longest_s(self) -> float:
        return max([self.waited_s, *(attempt.seconds for attempt in self.attempts)], default=0.0)

    @property
    def waiting_share(self) -> float | None:
        """Share of a core while waiting in vain; None when nobody waited long enough to tell."""
        shares = [a.cpu_share for a in self.errors if a.seconds >= WAIT_MIN_S]
        if self.end and self.waited_s >= WAIT_MIN_S:
            shares.append(self.cpu_share)
        return max(shares, default=None)

    def outcome(self) -> str:
        """In words."""
        if self.end:
            return self.end
        failed = len(self.errors)
        wrong = sum(not attempt.is_correct for attempt in self.attempts)
        if wrong:
            return f"WRONG BYTES in {wrong} of {len(self.attempts)}"
        if not failed:
            if self.expect is Expect.FAIL:
                return "false success"
            return "completed"
        if self.expect is Expect.COMPLETE and len(self.attempts) > 2:
            return f"{failed} of {len(self.attempts)} failed"
        return "error"

    def message(self) -> str:
        return self.errors[-1].error if self.errors else ""

    def defects(self) -> list[str]:
        """What is not as it should be; empty if all is."""
        found = []
        if self.end:
            found.append("hung" if self.end.startswith("no end") else "crashed")
        elif any(not attempt.is_correct for attempt in self.attempts):
            found.append("wrong bytes")
        elif self.expect is Expect.COMPLETE and self.errors:
            found.append("failed")
        elif self.expect is Expect.FAIL and not self.errors:
            found.append("false success")
        if not self.end and self.longest_s > self.within_s + SLACK_S:
            found.append("late")
        if self.errors and self.cause and not re.search(self.cause, self.message(), re.I):
            found.append("vague")
        share = self.waiting_share
        if share is not None and share > BUSY_SHARE:
            found.append("busy")
        return found


@dataclass(frozen=True, slots=True)
class Row:
    """One scenario on one rival. ``skipped``: why it was not run; then there are no steps."""

    scenario: str
    rival: str
    steps: tuple[Step, ...] = ()
    skipped: str = ""
    notes: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        return not self.skipped and bool(self.steps) and not self.defects()

    def defects(self) -> list[str]:
        """Of all steps, each kind once, and the notes."""
        found = [defect for step in self.steps for defect in step.defects()]
        return list(dict.fromkeys([*found, *self.notes]))

    def outcome(self) -> str:
        if self.skipped:
            return self.skipped
        if len(self.steps) == 1:
            return self.steps[0].outcome()
        return "; ".join(f"{step.name}: {step.outcome()}" for step in self.steps)

    def longest_s(self) -> float:
        return max((step.longest_s for step in self.steps), default=0.0)

    def waiting_share(self) -> float | None:
        shares = [s for step in self.steps if (s := step.waiting_share) is not None]
        return max(shares, default=None)

    def message(self) -> str:
        """The first error's text: later ones are its consequences."""
        return next((text for step in self.steps if (text := step.message())), "")


def in_words(rows: Sequence[Row]) -> str:
    """How many of a rival's scenarios ended right."""
    run = [row for row in rows if not row.skipped]
    return f"{sum(row.is_right for row in run)} of {len(run)}"
