"""The commands `epsilon`, `delta`, `compare` and the solvers: the API's computations without HTTP.

They build the request body that the API would receive, and use the same
request model and computation, so that both accept, refuse and answer alike.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, Final

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from accountant_service import number_format
from accountant_service.accountants import ACCOUNTANTS, DEFAULT_METHOD
from accountant_service.api.computation_cache import ENDPOINTS
from accountant_service.api.problems import of_error
from accountant_service.errors import AccountingError
from accountant_service.guarantee import NeighbouringRelation

Json = dict[str, Any]

_COLOURS: Final = {"proven": "green", "estimate": "yellow", "refuted": "bold red"}


def _option(
    type_: Any, default: Any, text: str, *flags: str, panel: str | None = None
) -> tuple[Any, Any]:
    """Return a command-line option: its type and default, with help text and flags."""
    return type_, typer.Option(default, *flags, help=text, rich_help_panel=panel)


def _risk_option(text: str) -> tuple[Any, Any]:
    """Return an option of a risk that a run is solved for, instead of ε and δ."""
    return _option(float | None, None, text, panel="A risk instead of ε and δ")


_run_option: Final = partial(_option, panel="The run")
_OPTIONS: Final = {
    "epsilon": _option(float, ..., "ε, such as 2.", "--epsilon", "-E"),
    "delta": _option(float, ..., "δ, such as 1e-5.", "--delta", "-d"),
    "noise_multiplier": _run_option(
        float | None,
        None,
        "σ: noise standard deviation over the clip norm.",
        "--noise-multiplier",
        "-s",
    ),
    "sample_rate": _run_option(
        float | None, None, "q: expected batch size over dataset size.", "--sample-rate", "-q"
    ),
    "steps": _run_option(int | None, None, "T: number of steps.", "--steps", "-t"),
    "dataset_size": _run_option(
        int | None,
        None,
        "Number of records; with --batch-size, instead of --sample-rate.",
        "--dataset-size",
        "-n",
    ),
    "batch_size": _run_option(int | None, None, "Expected batch size.", "--batch-size", "-b"),
    "epochs": _run_option(
        float | None,
        None,
        "Instead of --steps, with --dataset-size and --batch-size.",
        "--epochs",
        "-e",
    ),
    "sampling": _run_option(
        str, "poisson", "How batches are drawn: poisson, fixed_size, balls_in_bins, shuffled, none."
    ),
    "mechanism": _option(
        str | None,
        None,
        "Any mechanism as JSON, or @FILE, instead of a run.",
        "--mechanism",
        "-m",
    ),
    "method": _option(str, DEFAULT_METHOD, "Accounting method: " + ", ".join(ACCOUNTANTS) + "."),
    "neighbouring_relation": _option(
        str,
        NeighbouringRelation.ADD_OR_REMOVE_ONE.value,
        "One of " + ", ".join(NeighbouringRelation) + ".",
    ),
    "tolerance": _option(
        float | None, None, "Largest relative width of the proved interval, such as 1e-6."
    ),
    "advantage": _risk_option("Largest membership advantage, such as 0.1."),
    "attack_success": _risk_option("Largest success of guessing membership, such as 0.6."),
    "prior": _risk_option("With --attack-success: probability of membership; 0.5 by default."),
    "true_positive_rate": _risk_option("Largest rate, with --false-positive-rate."),
    "false_positive_rate": _risk_option("With --true-positive-rate, such as 0.001."),
    "mu": _risk_option("Gaussian DP, up to --delta if that is given."),
    "as_json": _option(bool, False, "Print the API's JSON answer.", "--json"),
}
_SHAPE: Final = ("dataset_size", "batch_size", "epochs", "sampling")
_RUN: Final = ("noise_multiplier", "sample_rate", "steps", *_SHAPE)
_MECHANISM: Final = (*_RUN, "mechanism")
_RISK: Final = (
    "advantage",
    "attack_success",
    "prior",
    "true_positive_rate",
    "false_positive_rate",
    "mu",
)
_TARGET: Final = ("epsilon", "delta", *_RISK)
_TARGET_OPTIONS: Final = {  # of commands that also take a risk as the target
    "epsilon": _option(float | None, None, "Target ε, such as 2; with --delta.", "--epsilon", "-E"),
    "delta": _option(float | None, None, "δ, such as 1e-5.", "--delta", "-d"),
}
_CLAIM: Final = ("method", "neighbouring_relation")


@dataclass(frozen=True, slots=True)
class _Question:
    """A command that computes the answer of an API endpoint without HTTP.

    Attributes:
        name: the command's name; the endpoint is /v1/ and this name.
        help: the first line of its help.
        options: names in `_OPTIONS`, in the order of its help.
        example: options of the example in its help.
    """

    name: str
    help: str
    options: tuple[str, ...]
    example: str


_QUESTIONS: Final = (
    _Question(
        "epsilon",
        "Compute the ε of a run, or of any mechanism, at δ.",
        ("delta", *_MECHANISM, *_CLAIM, "tolerance"),
        "-q 0.01 -s 1.1 -t 1000 -d 1e-5",
    ),
    _Question(
        "delta",
        "Compute the δ of a run, or of any mechanism, at ε.",
        ("epsilon", *_MECHANISM, *_CLAIM, "tolerance"),
        "-q 0.01 -s 1.1 -t 1000 -E 2",
    ),
    _Question(
        "noise-multiplier",
        "Find the least noise multiplier with which a run stays within ε at δ, or a risk.",
        (*_TARGET, "sample_rate", "steps", *_SHAPE, *_CLAIM),
        "-q 0.01 -t 1000 -E 2 -d 1e-5",
    ),
    _Question(
        "steps",
        "Find the largest number of steps with which a run stays within ε at δ, or a risk.",
        (
            *_TARGET,
            "noise_multiplier",
            "sample_rate",
            "dataset_size",
            "batch_size",
            "sampling",
            *_CLAIM,
        ),
        "-q 0.01 -s 1.1 -E 2 -d 1e-5",
    ),
    _Question(
        "sample-rate",
        "Find the largest sample rate with which a run stays within ε at δ, or a risk.",
        (*_TARGET, "noise_multiplier", "steps", *_CLAIM),
        "-s 1.1 -t 1000 -E 2 -d 1e-5",
    ),
    _Question(
        "compare",
        "Compare the ε of all methods with what is proved.",
        ("delta", *_MECHANISM, "neighbouring_relation", "tolerance"),
        "-q 0.01 -s 1.1 -t 1000 -d 1e-5",
    ),
)


def _create_command(command: _Question) -> typer.Typer:
    """Return a command with the options that its table entry names."""

    def run(**options: Any) -> None:
        as_json = options.pop("as_json")
        answer = _answer(command, options)
        if as_json:
            typer.echo(json.dumps(answer, indent=2))
        elif command.name == "compare":
            _print_comparison(answer)
        else:
            _print_answer(answer)

    options = _OPTIONS | (_TARGET_OPTIONS if "advantage" in command.options else {})
    types = {name: options[name] for name in (*command.options, "as_json")}
    run.__annotations__ = {name: type_ for name, (type_, _) in types.items()}
    run.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=type_)
            for name, (type_, default) in types.items()
        ]
    )
    epilog = f"Example: accountant {command.name} {command.example}"
    app = typer.Typer()
    app.command(command.name, help=command.help, epilog=epilog)(run)
    return app


def _answer(command: _Question, options: Json) -> Json:
    """Return the API's answer to a command's question, or exit with code 2."""
    given = {name: value for name, value in options.items() if value is not None}
    described = given.pop("mechanism", None)
    if "mechanism" in command.options:
        run = {name: given.pop(name) for name in _RUN if name in given}
        given["mechanism"] = {"kind": "dp_sgd", **run} if described is None else _parse(described)
    endpoint = ENDPOINTS[f"/v1/{command.name}"]
    try:
        request = endpoint.request.model_validate(given)
        return endpoint.answer(request).model_dump(mode="json")
    except (ValidationError, AccountingError) as error:
        _print_problem(of_error(error), command, is_run=described is None)
        raise typer.Exit(2) from None


def _parse(mechanism: str) -> Any:
    """Return a mechanism's JSON from an argument: the text itself, or @FILE."""
    try:
        file = mechanism.startswith("@")
        return json.loads(Path(mechanism[1:]).read_text() if file else mechanism)
    except (OSError, ValueError, RecursionError) as error:
        raise typer.BadParameter(
            f"not readable as JSON: {error}", param_hint="--mechanism"
        ) from None


