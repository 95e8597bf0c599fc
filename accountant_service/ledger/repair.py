"""Repair of rows that the entries determine: balances, reservations, columns for searching.

Only the record of a dataset whose every entry is sound, up to the last one that its row names, is
repaired. An entry is never changed, nor the number and hash of the last one: who cut off entries
and repaired the rest would give back budget.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import select, tuple_

from accountant_service.ledger import stored_rows
from accountant_service.ledger.columns import Row, write_row
from accountant_service.ledger.filters.base import add
from accountant_service.ledger.reading_rows import UNREADABLE, find_type_faults, read_entry
from accountant_service.ledger.repository import Repository, Transaction
from accountant_service.ledger.rules import HolderKind
from accountant_service.ledger.tables import CAP, DATASET, ENTRY, RESERVATION
from accountant_service.ledger.verification import (
    RecordedDataset,
    find_column_faults,
    find_reservation_faults,
    read_recorded,
)

_BY: Final = "command-line"
_DERIVED: Final = ("spent", "held", "closed_at")  # columns of a dataset that its entries determine


@dataclass(frozen=True, slots=True)
class RepairReport:
    """The result of a repair.

    Attributes:
        mended: what differed from the entries and was derived anew, or would be.
        left: what cannot be derived, and why.
    """

    mended: list[str]
    left: list[str]


def repair(repository: Repository, *, is_trial: bool = False) -> RepairReport:
    """Derive anew what the entries determine, wherever it differs.

    Each dataset is repaired in a transaction that has locked its row.

    Args:
        repository: the ledger's.
        is_trial: whether nothing is written.
    """
    report = RepairReport([], [])
    with repository.reading() as reading:
        identifiers = [row["id"] for row in reading.list_dataset_rows()]
    for identifier in identifiers:
        with repository.reading() as reading, stored_rows.decode_any_text(reading):
            found, left = _compare(reading, identifier)
        if found and not is_trial:
            with repository.transaction() as transaction:
                found, left = _mend(transaction, identifier)
        report.mended.extend(found)
        report.left.extend(left)
    return report


def _compare(
    transaction: Transaction, identifier: str, *, is_locked: bool = False
) -> tuple[list[str], list[str]]:
    """Return what differs from the entries of a dataset, and what cannot be derived from them."""
    row = _read_row(transaction, identifier, is_locked=is_locked)
    name = f"dataset {row['name']!r}"
    try:
        recorded = _read_recorded(transaction, row)
    except UNREADABLE as error:
        return [], [f"{name}: its row cannot be read: {error}"]
    if recorded.faults:
        return [], [f"{name}: {fault}" for fault in recorded.faults]
    found = list(_find_row_faults(row, recorded))
    rows = {each["id"]: each for each in transaction.list_reservation_rows(recorded.dataset)}
    for run, reservation in recorded.reservations.items():
        found += [
            f"run {run}: {fault}" for fault in _find_run_faults(rows.pop(run, None), reservation)
        ]
    strays = [f"{name}: run {run} has a row, and no entry" for run in rows]
    found += _find_entry_faults(transaction, recorded)
    found += [
        f"the cap of {row['holder']!r} keeps {row['taken']}, and its runs took {taken}"
        for row, taken in _find_wrong_caps(transaction, recorded)
    ]
    return [f"{name}: {fault}" for fault in found], strays


def _mend(transaction: Transaction, identifier: str) -> tuple[list[str], list[str]]:
    """Write what a dataset's entries determine; return what differed, and what is left."""
    found, left = _compare(transaction, identifier, is_locked=True)
    if not found:
        return found, left
    recorded = _read_recorded(transaction, _read_row(transaction, identifier, is_locked=True))
    written = write_row(recorded.dataset)
    run = transaction.connection.execute
    run(
        DATASET.update()
        .where(DATASET.c.id == identifier)
        .values({column: written[column] for column in _DERIVED})
    )
    rows = {each["id"]: each for each in transaction.list_reservation_rows(recorded.dataset)}
    for name, reservation in recorded.reservations.items():
        values = write_row(reservation)
        if name not in rows:
            run(RESERVATION.insert().values(values))
        elif list(_find_run_faults(rows[name], reservation)):
            run(RESERVATION.update().where(RESERVATION.c.id == name).values(values))
    for entry in _list_entries(transaction, recorded):
        if entry.at is None or list(find_column_faults(entry)):
            fields = read_entry(recorded.dataset.name, entry.number, entry.body)
            place = tuple_(ENTRY.c.dataset, ENTRY.c.number) == (identifier, entry.number)
            run(ENTRY.update().where(place).values(kind=fields["kind"], at=fields["at"]))
    for cap, taken in _find_wrong_caps(transaction, recorded):
        holder = tuple_(CAP.c.dataset, CAP.c.kind, CAP.c.holder)
        place = holder == (identifier, cap["kind"], cap["holder"])
        run(CAP.update().where(place).values(taken=taken))
    detail = f"{len(found)} rows or columns derived from the entries"
    transaction.record_audit_event(_BY, "ledger-repaired", recorded.dataset.name, detail)
    return found, left


