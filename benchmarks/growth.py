"""Measure exports, `verify` and pages of lists as a ledger grows, on both databases.

    python benchmarks/growth.py [ENTRIES …]

A thousand datasets have no run. The entries are of one more: runs of eighteen single steps, every
fiftieth still open. They are written in bulk, by the ledger's own rules and hashes. Exports and
verifications are timed in CPU seconds of this process, so that other load on the machine hardly
matters, and of PostgreSQL none. Pages are timed by the clock, which counts the database too: the
best of ten calls. The exit code is 1 if an export is slower than 20 000 entries a second, or if
pages grow with the ledger. PostgreSQL is skipped, with a message, if no server is available.
"""

from __future__ import annotations

import sys
from pathlib import Path

# http.py shadows a library; the root is for tests.support
sys.path = [str(Path(__file__).parents[1]), *(p for p in sys.path if not p.endswith("benchmarks"))]

import json
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from accountant_service.ledger import exporting, hash_chain, rules
from accountant_service.ledger.columns import Row, write_row
from accountant_service.ledger.exporting import EntryQuery, Period
from accountant_service.ledger.repository import Repository, now
from accountant_service.ledger.rules import Balance, Change, Dataset, EntryKind, Reservation, State
from accountant_service.ledger.tables import DATASET, ENTRY, RESERVATION
from accountant_service.ledger.verification import verify
from accountant_service.version import __version__
from benchmarks.ledger import LONG_RUN, Workload, make_write_request, open_each_database

DATASETS = 1000
GRANTS = 18  # of a run
BATCH = 10_000  # entries
PAGE = 200
RATE_MIN = 20_000.0  # entries of an export, each second
PAGE_GROWTH_MAX, PAGE_MS = 2.0, 5.0  # from the first to the last size; below that, any
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


class Writer:
    """Writes runs and their entries in bulk, each as the ledger would have written it.

    Args:
        work: the ledger, and the dataset that grows.
    """

    def __init__(self, work: Workload) -> None:
        self._repository, self._name = work.repository, work.name
        request = make_write_request(work.key, "short")
        short = replace(LONG_RUN, steps=GRANTS + 2)
        answer = work.ledger.reserve(request, work.name, short, 3600, "")
        with self._repository.reading() as reading:
            run = reading.find_reservation(json.loads(answer.text)["id"])
            assert run is not None
            self._model: Reservation = run
        self._runs = 0

    def fill(self, entries: int) -> None:
        """Write runs until the dataset has so many entries."""
        while self._write_batch(entries) < entries:
            pass

    def _write_batch(self, entries: int) -> int:
        """Write runs of one batch in a transaction; return the number of entries afterwards."""
        with self._repository.transaction() as transaction:
            dataset = transaction.find_dataset(self._name, lock=True)
            assert dataset is not None
            rows: list[Row] = []
            runs: list[Row] = []
            while len(rows) < BATCH and dataset.version < entries:
                dataset, run = self._write_run(dataset, entries, rows)
                runs.append(write_row(run))
            transaction.connection.execute(ENTRY.insert(), rows)
            transaction.connection.execute(RESERVATION.insert(), runs)
            transaction.connection.execute(
                DATASET.update().where(DATASET.c.id == dataset.identifier), write_row(dataset)
            )
            return dataset.version

    def _write_run(
        self, dataset: Dataset, entries: int, rows: list[Row]
    ) -> tuple[Dataset, Reservation]:
        """Add the rows of a run's entries, up to a number; return the dataset and the run."""
        self._runs += 1
        run = replace(self._model, identifier=uuid.uuid4().hex, expires_at=now() + 3_600_000_000)
        change = rules.reserve(dataset, run, dataset.policy, [])
        dataset = _append(dataset, change, rows)
        for _ in range(min(GRANTS, entries - dataset.version)):
            change = rules.grant(change.reservation, 1, change.reservation.steps_granted)
            dataset = _append(dataset, change, rows)
        if self._runs % 50 and dataset.version < entries:
            ended = rules.close(change.reservation, State.COMMITTED)
            assert ended is not None
            change = rules.number_end(ended, dataset.version + 1)
            dataset = _append(dataset, change, rows)
        return dataset, change.reservation


def _append(dataset: Dataset, change: Change, rows: list[Row]) -> Dataset:
    """Add the row of a change's entry; return the dataset after it."""
    number, at = dataset.version + 1, now()
    amounts = dataset.policy.balance_fields(change.balance.spent, change.balance.held)
    key = change.reservation.key
    fields = rules.describe_entry(number, change.kind, at, key, amounts, __version__)
    body = hash_chain.encode_entry(fields | rules.describe_change(change))
    head = hash_chain.hash_entry(dataset.head, body)
    rows.append(
        {"dataset": dataset.identifier, "number": number, "body": body, "hash": head,
         "kind": change.kind.value, "at": at}
    )  # fmt: skip
    balance = dataset.balance.plus(change.balance)
    return replace(dataset, version=number, head=head, balance=balance)


