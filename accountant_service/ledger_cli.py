"""The operator's commands: keys, the ledger's record, the database."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from accountant_service import digits
from accountant_service.errors import LedgerError
from accountant_service.guarantee import Guarantee
from accountant_service.ledger import certificate, database, verification
from accountant_service.ledger.keys import Keys, Scope
from accountant_service.ledger.repository import Repository, connect, now
from accountant_service.ledger.service import dataset_view
from accountant_service.settings import Settings

keys = typer.Typer(no_args_is_help=True, help="API keys: make, list, revoke.")
ledger = typer.Typer(no_args_is_help=True, help="The budget ledger: verify, show, export, events.")
db = typer.Typer(no_args_is_help=True, help="The ledger's database.")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def _opened() -> Iterator[Repository]:
    """The repository of the settings; faults end the command with a sentence."""
    try:
        repository = database.open_repository(Settings().database)
        try:
            yield repository
        finally:
            repository.close()
    except (LedgerError, database.NewerDatabaseError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


@keys.command("create")
def create_key(
    scope: Annotated[
        list[Scope], typer.Option("--scope", help="What it may do; may be given several times.")
    ],
    name: Annotated[str, typer.Option(help="Whose it is.")] = "",
    dataset: Annotated[
        list[str] | None, typer.Option("--dataset", help="Only this dataset; several times.")
    ] = None,
    expires_in_days: Annotated[float | None, typer.Option(help="Never, unless given.")] = None,
) -> None:
    """Make a key and print it, this once, alone on one line."""
    expires = None if expires_in_days is None else now() + int(86400e6 * expires_in_days)
    with _opened() as repository:
        token, _ = Keys(repository).create(
            scope, name, None if not dataset else tuple(dataset), expires
        )
    print(token)


@keys.command("list")
def list_keys(as_json: AsJson = False) -> None:
    """Show every key, without the secret nobody has."""
    with _opened() as repository:
        found = Keys(repository).all()
    rows = [
        {
            "id": key.identifier,
            "name": key.name,
            "scopes": sorted(key.scopes),
            "datasets": key.datasets,
            "revoked": key.revoked_at is not None,
        }
        for key in found
    ]
    _show(rows, ["id", "name", "scopes", "datasets", "revoked"], "API keys", as_json)


@keys.command("revoke")
def revoke_key(identifier: Annotated[str, typer.Argument(help="From `keys list`.")]) -> None:
    """Make a key useless from now on."""
    with _opened() as repository:
        if Keys(repository).revoke(identifier, by="command-line") is None:
            print(f"error: there is no key {identifier!r}", file=sys.stderr)
            raise typer.Exit(1)
    print(f"revoked {identifier}")


@ledger.command("verify")
def verify(as_json: AsJson = False) -> None:
    """Recompute every chain, balance and charge; exit code 1 if anything is wrong."""
    with _opened() as repository:
        report = verification.verify(repository)
    if as_json:
        print(json.dumps({"entries": report.entries, "faults": report.faults}))
    else:
        for fault in report.faults:
            print(fault, file=sys.stderr)
        verdict = f"{len(report.faults)} wrong" if report.faults else "all is well"
        print(f"{verdict}; datasets: {report.datasets}, entries: {report.entries}")
    if report.faults:
        raise typer.Exit(1)


@ledger.command("show")
def show(as_json: AsJson = False) -> None:
    """Show every dataset's budget, and what is spent, held and left."""
    with _opened() as repository, repository.reading() as reading:
        views = [dataset_view(dataset) for dataset in reading.datasets()]
    if as_json:
        print(json.dumps(views))
        return
    rows = [
        {
            "dataset": view["name"],
            "budget": f"ε = {view['budget']['epsilon']:g}, δ = {view['budget']['delta']:g}",
            "spent": digits.up(view["spent"]["epsilon"]),
            "held": digits.up(view["held"]["epsilon"]),
            "left": digits.down(view["remaining"]["epsilon"]),
            "entries": view["version"],
        }
        for view in views
    ]
    _show(rows, ["dataset", "budget", "spent", "held", "left", "entries"], "Datasets", False)


@ledger.command("export")
def export() -> None:
    """Print every entry as a line of JSON, with its dataset and hash."""
    with _opened() as repository, repository.snapshot() as transaction:
        for dataset in transaction.datasets():
            after = 0
            while rows := transaction.entries(dataset, after):
                for row in rows:
                    entry = {"dataset": dataset.name, **json.loads(row.body), "hash": row.hash}
                    print(json.dumps(entry))
                after = rows[-1].number


@ledger.command("events")
def events(as_json: AsJson = False) -> None:
    """Show who made and revoked keys, and who created datasets; the record has all the rest."""
    with _opened() as repository, repository.reading() as reading:
        found = reading.audits()
    rows = [
        event | {"at": datetime.fromtimestamp(event["at"] / 1e6, UTC).isoformat(" ", "seconds")}
        for event in found
    ]
    _show(rows, ["at", "key", "action", "subject"], "Audit events", as_json)


@db.command("upgrade")
def upgrade() -> None:
    """Bring the database's tables up to date; `serve` does it as well."""
    engine = connect(Settings().database)
    try:
        with Repository(engine).transaction() as transaction:
            before, after = database.upgrade(transaction.connection)
    except (LedgerError, database.NewerDatabaseError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    finally:
        engine.dispose()
    print(f"at revision {after}" if before == after else f"from {before} to revision {after}")


def verify_certificate(
    file: Annotated[typer.FileText, typer.Argument(help="A certificate, as JSON.")],
    public_key: Annotated[
        str | None, typer.Option(help="The issuer's, in hexadecimal, if you know it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a certificate's signature and compute its guarantee anew, without any server."""
    try:
        document = certificate.read(file.read())
    except (ValueError, RecursionError) as error:
        document, faults, found = {}, [f"it is no certificate: {error}"], None
    else:
        faults, found = certificate.check(document, public_key)
    if as_json:
        print(json.dumps(_checked(document, faults, found)))
    else:
        for fault in faults:
            print(fault, file=sys.stderr)
        if found is not None:
            _tell_checked(_checked(document, faults, found), found)
            print(f"signed with {document.get('public_key')}")
        print("not valid" if faults else "valid")
    if faults:
        raise typer.Exit(1)


def _checked(
    document: certificate.Document, faults: list[str], found: Guarantee | None
) -> dict[str, Any]:
    """What was found of a certificate, for programs."""
    return {
        "faults": faults,
        "epsilon": None if found is None else found.epsilon,
        "steps_reserved": document.get("steps_reserved"),
        "steps_granted": document.get("steps"),
        "assumptions": [] if found is None else [each.statement for each in found.assumptions],
        "not_covered": certificate.not_covered(document),
    }


def _tell_checked(checked: dict[str, Any], found: Guarantee) -> None:
    print(f"computed anew: ε = {digits.up(found.epsilon)} at δ = {found.delta:g}")
    reserved, granted = checked["steps_reserved"], checked["steps_granted"]
    if reserved is not None:
        print(f"it covers all {reserved} steps reserved; {granted} of them were granted")
    for statement in checked["assumptions"]:
        print(f"it assumes: {statement}")
    for gap in checked["not_covered"]:
        print(f"it does not cover {gap}")


def _show(rows: list[dict[str, Any]], columns: list[str], title: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows))
        return
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(_text(row[column]) for column in columns))
    Console().print(table)


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "–" if value is None else str(value)
