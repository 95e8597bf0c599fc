"""Pages of the whole record, for exports: entries of all datasets, and audit events.

Entries come by dataset and number, so that every dataset's hash chain is complete and in order.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from accountant_service.ledger.errors import StoredRowError
from accountant_service.ledger.reading_rows import read_entry
from accountant_service.ledger.repository import (
    PAGE_SIZE,
    EntryFilter,
    Repository,
    StoredEntry,
    Transaction,
)
from accountant_service.ledger.rules import EntryKind

EntryCursor = tuple[str, int]  # a dataset's name and an entry's number
EventCursor = tuple[int, str]  # the time and the identifier of an event
ENTRIES_START: Final[EntryCursor] = ("", 0)
EVENTS_START: Final[EventCursor] = (-1, "")
_EMPTY_PAGES_MAX: Final = 20  # that are read in search of an entry, before an empty one is answered
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Period:
    """A time interval that includes its start and excludes its end.

    Attributes:
        since: microseconds since 1970; None for no limit.
        until: microseconds since 1970; None for no limit.
    """

    since: int | None = None
    until: int | None = None

    def contains(self, at: int) -> bool:
        """Return whether a time is in this period."""
        return (self.since is None or at >= self.since) and (self.until is None or at < self.until)


@dataclass(frozen=True, slots=True)
class EntryQuery:
    """The datasets, events (grant, commit, …) and times of the ledger entries to export.

    Attributes:
        datasets: names; None for all datasets.
        kinds: none of them means entries of every kind.
        period: the time in which they were written.
    """

    datasets: tuple[str, ...] | None = None
    kinds: frozenset[EntryKind] = frozenset()
    period: Period = Period()

    def matches(self, entry: Json) -> bool:
        """Return whether an entry has a queried kind, and a time in the queried period."""
        is_kind = not self.kinds or entry.get("kind") in self.kinds
        return is_kind and self.period.contains(entry["at"])

    def to_filter(self) -> EntryFilter:
        """Return the conditions that the database evaluates."""
        kinds = tuple(sorted(kind.value for kind in self.kinds))
        return EntryFilter(self.datasets, kinds, self.period.since, self.period.until)


@dataclass(frozen=True, slots=True)
class ExportedEntry:
    """An entry of a dataset's hash chain, with the dataset's name and the entry's hash.

    Attributes:
        dataset: the dataset's name.
        body: canonical JSON, which is hashed.
        hash: of the body and of the entry before it.
        fields: those in the body.
    """

    dataset: str
    body: str
    hash: str
    fields: Json

    def to_json(self) -> Json:
        """Return the entry with its dataset and hash: a line of an export."""
        return {"dataset": self.dataset, **self.fields, "hash": self.hash}


def read_entries(
    repository: Repository, query: EntryQuery, after: EntryCursor
) -> tuple[list[ExportedEntry], EntryCursor | None]:
    """Return a page of entries, which may be empty, and the cursor of the next page if any."""
    with repository.reading() as reading:
        return find_entries(reading, query, after)


def find_entries(
    reading: Transaction, query: EntryQuery, after: EntryCursor
) -> tuple[list[ExportedEntry], EntryCursor | None]:
    """Return a page of entries read in this transaction, and the next page's cursor if any."""
    wanted, cursor = query.to_filter(), after
    for _ in range(_EMPTY_PAGES_MAX):
        rows, following = reading.list_all_entries(wanted, cursor, PAGE_SIZE)
        read = [_read_entry(row) for row in rows]
        found = [entry for entry in read if query.matches(entry.fields)]
        if found or following is None:
            break
        cursor = following
    return found, following


def _read_entry(row: StoredEntry) -> ExportedEntry:
    """Return the entry that a table row describes; raise StoredRowError if it cannot be read."""
    fields = read_entry(row.dataset, row.number, row.body)
    for name, value in (("dataset", row.dataset), ("hash", row.hash)):
        if type(value) is not str:
            raise StoredRowError(
                f"entry {row.number!r} of dataset {row.dataset!r} cannot be read: its {name} is "
                f"{value!r}, not text"
            )
    return ExportedEntry(row.dataset, row.body, row.hash, fields)


def read_events(
    repository: Repository, actions: frozenset[str], period: Period, after: EventCursor
) -> tuple[list[Json], EventCursor | None]:
    """Return a page of audit events, which may be empty, and the cursor of the next page if any.

    Args:
        repository: the ledger's.
        actions: none of them means every action.
        period: the time of the events.
        after: the cursor of the page.
    """
    if period.since is not None:
        after = max(after, (period.since, ""))  # no identifier is empty
    with repository.reading() as reading:
        found = reading.list_audit_events(after, PAGE_SIZE, actions=actions, until=period.until)
    return found, (found[-1]["at"], found[-1]["id"]) if len(found) == PAGE_SIZE else None


def iterate_entries(transaction: Transaction, query: EntryQuery) -> Iterator[ExportedEntry]:
    """Yield all entries that a query asks for, page by page, read in one transaction."""
    cursor: EntryCursor | None = ENTRIES_START
    while cursor is not None:
        found, cursor = find_entries(transaction, query, cursor)
        yield from found


def _read_field(name: str) -> Callable[[ExportedEntry], Any]:
    """Return a function that returns one field of an exported entry; empty text if missing."""
    return lambda entry: entry.fields.get(name, "")


ENTRY_COLUMNS: Final[dict[str, Callable[[ExportedEntry], Any]]] = {
    "dataset": lambda entry: entry.dataset,
    **{name: _read_field(name) for name in ("number", "kind", "at", "key", "reservation", "steps")},
    "hash": lambda entry: entry.hash,
    "entry": lambda entry: entry.body,  # exactly what is hashed
}
EVENT_COLUMNS: Final = ("id", "at", "key", "action", "subject", "detail")
_FORMULA_STARTS: Final = ("=", "+", "-", "@", "\t", "\r", "\n")


def write_csv(rows: Iterable[Iterable[Any]]) -> str:
    """Return rows as CSV; a quote precedes text that a spreadsheet would run as a formula."""
    text = io.StringIO()
    csv.writer(text).writerows([_escape_formula(cell) for cell in row] for row in rows)
    return text.getvalue()


def _escape_formula(cell: Any) -> Any:
    """Return a cell; put a quote before text that a spreadsheet would run as a formula.

    Numbers, also negative ones, stay numbers.
    """
    is_formula = isinstance(cell, str) and cell.startswith(_FORMULA_STARTS)
    return f"'{cell}" if is_formula else cell
