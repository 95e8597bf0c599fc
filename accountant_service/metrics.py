"""What is counted: every metric with its name and meaning, and how it is written down."""

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

# a time for each number, which nothing reads
disable_created_metrics()  # type: ignore[no-untyped-call]
# from a cached answer to the longest question
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """The numbers of one application; of all its workers, where they share a directory.

    Args:
        directory: where several workers keep their numbers; None for one process.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory
        self._registry = registry = CollectorRegistry()
        histogram = partial(Histogram, buckets=_SECONDS, registry=registry)
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, multiprocess_mode="livesum", registry=registry)
        self.requests = histogram(
            "accountant_request_seconds",
            "Requests and how long they took, by route template and class of status",
            ["method", "route", "status"],
        )
        self.in_progress = gauge("accountant_requests_in_progress", "Requests being answered now")
        self.refusals = counter("accountant_refusals", "Problems answered, by code", ["code"])
        self.computations = histogram(
            "accountant_computation_seconds", "Computations and how long they took", ["question"]
        )
        self.cache_hits = counter(
            "accountant_cache_hits",
            "Questions answered without a computation of their own",
            ["question"],
        )
        self.writes = counter(
            "accountant_ledger_writes", "Writes the ledger made, without repeats", ["kind"]
        )
        self.steps_granted = counter("accountant_steps_granted", "Steps the ledger granted")
        self.connections = gauge(
            "accountant_database_connections_in_use", "Connections to the database in use now"
        )
        self.connects = counter("accountant_database_connects", "Connections made to the database")

    def exposition(self, *collectors: Collector) -> bytes:
        """Everything in Prometheus' text format.

        Args:
            collectors: what is looked up only when asked for.
        """
        scrape = CollectorRegistry()
        if self._directory is None:
            scrape.register(self._registry)
        else:
            _forget_dead_workers(self._directory)
            MultiProcessCollector(scrape, str(self._directory))  # type: ignore[no-untyped-call]
        for collector in collectors:
            scrape.register(collector)
        return generate_latest(scrape)


def _forget_dead_workers(directory: Path) -> None:
    """A worker that was killed has nothing in progress and no connection any more."""
    for file in directory.glob("gauge_live*.db"):
        identifier = int(file.stem.rpartition("_")[2])
        try:
            os.kill(identifier, 0)
        except ProcessLookupError:
            mark_process_dead(identifier, str(directory))  # type: ignore[no-untyped-call]
