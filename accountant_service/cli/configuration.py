"""Faults in the configuration of a command, in words."""

from __future__ import annotations

from typing import Final

_PREFIX: Final = "ACCOUNTANT_"
_NO_ADDRESS: Final = ("ArgumentError", "NoSuchModuleError")  # of SQLAlchemy


def describe_fault(error: Exception) -> str | None:
    """Describe the wrong environment variable that caused an error; None for other errors."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError) and error.title == "Settings":
        faults = [
            f"{_PREFIX}{'_'.join(map(str, each['loc'])).upper()} "
            f"{each['msg'].replace('Input should be', 'must be')}, not {each['input']!r}"
            for each in error.errors()
        ]
        return "; ".join(faults)
    if type(error).__module__ == "sqlalchemy.exc" and type(error).__name__ in _NO_ADDRESS:
        return (
            f"{_PREFIX}DATABASE_URL is not the address of a database: {error}. Examples: "
            "sqlite:////path/ledger.db, postgresql+psycopg://user@host/database"
        )
    return None
