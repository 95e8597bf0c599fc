"""Ledgers of every revision are migrated, verify and go on.

`ledger-0003.sql` has datasets of both filters: runs like the reference and exchanged ones, ended
early, ended without a grant, and open. From `ledger-0004.sql` on one is closed beside an open run,
which goes on; a key has a quota, and events wait for a webhook. `ledger-0009.sql` has a run on
several datasets.
`python -m tests.contract.test_earlier_ledgers` records it anew.
"""

from __future__ import annotations

import json
import sqlite3
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.api.ledger_views import ANSWERS
from accountant_service.ledger import database as opening
from accountant_service.ledger.api_keys import Keys, Scope
from accountant_service.ledger.caps import Caps
from accountant_service.ledger.errors import DatasetClosedError
from accountant_service.ledger.filters import (
    AdditionFilter,
    LateMixtureFilter,
    LateReferenceFilter,
    ReferenceFilter,
    RenyiFilter,
)
from accountant_service.ledger.filters.reference import ReferenceCharge
from accountant_service.ledger.key_record import KeyRecord
from accountant_service.ledger.repository import Repository
from accountant_service.ledger.rules import Cap, HolderKind, NewDataset, State
from accountant_service.ledger.schema_revision import REVISION
from accountant_service.ledger.service import Ledger, WriteRequest
from accountant_service.ledger.verification import verify
from accountant_service.ledger.webhooks import create_webhook
from accountant_service.mechanisms import DpSgd, Mechanism
from tests.support.databases import database
from tests.support.earlier_ledgers import FIXTURES, open_unmigrated, read_rows

NEWEST = "0009"  # of the fixtures
REFERENCE = DpSgd(4.0, sample_rate=0.1, steps=30)
OTHER = DpSgd(6.0, sample_rate=0.1, steps=20)
UNCHANGED = ("api_key", "audit_event", "secret", "entry", "idempotency_key")


REVISIONS = ("0001", "0002", "0003", "0004", "0005", "0006", "0007", "0008", NEWEST)
# tier 1 has one; PostgreSQL has one that runs each migration, and the last; the others at night
ACCEPTED = [
    pytest.param(database, revision, marks=[] if marks is None else marks)
    for database, revisions, marks in (
        ("sqlite", REVISIONS[:1], None),
        ("sqlite", REVISIONS[1:], pytest.mark.slow),
        ("postgresql", (REVISIONS[0], REVISIONS[2], NEWEST), pytest.mark.slow),
        ("postgresql", (REVISIONS[1], *REVISIONS[3:8]), pytest.mark.nightly),
    )
    for revision in revisions
]


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with database(request.param, tmp_path) as found:
        yield found


class Writer:
    """A key that writes to a ledger."""

    def __init__(self, repository: Repository) -> None:
        self.ledger = Ledger(repository, ANSWERS)
        self.key: KeyRecord = Keys(repository).create([Scope.ADMIN])[1]

    def request(self) -> WriteRequest:
        return WriteRequest(self.key, uuid.uuid4().hex, "test", None)

    def reserve(self, name: str, mechanism: Mechanism, granted: int = 0) -> str:
        """Reserve a plan, and grant the first of its steps."""
        answer = self.ledger.reserve(self.request(), name, mechanism, 3600, "")
        identifier = str(json.loads(answer.text)["id"])
        if granted:
            self.ledger.grant(self.request(), identifier, granted, 0)
        return identifier

    def reserve_jointly(self, names: Sequence[str], mechanism: Mechanism, granted: int) -> None:
        """Reserve a plan on several datasets, and grant the first of its steps."""
        answer = self.ledger.reserve_jointly(self.request(), names, mechanism, 3600, "")
        self.ledger.grant(self.request(), str(json.loads(answer.text)["id"]), granted, 0)


def record(url: str) -> None:
    """Write the history of the newest fixture to an empty database."""
    repository = opening.open_repository(url)
    writer = Writer(repository)
    Keys(repository).create([Scope.RUN], "trainer", requests_per_minute=600)
    with repository.transaction() as transaction:
        transaction.add_webhook(
            create_webhook("https://example.org/budgets", None, (0.1,), 0), "test"
        )
    relation = NeighbouringRelation.ADD_OR_REMOVE_ONE
    for new in (
        NewDataset("first", 60_000, 3.0, 1e-5, relation, "record"),
        NewDataset("planned", 60_000, 2.0, 1e-6, relation, "a person’s visits", REFERENCE),
        NewDataset("divergence", 60_000, 4.0, 1e-5, relation, "record", REFERENCE, "renyi"),
        NewDataset("mixture", 60_000, 4.0, 1e-5, relation, "record", None, "renyi"),
        NewDataset("sums", 60_000, 4.0, 1e-5, relation, "record", None, "addition"),
    ):
        writer.ledger.create_dataset(writer.request(), new)
        name, ledger = new.name, writer.ledger
        Caps(repository).set(name, Cap(HolderKind.KEY, writer.key.identifier, 0.9), "test")
        ledger.release(writer.request(), writer.reserve(name, OTHER))
        ledger.commit(writer.request(), writer.reserve(name, REFERENCE, 30))
        ledger.commit(writer.request(), writer.reserve(name, REFERENCE, 11))
        ledger.commit(writer.request(), writer.reserve(name, OTHER, 7))
        ledger.release(writer.request(), writer.reserve(name, OTHER, 20))
        run = writer.reserve(name, OTHER, 3)
        ledger.renew(writer.request(), run, 7200)
        if name == "planned":
            ledger.close_dataset(writer.request(), name)
            ledger.grant(writer.request(), run, 2, 3)
    writer.reserve_jointly(("first", "mixture", "sums"), OTHER, 2)
    repository.close()


