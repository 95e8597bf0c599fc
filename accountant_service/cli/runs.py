"""The commands `accountant run`: reserve, grant and end runs, and get their certificates."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from accountant_service.cli import model_files
from accountant_service.cli.access import LedgerAccess, call_ledger
from accountant_service.cli.mechanism_options import (
    PlanOptions,
    Steps,
    parse_count,
    parse_number,
    takes_plan,
)
from accountant_service.cli.printing import AsJson, print_rows
from accountant_service.cli.problems import validate
from accountant_service.writing import number_format

run_app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Reserve, grant and end runs, and get their certificates.",
    epilog="With ACCOUNTANT_API_KEY these commands ask the service at ACCOUNTANT_SERVICE; without "
    "it they open the ledger's database.",
)
COMMANDS: Final = {"run": run_app}
Json = dict[str, Any]


class CommandOfNames(TyperCommand):
    """A command with a list of names, whose help leaves out that Typer calls it `list[str]`."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for each in self.params:
            if each.param_type_name == "argument":
                vars(each)["display_type_rich"] = lambda ctx: None  # noqa: ARG005


Identifier = Annotated[str, typer.Argument(metavar="RUN", help="The run's id, from `run list`.")]
Dataset = Annotated[str, typer.Argument(help="The dataset's name.")]
LeaseSeconds = Annotated[
    Any,
    typer.Option(
        parser=parse_number, metavar="NUMBER",
        help="Seconds until steps that were not granted return to the budget; 3600 by default.",
    ),
]  # fmt: skip
_CHANGE_OPTIONS: Final = {
    "/steps": "--steps",
    "/sequence": "--sequence",
    "/clip_norm": "--clip-norm",
    model_files.POINTER: "--model",
    "/lease_seconds": "--lease-seconds",
}


@run_app.command("list")
def list_runs(dataset: Dataset, as_json: AsJson = False) -> None:
    """List the runs of a dataset: open ones first, then the latest."""
    from accountant_service import mechanisms

    found = call_ledger(lambda ledger: ledger.list_runs(dataset), {}, as_json=as_json)
    if as_json:
        print(json.dumps(found))
        return
    rows = [
        {
            "run": run["id"],
            "state": run["state"],
            "granted": f"{run['steps_granted']} of {run['steps_reserved']}",
            "step": mechanisms.from_json(run["mechanism"]).describe_step(),
            "purpose": run["purpose"],
        }
        for run in found
    ]
    print_rows(rows, ["run", "state", "granted", "step", "purpose"], f"Runs on {dataset}", False)


@run_app.command("show")
def show(identifier: Identifier, as_json: AsJson = False) -> None:
    """Show a run: its plan, its state and the steps granted."""
    _print_run(call_ledger(lambda ledger: ledger.get_run(identifier), {}, as_json=as_json), as_json)


def _print_run(run: Json, as_json: bool) -> None:
    """Print a reservation as JSON or in words."""
    print(json.dumps(run) if as_json else "\n".join(_describe_run(run)))


def _describe_run(run: Json) -> Iterator[str]:
    """Yield the lines of text that describe a run."""
    from accountant_service import mechanisms
    from accountant_service.ledger.certificate import format_time

    names = run.get("datasets") or [run["dataset"]]
    yield f"{run['id']}: {run['state']}, on {', '.join(names)}"
    yield f"plan: {mechanisms.from_json(run['mechanism']).describe_step()}"
    yield f"steps: {run['steps_granted']} of {run['steps_reserved']} granted"
    yield from describe_charges(run)
    if run["purpose"]:
        yield f"purpose: {run['purpose']}"
    if run["state"] == "open":
        yield f"lease ends: {format_time(int(1e6 * run['expires_at']))}"


def describe_charges(run: Json) -> Iterator[str]:
    """Yield a line for each dataset of a run: what it takes of the budget."""
    charges = run.get("charges") or {run["dataset"]: run["charge"]}
    returned = run["steps_reserved"] - run["steps_granted"]
    for name, charge in charges.items():
        share = charge.get("share")
        if share is None:
            continue
        owner = f" of {name}" if len(charges) > 1 else ""
        part = f"{number_format.round_up(100 * share, 3)} % of the budget{owner}"
        if run["state"] == "open" or not returned:
            yield f"takes: {part} for all its steps"
        else:
            yield f"held: {part}; that of the {returned} steps not granted is free again"


