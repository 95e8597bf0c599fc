"""The application that the commands belong to, and how each of them ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import typer
from rich.console import Console

from training_client.errors import DataError, TrainingStoppedError

EXITS: Final = (
    "Exit codes: 0 done, 2 wrong input, 3 refused by budget, 4 no answer from the service"
)
_LOGGER: Final = logging.getLogger("training_client")
app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Differentially private training that asks the accounting service before every step.",
)


@contextmanager
def stopping() -> Iterator[None]:
    """What stops training ends the program: a sentence, and the exit code that belongs to it.

    What the package logs meanwhile, such as a download, is shown on standard error.
    """
    handler = logging.StreamHandler()
    _LOGGER.addHandler(handler)
    _LOGGER.setLevel(logging.INFO)
    try:
        yield
    except TrainingStoppedError as error:
        said = "; ".join([str(error), *getattr(error, "__notes__", ())])
        complain(said)
        raise typer.Exit(error.exit_code) from None
    except OSError as error:  # of a folder or a disk: nobody else is asked for files
        complain(f"{error.filename or 'a file'}: {error.strerror or error}")
        raise typer.Exit(DataError.exit_code) from None
    finally:
        _LOGGER.removeHandler(handler)


def complain(said: str) -> None:
    """Say why, on standard error."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print("[bold red]Stopped:[/]", end=" ")
    console.print(said, markup=False)
