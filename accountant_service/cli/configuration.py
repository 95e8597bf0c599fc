"""Faults in the configuration of a command, in words."""

from __future__ import annotations

from typing import Any, Final

_PREFIX: Final = "ACCOUNTANT_"
_NO_ADDRESS: Final = ("ArgumentError", "NoSuchModuleError")  # of SQLAlchemy


def describe_fault(error: Exception) -> str | None:
    """Describe the wrong environment variable that caused an error; None for other errors."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError) and error.title == "Settings":
        faults = [
            f"{_PREFIX}{'_'.join(map(str, each['loc'])).upper()} "
            f"{_say_what_is_valid(each)}, not {each['input']!r}"
            for each in error.errors()
        ]
        return "; ".join(faults)
    if type(error).__module__ == "sqlalchemy.exc" and type(error).__name__ in _NO_ADDRESS:
        hint = ": write postgresql+psycopg:// for postgres://" if "postgres'" in str(error) else ""
        return (
            f"{_PREFIX}DATABASE_URL is not the address of a database: {error}{hint}. Examples: "
            "sqlite:////path/ledger.db, postgresql+psycopg://user@host/database"
        )
    return None


def _say_what_is_valid(error: Any) -> str:
    """Return what a setting's value must be, in plainer words than pydantic's."""
    message = str(error["msg"]).partition(", unable to parse")[0]
    message = message.replace("a valid integer", "a whole number")
    return message.replace("Input should be", "must be").removeprefix("Value error, ")
