"""The commands `accountant ledger`: verify, show and export the budget ledger."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.progress import Progress

from accountant_service.cli.access import download_entries
from accountant_service.cli.datasets import describe_budget, describe_quote, describe_shares
from accountant_service.cli.opening import open_repository
from accountant_service.cli.printing import AsJson, open_console, print_rows
from accountant_service.cli.problems import exit_with_faults, run_or_exit
from accountant_service.errors import CodedError
from accountant_service.ledger.names import EntryKind
from accountant_service.writing.canonical_json import read_json

if TYPE_CHECKING:
    from accountant_service.ledger.plans import StepsLeft
    from accountant_service.ledger.repository import Repository, Transaction
    from accountant_service.ledger.verification import States, VerificationReport

ledger = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Verify, show and export the budget ledger."
)
COMMANDS: Final = {"ledger": ledger}
_NOTHING: Final = 2  # the exit code if there is nothing to verify
_SAVING_SECONDS: Final = 10.0  # between two checkpoints of a verification that runs


@ledger.command("verify")
def verify(
    file: Annotated[
        typer.FileText | None,
        typer.Option(help="Verify the JSON lines of an export instead of the database."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Go on from the checkpoint in this file, if it exists, and keep a new one in it: "
            "also while the command runs, so that it goes on after an interruption."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Recompute every hash chain, balance and charge.

    With a checkpoint, the entries up to it are not read again. Compared are
    their number, the hash of the last one, and the rows of datasets and runs.
    So an entry altered before the checkpoint is found only without it.

    Exit code 1 if anything is wrong, 2 if there is nothing to verify or the checkpoint is refused.
    """
    if file is not None and checkpoint is not None:
        message = "is for the database, and --file verifies an export: give one of them"
        exit_with_faults([{"option": "--checkpoint", "message": message}], as_json=as_json)
    if file is not None:
        _verify_export(file, as_json)
        return
    with open_repository() as repository:
        report = _verify_database(repository, checkpoint, as_json)
    is_empty = not (report.datasets or report.faults)
    if as_json:
        counts = {"datasets": report.datasets, "entries": report.entries}
        if checkpoint is not None:
            counts["entries_not_read_again"] = report.entries_before
        told = {"faults": report.faults, "warnings": list(report.warnings)}
        print(json.dumps(counts | told))
    else:
        for warning in report.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        for fault in report.faults:
            print(fault, file=sys.stderr)
        verdict = f"{len(report.faults)} wrong" if report.faults else "all is well"
        verdict = "nothing to verify: the ledger has no dataset" if is_empty else verdict
        before = f", not read again: {report.entries_before}" if report.entries_before else ""
        print(f"{verdict}; datasets: {report.datasets}, entries: {report.entries}{before}")
    if report.faults or is_empty:
        raise typer.Exit(_NOTHING if is_empty else 1)


def _verify_database(
    repository: Repository, file: Path | None, as_json: bool
) -> VerificationReport:
    """Verify the database, with a progress bar on a terminal; keep a checkpoint in a file."""
    from accountant_service.ledger import signing, verification

    console = open_console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("entries")
        if file is None:
            return verification.verify(
                repository,
                watch=lambda done, total, _: bar.update(task, completed=done, total=total),
            )
        seed = repository.get_or_create_secret(signing.SIGNING_KEY)
        known, saved_at = _read_checkpoint(file, seed, as_json), time.monotonic()
        _write_checkpoint(file, seed, known, as_json)  # so that a failure shows at once

        def watch(done: int, total: int, describe: Callable[[], States]) -> None:
            """Show the progress, and write a checkpoint from time to time."""
            nonlocal saved_at
            bar.update(task, completed=done, total=total)
            if time.monotonic() - saved_at >= _SAVING_SECONDS:
                _write_checkpoint(file, seed, describe(), as_json)
                saved_at = time.monotonic()

        report = verification.verify(repository, known, watch)
        _write_checkpoint(file, seed, report.states, as_json)
        return report


def _read_checkpoint(file: Path, seed: bytes, as_json: bool) -> States:
    """Return the states in a checkpoint's file, none if there is no file; or exit with code 2."""
    from accountant_service.ledger import checkpoint

    try:
        return checkpoint.read(file.read_text(encoding="utf-8"), seed)
    except FileNotFoundError:
        return {}
    except (checkpoint.CheckpointRefusedError, OSError, UnicodeDecodeError) as error:
        message = (
            f"is refused: {error}. Name another file, or remove {file}, to verify every entry and "
            "begin a new checkpoint"
        )
        exit_with_faults([{"option": "--checkpoint", "message": message}], as_json=as_json)


