"""The commands `accountant report`: what was promised to whom, for signing and for registries."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperGroup

from accountant_service.cli.access import call_ledger
from accountant_service.cli.problems import CommandProblemError, build_problem, run_or_exit
from accountant_service.disclosure.formats import SUFFIXES, Format

if TYPE_CHECKING:
    from accountant_service.disclosure.facts import Facts

_FILE: Final = "certificate"  # the command that `accountant report FILE` means


class _FileGroup(TyperGroup):
    """A command group that reads a first argument other than a command as a certificate's file."""

    default_command = _FILE

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the command for certificates if the first argument is not a command."""
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = [self.default_command, *args]
        return super().parse_args(ctx, args)


report_app = typer.Typer(
    cls=_FileGroup,
    no_args_is_help=True,
    help="Report what was promised to whom: for signing, and for registries.",
    epilog="`accountant report CERTIFICATE.json` needs no ledger. The format follows from the "
    "name of the output file: .html, .pdf, .json, .yaml (OpenDP deployments registry) or .md "
    "(section of a model card).",
)
COMMANDS: Final = {"report": report_app}
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="A file instead of standard output.")
]
WantedFormat = Annotated[
    Format | None,
    typer.Option("--format", "-f", help="By default that of the file's name, or html."),
]
RegistryTier = Annotated[
    int, typer.Option(min=1, max=3, help="Tier of the deployments registry's record.")
]


@report_app.command("dataset")
def report_dataset(
    name: Annotated[str, typer.Argument(help="The dataset's name.")],
    output: Output = None,
    wanted: WantedFormat = None,
    tier: RegistryTier = 3,
) -> None:
    """Report on a dataset: the guarantee for all of its runs together, including future ones."""
    chosen = _choose_format(output, wanted)
    facts = call_ledger(lambda ledger: ledger.get_facts(name), {}, as_json=False)
    _write(facts, chosen, output, tier)


@report_app.command("run")
def report_run(
    identifier: Annotated[str, typer.Argument(metavar="RUN", help="The run's id.")],
    output: Output = None,
    wanted: WantedFormat = None,
    tier: RegistryTier = 3,
) -> None:
    """Report on a run that has ended."""
    from accountant_service.disclosure.facts import facts_of_certificate

    chosen = _choose_format(output, wanted)
    facts = call_ledger(
        lambda ledger: facts_of_certificate(ledger.get_certificate(identifier)), {}, as_json=False
    )
    _write(facts, chosen, output, tier)


@report_app.command(_FILE)
def report_certificate(
    file: Annotated[Path, typer.Argument(help="A certificate, as JSON.")],
    output: Output = None,
    wanted: WantedFormat = None,
    tier: RegistryTier = 3,
    public_key: Annotated[
        str | None, typer.Option(help="The issuer's public key, in hexadecimal.")
    ] = None,
) -> None:
    """Report on a run from its certificate. No ledger is needed."""
    chosen = _choose_format(output, wanted)
    _write(_run(lambda: _read_certificate(file, public_key)), chosen, output, tier)


def _run(action: Callable[[], Any]) -> Any:
    """Return a call's result; if it is refused, print why and exit."""
    return run_or_exit(action, {}, as_json=False)


def _choose_format(output: Path | None, wanted: Format | None) -> Format:
    """Return the wanted format, else that of the output file's suffix, or HTML without a file."""
    if wanted is not None:
        return wanted
    if output is None:
        return Format.HTML
    found = SUFFIXES.get(output.suffix.lower())
    if found is None:
        known = ", ".join(SUFFIXES)
        raise typer.BadParameter(
            f"no format is known for {output.name!r}: use one of {known}, or give --format",
            param_hint="--output",
        )
    return found


def _read_certificate(file: Path, public_key: str | None) -> Facts:
    """Read and verify a certificate's file, and return the facts for its report.

    Raises:
        CommandProblemError: it cannot be read, or `accountant verify` finds a fault in it.
    """
    from accountant_service.disclosure.facts import facts_of_certificate
    from accountant_service.ledger import certificate

    try:
        document = certificate.read(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise _refuse(f"cannot read the file {str(file)!r}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise _refuse(f"{str(file)!r} is not a certificate: {error}") from None
    faults, _ = certificate.check(document, public_key)
    if faults:
        raise _refuse(f"the certificate is not valid: {'; '.join(faults)}")
    return facts_of_certificate(document)


def _refuse(message: str) -> CommandProblemError:
    """Return the error of a certificate from which no report can be written."""
    return CommandProblemError(
        build_problem(message, code="not-a-certificate")
        | {"title": "There is no report about this certificate"}
    )


def _write(facts: Facts, wanted: Format, output: Path | None, tier: int) -> None:
    """Write a report to a file or to standard output."""
    from accountant_service.disclosure.rendering import render

    content: bytes = _run(lambda: render(facts, wanted, tier))  # type: ignore[arg-type]
    if output is None:
        if wanted is Format.PDF and sys.stdout.isatty():
            raise typer.BadParameter("PDF needs a file", param_hint="--output")
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
        return
    try:
        output.write_bytes(content)
    except OSError as error:
        raise typer.BadParameter(
            f"cannot write {str(output)!r}: {error.strerror}", param_hint="--output"
        ) from None
    print(f"wrote {output} ({wanted.value})", file=sys.stderr)