@pytest.mark.parametrize("revision", ["0001", "0002"])
def test_every_dataset_keeps_its_filter_its_balance_and_its_record(revision: str, url: str) -> None:
    before = open_unmigrated(url, revision)
    rows = {table: read_rows(before, table) for table in (*UNCHANGED, "dataset", "reservation")}
    assert rows["entry"]
    assert rows["reservation"]
    with before.transaction() as transaction:
        assert opening.upgrade(transaction.connection) == (revision, REVISION)
    for table in UNCHANGED:
        for was, row in zip(rows[table], read_rows(before, table), strict=True):
            added = {"team": None, "detail": ""}  # by later revisions
            added |= {"requests_per_minute": None, "quota_empty_at": None, "kind": None, "at": None}
            assert {name: row[name] for name in was} == was
            assert all(row[name] == added[name] for name in row.keys() - was.keys())
    for was, row in zip(rows["dataset"], read_rows(before, "dataset"), strict=True):
        order, spent, held = (was.pop(name) for name in ("rdp_order", "spent", "held"))
        policy = json.loads(row.pop("policy"))
        assert policy == {"filter": "renyi", "order": order}  # to the last digit
        assert (json.loads(row.pop("spent")), json.loads(row.pop("held"))) == ([spent], [held])
        assert all(row.pop(name) is None for name in row.keys() - was.keys())  # added later
        assert row == was
    for was, row in zip(rows["reservation"], read_rows(before, "reservation"), strict=True):
        assert json.loads(row.pop("charge")) == {"unit_attonats": was.pop("unit")}
        assert len(json.loads(row.pop("taken"))) == 1
        assert (row.pop("ended_entry") is None) == (was["state"] == "open")
        assert all(row.pop(name) is None for name in row.keys() - was.keys())  # added later
        assert row == was
    assert verify(before).faults == []
    with before.reading() as reading:
        datasets = reading.list_datasets()
    assert all(type(dataset.policy) is RenyiFilter for dataset in datasets)
    before.close()


@pytest.mark.spread(second=5)
@pytest.mark.slow
@pytest.mark.parametrize(("url", "revision"), ACCEPTED, indirect=["url"])
def test_an_earlier_ledger_accepts_new_runs_and_verifies(revision: str, url: str) -> None:
    """Old datasets and new ones, with old runs and new runs, and the whole record verifies."""
    open_unmigrated(url, revision).close()
    repository = opening.open_repository(url)
    writer = Writer(repository)
    with repository.reading() as reading:
        datasets = reading.list_datasets()
    for dataset in datasets:
        spent = dataset.balance.spent
        if dataset.closed_at is not None:
            with pytest.raises(DatasetClosedError):
                writer.reserve(dataset.name, OTHER, 3)
            continue
        run = writer.reserve(dataset.name, OTHER, 3)
        writer.ledger.commit(writer.request(), run)
        after = writer.ledger.get_dataset(writer.key, dataset.name)
        assert after.policy == dataset.policy
        assert after.balance.spent[0] > spent[0]
    record_name = f"new-{uuid.uuid4().hex}"
    relation = NeighbouringRelation.ADD_OR_REMOVE_ONE
    writer.ledger.create_dataset(
        writer.request(), NewDataset(record_name, 1000, 3.0, 1e-5, relation, "record")
    )
    writer.reserve(record_name, REFERENCE, 4)
    assert verify(repository).faults == []
    repository.close()


def test_the_newest_fixture_contains_exchanges_and_early_ends(url: str) -> None:
    """Without exchanges and early ends the tests above would show little."""
    open_unmigrated(url, NEWEST).close()
    repository = opening.open_repository(url)
    with repository.reading() as reading:
        datasets = {each.name: each for each in reading.list_datasets()}
        runs = {name: reading.list_reservations(each) for name, each in datasets.items()}
        keys = reading.list_keys()
        waiting = reading.list_waiting_events(reading.list_webhooks()[0].identifier)
    repository.close()
    kinds = {type(each.policy) for each in datasets.values()}
    assert kinds == {
        AdditionFilter, LateMixtureFilter, LateReferenceFilter, ReferenceFilter, RenyiFilter,
    }  # fmt: skip
    for name, planned in (("first", False), ("planned", True)):
        policy: Any = datasets[name].policy.reference_part
        assert policy.is_planned == planned
        parts = [getattr(run.charge, "part", run.charge) for run in runs[name]]
        charges = [part for part in parts if isinstance(part, ReferenceCharge)]
        assert {charge.is_reference for charge in charges} == {False, True}
        early = [
            run
            for run in runs[name]
            if run.state is State.COMMITTED and run.steps_granted < run.steps_reserved
        ]
        assert {run.refund_if_ended is None for run in early} == {False, True}
        assert any(run.state is State.OPEN and run.steps_granted for run in runs[name])
        balance = datasets[name].balance
        assert min(*balance.spent[:2], *balance.held[:2]) > 0
    assert {run.joint is None for run in runs["first"]} == {False, True}
    assert {key.requests_per_minute for key in keys} == {None, 600}
    told = {json.loads(event.body)["type"] for event in waiting}
    assert {"budget.share_passed", "dataset.closed"} <= told
    closed = [name for name, each in datasets.items() if each.closed_at is not None]
    assert closed == ["planned"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        record(f"sqlite:///{folder}/ledger.db")
        with closing(sqlite3.connect(f"{folder}/ledger.db")) as written:
            dump = "\n".join(written.iterdump()) + "\n"
    (FIXTURES / f"ledger-{NEWEST}.sql").write_text(dump)
