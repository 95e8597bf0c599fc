"""Measure exports, `verify`, lists and pages of a ledger as it grows.

    python benchmarks/growth.py [sqlite|postgresql] [ENTRIES …]

The entries are grants of one dataset, written by the ledger's own rules. Times are CPU seconds of
this process, so that other load on the machine hardly matters, and of PostgreSQL none.
"""

from __future__ import annotations

import sys
from pathlib import Path

# http.py shadows a library; the root is for tests.support
sys.path = [str(Path(__file__).parents[1]), *(p for p in sys.path if not p.endswith("benchmarks"))]

import json
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from accountant_service.ledger import database as opening
from accountant_service.ledger import exporting, hash_chain, rules
from accountant_service.ledger.exporting import EntryQuery, Period
from accountant_service.ledger.repository import Repository, now
from accountant_service.ledger.rules import Balance, EntryKind
from accountant_service.ledger.verification import verify
from benchmarks.ledger import Workload
from tests.support.databases import database

DATASETS = 1000
BATCH = 1000
CONSOLE = Console(width=110)


def add_datasets(work: Workload) -> None:
    """Add many datasets without runs, which are like the first."""
    with work.repository.transaction() as transaction:
        first = transaction.find_dataset(work.name)
        assert first is not None
        nothing = Balance(first.policy.nothing, first.policy.nothing)
        for _ in range(DATASETS):
            name = uuid.uuid4().hex
            new = replace(first, identifier=name, name=name, balance=nothing, version=0,
                          head=hash_chain.GENESIS, created_at=now())  # fmt: skip
            transaction.record_audit_event("benchmark", "dataset-created", name)
            transaction.add_dataset(new, "benchmark")


def fill(work: Workload, entries: int) -> None:
    """Grant single steps until the dataset has so many entries."""
    while True:
        with work.repository.transaction() as transaction:
            dataset = transaction.find_dataset(work.name, lock=True)
            run = transaction.find_reservation(work.runs[0])
            assert dataset is not None
            assert run is not None
            for _ in range(min(BATCH, entries - dataset.version)):
                change = rules.grant(run, 1, run.steps_granted)
                dataset = transaction.apply_change(dataset, change, "benchmark")
                run = change.reservation
            if dataset.version >= entries:
                return


def measure(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Return the CPU seconds of a call, and its result."""
    start = time.process_time()
    found = call(*arguments)
    return time.process_time() - start, found


def export(repository: Repository, query: EntryQuery) -> int:
    """Read a whole export page by page; return the number of its entries."""
    count, cursor = 0, exporting.ENTRIES_START
    while cursor is not None:
        found, following = exporting.read_entries(repository, query, cursor)
        count, cursor = count + len(found), following  # type: ignore[assignment]
    return count


def write_lines(repository: Repository) -> int:
    """Write the whole export as JSON lines, as the command does; return the number of lines."""
    count = 0
    with repository.snapshot() as reading:
        for entry in exporting.iterate_entries(reading, EntryQuery()):
            json.dumps(entry.to_json())
            count += 1
    return count


def main() -> None:
    """Print a table of times for each number of entries."""
    kind = sys.argv[1] if len(sys.argv) > 1 else "sqlite"
    sizes = [int(float(word)) for word in sys.argv[2:]] or [10_000, 100_000]
    table = Table(title=f"CPU seconds, {kind}, {DATASETS} more datasets", title_justify="left")
    for column in ("entries", "export", "entries/s", "last page ms", "commits ms", "since ms",
                   "verify", "entries/s", "page of datasets ms"):  # fmt: skip
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as folder, database(kind, Path(folder)) as url:
        repository = opening.open_repository(url)
        work = Workload(repository, 1)
        add_datasets(work)
        for size in sizes:
            fill(work, size)
            exported, count = measure(write_lines, repository)
            end = work.name, size - 200
            last, _ = measure(exporting.read_entries, repository, EntryQuery(), end)
            kinds = EntryQuery(None, frozenset([EntryKind.COMMIT]))
            commits, _ = measure(export, repository, kinds)
            recent = EntryQuery(None, frozenset(), Period(since=now()))
            since, _ = measure(export, repository, recent)
            verified, report = measure(verify, repository)
            assert report.faults == [], report.faults[:3]
            with repository.reading() as reading:
                listed, _ = measure(reading.list_datasets, "", 201)
            table.add_row(
                f"{count}", f"{exported:.2f}", f"{count / exported:.0f}", f"{1e3 * last:.1f}",
                f"{1e3 * commits:.1f}", f"{1e3 * since:.1f}", f"{verified:.2f}",
                f"{report.entries / verified:.0f}", f"{1e3 * listed:.1f}",
            )  # fmt: skip
        repository.close()
    CONSOLE.print(table)


if __name__ == "__main__":
    main()
