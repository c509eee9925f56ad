"""A transfer whose spans were checked and paired once, to be made again and again."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.memory.cuda import ResidentSpans
from kvferry.regions import PairedSpans, Region
from kvferry.transfer import Transfer
from kvferry.transports.base import RemoteRegion


class Prepared:
    """What :meth:`Engine.prepare` returns. Usable as a context manager; thread-safe.

    nbytes: what each transfer moves. Regions that go, or a peer that is lost, end the transfers
    that use them, as they do for others.
    """

    def __init__(
        self,
        start: Callable[..., Transfer],
        local: Region,
        remote: RemoteRegion,
        spans: PairedSpans,
    ) -> None:
        self._start = start
        self._local, self._remote = local, remote
        self._spans = spans
        self._resident: ResidentSpans | None = None
        if "cuda" in (local.kind, remote.kind):
            arrays = spans.local.view("u8"), spans.remote.view("u8"), spans.lengths
            self._resident = ResidentSpans(*arrays, spans.length)

    @property
    def nbytes(self) -> int:
        return self._spans.nbytes

    def read(self, *, deadline_s: float | None = None, checksum: str | None = None) -> Transfer:
        """:meth:`Engine.read` of these spans; the same errors."""
        return self._move(False, deadline_s, checksum)

    def write(self, *, deadline_s: float | None = None, checksum: str | None = None) -> Transfer:
        """:meth:`Engine.write` of these spans; the same errors."""
        return self._move(True, deadline_s, checksum)

    def _move(self, write: bool, deadline_s: float | None, checksum: str | None) -> Transfer:
        return self._start(
            self._local,
            self._remote,
            self._spans,
            write,
            deadline_s,
            checksum,
            resident=self._resident,
        )

    def close(self) -> None:
        """Give back what devices hold for it. Transfers made afterwards bring it there anew."""
        if self._resident is not None:
            self._resident.close()

    def __enter__(self) -> Prepared:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
