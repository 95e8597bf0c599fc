"""Grants a second and their latency on either database, beside the bare transaction.

    python benchmarks/ledger.py [SECONDS]

The bare transaction runs the statements of a grant through the same driver: it reads a dataset's
row, locked, and a reservation's, and writes either, an entry and an idempotency key; with no rules,
no hash and no JSON. Both are measured in turn, several times, in one run on one machine: read the
ratios. PostgreSQL is left out, with a line that says so, where there is none.
"""

from __future__ import annotations

import sys
from pathlib import Path

# http.py hides a library; the tests' databases are used
sys.path = [str(Path(__file__).parents[1]), *(p for p in sys.path if not p.endswith("benchmarks"))]

import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack

from rich.console import Console
from rich.table import Table
from sqlalchemy import bindparam

from accountant_service.guarantee import NeighbouringRelation
from accountant_service.ledger import database as opening
from accountant_service.ledger.keys import Keys, Scope
from accountant_service.ledger.repository import KeyRecord, Repository
from accountant_service.ledger.service import Ledger, Request
from accountant_service.ledger.tables import DATASET, ENTRY, IDEMPOTENCY, RESERVATION
from accountant_service.mechanisms import DpSgd
from tests.databases import database

CLIENTS = (1, 8, 32)
ROUNDS = 5
CONSOLE = Console(width=110)
LOCK = DATASET.select().where(DATASET.c.id == bindparam("of")).with_for_update()
READ = RESERVATION.select().where(RESERVATION.c.id == bindparam("of"))
MOVE_RUN = (
    RESERVATION.update()
    .where(RESERVATION.c.id == bindparam("of"))
    .values(steps_granted=bindparam("new"))
)
MOVE_DATASET = (
    DATASET.update().where(DATASET.c.id == bindparam("of")).values(spent=bindparam("new"))
)
ENTRY_ROW, IDEMPOTENCY_ROW = ENTRY.insert(), IDEMPOTENCY.insert()
BODY = "x" * 350
LONG = DpSgd(100.0, sample_rate=1e-4, steps=10**9)


def request(key: KeyRecord, body: object) -> Request:
    return Request(key, uuid.uuid4().hex, "POST", body)


class Work:
    """One dataset, and a reservation for each client."""

    def __init__(self, repository: Repository, clients: int) -> None:
        self.repository, self.ledger = repository, Ledger(repository)
        _, self.key = Keys(repository).create([Scope.ADMIN])
        self.name = uuid.uuid4().hex
        self.ledger.create_dataset(
            request(self.key, self.name), self.name, 1000, 100.0, 1e-5,
            NeighbouringRelation.ADD_OR_REMOVE_ONE, "record", None,
        )  # fmt: skip
        with repository.reading() as reading:
            found = reading.dataset(self.name)
        assert found is not None
        self.dataset = found.identifier
        for i in range(clients):
            self.ledger.reserve(request(self.key, i), self.name, LONG, 3600, "")
        with repository.reading() as reading:
            self.runs = [run.identifier for run in reading.reservations(found)]
        self.done = [0] * clients
        self._numbers = iter(range(10**6, 10**9))
        self._lock = threading.Lock()

    def grant(self, client: int) -> None:
        body = {"steps": 1, "sequence": self.done[client]}
        self.ledger.grant(request(self.key, body), self.runs[client], 1, self.done[client])
        self.done[client] += 1

    def bare(self, client: int) -> None:
        """The same statements, and nothing else."""
        with self._lock:
            number = next(self._numbers)
        with self.repository.transaction() as transaction:
            run = transaction.connection.execute
            run(LOCK, {"of": self.dataset}).first()
            run(READ, {"of": self.runs[client]}).first()
            run(MOVE_RUN, {"of": self.runs[client], "new": number})
            run(ENTRY_ROW, {"dataset": self.dataset, "number": number, "body": BODY, "hash": ""})
            run(MOVE_DATASET, {"of": self.dataset, "new": number})
            run(
                IDEMPOTENCY_ROW,
                {
                    "key_id": self.key.identifier, "value": uuid.uuid4().hex, "fingerprint": "",
                    "status": 200, "answer": BODY, "created_at": number,
                },
            )  # fmt: skip


def measure(act: Callable[[int], None], clients: int, seconds: float) -> tuple[float, list[float]]:
    """Calls a second, and every call's milliseconds."""
    took: list[list[float]] = [[] for _ in range(clients)]
    end = time.perf_counter() + seconds

    def client(i: int) -> None:
        while (start := time.perf_counter()) < end:
            act(i)
            took[i].append(1e3 * (time.perf_counter() - start))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    every = [ms for each in took for ms in each]
    return len(every) / (time.perf_counter() - started), every


def throughput(kind: str, repository: Repository, seconds: float, table: Table) -> None:
    for clients in CLIENTS:
        bare, rates, took = [], [], []
        for _ in range(ROUNDS):
            bare.append(measure(Work(repository, clients).bare, clients, seconds / ROUNDS)[0])
            rate, each = measure(Work(repository, clients).grant, clients, seconds / ROUNDS)
            rates.append(rate)
            took += each
        ratio = statistics.median(ours / theirs for ours, theirs in zip(rates, bare, strict=True))
        centiles = statistics.quantiles(took, n=100)
        table.add_row(
            kind, f"{clients}", f"{statistics.median(rates):.0f}", f"{statistics.median(bare):.0f}",
            f"{ratio:.2f}", f"{centiles[49]:.1f}", f"{centiles[98]:.1f}",
        )  # fmt: skip


def by_length(kind: str, repository: Repository, table: Table) -> None:
    """Admission time as the record grows: its entries are written in bulk, not by grants."""
    work, written = Work(repository, 1), 0
    times = []
    for length in (100, 10_000, 1_000_000):
        while written < length:
            batch = range(written, min(length, written + 20_000))
            rows = [
                {"dataset": work.dataset, "number": 10**7 + n, "body": "x" * 250, "hash": ""}
                for n in batch
            ]
            with repository.transaction() as transaction:
                transaction.connection.execute(ENTRY.insert(), rows)
            written = batch.stop
        took = []
        for _ in range(200):
            start = time.perf_counter()
            work.grant(0)
            took.append(1e3 * (time.perf_counter() - start))
        times.append(statistics.median(took))
    table.add_row(kind, *(f"{ms:.2f}" for ms in times), f"{times[-1] / times[0]:.2f}")


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    rates = Table(title="Grants", title_justify="left")
    for column in ("database", "clients", "grants/s", "bare/s", "ratio", "p50 ms", "p99 ms"):
        rates.add_column(column, justify="right")
    lengths = Table(title="ms of a grant, by entries in the record", title_justify="left")
    for column in ("database", "1e2", "1e4", "1e6", "1e6 / 1e2"):
        lengths.add_column(column, justify="right")
    for kind in ("sqlite", "postgresql"):
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            try:
                url = stack.enter_context(database(kind, Path(folder)))
            except BaseException as skipped:  # pytest's own, where there is no PostgreSQL
                CONSOLE.print(f"{kind} is left out: {skipped}")
                continue
            repository = opening.open_repository(url)
            stack.callback(repository.close)
            throughput(kind, repository, seconds, rates)
            by_length(kind, repository, lengths)
    CONSOLE.print(rates)
    CONSOLE.print(lengths)


if __name__ == "__main__":
    main()
