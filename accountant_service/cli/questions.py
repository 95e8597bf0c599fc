"""The commands `epsilon`, `delta`, `compare` and the solvers: the API's computations without HTTP.

They build the request body that the API would receive, and use the same
request model and computation, so that both accept, refuse and answer alike.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, Signature, signature
from typing import Any, Final

import typer
from rich.markup import escape
from rich.table import Table

from accountant_service import number_format
from accountant_service.cli import help_of
from accountant_service.cli.encoding import spell
from accountant_service.cli.mechanism_options import (
    MECHANISM_HELP,
    OTHER_RUNS_HELP,
    OTHER_RUNS_POINTER,
    REQUIRED,
    RUN_FLAGS,
    find_dataset_size,
    join_mechanisms,
    parse_count,
    parse_number,
    read_mechanisms,
    read_run,
)
from accountant_service.cli.names import METHODS
from accountant_service.cli.printing import is_narrow, open_console, print_records
from accountant_service.cli.problems import CommandProblemError, run_or_exit, validate
from accountant_service.guarantee import warn_about_delta
from accountant_service.questions import functions

Json = dict[str, Any]

_LARGE_EPSILON: Final = 10.0  # from which a sample rate of 1 is probably a mistake
_COLOURS: Final = {"proven": "green", "estimate": "yellow", "refuted": "bold red"}


def _option(
    type_: Any, text: str, *flags: str, panel: str | None = None, **settings: Any
) -> tuple[Any, Any]:
    """Return a command-line option's type and its default, which holds flags and help text."""
    default = settings.pop("default", None)
    return type_, typer.Option(default, *flags, help=text, rich_help_panel=panel, **settings)


def _number_option(text: str, *flags: str, panel: str | None = None) -> tuple[Any, Any]:
    """Return a number option's type and its default, which holds flags and help text."""
    return _option(Any, text, *flags, panel=panel, parser=parse_number, metavar="NUMBER")


def _count_option(text: str, *flags: str, panel: str | None = None) -> tuple[Any, Any]:
    """Return a whole-number option's type and its default, which holds flags and help text."""
    return _option(Any, text, *flags, panel=panel, parser=parse_count, metavar="INTEGER")


_RISK_PANEL: Final = "A risk instead of ε and δ"
_RUN_PANEL: Final = "The run"
_FLAGS: Final = RUN_FLAGS | {"epsilon": ("--epsilon", "-E"), "delta": ("--delta", "-d")}
_DESCRIBED: Final = re.compile(r"^        (\w+): (.*(?:\n            .*)*)", re.MULTILINE)


