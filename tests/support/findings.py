"""A fact about many files is one test, which lists what contradicts it."""

from __future__ import annotations

from collections.abc import Iterable


def require_none(findings: Iterable[str]) -> None:
    """Fail with the list of findings, one a line, if there are any."""
    found = list(findings)
    assert not found, "\n".join([f"{len(found)} findings", *found])
