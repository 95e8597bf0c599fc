"""Faults of stored rows that no hash chain shows: rows of no dataset, wrong types, other JSON text.

A dataset whose row is deleted leaves its entries, its reservations and the audit event of its
creation. A dataset of the same name would begin with its whole budget again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy import Column, case, exists, func, select

from accountant_service.ledger.columns import Row, list_columns, write_row
from accountant_service.ledger.repository import Transaction
from accountant_service.ledger.tables import (
    AUDIT_EVENT,
    CAP,
    DATASET,
    ENTRY,
    RESERVATION,
    WEBHOOK_EVENT,
)
from accountant_service.writing.canonical_json import canonical_json, read_json

_NAMED: Final = DATASET.c.name == AUDIT_EVENT.c.subject
_CREATED, _DELETED = "dataset-created", "dataset-deleted"  # audit events


@contextmanager
def decode_any_text(transaction: Transaction) -> Iterator[None]:
    """Context manager in which text that is not UTF-8 is read, so that it shows as a difference.

    SQLite stores such text, and its driver would end the transaction. PostgreSQL refuses it.
    """
    if transaction.connection.dialect.name != "sqlite":
        yield
        return
    driver: Any = transaction.connection.connection.driver_connection
    driver.text_factory = lambda text: text.decode(errors="surrogateescape")
    try:
        yield
    finally:
        driver.text_factory = str


def find_stray_rows(transaction: Transaction) -> Iterator[str]:
    """Yield a fault for all rows of the database that belong to no dataset, or to a second one."""
    for table, what in ((ENTRY, "entries"), (RESERVATION, "reservations"), (CAP, "caps")):
        for identifier, count in _count_strays(transaction, table.c.dataset, DATASET.c.id):
            yield (
                f"{count} {what} belong to the dataset with id {identifier!r}, which does not "
                "exist: its row was deleted, or its id was changed"
            )
    events = _count_strays(transaction, WEBHOOK_EVENT.c.dataset, DATASET.c.name)
    for name, count in events:
        if name != "":  # an event about a key
            yield f"{count} webhook events are about dataset {name!r}, which does not exist"
    yield from _find_numbers_below_one(transaction)
    yield from _find_lost_datasets(transaction)


def _count_strays(
    transaction: Transaction, reference: Column[Any], referred: Column[Any]
) -> Iterable[tuple[Any, int]]:
    """Return the values of a column that the column they refer to lacks, with their counts."""
    rows = transaction.connection.execute(
        select(reference, func.count())
        .where(~exists().where(referred == reference))
        .group_by(reference)
        .order_by(reference)
    )
    return [(value, count) for value, count in rows]


def _find_numbers_below_one(transaction: Transaction) -> Iterator[str]:
    """Yield a fault for each dataset that has entries before its first one."""
    rows = transaction.connection.execute(
        select(DATASET.c.name, func.count())
        .join(ENTRY, ENTRY.c.dataset == DATASET.c.id)
        .where(ENTRY.c.number < 1)
        .group_by(DATASET.c.name)
        .order_by(DATASET.c.name)
    )
    for name, count in rows:
        yield f"dataset {name!r}: {count} entries have a number below 1, so they are not its own"


def _find_lost_datasets(transaction: Transaction) -> Iterator[str]:
    """Yield a fault for each name whose dataset is gone, or replaced, and was not deleted.

    A name is used again only if its dataset was deleted, which no used dataset can be.
    """
    action, subject = AUDIT_EVENT.c.action, AUDIT_EVENT.c.subject
    created, deleted = (
        func.sum(case((action == each, 1), else_=0)) for each in (_CREATED, _DELETED)
    )
    rows = transaction.connection.execute(
        select(subject, created, deleted, exists().where(_NAMED))
        .where(action.in_((_CREATED, _DELETED)))
        .group_by(subject)
        .order_by(subject)
    )
    for name, begun, ended, is_there in rows:
        count = begun - ended
        if is_there and 0 < begun <= ended:
            yield f"dataset {name!r}: the audit events say that it was deleted, but it has a row"
        if count > 0 and not is_there:
            yield f"dataset {name!r}: the audit events say that it was created, but it has no row"
        if count > 1:
            yield (
                f"dataset {name!r}: the audit events say that it was created {count} times: the "
                "row of an earlier one was deleted"
            )


def read_column(row: Row, name: str) -> Any:
    """Return what a column states as JSON; None if it is null."""
    return None if row[name] is None else read_json(row[name])


def list_json_columns(model: type) -> list[str]:
    """Return the names of a model's columns that are JSON text."""
    return [column.name for column in list_columns(model) if column.codec.is_json]


def find_json_faults(stored: Row, model: Any) -> Iterator[str]:
    """Yield a fault for each JSON column that is not what the ledger writes for the same values.

    Spaces and the order of names do not matter.

    Args:
        stored: the row in the database.
        model: what the row describes.
    """
    written = write_row(model)
    for name in list_json_columns(type(model)):
        found, expected = (read_column(row, name) for row in (stored, written))
        if canonical_json(found) != canonical_json(expected):
            yield f"its {name} is {stored[name]!r}, but the ledger writes {written[name]!r}"
