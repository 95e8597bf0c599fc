"""`accountant-train optimizers`, `models` and `datasets`: list what can be trained, and on what."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from training_client.lab.cli.app import command
from training_client.lab.cli.options import AsJson
from training_client.lab.data import DATASETS
from training_client.lab.models import MODELS
from training_client.optimizers import OPTIMIZERS


@command("optimizers")
def optimizers(as_json: AsJson = False) -> None:
    """List the optimizers, the papers that they come from, and the sources of their state."""
    rows = [
        {
            "name": name,
            "what it does": each.title,
            "source": each.source,
            "states": list(each.states),
            "learning rate": each.learning_rate,
        }
        for name, each in OPTIMIZERS.items()
    ]
    _print_list("Optimizers", rows, as_json)


@command("models")
def models(as_json: AsJson = False) -> None:
    """List the models, and the measure by which each is tested."""
    rows = [
        {"name": name, "what it is": each.title, "measured": each.objective.measure}
        for name, each in MODELS.items()
    ]
    _print_list("Models", rows, as_json)


@command("datasets")
def datasets(as_json: AsJson = False) -> None:
    """List the data sets: their size, what a record is, and where they come from."""
    rows = [
        {
            "name": name,
            "train": each.train_size,
            "test": each.test_size,
            "inputs": each.inputs,
            "classes": each.classes,
            "a record": each.privacy_unit,
            "origin": each.origin,
        }
        for name, each in DATASETS.items()
    ]
    _print_list("Data sets", rows, as_json)


def _print_list(title: str, rows: list[dict[str, Any]], as_json: bool) -> None:
    """Print rows as a table, or as JSON with underscores in the keys."""
    if as_json:
        plain = [{key.replace(" ", "_"): value for key, value in row.items()} for row in rows]
        print(json.dumps(plain))
        return
    print_table(title, tuple(rows[0]), [tuple(map(_format_cell, row.values())) for row in rows])


def _format_cell(value: Any) -> str:
    """Convert a table cell's value to text."""
    if isinstance(value, list):
        return ", ".join(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def print_table(
    title: str,
    columns: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    console: Console | None = None,
) -> None:
    """Print a table with numeric columns aligned to the right."""
    table = Table(title=title, title_justify="left")
    for at, column in enumerate(columns):
        numeric = bool(rows) and all(row[at][:1].isdigit() for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    (console or Console()).print(table)
