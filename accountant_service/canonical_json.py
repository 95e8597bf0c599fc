"""Canonical JSON: the exact text of a document that is hashed or signed; and reading it strictly.

Equal documents give equal text, because keys are sorted. Each caller names the format that its
hashes and signatures have always used: stored ledgers and published certificates must still verify.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any


def canonical_json(document: Any, *, compact: bool = True, ascii_only: bool = False) -> str:
    """Return the JSON text of a document, with sorted keys.

    Args:
        document: what `json.dumps` accepts.
        compact: leave out the space after commas and colons.
        ascii_only: escape every character that is not ASCII.
    """
    return _encoder(compact, ascii_only)(document)


def read_json(text: str) -> Any:
    """Return a parsed JSON text that all programs read alike.

    Raises:
        ValueError: the text is not JSON, an object has a name twice, so that programs would read
            different values, a number is too large for a double, or a string has half a surrogate
            pair, which is not Unicode.
    """
    document = json.loads(
        text,
        object_pairs_hook=_require_unique_names,
        parse_constant=_refuse_constant,
        parse_float=_read_finite,
    )
    canonical_json(document).encode()
    return document


def _require_unique_names(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's fields; refuse an object that names a field twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = sorted(name for name in fields if names.count(name) > 1)
        raise ValueError(f"the name {repeated[0]!r} occurs more than once in one object")
    return fields


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
