"""The commands `accountant ledger`: verify, show and export the budget ledger."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import typer

from accountant_service import mechanisms
from accountant_service.api.ledger_views import dataset_view, quote_view
from accountant_service.cli.datasets import describe_budget, describe_quote, describe_shares
from accountant_service.cli.opening import open_repository
from accountant_service.cli.printing import AsJson, print_rows
from accountant_service.errors import CodedError
from accountant_service.ledger import verification
from accountant_service.ledger.plans import StepsLeft, count_steps_left, quote_plan
from accountant_service.mechanisms import describe_step

ledger = typer.Typer(no_args_is_help=True, help="Verify, show and export the budget ledger.")
COMMANDS: Final = {"ledger": ledger}


@ledger.command("verify")
def verify(as_json: AsJson = False) -> None:
    """Recompute every chain, balance and charge. Exit code 1 if anything is wrong."""
    with open_repository() as repository:
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
    with open_repository() as repository, repository.reading() as reading:
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
            "budget": describe_budget(view["budget"]),
            **describe_shares(view),
            "entries": view["version"],
        }
        for view in views
    ]
    print_rows(rows, ["dataset", "budget", "spent", "held", "left", "entries"], "Datasets", False)
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
    """Quote a plan: whether it fits, what would fit, and what would fit as the only plan."""
    with open_repository() as repository, repository.reading() as reading:
        found = reading.find_dataset(dataset)
    if found is None:
        print(f"error: there is no dataset {dataset!r}", file=sys.stderr)
        raise typer.Exit(1)
    try:
        answer = quote_plan(found, mechanisms.from_json(json.loads(mechanism)))
    except (CodedError, mechanisms.MechanismError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    view = quote_view(answer)
    print(json.dumps(view) if as_json else "\n".join(describe_quote(view)))


@ledger.command("export")
def export() -> None:
    """Print every entry as one line of JSON, with its dataset and hash."""
    with open_repository() as repository, repository.snapshot() as transaction:
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
    with open_repository() as repository, repository.reading() as reading:
        found = reading.list_audit_events()
    rows = [
        event | {"at": datetime.fromtimestamp(event["at"] / 1e6, UTC).isoformat(" ", "seconds")}
        for event in found
    ]
    print_rows(rows, ["at", "key", "action", "subject", "detail"], "Audit events", as_json)
