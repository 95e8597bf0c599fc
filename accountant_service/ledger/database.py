"""Opening a database: bring it up to date, or refuse one from the future."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from accountant_service.ledger.repository import Repository, connect

_LOCK = 7_071_967  # any number: the advisory lock of migrations


class NewerDatabaseError(RuntimeError):
    """The database was made by a newer version of this service."""


def open_repository(url: str) -> Repository:
    """The repository behind a URL, its tables up to date.

    Raises:
        NewerDatabaseError: they are newer than this version knows.
    """
    repository = Repository(connect(url))
    with repository.transaction() as transaction:
        connection = transaction.connection
        if connection.dialect.name == "postgresql":  # SQLite is locked by BEGIN IMMEDIATE
            connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _LOCK})
        upgrade(connection)
    return repository


def upgrade(connection: Connection) -> tuple[str | None, str | None]:
    """Run what is missing of the migration chain; the revision before and after."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    known = ScriptDirectory.from_config(config)
    before = MigrationContext.configure(connection).get_current_revision()
    if before is not None and before not in {script.revision for script in known.walk_revisions()}:
        raise NewerDatabaseError(
            f"the database is at revision {before}, which this version does not know: "
            "it was made by a newer one. Start that version, or restore a backup"
        )
    head = known.get_current_head()
    if before != head:
        command.upgrade(config, "head")
    return before, head
