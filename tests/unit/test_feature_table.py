"""The table of features: the tests that it names exist, and the names in other libraries."""

from __future__ import annotations

import ast
import importlib
from importlib.metadata import version
from typing import Any

import pytest

from scripts.feature_table import MARKS, PAGE, SHOWN, read_data, render
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
    begin, end = MARKS
    assert PAGE.read_text().split(begin)[1].split(end)[0].strip() == render()


@pytest.mark.parametrize("feature", FEATURES, ids=lambda each: each.feature)
def test_every_named_test_exists(feature: Any) -> None:
    for named in feature.ours:
        file, name = named.split("::")
        assert name.startswith("test_")
        assert name in named_tests(file), named


def test_a_feature_has_one_row_and_known_libraries_and_marks() -> None:
    names = [each.feature for each in FEATURES]
    assert len(names) == len(set(names)) > 30
    libraries = {each.library for each in LIBRARIES}
    for feature in FEATURES:
        assert feature.ours or feature.peers
        assert feature.peers.keys() <= libraries
        assert all(each.mark in SHOWN and each.names for each in feature.peers.values())


@pytest.mark.parametrize("name", INSTALLED)
def test_a_library_is_installed_in_the_version_of_the_table(name: str) -> None:
    library = next(each for each in LIBRARIES if each.library == name)
    assert version(library.package) == library.version


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("library", "name"), NAMES)
def test_a_name_in_another_library_can_be_imported(library: str, name: str) -> None:
    """A name is a module followed by one or two attributes."""
    path, _, attribute = name.rpartition(".")
    try:
        found = importlib.import_module(path)
    except ModuleNotFoundError:
        path, _, owner = path.rpartition(".")
        found = getattr(importlib.import_module(path), owner)
    assert callable(getattr(found, attribute))
