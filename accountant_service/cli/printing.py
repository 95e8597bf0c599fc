"""Tables and JSON on the terminal."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def print_rows(rows: list[dict[str, Any]], columns: list[str], title: str, as_json: bool) -> None:
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