@run_app.command("reserve", cls=CommandOfNames)
@takes_plan
def reserve(
    datasets: Annotated[
        list[str],
        typer.Argument(
            metavar="DATASET...",
            help="The dataset's name; several for one run on all their records, charged to each.",
        ),
    ],
    plan: PlanOptions,
    purpose: Annotated[str, typer.Option(help="A note that the ledger keeps.")] = "",
    lease_seconds: LeaseSeconds = None,
    as_json: AsJson = False,
) -> None:
    """Reserve budget for a plan, and print the run's id on one line."""
    from accountant_service.api import ledger_schemas as bodies

    def send(ledger: LedgerAccess) -> Json:
        """Reserve budget for the plan that the options describe; return the reservation."""
        mechanism = plan.build(
            lambda: sum(int(ledger.get_dataset(each)["size"]) for each in datasets)
        )
        lease = {} if lease_seconds is None else {"lease_seconds": lease_seconds}
        body = {"mechanism": mechanism, "purpose": purpose, **lease}
        validate(bodies.ReservationRequest, body)
        if len(datasets) > 1:
            validate(bodies.JointReservationRequest, {"datasets": datasets, **body})
        return ledger.reserve(datasets, body)

    pointers = plan.map_pointers() | {
        **{f"/datasets/{at}": "DATASET" for at in range(len(datasets))},
        "/purpose": "--purpose",
        "/lease_seconds": "--lease-seconds",
    }
    answer = call_ledger(send, pointers, as_json=as_json)
    print(json.dumps(answer) if as_json else answer["id"])


@run_app.command("grant")
def grant(
    identifier: Identifier,
    steps: Steps = None,
    sequence: Annotated[
        Any,
        typer.Option(
            parser=parse_count,
            metavar="INTEGER",
            help="Steps granted so far, as the training program knows it: then a grant that was "
            "lost is noticed. By default the ledger's number.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Charge the next steps of a run, before their noise is drawn."""
    from accountant_service.api import ledger_schemas as bodies

    def send(ledger: LedgerAccess) -> Json:
        """Let the ledger grant steps; return the reservation."""
        body = {} if steps is None else {"steps": steps}
        body["sequence"] = 0 if sequence is None else sequence
        validate(bodies.GrantRequest, body)
        if sequence is None:
            body["sequence"] = ledger.get_run(identifier)["steps_granted"]
        return ledger.change_run(identifier, "grants", body)

    _print_run(call_ledger(send, _CHANGE_OPTIONS, as_json=as_json), as_json)


@run_app.command("commit")
def commit(
    identifier: Identifier,
    clip_norm: Annotated[
        Any,
        typer.Option(
            parser=parse_number,
            metavar="NUMBER",
            help="Bound on what one record contributes to a step, for the certificate.",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="The trained model's file: the certificate names its SHA-256."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """End a finished run. Steps that were not granted return to the budget."""
    from accountant_service.api import ledger_schemas as bodies

    def send(ledger: LedgerAccess) -> Json:
        """Let the ledger end the run; return the reservation."""
        body = {} if clip_norm is None else {"clip_norm": clip_norm}
        if model is not None:
            body["model_sha256"] = model_files.hash_model(model)
        validate(bodies.CommitRequest, body)
        return ledger.change_run(identifier, "commit", body)

    _print_run(call_ledger(send, _CHANGE_OPTIONS, as_json=as_json), as_json)


@run_app.command("release")
def release(identifier: Identifier, as_json: AsJson = False) -> None:
    """End an abandoned run. Steps that were not granted return to the budget."""
    answer = call_ledger(
        lambda ledger: ledger.change_run(identifier, "release", {}), {}, as_json=as_json
    )
    _print_run(answer, as_json)


@run_app.command("renew")
def renew(
    identifier: Identifier, lease_seconds: LeaseSeconds = None, as_json: AsJson = False
) -> None:
    """Extend the lease of an open run, from now on."""
    from accountant_service.api import ledger_schemas as bodies

    def send(ledger: LedgerAccess) -> Json:
        """Let the ledger extend the lease; return the reservation."""
        body = {} if lease_seconds is None else {"lease_seconds": lease_seconds}
        validate(bodies.RenewRequest, body)
        return ledger.change_run(identifier, "renew", body)

    _print_run(call_ledger(send, _CHANGE_OPTIONS, as_json=as_json), as_json)


@run_app.command("certificate")
def certificate(
    identifier: Identifier,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A file instead of standard output.")
    ] = None,
) -> None:
    """Get the certificate of a run that has ended. Check it with `accountant verify FILE`."""
    document = call_ledger(lambda ledger: ledger.get_certificate(identifier), {}, as_json=False)
    text = json.dumps(document, indent=2) + "\n"
    if output is None:
        sys.stdout.write(text)
    else:
        output.write_text(text, encoding="utf-8")
