"""The command line: the API's questions without HTTP, in the same words, and the server.

Every command builds the body the API would receive and gives it to the same request model and the
same computation, so that both accept, refuse and answer alike.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from accountant_service import digits, ledger_cli
from accountant_service.accountants import ACCOUNTANTS, DEFAULT_METHOD
from accountant_service.api.answering import CALLS
from accountant_service.api.problems import of_error
from accountant_service.audit import Finding
from accountant_service.errors import AccountingError, DatabaseAwayError
from accountant_service.guarantee import NeighbouringRelation
from accountant_service.ledger.database import NewerDatabaseError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Privacy accounting: what a differentially private run costs, and what it may do.",
)

app.add_typer(ledger_cli.keys, name="keys")
app.add_typer(ledger_cli.ledger, name="ledger")
app.add_typer(ledger_cli.db, name="db")
app.command("verify")(ledger_cli.verify_certificate)

Json = dict[str, Any]

_RUN: Final = "The run"
Noise = Annotated[
    float | None,
    typer.Option(
        "--noise-multiplier", "-s", help="σ: noise over the clip norm.", rich_help_panel=_RUN
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        "--sample-rate", "-q", help="q: share of the data in a batch.", rich_help_panel=_RUN
    ),
]
Steps = Annotated[
    int | None, typer.Option("--steps", "-t", help="T: number of steps.", rich_help_panel=_RUN)
]
Size = Annotated[
    int | None,
    typer.Option(
        "--dataset-size", "-n", help="Records; with --batch-size, gives q.", rich_help_panel=_RUN
    ),
]
Batch = Annotated[
    int | None,
    typer.Option("--batch-size", "-b", help="Expected batch size.", rich_help_panel=_RUN),
]
Epochs = Annotated[
    float | None,
    typer.Option("--epochs", "-e", help="Instead of --steps, with sizes.", rich_help_panel=_RUN),
]
Sampling = Annotated[
    str,
    typer.Option(
        help="How batches are drawn: poisson, fixed_size, shuffled, none.", rich_help_panel=_RUN
    ),
]
MechanismJson = Annotated[
    str | None,
    typer.Option("--mechanism", "-m", help="Any mechanism as JSON, or @FILE, instead of a run."),
]
Delta = Annotated[float, typer.Option("--delta", "-d", help="δ, such as 1e-5.")]
Epsilon = Annotated[float, typer.Option("--epsilon", "-E", help="ε.")]
Method = Annotated[str, typer.Option(help="Accounting method: " + ", ".join(ACCOUNTANTS) + ".")]
Relation = Annotated[str, typer.Option(help="One of " + ", ".join(NeighbouringRelation) + ".")]
Tolerance = Annotated[
    float | None,
    typer.Option(help="Relative width the proved interval must have, such as 1e-6."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the API's JSON answer.")]

_ADD_OR_REMOVE: Final = NeighbouringRelation.ADD_OR_REMOVE_ONE.value
_COLOURS: Final = {"proven": "green", "estimate": "yellow", "refuted": "bold red"}
_COMMON: Final = ("method", "neighbouring_relation")
_FIELDS: Final = (
    "noise_multiplier",
    "sample_rate",
    "steps",
    "dataset_size",
    "batch_size",
    "epochs",
    "sampling",
)


@app.command()
def serve(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    workers: Annotated[
        int | None, typer.Option(min=1, max=64, help="Processes; ACCOUNTANT_WORKERS by default.")
    ] = None,
) -> None:
    """Run the service: the API, its documentation at /docs, health at /healthz."""
    from accountant_service import serving  # only the server needs it

    typer.echo(f"Listening on http://{host}:{port} (API documentation at /docs)", err=True)
    try:
        serving.serve(host, port, workers)
    except (DatabaseAwayError, NewerDatabaseError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


@app.command(epilog="Example: accountant epsilon -q 0.01 -s 1.1 -t 1000 -d 1e-5")
def epsilon(
    delta: Delta,
    noise_multiplier: Noise = None,
    sample_rate: Rate = None,
    steps: Steps = None,
    dataset_size: Size = None,
    batch_size: Batch = None,
    epochs: Epochs = None,
    sampling: Sampling = "poisson",
    mechanism: MechanismJson = None,
    method: Method = DEFAULT_METHOD,
    neighbouring_relation: Relation = _ADD_OR_REMOVE,
    tolerance: Tolerance = None,
    as_json: AsJson = False,
) -> None:
    """The ε of a run, or of any mechanism, at δ."""
    given = locals()
    body = {"mechanism": _mechanism(given), **_pick(given, "delta", "tolerance", *_COMMON)}
    _print(_ask("/v1/epsilon", body), as_json)


@app.command(epilog="Example: accountant delta -q 0.01 -s 1.1 -t 1000 -E 2")
def delta(
    epsilon: Epsilon,
    noise_multiplier: Noise = None,
    sample_rate: Rate = None,
    steps: Steps = None,
    dataset_size: Size = None,
    batch_size: Batch = None,
    epochs: Epochs = None,
    sampling: Sampling = "poisson",
    mechanism: MechanismJson = None,
    method: Method = DEFAULT_METHOD,
    neighbouring_relation: Relation = _ADD_OR_REMOVE,
    tolerance: Tolerance = None,
    as_json: AsJson = False,
) -> None:
    """The δ of a run, or of any mechanism, at ε."""
    given = locals()
    body = {"mechanism": _mechanism(given), **_pick(given, "epsilon", "tolerance", *_COMMON)}
    _print(_ask("/v1/delta", body), as_json)


@app.command(
    "noise-multiplier",
    epilog="Example: accountant noise-multiplier -q 0.01 -t 1000 -E 2 -d 1e-5",
)
def noise_multiplier(
    epsilon: Epsilon,
    delta: Delta,
    sample_rate: Rate = None,
    steps: Steps = None,
    dataset_size: Size = None,
    batch_size: Batch = None,
    epochs: Epochs = None,
    sampling: Sampling = "poisson",
    method: Method = DEFAULT_METHOD,
    neighbouring_relation: Relation = _ADD_OR_REMOVE,
    as_json: AsJson = False,
) -> None:
    """The least noise with which a run stays within ε at δ."""
    body = _pick(locals(), "epsilon", "delta", *_COMMON, *_FIELDS)
    _print(_ask("/v1/noise-multiplier", body), as_json)


@app.command(epilog="Example: accountant steps -q 0.01 -s 1.1 -E 2 -d 1e-5")
def steps(
    epsilon: Epsilon,
    delta: Delta,
    noise_multiplier: Noise = None,
    sample_rate: Rate = None,
    dataset_size: Size = None,
    batch_size: Batch = None,
    sampling: Sampling = "poisson",
    method: Method = DEFAULT_METHOD,
    neighbouring_relation: Relation = _ADD_OR_REMOVE,
    as_json: AsJson = False,
) -> None:
    """The most steps a run can make within ε at δ."""
    body = _pick(locals(), "epsilon", "delta", *_COMMON, *_FIELDS)
    _print(_ask("/v1/steps", body), as_json)


@app.command(epilog="Example: accountant compare -q 0.01 -s 1.1 -t 1000 -d 1e-5")
def compare(
    delta: Delta,
    noise_multiplier: Noise = None,
    sample_rate: Rate = None,
    steps: Steps = None,
    dataset_size: Size = None,
    batch_size: Batch = None,
    epochs: Epochs = None,
    sampling: Sampling = "poisson",
    mechanism: MechanismJson = None,
    neighbouring_relation: Relation = _ADD_OR_REMOVE,
    tolerance: Tolerance = None,
    as_json: AsJson = False,
) -> None:
    """Every method's ε side by side, with what is proved."""
    given = locals()
    body = {
        "mechanism": _mechanism(given),
        **_pick(given, "delta", "tolerance", "neighbouring_relation"),
    }
    answer = _ask("/v1/compare", body)
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        _print_comparison(answer)


