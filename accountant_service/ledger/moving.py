"""Moving a ledger from SQLite to PostgreSQL: every row is copied, and the SQLite file is closed.

Two copies that both grant would spend a budget twice. So the copy is committed only after the
source is closed for good: if the commit fails, nothing is granted anywhere until the move is
repeated. A refused row leaves the source open.

Before it closes, the move writes a random identifier into both databases. A closed source moves on
to the target with its identifier only, and to none once the move is finished.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    MetaData,
    String,
    Table,
    Text,
    func,
    inspect,
    make_url,
    select,
    text,
)
from sqlalchemy.exc import DBAPIError

from accountant_service.ledger import verification
from accountant_service.ledger.database import open_repository, upgrade
from accountant_service.ledger.repository import Repository, Transaction, connect
from accountant_service.ledger.schema_revision import (
    MOVED,
    REVISION,
    read_revision,
    require_writers_since,
)
from accountant_service.ledger.tables import METADATA

_MOVED: Final = "_moved"  # at the end of every table's name: a running server finds none of them
_ROWS_AT_ONCE: Final = 1000
_MOVE: Final = Table(  # one row, in the source and in the target
    "ledger_move",
    MetaData(),
    Column("id", String(32), primary_key=True),
    Column("target", Text, nullable=False),  # the URL without its password
    Column("is_finished", Boolean, nullable=False),  # the copy is committed in the target
)

Progress = Callable[[str, int, int], None]


class MoveRefusedError(RuntimeError):
    """The ledger cannot be moved."""


@dataclass(frozen=True, slots=True)
class Move:
    """The result of moving a ledger: the numbers of rows, datasets and entries.

    Attributes:
        rows: the number of rows copied of each table; empty if an earlier call copied them.
        datasets: the number of datasets in the new database.
        entries: the number of their ledger entries, all verified there.
    """

    rows: dict[str, int]
    datasets: int
    entries: int


@dataclass(frozen=True, slots=True)
class _Mark:
    """A move as the source and the target record it.

    Attributes:
        identifier: random; the same in both databases.
        target: the URL of the target, without its password.
        is_finished: in the target, whether the rows are there; in the source, whether they are
            verified there, too.
    """

    identifier: str
    target: str
    is_finished: bool = False


def move_ledger(
    file: Path, target_url: str, progress: Progress, *, is_unfinished: bool = False
) -> Move:
    """Copy a ledger from SQLite to an empty PostgreSQL database, verify it, and close the file.

    A move that failed after the file was closed is continued by the same call.

    Args:
        file: the SQLite database.
        target_url: of the PostgreSQL database, which has no rows yet.
        progress: called with a table's name, the rows copied so far, and all of its rows.
        is_unfinished: whether the caller knows that an earlier move left the ledger in no database.
            A closed file may then move to another target.

    Raises:
        MoveRefusedError: the target is not PostgreSQL, has rows or refuses one; the source has
            faults, or was moved to another target. No database was changed, unless the message
            says that the copy differs.
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
        rows = _move_rows(source, target, _hide_password(target_url), progress, is_unfinished)
        report = verification.verify(target)
        if report.faults:  # the source had none
            raise MoveRefusedError("the copy differs from the source: " + "; ".join(report.faults))
        with source.transaction() as transaction:
            mark = _find_mark(transaction.connection)
            assert mark is not None
            _write_mark(transaction.connection, replace(mark, is_finished=True))
    finally:
        source.close()
        target.close()
    return Move(rows, report.datasets, report.entries)


def _hide_password(url: str) -> str:
    """Return a database's URL without passwords, for messages."""
    parsed = make_url(url).set(password=None)
    secret = [name for name in parsed.query if "password" in name]
    return parsed.difference_update_query(secret).render_as_string()


def _move_rows(
    source: Repository, target: Repository, url: str, progress: Progress, is_unfinished: bool
) -> dict[str, int]:
    """Copy every row into the target and close the source; return the number of rows by table.

    The source is locked all the time, so that of two moves the second finds it closed. Its
    transaction ends first, before the target's. A crash between the two leaves the target empty.
    """
    with (
        _explain_refused_rows(),
        target.transaction() as writing,
        source.transaction() as reading,
    ):
        mark = _begin(reading, target, url, is_unfinished)
        _lock_target(writing.connection, mark)
        if mark.is_finished:
            return {}
        rows = _copy(reading.connection, writing.connection, progress)
        _close(reading.connection)
        _write_mark(reading.connection, mark)
        _write_mark(writing.connection, replace(mark, is_finished=True))
        require_writers_since(writing.connection, REVISION)
    return rows


@contextmanager
def _explain_refused_rows() -> Iterator[None]:
    """Context manager that turns a row's refusal by the target into `MoveRefusedError`."""
    try:
        yield
    except DBAPIError as error:
        raise MoveRefusedError(
            f"the new database refuses a row, and nothing was moved: {error.orig}"
        ) from error


