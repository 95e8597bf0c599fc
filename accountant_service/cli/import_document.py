"""The command `accountant import`: a document of another tool, its cost and a lint."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from accountant_service.cli.asking import (
    AS_JSON,
    Option,
    answer_or_exit,
    list_options,
    make_command,
    make_option,
)
from accountant_service.questions import functions
from accountant_service.writing import number_format
from accountant_service.writing.number_format import round_nearest as shown

Json = dict[str, Any]

_COLOURS: Final = {"error": "bold red", "warning": "yellow", "note": "dim"}


def _import(file: str, output: Path | None, time_limit: Any, as_json: bool, **facts: Any) -> None:
    """Print what a document is and costs; exit with status 1 if the lint finds an error."""
    answer = answer_or_exit(
        "/v1/import",
        {"document": _read(file), **facts},
        {"/document": "the document"},
        as_json=as_json,
        time_limit=time_limit,
    )
    if output is not None:
        _write_mechanism(output, answer)
    if as_json:
        typer.echo(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        _print(answer)
    if any(finding["severity"] == "error" for finding in answer["findings"]):
        raise typer.Exit(1)


def _read(file: str) -> str:
    """Return the text of a file, or of standard input; binary files are refused by the parser."""
    from accountant_service import importing

    try:
        raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"cannot be read: {error}", param_hint="FILE") from None
    return raw[: 4 * importing.TEXT_MAX + 4].decode("utf-8", errors="surrogateescape")


def _write_mechanism(output: Path, answer: Json) -> None:
    """Write the mechanism to a file for `accountant epsilon -m @FILE`."""
    if answer["mechanism"] is None:
        raise typer.BadParameter(
            f"nothing to write: {answer['guarantee_reason']}", param_hint="--output"
        )
    try:
        output.write_text(json.dumps(answer["mechanism"], indent=2) + "\n")
    except OSError as error:
        raise typer.BadParameter(f"cannot be written: {error}", param_hint="--output") from None


def _print(answer: Json) -> None:
    """Print the verdict, what was imported, its cost, the claims and the findings."""
    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    table.add_row("verdict", f"[bold]{escape(answer['summary'])}[/]")
    table.add_row("imported", escape(answer["tool"]))
    if answer["mechanism"] is not None:
        table.add_row("mechanism", escape(json.dumps(answer["mechanism"])))
        table.add_row("neighbours", answer["neighbouring_relation"])
    table.add_row("cost", _describe_cost(answer))
    for claim in answer["claims"]:
        table.add_row(
            "claim",
            f"ε = {shown(claim['epsilon'])} at δ = {shown(claim['delta'])}: {claim['status']}",
        )
    single = [each for each in answer["noise_tails"] if "float32" in each["generator"]]
    if single:
        table.add_row("noise", _describe_noise(single))
    console.print(table)
    for finding in answer["findings"]:
        colour = _COLOURS[finding["severity"]]
        console.print(
            f"[{colour}]{finding['severity']}[/] {finding['code']} [dim]{finding['pointer']}[/]"
        )
        for text in (finding["message"], finding["instead"]):
            if text:
                console.print("    " + escape(text))


def _describe_noise(tails: list[Json]) -> str:
    """Say of the generator that costs most what the end of its draws costs."""
    tail = max(tails, key=lambda each: each["delta_lower"])
    least = number_format.round_down(tail["delta_lower"], 3)
    end = shown(tail["largest_draw"], 4)
    return f"δ ≥ {least} at every ε if it is drawn by {tail['generator']}: it ends at {end} σ"


def _describe_cost(answer: Json) -> str:
    """Describe in words the guarantee of what was imported, or why there is none."""
    claim = answer["guarantee"]
    if claim is None:
        return f"none: {escape(answer['guarantee_reason'])}"
    sign = "=" if claim["status"] == "estimate" else "≤"
    text = f"ε {sign} {number_format.round_up(claim['epsilon'])} at δ = {shown(claim['delta'])}"
    if claim["certified"] is not None:
        low = number_format.round_down(claim["certified"]["epsilon_lower"])
        text = f"{low} ≤ {text}"
    return f"[bold]{text}[/], {claim['status']}"


_FILE: Final[Option] = (
    str,
    typer.Argument(help="The document: JSON, TOML, YAML or a Python repr; - is standard input."),
)
_OPTIONS: Final = list_options(functions.import_document, {"document": {"file": _FILE}}, {}) | {
    "output": make_option(Path | None, "Write the mechanism to this file.", "--output", "-o"),
    "as_json": AS_JSON,
}
_EXIT_STATUS: Final = (
    "\n\nThe exit status is 1 if the lint finds an error, and 2 if the document cannot be read."
)
COMMANDS: Final = {
    "import": make_command("import", _import, _OPTIONS, "history.json -d 1e-5", _EXIT_STATUS)
}
