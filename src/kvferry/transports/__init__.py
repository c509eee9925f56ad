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
    "staged": "kvferry.transports.staged:StagedTransport",
    "tcp": "kvferry.transports.tcp:TcpTransport",
}

__all__ = ["TRANSPORTS", "Capabilities", "Export", "Operation", "Services", "Transport", "make"]


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