def _begin(source: Transaction, target: Repository, url: str, is_unfinished: bool) -> _Mark:
    """Return the mark of a new move, or of the interrupted one that is continued.

    Raises:
        MoveRefusedError: the source has faults, or must not move to this target.
    """
    is_closed = read_revision(source.connection) == MOVED
    earlier = _find_mark(source.connection)
    if not is_closed:
        _require_sound(source)
    elif earlier is not None and earlier.is_finished:
        raise MoveRefusedError(
            f"the ledger was moved to {earlier.target} already, and grants from there: set "
            "ACCOUNTANT_DATABASE_URL to that database. If it is lost, restore its backup"
        )
    elif not is_unfinished:
        return _continue(earlier, target)
    mark = _Mark(uuid.uuid4().hex, url)
    with target.transaction() as transaction:
        _lock_tables(transaction.connection)
        _require_empty(transaction.connection)
        _write_mark(transaction.connection, mark)
    return mark


def _continue(earlier: _Mark | None, target: Repository) -> _Mark:
    """Return the mark of an interrupted move, as the target has it.

    Raises:
        MoveRefusedError: the target is not the one to which the move began.
    """
    advice = (
        "Two databases with one ledger would spend its budgets twice. If you are sure that no "
        "database has this ledger, move it with --unfinished"
    )
    if earlier is None:
        raise MoveRefusedError(
            "an earlier version closed this file to move its ledger, and did not record where to, "
            f"nor whether the move was finished. {advice}"
        )
    with target.transaction() as transaction:
        found = _find_mark(transaction.connection)
    if found is None or found.identifier != earlier.identifier:
        raise MoveRefusedError(
            f"this file is closed, because its move to {earlier.target} began: set "
            f"ACCOUNTANT_DATABASE_URL to that database, and call it again. {advice}"
        )
    return found


def _find_mark(database: Connection) -> _Mark | None:
    """Return the move that a database records, if there is one."""
    if not inspect(database).has_table(_MOVE.name):
        return None
    row = database.execute(select(_MOVE)).first()
    return None if row is None else _Mark(row.id, row.target, row.is_finished)


def _write_mark(database: Connection, mark: _Mark) -> None:
    """Store a move in a database, in place of one that it recorded before."""
    _MOVE.create(database, checkfirst=True)
    database.execute(_MOVE.delete())
    database.execute(
        _MOVE.insert().values(id=mark.identifier, target=mark.target, is_finished=mark.is_finished)
    )


def _lock_target(target: Connection, mark: _Mark) -> None:
    """Keep servers and other moves from writing to the target; check that it is still this move's.

    Raises:
        MoveRefusedError: another move has begun, or a table has rows that the move did not copy.
    """
    _lock_tables(target)
    found = _find_mark(target)
    if found != mark:
        raise MoveRefusedError("another move to the new database has begun: wait until it ends")
    if not mark.is_finished:
        _require_empty(target)


def _lock_tables(target: Connection) -> None:
    """Keep all others from writing to the target's tables until the transaction ends."""
    names = ", ".join(f'"{table.name}"' for table in METADATA.sorted_tables)
    target.execute(text("SET LOCAL statement_timeout = 0"))
    target.execute(text(f"LOCK TABLE {names} IN SHARE ROW EXCLUSIVE MODE"))


def _require_empty(target: Connection) -> None:
    """Raise `MoveRefusedError` if a table of the target database has rows."""
    for table in METADATA.sorted_tables:
        if target.execute(select(func.count()).select_from(table)).scalar_one():
            raise MoveRefusedError(
                f"the new database is not empty: its table {table.name} has rows. Create an empty "
                "one, and start no server on it before the move"
            )


def _require_sound(source: Transaction) -> None:
    """Upgrade the SQLite ledger's tables; raise `MoveRefusedError` if the ledger has faults."""
    upgrade(source.connection)
    faults = verification.verify_snapshot(source).faults
    if faults:
        raise MoveRefusedError("the ledger has faults: " + "; ".join(faults))


def _close(source: Connection) -> None:
    """Close the SQLite ledger: no server can open it, and a running one can write nothing to it.

    A row that was written after the copying would be lost. Tables that were renamed before stay.
    """
    existing = inspect(source).get_table_names()
    for table in METADATA.sorted_tables:
        if table.name in existing:
            source.execute(text(f'ALTER TABLE "{table.name}" RENAME TO "{table.name}{_MOVED}"'))
    source.execute(text("UPDATE alembic_version SET version_num = :moved"), {"moved": MOVED})


def _copy(source: Connection, target: Connection, progress: Progress) -> dict[str, int]:
    """Copy every row, without a commit; return the number of rows by table."""
    existing = inspect(source).get_table_names()
    return {
        table.name: _copy_table(table, table.name in existing, source, target, progress)
        for table in METADATA.sorted_tables
    }


def _copy_table(
    table: Table, is_open: bool, source: Connection, target: Connection, progress: Progress
) -> int:
    """Copy the rows of a table, which has its own name while it is open; return their number."""
    stored = table if is_open else table.to_metadata(MetaData(), name=table.name + _MOVED)
    count = source.execute(select(func.count()).select_from(stored)).scalar_one()
    copied = 0
    rows = source.execute(select(stored).execution_options(yield_per=_ROWS_AT_ONCE))
    for part in rows.mappings().partitions(_ROWS_AT_ONCE):
        target.execute(table.insert(), [dict(row) for row in part])
        copied += len(part)
        progress(table.name, copied, count)
    if copied != count:
        raise MoveRefusedError(f"{copied} of {count} rows of {table.name} were read")
    return copied
