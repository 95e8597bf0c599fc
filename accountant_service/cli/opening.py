"""Open the ledger's database for a command."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from accountant_service.ledger.repository import Repository


def open_configured(*, create: bool = False) -> Repository:
    """Open the configured database.

    Args:
        create: whether to create a ledger if there is none. Only commands that begin a ledger do.

    Raises:
        DatabaseRefusedError: a newer version of this program made its tables, the ledger was moved
            to another database, or there is none.
        DatabaseAwayError: it does not answer.
    """
    from sqlalchemy import make_url

    from accountant_service.ledger import database
    from accountant_service.ledger.errors import DatabaseAwayError
    from accountant_service.settings import Settings

    url = Settings().database
    try:
        return database.open_repository(url, create=create)
    except database.NoLedgerError as error:
        shown = make_url(url).render_as_string(hide_password=True)
        raise type(error)(
            f"there is no ledger in {shown}: {error}. Nothing was created. Set "
            "ACCOUNTANT_DATABASE_URL to the ledger's database, or begin a ledger with `accountant "
            "dataset create` or `accountant serve`"
        ) from None
    except DatabaseAwayError as error:
        shown = make_url(url).render_as_string(hide_password=True)
        cause = getattr(error.__cause__, "orig", None) or error.detail
        raise type(error)(
            f"the database {shown} cannot be used: {cause}. Check ACCOUNTANT_DATABASE_URL, or "
            "start the database"
        ) from error


@contextmanager
def open_repository(*, create: bool = False) -> Iterator[Repository]:
    """Context manager that opens the configured database, or prints an error and exits.

    Args:
        create: whether to create a ledger if there is none.
    """
    from accountant_service.ledger import database
    from accountant_service.ledger.errors import LedgerError

    try:
        repository = open_configured(create=create)
        try:
            yield repository
        finally:
            repository.close()
    except (LedgerError, database.DatabaseRefusedError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
