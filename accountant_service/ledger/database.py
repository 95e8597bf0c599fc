"""Opening a database: upgrade its tables, or refuse one made by a newer version."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from sqlalchemy import Connection, make_url, text

from accountant_service.ledger import schema_revision
from accountant_service.ledger.repository import Repository, connect
from accountant_service.ledger.schema_revision import MIGRATIONS, MOVED, REVISION, REVISIONS
from accountant_service.ledger.tables import METADATA


class DatabaseRefusedError(RuntimeError):
    """This service must not use the database: a newer version wrote it, or it was moved."""


class BackupRefusedError(RuntimeError):
    """The database is not an SQLite file, or the file to copy it to already exists."""


class NewerDatabaseError(DatabaseRefusedError):
    """The database was written by a newer version of this service."""


class MovedDatabaseError(DatabaseRefusedError):
    """The ledger was moved to another database; only that one may be used."""


class NoLedgerError(DatabaseRefusedError):
    """There is no ledger in the database, or no database; none was created."""


def open_repository(url: str, *, create: bool = True) -> Repository:
    """Open the database at a URL and upgrade its tables.

    Args:
        url: of the database.
        create: whether to create a ledger if there is none.

    Raises:
        NewerDatabaseError: a newer version of this service made the tables.
        MovedDatabaseError: the ledger was moved to another database.
        NoLedgerError: there is no ledger, and `create` is False.
    """
    if not create:
        _require_sqlite_ledger(url)  # to connect would create or change the file
    engine = connect(url)
    try:
        with Repository(engine).transaction() as transaction:
            connection = transaction.connection
            schema_revision.lock_for_migration(connection)
            if not create and schema_revision.read_revision(connection) is None:
                raise NoLedgerError("the database has no tables of a ledger")
            upgrade(connection)
    except BaseException:
        engine.dispose()
        raise
    return Repository(engine, is_checked=True)


def _require_sqlite_ledger(url: str) -> None:
    """Raise unless a URL is of another database than SQLite, or of a file with a ledger.

    Raises:
        NoLedgerError: there is no such file, or it has no ledger.
    """
    parsed = make_url(url)
    name = parsed.database or ":memory:"
    if parsed.get_backend_name() != "sqlite" or name.startswith("file:"):
        return
    if not Path(name).is_file():
        raise NoLedgerError("there is no such file")
    try:
        with closing(
            sqlite3.connect(f"{Path(name).absolute().as_uri()}?mode=ro", uri=True)
        ) as file:
            found = file.execute("SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'")
            if found.fetchone() is None:
                raise NoLedgerError("the file has no tables of a ledger")
    except sqlite3.OperationalError:
        return  # it is locked or cannot be read: the connection tells why
    except sqlite3.DatabaseError as error:
        raise NoLedgerError(f"the {error}") from None  # "file is not a database"


def back_up(url: str, copy: Path) -> None:
    """Copy an SQLite database into a new file, while servers may write to it.

    Raises:
        BackupRefusedError: it is not in an SQLite file, or the copy's file exists.
    """
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database:
        raise BackupRefusedError("it is no SQLite file: back up PostgreSQL with pg_dump")
    if not Path(parsed.database).is_file():
        raise BackupRefusedError(f"there is no file {parsed.database!r}")
    try:
        copy.touch(mode=0o600, exist_ok=False)  # a copy has the secrets too
    except FileExistsError:
        raise BackupRefusedError(f"{str(copy)!r} exists: name a new file") from None
    with (
        closing(sqlite3.connect(parsed.database)) as source,
        closing(sqlite3.connect(copy)) as target,
    ):
        source.backup(target)


def upgrade(connection: Connection) -> tuple[str | None, str]:
    """Run the missing migrations; return the revision before and after.

    A database that a newer version has upgraded stays as it is, if that version lets servers of
    this one go on writing.
    """
    before = schema_revision.read_revision(connection)
    if before == MOVED:
        raise MovedDatabaseError(
            "the ledger was moved from this database to another one: use that one, by setting "
            "ACCOUNTANT_DATABASE_URL to it"
        )
    if before is not None and before not in REVISIONS:
        if schema_revision.is_writable_by(connection, REVISION):
            return before, before
        raise NewerDatabaseError(
            f"the database is at revision {before}, which this version does not know: "
            "a newer version made it. Start that version, or restore a backup"
        )
    if before is None:
        METADATA.create_all(connection)  # equal to what the migrations create
        schema_revision.create_tables(connection)
    elif before != REVISION:
        _run_migrations(connection)
    return before, REVISION


def _run_migrations(connection: Connection) -> None:
    """Run all missing migrations on a connection."""
    from alembic import command  # 12 MB, not needed for a database that is up to date
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    if connection.dialect.name == "postgresql":  # an index of a large table takes long to build
        connection.execute(text("SET LOCAL statement_timeout = 0"))
    schema_revision.block_transactions(connection)
    command.upgrade(config, "head")
