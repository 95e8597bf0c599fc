"""Names that the command line accepts: the same as the HTTP API."""

from __future__ import annotations

import re
from typing import Final

import typer

# for the help, without an import of the accountants and of the importers
METHODS: Final = (
    "pld",
    "subsampled_rdp",
    "moments_accountant",
    "gaussian_sampling_composition",
    "optimal_composition",
    "advanced_composition",
    "basic_composition",
    "zcdp",
    "adadp_rdp",
    "mma",
    "moments_accountant_closed_form",
    "gdp_clt",
)
DEFAULT_METHOD: Final = "pld"
FORMATS: Final = ("dp_event", "jax_privacy", "nvflare", "flower", "opacus", "run")


def check_name(name: str | None, option: str = "--team") -> str | None:
    """Return a name given by an option; exit with an error if the HTTP API would refuse it."""
    from accountant_service.api.ledger_schemas import NAME_LENGTH_MAX, NAME_PATTERN

    if name is not None and (len(name) > NAME_LENGTH_MAX or not re.search(NAME_PATTERN, name)):
        raise typer.BadParameter(
            f"{name!r} is not a valid name: use letters, digits, dots, dashes and underscores",
            param_hint=option,
        )
    return name


def check_label(label: str) -> str:
    """Return the label of a key; exit with an error if the HTTP API would refuse it."""
    from accountant_service.api.ledger_schemas import NAME_LENGTH_MAX

    if len(label) > NAME_LENGTH_MAX:
        raise typer.BadParameter(
            f"must have at most {NAME_LENGTH_MAX} characters", param_hint="--name"
        )
    return label
