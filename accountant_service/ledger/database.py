"""Opening a database: upgrade its tables, or refuse one made by a newer version."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

from sqlalchemy import Column, Connection, MetaData, String, Table, inspect, make_url, text

from accountant_service.ledger.repository import Repository, connect
from accountant_service.ledger.tables import METADATA

_MIGRATION_LOCK: Final = 7_071_967  # an arbitrary number for an advisory lock
_MIGRATIONS: Final = Path(__file__).parent / "migrations"


MOVED: Final = "moved"  # the revision of a database whose ledger is in another one now


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
    repository = Repository(connect(url))
    with repository.transaction() as transaction:
        connection = transaction.connection
        if connection.dialect.name == "postgresql":  # SQLite is locked by BEGIN IMMEDIATE
            connection.execute(
                text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATION_LOCK}
            )
        if not create and current_revision(connection) is None:
            raise NoLedgerError("the database has no tables of a ledger")
        upgrade(connection)
    return repository


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


def current_revision(connection: Connection) -> str | None:
    """Return the revision of a database's tables; None if it has none."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return None if found is None else str(found)


def upgrade(connection: Connection) -> tuple[str | None, str]:
    """Run the missing migrations; return the revision before and after."""
    known = sorted(path.stem.split("_")[0] for path in _MIGRATIONS.glob("versions/[0-9]*.py"))
    before = current_revision(connection)
    if before == MOVED:
        raise MovedDatabaseError(
            "the ledger was moved from this database to another one: use that one, by setting "
            "ACCOUNTANT_DATABASE_URL to it"
        )
    if before is not None and before not in known:
        raise NewerDatabaseError(
            f"the database is at revision {before}, which this version does not know: "
            "a newer version made it. Start that version, or restore a backup"
        )
    if before is None:
        _create_tables(connection, known[-1])
    elif before != known[-1]:
        _run_migrations(connection)
    return before, known[-1]


def _create_tables(connection: Connection, revision: str) -> None:
    """Create all tables of a new database at once, equal to what the migrations create."""
    METADATA.create_all(connection)
    version = Table(
        "alembic_version", MetaData(), Column("version_num", String(32), primary_key=True)
    )
    version.create(connection)
    connection.execute(version.insert().values(version_num=revision))


def _run_migrations(connection: Connection) -> None:
    """Run all missing migrations on a connection."""
    from alembic import command  # 12 MB, not needed for a database that is up to date
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS))
    config.attributes["connection"] = connection
    if connection.dialect.name == "postgresql":  # an index of a large table takes long to build
        connection.execute(text("SET LOCAL statement_timeout = 0"))
    command.upgrade(config, "head")
