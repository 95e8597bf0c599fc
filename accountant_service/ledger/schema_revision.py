"""The revision of the database's tables, which every transaction checks before it does anything.

A server may go on running while a newer one upgrades the database. Migrations therefore expand
first: they only add what a server of the revision before may leave alone, and such servers go on
writing. What they leave out is derived from the entries later. A later release contracts: its
migration removes what no server uses any more, and states the oldest revision whose servers may
still write. Each transaction compares, and an older server stops writing.

The statement that reads the revision locks the table in which the migration states it, in the
weakest mode and until the transaction ends; a migration locks that table first, in the strongest
mode. So no transaction began before a migration and ends after it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from sqlalchemy import Column, Connection, MetaData, String, Table, inspect, text

from accountant_service.ledger.errors import DatabaseSchemaError

MIGRATIONS: Final = Path(__file__).parent / "migrations"
REVISIONS: Final = tuple(
    sorted(path.stem.split("_")[0] for path in MIGRATIONS.glob("versions/[0-9]*.py"))
)
REVISION: Final = REVISIONS[-1]  # of this program
MOVED: Final = "moved"  # the revision of a database whose ledger is in another one now
OLDEST_WRITER: Final = "0006"  # the oldest revision whose servers may write beside this one
_MIGRATION_LOCK: Final = 7_071_967  # an arbitrary number for an advisory lock

VERSION: Final = Table(
    "alembic_version", MetaData(), Column("version_num", String(32), primary_key=True)
)
SCHEMA: Final = Table(
    "ledger_schema", MetaData(), Column("oldest_writer", String(32), primary_key=True)
)
_READ: Final = "SELECT version_num, oldest_writer FROM alembic_version, ledger_schema"


def require_current(connection: Connection) -> None:
    """Raise an error if servers of this revision must not use the database now.

    Raises:
        DatabaseSchemaError: a newer server upgraded the database, the ledger was moved, or the
            database was replaced by an older one.
    """
    row = connection.exec_driver_sql(_READ).first()
    found, oldest = ("none", REVISION) if row is None else row
    if found == MOVED:
        raise DatabaseSchemaError("the ledger was moved from this database to another one")
    if found < REVISION:
        raise DatabaseSchemaError(
            f"the database is at revision {found}, and this server needs {REVISION}: a backup was "
            "restored meanwhile. Start the server again"
        )
    if oldest > REVISION:
        raise DatabaseSchemaError(
            f"a newer server upgraded the database to revision {found}, and servers of revision "
            f"{REVISION} must not write to it any more: replace this server"
        )


def require_writers_since(connection: Connection, revision: str) -> None:
    """Let only servers of a revision or later write from now on: others cannot read a new row."""
    statement = SCHEMA.update().where(SCHEMA.c.oldest_writer < revision)
    connection.execute(statement.values(oldest_writer=revision))


def read_revision(connection: Connection) -> str | None:
    """Return the revision of a database's tables; None if it has none."""
    if not inspect(connection).has_table(VERSION.name):
        return None
    found = connection.execute(VERSION.select()).scalar()
    return None if found is None else str(found)


def is_writable_by(connection: Connection, revision: str) -> bool:
    """Return whether a database at a newer revision still lets servers of `revision` write."""
    if not inspect(connection).has_table(SCHEMA.name):
        return False
    oldest = connection.execute(SCHEMA.select()).scalar()
    return oldest is not None and str(oldest) <= revision


def create_tables(connection: Connection) -> None:
    """Create the tables of the revision in a new database."""
    VERSION.create(connection)
    SCHEMA.create(connection)
    connection.execute(VERSION.insert().values(version_num=REVISION))
    connection.execute(SCHEMA.insert().values(oldest_writer=OLDEST_WRITER))


def lock_for_migration(connection: Connection) -> None:
    """Wait for other migrations and for running transactions, and keep new ones waiting.

    SQLite needs nothing of the kind: it is locked by BEGIN IMMEDIATE.
    """
    if connection.dialect.name != "postgresql":
        return
    connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _MIGRATION_LOCK})


def block_transactions(connection: Connection) -> None:
    """Wait until no transaction of a server runs; later ones wait until this one ends."""
    if connection.dialect.name == "postgresql" and inspect(connection).has_table(SCHEMA.name):
        connection.execute(text(f"LOCK TABLE {SCHEMA.name} IN ACCESS EXCLUSIVE MODE"))
