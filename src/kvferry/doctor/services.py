"""Which pairs of memories are asked about, and what serves each, by trials or by a hello."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvferry import planner
from kvferry.config import EngineConfig
from kvferry.doctor.records import Facts, Service
from kvferry.engine import Engine
from kvferry.errors import UsageError
from kvferry.planner import PairFacts, PathKey, Plan, TransportFacts, Tried
from kvferry.transports import Capabilities
from kvferry.trials.records import HOST, TrialBook
from kvferry.trials.run import Outcome, Pair

NBYTES, BLOCKS = 32 << 20, 512
"""The size that rankings are for."""


def place_named(facts: Facts, name: str) -> str:
    """The place that a user means: ``host``, ``cuda``, ``cuda:1``, a UUID or its beginning.

    Raises UsageError, with what there is.
    """
    if name == HOST:
        return HOST
    head, _, number = name.partition(":")
    for gpu in facts.devices.gpus:
        is_named = head == "cuda" and gpu.ordinal >= 0 and str(gpu.ordinal) == (number or "0")
        if is_named or (len(name) > 4 and gpu.uuid.startswith(name)):
            return gpu.uuid
    seen = [f"cuda:{gpu.ordinal}" for gpu in facts.devices.seen]
    raise UsageError(
        f"there is no memory {name!r} here; there is {', '.join([HOST, *seen])}",
        fix=facts.devices.missing
        or "say host, cuda:N, a GPU's UUID, or tcp://host:port or unix:/path of an engine",
    )


def local_pairs(facts: Facts) -> list[Pair]:
    """Host memory and each GPU that is seen, with itself and with each other, each once."""
    gpus = [gpu.uuid for gpu in facts.devices.seen]
    among = [(a, b) for place, a in enumerate(gpus) for b in gpus[place:]]
    return [(HOST, HOST), *among, *((gpu, HOST) for gpu in gpus)]


def hidden_in(facts: Facts, pair: Pair) -> str:
    """Why trials between these two cannot be run by this process; "" if they can."""
    for gpu in facts.devices.hidden:
        if gpu.uuid in pair:
            setting = facts.devices.visible
            because = "" if setting is None else f", because CUDA_VISIBLE_DEVICES={setting!r}"
            return f"{gpu.uuid} ({gpu.name}) is hidden from this process{because}"
    return ""


def both_ways(pairs: Iterable[Pair]) -> list[Pair]:
    """Pairs and their mirror images: either side may move the bytes."""
    return list(dict.fromkeys(way for pair in pairs for way in (pair, pair[::-1])))


def services_of(pairs: Iterable[Pair], outcome: Outcome) -> list[Service]:
    """What trials found, by the way that the bytes go: each pair both ways, each way once."""
    found: dict[Pair, Service] = {}
    for source, target in both_ways(pairs):
        failed = outcome.failed.get((target, source)) or outcome.failed.get((source, target))
        found[source, target] = Service(
            source,
            target,
            outcome.plans.get((target, source, "pull")),
            outcome.plans.get((source, target, "push")),
            failed or outcome.problem,
        )
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Met:
    """A running engine as its hello describes it. rtt_s: a ping there and back."""

    name: str
    address: str
    same_host: bool
    unix: bool
    tcp: bool
    transports: frozenset[str]
    rtt_s: float


def meet(config: EngineConfig, address: str) -> tuple[Met, dict[str, Capabilities], dict[str, str]]:
    """Connect to a running engine: what it is, what an engine here can do, and why not the rest.

    Blocks. Raises UnreachableError and its kin, ConfigError for a malformed address.
    """
    with Engine(config, trials=TrialBook()) as engine:
        peer = engine.connect(address)
        rtt_s = min(peer.ping() for _ in range(3))
        view = peer.view
        assert view is not None
        met = Met(
            view.name,
            address,
            view.host == engine.host,
            bool(view.unix_address),
            bool(view.tcp_address),
            view.transports,
            rtt_s,
        )
        can = {name: each.capabilities() for name, each in engine.transports.items()}
        return met, can, dict(engine.unusable)


def about_gpus(pair: Pair) -> list[str]:
    """What to keep in mind of an explanation for two GPUs; nothing for other pairs."""
    if HOST in pair or pair[0] == pair[1]:
        return []
    return [
        "this holds for processes that both see both GPUs (CUDA_VISIBLE_DEVICES=0,1 and 1,0); "
        "where one is hidden from the other's process, cuda_ipc is out and staged serves"
    ]


def about(met: Met, place: str, facts: Facts) -> str:
    """What people should know of an explanation that is for a running engine."""
    kind = "host memory" if place == HOST else "memory of the same GPU"
    proof = "trials between two processes of this machine stand for it"
    if not met.same_host:
        rdma = ", ".join(facts.links.rdma)
        proof = "it is on another host, so nothing was tried, and figures are expectations; "
        proof += f"no transport uses {rdma} yet" if rdma else "there is no RDMA device here"
    return (
        f"{met.name} at {met.address} answers in {met.rtt_s * 1e6:.0f} us; its memory is taken for "
        f"{kind}; {proof}"
    )


def services_with(
    met: Met,
    place: str,
    can: dict[str, Capabilities],
    unusable: dict[str, str],
    book: TrialBook,
) -> list[Service]:
    """The paths between memory of a place here and like memory of a running engine; pure.

    On the same host the trials between two processes of one's own stand for that engine.
    """
    plans: dict[str, Plan] = {}
    stand_in = place if met.same_host else ""
    kind = HOST if place == HOST else "cuda"
    for direction in ("pull", "push"):
        pair = PairFacts(
            kind, kind, direction == "push", False, met.same_host, met.unix, "read-write"
        )
        offered = [
            TransportFacts(
                name,
                capabilities,
                remote="" if name in met.transports else "the peer has not enabled it",
                blocked="" if name != "tcp" or met.tcp else "the peer does not listen on TCP",
            )
            for name, capabilities in can.items()
        ]
        trials: dict[PathKey, Tried] = {}
        if met.same_host:
            trials = dict(book.between(place, place))
        plan = planner.rank(pair, offered, nbytes=NBYTES, spans=BLOCKS, trials=trials)
        plans[direction] = Plan(plan.paths, {**plan.rejected, **unusable})
    return [
        Service(met.address, place, pull=plans["pull"], stand_in=stand_in),
        Service(place, met.address, push=plans["push"], stand_in=stand_in),
    ]
