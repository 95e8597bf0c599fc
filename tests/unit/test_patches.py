"""Changes to other libraries: in one module, listed in the docs, made to tested versions only."""

from __future__ import annotations

import ast
import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import training_client
from training_client.integrations import patches
from training_client.integrations.patches import (
    PATCHES,
    TESTED_VERSIONS,
    VersionRange,
    tune_process,
)

PACKAGE = Path(training_client.__file__).parent
PAGE = PACKAGE.parent / "docs/how-to/frameworks.md"
ON_INSTANCES = {"sample_rate", "_step_skip_queue", "_is_last_step_skipped", "summed_grad"}


def test_the_installed_versions_are_tested_ones() -> None:
    found = [patches.describe_untested(library) for library in TESTED_VERSIONS]
    assert not list(filter(None, found))


def test_a_range_includes_its_first_version_and_excludes_its_end() -> None:
    versions = ["1.5.3", "1.5.4", "1.6.0+cpu", "1.10", "1.7.0", "1.7.0.dev1", "unknown"]
    found = [version for version in versions if version in VersionRange("1.5.4", "1.7")]
    assert found == ["1.5.4", "1.6.0+cpu"]


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


def test_every_version_range_and_every_patch_is_on_the_page() -> None:
    text = PAGE.read_text()
    lines = [f"\n| {library} | {tested}" for library, tested in TESTED_VERSIONS.items()]
    for patch in PATCHES:
        names = ", ".join(f"`{target.split(':')[-1]}`" for target in patch.targets)
        lines.append(f"\n| `{patch.function}` | {patch.library} | {names} | ")
    assert [line for line in lines if line not in text] == []
    assert {patch.library for patch in PATCHES} <= TESTED_VERSIONS.keys()


def has_attribute(target: str) -> bool:
    """Return whether a library has an attribute, given as module:path, apart from instances'."""
    module, _, path = target.partition(":")
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        if name not in ON_INSTANCES:
            found = getattr(found, name, None)
    return found is not None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # importing opacus warns
def test_the_installed_libraries_have_all_patched_attributes() -> None:
    targets = [target for patch in PATCHES for target in patch.targets if ":" in target]
    assert len(targets) > 5
    assert [target for target in targets if not has_attribute(target)] == []


@pytest.mark.slow
def test_no_other_module_replaces_attributes_of_another_library() -> None:
    findings = []
    files = [file for file in sorted(PACKAGE.rglob("*.py")) if file.name != "patches.py"]
    for file in files:
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
        names = [name for name in _replaced(tree) if name.split(".")[0] in foreign]
        findings += [f"{file.relative_to(PACKAGE)}: {name}" for name in names]
    assert len(files) > 100
    assert findings == []


def test_flushing_of_subnormals_ends_with_training() -> None:
    """The service's bounds, computed in the same process, need numbers below 1e-38."""
    tiny = torch.full((1,), 1e-39)

    def interrupted() -> None:
        with tune_process():
            assert float(tiny * 1.0) == 0.0
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert float(tiny * 1.0) > 0.0


def _replaced(tree: ast.Module) -> list[str]:
    """Return the attributes that a module assigns to, by `=` or by `setattr`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            found.append(ast.unparse(node.args[0]))
    return found
