"""The columns of the ledger's tables, each described once: by a field of a model.

The type of a field says what its column stores, and whether it may be null; `Stored` says the rest.
Tables, rows, their verification and repair, and the ledger's entries follow. So a new column
is a field, a migration, and the rule that uses it. Rows from before the migration have no value, so
its type must admit None.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from operator import attrgetter
from types import UnionType
from typing import (
    Annotated,
    Any,
    Final,
    NamedTuple,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from accountant_service.writing.canonical_json import read_json

_SHOWN: Final = 80  # characters of a value in a message
_WORDS: Final[dict[type, str]] = {
    int: "an integer", float: "a number", str: "text", bytes: "bytes", dict: "an object",
}  # fmt: skip
Row = dict[str, Any]  # a table row, by column
Model = TypeVar("Model")


@dataclass(frozen=True, slots=True)
class Stored:
    """Properties of a column beyond the type of its field.

    Attributes:
        name: of the column; the field's name if empty.
        length: the most characters of a text; the bytes of a whole number, if they are not 8.
        refers_to: the column, such as `dataset.id`, in which its values must stand.
        is_primary: whether it identifies the row.
        is_unique: whether no two rows have the same value.
        in_entry: whether the entry that creates a dataset or a reservation states it, unless it is
            None.
        changes: whether it changes after the row was stored.
    """

    name: str = ""
    length: int | None = None
    refers_to: str | None = None
    is_primary: bool = False
    is_unique: bool = False
    in_entry: bool = False
    changes: bool = False


@dataclass(frozen=True, slots=True)
class Spread:
    """A field that several columns store, or one that is read with others.

    Attributes:
        read: returns the field's value from a row.
        columns: each column's type, and what it stores of the value.
    """

    read: Callable[[Mapping[Any, Any]], Any]
    columns: Mapping[str, tuple[Any, Callable[[Any], Any]]]


class Codec(NamedTuple):
    """The stored form of the values of a type.

    Attributes:
        stored: the type in the database: int, float, str or bytes.
        is_json: whether the column is JSON text.
        write, read: from a value to what is stored, and back.
        state: from a value to the JSON of an entry.
        take: from a field's name in the entry, and its JSON there, to the value.
    """

    stored: type
    is_json: bool
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]
    state: Callable[[Any], Any]
    take: Callable[[str, Any], Any]


class StoredColumn(NamedTuple):
    """A column of a model's table."""

    name: str
    codec: Codec
    is_nullable: bool
    get: Callable[[Any], Any]  # its value, of the model
    details: Stored


class _Field(NamedTuple):
    """A field of a model, its columns, and what reads it from a row."""

    name: str
    columns: tuple[StoredColumn, ...]
    read: Callable[[Mapping[Any, Any]], Any]


@cache
def list_columns(model: Any, changes: bool | None = None) -> tuple[StoredColumn, ...]:
    """Return the columns of a model's table, in the order of its fields.

    Args:
        model: the class.
        changes: only those that change after the row was stored, or only those that never do.
    """
    found = (column for field in _list_fields(model) for column in field.columns)
    return tuple(each for each in found if changes in (None, each.details.changes))


def write_row(value: Any, changes: bool | None = None) -> Row:
    """Return the table row that stores a model, or the columns that `list_columns` returns."""
    model: Any = type(value)
    found = ((each, each.get(value)) for each in list_columns(model, changes))
    return {
        column.name: None if value is None else column.codec.write(value) for column, value in found
    }


def read_model(model: type[Model], row: Mapping[Any, Any]) -> Model:
    """Return the model that a table row describes.

    Raises:
        KeyError, TypeError, ValueError: the row describes none.
    """
    fields = _list_fields(cast("Any", model))
    return model(**{field.name: field.read(row) for field in fields})


def state_in_entry(value: Any) -> dict[str, Any]:
    """Return what the first entry about a model states of it, without what is None."""
    model: Any = type(value)
    return {
        column.name: column.codec.state(found)
        for column in list_columns(model)
        if column.details.in_entry and (found := column.get(value)) is not None
    }


