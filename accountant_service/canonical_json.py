"""Canonical JSON: the exact text of a document that is hashed or signed.

Equal documents give equal text, because keys are sorted. Each caller names the format that its
hashes and signatures have always used: stored ledgers and published certificates must still verify.
"""

from __future__ import annotations

import json
from collections.abc import Callable
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


@cache
def _encoder(compact: bool, ascii_only: bool) -> Callable[[Any], str]:
    """Return a cached JSON encoder with sorted keys."""
    separators = (",", ":") if compact else (", ", ": ")
    return json.JSONEncoder(sort_keys=True, separators=separators, ensure_ascii=ascii_only).encode
