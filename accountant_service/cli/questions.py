"""The commands `epsilon`, `delta`, `compare` and the solvers: the API's computations without HTTP.

They build the request body that the API would receive, and use the same
request model and computation, so that both accept, refuse and answer alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, Final

import typer
from rich.markup import escape
from rich.table import Table

from accountant_service.accounting.guarantee import warn_about_delta
from accountant_service.cli.asking import (
    AS_JSON,
    Option,
    list_options,
    make_command,
    make_option,
)
from accountant_service.cli.encoding import spell
from accountant_service.cli.mechanism_options import (
    MECHANISM_HELP,
    OTHER_RUNS_HELP,
    OTHER_RUNS_POINTER,
    REQUIRED,
    RUN_FLAGS,
    describe_arguments,
    find_dataset_size,
    join_mechanisms,
    read_mechanisms,
    read_run,
)
from accountant_service.cli.printing import is_narrow, open_console, print_records
from accountant_service.cli.problems import CommandProblemError, run_or_exit, validate
from accountant_service.questions import functions
from accountant_service.writing import number_format

Json = dict[str, Any]

_LARGE_EPSILON: Final = 10.0  # from which a sample rate of 1 is probably a mistake
_COLOURS: Final = {"proven": "green", "estimate": "yellow", "refuted": "bold red"}


_ASKED: Final = signature(functions.epsilon).parameters | signature(functions.delta).parameters
_RISKS: Final = [
    name for name in signature(functions.noise_multiplier).parameters if name not in _ASKED
]
_PANELS: Final = dict.fromkeys(_RISKS, "A risk instead of ε and δ") | dict.fromkeys(
    RUN_FLAGS, "The run"
)


@dataclass(frozen=True, slots=True)
class _Question:
    """A command that asks what a function of the package asks.

    Attributes:
        function: the function.
        example: options of the example in its help.
    """

    function: Callable[..., Any]
    example: str

    @property
    def name(self) -> str:
        """The command's name; the endpoint is /v1/ and this name."""
        return self.function.__name__.replace("_", "-")

    @property
    def mechanism_field(self) -> str:
        """The field with the mechanisms of the options: `earlier` if a run is solved for."""
        return "mechanism" if "mechanism" in signature(self.function).parameters else "earlier"

    @property
    def options(self) -> dict[str, Option]:
        """The command's options, by name, in the order of its help."""
        field = self.mechanism_field
        about = "Further releases, added to the run if one is described."
        if self.name == "solve" or field == "earlier":
            about = describe_arguments(self.function)[field]
        required = REQUIRED if self.name == "solve" else ""
        further = {
            "other_runs": make_option(
                list[str] | None, OTHER_RUNS_HELP, "--and", metavar="OPTIONS"
            ),
            "mechanism": make_option(
                list[str] | None,
                f"{about} {MECHANISM_HELP}{required}",
                "--mechanism",
                "-m",
                metavar="JSON",
            ),
        }
        if self.name == "solve":
            del further["other_runs"]
        found = list_options(self.function, {field: further}, _PANELS)
        return found | {"as_json": AS_JSON}


_QUESTIONS: Final = (
    _Question(functions.epsilon, "-q 0.01 -s 1.1 -t 1000 -d 1e-5"),
    _Question(functions.delta, "-q 0.01 -s 1.1 -t 1000 -E 2"),
    _Question(functions.noise_multiplier, "-q 0.01 -t 1000 -E 2 -d 1e-5"),
    _Question(functions.steps, "-q 0.01 -s 1.1 -E 2 -d 1e-5"),
    _Question(functions.sample_rate, "-s 1.1 -t 1000 -E 2 -d 1e-5"),
    _Question(
        functions.solve,
        """-m '{"kind": "laplace", "noise_multiplier": null}' --parameter /noise_multiplier """
        "-E 0.5 -d 0",
    ),
    _Question(functions.compare, "-q 0.01 -s 1.1 -t 1000 -d 1e-5"),
)


def _create_command(question: _Question) -> typer.Typer:
    """Build the command of a question."""

    def run(**options: Any) -> None:
        """Compute the answer to the given options, and print it."""
        as_json, seconds = options.pop("as_json"), options.pop("time_limit")
        given = {name: value for name, value in options.items() if value is not None}
        read = partial(_read_parts, question, given)
        parts = run_or_exit(read, _PART_OPTIONS, as_json=as_json)
        pointers = _map_pointers(question, parts, options)
        answer = run_or_exit(
            lambda: _answer(question, given, parts), pointers, as_json=as_json, time_limit=seconds
        )
        size = find_dataset_size([given, *(part.mechanism for part in parts)])
        warning = _warn_about_delta(answer, size) or _warn_about_rate(answer, parts)
        if as_json:
            typer.echo(json.dumps(answer, indent=2))
            if warning:
                typer.echo(f"warning: {warning}", err=True)
        elif question.name == "compare":
            _print_comparison(answer, warning)
        else:
            _print_answer(answer, warning)

    return make_command(question.name, run, question.options, question.example)