def _write_checkpoint(file: Path, seed: bytes, states: States, as_json: bool) -> None:
    """Replace a checkpoint's file as a whole; exit with code 2 if that is impossible."""
    from accountant_service.ledger import checkpoint
    from accountant_service.ledger.repository import now

    new = file.with_name(f"{file.name}.new")
    try:
        new.write_text(checkpoint.write(states, seed, now()), encoding="utf-8")
        new.replace(file)
    except OSError as error:
        message = f"cannot be written: {error}"
        exit_with_faults([{"option": "--checkpoint", "message": message}], as_json=as_json)


def _verify_export(file: Iterable[str], as_json: bool) -> None:
    """Verify an export offline and print the last hash of each dataset."""
    from accountant_service.ledger import verification

    try:
        report = verification.verify_export(file)
    except (verification.ForeignFileError, UnicodeDecodeError) as error:
        message = f"is no export of the ledger: {error}. `accountant ledger export` writes one"
        exit_with_faults([{"option": "--file", "message": message}], as_json=as_json)
    heads = {name: {"entries": at, "head": head} for name, (at, head) in report.heads.items()}
    if as_json:
        print(json.dumps({"datasets": heads, "faults": report.faults}))
    else:
        for fault in report.faults:
            print(fault, file=sys.stderr)
        for name, found in heads.items():
            print(f"{name}: {found['entries']} entries, head {found['head']}")
        print(f"{len(report.faults)} wrong" if report.faults else "all is well")
    if report.faults:
        raise typer.Exit(1)


