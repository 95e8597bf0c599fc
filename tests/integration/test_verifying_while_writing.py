"""`verify` and exports read one state of the ledger, and no writer waits for them."""

from __future__ import annotations

import threading
import time
from contextlib import closing
from typing import Any

import pytest

from accountant_service.ledger import database as opening
from accountant_service.ledger import exporting, verification
from accountant_service.ledger.exporting import EntryQuery
from accountant_service.ledger.repository import Transaction
from tests.support.ledger_scenarios import SQL_MATTERS, Scenario

SECONDS_MAX = 10.0  # SQLite's writers give up after 20


@SQL_MATTERS
def test_no_writer_waits_for_verify_which_sees_one_state(
    scenario: Scenario, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario.admin.create("before")
    began, may_end, reports = threading.Event(), threading.Event(), []
    genuine = Transaction.list_dataset_rows

    def list_slowly(self: Transaction) -> Any:
        found = genuine(self)
        began.set()
        assert may_end.wait(60)
        return found

    monkeypatch.setattr(Transaction, "list_dataset_rows", list_slowly)  # then come the entries
    with closing(opening.open_repository(url)) as server:
        thread = threading.Thread(target=lambda: reports.append(verification.verify(server)))
        thread.start()
        try:
            assert began.wait(60)
            start = time.monotonic()
            scenario.admin.create("meanwhile")
            scenario.admin.grant(scenario.admin.reserve(name="before"))
            assert time.monotonic() - start < SECONDS_MAX
        finally:
            may_end.set()
            thread.join()
    (report,) = reports
    assert (report.datasets, report.entries, report.faults) == (1, 1, [])
    after = verification.verify(scenario.repository)
    assert (after.datasets, after.entries) == (2, 4)


@SQL_MATTERS
def test_an_export_reads_one_state_while_others_write(scenario: Scenario) -> None:
    scenario.admin.create("before")
    with scenario.repository.snapshot() as reading:
        found = exporting.iterate_entries(reading, EntryQuery())
        assert next(found).dataset == "before"
        scenario.admin.create("meanwhile")
        assert [entry.dataset for entry in found] == []
        again = exporting.iterate_entries(reading, EntryQuery())
        assert [entry.dataset for entry in again] == ["before"]
