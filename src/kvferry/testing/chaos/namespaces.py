"""Hosts that are not there: network namespaces joined by veth, and private views of the file tree.

A host is a network namespace that a sleeping process keeps alive. When that process ends, however
it does, the kernel takes the namespace and its interfaces away, so nothing is left of a run that
was killed. Needs root, ``ip`` and ``unshare``; rules need ``nft``, slowness needs ``tc``.

Each host has two links: ``kv0`` to the other host, over which KV moves, and ``net0`` to where the
router and the clients are. They are cut and slowed independently.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from kvferry.errors import ConfigError

TOOL_S = 10.0
KV_LINK, NET_LINK = "kv0", "net0"
PORTS_DEFAULT = (32768, 60999)

# The namespace is ready when the line comes; the process ends with the one that started it.
_HOLDER = """
import ctypes, os, signal
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)
os.write(1, b"ready\\n")
signal.pause()
"""

_RULES = {
    # Packets vanish, in both directions or only those that come in.
    "drop": ["input iifname {link} drop", "output oifname {link} drop"],
    "drop-in": ["input iifname {link} drop"],
    # Each packet is answered with a reset; resets themselves pass, or one side would never know.
    "reset": [
        "input iifname {link} tcp flags & rst == 0 reject with tcp reset",
        "output oifname {link} tcp flags & rst == 0 reject with tcp reset",
    ],
}


def missing(*tools: str, kernel: Sequence[str] = ()) -> str:
    """Why scenarios that need root and these programs cannot run here; "" when they can.

    kernel: kinds of queueing disciplines of which one must exist.
    """
    if not sys.platform.startswith("linux"):
        return "needs Linux"
    if os.geteuid() != 0:
        return "needs root"
    absent = [tool for tool in tools if shutil.which(tool) is None]
    if absent:
        return f"needs {', '.join(absent)}, which is not installed"
    if "unshare" in tools and not _may("unshare", "-n", "-m", "true"):
        return "needs new namespaces, which are not allowed here"
    if kernel and not any(has_discipline(kind) for kind in kernel):
        return f"needs one of these in the kernel: {', '.join(kernel)}"
    return ""


def has_discipline(kind: str) -> bool:
    """Whether the kernel knows a queueing discipline, such as ``netem``. Tried out, in private."""
    options = {"netem": "delay 1ms", "tbf": "rate 1mbit burst 16kb latency 50ms"}[kind]
    return _may("unshare", "-n", "sh", "-c", f"tc qdisc add dev lo root {kind} {options}")


def _may(*command: str) -> bool:
    try:
        done = subprocess.run(command, capture_output=True, timeout=TOOL_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def tool(*command: str) -> str:
    """Run a program and return what it printed. Blocks up to 10 s. Raises ConfigError."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise ConfigError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def private(mounts: Sequence[str], *, network_of: int = 0, hidden: Sequence[str] = ()) -> list[str]:
    """What to put before a command so that it runs with mounts, and a network, of its own.

    mounts: arguments of ``mount``, one string each. hidden: directories that it sees empty.
    network_of: a process whose network namespace it joins; 0 leaves the network as it is.
    """
    hide = [f"-t tmpfs -o mode=0700 tmpfs {path}" for path in hidden]
    steps = ["mount --make-rprivate /", *(f"mount {one}" for one in [*mounts, *hide])]
    script = " && ".join([*steps, 'exec "$@"'])
    join = ["nsenter", f"--net=/proc/{network_of}/ns/net"] if network_of else []
    return [*join, "unshare", "-m", "sh", "-c", script, "sh"]


