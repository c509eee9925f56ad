"""What the doctor knows of a machine: plain facts, nothing that acts."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.planner import Plan, RankedPath


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Sizes in bytes.

    memory_max: the limit of this container, 0 for none. shm: the file system /dev/shm, 0 without
    one. memfd: why no anonymous file can be made, "" if one can. huge_pages: how many are reserved.
    locked_max: bytes that this process may lock, -1 for no limit. descriptors_max: open files.
    """

    ram: int
    ram_free: int
    memory_max: int = 0
    shm: int = 0
    shm_free: int = 0
    memfd: str = ""
    huge_pages: int = 0
    huge_page: int = 0
    locked_max: int = -1
    descriptors_max: int = 1024


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU. ordinal: as this process counts, -1 when it cannot see it. nbytes: 0 if unknown."""

    uuid: str
    name: str
    ordinal: int = -1
    nbytes: int = 0
    bus: str = ""


@dataclass(frozen=True, slots=True)
class PeerClaim:
    """What the driver says of one GPU reading another one's memory. why_not: "" if it says yes."""

    uuid: str
    other: str
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """GPUs.

    driver: version of the kernel's module, "none" without one. cuda: what it supports.
    missing: why this process can use no GPU, "" if it can. visible: CUDA_VISIBLE_DEVICES, None if
    it is not set. gpus: those that this process sees first, then those that only the kernel names.
    """

    driver: str = "none"
    cuda: str = ""
    missing: str = ""
    visible: str | None = None
    gpus: tuple[Gpu, ...] = ()
    claims: tuple[PeerClaim, ...] = ()

    @property
    def seen(self) -> tuple[Gpu, ...]:
        return tuple(gpu for gpu in self.gpus if gpu.ordinal >= 0)

    @property
    def hidden(self) -> tuple[Gpu, ...]:
        return tuple(gpu for gpu in self.gpus if gpu.ordinal < 0)


@dataclass(frozen=True, slots=True)
class Nic:
    """A network interface. megabits: its speed, 0 if it does not say."""

    name: str
    is_up: bool
    mtu: int
    megabits: int
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """nics: network interfaces. rdma: devices with the state of their first port."""

    nics: tuple[Nic, ...] = ()
    rdma: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """Who and where this process is.

    container: signs of one, as words. ptrace_scope: Yama's level, -1 without Yama. seccomp: 0 off,
    1 strict, 2 filtered, -1 unknown. namespaces: name to id.
    """

    user: str
    container: tuple[str, ...] = ()
    ptrace_scope: int = -1
    seccomp: int = -1
    namespaces: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class LiveEngine:
    """An engine that listens in the run directory. state: "live" or "stopped"."""

    address: str
    pid: int
    state: str = "live"


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The run directory: where Unix sockets lie. problem: why it cannot be used, "" if it can.
    is_set: whether KVFERRY_DIRECTORY names it. dead: sockets that nobody listens on."""

    directory: str
    problem: str = ""
    is_set: bool = False
    engines: tuple[LiveEngine, ...] = ()
    dead: int = 0


@dataclass(frozen=True, slots=True)
class SoftwareFacts:
    """copy: the code that copies host memory; copy_note: what is slower about it, "" if nothing.
    packages: (name, version), "" for one that is not installed."""

    python: str
    kernel: str
    copy: str
    copy_note: str = ""
    packages: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """A machine as one process sees it."""

    memory: MemoryFacts
    devices: DeviceFacts
    links: LinkFacts
    process: ProcessFacts
    run: RunFacts
    software: SoftwareFacts


@dataclass(frozen=True, slots=True)
class Service:
    """Which paths bring bytes from one memory to another.

    source, target: places, ``"host"`` or UUIDs, or an engine's address. pull: the ranking when the
    target's side moves the bytes, as in a hand-off; push: when the source's side does. None where
    it is not known, and then why. stand_in: the place between two processes of which trials were
    made in its stead; "" when its own ends were tried.
    """

    source: str
    target: str
    pull: Plan | None = None
    push: Plan | None = None
    why: str = ""
    stand_in: str = ""

    @property
    def path(self) -> RankedPath | None:
        """The path that serves it, that of a hand-off if there is one."""
        for plan in (self.pull, self.push):
            if plan is not None and plan.paths:
                return plan.paths[0]
        return None


@dataclass(frozen=True, slots=True)
class Finding:
    """Something worth knowing about a machine.

    level: "error" when something does not work, "warning" when it is slower or weaker than it
    should be, "note" for what is normal and yet explains something.
    """

    level: str
    title: str
    why: str
    fix: str = ""
