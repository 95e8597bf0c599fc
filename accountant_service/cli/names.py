"""Names that the command line accepts: the same as the HTTP API.

Help lists accounting methods and formats. Both are read from the source of their registries,
because importing these would make every `--help` a second slower.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

import typer

_SERVICE: Final = Path(__file__).parents[1]


def _parse_module(path: str) -> tuple[dict[str, ast.expr], dict[str, str]]:
    """Parse a module of the service without importing it.

    Returns:
        The values of its annotated names; and the module of each class that it imports.
    """
    values: dict[str, ast.expr] = {}
    modules: dict[str, str] = {}
    for node in ast.parse((_SERVICE / path).read_text(encoding="utf-8")).body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                values[name] = value
            case ast.ImportFrom(module=str(module), names=names):
                modules |= {each.name: module.rpartition(".")[2] for each in names}
    return values, modules


def _list_methods() -> tuple[tuple[str, ...], str]:
    """Return the accounting methods in their order, each named as its module, and the default."""
    values, modules = _parse_module("accounting/methods/registry.py")
    classes = [each.id for each in ast.walk(values["_ALL"]) if isinstance(each, ast.Name)]
    return tuple(modules[each] for each in classes), ast.literal_eval(values["DEFAULT_METHOD"])


def _list_formats() -> tuple[str, ...]:
    """Return the names of the formats that can be imported, in their order."""
    values, _ = _parse_module("importing/registry.py")
    table = values["FORMATS"]
    assert isinstance(table, ast.Dict)
    return tuple(ast.literal_eval(name) for name in table.keys if name is not None)


METHODS, DEFAULT_METHOD = _list_methods()
FORMATS: Final = _list_formats()


def check_name(name: str | None, option: str = "--team") -> str | None:
    """Return a name given by an option; exit with an error if the HTTP API would refuse it."""
    from accountant_service.api.ledger_schemas import NAME_LENGTH_MAX, NAME_PATTERN

    if name is not None and (len(name) > NAME_LENGTH_MAX or not re.search(NAME_PATTERN, name)):
        raise typer.BadParameter(
            f"{name!r} is not a valid name: use letters, digits, dots, dashes and underscores",
            param_hint=option,
        )
    return name


def check_label(label: str) -> str:
    """Return the label of a key; exit with an error if the HTTP API would refuse it."""
    from accountant_service.api.ledger_schemas import NAME_LENGTH_MAX

    if len(label) > NAME_LENGTH_MAX:
        raise typer.BadParameter(
            f"must have at most {NAME_LENGTH_MAX} characters", param_hint="--name"
        )
    return label
