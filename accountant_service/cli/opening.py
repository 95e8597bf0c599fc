"""Open the ledger's database for a command."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from accountant_service.ledger import database
from accountant_service.ledger.errors import LedgerError
from accountant_service.ledger.repository import Repository
from accountant_service.settings import Settings


@contextmanager
def open_repository() -> Iterator[Repository]:
    """Context manager that opens the configured database, or prints an error and exits."""
    try:
        repository = database.open_repository(Settings().database)
        try:
            yield repository
        finally:
            repository.close()
    except (LedgerError, database.DatabaseRefusedError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
