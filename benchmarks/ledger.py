"""Measure grants per second and their latency on both databases, and the bare transaction.

    python benchmarks/ledger.py [SECONDS]

The bare transaction runs the SQL statements of a grant through the same driver: it reads and locks
the dataset's row, reads the reservation's, updates both, and inserts an entry and an idempotency
key; without rules, hashes and JSON. Both are measured alternately, several times, in one run on one
machine: compare the ratios. PostgreSQL is skipped, with a message, if no server is available.
"""

from __future__ import annotations

import sys
from pathlib import Path

# http.py shadows a library; the root is for tests.support
sys.path = [str(Path(__file__).parents[1]), *(p for p in sys.path if not p.endswith("benchmarks"))]

import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from rich.console import Console
from rich.table import Table
from sqlalchemy import bindparam

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.api.ledger_views import ANSWERS
from accountant_service.ledger import database as opening
from accountant_service.ledger.api_keys import Keys, Scope
from accountant_service.ledger.key_record import KeyRecord
from accountant_service.ledger.repository import Repository
from accountant_service.ledger.rules import NewDataset
from accountant_service.ledger.service import Ledger, WriteRequest
from accountant_service.ledger.tables import DATASET, ENTRY, IDEMPOTENCY, RESERVATION
from accountant_service.mechanisms import DpSgd
from tests.support.databases import database

CLIENTS = (1, 8, 32)
ROUNDS = 5
CONSOLE = Console(width=110)
LOCK_DATASET = DATASET.select().where(DATASET.c.id == bindparam("of")).with_for_update()
READ_RESERVATION = RESERVATION.select().where(RESERVATION.c.id == bindparam("of"))
UPDATE_RESERVATION = (
    RESERVATION.update()
    .where(RESERVATION.c.id == bindparam("of"))
    .values(steps_granted=bindparam("new"))
)
UPDATE_DATASET = (
    DATASET.update().where(DATASET.c.id == bindparam("of")).values(spent=bindparam("new"))
)
INSERT_ENTRY, INSERT_IDEMPOTENCY = ENTRY.insert(), IDEMPOTENCY.insert()
BODY = "x" * 350
LONG_RUN = DpSgd(100.0, sample_rate=1e-4, steps=10**7)  # as many as clients fit


def open_each_database() -> Iterator[tuple[str, Repository]]:
    """Yield the kind of each database with an empty ledger on it; say which are skipped."""
    for kind in ("sqlite", "postgresql"):
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            try:
                url = stack.enter_context(database(kind, Path(folder)))
            except BaseException as skipped:  # pytest.skip's exception, if there is no PostgreSQL
                CONSOLE.print(f"{kind} is skipped: {skipped}")
                continue
            repository = opening.open_repository(url)
            stack.callback(repository.close)
            yield kind, repository


def make_write_request(key: KeyRecord, body: object) -> WriteRequest:
    """Return a write request with a new idempotency key."""
    return WriteRequest(key, uuid.uuid4().hex, "POST", body)