class Host:
    """One namespace. address: for HTTP, from the router. kv_address: for KV, from the other host.

    pid: the process that keeps it alive. Close it, or let the process that made it end.
    """

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.address = self.kv_address = ""
        self._process = subprocess.Popen(
            ["unshare", "-n", sys.executable, "-I", "-S", "-c", _HOLDER],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        with self._process.stdout as ready:
            ready.readline()
        self.pid = self._process.pid
        # Engines tell one host from another by the boot's id.
        self._boot_id = directory / f"boot-{name}"
        self._boot_id.write_text(f"{uuid.uuid4()}\n")

    def run(self, *command: str) -> str:
        """Run a program in the namespace. Raises ConfigError."""
        return tool("nsenter", f"--net=/proc/{self.pid}/ns/net", *command)

    def dress(self, hidden: Sequence[str] = ()) -> list[str]:
        """What to put before a command so that it runs on this host."""
        boot = f"--bind {self._boot_id} /proc/sys/kernel/random/boot_id"
        return private([boot], network_of=self.pid, hidden=hidden)

    def set_ports(self, first: int, last: int) -> None:
        """The range from which connections get their local port."""
        self.run("sysctl", "-qw", f"net.ipv4.ip_local_port_range={first} {last}")

    def close(self) -> None:
        """End the namespace and everything in it that is not a process."""
        self._process.kill()
        self._process.wait()


class Network:
    """Two hosts, joined to each other and to here. Blocks while it is made and closed.

    Use as a context manager. Raises ConfigError when a tool refuses.
    """

    def __init__(self, names: tuple[str, str] = ("left", "right")) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="kvferry-hosts-"))
        self.hosts: dict[str, Host] = {}
        try:
            for name in names:
                self.hosts[name] = Host(name, self._directory)
            self._join(*self.hosts.values())
        except BaseException:
            self.close()
            raise

    def _join(self, one: Host, two: Host) -> None:
        # 198.18.0.0/15 is for tests of networks; the process id keeps runs apart.
        net = f"198.{18 + os.getpid() // 250 % 2}.{os.getpid() % 250}"
        tool("ip", "link", "add", KV_LINK, "netns", str(one.pid), "type", "veth",
             "peer", KV_LINK, "netns", str(two.pid))  # fmt: skip
        for at, host in enumerate((one, two)):
            here, first = f"kvf{os.getpid()}{'ab'[at]}", 8 * at + 128
            tool("ip", "link", "add", here, "type", "veth",
                 "peer", NET_LINK, "netns", str(host.pid))  # fmt: skip
            host.address, host.kv_address = f"{net}.{first + 2}", f"{net}.{at + 1}"
            tool("ip", "address", "add", f"{net}.{first + 1}/30", "dev", here)
            tool("ip", "link", "set", here, "up")
            host.run("ip", "address", "add", f"{host.address}/30", "dev", NET_LINK)
            host.run("ip", "address", "add", f"{host.kv_address}/30", "dev", KV_LINK)
            for link in ("lo", NET_LINK, KV_LINK):
                host.run("ip", "link", "set", link, "up")

    def cut(self, name: str, how: str = "drop", link: str = KV_LINK) -> str:
        """Drop or reset what passes a link of a host. Returns by which means.

        how: ``drop``, ``drop-in`` (only what comes in) or ``reset``. Without ``nft`` a ``drop``
        takes the link down; the others raise ConfigError.
        """
        host = self.hosts[name]
        if shutil.which("nft") is None and how == "drop":
            host.run("ip", "link", "set", link, "down")
            return "link down"
        lines = [
            "add table inet chaos",
            *(
                f"add chain inet chaos {hook} {{ type filter hook {hook} priority 0; }}"
                for hook in ("input", "output")
            ),
        ]
        lines += [f"add rule inet chaos {rule.format(link=link)}" for rule in _RULES[how]]
        host.run("nft", "; ".join(lines))
        return f"nft {how}"

    def heal(self, name: str, link: str = KV_LINK) -> None:
        """Undo every cut of a link of a host."""
        host = self.hosts[name]
        host.run("ip", "link", "set", link, "up")
        if shutil.which("nft") is not None:
            host.run("nft", "add table inet chaos; delete table inet chaos")

    def slow(self, name: str, *, mbit: float, delay_ms: float) -> str:
        """Slow down what a host sends to the other one. Returns by which means.

        delay_ms: by how much each packet is late; where the kernel has no ``netem``, only the rate
        is limited, and packets queue for up to 300 ms.
        """
        if has_discipline("netem"):
            what = f"netem delay {delay_ms:g}ms {delay_ms / 4:g}ms rate {mbit:g}mbit"
        else:
            what = f"tbf rate {mbit:g}mbit burst 16kb latency 300ms"
        self.hosts[name].run("tc", "qdisc", "replace", "dev", KV_LINK, "root", *what.split())
        return what

    def hasten(self, name: str) -> None:
        """Undo ``slow``."""
        self.hosts[name].run("tc", "qdisc", "delete", "dev", KV_LINK, "root")

    def close(self) -> None:
        """End both hosts."""
        for host in self.hosts.values():
            host.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