def _argument_options(function: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Return the options that are the arguments of a function of the package, by name.

    Their help is the text of the function's docstring.
    """
    texts = dict(_DESCRIBED.findall(function.__doc__ or ""))
    found = {}
    for name, parameter in signature(function).parameters.items():
        text = " ".join(texts[name].replace('"', "").split())
        text = text[:1].upper() + text[1:] if text[:1].isascii() and text[1:2] != ":" else text
        if name == "method":
            text += f" One of: {', '.join(METHODS)}."
        flags, panel = _FLAGS.get(name, ()), _RUN_PANEL if name in RUN_FLAGS else None
        match str(parameter.annotation).partition(" ")[0]:
            case "float":
                found[name] = _number_option(text, *flags, panel=panel)
            case "int":
                found[name] = _count_option(text, *flags, panel=panel)
            case "str":
                found[name] = _option(str | None, text, *flags, panel=panel, metavar="NAME")
    return found


_OPTIONS: Final = {
    **_argument_options(functions.delta),
    **_argument_options(functions.epsilon),
    "mechanism": _option(
        list[str] | None,
        f"Further releases, added to the run if one is described. {MECHANISM_HELP}",
        "--mechanism",
        "-m",
        metavar="JSON",
    ),
    "parameter": _option(
        str | None,
        "Where the number is in the mechanism, as a JSON pointer: /mechanism/noise_multiplier.",
    ),
    "other_runs": _option(list[str] | None, OTHER_RUNS_HELP, "--and", metavar="OPTIONS"),
    "advantage": _number_option("Largest membership advantage, such as 0.1.", panel=_RISK_PANEL),
    "attack_success": _number_option(
        "Largest success of guessing membership, such as 0.6.", panel=_RISK_PANEL
    ),
    "prior": _number_option(
        "With --attack-success: probability of membership; 0.5 by default.", panel=_RISK_PANEL
    ),
    "true_positive_rate": _number_option(
        "Largest rate, with --false-positive-rate.", panel=_RISK_PANEL
    ),
    "false_positive_rate": _number_option(
        "With --true-positive-rate, such as 0.001.", panel=_RISK_PANEL
    ),
    "mu": _number_option("Gaussian DP, up to --delta if that is given.", panel=_RISK_PANEL),
    "as_json": _option(
        bool, "Print the API's JSON answer, or its problem.", "--json", default=False
    ),
}
_SHAPE: Final = ("dataset_size", "batch_size", "epochs", "sampling")
_RISK: Final = (
    "advantage",
    "attack_success",
    "prior",
    "true_positive_rate",
    "false_positive_rate",
    "mu",
)
_TARGET: Final = ("epsilon", "delta", *_RISK)
_TARGET_OPTIONS: Final = {  # of commands that solve for a parameter
    "epsilon": _number_option("Target ε, such as 2; with --delta.", "--epsilon", "-E"),
    "other_runs": _option(
        list[str] | None,
        "Another run on the same data that counts towards the target, by its options: "
        '--and "-b 256 -e 5 -s 1.5". Repeatable. Without --dataset-size it has that of this run.',
        "--and",
        metavar="OPTIONS",
    ),
    "mechanism": _option(
        list[str] | None,
        "Releases made before the run on the same data: both together meet the target. "
        + MECHANISM_HELP,
        "--mechanism",
        "-m",
        metavar="JSON",
    ),
}
_SOLVE_OPTIONS: Final = {  # of the command that solves for a parameter of any mechanism
    "epsilon": _TARGET_OPTIONS["epsilon"],
    "mechanism": _option(
        list[str] | None,
        "The mechanism, with any number or null for the parameter. " + MECHANISM_HELP,
        "--mechanism",
        "-m",
        metavar="JSON",
    ),
}
_CLAIM: Final = ("method", "neighbouring_relation")


@dataclass(frozen=True, slots=True)
class _Question:
    """A table entry of a command that computes an API endpoint's answer without HTTP.

    Attributes:
        name: the command's name; the endpoint is /v1/ and this name.
        options: names in `_OPTIONS`, in the order of its help.
        required: those of them that its help marks as required.
        example: options of the example in its help.
    """

    name: str
    options: tuple[str, ...]
    required: tuple[str, ...]
    example: str


def _question_of(function: Callable[..., Any], example: str) -> _Question:
    """Return the command that asks what a function of the package asks."""
    parameters = signature(function).parameters
    names = [name for name in parameters if name in _OPTIONS and name != "time_limit"]
    names.insert(names.index("mechanism"), "other_runs")
    required = tuple(
        name for name in names if name in parameters and parameters[name].default is Parameter.empty
    )
    return _Question(function.__name__, tuple(names), required, example)


_QUESTIONS: Final = (
    _question_of(functions.epsilon, "-q 0.01 -s 1.1 -t 1000 -d 1e-5"),
    _question_of(functions.delta, "-q 0.01 -s 1.1 -t 1000 -E 2"),
    _Question(
        "noise-multiplier",
        (*_TARGET, "sample_rate", "steps", *_SHAPE, "other_runs", "mechanism", *_CLAIM),
        (),
        "-q 0.01 -t 1000 -E 2 -d 1e-5",
    ),
    _Question(
        "steps",
        (
            *_TARGET,
            "noise_multiplier",
            "sample_rate",
            "dataset_size",
            "batch_size",
            "sampling",
            "other_runs",
            "mechanism",
            *_CLAIM,
        ),
        ("noise_multiplier",),
        "-q 0.01 -s 1.1 -E 2 -d 1e-5",
    ),
    _Question(
        "sample-rate",
        (*_TARGET, "noise_multiplier", "steps", "other_runs", "mechanism", *_CLAIM),
        ("noise_multiplier", "steps"),
        "-s 1.1 -t 1000 -E 2 -d 1e-5",
    ),
    _Question(
        "solve",
        (*_TARGET, "parameter", "mechanism", *_CLAIM),
        ("parameter", "mechanism"),
        """-m '{"kind": "laplace", "noise_multiplier": null}' --parameter /noise_multiplier """
        "-E 0.5 -d 0",
    ),
    _question_of(functions.compare, "-q 0.01 -s 1.1 -t 1000 -d 1e-5"),
)


def _create_command(command: _Question) -> typer.Typer:
    """Build a command with the options that its table entry names."""

    def run(**options: Any) -> None:
        """Compute the answer to the given options, and print it."""
        as_json, seconds = options.pop("as_json"), options.pop("time_limit")
        given = {name: value for name, value in options.items() if value is not None}
        read = partial(_read_parts, command, given)
        parts = run_or_exit(read, _PART_OPTIONS, as_json=as_json)
        pointers = _map_pointers(command, parts)
        answer = run_or_exit(
            lambda: _answer(command, given, parts), pointers, as_json=as_json, time_limit=seconds
        )
        size = find_dataset_size([given, *(part.mechanism for part in parts)])
        warning = _warn_about_delta(answer, size) or _warn_about_rate(answer, parts)
        if as_json:
            typer.echo(json.dumps(answer, indent=2))
            if warning:
                typer.echo(f"warning: {warning}", err=True)
        elif command.name == "compare":
            _print_comparison(answer, warning)
        else:
            _print_answer(answer, warning)

    options = _OPTIONS | (_TARGET_OPTIONS if _is_solver(command) else {})
    if command.name == "solve":
        options |= _SOLVE_OPTIONS
    options |= {name: _mark_required(*options[name]) for name in command.required}
    types = {name: options[name] for name in (*command.options, "time_limit", "as_json")}
    run.__annotations__ = {name: type_ for name, (type_, _) in types.items()}
    run.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=type_)
            for name, (type_, default) in types.items()
        ]
    )
    epilog = f"Example: accountant {command.name} {command.example}"
    app = typer.Typer(add_completion=False)
    app.command(command.name, help=help_of(command.name), epilog=epilog)(run)
    return app


def _mark_required(type_: Any, default: Any) -> tuple[Any, Any]:
    """Return an option whose help says that it is required."""
    marked = copy.copy(default)
    marked.help += REQUIRED
    return type_, marked


def _is_solver(command: _Question) -> bool:
    """Return whether a command solves for a parameter of a run, such as its noise."""
    return "advantage" in command.options and command.name != "solve"


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


def _read_parts(command: _Question, given: Json) -> list[_Part]:
    """Take the mechanisms out of a command's options, and return them.

    Raises:
        CommandProblemError: one cannot be read.
    """
    found = read_mechanisms(given.pop("mechanism", None) or [])
    parts = [_Part(each, "--mechanism") for each in found]
    size = given.get("dataset_size")
    texts = given.pop("other_runs", None) or []
    parts += [_Part(read_run(text, size), f'--and "{text}"') for text in texts]
    if not _is_solver(command):
        run: Json = {name: given.pop(name) for name in RUN_FLAGS if name in given}
        if run or not parts:
            parts.append(_Part({"kind": "dp_sgd", **run}, ""))
    return parts


def _answer(command: _Question, given: Json, parts: Sequence[_Part]) -> Json:
    """Compute the answer to a command's options.

    Raises:
        CommandProblemError: the request is malformed.
        AccountingError: it has no answer.
    """
    from accountant_service.api.questions import ENDPOINTS

    body = dict(given)
    if parts:
        name = "earlier" if _is_solver(command) else "mechanism"
        body[name] = join_mechanisms([part.mechanism for part in parts])
    endpoint = ENDPOINTS[f"/v1/{command.name}"]
    try:
        request = validate(endpoint.request, body)
    except CommandProblemError as error:
        if any(map(_has_epochs_alone, [given, *(part.mechanism for part in parts)])):
            at = "/epochs" if _is_solver(command) else "/mechanism/epochs"
            fault = {"pointer": at, "message": "is -e: for ε, write -E"}
            error.document["errors"].append(fault)
        raise
    return endpoint.answer(request).model_dump(mode="json")


def _has_epochs_alone(run: Json) -> bool:
    """Return whether a run has epochs without the sizes that they need: -e for -E, perhaps."""
    return "epochs" in run and not run.keys() & {"dataset_size", "batch_size"}


def _map_pointers(command: _Question, parts: Sequence[_Part]) -> dict[str, str]:
    """Map each JSON pointer of the request to the option that sets its value."""
    names = {name: "--" + name.replace("_", "-") for name in command.options}
    pointers = {f"/{name}": option for name, option in names.items() if name != "mechanism"}
    pointers["/time_limit"] = "--time-limit"
    base = "/earlier" if _is_solver(command) else "/mechanism"
    pointers |= {"": ""} if _is_solver(command) else {}
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
