"""Names that the command line accepts: the same as the HTTP API."""

from __future__ import annotations

import re

import typer

from accountant_service.api.ledger_schemas import NAME_LENGTH_MAX, NAME_PATTERN


def check_name(name: str | None) -> str | None:
    """Return a team's name; exit with an error if the HTTP API would refuse it."""
    if name is not None and (len(name) > NAME_LENGTH_MAX or not re.search(NAME_PATTERN, name)):
        raise typer.BadParameter(
            f"{name!r} is not a valid name: use letters, digits, dots, dashes and underscores",
            param_hint="--team",
        )
    return name
