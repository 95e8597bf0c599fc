"""`accountant-train data`: every data set that can be fetched, and how to get the others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from training_client.cli.app import app, complain, stopping
from training_client.cli.options import DataDir
from training_client.data import DATASETS, check, load
from training_client.errors import DataError, NotFetchedError


@app.command("data", epilog="Exit codes: 0 done, 2 a download failed or is not what was expected.")
def fetch(
    names: Annotated[
        list[str] | None, typer.Argument(help="Data sets; all there are by default.")
    ] = None,
    data_dir: DataDir = Path("data"),
) -> None:
    """Fetch data sets, checked by their hash. They are downloaded once and never installed."""
    console, failed = Console(highlight=False, soft_wrap=True), False
    with stopping():
        for name in names or list(DATASETS):
            try:
                data = load(name, data_dir)
                if name in DATASETS:
                    check(data, DATASETS[name].train_size)
            except NotFetchedError as error:
                console.print(f"{name}: {error}")
            except DataError as error:
                complain(f"{name}: {error}")
                failed = True
            else:
                sizes = f"{len(data.train_labels):,} + {len(data.test_labels):,}"
                filled = float(data.train_examples.count_nonzero()) / data.train_examples.numel()
                console.print(
                    f"{name}: {sizes} examples of {data.inputs:,} numbers, {filled:.0%} not 0"
                )
    if failed:
        raise typer.Exit(DataError.exit_code)
