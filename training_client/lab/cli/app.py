"""The typer application, and how every command prints and ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import typer
from rich.console import Console
from typer.core import TyperCommand

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


class CommandOfNames(TyperCommand):
    """A command with a list of names, whose help leaves out that Typer calls it `list[str]`."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for each in self.params:
            if each.param_type_name == "argument":
                vars(each)["display_type_rich"] = lambda ctx: None  # noqa: ARG005


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Context manager: print errors that stop training, and exit with their exit codes.

    The package's log messages, such as a download, are shown on standard error meanwhile.
    """
    handler = logging.StreamHandler()
    _LOGGER.addHandler(handler)
    _LOGGER.setLevel(logging.INFO)
    try:
        yield
    except TrainingStoppedError as error:
        print_error("; ".join([str(error), *getattr(error, "__notes__", ())]))
        raise typer.Exit(error.exit_code) from None
    except OSError as error:  # of a folder or a disk: the service's own are ServiceErrors
        print_error(f"{error.filename or 'a file'}: {error.strerror or error}")
        raise typer.Exit(DataError.exit_code) from None
    finally:
        _LOGGER.removeHandler(handler)


def print_error(message: str) -> None:
    """Print to standard error why training stopped."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print("[bold red]Stopped:[/]", end=" ")
    console.print(message, markup=False)


def make_console(*, as_json: bool) -> Console:
    """Return the console for messages; it is standard error if standard output carries JSON."""
    return Console(highlight=False, soft_wrap=True, stderr=as_json)


def announce_public_data(declared_public: str | None, console: Console) -> None:
    """Print which data have no privacy guarantee because they are declared public, if any."""
    if declared_public is not None:
        console.print(f"Declared public, and covered by no guarantee: {declared_public}.")
