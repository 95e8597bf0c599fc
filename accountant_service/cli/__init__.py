"""The `accountant` command line: computations without HTTP, the server and the ledger.

A module is imported when one of its commands is called, so that `--help` answers at once and
`serve` starts quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from accountant_service.cli.encoding import prepare_output
from accountant_service.questions import functions
from accountant_service.version import __version__

_CONFIGURATION_ERRORS: Final = ("pydantic_core._pydantic_core", "sqlalchemy.exc")  # not imported
_COMPLETION: Final = ("--install-completion", "--show-completion")
_UsageError: Any = typer.BadParameter.__base__  # the base of every fault in how it is called


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry in the table of commands: the command's module, and its help's first line.

    Attributes:
        module: the module in this folder whose `COMMANDS` has the command.
        help: the first line of the command's help.
    """

    module: str
    help: str


def _summarize(function: Callable[..., Any]) -> str:
    """Return the first line of a function's docstring."""
    return (function.__doc__ or "").partition("\n")[0]


_COMMANDS: Final = {
    "epsilon": _Entry("questions", _summarize(functions.epsilon)),
    "delta": _Entry("questions", _summarize(functions.delta)),
    "noise-multiplier": _Entry("questions", _summarize(functions.noise_multiplier)),
    "steps": _Entry("questions", _summarize(functions.steps)),
    "sample-rate": _Entry("questions", _summarize(functions.sample_rate)),
    "solve": _Entry("questions", _summarize(functions.solve)),
    "compare": _Entry("questions", _summarize(functions.compare)),
    "plan": _Entry("plan", _summarize(functions.plan)),
    "import": _Entry("import_document", _summarize(functions.import_document)),
    "audit": _Entry("audit", "Recompute the papers' claims and compare each with what is proved."),
    "serve": _Entry(
        "server", "Run the service: the API, its documentation at /docs, health at /healthz."
    ),
    "dataset": _Entry("datasets", "Create, list, show, quote, close and delete datasets."),
    "series": _Entry(
        "series",
        "Keep data that grows as a dataset for each period, and see the last ones together.",
    ),
    "run": _Entry("runs", "Reserve, grant and end runs, and get their certificates."),
    "charge": _Entry(
        "charge", "Charge a release that another program makes. Call it before the release is made."
    ),
    "report": _Entry(
        "reports", "Report what was promised to whom: for signing, and for registries."
    ),
    "keys": _Entry("keys", "Create, limit, list and revoke API keys."),
    "ledger": _Entry("ledger", "Verify, show and export the budget ledger."),
    "caps": _Entry("caps", "Limit what teams and keys may take of a dataset's budget."),
    "webhook": _Entry(
        "webhooks",
        "Tell another program when a share of a budget is passed or a dataset is closed.",
    ),
    "verify": _Entry(
        "certificates",
        "Verify a certificate offline: check its signature and recompute its guarantee.",
    ),
    "db": _Entry("database", "Manage the ledger's database."),
}


def help_of(name: str) -> str:
    """Return the first line of a command's help."""
    return _COMMANDS[name].help


def load_command(name: str) -> Any:
    """Import the module of a command, and return the command."""
    module = import_module(f"{__name__}.{_COMMANDS[name].module}")
    command = typer.main.get_command(module.COMMANDS[name])
    command.name = name
    return command


@contextmanager
def _own_words(arguments: Sequence[str]) -> Iterator[None]:
    """Context manager that prints usage and configuration errors as all other errors are printed.

    Args:
        arguments: with --json, usage errors are printed as JSON.
    """
    try:
        yield
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # not an error: the command's help
            raise
        from accountant_service.cli.problems import exit_with_usage_error

        exit_with_usage_error(error, as_json="--json" in arguments)
    except Exception as error:
        if type(error).__module__ not in _CONFIGURATION_ERRORS:
            raise
        from accountant_service.cli.configuration import describe_fault

        described = describe_fault(error)
        if described is None:
            raise
        typer.echo(f"error: {described}", err=True)
        raise typer.Exit(2) from None


class _LazyGroup(TyperGroup):
    """A group of commands that lists them without importing their modules."""

    def __init__(self, **attributes: Any) -> None:
        listed = {name: TyperCommand(name, help=entry.help) for name, entry in _COMMANDS.items()}
        super().__init__(**attributes | {"commands": listed})

    def main(self, *args: Any, **settings: Any) -> Any:
        """Run the program, with output that every terminal encoding can show."""
        prepare_output()
        return super().main(*args, **settings)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options before the command's name; `help NAME` is `NAME --help`."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        if args == ["version"]:
            args = ["--version"]
        with _own_words(args):
            flags = {
                each
                for option in self.get_params(ctx)
                if getattr(option, "is_flag", False)
                for each in option.opts
            }
            if len(args) > 1 and args[0] in flags.intersection(_COMPLETION):
                advice = (
                    f"takes no value: it is for the shell that calls it; call it from {args[1]}"
                )
                raise typer.BadParameter(advice, param_hint=args[0])
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        with _own_words([*ctx._protected_args, *ctx.args]):
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the called command's name, the command, and the remaining arguments."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else load_command(name), rest


app: Final = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    """Print the version and exit, if it is wanted."""
    if wanted:
        typer.echo(f"accountant {__version__}")
        raise typer.Exit


@app.callback()
def accountant(
    _: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Privacy accounting: what a differentially private run costs, and the budget ledger."""