def _print_problem(problem: Json, command: _Question, *, is_run: bool) -> None:
    """Print why a question has no answer, naming options in place of JSON pointers."""
    console = Console(stderr=True, highlight=False)
    console.print(f"[bold red]{problem['title']}[/] [dim]({problem['code']})[/]")
    faults = problem.get("errors") or [{"pointer": "", "message": problem["detail"]}]
    for fault in faults:
        place = _option_of(fault["pointer"], command, is_run=is_run)
        console.print("  " + f"{place} {fault['message']}".lstrip().replace("[", r"\["))


def _option_of(pointer: str, command: _Question, *, is_run: bool) -> str:
    """Return the command-line option for a JSON pointer, or the pointer if there is none.

    The pointer of the whole run has no option: the result is empty.
    """
    if is_run and pointer == "/mechanism":
        return ""
    name = pointer.removeprefix("/mechanism/" if is_run else "/").removeprefix("/")
    return "--" + name.replace("_", "-") if name in command.options else pointer


def _print_answer(answer: Json) -> None:
    """Print an answer: the value that was solved for, if any, and the guarantee."""
    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    if "noise_multiplier" in answer:
        table.add_row(
            "noise multiplier",
            f"[bold]{number_format.round_up(answer['noise_multiplier'], 10)}[/]",
        )
    if "sample_rate" in answer:
        shown = number_format.round_down(answer["sample_rate"], 10)
        table.add_row("sample rate", f"[bold]{shown}[/]")
    if answer.get("risk"):
        low, high = (
            number_format.round_down(answer["risk"]["lower"]),
            number_format.round_up(answer["risk"]["upper"], 10),
        )
        table.add_row("risk", f"between {low} and {high}")
    if "steps" in answer:
        table.add_row("steps", f"[bold]{answer['steps']}[/]")
    claim = answer.get("guarantee", answer)
    table.add_row("ε", f"[bold]{number_format.round_up(claim['epsilon'], 10)}[/]")
    table.add_row("δ", f"[bold]{number_format.round_up(claim['delta'], 10)}[/]")
    table.add_row("status", _format_status(claim["status"]) + f" by {claim['method']}")
    table.add_row("proved", _format_interval(claim))
    table.add_row("holds for", f"{claim['neighbouring_relation']}, {claim['sampling']} sampling")
    for warning in claim["warnings"]:
        table.add_row("warning", f"[yellow]{warning}[/]")
    for assumption in claim["assumptions"]:
        mark = "[green]✓[/]" if assumption["holds"] else "[red]✗[/]"
        table.add_row("assumes", f"{mark} {assumption['statement']}")
    if "next" in answer:
        solved_for = "δ" if answer["risk"] else "ε"
        following = answer["next"]["delta" if answer["risk"] else "epsilon"]
        table.add_row("one step more", f"{solved_for} = {number_format.round_up(following, 10)}")
        if answer["undecided"]:
            margin = number_format.round_up(answer["undecided"]["margin"], 2)
            table.add_row(
                "undecided", f"one step more may fit: it is within {margin} of the target"
            )
    console.print(table)


