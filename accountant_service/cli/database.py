"""The commands `accountant db`: manage the ledger's database."""

from __future__ import annotations

import sys
from typing import Final

import typer

from accountant_service.ledger import database
from accountant_service.ledger.errors import LedgerError
from accountant_service.ledger.repository import Repository, connect
from accountant_service.settings import Settings

db = typer.Typer(no_args_is_help=True)
COMMANDS: Final = {"db": db}


@db.callback()
def manage() -> None:
    """Manage the ledger's database."""


@db.command("upgrade")
def upgrade() -> None:
    """Upgrade the database's tables. `serve` does this when it starts."""
    engine = connect(Settings().database)
    try:
        with Repository(engine).transaction() as transaction:
            before, after = database.upgrade(transaction.connection)
    except (LedgerError, database.NewerDatabaseError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    finally:
        engine.dispose()
    print(f"at revision {after}" if before == after else f"from {before} to revision {after}")
