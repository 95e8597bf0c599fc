"""Commands for operators: API keys, the ledger and its database."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from accountant_service import mechanisms, number_format
from accountant_service.api.ledger_schemas import NAME_LENGTH_MAX, NAME_PATTERN
from accountant_service.api.ledger_views import cap_view, dataset_view, quote_view
from accountant_service.errors import CodedError
from accountant_service.guarantee import Guarantee
from accountant_service.ledger import certificate, database, verification
from accountant_service.ledger.api_keys import Keys, Scope
from accountant_service.ledger.caps import Caps
from accountant_service.ledger.errors import LedgerError
from accountant_service.ledger.plans import Quote, StepsLeft, count_steps_left, quote_plan
from accountant_service.ledger.repository import Repository, connect, now
from accountant_service.ledger.rules import Cap, HolderKind
from accountant_service.mechanisms import describe_step
from accountant_service.settings import Settings

keys = typer.Typer(no_args_is_help=True, help="Create, list and revoke API keys.")
ledger = typer.Typer(no_args_is_help=True, help="Verify, show and export the budget ledger.")
caps = typer.Typer(
    no_args_is_help=True, help="Limit what teams and keys may take of a dataset's budget."
)
db = typer.Typer(no_args_is_help=True, help="Manage the ledger's database.")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def _open_repository() -> Iterator[Repository]:
    """Context manager that opens the configured database, or prints an error and exits."""
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
        list[Scope], typer.Option("--scope", help="A permission of the key. Repeatable.")
    ],
    name: Annotated[str, typer.Option(help="A name for the key, for example its owner.")] = "",
    dataset: Annotated[
        list[str] | None,
        typer.Option("--dataset", help="Bind the key to this dataset. Repeatable."),
    ] = None,
    expires_in_days: Annotated[
        float | None, typer.Option(help="Days until the key expires. Default: never.")
    ] = None,
    team: Annotated[
        str | None, typer.Option(help="The team whose runs and caps the key shares.")
    ] = None,
) -> None:
    """Create a key and print it on one line. It cannot be shown again."""
    expires = None if expires_in_days is None else now() + int(86400e6 * expires_in_days)
    with _open_repository() as repository:
        token, _ = Keys(repository).create(
            scope, name, None if not dataset else tuple(dataset), expires, _check_name(team)
        )
    print(token)


@keys.command("list")
def list_keys(as_json: AsJson = False) -> None:
    """List keys (secrets are never stored)."""
    with _open_repository() as repository:
        found = Keys(repository).list_keys()
    rows = [
        {
            "id": key.identifier,
            "name": key.name,
            "scopes": sorted(key.scopes),
            "datasets": key.datasets,
            "team": key.team,
            "revoked": key.revoked_at is not None,
        }
        for key in found
    ]
    _print_rows(rows, ["id", "name", "scopes", "datasets", "team", "revoked"], "API keys", as_json)


@keys.command("revoke")
def revoke_key(
    identifier: Annotated[str, typer.Argument(help="The key's id, from `keys list`.")],
) -> None:
    """Revoke a key from now on."""
    with _open_repository() as repository:
        if Keys(repository).revoke(identifier, by="command-line") is None:
            print(f"error: there is no key {identifier!r}", file=sys.stderr)
            raise typer.Exit(1)
    print(f"revoked {identifier}")


def _check_name(name: str | None) -> str | None:
    """Return a team's name, or refuse one that the HTTP API would refuse."""
    if name is not None and (len(name) > NAME_LENGTH_MAX or not re.search(NAME_PATTERN, name)):
        raise typer.BadParameter(
            f"{name!r} is not a valid name: use letters, digits, dots, dashes and underscores",
            param_hint="--team",
        )
    return name


TeamOption = Annotated[str | None, typer.Option("--team", help="The team that the cap limits.")]
KeyOption = Annotated[
    str | None, typer.Option("--key", help="The id of the key that the cap limits.")
]


def _choose_holder(team: str | None, key: str | None) -> tuple[HolderKind, str]:
    """Return the holder that a cap is for: exactly one of a team and a key."""
    if team is not None and key is None:
        return HolderKind.TEAM, _check_name(team) or ""
    if key is not None and team is None:
        return HolderKind.KEY, key
    raise typer.BadParameter("give one of --team and --key")


