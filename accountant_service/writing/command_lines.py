"""Command lines that ask about a run, or train it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Final

from accountant_service.writing.number_format import shorten_exponents

Json = Mapping[str, Any]

_OPTIONS: Final = {  # of `accountant`
    "noise_multiplier": "-s",
    "sample_rate": "-q",
    "steps": "-t",
    "dataset_size": "-n",
    "batch_size": "-b",
    "epochs": "-e",
    "sampling": "--sampling",
    "delta": "-d",
    "neighbouring_relation": "--neighbouring-relation",
}
_TRAINING_OPTIONS: Final = {  # of `accountant-train run`, for the reader's data
    "data": "--data",
    "dataset_size": "--size",
    "batch_size": "--batch-size",
    "steps": "--steps",
    "sampling": "--sampling",
    "noise_multiplier": "--noise-multiplier",
    "epsilon": "--epsilon",
    "delta": "--delta",
}
_INITIAL: Final = {"sampling": "poisson", "neighbouring_relation": "add_or_remove_one"}
_DATA: Final = "mine"  # stands for the name of the reader's data


def write_options(given: Json) -> str:
    """Return the options of `accountant` for those fields that have one."""
    return _write(given, _OPTIONS)


def price_command(run: Json, delta: float, relation: str) -> str:
    """Return the command line that computes the ε of a DP-SGD run at δ."""
    given = {**run, "delta": delta, "neighbouring_relation": relation}
    return f"accountant epsilon {_write(_without_initial(given), _OPTIONS)}"


def training_command(run: Json, epsilon: float, delta: float) -> str:
    """Return the command line that trains a DP-SGD run with sizes, within a budget."""
    given = {**run, "data": _DATA, "epsilon": epsilon, "delta": delta}
    return f"accountant-train run {_write(_without_initial(given), _TRAINING_OPTIONS)}"


def _without_initial(given: Json) -> Json:
    """Return fields without those that have the value of a missing option."""
    return {name: value for name, value in given.items() if _INITIAL.get(name) != value}


def _write(given: Json, options: Mapping[str, str]) -> str:
    """Return the options for the fields that have one, in the order of the table."""
    return " ".join(
        f"{option} {shlex.quote(shorten_exponents(str(given[name]).removesuffix('.0')))}"
        for name, option in options.items()
        if name in given
    )
