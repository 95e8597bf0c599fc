"""Results in Python: as a line of text, as a table in a notebook, and as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from html import escape
from typing import Any, Final

Row = tuple[str, ...]
_STYLE: Final = "text-align: left"


class Presented:
    """Base class of the results of the package's functions."""

    __slots__ = ()

    def table(self) -> list[Row]:
        """Return what a notebook shows, as rows of text with the label in the first column."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as numbers, texts, lists and dictionaries, as JSON has them."""
        found: dict[str, Any] = to_plain(self)
        return found

    def __repr__(self) -> str:
        """Return the line of text, with the class: attributes are in `to_dict()`."""
        return f"<{type(self).__name__}: {self}>"

    def _repr_html_(self) -> str:
        """Return the table in HTML: notebooks call this."""
        return render_table(self.table())


class Answers(tuple[Any, ...]):
    """The answers to arrays of arguments, in their order; a tuple that notebooks show as a table.

    Attributes:
        arguments: the arguments that were arrays, by name, each as long as the answers.
    """

    arguments: Mapping[str, Sequence[Any]]

    def __new__(cls, answers: Iterable[Any], arguments: Mapping[str, Sequence[Any]]) -> Answers:
        """Make a tuple of the answers."""
        made = super().__new__(cls, answers)
        made.arguments = arguments
        return made

    def to_dict(self) -> list[dict[str, Any]]:
        """Return a dictionary for each answer, with its arguments: rows for a data frame."""
        return [
            {name: values[at] for name, values in self.arguments.items()} | each.to_dict()
            for at, each in enumerate(self)
        ]

    def __repr__(self) -> str:
        """Return a line for each answer, with its arguments."""
        given = [
            ", ".join(f"{name} = {values[at]}" for name, values in self.arguments.items())
            for at in range(len(self))
        ]
        return "\n".join(f"{words}: {each}" for words, each in zip(given, self, strict=True))

    def _repr_html_(self) -> str:
        """Return a table with a row for each answer."""
        rows = [
            (*(str(values[at]) for values in self.arguments.values()), str(each))
            for at, each in enumerate(self)
        ]
        return render_table([(*self.arguments, "answer"), *rows])


def to_plain(value: Any) -> Any:
    """Return a value as JSON has it: dataclasses become dictionaries, with the kind if any."""
    if is_dataclass(value) and not isinstance(value, type):
        kind = {"kind": value.kind} if hasattr(value, "kind") else {}
        return kind | {each.name: to_plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {name: to_plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(each) for each in value]
    return str(value) if isinstance(value, Exception) else value


def render_table(rows: Sequence[Row]) -> str:
    """Return rows of text as a table in HTML."""
    shown = ("".join(f'<td style="{_STYLE}">{escape(cell)}</td>' for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{cells}</tr>' for cells in shown)}</table>"
