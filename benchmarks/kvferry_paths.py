"""kvferry's own transports, measured as every rival is.

:func:`paths` is asked for the rows. Each is a :class:`~benchmarks.process.ProcessRival` with
``python=OWN_PYTHON`` and this module, whose two workers open an engine on the pool:

* the source's ``open`` registers the pool, listens, and returns the address and the region;
* the target's ``open`` connects, ``prepare`` turns ``case.offsets()`` into spans, ``move`` reads
  them over the row's transport and waits.
"""

from __future__ import annotations

from benchmarks.base import Rival


def paths() -> list[Rival]:
    """One rival per transport; none while the engine has no host transports to measure."""
    return []
