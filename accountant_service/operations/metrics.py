"""Prometheus metrics of the service."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector

# creation timestamps, which nothing reads
disable_created_metrics()  # type: ignore[no-untyped-call]
# from a cached answer to the longest computation
_BUCKETS_SECONDS: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
)


class Metrics:
    """The metrics of one process, or of all workers that share a directory.

    Args:
        directory: where several workers store their metrics; None for one process.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._registry = registry = CollectorRegistry()
        histogram = partial(Histogram, buckets=_BUCKETS_SECONDS, registry=registry)
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, multiprocess_mode="livesum", registry=registry)
        self.requests = histogram(
            "accountant_request_seconds",
            "Duration of requests, by route template and status class",
            ["method", "route", "status"],
        )
        self.in_progress = gauge("accountant_requests_in_progress", "Requests in progress")
        self.waiting = gauge(
            "accountant_requests_waiting", "Requests without a known key that wait for their turn"
        )
        self.requests_dropped = counter(
            "accountant_requests_dropped", "Requests whose clients left before their turn"
        )
        self.refusals = counter(
            "accountant_refusals", "Requests answered with a problem, by its code", ["code"]
        )
        self.computations = histogram(
            "accountant_computation_seconds", "Duration of computations", ["question"]
        )
        self.cache_hits = counter(
            "accountant_cache_hits",
            "Requests answered from the cache or by a shared computation",
            ["question"],
        )
        self.writes = counter(
            "accountant_ledger_writes",
            "Writes of the ledger; repeated requests are not counted",
            ["kind"],
        )
        self.steps_granted = counter("accountant_steps_granted", "Steps granted by the ledger")
        self.webhook_attempts = counter(
            "accountant_webhook_attempts", "Events posted to webhooks, by the result", ["result"]
        )
        self.connections = gauge(
            "accountant_database_connections_in_use", "Database connections in use"
        )
        self.connects = counter("accountant_database_connects", "Database connections opened")

    def exposition(self, *collectors: Collector) -> bytes:
        """Return all metrics in the text format of Prometheus.

        Args:
            collectors: metrics that are read only for this scrape.
        """
        scrape = CollectorRegistry()
        if self._directory is None:
            scrape.register(self._registry)
        else:
            _remove_gauges_of_dead_workers(self._directory)
            MultiProcessCollector(scrape, str(self._directory))  # type: ignore[no-untyped-call]
        for collector in collectors:
            scrape.register(collector)
        return generate_latest(scrape)


def _remove_gauges_of_dead_workers(directory: Path) -> None:
    """Remove the gauge files of killed workers from the shared directory."""
    for file in directory.glob("gauge_live*.db"):
        process_id = int(file.stem.rpartition("_")[2])
        try:
            os.kill(process_id, 0)
        except ProcessLookupError:
            mark_process_dead(process_id, str(directory))  # type: ignore[no-untyped-call]