def _format_status(status: str) -> str:
    """Return a claim's status, coloured for the terminal."""
    return f"[{_COLOURS[status]}]{status}[/]"


def _format_interval(claim: Json) -> str:
    """Return the certified interval, rounded outward, or why there is none."""
    if claim["certified"] is None:
        return f"no interval: {claim['certified_reason']}"
    (name, low), (_, high) = claim["certified"].items()
    symbol = "ε" if name.startswith("epsilon") else "δ"
    return f"{number_format.round_down(low)} ≤ {symbol} ≤ {number_format.round_up(high)}"


def _print_comparison(answer: Json) -> None:
    """Print the answers of several methods as a table, under the certified interval."""
    console = Console(highlight=False)
    proved = answer["certified"]
    title = (
        _format_interval(proved) if proved else f"no proved interval: {answer['certified_reason']}"
    )
    table = Table(title=f"Proved: {title}", title_justify="left")
    table.add_column("method", no_wrap=True)
    table.add_column("ε", justify="right")
    table.add_column("status")
    table.add_column("why", overflow="fold")
    for claim in answer["guarantees"]:
        if "epsilon" in claim:
            table.add_row(
                claim["method"],
                number_format.round_up(claim["epsilon"]),
                _format_status(claim["status"]),
                _explain_unproven(claim),
            )
        else:
            table.add_row(claim["method"], "–", "[dim]no answer[/]", f"[dim]{claim['reason']}[/]")
    console.print(table)
    for warning in proved["warnings"] if proved else []:
        console.print(f"[yellow]warning: {warning}[/]")


def _explain_unproven(claim: Json) -> str:
    """Return why a claim is not proven: refuted, or the first hypothesis that fails."""
    failed = [a["statement"] for a in claim["assumptions"] if not a["holds"]]
    if claim["status"] == "refuted":
        return "below the proved lower bound"
    return f"does not hold: {failed[0]}" if failed else ""


COMMANDS: Final = {question.name: _create_command(question) for question in _QUESTIONS}