def measure(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Return the CPU seconds of a call, and its result."""
    start = time.process_time()
    found = call(*arguments)
    return time.process_time() - start, found


def measure_page(call: Callable[..., Any], *arguments: Any) -> float:
    """Return the milliseconds of the quickest of ten calls."""
    took = []
    for _ in range(10):
        start = time.perf_counter()
        call(*arguments)
        took.append(1e3 * (time.perf_counter() - start))
    return min(took)


def write_lines(repository: Repository) -> int:
    """Write the whole export as JSON lines, as the command does; return the number of lines."""
    count = 0
    with repository.snapshot() as reading:
        for entry in exporting.iterate_entries(reading, EntryQuery()):
            json.dumps(entry.to_json())
            count += 1
    return count


def measure_record(work: Workload, writer: Writer, size: int) -> list[float]:
    """Return the CPU seconds of an export, of `verify`, and of one that goes on for a page."""
    exported, count = measure(write_lines, work.repository)
    verified, report = measure(verify, work.repository)
    assert report.faults == [], report.faults[:3]
    assert report.entries == count
    writer.fill(size + PAGE)
    resumed, second = measure(verify, work.repository, report.states)
    assert second.faults == [], second.faults[:3]
    assert second.entries - second.entries_before == PAGE
    return [exported, count / exported, verified, count / verified, resumed]


def measure_pages(work: Workload, size: int) -> list[float]:
    """Return the milliseconds of a page of each list, most of them at its end."""
    repository, key = work.repository, work.key
    end = work.name, size - PAGE
    commits = EntryQuery(None, frozenset([EntryKind.COMMIT]))
    recent = EntryQuery(None, frozenset(), Period(since=now()))
    with repository.reading() as reading:
        dataset = reading.find_dataset(work.name)
        assert dataset is not None
        runs = reading.list_reservations(dataset)
    ended = sorted(run.expires_at for run in runs if run.state is not State.OPEN)
    earliest = ended[min(PAGE, len(ended) - 1)]
    return [
        measure_page(exporting.read_entries, repository, EntryQuery(), end),
        measure_page(exporting.read_entries, repository, commits, (work.name, size // 2)),
        measure_page(exporting.read_entries, repository, recent, exporting.ENTRIES_START),
        measure_page(work.ledger.list_reservations, key, work.name, None, PAGE),
        measure_page(work.ledger.list_reservations, key, work.name, (True, earliest, ""), PAGE),
        measure_page(work.ledger.list_datasets, key, "", PAGE + 1),
    ]


def find_misses(records: list[list[float]], pages: list[list[float]]) -> list[str]:
    """Return the goals that the measurements of one database miss."""
    slow = [f"an export of {each[1]:.0f} entries/s" for each in records if each[1] < RATE_MIN]
    return slow + [
        f"a page of {last:.1f} ms that took {first:.1f} ms before"
        for first, last in zip(pages[0], pages[-1], strict=True)
        if last > max(PAGE_MS, PAGE_GROWTH_MAX * first)
    ]


def main() -> None:
    """Print tables of times for each database and number of entries."""
    sizes = [int(float(word)) for word in sys.argv[1:]] or [10_000, 100_000, 1_000_000]
    record = Table(title=f"CPU seconds, with {DATASETS} more datasets", title_justify="left")
    for column in ("database", "entries", "export", "entries/s", "verify", "entries/s",
                   f"go on, {PAGE} new"):  # fmt: skip
        record.add_column(column, justify="right")
    lists = Table(title="Milliseconds of a page", title_justify="left")
    for column in ("database", "entries", "entries", "commits", "since now", "runs, first",
                   "runs, last", "datasets"):  # fmt: skip
        lists.add_column(column, justify="right")
    misses: list[str] = []
    for kind, repository in open_each_database():
        work = Workload(repository, 1)
        add_datasets(work)
        writer = Writer(work)
        records, pages = [], []
        for size in sizes:
            writer.fill(size)
            records.append(measure_record(work, writer, size))
            pages.append(measure_pages(work, size))
            digits = (2, 0, 2, 0, 2)
            record.add_row(
                kind, f"{size}",
                *(f"{x:.{n}f}" for x, n in zip(records[-1], digits, strict=True)),
            )  # fmt: skip
            lists.add_row(kind, f"{size}", *(f"{ms:.1f}" for ms in pages[-1]))
        misses += [f"{kind}: {each}" for each in find_misses(records, pages)]
    CONSOLE.print(record)
    CONSOLE.print(lists)
    if misses:
        raise SystemExit("\n".join(misses))


if __name__ == "__main__":
    main()
