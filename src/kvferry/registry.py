"""The regions of one engine: made, looked up under a peer's claim, and let go when nobody uses
them.
"""

from __future__ import annotations

import hmac
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.errors import BoundsError, RegistrationError, StaleRegionError, UsageError
from kvferry.peers import REF
from kvferry.regions import READ_WRITE, Region, Spans, check_bounds
from kvferry.transports.base import Access, Export, Transport

if TYPE_CHECKING:
    from kvferry.engine import Engine

log = logging.getLogger(__name__)

DEREGISTER_S = 5.0
"""How long deregistering waits for transfers that use the region."""


class Memory(Protocol):
    """Memory that was allocated here, and goes with its registration."""

    def close(self) -> None: ...


class Registration:
    """A region of this engine. ``close`` it when peers should no longer reach the memory.

    region: the facts. ref: bytes that a peer needs to find it; hand them over by any channel.
    array: uint8[nbytes] view for allocated memory, None for registered memory.
    """

    def __init__(
        self, engine: Engine, region: Region, array: npt.NDArray[np.uint8] | None, keep: Any
    ) -> None:
        self._engine = engine
        self._keep = keep
        self.region = region
        self.array = array
        self.exports: dict[str, Export] = {}
        self.memory: Memory | None = None
        self.users = 0
        self.count = 1
        self.is_freed = False

    @property
    def ref(self) -> bytes:
        return REF.pack(self.region.region_id, self.region.token)

    def renew(self) -> None:
        """Start a new generation: peers that know an older one are refused from now on.

        For memory that is given a new meaning. Only streamed and remote paths are checked by the
        owner; a mapped reader is stopped by the hand-off's confirm.
        """
        self._engine.renew(self)

    def close(self) -> None:
        """Deregister, at the last of as many calls as there were registrations. Blocks.

        Waits until no transfer touches the memory. Raises RegistrationError if that takes longer
        than five seconds: then the memory must not be freed, and ``close`` can be called again.
        In a forked child it does nothing.
        """
        self._engine.deregister(self)