@app.command(epilog="Example: accountant audit --plots docs/images")
def audit(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the findings as a Markdown table.")
    ] = False,
    plots: Annotated[
        Path | None, typer.Option(help="Also draw the papers' figures into this folder.")
    ] = None,
) -> None:
    """Recompute the papers' claims and set each beside what is proved."""
    from accountant_service import audit as claims
    from accountant_service import report

    console = Console(stderr=True, highlight=False)
    with console.status("recomputing the papers' claims"):
        found = list(claims.findings())
        if plots is not None:
            try:
                written = report.draw(claims.figures(), plots)
            except ImportError:
                raise typer.BadParameter(
                    "needs matplotlib: pip install 'privacy-accountant[plots]'",
                    param_hint="--plots",
                ) from None
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in found], indent=2, ensure_ascii=False))
    elif as_markdown:
        typer.echo(report.markdown(found), nl=False)
    else:
        _print_findings(found)
    for file in written if plots is not None else []:
        console.print(f"drew {file}")


def _print_findings(found: list[Finding]) -> None:
    colours = {"confirmed": "green", "misprinted": "yellow", "not reproduced": "yellow"}
    table = Table(title="The papers' claims, recomputed", title_justify="left", show_lines=True)
    for column in ("claim", "computed", "proved", "verdict"):
        table.add_column(column, overflow="fold")
    for finding in found:
        table.add_row(
            f"[bold]{escape(finding.source)}[/]\n{escape(finding.claim)}",
            finding.computed,
            finding.proved,
            f"[{colours.get(finding.verdict, 'bold red')}]{finding.verdict}[/]\n"
            f"[dim]{finding.remark}[/]",
        )
    Console(highlight=False).print(table)


