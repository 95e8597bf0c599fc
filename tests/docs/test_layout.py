"""The repository is laid out as docs/architecture.md says."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.findings import require_none

ROOT = Path(__file__).parents[2]
IMPORT = re.compile(r"^\s*(?:import|from)\s[^(\n]*(?:\([^)]*\))?", re.MULTILINE)


def test_a_test_module_imports_no_other_test_module() -> None:
    """Code that tests share belongs into tests/support/."""
    require_none(
        f"{file.relative_to(ROOT)}: {statement}"
        for file in (ROOT / "tests").rglob("test_*.py")
        for statement in IMPORT.findall(file.read_text())
        if re.search(r"\btest_\w+(?!\()\b", statement)
    )


def test_the_client_has_at_most_thirteen_rooms() -> None:
    client = ROOT / "training_client"
    modules = [file for file in client.glob("*.py") if file.stem != "__init__"]
    packages = [folder for folder in client.iterdir() if (folder / "__init__.py").exists()]
    assert len(modules) + len(packages) <= 13


def test_the_thirty_questions_of_the_architecture_page_have_a_file() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    rows = re.findall(r"^\| ([^|]+\?) \| `([^`]+)` \|$", page, re.MULTILINE)
    assert len({question for question, _ in rows}) == len(rows) == 30
    require_none(path for _, path in rows if not (ROOT / path).is_file())