def _read_row(transaction: Transaction, identifier: str, *, is_locked: bool) -> Row:
    """Return a dataset's row as it is stored; lock it if requested."""
    query = select(DATASET).where(DATASET.c.id == identifier)
    found = transaction.connection.execute(query.with_for_update() if is_locked else query)
    return dict(found.mappings().one())


def _read_recorded(transaction: Transaction, row: Row) -> RecordedDataset:
    """Return what a dataset's entries record; raise an error if other columns have wrong types."""
    known = {**row, "spent": "[]", "held": "[]", "closed_at": None}
    wrong = list(find_type_faults(DATASET, known))
    if wrong:
        raise TypeError(wrong[0])
    return read_recorded(transaction, row)


def _find_row_faults(row: Row, recorded: RecordedDataset) -> Iterator[str]:
    """Yield a fault for each column of a dataset that its entries determine, and that differs."""
    written = write_row(recorded.dataset)
    for column in _DERIVED:
        if row[column] != written[column]:
            yield f"{column} is {row[column]!r}, and the entries say {written[column]!r}"


def _find_run_faults(row: Row | None, recorded: Any) -> Sequence[str]:
    """Return the faults of a reservation's row; one if there is none."""
    if row is None:
        return ["it has no row"]
    try:
        return list(find_reservation_faults(row, recorded))
    except UNREADABLE as error:
        return [f"its row cannot be read: {error!r}"]


def _find_entry_faults(transaction: Transaction, recorded: RecordedDataset) -> Iterator[str]:
    """Yield a fault for each entry whose columns for searching are empty or differ from it."""
    for row in _list_entries(transaction, recorded):
        if row.at is None:
            yield f"entry {row.number} has no kind and time in its columns"
        yield from find_column_faults(row)


def _find_wrong_caps(
    transaction: Transaction, recorded: RecordedDataset
) -> Iterator[tuple[Row, str]]:
    """Yield each cap beside which another use is kept than its runs took, with what they took."""
    for row in transaction.list_cap_rows(recorded.dataset):
        if row["taken"] is None:  # an earlier server set the cap
            continue
        taken = recorded.dataset.policy.nothing
        for run in recorded.reservations.values():
            if row["holder"] == (run.key if row["kind"] == HolderKind.KEY.value else run.team):
                taken = add(taken, run.taken)
        if row["taken"] != json.dumps(taken):
            yield row, json.dumps(taken)


def _list_entries(transaction: Transaction, recorded: RecordedDataset) -> Iterator[Any]:
    """Yield the rows of a dataset's entries."""
    after: Any = 0
    while rows := transaction.list_entries(recorded.dataset, after):
        yield from rows
        after = rows[-1].number