def _pick(given: Json, *names: str) -> Json:
    """The named options that were given."""
    return {name: given[name] for name in names if given.get(name) is not None}


def _mechanism(given: Json) -> Json:
    """The mechanism in JSON, or the run that the options describe."""
    text = given["mechanism"]
    if text is None:
        return {"kind": "dp_sgd", **_pick(given, *_FIELDS)}
    try:
        found: Json = json.loads(Path(text[1:]).read_text() if text.startswith("@") else text)
    except (OSError, ValueError, RecursionError) as error:
        raise typer.BadParameter(
            f"not readable as JSON: {error}", param_hint="--mechanism"
        ) from None
    return found


def _ask(path: str, body: Json) -> Json:
    """The API's answer to a body; a problem is printed as the API words it, with exit code 2."""
    call = CALLS[path]
    try:
        return call.answer(call.request.model_validate(body))
    except (ValidationError, AccountingError) as error:
        problem = of_error(error)
    console = Console(stderr=True, highlight=False)
    console.print(f"[bold red]{problem['title']}[/] [dim]({problem['code']})[/]")
    faults = problem.get("errors") or [{"pointer": "", "message": problem["detail"]}]
    for fault in faults:
        console.print(f"  {fault['pointer']} {fault['message']}".replace("[", r"\["))
    raise typer.Exit(2)


def _print(answer: Json, as_json: bool) -> None:
    """One answer: what was solved for, then its guarantee."""
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
        return
    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    if "noise_multiplier" in answer:
        table.add_row("noise multiplier", f"[bold]{digits.up(answer['noise_multiplier'], 10)}[/]")
    if "steps" in answer:
        table.add_row("steps", f"[bold]{answer['steps']}[/]")
    claim = answer.get("guarantee", answer)
    table.add_row("ε", f"[bold]{digits.up(claim['epsilon'], 10)}[/]")
    table.add_row("δ", f"[bold]{digits.up(claim['delta'], 10)}[/]")
    table.add_row("status", _status(claim["status"]) + f" by {claim['method']}")
    table.add_row("proved", _interval(claim))
    table.add_row("holds for", f"{claim['neighbouring_relation']}, {claim['sampling']} sampling")
    for warning in claim["warnings"]:
        table.add_row("warning", f"[yellow]{warning}[/]")
    for assumption in claim["assumptions"]:
        mark = "[green]✓[/]" if assumption["holds"] else "[red]✗[/]"
        table.add_row("assumes", f"{mark} {assumption['statement']}")
    if "next" in answer:
        table.add_row("one step more", f"ε = {digits.up(answer['next']['epsilon'], 10)}")
        if answer["undecided"]:
            margin = digits.up(answer["undecided"]["margin"], 2)
            table.add_row(
                "undecided", f"one step more may fit: its ε is within {margin} of the target"
            )
    console.print(table)


def _status(status: str) -> str:
    return f"[{_COLOURS[status]}]{status}[/]"


def _interval(claim: Json) -> str:
    if claim["certified"] is None:
        return f"no interval: {claim['certified_reason']}"
    (low_name, low), (_, high) = claim["certified"].items()
    symbol = "ε" if low_name.startswith("epsilon") else "δ"
    return f"{digits.down(low)} ≤ {symbol} ≤ {digits.up(high)}"


def _print_comparison(answer: Json) -> None:
    console = Console(highlight=False)
    proved = answer["certified"]
    title = _interval(proved) if proved else f"no proved interval: {answer['certified_reason']}"
    table = Table(title=f"Proved: {title}", title_justify="left")
    table.add_column("method", no_wrap=True)
    table.add_column("ε", justify="right")
    table.add_column("status")
    table.add_column("why", overflow="fold")
    for claim in answer["guarantees"]:
        if "epsilon" in claim:
            table.add_row(
                claim["method"], digits.up(claim["epsilon"]), _status(claim["status"]), _why(claim)
            )
        else:
            table.add_row(claim["method"], "–", "[dim]no answer[/]", f"[dim]{claim['reason']}[/]")
    console.print(table)
    for warning in proved["warnings"] if proved else []:
        console.print(f"[yellow]warning: {warning}[/]")


def _why(claim: Json) -> str:
    """The first hypothesis that fails, or nothing."""
    failed = [a["statement"] for a in claim["assumptions"] if not a["holds"]]
    if claim["status"] == "refuted":
        return "below the proved lower bound"
    return f"not so: {failed[0]}" if failed else ""
