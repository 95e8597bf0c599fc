"""Databases that earlier versions of the service wrote: SQLite files and PostgreSQL schemas."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import MetaData, text

from accountant_service.ledger.repository import Repository, connect
from accountant_service.ledger.schema_revision import MIGRATIONS

FIXTURES = Path(__file__).parents[1] / "contract" / "fixtures"
# a row after those that it refers to
_TABLES = ("api_key", "audit_event", "secret", "dataset", "cap", "reservation",
           "entry", "idempotency_key", "webhook", "webhook_event")  # fmt: skip


def open_unmigrated(url: str, revision: str) -> Repository:
    """Fill an empty database with the rows that a revision wrote; do not migrate it.

    Args:
        url: of the database.
        revision: of a fixture, for instance 0001.
    """
    with closing(sqlite3.connect(":memory:")) as recorded:
        recorded.executescript((FIXTURES / f"ledger-{revision}.sql").read_text())
        recorded.row_factory = sqlite3.Row
        rows = {
            table: [dict(row) for row in recorded.execute(f"SELECT * FROM {table}")]
            for table in _TABLES
            if recorded.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        }
    repository = Repository(connect(url))
    with repository.transaction() as transaction:
        connection = transaction.connection
        config = Config()
        config.set_main_option("script_location", str(MIGRATIONS))
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
        known = MetaData()
        known.reflect(connection)
        for table in rows:
            if rows[table]:
                connection.execute(known.tables[table].insert(), rows[table])
    return repository


def read_rows(repository: Repository, table: str) -> list[dict[str, Any]]:
    """Return all rows of a table, sorted."""
    with repository.reading() as reading:
        found = reading.connection.execute(text(f"SELECT * FROM {table}"))
        return sorted((dict(row._mapping) for row in found), key=str)