@dataclass(frozen=True, slots=True)
class _Part:
    """A mechanism among those of a command.

    Attributes:
        mechanism: as JSON.
        option: the option that gave it, with the text of a run; "" for the run of the command's own
            options.
    """

    mechanism: Json
    option: str


_PART_OPTIONS: Final = {"/mechanism": "--mechanism", OTHER_RUNS_POINTER: "--and"}


def _read_parts(question: _Question, given: Json) -> list[_Part]:
    """Take the mechanisms out of a command's options, and return them.

    Raises:
        CommandProblemError: one cannot be read.
    """
    found = read_mechanisms(given.pop("mechanism", None) or [])
    parts = [_Part(each, "--mechanism") for each in found]
    size = given.get("dataset_size")
    texts = given.pop("other_runs", None) or []
    parts += [_Part(read_run(text, size), f'--and "{text}"') for text in texts]
    if question.mechanism_field == "mechanism":
        run: Json = {name: given.pop(name) for name in RUN_FLAGS if name in given}
        if run or not parts:
            parts.append(_Part({"kind": "dp_sgd", **run}, ""))
    return parts


def _answer(question: _Question, given: Json, parts: Sequence[_Part]) -> Json:
    """Compute the answer to a command's options.

    Raises:
        CommandProblemError: the request is malformed.
        AccountingError: it has no answer.
    """
    from accountant_service.questions.registry import ENDPOINTS

    body = dict(given)
    if parts:
        body[question.mechanism_field] = join_mechanisms([part.mechanism for part in parts])
    endpoint = ENDPOINTS[f"/v1/{question.name}"]
    try:
        request = validate(endpoint.request, body)
    except CommandProblemError as error:
        if any(map(_has_epochs_alone, [given, *(part.mechanism for part in parts)])):
            at = "/mechanism/epochs" if question.mechanism_field == "mechanism" else "/epochs"
            fault = {"pointer": at, "message": "is -e: for ε, write -E"}
            error.document["errors"].append(fault)
        raise
    return endpoint.answer(request).model_dump(mode="json")


def _has_epochs_alone(run: Json) -> bool:
    """Return whether a run has epochs without the sizes that they need: -e for -E, perhaps."""
    return "epochs" in run and not run.keys() & {"dataset_size", "batch_size"}


def _map_pointers(
    question: _Question, parts: Sequence[_Part], options: Iterable[str]
) -> dict[str, str]:
    """Map each JSON pointer of the request to the option that sets its value."""
    names = {name: "--" + name.replace("_", "-") for name in (*options, "time_limit")}
    pointers = {f"/{name}": option for name, option in names.items() if name != "mechanism"}
    base = f"/{question.mechanism_field}"
    pointers |= {"": ""} if base == "/earlier" else {}
    for i, part in enumerate(parts):
        at = f"{base}/mechanisms/{i}" if len(parts) > 1 else base
        pointers[at] = part.option
        if part.option != "--mechanism":
            of_run = f" of {part.option}" if part.option else ""
            pointers |= {f"{at}/{name}": RUN_FLAGS[name][0] + of_run for name in RUN_FLAGS}
    return pointers if len(parts) < 2 else pointers | {base: parts[0].option}


def _warn_about_delta(answer: Json, size: int | None) -> str | None:
    """Return a warning if δ of an answer is too large for the number of records."""
    claim = answer.get("guarantee", answer)
    if "guarantees" in answer:
        claim = answer["certified"] or {}
    return warn_about_delta(size, claim["delta"]) if "delta" in claim else None


def _warn_about_rate(answer: Json, parts: Sequence[_Part]) -> str | None:
    """Return a warning if all records are in every batch and ε is large; else None."""
    claim = answer.get("guarantee", answer)
    runs = [part.mechanism for part in parts if part.mechanism.get("sample_rate") == 1]
    is_meant = any("sampling" in run for run in runs)
    if is_meant or not runs or claim.get("epsilon", 0) < _LARGE_EPSILON:
        return None
    return "-q 1 puts all records into every batch; -q 0.01, or 1%, is one in a hundred"


