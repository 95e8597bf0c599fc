"""The answers of docs/find-it.md are files of this repository."""

from __future__ import annotations

import re

from tests.support.findings import require_none
from tests.support.pages import ROOT

ROWS = re.findall(
    r"^\| ([^|]+\?) \| `([^`]+)` \|$", (ROOT / "docs/find-it.md").read_text(), re.MULTILINE
)


def test_thirty_different_questions_have_an_answer() -> None:
    assert len({question for question, _ in ROWS}) == len(ROWS) == 30


def test_every_answer_is_a_file() -> None:
    require_none(path for _, path in ROWS if not (ROOT / path).is_file())
