"""Output in every encoding: characters that it lacks are spelled in ASCII."""

from __future__ import annotations

import codecs
import sys
import unicodedata
from typing import Any, Final

_ASCII: Final = {
    "ε": "epsilon", "δ": "delta", "σ": "sigma", "μ": "mu", "α": "alpha", "η": "eta", "π": "pi",
    "≤": "<=", "≥": ">=", "≈": "~", "≠": "!=", "×": "x", "·": "*", "−": "-", "–": "-", "—": "-",
    "…": "...", "→": "->", "✓": "yes", "✗": "no", "“": '"', "”": '"', "’": "'", "ℓ": "l",
    "²": "^2", "√": "sqrt", "Δ": "Delta", "▸": ">", "•": "*", "\u202f": " ",
}  # fmt: skip
_ERRORS: Final = "accountant.ascii"


def _replace_character(error: UnicodeError) -> tuple[str, int]:
    """Codec error handler: spell in ASCII the characters that the output's encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(map(_spell_character, lacking)), error.end


def _spell_character(character: str) -> str:
    """Return a character in ASCII: its spelling, the letter without its accent, or "?"."""
    if character in _ASCII:
        return _ASCII[character]
    plain = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return plain or "?"


codecs.register_error(_ERRORS, _replace_character)


def prepare_output() -> None:
    """Make standard output and error spell in ASCII the characters that they cannot encode."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None and not _is_unicode(stream):
            reconfigure(errors=_ERRORS)


def _is_unicode(stream: Any) -> bool:
    """Return whether a stream can encode every character."""
    return str(getattr(stream, "encoding", None) or "utf-8").lower().startswith("utf")


def spell(text: str) -> str:
    """Return a text as standard output will show it: in ASCII if the encoding is not Unicode."""
    if _is_unicode(sys.stdout):
        return text
    encoding = sys.stdout.encoding or "ascii"
    return text.encode(encoding, _ERRORS).decode(encoding)
