"""`verify` and exports read one state of the ledger, and no writer waits for them."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest

from accountant_service.api.ledger_views import encode_answer
from accountant_service.guarantee import NeighbouringRelation
from accountant_service.ledger import exporting, verification
from accountant_service.ledger.api_keys import Keys, Scope
from accountant_service.ledger.exporting import EntryQuery
from accountant_service.ledger.repository import Repository, connect
from accountant_service.ledger.rules import NewDataset
from accountant_service.ledger.service import Ledger, WriteRequest

SECONDS_MAX = 10.0  # SQLite's writers give up after 20
RELATION = NeighbouringRelation.ADD_OR_REMOVE_ONE


def writer(repository: Repository) -> Callable[[str], None]:
    """Return a function that creates a dataset, as a server on the same database does."""
    ledger, key = Ledger(repository, encode_answer), Keys(repository).create([Scope.OWNER])[1]

    def create(name: str) -> None:
        request = WriteRequest(key, uuid.uuid4().hex, "test", None)
        ledger.create_dataset(
            request, NewDataset(name, 1000, 1.0, 1e-5, RELATION, "record", None, "renyi")
        )

    return create


def test_no_writer_waits_for_verify(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Repository(connect(repository.engine.url.render_as_string(hide_password=False)))
    create = writer(server)
    create("before")
    began, may_end, reports = threading.Event(), threading.Event(), []
    genuine = verification._verify_dataset

    def verify_slowly(*arguments: Any) -> Any:
        began.set()
        assert may_end.wait(60)
        return genuine(*arguments)

    monkeypatch.setattr(verification, "_verify_dataset", verify_slowly)
    thread = threading.Thread(target=lambda: reports.append(verification.verify(repository)))
    thread.start()
    try:
        assert began.wait(60)
        start = time.monotonic()
        create("meanwhile")
        assert time.monotonic() - start < SECONDS_MAX
    finally:
        may_end.set()
        thread.join()
        server.close()
    assert [(report.datasets, report.faults) for report in reports] == [(1, [])]
    assert verification.verify(repository).datasets == 2


def test_an_export_reads_one_state_while_others_write(repository: Repository) -> None:
    create = writer(repository)
    create("before")
    with repository.snapshot() as reading:
        found = exporting.iterate_entries(reading, EntryQuery())
        assert next(found).dataset == "before"
        create("meanwhile")
        assert [entry.dataset for entry in found] == []
        again = exporting.iterate_entries(reading, EntryQuery())
        assert [entry.dataset for entry in again] == ["before"]
