"""Looks at the machine: files under /proc and /sys, limits, sockets. Every fact that cannot be had
is left at its default; nothing here raises for what a machine lacks.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import platform
import pwd
import resource
import socket
import stat
import struct
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path

from kvferry import __version__
from kvferry.config import EngineConfig
from kvferry.doctor.devices import look_in_child
from kvferry.doctor.records import (
    DeviceFacts,
    Facts,
    LinkFacts,
    LiveEngine,
    MemoryFacts,
    Nic,
    ProcessFacts,
    RunFacts,
    SoftwareFacts,
)
from kvferry.memory import copy
from kvferry.sockets import is_stopped, peer_pid

PACKAGES = ("numpy", "cuda-bindings", "torch", "vllm")
NAMESPACES = ("pid", "ipc", "net", "mnt", "user")
NO_LIMIT = 1 << 60
"""Limits above this are meant as none."""
_SIOCGIFADDR = 0x8915


def gather(config: EngineConfig, devices: Callable[[], DeviceFacts] = look_in_child) -> Facts:
    """The machine as this process sees it. Blocks for as long as ``devices`` does.

    config: of the engines that would run here. devices: looks at the GPUs.
    """
    return Facts(
        memory=_memory(),
        devices=devices(),
        links=LinkFacts(_nics(), _rdma()),
        process=_process(os.environ),
        run=_run(config),
        software=_software(),
    )


def _text(path: str | Path) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    return ""


def _number(text: str, default: int = 0) -> int:
    try:
        return int(text)
    except ValueError:
        return default


def _memory() -> MemoryFacts:
    lines = (line.partition(":") for line in _text("/proc/meminfo").splitlines())
    about = {key: value.split() for key, _, value in lines}

    def kib(key: str) -> int:
        return _number(about.get(key, ["0"])[0]) * 1024

    shm = shm_free = 0
    with contextlib.suppress(OSError):
        found = os.statvfs("/dev/shm")
        shm, shm_free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return MemoryFacts(
        ram=kib("MemTotal"),
        ram_free=kib("MemAvailable"),
        memory_max=_memory_max(),
        shm=shm,
        shm_free=shm_free,
        memfd=_why_no_memfd(),
        huge_pages=_number(about.get("HugePages_Total", ["0"])[0]),
        huge_page=kib("Hugepagesize"),
        locked_max=-1 if locked in (resource.RLIM_INFINITY, -1) or locked > NO_LIMIT else locked,
        descriptors_max=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )


def _memory_max() -> int:
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        limit = _number(_text(f"/sys/fs/cgroup/{name}"))
        if 0 < limit < NO_LIMIT:
            return limit
    return 0


def _why_no_memfd() -> str:
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd_create"
    try:
        os.close(os.memfd_create("kvferry-doctor", os.MFD_CLOEXEC))
    except OSError as error:
        return f"memfd_create: {error.strerror}"
    return ""


def _nics() -> tuple[Nic, ...]:
    addresses = _addresses_v6()
    found = []
    for path in sorted(Path("/sys/class/net").glob("*")):
        name = path.name
        mine = [*_address_v4(name), *addresses.get(name, ())]
        state = _text(path / "operstate")
        is_up = state == "up" or (state == "unknown" and bool(mine))
        speed = max(0, _number(_text(path / "speed")))
        found.append(Nic(name, is_up, _number(_text(path / "mtu")), speed, tuple(mine)))
    return tuple(found)


def _address_v4(name: str) -> list[str]:
    request = struct.pack("256s", name.encode()[:15])
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return [socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])]
    return []


def _addresses_v6() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in _text("/proc/net/if_inet6").splitlines():
        digits, _, _, scope, _, name = line.split()
        if scope != "20":  # Not those that hold on one link only.
            address = str(ipaddress.IPv6Address(int(digits, 16)))
            found.setdefault(name, []).append(address)
    return found


def _rdma() -> tuple[str, ...]:
    found = []
    for path in sorted(Path("/sys/class/infiniband").glob("*")):
        state = _text(path / "ports" / "1" / "state").partition(":")[2].strip() or "unknown"
        rate = _text(path / "ports" / "1" / "rate")
        found.append(f"{path.name} ({', '.join(part for part in (state.lower(), rate) if part)})")
    return tuple(found)


def _process(environment: Mapping[str, str]) -> ProcessFacts:
    uid = os.getuid()
    user = str(uid)
    with contextlib.suppress(KeyError):
        user = f"{pwd.getpwuid(uid).pw_name} ({uid})"
    status = (line.partition(":") for line in _text("/proc/self/status").splitlines())
    about = {key: value.strip() for key, _, value in status}
    namespaces = []
    for name in NAMESPACES:
        with contextlib.suppress(OSError):
            namespaces.append((name, os.readlink(f"/proc/self/ns/{name}").strip("]").split("[")[1]))
    return ProcessFacts(
        user,
        container=_container_signs(environment),
        ptrace_scope=_number(_text("/proc/sys/kernel/yama/ptrace_scope"), -1),
        seccomp=_number(about.get("Seccomp", ""), -1),
        namespaces=tuple(namespaces),
    )


def _container_signs(environment: Mapping[str, str]) -> tuple[str, ...]:
    signs = [name for name in ("/.dockerenv", "/run/.containerenv") if os.path.exists(name)]
    signs += [name for name in ("KUBERNETES_SERVICE_HOST", "container") if environment.get(name)]
    group = _text("/proc/1/cgroup")
    words = ("docker", "kubepods", "containerd", "libpod", "lxc")
    signs += [f"/proc/1/cgroup names {word}" for word in words if word in group]
    return tuple(signs)


def _run(config: EngineConfig) -> RunFacts:
    directory = config.with_defaults().directory
    is_set = bool(config.directory)
    problem, engines, dead = "", [], 0
    try:
        facts = os.stat(directory)
        problem = _distrust(facts.st_uid, facts.st_mode)
        if not problem and not os.access(directory, os.W_OK | os.X_OK):
            problem = "this user cannot write to it"
        for path in sorted(Path(directory).glob("*.sock")):
            engine = _engine_at(path)
            engines += [engine] if engine else []
            dead += engine is None
    except FileNotFoundError:
        parent = os.path.dirname(os.path.abspath(directory))
        while not os.path.exists(parent):
            parent = os.path.dirname(parent)
        if not os.access(parent, os.W_OK | os.X_OK):
            problem = f"it does not exist, and this user cannot write to {parent}"
    except OSError as error:
        problem = error.strerror or str(error)
    if not problem and len(os.fsencode(os.path.abspath(directory))) > 80:
        problem = "its path is too long for a Unix socket in it (107 bytes in all)"
    return RunFacts(directory, problem, is_set, tuple(engines), dead)


def _distrust(uid: int, mode: int) -> str:
    """Why an engine would refuse a directory of this owner and mode; "" if it would not."""
    if uid not in (0, os.getuid()):
        return f"it belongs to user {uid}"
    if mode & 0o022 and not mode & stat.S_ISVTX:
        return "other users can write to it"
    return ""


def _engine_at(path: Path) -> LiveEngine | None:
    """Who listens on a Unix socket; None if nobody does."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            probe.connect(str(path))
            pid = peer_pid(probe)
    except OSError:
        return None
    return LiveEngine(f"unix:{path}", pid, "stopped" if pid and is_stopped(pid) else "live")


def _software() -> SoftwareFacts:
    backend = copy.backend()
    packages = [("kvferry", __version__)]
    for name in PACKAGES:
        try:
            packages.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            packages.append((name, ""))
    version = ".".join(str(part) for part in sys.version_info[:3])
    return SoftwareFacts(version, platform.release(), backend.name, backend.note, tuple(packages))
