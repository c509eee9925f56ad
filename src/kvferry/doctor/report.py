"""The doctor's report and the explanation of paths, in words and as JSON. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from kvferry.doctor.findings import fix_of, missed, name_of, size
from kvferry.doctor.records import Facts, Finding, Gpu, Nic, Service
from kvferry.trials.records import Trial, TrialBook

WIDTH = 11


def trial_of(service: Service, book: TrialBook) -> Trial | None:
    """The trial that proves the path which serves, if there was one."""
    path = service.path
    if path is None:
        return None
    local = service.stand_in or service.target
    remote = service.stand_in or service.source
    if path.direction == "push":
        local, remote = remote, local
    return book.get((path.transport, path.direction, local, remote))


def rate(bytes_per_s: float) -> str:
    """A speed as people write it."""
    gigabytes = bytes_per_s / 1e9
    return f"{gigabytes:.0f} GB/s" if gigabytes >= 10 else f"{gigabytes:.2g} GB/s"


# -- doctor --------------------------------------------------------------------------------------


def doctor_text(
    facts: Facts, findings: Sequence[Finding], services: Iterable[Service], book: TrialBook
) -> str:
    """The whole report."""
    lines = [
        *_machine(facts),
        *_peer_lines(facts, book),
        "",
        "paths",
        *_path_lines(facts, list(services), book),
        "",
        "findings",
    ]
    for finding in findings:
        lines.append(f"  {finding.level:<8} {finding.title}")
        lines.append(f"{'':<11}why: {finding.why}")
        if finding.fix:
            lines.append(f"{'':<11}fix: {finding.fix}")
    if not findings:
        lines.append("  none")
    return "\n".join(lines) + "\n"


def _machine(facts: Facts) -> list[str]:
    memory, process, software = facts.memory, facts.process, facts.software
    sizes = [f"{size(memory.ram)}, {size(memory.ram_free)} free"]
    if memory.memory_max:
        sizes.append(f"this container may use {size(memory.memory_max)}")
    sizes.append(f"/dev/shm {size(memory.shm)}, {size(memory.shm_free)} free")
    sizes.append(f"memfd {memory.memfd or 'works'}")
    pages = f"{memory.huge_pages} of {size(memory.huge_page)}" if memory.huge_pages else "none"
    sizes.append(f"huge pages reserved: {pages}")
    locked = "no limit" if memory.locked_max < 0 else f"at most {size(memory.locked_max)}"
    limits = f"locked memory {locked}; open files at most {memory.descriptors_max}"
    return [
        _row("memory", "; ".join(sizes)),
        _row("", limits),
        *_gpu_lines(facts),
        *_link_lines(facts),
        _row("process", "; ".join(_process_words(facts))),
        _row("", " ".join(f"{name}:{number}" for name, number in process.namespaces)),
        *_run_lines(facts),
        _row(
            "software", f"python {software.python}, kernel {software.kernel}, copy {software.copy}"
        ),
        _row("", ", ".join(f"{name} {version or '-'}" for name, version in software.packages)),
    ]


def _row(head: str, text: str) -> str:
    return f"{head:<{WIDTH}}{text}".rstrip()


def _gpu_lines(facts: Facts) -> list[str]:
    devices = facts.devices
    setting = "" if devices.visible is None else f"; CUDA_VISIBLE_DEVICES={devices.visible!r}"
    head = f"driver {devices.driver}{f', CUDA {devices.cuda}' if devices.cuda else ''}{setting}"
    if devices.missing:
        head += f"; none can be used: {devices.missing}"
    return [_row("gpus", head), *(_row("", _gpu_words(gpu)) for gpu in devices.gpus)]


def _gpu_words(gpu: Gpu) -> str:
    name = f"cuda:{gpu.ordinal}" if gpu.ordinal >= 0 else "hidden"
    parts = [name, gpu.uuid, gpu.name, size(gpu.nbytes) if gpu.nbytes else "", gpu.bus]
    return "  ".join(part for part in parts if part)


def _link_lines(facts: Facts) -> list[str]:
    nics = [nic for nic in facts.links.nics if nic.is_up]
    lines = [_nic_words(nic) for nic in nics] or ["no network interface is up"]
    lines.append(f"RDMA: {', '.join(facts.links.rdma) or 'none'}")
    return [_row("links" if place == 0 else "", line) for place, line in enumerate(lines)]


def _nic_words(nic: Nic) -> str:
    speed = f", {nic.megabits / 1000:g} Gbit/s" if nic.megabits else ""
    return f"{nic.name}: {' '.join(nic.addresses) or 'no address'}, mtu {nic.mtu}{speed}"


def _process_words(facts: Facts) -> list[str]:
    process = facts.process
    seccomp = {0: "off", 1: "strict", 2: "filtered"}.get(process.seccomp, "unknown")
    scope = "off" if process.ptrace_scope < 0 else str(process.ptrace_scope)
    return [
        f"user {process.user}",
        f"container: {', '.join(process.container) or 'no sign of one'}",
        f"ptrace_scope {scope}",
        f"seccomp {seccomp}",
    ]


def _run_lines(facts: Facts) -> list[str]:
    run = facts.run
    count = len(run.engines)
    state = run.problem or f"{count or 'no'} engine{'s' if count != 1 else ''}"
    lines = [_row("engines", f"{run.directory}: {state}")]
    return lines + [
        _row("", f"{engine.address}, process {engine.pid or '?'}, {engine.state}")
        for engine in run.engines
    ]


def _peer_lines(facts: Facts, book: TrialBook) -> list[str]:
    """Peer access: what the driver claims beside what a trial showed."""
    lines = []
    for place, claim in enumerate(facts.devices.claims):
        pair = f"{name_of(facts, claim.uuid)} reads {name_of(facts, claim.other)}"
        trial = book.get(("cuda_ipc", "pull", claim.uuid, claim.other))
        proof = "not tried"
        if trial is not None:
            proof = trial.why or f"proven, {rate(trial.bytes_per_s)}"
        claimed = "no" if claim.why_not else "yes"
        lines.append(_row("peers" if place == 0 else "", f"{pair}: claimed {claimed}, {proof}"))
    return lines


def _path_lines(facts: Facts, services: list[Service], book: TrialBook) -> list[str]:
    names = [
        f"{name_of(facts, service.source)} -> {name_of(facts, service.target)}"
        for service in services
    ]
    width = max((len(name) for name in names), default=0)
    return [
        f"  {name:<{width}}  {_served_words(service, book)}"
        for name, service in zip(names, services, strict=True)
    ]


def _served_words(service: Service, book: TrialBook) -> str:
    path = service.path
    if path is None:
        if service.pull is None and service.push is None:
            return f"not known: {service.why or 'nothing was tried'}"
        return "nothing serves it"
    trial = trial_of(service, book)
    if trial is None:
        return f"{path.name}, not proven"
    return (
        f"{path.name}, {rate(trial.bytes_per_s)}, {trial.latency_s * 1e6:.0f} us for 64 KiB, "
        f"proven {trial.as_tried().day}"
    )


# -- explain -------------------------------------------------------------------------------------


def explain_text(
    facts: Facts, services: Iterable[Service], book: TrialBook, notes: Iterable[str] = ()
) -> str:
    """For each way of the bytes: what serves it, the ranking, and why nothing faster does."""
    blocks = []
    for service in services:
        source, target = name_of(facts, service.source), name_of(facts, service.target)
        served = "served by " if service.path is not None else ""
        lines = [f"{source} -> {target}", f"  {served}{_served_words(service, book)}"]
        fix = fix_of(service.why) if service.path is None and service.why else ""
        lines += [f"  fix: {fix}"] if fix else []
        for plan, who in (
            (service.pull, "the target's side reads (pull), as in a hand-off"),
            (service.push, "the source's side writes (push)"),
        ):
            if plan is not None:
                lines.append(f"  when {who}")
                lines += [f"    {line}" for line in plan.explain().splitlines()]
        reasons = _missed_lines(service)
        if reasons:
            lines += ["  why not another path", *reasons]
        blocks.append("\n".join(lines))
    blocks += [f"note: {note}" for note in notes]
    return "\n\n".join(blocks) + "\n"


def _missed_lines(service: Service) -> list[str]:
    lines: dict[str, None] = {}
    for plan in (service.pull, service.push):
        for name, reason, fix in missed(plan) if plan is not None else ():
            lines[f"    {name}: {reason}"] = None
            if fix:
                lines[f"      fix: {fix}"] = None
    return list(lines)


# -- JSON ----------------------------------------------------------------------------------------


def as_json(
    facts: Facts,
    services: Iterable[Service],
    book: TrialBook,
    *,
    findings: Iterable[Finding] = (),
    notes: Iterable[str] = (),
) -> dict[str, Any]:
    """All of it as plain JSON types."""
    return {
        "facts": dataclasses.asdict(facts),
        "paths": [_service_json(facts, service, book) for service in services],
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "notes": list(notes),
    }


def _service_json(facts: Facts, service: Service, book: TrialBook) -> dict[str, Any]:
    trial = trial_of(service, book)
    plans = {"pull": service.pull, "push": service.push}
    return {
        "source": service.source,
        "target": service.target,
        "names": [name_of(facts, service.source), name_of(facts, service.target)],
        "path": service.path.name if service.path else None,
        "proven": dataclasses.asdict(trial) if trial is not None else None,
        "why": service.why,
        "plans": {name: plan.as_dict() for name, plan in plans.items() if plan is not None},
        "missed": [
            {"transport": name, "reason": reason, "fix": fix}
            for plan in plans.values()
            if plan is not None
            for name, reason, fix in missed(plan)
        ],
    }
