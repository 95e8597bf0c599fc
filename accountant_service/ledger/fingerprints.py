"""Fingerprints of keys, webhooks and secrets, which the audit event of their creation states.

They show that a row was altered later, and tell nothing about a secret: each secret is random.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final

from accountant_service.writing.canonical_json import canonical_json

PREFIX: Final = "sha256:"
_HEXADECIMAL: Final = 32  # 128 bits: nobody finds another row with the same ones


def fingerprint(**fields: Any) -> str:
    """Return the fingerprint of fields; bytes are written in hexadecimal."""
    plain = {
        name: value.hex() if isinstance(value, bytes) else value for name, value in fields.items()
    }
    text = canonical_json(plain, compact=True, ascii_only=True)
    return PREFIX + hashlib.sha256(text.encode()).hexdigest()[:_HEXADECIMAL]
