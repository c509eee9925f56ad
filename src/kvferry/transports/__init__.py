"""Transports, one file each, and the table that finds them by name.

A new transport is one file, one line in ``TRANSPORTS`` (or an entry point in the group
``kvferry.transports`` of another package), and one row in the conformance tests.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from kvferry.errors import ConfigError
from kvferry.transports.base import Capabilities, Export, Operation, Services, Transport

TRANSPORTS = {
    "inproc": "kvferry.transports.inproc:InprocTransport",
    "shm": "kvferry.transports.shm:ShmTransport",
    "cuda_ipc": "kvferry.transports.cuda_ipc:CudaIpcTransport",
    "staged": "kvferry.transports.staged:StagedTransport",
    "tcp": "kvferry.transports.tcp:TcpTransport",
}

__all__ = [
    "TRANSPORTS",
    "Capabilities",
    "Export",
    "Operation",
    "Services",
    "Transport",
    "choose",
    "make",
    "names",
]


def names() -> list[str]:
    """Every transport that can be named, those of other packages too."""
    found = {point.name for point in entry_points(group="kvferry.transports")}
    return [*TRANSPORTS, *sorted(found - set(TRANSPORTS))]


def make(name: str) -> Transport:
    """A new transport by name. Raises ConfigError with the names that exist."""
    where = TRANSPORTS.get(name)
    if where is None:
        for point in entry_points(group="kvferry.transports"):
            if point.name == name:
                where = point.value
    if where is None:
        raise ConfigError(f"there is no transport {name!r}", fix=f"known are: {', '.join(names())}")
    module, _, attribute = where.partition(":")
    made = getattr(import_module(module), attribute)()
    assert isinstance(made, Transport)
    return made


def choose(
    allowed: tuple[str, ...], extra: dict[str, Transport]
) -> tuple[dict[str, Transport], dict[str, str]]:
    """The transports that an engine opens, and why it does not open the others, by name.

    allowed: names to use; empty means all. extra: made elsewhere, by name; they win over the table.
    Raises ConfigError for a name that does not exist, and when none is left.
    """
    found: dict[str, Transport] = {}
    unusable: dict[str, str] = {}
    for name in dict.fromkeys([*names(), *extra, *allowed]):
        if allowed and name not in allowed:
            unusable[name] = f"not enabled here: transports={','.join(allowed)}"
            continue
        transport = extra[name] if name in extra else make(name)
        why_not = transport.unavailable()
        if why_not:
            unusable[name] = f"not usable here: {why_not}"
        else:
            found[name] = transport
    if not found:
        reasons = "; ".join(f"{name}: {unusable[name]}" for name in allowed or unusable)
        raise ConfigError(
            f"transports={','.join(allowed)}: none of them works here ({reasons})",
            fix="allow 'tcp' as well, which works everywhere",
        )
    return found, unusable
