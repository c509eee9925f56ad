"""A run in words."""

from __future__ import annotations

from typing import Any

from kvferry.testing.simulation.world import Report

LINES_MAX = 40


def story(report: Report, *, lines_max: int = LINES_MAX) -> str:
    """What was done, what was said last, and what was wrong with it."""
    plan = report.plan
    lines = [
        f"seed {plan.seed}: {plan.prefills} prefill and {plan.decodes} decode processes",
        "What happened to them:",
        *(f"  {action.at_s:8.4f} s  {action.words()}" for action in plan.actions),
    ]
    if report.violation is None:
        return "\n".join([*lines, f"Nothing went wrong. Trace {report.trace_hash}."])
    told = [line for line in report.trace if line[1] != "plan"]
    left = len(told) - lines_max
    lines.append(
        "What they said:" if left <= 0 else f"What they said, {left} earlier lines left out:"
    )
    lines += [f"  {at_s:8.4f} s  {who} {what}" for at_s, who, what in told[-lines_max:]]
    violation = report.violation
    lines += [f"Wrong ({violation.check}) at {violation.at_s:.4f} s:", f"  {violation.text}"]
    return "\n".join(lines)


def facts(report: Report) -> dict[str, Any]:
    """The same for programs: JSON types only."""
    violation = report.violation
    return {
        "seed": report.plan.seed,
        "actions": len(report.plan.actions),
        "handoffs": report.counts.get("offers", 0),
        "counts": report.counts,
        "events": report.events,
        "virtual_s": round(report.virtual_s, 6),
        "trace": report.trace_hash,
        "violation": None
        if violation is None
        else {"check": violation.check, "at_s": violation.at_s, "text": violation.text},
    }