@caps.command("set")
def set_cap(
    dataset: Annotated[str, typer.Argument(help="The dataset's name.")],
    share: Annotated[float, typer.Option(min=0, max=1, help="Share of the budget, from 0 to 1.")],
    team: TeamOption = None,
    key: KeyOption = None,
) -> None:
    """Limit what a team or a key may take of a dataset's budget."""
    kind, holder = _choose_holder(team, key)
    with _open_repository() as repository:
        cap = Cap(kind, holder, share)
        found, use = Caps(repository).set(dataset, cap, by="command-line")
    taken = cap_view(found.policy, use)["share_taken"]
    print(f"{kind} {holder} may take {share:g} of the budget of {dataset}; taken: {taken:.4g}")


@caps.command("list")
def list_caps(
    dataset: Annotated[str, typer.Argument(help="The dataset's name.")], as_json: AsJson = False
) -> None:
    """List a dataset's caps, with what each holder has taken."""
    with _open_repository() as repository:
        found, uses = Caps(repository).list_uses(dataset)
    rows = [cap_view(found.policy, use) for use in uses]
    _print_rows(rows, ["team", "key", "share", "share_taken"], f"Caps of {dataset}", as_json)


@caps.command("remove")
def remove_cap(
    dataset: Annotated[str, typer.Argument(help="The dataset's name.")],
    team: TeamOption = None,
    key: KeyOption = None,
) -> None:
    """Remove the cap of a team or a key."""
    kind, holder = _choose_holder(team, key)
    with _open_repository() as repository:
        Caps(repository).remove(dataset, kind, holder, by="command-line")
    print(f"removed the cap of {kind} {holder}")


@ledger.command("verify")
def verify(as_json: AsJson = False) -> None:
    """Recompute every chain, balance and charge. Exit code 1 if anything is wrong."""
    with _open_repository() as repository:
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
    """Show every dataset's budget: spent, held, and left in steps like the last run's."""
    with _open_repository() as repository, repository.reading() as reading:
        found = [(each, reading.find_last_run(each)) for each in reading.list_datasets()]
    views = [
        dataset_view(dataset)
        | {"steps_left": None if run is None else _view_steps_left(count_steps_left(dataset, run))}
        for dataset, run in found
    ]
    if as_json:
        print(json.dumps(views))
        return
    rows = [
        {
            "dataset": view["name"],
            "budget": f"ε = {view['budget']['epsilon']:g}, δ = {view['budget']['delta']:g}",
            "spent": f"{number_format.round_up(100 * view['spent']['share'], 3)} %",
            "held": f"{number_format.round_up(100 * view['held']['share'], 3)} %",
            "left": f"{number_format.round_down(100 * view['remaining']['share'], 3)} %",
            "entries": view["version"],
        }
        for view in views
    ]
    _print_rows(rows, ["dataset", "budget", "spent", "held", "left", "entries"], "Datasets", False)
    for view in views:
        if view["steps_left"] is not None:
            print(f"{view['name']}: {_describe_steps_left(view['steps_left'])} fit")


def _view_steps_left(left: StepsLeft) -> dict[str, Any]:
    """Return as JSON how many steps a budget still admits."""
    return {
        "run": left.run,
        "step": mechanisms.to_json(left.step),
        "steps": left.steps,
        "is_exact": left.is_exact,
    }


def _describe_steps_left(left: dict[str, Any]) -> str:
    """Return in words how many steps like the last run's a budget still admits."""
    like = f"like the last run ({describe_step(mechanisms.from_json(left['step']))})"
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
    """Quote a plan: whether it fits, what would fit, and what would as the only plan."""
    with _open_repository() as repository, repository.reading() as reading:
        found = reading.find_dataset(dataset)
    if found is None:
        print(f"error: there is no dataset {dataset!r}", file=sys.stderr)
        raise typer.Exit(1)
    try:
        answer = quote_plan(found, mechanisms.from_json(json.loads(mechanism)))
    except (CodedError, mechanisms.MechanismError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps(quote_view(answer)))
    else:
        print("\n".join(_describe_quote(answer)))


