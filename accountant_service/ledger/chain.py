"""The tamper-evident chain: every entry carries the hash of the one before it."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

GENESIS: Final = "0" * 64


def body_of(entry: dict[str, Any]) -> str:
    """The one text of an entry that its hash is taken of."""
    return json.dumps(entry, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def hash_of(previous: str, body: str) -> str:
    """The hash of an entry, given that of the one before it."""
    return hashlib.sha256(f"{previous}\n{body}".encode()).hexdigest()
