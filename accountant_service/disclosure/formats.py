"""The formats of a report, and the endings of their files."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Format(StrEnum):
    """A format of a report."""

    HTML = "html"
    PDF = "pdf"
    JSON = "json"
    REGISTRY = "registry"
    MODEL_CARD = "model-card"
    NIST = "nist"


MEDIA_TYPES: Final = {
    Format.HTML: "text/html; charset=utf-8",
    Format.PDF: "application/pdf",
    Format.JSON: "application/json",
    Format.REGISTRY: "application/yaml",
    Format.MODEL_CARD: "text/markdown; charset=utf-8",
    Format.NIST: "text/markdown; charset=utf-8",
}
SUFFIXES: Final = {
    ".html": Format.HTML,
    ".htm": Format.HTML,
    ".pdf": Format.PDF,
    ".json": Format.JSON,
    ".yaml": Format.REGISTRY,
    ".yml": Format.REGISTRY,
    ".md": Format.MODEL_CARD,
}