def _print_answer(answer: Json, warning: str | None) -> None:
    """Print an answer: the value that was solved for, if any, and the guarantee."""
    table = _Lines()
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
        status = answer["risk"]["status"]
        marked = "" if status == "proven" else f", {_format_status(status)}: not proved"
        table.add_row("risk", f"between {low} and {high}{marked}")
    if "parameter" in answer:
        table.add_row(escape(answer["parameter"]), f"[bold]{answer['value']!r}[/]")
    if "steps" in answer:
        table.add_row("steps", f"[bold]{answer['steps']}[/]")
    claim = answer.get("guarantee", answer)
    table.add_row("ε", f"[bold]{number_format.round_up(claim['epsilon'], 10)}[/]")
    table.add_row("δ", f"[bold]{number_format.round_up(claim['delta'], 10)}[/]")
    table.add_row("status", _format_status(claim["status"]) + f" by {claim['method']}")
    table.add_row("proved", _format_interval(claim))
    sampling = "no" if claim["sampling"] == "none" else claim["sampling"]
    holds = "holds for" if claim["status"] == "proven" else "claimed for"
    table.add_row(holds, f"{claim['neighbouring_relation']}, {sampling} sampling")
    for text in [*claim["warnings"], *([warning] if warning else [])]:
        table.add_row("warning", f"[yellow]{escape(text)}[/]")
    for assumption in claim["assumptions"]:
        mark = "[green]✓[/]" if assumption["holds"] else "[red]✗[/]"
        table.add_row("assumes", f"{mark} {assumption['statement']}")
    if answer.get("next"):
        solved_for = "δ" if answer["risk"] else "ε"
        following = answer["next"]["delta" if answer["risk"] else "epsilon"]
        table.add_row(
            "one step more" if "steps" in answer else "one more",
            f"{solved_for} = {number_format.round_up(following, 10)}",
        )
        if answer["undecided"]:
            margin = number_format.round_up(answer["undecided"]["margin"], 2)
            table.add_row(
                "undecided", f"one step more may fit: it is within {margin} of the target"
            )
    open_console().print(table.grid)


class _Lines:
    """Lines of a name and a value, printed in two aligned columns.

    Attributes:
        grid: to print.
    """

    def __init__(self) -> None:
        self.grid = Table.grid(padding=(0, 2))
        self.grid.add_column(style="dim")
        self.grid.add_column()

    def add_row(self, name: str, value: str) -> None:
        """Add a line; its value may contain Rich markup."""
        self.grid.add_row(spell(name), spell(value))


def _format_status(status: str) -> str:
    """Return a claim's status, coloured for the terminal."""
    return f"[{_COLOURS[status]}]{status}[/]"


def _format_interval(claim: Json) -> str:
    """Format a certified interval, rounded down and up, or the reason why there is none."""
    if claim["certified"] is None:
        reason = str(claim["certified_reason"])
        failed = [each for each in claim["assumptions"] if not each["holds"]]
        is_shown = any(each["statement"] in reason for each in failed)
        return f"no interval: {'a hypothesis fails, marked ✗' if is_shown else reason}"
    (name, low), (_, high) = claim["certified"].items()
    symbol = "ε" if name.startswith("epsilon") else "δ"
    return f"{number_format.round_down(low)} ≤ {symbol} ≤ {number_format.round_up(high)}"


def _print_comparison(answer: Json, warning: str | None) -> None:
    """Print the answers of several methods as a table, under the certified interval."""
    console = open_console()
    proved = answer["certified"]
    title = "Proved: " + (
        _format_interval(proved) if proved else f"no interval: {answer['certified_reason']}"
    )
    rows = [_describe_method(claim) for claim in answer["guarantees"]]
    if is_narrow(console):
        print_records(
            [{"method": row[0], "ε": row[1], "status": row[2], "why": row[3]} for row in rows],
            title,
        )
    else:
        table = Table(title=spell(title), title_justify="left")
        table.add_column("method", no_wrap=True)
        table.add_column(spell("ε"), justify="right", no_wrap=True)
        table.add_column("status", no_wrap=True)
        table.add_column("why", overflow="fold")
        for method, epsilon, status, why in rows:
            coloured = f"[{_COLOURS[status]}]{status}[/]" if status in _COLOURS else status
            table.add_row(method, spell(epsilon), coloured, escape(spell(why)))
        console.print(table)
    for text in [*(proved["warnings"] if proved else []), *([warning] if warning else [])]:
        console.print(f"[yellow]warning: {escape(text)}[/]")


def _describe_method(claim: Json) -> tuple[str, str, str, str]:
    """Return a method's table cells: its name, ε, status, and why it is not proven."""
    if "epsilon" not in claim:
        return claim["method"], "–", "no answer", claim["reason"]
    epsilon = number_format.round_up(claim["epsilon"])
    return claim["method"], epsilon, claim["status"], _explain_unproven(claim)


def _explain_unproven(claim: Json) -> str:
    """Return why a claim is not proven: refuted, or the first hypothesis that fails."""
    failed = [a["statement"] for a in claim["assumptions"] if not a["holds"]]
    if claim["status"] == "refuted":
        return "below the proved lower bound"
    return f"hypothesis fails: {failed[0]}" if failed else ""


COMMANDS: Final = {question.name: _create_command(question) for question in _QUESTIONS}
