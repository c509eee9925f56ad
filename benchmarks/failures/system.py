"""What only the kernel knows or does: processor time, ports, stopped and namespaced processes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType

_LISTEN = "0A"


def cpu_s_of(stat: str) -> float:
    """Processor time in a text of ``/proc/<pid>/stat``: all threads, user and system, seconds."""
    # The name, in brackets, may hold spaces.
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Processor time of a process until now; 0.0 when it is gone."""
    try:
        return cpu_s_of(Path(f"/proc/{pid}/stat").read_text())
    except OSError:
        return 0.0


def listening(table: str) -> dict[str, int]:
    """Ports by inode of the sockets that listen, from a text of ``/proc/net/tcp`` or ``tcp6``."""
    ports = {}
    for line in table.splitlines()[1:]:
        fields = line.split()
        if fields[3] == _LISTEN:
            ports[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    return ports


def ports_of(pid: int) -> list[int]:
    """TCP ports on which a process listens."""
    ports: dict[str, int] = {}
    for name in ("tcp", "tcp6"):
        try:
            ports |= listening(Path(f"/proc/{pid}/net/{name}").read_text())
        except OSError:
            continue
    found = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(entry.path)
        except OSError:
            continue
        inode = target.removeprefix("socket:[").removesuffix("]")
        if inode in ports:
            found.add(ports[inode])
    return sorted(found)


class NetworkError(Exception):
    """No network namespace can be had here; the message says why."""


class Network:
    """A network namespace, joined to this one by a virtual cable on which packets can vanish.

    host: our end's address; peer: the other's. Needs root, iproute2 and iptables. A context
    manager, which removes everything.
    """

    def __init__(self, number: int) -> None:
        number = number % 16000
        self.name = f"kvfail{number}"
        self.host, self.peer = (f"10.213.{number // 64}.{number % 64 * 4 + n}" for n in (1, 2))
        self.cable, self._far = f"kvf{number}a", f"kvf{number}b"
        self._rules: list[list[str]] = []

    def __enter__(self) -> Network:
        if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("iptables"):
            raise NetworkError("not run: needs root, ip and iptables")
        far = self._far
        try:
            _call("ip", "netns", "add", self.name)
            _call("ip", "link", "add", self.cable, "type", "veth", "peer", far, "netns", self.name)
            _call("ip", "addr", "add", f"{self.host}/30", "dev", self.cable)
            _call("ip", "link", "set", self.cable, "up")
            _call(*self._inside("ip", "addr", "add", f"{self.peer}/30", "dev", far))
            _call(*self._inside("ip", "link", "set", far, "up"))
            _call(*self._inside("ip", "link", "set", "lo", "up"))
        except NetworkError:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.mend()
        for command in (("link", "del", self.cable), ("netns", "del", self.name)):
            subprocess.run(["ip", *command], check=False, capture_output=True)

    def wrap(self, private_directory: str) -> tuple[str, ...]:
        """What to put before a command so that it runs at the other end of the cable.

        ``private_directory`` is empty there and what it holds is not seen here, as on two hosts.
        """
        script = f'mount -t tmpfs none "{private_directory}" && exec "$@"'
        return tuple(self._inside("sh", "-c", script, "sh"))

    def drop(self) -> None:
        """From now on no packet arrives at either end, and nobody is told."""
        self._rule("-j", "DROP")

    def reset(self) -> None:
        """From now on every packet is answered by a reset of its connection."""
        # Not the resets themselves: they have to arrive.
        tcp = ["-p", "tcp", "!", "--tcp-flags", "RST", "RST"]
        self._rule(*tcp, "-j", "REJECT", "--reject-with", "tcp-reset")

    def mend(self) -> None:
        """Packets arrive again."""
        for rule in self._rules:
            subprocess.run(rule, check=False, capture_output=True)
        self._rules.clear()

    def _rule(self, *action: str) -> None:
        # On the way in, at both ends: a rule on the way out would be an error of send().
        for before, device in (([], self.cable), (self._inside(), self._far)):
            rule = ["INPUT", "-i", device, *action]
            _call(*before, "iptables", "-I", *rule)
            self._rules.append([*before, "iptables", "-D", *rule])

    def _inside(self, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *command]


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why = done.stderr.strip().splitlines()
        raise NetworkError(f"not run: {' '.join(command[:3])}: {why[-1] if why else 'failed'}")
