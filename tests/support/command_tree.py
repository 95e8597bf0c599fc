"""All commands of `accountant`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from accountant_service import cli


def walk_commands() -> Iterator[tuple[list[str], Any]]:
    """Yield the words and the object of every command that does something."""
    for name in typer.main.get_command(cli.app).commands:  # type: ignore[attr-defined]
        command: Any = cli.load_command(name)
        inner = getattr(command, "commands", None)
        yield from (
            [([name], command)]
            if inner is None
            else (([name, word], each) for word, each in inner.items())
        )
