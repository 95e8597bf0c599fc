"""What there is: optimizers, models and data sets."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from training_client.cli.app import app
from training_client.data import DATASETS
from training_client.models import MODELS
from training_client.optimizers import OPTIMIZERS


@app.command("optimizers")
def optimizers() -> None:
    """Show every optimizer: what it does, where it comes from, where its state may come from."""
    rows = [
        (name, each.title, each.source, ", ".join(each.states), f"{each.learning_rate:g}")
        for name, each in OPTIMIZERS.items()
    ]
    show("Optimizers", ("name", "what it does", "source", "states", "learning rate"), rows)


@app.command("models")
def models() -> None:
    """Show every model, and what is measured of it."""
    rows = [(name, each.title, each.objective.measure) for name, each in MODELS.items()]
    show("Models", ("name", "what it is", "measured"), rows)


@app.command("datasets")
def datasets() -> None:
    """Show every data set: its size, what one record is, and where it comes from."""
    rows = [
        (
            name,
            f"{each.train_size:,} + {each.test_size:,}",
            f"{each.inputs:,}",
            str(each.classes),
            each.privacy_unit,
            each.origin,
        )
        for name, each in DATASETS.items()
    ]
    show("Data sets", ("name", "train + test", "inputs", "classes", "a record", "origin"), rows)


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
