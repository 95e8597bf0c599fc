"""Names in URL paths."""

from __future__ import annotations

from urllib.parse import quote

from training_client.errors import DataError


def quote_segment(name: str) -> str:
    """Return a name escaped for one segment of a URL path, so that it cannot add segments.

    Raises:
        DataError: the name is empty, a dot segment or not valid Unicode.
    """
    try:
        segment = quote(name, safe="")
    except UnicodeEncodeError:
        segment = ""
    if segment in ("", ".", ".."):
        raise DataError(f"{name!r} is not a valid name in the ledger: use the name it has there")
    return segment
