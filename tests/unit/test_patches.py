"""Changes to other libraries: in one module, listed in the docs, made to tested versions only."""

from __future__ import annotations

import ast
import importlib
import warnings
from pathlib import Path

import pytest

import training_client
from training_client.integrations import patches
from training_client.integrations.patches import PATCHES, TESTED_VERSIONS, Patch, VersionRange

PACKAGE = Path(training_client.__file__).parent
PAGE = PACKAGE.parent / "docs/how-to/frameworks.md"
ON_INSTANCES = {"sample_rate", "_step_skip_queue", "_is_last_step_skipped", "summed_grad"}


@pytest.mark.parametrize("library", TESTED_VERSIONS)
def test_the_installed_version_is_a_tested_one(library: str) -> None:
    problem = patches.describe_untested(library)
    assert problem is None, problem


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("1.5.3", False),
        ("1.5.4", True),
        ("1.6.0+cpu", True),
        ("1.10", False),
        ("1.7.0", False),
        ("1.7.0.dev1", False),
        ("unknown", False),
    ],
)
def test_a_range_includes_its_first_version_and_excludes_its_end(
    version: str, expected: bool
) -> None:
    assert (version in VersionRange("1.5.4", "1.7")) == expected


def test_an_untested_version_is_warned_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"opacus": "9.9", "torch": None}
    monkeypatch.setattr(patches, "installed_version", versions.get)
    patches._warn_once_if_untested.cache_clear()
    with pytest.warns(UserWarning, match=r"opacus 9\.9 is installed.*install a tested version"):
        patches.warn_if_untested("opacus", "torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patches.warn_if_untested("opacus", "torch")
    patches._warn_once_if_untested.cache_clear()


def test_every_version_range_is_on_the_page() -> None:
    text = PAGE.read_text()
    for library, tested in TESTED_VERSIONS.items():
        assert f"\n| {library} | {tested}" in text


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.function)
def test_every_patch_is_on_the_page(patch: Patch) -> None:
    names = ", ".join(f"`{target.split(':')[-1]}`" for target in patch.targets)
    assert f"\n| `{patch.function}` | {patch.library} | {names} | " in PAGE.read_text()
    assert patch.library in TESTED_VERSIONS


@pytest.mark.parametrize(
    "target", [target for patch in PATCHES for target in patch.targets if ":" in target]
)
def test_the_installed_libraries_have_all_patched_attributes(target: str) -> None:
    module, _, path = target.partition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing opacus warns
        found = importlib.import_module(module)
    for name in path.split("."):
        if name not in ON_INSTANCES:
            found = getattr(found, name)


@pytest.mark.parametrize(
    "file",
    [file for file in sorted(PACKAGE.rglob("*.py")) if file.name != "patches.py"],
    ids=lambda file: str(file.relative_to(PACKAGE)),
)
def test_no_other_module_replaces_attributes_of_another_library(file: Path) -> None:
    tree = ast.parse(file.read_text())
    foreign = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        or (
            isinstance(node, ast.ImportFrom)
            and not f"{node.module}.".startswith("training_client.")
        )
        for alias in node.names
    }
    assert [name for name in _replaced(tree) if name.split(".")[0] in foreign] == []


def _replaced(tree: ast.Module) -> list[str]:
    """Return the attributes that a module assigns to, by `=` or by `setattr`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            found.append(ast.unparse(node.args[0]))
    return found