@ledger.command("repair")
def repair(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be mended.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Derive anew what the entries determine: balances, runs, columns. Exit code 1 if faults stay.

    Entries are never changed. A dataset whose entries are not sound stays as it is: restore a
    backup.
    """
    from accountant_service.ledger import verification
    from accountant_service.ledger.repair import repair as mend

    with open_repository() as repository:
        report = mend(repository, is_trial=dry_run)
        faults = verification.verify(repository).faults
    if as_json:
        print(json.dumps({"mended": report.mended, "left": report.left, "faults": faults}))
    else:
        for each in report.mended:
            print(f"{'would mend' if dry_run else 'mended'}: {each}")
        for fault in dict.fromkeys([*report.left, *faults]):
            print(fault, file=sys.stderr)
        print(f"{'to mend' if dry_run else 'mended'}: {len(report.mended)}, wrong: {len(faults)}")
    if report.left or faults:
        raise typer.Exit(1)


@ledger.command("show")
def show(as_json: AsJson = False) -> None:
    """Show every dataset's budget: spent, held, and left in steps like the last run's."""
    from accountant_service.api.ledger_views import dataset_view
    from accountant_service.ledger.plans import count_steps_left

    with open_repository() as repository, repository.reading() as reading:
        found = [(each, reading.find_last_run(each)) for each in reading.list_datasets()]
    views = [
        dataset_view(dataset)
        | {"steps_left": None if run is None else _view_steps_left(count_steps_left(dataset, run))}
        for dataset, run in ((each, None if each.closed_at else run) for each, run in found)
    ]
    if as_json:
        print(json.dumps(views))
        return
    rows = [
        {
            "dataset": view["name"],
            "budget": describe_budget(view["budget"]),
            **describe_shares(view),
            "state": view["state"],
            "entries": view["version"],
        }
        for view in views
    ]
    columns = ["dataset", "budget", "spent", "held", "left", "state", "entries"]
    print_rows(rows, columns, "Datasets", False)
    for view in views:
        if view["steps_left"] is not None:
            print(f"{view['name']}: {_describe_steps_left(view['steps_left'])} fit")


def _view_steps_left(left: StepsLeft) -> dict[str, Any]:
    """Return as JSON how many steps a budget still admits."""
    from accountant_service import mechanisms

    return {
        "run": left.run,
        "step": mechanisms.to_json(left.step),
        "steps": left.steps,
        "is_exact": left.is_exact,
    }


def _describe_steps_left(left: dict[str, Any]) -> str:
    """Return in words how many steps like the last run's a budget still admits."""
    from accountant_service import mechanisms

    like = f"like the last run ({mechanisms.from_json(left['step']).describe_step()})"
    if left["steps"] is None:
        count = "any number of steps" if left["is_exact"] else "an unknown number of steps"
    else:
        count = f"{'' if left['is_exact'] else 'at least '}{left['steps']} more steps"
    return f"{count} {like}"


@ledger.command("quote")
def quote(
    dataset: Annotated[str, typer.Argument(help="The dataset's name.")],
    mechanism: Annotated[
        str, typer.Option("--mechanism", "-m", help="The plan as JSON, as in a reservation.")
    ],
    as_json: AsJson = False,
) -> None:
    """Quote a plan: whether it fits, what would fit, and what would fit as the only plan."""
    from accountant_service import mechanisms
    from accountant_service.api.ledger_views import quote_view
    from accountant_service.ledger.plans import quote_plan

    with open_repository() as repository, repository.reading() as reading:
        found = reading.find_dataset(dataset)
    if found is None:
        print(f"error: there is no dataset {dataset!r}", file=sys.stderr)
        raise typer.Exit(1)
    try:
        answer = quote_plan(found, mechanisms.from_json(read_json(mechanism)))
    except (CodedError, mechanisms.MechanismError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    view = quote_view(answer)
    print(json.dumps(view) if as_json else "\n".join(describe_quote(view)))


def _parse_time(text: str) -> datetime:
    """Return a time given as ISO 8601; without a zone it is UTC."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a time such as 2026-01-31 or 2026-01-31T12:00:00Z"
        ) from None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def _require_datasets(transaction: Transaction, names: Iterable[str]) -> None:
    """Exit with code 2 unless all datasets of these names exist."""
    missing = [name for name in names if transaction.find_dataset(name) is None]
    if missing:
        faults = [
            {"option": "--dataset", "message": f"{name!r} does not exist"} for name in missing
        ]
        exit_with_faults(faults)


@ledger.command("export")
def export(
    dataset: Annotated[
        list[str] | None,
        typer.Option("--dataset", metavar="NAME", help="Only this dataset. Repeatable."),
    ] = None,
    kind: Annotated[
        list[EntryKind] | None,
        typer.Option(
            "--kind",
            metavar="KIND",
            help=f"Only these entries: {', '.join(EntryKind)}. Repeatable.",
        ),
    ] = None,
    since: Annotated[
        Any, typer.Option(parser=_parse_time, metavar="TIME", help="Earliest time; ISO 8601, UTC.")
    ] = None,
    until: Annotated[
        Any, typer.Option(parser=_parse_time, metavar="TIME", help="Only entries before this time.")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of JSON lines.")] = False,
    service: Annotated[
        bool,
        typer.Option(
            "--service",
            help="Ask the service at ACCOUNTANT_SERVICE with the key in ACCOUNTANT_API_KEY, which "
            "needs scope auditor, instead of the database.",
        ),
    ] = False,
) -> None:
    """Print every entry as one line of JSON, with its dataset and hash."""
    from accountant_service.ledger import exporting
    from accountant_service.ledger.exporting import EntryQuery, Period

    if service:
        asked = {
            "dataset": dataset or [],
            "kind": [each.value for each in kind or []],
            "since": [] if since is None else [since.astimezone(UTC).isoformat()],
            "until": [] if until is None else [until.astimezone(UTC).isoformat()],
            "format": ["csv" if as_csv else "jsonl"],
        }
        run_or_exit(lambda: download_entries(asked, sys.stdout), {}, as_json=False)
        return
    period = Period(*(None if at is None else round(1e6 * at.timestamp()) for at in (since, until)))
    query = EntryQuery(tuple(dataset) if dataset else None, frozenset(kind or ()), period)
    with open_repository() as repository, repository.snapshot() as transaction:
        _require_datasets(transaction, dataset or ())
        found = exporting.iterate_entries(transaction, query)
        if not as_csv:
            for entry in found:
                print(json.dumps(entry.to_json()))
            return
        columns = exporting.ENTRY_COLUMNS
        sys.stdout.write(exporting.write_csv([columns]))
        for entry in found:
            cells = [column(entry) for column in columns.values()]
            sys.stdout.write(exporting.write_csv([cells]))


@ledger.command("entries")
def entries(
    dataset: Annotated[
        list[str] | None,
        typer.Option("--dataset", metavar="NAME", help="Only this dataset. Repeatable."),
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="Only entries made with the key of this id.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the entries of the ledger, and which key made each; with --json, also of which run."""
    from accountant_service.ledger.exporting import EntryQuery, iterate_entries

    query = EntryQuery(tuple(dataset) if dataset else None)
    with open_repository() as repository, repository.snapshot() as transaction:
        _require_datasets(transaction, dataset or ())
        found = [each.to_json() for each in iterate_entries(transaction, query)]
    rows = [
        {name: each.get(name) for name in ("dataset", "number", "kind", "steps", "key")}
        | {"at": datetime.fromtimestamp(each["at"] / 1e6, UTC).isoformat(" ", "seconds")}
        | {"run": each.get("reservation")}
        for each in found
        if key is None or each.get("key") == key
    ]
    print_rows(rows, ["dataset", "number", "kind", "at", "key", "steps"], "Entries", as_json)


@ledger.command("events")
def events(as_json: AsJson = False) -> None:
    """Show which key created or revoked keys, created datasets, or changed caps."""
    with open_repository() as repository, repository.reading() as reading:
        found = reading.list_audit_events()
    rows = [
        event | {"at": datetime.fromtimestamp(event["at"] / 1e6, UTC).isoformat(" ", "seconds")}
        for event in found
    ]
    print_rows(rows, ["at", "key", "action", "subject", "detail"], "Audit events", as_json)