def take_from_entry(
    model: type, entry: Mapping[str, Any], computed: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of a model that its first entry states, beside those that are computed.

    Raises:
        KeyError, TypeError, ValueError: one is missing, or is not what the ledger writes.
    """
    stated = {
        field.name: _take(field.columns[0], entry)
        for field in _list_fields(model)
        if field.columns[0].details.in_entry and field.name not in computed
    }
    return {**stated, **computed}


def _take(column: StoredColumn, entry: Mapping[str, Any]) -> Any:
    """Return what an entry states of a column; None if it may leave that out, and does."""
    if column.is_nullable and column.name not in entry:
        return None
    return column.codec.take(column.name, entry[column.name])


@cache
def _list_fields(model: Any) -> tuple[_Field, ...]:
    """Return the fields of a model."""
    kinds = get_type_hints(model, include_extras=True)
    return tuple(_describe_field(name, kind) for name, kind in kinds.items())


def _describe_field(name: str, kind: Any) -> _Field:
    """Return a field of a model."""
    get = attrgetter(name)
    spread = next((each for each in get_args(kind)[1:] if isinstance(each, Spread)), None)
    if spread is None:
        column = _describe_column(name, kind, get)
        return _Field(name, (column,), partial(_read_column, column))
    parts = [
        _describe_column(each, part, partial(_get_part, get, of))
        for each, (part, of) in spread.columns.items()
    ]
    return _Field(name, tuple(parts), spread.read)


def _get_part(get: Callable[[Any], Any], of: Callable[[Any], Any], model: Any) -> Any:
    """Return what one of several columns stores of a model's field."""
    return of(get(model))


def _describe_column(name: str, kind: Any, get: Callable[[Any], Any]) -> StoredColumn:
    """Return the column of a type."""
    plain, *notes = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    details = next((each for each in notes if isinstance(each, Stored)), Stored())
    is_union = get_origin(plain) in (Union, UnionType)
    kinds = [each for each in get_args(plain) if each is not type(None)] if is_union else [plain]
    if len(kinds) != 1:
        raise TypeError(f"the column {name} must have one type, or one and None, not {plain}")
    return StoredColumn(details.name or name, _find_codec(kinds[0]), is_union, get, details)


def _read_column(column: StoredColumn, row: Mapping[Any, Any]) -> Any:
    """Return the value that a column of a row stores."""
    stored = row[column.name]
    return None if stored is None and column.is_nullable else column.codec.read(stored)


def _find_codec(kind: Any) -> Codec:
    """Return how values of a type are stored."""
    known = _CODECS.get(kind)
    if known is not None:
        return known
    if issubclass(kind, StrEnum):
        return _store_text(attrgetter("value"), kind)
    if hasattr(kind, "to_text"):
        return _store_text(kind.to_text, kind.from_text)
    if not hasattr(kind, "to_json"):
        raise TypeError(f"nothing says how {kind} is stored")

    def take(stated: Any) -> Any:
        """Return the value that JSON states."""
        return kind.from_json(stated)

    return _store_json(lambda value: value.to_json(), take)


def _require(kind: type, name: str, stated: Any) -> Any:
    """Return what an entry states; raise TypeError if it is of another type."""
    if type(stated) is not kind:
        raise TypeError(f"{name} must be {_WORDS[kind]}, not {stated!r}")
    return stated


def _keep(value: Any) -> Any:
    """Return a value that is stored as it is."""
    return value


def _store_text(write: Callable[[Any], str], read: Callable[[str], Any]) -> Codec:
    """Return how values with a text of their own are stored."""
    return Codec(str, False, write, read, write, lambda _, stated: read(stated))


def _store_plain(kind: type) -> Codec:
    """Return how values are stored that the database has a type for."""
    return Codec(kind, False, _keep, _keep, _keep, partial(_require, kind))


def _store_json(state: Callable[[Any], Any], take: Callable[[Any], Any]) -> Codec:
    """Return how values are stored as JSON."""
    return Codec(
        str, True, lambda value: json.dumps(state(value)), lambda text: take(read_json(text)),
        state, lambda _, stated: take(stated),
    )  # fmt: skip


def _store_list(make: Callable[[Any], Any], item: type, words: str) -> Codec:
    """Return how lists of texts or of numbers are stored."""
    kinds = (int, float) if item is float else (item,)

    def take(stated: Any, shown: Any = None) -> Any:
        """Return the list that JSON states; raise TypeError if it states none of these items."""
        if type(stated) is not list or any(type(each) not in kinds for each in stated):
            raise TypeError(f"{shorten(shown or stated)} is no list of {words}")
        return make(stated)

    parse = json.loads if item is int else read_json  # quicker, and no item is a float or text
    state: Callable[[Any], Any] = sorted if make is frozenset else list
    return Codec(
        str, True, lambda value: json.dumps(state(value)),
        lambda text: take(parse(text), text),
        state, lambda _, stated: take(stated),
    )  # fmt: skip


def shorten(value: Any) -> str:
    """Return a value for a message, cut to a line."""
    text = ascii(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


_CODECS: Final[dict[Any, Codec]] = {
    **{kind: _store_plain(kind) for kind in (int, float, str)},
    bytes: _store_plain(bytes)._replace(read=bytes),
    dict[str, Any]: Codec(str, True, json.dumps, json.loads, _keep, partial(_require, dict)),
    tuple[int, ...]: _store_list(tuple, int, "whole numbers"),
    tuple[float, ...]: _store_list(tuple, float, "numbers"),
    tuple[str, ...]: _store_list(tuple, str, "texts"),
    frozenset[str]: _store_list(frozenset, str, "texts"),
}


def read_integers(text: str) -> tuple[int, ...]:
    """Return a column's JSON list of whole numbers.

    Raises:
        TypeError, ValueError: the text is nothing of the kind.
    """
    found: tuple[int, ...] = _CODECS[tuple[int, ...]].read(text)
    return found