class Workload:
    """A dataset with a reservation for each client, on which transactions are measured."""

    def __init__(self, repository: Repository, clients: int) -> None:
        self.repository, self.ledger = repository, Ledger(repository, ANSWERS)
        _, self.key = Keys(repository).create([Scope.ADMIN])
        self.name = uuid.uuid4().hex
        relation = NeighbouringRelation.ADD_OR_REMOVE_ONE
        # its budget takes no computation
        new = NewDataset(
            self.name, 1000, 100.0, 1e-5, relation, "record", None, "renyi", accept_weak=True
        )
        self.ledger.create_dataset(make_write_request(self.key, self.name), new)
        with repository.reading() as reading:
            found = reading.find_dataset(self.name)
        assert found is not None
        self.dataset = found.identifier
        for i in range(clients):
            self.ledger.reserve(make_write_request(self.key, i), self.name, LONG_RUN, 3600, "")
        with repository.reading() as reading:
            self.runs = [run.identifier for run in reading.list_reservations(found)]
        self.done = [0] * clients
        self._numbers = iter(range(10**6, 10**9))
        self._lock = threading.Lock()

    def grant(self, client: int) -> None:
        """Grant one step to a client's reservation."""
        body = {"steps": 1, "sequence": self.done[client]}
        self.ledger.grant(
            make_write_request(self.key, body), self.runs[client], 1, self.done[client]
        )
        self.done[client] += 1

    def run_bare_transaction(self, client: int) -> None:
        """Run only the SQL statements of a grant, without the ledger's rules."""
        with self._lock:
            number = next(self._numbers)
        with self.repository.transaction() as transaction:
            run = transaction.connection.execute
            run(LOCK_DATASET, {"of": self.dataset}).first()
            run(READ_RESERVATION, {"of": self.runs[client]}).first()
            run(UPDATE_RESERVATION, {"of": self.runs[client], "new": number})
            run(INSERT_ENTRY, {"dataset": self.dataset, "number": number, "body": BODY, "hash": ""})
            run(UPDATE_DATASET, {"of": self.dataset, "new": str(number)})
            run(
                INSERT_IDEMPOTENCY,
                {
                    "key_id": self.key.identifier, "value": uuid.uuid4().hex, "fingerprint": "",
                    "status": 200, "answer": BODY, "created_at": number,
                },
            )  # fmt: skip


def measure_throughput(
    call: Callable[[int], None], clients: int, seconds: float
) -> tuple[float, list[float]]:
    """Call from several clients; return calls per second, and each call's milliseconds."""
    took: list[list[float]] = [[] for _ in range(clients)]
    end = time.perf_counter() + seconds

    def client(i: int) -> None:
        """Call again and again from client number `i` until the time is over."""
        while (start := time.perf_counter()) < end:
            call(i)
            took[i].append(1e3 * (time.perf_counter() - start))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    every = [ms for each in took for ms in each]
    return len(every) / (time.perf_counter() - started), every


def add_throughput_rows(kind: str, repository: Repository, seconds: float, table: Table) -> None:
    """Add a table row with a database's throughput for each number of clients."""
    for clients in CLIENTS:
        bare, rates, took = [], [], []
        for _ in range(ROUNDS):
            bare.append(
                measure_throughput(
                    Workload(repository, clients).run_bare_transaction, clients, seconds / ROUNDS
                )[0]
            )
            rate, each = measure_throughput(
                Workload(repository, clients).grant, clients, seconds / ROUNDS
            )
            rates.append(rate)
            took += each
        ratio = statistics.median(ours / theirs for ours, theirs in zip(rates, bare, strict=True))
        centiles = statistics.quantiles(took, n=100)
        table.add_row(
            kind, f"{clients}", f"{statistics.median(rates):.0f}", f"{statistics.median(bare):.0f}",
            f"{ratio:.2f}", f"{centiles[49]:.1f}", f"{centiles[98]:.1f}",
        )  # fmt: skip


def add_length_row(kind: str, repository: Repository, table: Table) -> None:
    """Add a table row with the time of a grant for increasing numbers of entries."""
    work, written = Workload(repository, 1), 0
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
    """Print tables of the ledger's throughput with SQLite and PostgreSQL."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    rates = Table(title="Grants", title_justify="left")
    for column in ("database", "clients", "grants/s", "bare/s", "ratio", "p50 ms", "p99 ms"):
        rates.add_column(column, justify="right")
    lengths = Table(title="ms of a grant, by entries in the record", title_justify="left")
    for column in ("database", "1e2", "1e4", "1e6", "1e6 / 1e2"):
        lengths.add_column(column, justify="right")
    for kind, repository in open_each_database():
        add_throughput_rows(kind, repository, seconds, rates)
        add_length_row(kind, repository, lengths)
    CONSOLE.print(rates)
    CONSOLE.print(lengths)


if __name__ == "__main__":
    main()