def _describe_quote(quote: Quote) -> Iterator[str]:
    """Yield the lines of text that describe a quote."""
    share = "" if quote.share is None else number_format.round_up(100 * quote.share, 3)
    yield f"fits; it takes {share} % of the budget" if quote.fits else "does not fit"
    left, alone = quote.affordable_steps, quote.affordable_alone
    if left is not None:
        line = f"steps with this noise: {left} fit what is left"
        yield line if alone is None else f"{line}; as the only plan of the budget, {alone} would"
    if quote.least_noise_multiplier is not None:
        sigma = number_format.round_up(quote.least_noise_multiplier)
        yield f"noise for all steps: σ = {sigma} is enough"
    if quote.guarantee is not None:
        epsilon = number_format.round_up(quote.guarantee.epsilon)
        yield f"this run alone: ε = {epsilon} at δ = {quote.guarantee.delta:g}"


@ledger.command("export")
def export() -> None:
    """Print every entry as one line of JSON, with its dataset and hash."""
    with _open_repository() as repository, repository.snapshot() as transaction:
        for dataset in transaction.list_datasets():
            after = 0
            while rows := transaction.list_entries(dataset, after):
                for row in rows:
                    entry = {"dataset": dataset.name, **json.loads(row.body), "hash": row.hash}
                    print(json.dumps(entry))
                after = rows[-1].number


@ledger.command("events")
def events(as_json: AsJson = False) -> None:
    """Show which key created or revoked keys, created datasets, or changed caps."""
    with _open_repository() as repository, repository.reading() as reading:
        found = reading.list_audit_events()
    rows = [
        event | {"at": datetime.fromtimestamp(event["at"] / 1e6, UTC).isoformat(" ", "seconds")}
        for event in found
    ]
    _print_rows(rows, ["at", "key", "action", "subject", "detail"], "Audit events", as_json)


@db.command("upgrade")
def upgrade() -> None:
    """Upgrade the database's tables. `serve` does this when it starts."""
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
    file: Annotated[typer.FileText, typer.Argument(help="The certificate, as JSON.")],
    public_key: Annotated[
        str | None, typer.Option(help="The issuer's public key, in hexadecimal.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Verify a certificate offline: check its signature and recompute its guarantee."""
    try:
        document = certificate.read(file.read())
    except (ValueError, RecursionError) as error:
        document, faults, found = {}, [f"it is not a certificate: {error}"], None
    else:
        faults, found = certificate.check(document, public_key)
    if as_json:
        print(json.dumps(_describe_check(document, faults, found)))
    else:
        for fault in faults:
            print(fault, file=sys.stderr)
        if found is not None:
            _print_certificate_check(_describe_check(document, faults, found), found)
            print(f"signed with {document.get('public_key')}")
        print("not valid" if faults else "valid")
    if faults:
        raise typer.Exit(1)


def _describe_check(
    document: certificate.Document, faults: list[str], found: Guarantee | None
) -> dict[str, Any]:
    """Return the result of a certificate's verification as JSON."""
    return {
        "faults": faults,
        "epsilon": None if found is None else found.epsilon,
        "steps_reserved": document.get("steps_reserved"),
        "steps_granted": document.get("steps"),
        "assumptions": [] if found is None else [each.statement for each in found.assumptions],
        "not_covered": certificate.list_gaps(document),
    }


def _print_certificate_check(result: dict[str, Any], recomputed: Guarantee) -> None:
    """Print a certificate's recomputed guarantee, covered steps, assumptions and gaps."""
    epsilon = number_format.round_up(recomputed.epsilon)
    print(f"computed anew: ε = {epsilon} at δ = {recomputed.delta:g}")
    reserved, granted = result["steps_reserved"], result["steps_granted"]
    if reserved is not None:
        print(f"it covers all {reserved} steps reserved; {granted} of them were granted")
    for statement in result["assumptions"]:
        print(f"it assumes: {statement}")
    for gap in result["not_covered"]:
        print(f"it does not cover {gap}")


def _print_rows(rows: list[dict[str, Any]], columns: list[str], title: str, as_json: bool) -> None:
    """Print rows as JSON, or as a table of these columns."""
    if as_json:
        print(json.dumps(rows))
        return
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(_format_cell(row[column]) for column in columns))
    Console().print(table)


def _format_cell(value: Any) -> str:
    """Return a table cell's text; lists are joined by commas."""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "–" if value is None else str(value)
