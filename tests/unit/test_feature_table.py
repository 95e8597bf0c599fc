"""The table of features: the tests that it names exist, and the names in other libraries."""

from __future__ import annotations

import ast
import importlib
from importlib.metadata import version

import pytest

from scripts.feature_table import PAGE, SHOWN, read_data, render
from scripts.page_parts import read_part
from tests.support.pages import ROOT

LIBRARIES, FEATURES = read_data()
INSTALLED = ["dp_accounting", "Opacus", "prv_accountant", "PLD_accounting"]  # `dev` has them
NAMES = sorted(
    {
        (library, name)
        for feature in FEATURES
        for library, support in feature.peers.items()
        if library in INSTALLED
        for name in support.names
    }
)


def named_tests(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text())
    return {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}


def test_the_page_has_the_tables_of_the_script() -> None:
    assert read_part(PAGE, "table") == render()


def test_every_named_test_exists() -> None:
    named = sorted({each for feature in FEATURES for each in feature.ours})
    tests = {file: named_tests(file) for file in {each.split("::")[0] for each in named}}
    assert all(each.split("::")[1].startswith("test_") for each in named)
    assert [each for each in named if each.split("::")[1] not in tests[each.split("::")[0]]] == []


def test_a_feature_has_one_row_and_known_libraries_and_marks() -> None:
    names = [each.feature for each in FEATURES]
    assert len(names) == len(set(names)) > 30
    libraries = {each.library for each in LIBRARIES}
    for feature in FEATURES:
        assert feature.ours or feature.peers
        assert feature.peers.keys() <= libraries
        assert all(each.mark in SHOWN and each.names for each in feature.peers.values())


def test_libraries_are_installed_in_the_version_of_the_table() -> None:
    found = {each.library: (version(each.package), each.version) for each in LIBRARIES
             if each.library in INSTALLED}  # fmt: skip
    assert sorted(found) == sorted(INSTALLED)
    assert {name: pair for name, pair in found.items() if pair[0] != pair[1]} == {}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_name_in_another_library_can_be_imported() -> None:
    assert len(NAMES) > 20
    assert [name for _, name in NAMES if not is_callable(name)] == []


def is_callable(name: str) -> bool:
    """Return whether a name can be called: a module followed by one or two attributes."""
    path, _, attribute = name.rpartition(".")
    try:
        found = importlib.import_module(path)
    except ModuleNotFoundError:
        path, _, owner = path.rpartition(".")
        found = getattr(importlib.import_module(path), owner)
    return callable(getattr(found, attribute, None))
