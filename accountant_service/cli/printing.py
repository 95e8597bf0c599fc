"""Tables, JSON and problems on the terminal, of any width and in any encoding."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from accountant_service.cli.encoding import spell

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_TABLE_WIDTH_MIN: Final = 72  # on a narrower terminal each row is printed as lines


def open_console(*, stderr: bool = False) -> Console:
    """Return a Rich console without automatic highlighting."""
    return Console(highlight=False, stderr=stderr)


def is_narrow(console: Console) -> bool:
    """Return whether a terminal is too narrow for a table of several columns."""
    return console.width < _TABLE_WIDTH_MIN


def print_rows(rows: list[dict[str, Any]], columns: list[str], title: str, as_json: bool) -> None:
    """Print rows as JSON, or as a table with these columns."""
    if as_json:
        print(json.dumps(rows))
        return
    cells = [[spell(_format_cell(row[column])) for column in columns] for row in rows]
    console = open_console()
    if is_narrow(console) and not _fits(cells, columns, console.width):
        print_records([dict(zip(columns, row, strict=True)) for row in cells], title)
        return
    table = Table(title=title, title_justify="left")
    for at, column in enumerate(columns):
        table.add_column(spell(column), no_wrap=at == 0)
    for row in cells:
        table.add_row(*map(escape, row))
    console.print(table)


def _fits(cells: Sequence[Sequence[str]], columns: Sequence[str], width: int) -> bool:
    """Return whether a table with these cells is at most `width` wide without folding."""
    widest = [max(map(cell_len, each)) for each in zip(columns, *cells, strict=True)]
    return sum(widest) + 3 * len(columns) + 1 <= width


def print_records(records: Sequence[Mapping[str, str]], title: str) -> None:
    """Print each record as lines of a name and a value; empty values are left out."""
    print(spell(title))
    for record in records:
        first, *rest = ((name, value) for name, value in record.items() if value)
        print(f"- {first[1]}")
        for name, value in rest:
            print(spell(f"  {name}: {value}"))


def _format_cell(value: Any) -> str:
    """Return a table cell's text; lists are joined by commas."""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "–" if value is None else str(value)


def print_problem(problem: Mapping[str, Any], as_json: bool) -> None:
    """Print an API problem: as JSON to standard output, or in words to standard error."""
    if as_json:
        print(json.dumps(problem, indent=2))
        return
    console = open_console(stderr=True)
    console.print(f"[bold red]{escape(problem['title'])}[/] [dim]({problem['code']})[/]")
    for fault in problem.get("errors") or [{"message": problem["detail"]}]:
        place = fault.get("option", fault.get("pointer", ""))
        console.print("  " + escape(f"{place} {fault['message']}".lstrip()), soft_wrap=True)
