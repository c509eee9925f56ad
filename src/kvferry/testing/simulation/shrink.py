"""From a run that fails to the shortest one found that fails in the same way."""

from __future__ import annotations

from dataclasses import replace

from kvferry.testing.simulation.plan import Action, Plan
from kvferry.testing.simulation.world import Report, Spoil, World

TRIES_MAX = 300


def shrink(report: Report, spoil: Spoil | None = None, *, tries_max: int = TRIES_MAX) -> Report:
    """Leave out actions, halves first and then single ones, as long as the same check fails.

    report: of a failing run. Raises ValueError for one that did not fail. Deterministic.
    """
    if report.violation is None:
        raise ValueError("only a failing run can be shrunk")
    check, at_s = report.violation.check, report.violation.at_s
    best = report
    # What happens after the violation cannot have caused it.
    actions = [action for action in report.plan.actions if action.at_s <= at_s]
    size = len(actions)
    tries = 0
    while size >= 1 and tries < tries_max:
        begin, shorter = 0, False
        while begin < len(actions) and tries < tries_max:
            left: list[Action] = actions[:begin] + actions[begin + size :]
            tries += 1
            plan: Plan = replace(report.plan, actions=tuple(left))
            found = World(plan, spoil).run()
            if found.violation is not None and found.violation.check == check:
                best, actions, shorter = found, left, True
            else:
                begin += size
        if not shorter or size > 1:
            size = size // 2 if size > 1 else 0
    return best
