"""Canonical JSON: the exact text of a document that is hashed or signed; and reading it strictly.

Equal documents give equal text, because keys are sorted. Each caller names the format that its
hashes and signatures have always used: stored ledgers and published certificates must still verify.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from accountant_service.writing.number_format import TOO_MANY_DIGITS, is_exact


def canonical_json(document: Any, *, compact: bool = True, ascii_only: bool = False) -> str:
    """Return the JSON text of a document, with sorted keys.

    Args:
        document: what `json.dumps` accepts.
        compact: leave out the space after commas and colons.
        ascii_only: escape every character that is not ASCII.
    """
    return _encoder(compact, ascii_only)(document)


class AmbiguousJsonError(ValueError):
    """A JSON text has a name twice in an object, or a number that double precision rounds.

    Attributes:
        pointer: JSON pointer of the name or number.
        message: what is wrong with it.
    """

    def __init__(self, pointer: str, message: str) -> None:
        self.pointer, self.message = pointer, message
        super().__init__(f"{pointer} {message}")


_REPEATED: Final = "is given more than once"


def read_json(text: str) -> Any:
    """Return a parsed JSON text that all programs read alike.

    Raises:
        ValueError: the text is not JSON, a number is too large for a double, or a string has half
            a surrogate pair, which is not Unicode.
        AmbiguousJsonError: an object has a name twice.
    """
    try:
        document = json.loads(
            text,
            object_pairs_hook=_require_unique_names,
            parse_constant=_refuse_constant,
            parse_float=_read_finite,
        )
    except AmbiguousJsonError:
        raise _find_ambiguity(json.loads(text, object_pairs_hook=_Pairs)) from None
    canonical_json(document).encode()
    return document


def require_unambiguous(text: str) -> None:
    """Check that no object of a JSON text has a name twice, and that no number is rounded.

    Raises:
        AmbiguousJsonError: an object has a name twice, or a number would be rounded.
    """
    try:
        json.loads(
            text,
            object_pairs_hook=_require_unique_names,
            parse_int=len,  # its value does not matter
            parse_float=_require_exact,
        )
    except AmbiguousJsonError:
        document = json.loads(text, object_pairs_hook=_Pairs, parse_int=len, parse_float=_Number)
        raise _find_ambiguity(document) from None


class _Number(str):
    """The text of a number with a point or an exponent."""


class _Pairs(list[tuple[str, Any]]):
    """The fields of a JSON object in the order of the text."""


def _require_unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's fields; raise `AmbiguousJsonError` if it names a field twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise AmbiguousJsonError("", _REPEATED)  # where it is takes a search
    return fields


def _require_exact(text: str) -> None:
    """Raise `AmbiguousJsonError` if a number would be rounded."""
    if not is_exact(text):
        raise AmbiguousJsonError("", TOO_MANY_DIGITS)


def _find_ambiguity(document: Any) -> AmbiguousJsonError:
    """Return the error for the first repeated name or rounded number of a document."""
    waiting: list[tuple[str, Any]] = [("", document)]
    while waiting:
        pointer, value = waiting.pop()
        if isinstance(value, _Number):
            if not is_exact(value):
                return AmbiguousJsonError(pointer, TOO_MANY_DIGITS)
            continue
        if isinstance(value, _Pairs):
            inner = [(f"{pointer}/{escape_pointer(name)}", each) for name, each in value]
            names = [name for name, _ in inner]
            repeated = next((name for name in names if names.count(name) > 1), None)
            if repeated is not None:
                return AmbiguousJsonError(repeated, _REPEATED)
        else:
            inner = [(f"{pointer}/{at}", each) for at, each in enumerate(value)]
        waiting += [each for each in reversed(inner) if isinstance(each[1], list | _Number)]
    raise AssertionError("nothing is ambiguous")


def escape_pointer(name: str) -> str:
    """Return a name as it stands in a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def _read_finite(text: str) -> float:
    """Return a number; raise ValueError if it is beyond the range of a double, such as 1e999."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} is too large a number")
    return value


def _refuse_constant(text: str) -> float:
    """Raise ValueError for NaN and infinities, which JSON does not have."""
    raise ValueError(f"{text} is not valid JSON")


@cache
def _encoder(compact: bool, ascii_only: bool) -> Callable[[Any], str]:
    """Return a cached JSON encoder with sorted keys."""
    separators = (",", ":") if compact else (", ", ": ")
    return json.JSONEncoder(sort_keys=True, separators=separators, ensure_ascii=ascii_only).encode
