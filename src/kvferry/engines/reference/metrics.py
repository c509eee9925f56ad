"""Prometheus metrics of one engine, in a registry of their own. They can never fail a request."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvferry.engines.reference.observer import Observer

log = logging.getLogger(__name__)

PREFIX = "kvferry_reference"
_HANDOFF_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5, 30)
_TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

P = ParamSpec("P")


def _harmless(method: Callable[P, None]) -> Callable[P, None]:
    """What goes wrong in here is logged, and nothing else."""

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception:
            log.warning("a metric was not recorded", exc_info=True)

    return guarded


class Metrics(Observer):
    """Counts what the scheduler and the server report.

    statistics: returns the scheduler's statistics, or {} while there is none; asked at each scrape.
    """

    def __init__(self, statistics: Callable[[], dict[str, Any]]) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_Gauges(statistics))

        def counter(name: str, text: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(f"{PREFIX}_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"{PREFIX}_{name}", text, buckets=buckets, registry=registry)

        self._responses = counter("responses", "HTTP responses.", ("route", "status"))
        self._answered = counter("sequences", "Sequences answered, by outcome.", ("outcome",))
        self._claims = counter("claims", "Claims ended, by outcome.", ("outcome",))
        self._offers = counter("offers", "Offers ended, by outcome.", ("outcome",))
        self._prompt_tokens = counter("prompt_tokens", "Tokens of prompts received.")
        self._output_tokens = counter("output_tokens", "Tokens generated.")
        self._handoff_bytes = counter("handoff_bytes", "Bytes of KV loaded from other engines.")
        self._recomputed = counter("recomputed", "Prompts computed here after a failed load.")
        self._handoff_s = histogram(
            "handoff_seconds", "From claim to loaded KV.", _HANDOFF_BUCKETS_S
        )
        self._ttft_s = histogram(
            "time_to_first_token_seconds", "From arrival to first token.", _TTFT_BUCKETS_S
        )

    def render(self) -> bytes:
        """All metrics in the text format; empty if they cannot be had."""
        try:
            return generate_latest(self._registry)
        except Exception:
            log.warning("the metrics cannot be shown", exc_info=True)
            return b""

    @_harmless
    def responded(self, route: str, status: int) -> None:
        """The server sent a response with this status."""
        self._responses.labels(route, str(status)).inc()

    @_harmless
    def started(self, tokens: int) -> None:
        self._prompt_tokens.inc(tokens)

    @_harmless
    def first_token(self, seconds: float) -> None:
        self._ttft_s.observe(seconds)

    @_harmless
    def token(self) -> None:
        self._output_tokens.inc()

    @_harmless
    def answered(self, outcome: str) -> None:
        self._answered.labels(outcome).inc()

    @_harmless
    def claim_ended(self, outcome: str, seconds: float, nbytes: int) -> None:
        self._claims.labels(outcome).inc()
        if outcome == "loaded":
            self._handoff_s.observe(seconds)
            self._handoff_bytes.inc(nbytes)

    @_harmless
    def offer_ended(self, outcome: str) -> None:
        self._offers.labels(outcome).inc()

    @_harmless
    def recomputed(self) -> None:
        self._recomputed.inc()


class _Gauges(Collector):
    """What the scheduler holds at this moment."""

    def __init__(self, statistics: Callable[[], dict[str, Any]]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[GaugeMetricFamily]:
        now = self._statistics()
        states = GaugeMetricFamily(
            f"{PREFIX}_sequences_now", "Sequences by state.", labels=["state"]
        )
        for state, count in now.get("sequences", {}).items():
            states.add_metric([state], count)
        yield states
        for key, text in (
            ("blocks_free", "KV blocks that nobody holds."),
            ("blocks_total", "KV blocks there are."),
            ("blocks_pinned", "KV blocks that a connector works with."),
            ("overdue", "Sequences whose blocks a connector should have left."),
        ):
            yield GaugeMetricFamily(f"{PREFIX}_{key}", text, value=now.get(key, 0))
