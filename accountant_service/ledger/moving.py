"""Moving a ledger from SQLite to PostgreSQL: every row is copied, and the SQLite file is closed.

Two copies that both grant would spend a budget twice. So the source is closed first, for good, and
copied afterwards: if the copying fails, nothing is granted anywhere until the move is repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, MetaData, Table, func, inspect, select, text

from accountant_service.ledger import verification
from accountant_service.ledger.database import MOVED, current_revision, open_repository, upgrade
from accountant_service.ledger.repository import Repository, connect
from accountant_service.ledger.tables import METADATA

_MOVED: Final = "_moved"  # at the end of every table's name: a running server finds none of them
_ROWS_AT_ONCE: Final = 1000

Progress = Callable[[str, int, int], None]


class MoveRefusedError(RuntimeError):
    """The ledger cannot be moved."""


@dataclass(frozen=True, slots=True)
class Move:
    """The result of moving a ledger: the numbers of rows, datasets and entries.

    Attributes:
        rows: the number of rows copied of each table.
        datasets: the number of datasets in the new database.
        entries: the number of their ledger entries, all verified there.
    """

    rows: dict[str, int]
    datasets: int
    entries: int


def move_ledger(file: Path, target_url: str, progress: Progress) -> Move:
    """Copy a ledger from SQLite to an empty PostgreSQL database, verify it, and close the file.

    A move that failed after the file was closed is continued by the same call.

    Args:
        file: the SQLite database.
        target_url: of the PostgreSQL database, which has no rows yet.
        progress: called with a table's name, the rows copied so far, and all of its rows.

    Raises:
        MoveRefusedError: the target is not PostgreSQL, the source has faults, or the
            target has rows. Nothing was changed.
        DatabaseAwayError: a database does not answer.
        DatabaseRefusedError: a newer version made one of the databases.
    """
    if not target_url.startswith("postgresql"):
        raise MoveRefusedError(
            "a ledger moves to PostgreSQL only: set ACCOUNTANT_DATABASE_URL to the new database"
        )
    if not file.is_file():
        raise MoveRefusedError(f"there is no file {str(file)!r}")
    target = open_repository(target_url)
    source = Repository(connect(f"sqlite:///{file}"))
    try:
        with target.transaction() as transaction:
            _require_empty(transaction.connection)
        if not _is_closed(source):
            _require_sound(source)
        _close(source)
        rows = _copy(source, target, progress)
        report = verification.verify(target)
    finally:
        source.close()
        target.close()
    if report.faults:  # the source had none
        raise MoveRefusedError("the copy differs from the source: " + "; ".join(report.faults))
    return Move(rows, report.datasets, report.entries)


def _require_empty(target: Connection) -> None:
    """Raise `MoveRefusedError` if a table of the target database has rows."""
    for table in METADATA.sorted_tables:
        if target.execute(select(func.count()).select_from(table)).scalar_one():
            raise MoveRefusedError(
                f"the new database is not empty: its table {table.name} has rows. Create an empty "
                "one, and start no server on it before the move"
            )


def _is_closed(source: Repository) -> bool:
    """Return whether an earlier move has closed the SQLite ledger."""
    with source.transaction() as transaction:
        return current_revision(transaction.connection) == MOVED


def _require_sound(source: Repository) -> None:
    """Upgrade the SQLite ledger's tables; raise `MoveRefusedError` if an entry has faults."""
    with source.transaction() as transaction:
        upgrade(transaction.connection)
    faults = verification.verify(source).faults
    if faults:
        raise MoveRefusedError("the ledger has faults: " + "; ".join(faults))


def _close(source: Repository) -> None:
    """Close the SQLite ledger: no server can open it, and a running one can write nothing to it.

    A row that was written after the copying would be lost. Tables that were renamed before stay.
    """
    with source.transaction() as transaction:
        existing = inspect(transaction.connection).get_table_names()
        for table in METADATA.sorted_tables:
            if table.name in existing:
                transaction.connection.execute(
                    text(f'ALTER TABLE "{table.name}" RENAME TO "{table.name}{_MOVED}"')
                )
        transaction.connection.execute(
            text("UPDATE alembic_version SET version_num = :moved"), {"moved": MOVED}
        )


def _copy(source: Repository, target: Repository, progress: Progress) -> dict[str, int]:
    """Copy every row in one transaction of the target; return the number of rows by table."""
    with source.transaction() as reading, target.transaction() as writing:
        writing.connection.execute(text("SET LOCAL statement_timeout = 0"))
        return {
            table.name: _copy_table(table, reading.connection, writing.connection, progress)
            for table in METADATA.sorted_tables
        }


def _copy_table(table: Table, source: Connection, target: Connection, progress: Progress) -> int:
    """Copy the rows of a table; return their number."""
    stored = table.to_metadata(MetaData(), name=table.name + _MOVED)
    count = source.execute(select(func.count()).select_from(stored)).scalar_one()
    copied = 0
    rows = source.execution_options(yield_per=_ROWS_AT_ONCE).execute(select(stored))
    for part in rows.mappings().partitions(_ROWS_AT_ONCE):
        target.execute(table.insert(), [dict(row) for row in part])
        copied += len(part)
        progress(table.name, copied, count)
    if copied != count:
        raise MoveRefusedError(f"{copied} of {count} rows of {table.name} were read")
    return copied
