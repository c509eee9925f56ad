"""What is wrong with a machine, or explains it: pure functions over plain facts.

Each check is a function that yields findings; ``find`` runs them all and sorts the worst first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvferry.doctor.records import Facts, Finding, Service
from kvferry.planner import Plan
from kvferry.trials.records import HOST, Trial

LEVELS = ("error", "warning", "note")
SHM_SMALL_BYTES = 1 << 30
DESCRIPTORS_FEW = 4096

_PEERS_FIX = (
    "PCIe access control (ACS) or an IOMMU mostly stands between: boot with iommu=pt, turn ACS off "
    "in the firmware, or pass the GPUs to one virtual machine together"
)
_SHARE_FIX = (
    "mount one directory into all containers and name it by KVFERRY_DIRECTORY; same user, or root"
)
_DIRECTORY_FIX = "set KVFERRY_DIRECTORY to a short path that only this user can write to"
_REASONS = (
    ("passed before every pair", "run it again, with more time (--limit-s)"),
    ("directory=", _DIRECTORY_FIX),
    ("brought", "what others copy between these memories directly is wrong as well, so set "
     "NCCL_P2P_DISABLE=1 for them until it is mended; " + _PEERS_FIX),
    ("did not end within", "`kvferry explain --again` tries it once more, when the machine has "
     "less to do; look at the kernel's log for Xid messages"),
    ("ended the process", "look at the kernel's log (dmesg) for Xid messages and crashes; "
     "`kvferry explain --again` tries it once more"),
    ("a trial on", "mend what it names; `kvferry explain --again` tries it once more"),
    ("no peer access", "there is no switch for it: NVLink or a common PCIe root is needed; where "
     "there is one, " + _PEERS_FIX),
    ("CUDA_VISIBLE_DEVICES", "let both processes see both GPUs, with their own one first: "
     "CUDA_VISIBLE_DEVICES=0,1 and 1,0"),
    ("is hidden from this process", "start the container with --gpus all, or name both GPUs"),
    ("no Unix socket is shared", _SHARE_FIX),
    ("can be named to no other process", "allocate it by engine.allocate(device=), or by "
     "cudaMalloc; with torch, PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"),
    ("memfd_create", "allow memfd_create in the container's seccomp profile"),
    ("not enabled here", "leave KVFERRY_TRANSPORTS empty, or add it there"),
    ("the peer has not enabled it", "allow it there, by KVFERRY_TRANSPORTS of that engine"),
    ("on different hosts", ""),
)  # fmt: skip


def fix_of(reason: str) -> str | None:
    """What would change a reason to reject a path; None for reasons in the nature of the pair,
    "" when nothing can be done."""
    for words, fix in _REASONS:
        if words in reason:
            return fix
    return None


def name_of(facts: Facts, place: str) -> str:
    """A place for people: ``"host"``, ``"cuda:0"``, or what it was called."""
    for gpu in facts.devices.gpus:
        if gpu.uuid == place:
            return f"cuda:{gpu.ordinal}" if gpu.ordinal >= 0 else f"{gpu.uuid} (hidden)"
    return place


def find(facts: Facts, services: Iterable[Service], trials: Iterable[Trial]) -> list[Finding]:
    """Everything worth saying, worst first."""
    found = [
        *_run_directory(facts),
        *_gpus(facts),
        *_trials(facts, list(trials)),
        *_unserved(facts, list(services)),
        *_peers(facts),
        *_containers(facts),
        *_memory(facts),
        *_software(facts),
        *_links(facts),
    ]
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


def _run_directory(facts: Facts) -> Iterator[Finding]:
    run = facts.run
    if run.problem:
        yield Finding(
            "error",
            f"the run directory {run.directory} cannot be used: {run.problem}",
            "engines of one host meet there; none starts without it",
            _DIRECTORY_FIX,
        )
    for engine in run.engines:
        if engine.state == "stopped":
            yield Finding(
                "warning",
                f"the engine at {engine.address} is stopped (process {engine.pid})",
                "its peers wait for it, and lose it after lost_s",
                f"kill -CONT {engine.pid}, or end it",
            )
    if run.dead:
        yield Finding(
            "note",
            f"{run.dead} dead sockets lie in {run.directory}",
            "engines were killed; the next one that starts removes them",
        )


def _gpus(facts: Facts) -> Iterator[Finding]:
    devices = facts.devices
    if devices.missing and (devices.driver != "none" or devices.gpus):
        fix = "install the driver's libraries; in a container, start it with --gpus all"
        if "cuda-bindings" in devices.missing:
            fix = "pip install 'kvferry[cuda]'"
        elif devices.visible is not None:
            fix = f"CUDA_VISIBLE_DEVICES={devices.visible!r} hides them: unset it"
        yield Finding(
            "error",
            "there are GPUs, and this process can use none",
            f"{devices.missing}",
            fix,
        )
    elif devices.hidden:
        names = ", ".join(gpu.uuid for gpu in devices.hidden)
        setting = (
            "a container's --gpus"
            if devices.visible is None
            else f"CUDA_VISIBLE_DEVICES={devices.visible!r}"
        )
        yield Finding(
            "warning",
            f"{len(devices.hidden)} of {len(devices.gpus)} GPUs are hidden from this process",
            f"{names}: {setting}. A process that cannot see the peer's GPU cannot map its memory: "
            "cuda_ipc is out, and bytes are staged through host memory",
            "let both processes see both GPUs, with their own one first: CUDA_VISIBLE_DEVICES=0,1 "
            "and 1,0",
        )


def _trials(facts: Facts, trials: list[Trial]) -> Iterator[Finding]:
    """Failed trials, those of one path between the same kind of places together."""
    failed: dict[tuple[str, str, str], list[Trial]] = {}
    for trial in trials:
        if trial.why:
            failed.setdefault((trial.path, trial.why, _kinds(trial)), []).append(trial)
    for (path, why, _), group in failed.items():
        places = ", ".join(
            f"{name_of(facts, trial.local)} and {name_of(facts, trial.remote)}" for trial in group
        )
        tried = group[0].as_tried()
        consequence = "it is not used"
        if group[0].is_wrong:
            consequence = "it reports success with wrong bytes, so kvferry does not use it"
        yield Finding(
            "error" if group[0].is_wrong else "warning",
            f"{path} between {places}: a trial on {tried.day} {why}",
            f"{consequence}; the next path in the ranking serves instead",
            fix_of(f"a trial on {tried.day} {why}") or "",
        )


def _kinds(trial: Trial) -> str:
    return " ".join("host" if place == HOST else "cuda" for place in (trial.local, trial.remote))


def _unserved(facts: Facts, services: list[Service]) -> Iterator[Finding]:
    unknown: list[Service] = []
    for service in services:
        plans = [plan for plan in (service.pull, service.push) if plan is not None]
        if service.path is not None:
            continue
        where = f"from {name_of(facts, service.source)} to {name_of(facts, service.target)}"
        if not plans:
            unknown.append(service)
            continue
        yield Finding(
            "error",
            f"no path serves bytes {where}",
            "; ".join(f"{name}: {why}" for name, why in plans[0].rejected.items()),
            "allow tcp, which needs the least: KVFERRY_TRANSPORTS, KVFERRY_LISTEN",
        )
    for why in dict.fromkeys(service.why for service in unknown):
        ways = [
            f"{name_of(facts, service.source)} -> {name_of(facts, service.target)}"
            for service in unknown
            if service.why == why
        ]
        yield Finding(
            "warning",
            f"paths are not known: {', '.join(ways)}",
            why or "nothing was tried",
            fix_of(why) or "",
        )


def _peers(facts: Facts) -> Iterator[Finding]:
    refused = [claim for claim in facts.devices.claims if claim.why_not]
    if refused:
        pairs = ", ".join(
            f"{name_of(facts, c.uuid)} from {name_of(facts, c.other)}" for c in refused
        )
        yield Finding(
            "note",
            f"GPUs without peer access: {pairs}",
            "the driver does not claim that the first can read the second directly; bytes are "
            "staged through pinned host memory, at the speed of PCIe",
            fix_of("no peer access") or "",
        )


def _containers(facts: Facts) -> Iterator[Finding]:
    if facts.process.container and not facts.run.is_set:
        yield Finding(
            "warning",
            "this is a container, and its run directory is its own",
            f"engines in other containers cannot be met in {facts.run.directory}: shm, cuda_ipc "
            "and staged need a Unix socket that both reach; only tcp serves between containers",
            f"{_SHARE_FIX}. cuda_ipc needs one IPC namespace as well (--ipc=host or "
            "--ipc=container:NAME)",
        )


def _memory(facts: Facts) -> Iterator[Finding]:
    memory = facts.memory
    if memory.memfd:
        yield Finding(
            "warning",
            f"no anonymous shared memory: {memory.memfd}",
            "memory to share is made as files instead, which cannot be sealed",
            fix_of("memfd_create") or "",
        )
    if memory.shm < SHM_SMALL_BYTES:
        user = "kvferry makes its shared memory elsewhere (memfd), but "
        if memory.memfd:
            user = "without memfd its users share what there is; "
        yield Finding(
            "warning" if memory.memfd else "note",
            f"/dev/shm is small: {size(memory.shm)}, {size(memory.shm_free)} free",
            f"{user}vLLM, torch and NCCL keep buffers there and fail when it is full",
            "start the container with --shm-size=8g or --ipc=host",
        )
    if memory.descriptors_max < DESCRIPTORS_FEW:
        yield Finding(
            "warning",
            f"at most {memory.descriptors_max} files may be open at once",
            "each peer, lane and shared region takes one or two",
            f"raise the limit: ulimit -n {DESCRIPTORS_FEW * 4}",
        )
    if facts.links.rdma and memory.locked_max >= 0:
        yield Finding(
            "warning",
            f"at most {size(memory.locked_max)} of memory may be locked",
            "an RDMA device can reach only locked memory",
            "raise the limit: ulimit -l unlimited",
        )


def _software(facts: Facts) -> Iterator[Finding]:
    if facts.software.copy_note:
        yield Finding(
            "warning",
            f"host memory is copied by {facts.software.copy}, not by the C extension",
            facts.software.copy_note,
            "install a C compiler, then kvferry again; KVFERRY_NO_C must not be set",
        )


def _links(facts: Facts) -> Iterator[Finding]:
    if facts.links.rdma:
        yield Finding(
            "note",
            "RDMA devices are not used yet",
            f"{', '.join(facts.links.rdma)}: bytes between hosts go by tcp",
        )
    else:
        yield Finding(
            "note",
            "no RDMA device",
            "that is normal, and matters only between hosts, where bytes go by tcp",
        )


def missed(plan: Plan) -> list[tuple[str, str, str]]:
    """(transport, reason, fix) of the paths that could serve such a pair, and do not."""
    found = []
    for name, reason in plan.rejected.items():
        fix = fix_of(reason)
        if fix is not None:
            found.append((name, reason, fix))
    return found


def size(nbytes: int) -> str:
    """Bytes as people write them."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min(max(nbytes.bit_length() - 1, 0) // 10, len(units) - 1)
    value = nbytes / 1024**power
    return (
        f"{value:.0f} {units[power]}" if value >= 10 or not power else f"{value:.2g} {units[power]}"
    )
