"""What there is: optimizers, models and data sets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from training_client.cli import options as take
from training_client.cli.app import app
from training_client.data import DATASETS
from training_client.models import MODELS
from training_client.optimizers import OPTIMIZERS


@app.command("optimizers")
def optimizers(as_json: take.AsJson = False) -> None:
    """Show every optimizer: what it does, where it comes from, where its state may come from."""
    found = [
        {
            "name": name,
            "what it does": each.title,
            "source": each.source,
            "states": list(each.states),
            "learning rate": each.learning_rate,
        }
        for name, each in OPTIMIZERS.items()
    ]
    _list("Optimizers", found, as_json)


@app.command("models")
def models(as_json: take.AsJson = False) -> None:
    """Show every model, and what is measured of it."""
    found = [
        {"name": name, "what it is": each.title, "measured": each.objective.measure}
        for name, each in MODELS.items()
    ]
    _list("Models", found, as_json)


@app.command("datasets")
def datasets(as_json: take.AsJson = False) -> None:
    """Show every data set: its size, what one record is, and where it comes from."""
    found = [
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
    _list("Data sets", found, as_json)


def _list(title: str, found: list[dict[str, Any]], as_json: bool) -> None:
    """A table for people, or the same for programs, with underscores in its names."""
    if as_json:
        plain = [{key.replace(" ", "_"): value for key, value in row.items()} for row in found]
        print(json.dumps(plain))
        return
    show(title, tuple(found[0]), [tuple(map(_cell, row.values())) for row in found])


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def show(
    title: str,
    columns: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    console: Console | None = None,
) -> None:
    """A table, its numbers to the right."""
    table = Table(title=title, title_justify="left")
    for at, column in enumerate(columns):
        number = bool(rows) and all(row[at][:1].isdigit() for row in rows)
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    (console or Console()).print(table)
