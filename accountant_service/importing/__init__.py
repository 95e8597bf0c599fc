"""Import configurations and histories of other tools, with a lint.

`read_document` parses a document (`registry`, one file for each tool) and `account_for` computes
what it costs and which of its claims hold (`cost`).
"""

from accountant_service.importing.cost import (
    Answer,
    CheckedClaim,
    Verdict,
    account_for,
    require_valid,
)
from accountant_service.importing.document import TEXT_MAX, DocumentError, parse_text
from accountant_service.importing.findings import CODES, Finding, Severity
from accountant_service.importing.imported import Facts, Imported
from accountant_service.importing.registry import FORMATS, read_document

__all__ = [
    "CODES",
    "FORMATS",
    "TEXT_MAX",
    "Answer",
    "CheckedClaim",
    "DocumentError",
    "Facts",
    "Finding",
    "Imported",
    "Severity",
    "Verdict",
    "account_for",
    "parse_text",
    "read_document",
    "require_valid",
]
