"""The command `accountant charge`: charge a release that another program makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from accountant_service.cli.access import LedgerAccess, call_ledger
from accountant_service.cli.mechanism_options import (
    PANEL,
    Mechanisms,
    join_mechanisms,
    parse_cost,
    parse_noise,
    read_mechanisms,
)
from accountant_service.cli.printing import AsJson
from accountant_service.cli.problems import CommandProblemError, build_problem, validate
from accountant_service.cli.runs import CommandOfNames, describe_charges

_LEASE_SECONDS: Final = 300.0  # only until this command ends the run
Json = dict[str, Any]


_ABOUT: Final[dict[str, Any]] = {"metavar": "NUMBER", "rich_help_panel": PANEL}
_NOISE: Final[dict[str, Any]] = _ABOUT | {"parser": parse_noise}
_COST: Final[dict[str, Any]] = _ABOUT | {"parser": parse_cost}
Laplace = Annotated[
    Any, typer.Option("--laplace", help="Scale of Laplace noise over the ℓ1 sensitivity.", **_NOISE)
]
GaussianNoise = Annotated[
    Any, typer.Option("--gaussian", help="σ of Gaussian noise over the ℓ2 sensitivity.", **_NOISE)
]
Epsilon = Annotated[
    Any,
    typer.Option("--epsilon", "-E", help="ε of any other release; --delta is its δ.", **_COST),
]
Delta = Annotated[Any, typer.Option("--delta", "-d", help="δ; 0 by default.", **_COST)]
Rho = Annotated[Any, typer.Option("--rho", help="ρ of a release that is ρ-zCDP.", **_COST)]
charge_app = typer.Typer(add_completion=False)
COMMANDS: Final = {"charge": charge_app}


@charge_app.command(
    cls=CommandOfNames,
    epilog='Example: accountant charge sales --laplace 10 --purpose "orders a day"',
)
def charge(
    datasets: Annotated[
        list[str],
        typer.Argument(
            metavar="DATASET...", help="The dataset's name; several if it uses all their records."
        ),
    ],
    laplace: Laplace = None,
    gaussian: GaussianNoise = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    rho: Rho = None,
    mechanism: Mechanisms = None,
    purpose: Annotated[str, typer.Option(help="A note that the ledger keeps.")] = "",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A file for the certificate.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Charge a release that another program makes. Call it before the release is made.

    It reserves, grants and commits one run. Several options are one release of all of them.
    """
    from accountant_service.api import ledger_schemas as bodies

    if output is not None and not output.parent.is_dir():
        message = f"cannot be written, and nothing is charged: no folder {str(output.parent)!r}"
        raise typer.BadParameter(message, param_hint="--output")
    pointers = {
        "/mechanism": "",
        "/purpose": "--purpose",
        **{f"/datasets/{at}": "DATASET" for at in range(len(datasets))},
    }

    def send(ledger: LedgerAccess) -> Json:
        """Charge the release that the options describe; return the run and its certificate."""
        plan, options = _describe_release(laplace, gaussian, epsilon, delta, rho, mechanism)
        pointers.update(options)
        body = {"mechanism": plan, "purpose": purpose, "lease_seconds": _LEASE_SECONDS}
        validate(bodies.ReservationRequest, body)
        if len(datasets) > 1:
            validate(bodies.JointReservationRequest, {"datasets": datasets, **body})
        run = ledger.reserve(datasets, body)
        grant = {"steps": run["steps_reserved"], "sequence": 0}
        ledger.change_run(run["id"], "grants", grant)
        ended = ledger.change_run(run["id"], "commit", {})
        return {"run": ended, "certificate": ledger.get_certificate(run["id"])}

    found = call_ledger(send, pointers, as_json=as_json)
    if output is not None:
        text = json.dumps(found["certificate"], indent=2) + "\n"
        output.write_text(text, encoding="utf-8")
    if as_json:
        print(json.dumps(found))
    else:
        print("\n".join([f"charged as run {found['run']['id']}", *describe_charges(found["run"])]))


def _describe_release(
    laplace: Any, gaussian: Any, epsilon: Any, delta: Any, rho: Any, texts: list[str] | None
) -> tuple[Json, dict[str, str]]:
    """Return the mechanism that the options describe, and the option at each JSON pointer.

    Raises:
        CommandProblemError: they describe none.
    """
    found: list[Json] = []
    options: list[dict[str, str]] = []
    for kind, value in (("laplace", laplace), ("gaussian", gaussian)):
        if value is not None:
            found.append({"kind": kind, "noise_multiplier": value})
            options.append({"/noise_multiplier": f"--{kind}"})
    if epsilon is not None or delta is not None:
        stated = {"epsilon": epsilon or 0, "delta": delta or 0}
        found.append({"kind": "approximate_dp", **stated})
        options.append({"/epsilon": "--epsilon", "/delta": "--delta"})
    if rho is not None:
        found.append({"kind": "zcdp", "rho": rho})
        options.append({"/rho": "--rho"})
    found += read_mechanisms(texts or [])
    if not found:
        raise CommandProblemError(
            build_problem("say what is released: --laplace, --gaussian, --epsilon, --rho or -m")
        )
    options += [{"": "--mechanism"}] * (len(found) - len(options))
    at = "/mechanism/mechanisms/{}" if len(found) > 1 else "/mechanism"
    pointers = {
        at.format(number) + field: option
        for number, fields in enumerate(options)
        for field, option in fields.items()
    }
    return join_mechanisms(found), pointers
