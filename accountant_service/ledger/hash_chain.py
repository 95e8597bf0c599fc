"""The tamper-evident chain: every entry carries the hash of the one before it."""

from __future__ import annotations

import hashlib
from typing import Any, Final

from accountant_service.writing.canonical_json import canonical_json

GENESIS: Final = "0" * 64


def encode_entry(entry: dict[str, Any]) -> str:
    """Return an entry as canonical JSON, the text that is hashed."""
    return canonical_json(entry)


def hash_entry(previous: str, body: str) -> str:
    """Return the SHA-256 of an entry's text together with the previous entry's hash."""
    return hashlib.sha256(f"{previous}\n{body}".encode()).hexdigest()
