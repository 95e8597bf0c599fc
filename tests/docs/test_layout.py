"""The repository is laid out as docs/architecture.md says."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEST_MODULES = sorted((ROOT / "tests").rglob("test_*.py"))


def imported_modules(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("file", TEST_MODULES, ids=lambda file: file.stem)
def test_a_test_module_imports_no_other_test_module(file: Path) -> None:
    others = [name for name in imported_modules(file) if name.split(".")[-1].startswith("test_")]
    assert not others, "what tests share belongs into tests/support/"


def test_the_client_has_at_most_thirteen_rooms() -> None:
    client = ROOT / "training_client"
    modules = [file for file in client.glob("*.py") if file.stem != "__init__"]
    packages = [folder for folder in client.iterdir() if (folder / "__init__.py").exists()]
    assert len(modules) + len(packages) <= 13
