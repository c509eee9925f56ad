"""What is known about the paths to each peer: how fast they were, and which failed lately.

Plain tables over the planner; the engine holds its lock around every call.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvferry import planner
from kvferry.clock import Clock
from kvferry.planner import PairFacts, PathKey, Plan, Rate, TransportFacts, Tried
from kvferry.regions import Region
from kvferry.transports.base import PeerView, RemoteRegion, Transport
from kvferry.trials.records import TrialBook, place_of

DEMOTED_S = 30.0
"""A path that failed is tried last for so long."""

_Key = tuple[bytes, str, str]


class Paths:
    """Speeds and demotions per peer and path; one per engine.

    process, host: of the engine, to be compared with a peer's. trials: what trials between two
    other processes of this host showed, which stands for every peer on it in
    another process.
    """

    def __init__(
        self,
        transports: Mapping[str, Transport],
        clock: Clock,
        *,
        process: bytes,
        host: str,
        trials: TrialBook,
    ) -> None:
        self._transports = transports
        self._clock = clock
        self._process = process
        self._host = host
        self._trials = trials
        self._rates: dict[_Key, Rate] = {}
        self._demoted: dict[_Key, tuple[float, str]] = {}

    def plan(
        self,
        local: Region,
        remote: RemoteRegion,
        view: PeerView,
        *,
        write: bool,
        nbytes: int,
        spans: int,
    ) -> Plan:
        """The ranked paths for one transfer."""
        facts = PairFacts(
            local_kind=local.kind,
            remote_kind=remote.kind,
            write=write,
            same_process=view.process == self._process,
            same_host=view.host == self._host,
            unix=bool(view.unix_address),
            remote_access=remote.access,
        )
        candidates = [
            TransportFacts(
                name,
                transport.capabilities(),
                remote="" if name in view.transports else "the peer has not enabled it",
                blocked=transport.blocked(local, remote, view),
            )
            for name, transport in self._transports.items()
        ]
        now = self._clock.now()
        direction = "push" if write else "pull"
        rates: dict[PathKey, Rate] = {}
        demoted: dict[PathKey, str] = {}
        for name in self._transports:
            key = (view.incarnation, name, direction)
            if key in self._rates:
                rates[name, direction] = self._rates[key]
            until, why = self._demoted.get(key, (0.0, ""))
            if until > now:
                demoted[name, direction] = why
        trials: Mapping[PathKey, Tried] = {}
        if facts.same_host and not facts.same_process:
            trials = self._trials.between(place_of(local), place_of(remote))
        return planner.rank(
            facts,
            candidates,
            nbytes=nbytes,
            spans=spans,
            rates=rates,
            demoted=demoted,
            trials=trials,
        )

    def demote(self, incarnation: bytes, transport: str, direction: str, why: str) -> bool:
        """Try this path last for a while; whether that is news."""
        key = (incarnation, transport, direction)
        now = self._clock.now()
        is_news = self._demoted.get(key, (0.0, ""))[0] <= now
        self._demoted[key] = (now + DEMOTED_S, why)
        return is_news

    def measured(
        self, incarnation: bytes, transport: str, direction: str, bytes_per_s: float
    ) -> None:
        """Remember how fast one transfer was."""
        key = (incarnation, transport, direction)
        self._rates[key] = self._rates.get(key, Rate()).with_sample(bytes_per_s)

    def forget(self, incarnation: bytes) -> None:
        """The peer is gone."""
        for key in [key for key in self._rates if key[0] == incarnation]:
            del self._rates[key]
        for key in [key for key in self._demoted if key[0] == incarnation]:
            del self._demoted[key]
