"""Open the ledger's database for a command."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import typer

if TYPE_CHECKING:
    from accountant_service.ledger.errors import DatabaseAwayError
    from accountant_service.ledger.repository import Repository

_ADVICE: Final = {  # by words of what the database reports
    "full": "Free space on its disk, and call the command again",
    "readonly": "Allow this user to write it, or set ACCOUNTANT_DATABASE_URL to another",
    "permission": "Allow its user to write, or set ACCOUNTANT_DATABASE_URL to another",
    "locked": "Another program holds it; call the command again once that has ended",
    "unable to open": "Check that the folder in ACCOUNTANT_DATABASE_URL exists and may be written",
}
_START: Final = "Check ACCOUNTANT_DATABASE_URL, or start the database"


@contextmanager
def open_configured(*, create: bool = False) -> Iterator[Repository]:
    """Context manager that opens the configured database.

    Args:
        create: whether to create a ledger if there is none. Only commands that begin a ledger do.

    Raises:
        DatabaseRefusedError: a newer version of this program made its tables, the ledger was moved
            to another database, or there is none.
        DatabaseAwayError: it does not answer, or takes no writes.
    """
    from sqlalchemy import make_url

    from accountant_service.ledger import database
    from accountant_service.ledger.errors import DatabaseAwayError
    from accountant_service.operations.settings import Settings

    url = Settings().database
    shown = make_url(url).render_as_string(hide_password=True)
    try:
        repository = database.open_repository(url, create=create)
        try:
            yield repository
        finally:
            repository.close()
    except database.NoLedgerError as error:
        raise type(error)(
            f"there is no ledger in {shown}: {error}. Nothing was created. Set "
            "ACCOUNTANT_DATABASE_URL to the ledger's database, or begin a ledger with `accountant "
            "dataset create` or `accountant serve`"
        ) from None
    except DatabaseAwayError as error:
        raise type(error)(_explain(error, shown)) from error


def _explain(error: DatabaseAwayError, shown: str) -> str:
    """Return what a database reports, and what to do."""
    cause = str(getattr(error.__cause__, "orig", None) or error.detail)
    advice = next((text for words, text in _ADVICE.items() if words in cause), _START)
    return f"the database {shown} cannot be used: {cause.rstrip().rstrip('?.')}. {advice}"


@contextmanager
def open_repository(*, create: bool = False) -> Iterator[Repository]:
    """Context manager that opens the configured database, or prints an error and exits.

    Args:
        create: whether to create a ledger if there is none.
    """
    from accountant_service.ledger import database
    from accountant_service.ledger.errors import LedgerError

    try:
        with open_configured(create=create) as repository:
            yield repository
    except (LedgerError, database.DatabaseRefusedError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
