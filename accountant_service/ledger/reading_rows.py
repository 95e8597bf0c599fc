"""Checked reading of stored rows: a fault is named, instead of an error somewhere later.

The ledger writes none of these faults: another program altered the row, or the disk did. SQLite
stores a value of any type in any column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import chain
from typing import Any, Final, TypeVar

from sqlalchemy import Float, Integer, LargeBinary, String, Table

from accountant_service import mechanisms
from accountant_service.errors import AccountingError
from accountant_service.ledger.columns import shorten
from accountant_service.ledger.errors import LedgerError, StoredRowError
from accountant_service.writing.canonical_json import read_json

# what a row or an entry raises that the ledger did not write
UNREADABLE: Final = (
    AccountingError, ArithmeticError, AssertionError, AttributeError, LedgerError, LookupError,
    RecursionError, TypeError, ValueError, mechanisms.MechanismError,
)  # fmt: skip
_TYPES: Final = (
    (Integer, int, "a whole number"),
    (Float, float, "a number"),
    (LargeBinary, bytes, "bytes"),
    (String, str, "text"),
)
_TIME_MAX: Final = 253_402_300_799_999_999  # the last microsecond of the year 9999
Read = TypeVar("Read")


def find_type_faults(table: Table, row: Mapping[Any, Any]) -> Iterator[str]:
    """Yield a fault for each column of a row whose value has not the column's type."""
    for name, expected, words, is_nullable in _describe_columns(table):
        value = row[name]
        if type(value) is not expected and not (value is None and is_nullable):
            yield f"its {name} is {shorten(value)}, not {words}"


def _find_range_faults(table: Table, row: Mapping[Any, Any]) -> Iterator[str]:
    """Yield a fault for each number of a row that is not finite, and each impossible time."""
    for name, expected, _, _ in _describe_columns(table):
        value = row[name]
        if value is None:
            continue
        if expected is float and not math.isfinite(value):
            yield f"its {name} is {value}, not a finite number"
        if (name == "at" or name.endswith("_at")) and not 0 <= value <= _TIME_MAX:
            yield f"its {name} is {value}, not a time in microseconds since 1970"


@cache
def _describe_columns(table: Table) -> tuple[tuple[str, type, str, bool], ...]:
    """Return each column's name, type, type in words, and whether it may be null."""
    return tuple(
        (column.name, expected, words, bool(column.nullable))
        for column in table.columns
        for expected, words in [
            next((python, words) for kind, python, words in _TYPES if isinstance(column.type, kind))
        ]
    )


def read_row(
    table: Table, row: Mapping[Any, Any], read: Callable[[Mapping[Any, Any]], Read]
) -> Read:
    """Return what `read` makes of a row, after a check of the types of its columns.

    Raises:
        StoredRowError: the ledger did not write this row.
    """
    fault = next(chain(find_type_faults(table, row), _find_range_faults(table, row)), None)
    if fault is None:
        try:
            return read(row)
        except UNREADABLE as error:
            fault = _describe_error(error)
    named = ", ".join(shorten(row[column.name]) for column in table.primary_key)
    raise StoredRowError(_explain(f"the row {named} of the table {table.name}", fault))


def read_entry(dataset: str, number: Any, body: Any) -> dict[str, Any]:
    """Return the fields of a stored ledger entry.

    Args:
        dataset: name of the entry's dataset.
        number: of the entry, as stored beside its body.
        body: its canonical JSON.

    Raises:
        StoredRowError: the ledger did not write this body.
    """
    try:
        entry = read_json(body)
        if not isinstance(entry, dict):
            raise TypeError(f"{shorten(body)} is no JSON object")
        for name, expected in (("number", int), ("at", int), ("kind", str), ("key", str)):
            if type(entry[name]) is not expected:
                raise TypeError(f"{name} must not be {shorten(entry[name])}")
        if not isinstance(entry.get("reservation", ""), str):
            raise TypeError(f"reservation must be text, not {shorten(entry['reservation'])}")
        if not 0 <= entry["at"] <= _TIME_MAX:
            raise ValueError(f"at is {entry['at']}, not a time in microseconds since 1970")
    except UNREADABLE as error:
        where = f"entry {shorten(number)} of dataset {dataset!r}"
        raise StoredRowError(_explain(where, _describe_error(error))) from None
    return entry


def _describe_error(error: Exception) -> str:
    """Return an error in words: `KeyError` alone would only say a name."""
    if isinstance(error, RecursionError):
        return "its JSON is nested too deeply"
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def _explain(where: str, fault: str) -> str:
    """Return the message about a row or entry that cannot be read."""
    return (
        f"{where} cannot be read: {fault}. The ledger did not write it so: "
        "`accountant ledger verify` lists all faults; restore a backup from before"
    )