class Registry:
    """Thread-safe table of registrations."""

    def __init__(self, transports: dict[str, Transport]) -> None:
        self._transports = transports
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._by_id: dict[int, Registration] = {}
        self._by_memory: dict[tuple[int, int, str], Registration] = {}
        self._leaving: dict[int, Registration] = {}
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._by_id)

    def add(
        self,
        engine: Engine,
        address: int,
        nbytes: int,
        access: str,
        *,
        fd: int = -1,
        array: npt.NDArray[np.uint8] | None = None,
        memory: Memory | None = None,
        keep: Any = None,
        device: str = "",
    ) -> Registration:
        """A new registration, or the same one again for the same memory."""
        if nbytes < 1:
            raise UsageError("a region has at least one byte; empty transfers need no region")
        same = (address, nbytes, access)
        with self._lock:
            known = self._by_memory.get(same)
            if known is not None:
                known.count += 1
                return known
            region_id = self._next_id
            self._next_id += 1
        kind = "cuda" if device else "host"
        region = Region(region_id, kind, device, address, nbytes, 1, os.urandom(16), access)
        registration = Registration(engine, region, array, keep)
        registration.memory = memory
        try:
            for name, transport in self._transports.items():
                export = transport.export(region, fd)
                if export is not None:
                    registration.exports[name] = export
        except BaseException:
            self._free(registration)
            raise
        with self._lock:
            # Exporting takes long, so it is done without the lock: another thread may have
            # registered the same memory meanwhile.
            known = self._by_memory.get(same)
            if known is None:
                self._by_id[region_id] = self._by_memory[same] = registration
                return registration
            known.count += 1
        self._free(registration)
        return known

    def has(self, region_id: int) -> bool:
        """Whether the region is registered and not about to go."""
        return region_id in self._by_id

    def renew(self, registration: Registration) -> None:
        with self._lock:
            region = registration.region
            registration.region = replace(region, generation=region.generation + 1)

    def find(self, region_id: int, token: bytes) -> Registration:
        """By what a peer showed. Raises StaleRegionError, the same for wrong id and wrong token."""
        with self._lock:
            return self._find(region_id, token)

    @contextmanager
    def access(
        self, region_id: int, token: bytes, generation: int, spans: Spans, *, write: bool
    ) -> Iterator[Access]:
        """See transports.base.Services.access."""
        with self._lock:
            registration = self._find(region_id, token)
            region = registration.region
            if region.generation != generation:
                raise StaleRegionError(
                    f"region {region_id} is in generation {region.generation}, the peer asked for "
                    f"{generation}",
                    fix="its blocks were given to somebody else meanwhile: start again",
                )
            if write and region.access != READ_WRITE:
                raise BoundsError(f"region {region_id} may only be read by peers")
            registration.users += 1
        try:
            check_bounds(spans, region.nbytes, what="requested")
            addresses = spans.offsets.astype(np.uint64) + np.uint64(region.address)
            yield Access(addresses, spans.lengths, spans.nbytes, region.kind, region.device)
        finally:
            with self._lock:
                registration.users -= 1
                self._idle.notify_all()

    def withdraw(self, registration: Registration) -> bool:
        """Let no further use begin, if this was the last registration of the memory; whether so."""
        region = registration.region
        with self._lock:
            registration.count -= 1
            if registration.count > 0 or registration.is_freed:
                return False
            self._by_id.pop(region.region_id, None)
            self._by_memory.pop((region.address, region.nbytes, region.access), None)
            self._leaving[region.region_id] = registration
            return True

    def remove(self, registration: Registration, running: Callable[[], bool]) -> None:
        """After :meth:`withdraw`: wait for the uses that are open, and free what is ours."""
        region = registration.region
        if not self._wait_idle(registration, running):
            registration.count = 1
            raise RegistrationError(
                f"region {region.region_id} is still used by transfers after {DEREGISTER_S:g} s",
                fix="do not free its memory; cancel its transfers, then close it again",
            )
        self._free(registration)

    def _free(self, registration: Registration) -> None:
        """Give everything back, once: nobody uses it any more."""
        region_id = registration.region.region_id
        with self._lock:
            if registration.is_freed:
                return
            registration.is_freed = True
            self._leaving.pop(region_id, None)
        try:
            for transport in self._transports.values():
                transport.deregister(registration.region)
        except RegistrationError:
            with self._lock:
                registration.is_freed = False
                registration.count = 1
                self._leaving[region_id] = registration
            raise
        registration.exports.clear()
        registration.array = None
        if registration.memory is not None:
            registration.memory.close()

    def _wait_idle(self, registration: Registration, running: Callable[[], bool]) -> bool:
        """Whether nobody uses the region within DEREGISTER_S.

        ``running`` takes the engine's lock, which must never be taken under ours, so the end of our
        own transfers is looked for every few milliseconds.
        """
        give_up_at = time.monotonic() + DEREGISTER_S
        while True:
            busy = running()
            with self._lock:
                if not busy and registration.users == 0:
                    return True
                if time.monotonic() >= give_up_at:
                    return False
                self._idle.wait(0.005)

    def close(self) -> None:
        """Free all memory that was allocated here; every transport is closed already."""
        with self._lock:
            left = [*self._by_id.values(), *self._leaving.values()]
            self._by_id.clear()
            self._by_memory.clear()
        for registration in left:
            try:
                self._free(registration)
            except RegistrationError:
                log.exception("region %d was not freed", registration.region.region_id)

    def _find(self, region_id: int, token: bytes) -> Registration:
        registration = self._by_id.get(region_id)
        if registration is None or not hmac.compare_digest(registration.region.token, token):
            raise StaleRegionError(
                f"there is no region {region_id} with this token",
                fix="it was deregistered, or the reference is not from this engine",
            )
        return registration
