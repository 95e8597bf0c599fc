"""The commands `accountant db`: manage the ledger's database."""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import Progress, TaskID

db = typer.Typer(add_completion=False, no_args_is_help=True)
COMMANDS: Final = {"db": db}


@db.callback()
def manage() -> None:
    """Manage the ledger's database."""


@db.command("upgrade")
def upgrade() -> None:
    """Upgrade the database's tables. `serve` does this when it starts."""
    from accountant_service.ledger import database
    from accountant_service.ledger.errors import LedgerError
    from accountant_service.ledger.repository import Repository, connect
    from accountant_service.operations.settings import Settings

    engine = connect(Settings().database)
    try:
        with Repository(engine).transaction() as transaction:
            before, after = database.upgrade(transaction.connection)
    except (LedgerError, database.DatabaseRefusedError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    finally:
        engine.dispose()
    print(f"at revision {after}" if before == after else f"from {before} to revision {after}")


@db.command("backup", epilog="Example: accountant db backup copy.db")
def back_up(
    file: Annotated[Path, typer.Argument(help="The new file.")],
) -> None:
    """Copy the ledger's SQLite database into a new file; servers may go on writing."""
    from accountant_service.ledger import database
    from accountant_service.operations.settings import Settings

    try:
        database.back_up(Settings().database, file)
    except (database.BackupRefusedError, OSError, sqlite3.Error) as error:
        away = not file.parent.is_dir()
        reason = f"there is no folder {str(file.parent)!r}: create it first" if away else error
        print(f"error: {reason}", file=sys.stderr)
        raise typer.Exit(2) from None
    print(f"copied to {file}; verify it before you use it")


@db.command("move", epilog="Example: accountant db move accountant.db")
def move(
    file: Annotated[Path, typer.Argument(help="The SQLite file whose ledger is moved.")],
    unfinished: Annotated[
        bool,
        typer.Option(
            "--unfinished",
            help="Move a file that an earlier move has closed to another database. Only if you "
            "are sure that no database has its ledger: two would spend its budgets twice.",
        ),
    ] = False,
) -> None:
    """Move a ledger from an SQLite file into the configured, empty PostgreSQL database.

    The file is closed for good: no server grants from it afterwards, and it moves to no other
    database. If the move fails, call it again.
    """
    from accountant_service.ledger import database, moving
    from accountant_service.ledger.errors import LedgerError
    from accountant_service.operations.settings import Settings

    try:
        with Progress(console=Console(stderr=True)) as bars:
            tasks: dict[str, TaskID] = {}

            def show(table: str, copied: int, count: int) -> None:
                """Show how many of a table's rows are copied."""
                if table not in tasks:
                    tasks[table] = bars.add_task(table, total=count)
                bars.update(tasks[table], completed=copied)

            moved = moving.move_ledger(file, Settings().database, show, is_unfinished=unfinished)
    except (LedgerError, database.DatabaseRefusedError, moving.MoveRefusedError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    print(f"moved {moved.datasets} datasets with {moved.entries} entries; all is verified")
    print(f"{file} is closed: keep it until the new database has a backup")
