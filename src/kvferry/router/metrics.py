"""The router's metrics, in a registry of their own so that several routers fit in one process."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from kvferry.router.workers import Worker

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class RouterMetrics:
    """Counters of one router. Labels take values from closed sets, and from its configuration."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "kvferry_router_requests",
            "Requests by how they ended",
            ["outcome"],
            registry=self.registry,
        )
        self.legs = Counter(
            "kvferry_router_legs",
            "Requests sent to workers, by HTTP status or by what stopped them",
            ["role", "status"],
            registry=self.registry,
        )
        self.skipped = Counter(
            "kvferry_router_prefill_skipped",
            "Requests that went to decode without a hand-off, by reason",
            ["reason"],
            registry=self.registry,
        )
        self.inflight = Gauge(
            "kvferry_router_requests_inflight", "Requests in flight", registry=self.registry
        )
        self.first_byte = Histogram(
            "kvferry_router_first_byte_seconds",
            "From the request's arrival to the first byte of its answer",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.prefill = Histogram(
            "kvferry_router_prefill_seconds",
            "Length of the prefill leg",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.worker_up = Gauge(
            "kvferry_router_worker_up",
            "1 for a worker that takes requests",
            ["role", "worker"],
            registry=self.registry,
        )
        self.worker_inflight = Gauge(
            "kvferry_router_worker_inflight",
            "Legs that are running on a worker",
            ["role", "worker"],
            registry=self.registry,
        )

    def render(self, workers: Iterable[Worker]) -> tuple[bytes, str]:
        """The text that a scraper reads, and its content type."""
        for worker in workers:
            self.worker_up.labels(worker.role, worker.name).set(worker.up)
            self.worker_inflight.labels(worker.role, worker.name).set(worker.inflight)
        return generate_latest(self.registry), CONTENT_TYPE_LATEST
