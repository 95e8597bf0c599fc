"""The table of mutants fits the code, and each mutant is found (at night)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants.__main__ import (
    ROOT,
    Mutant,
    check_without_mutants,
    copied_repository,
    find_mutant,
    read_page,
    read_table,
)


def test_the_table_fits_the_code() -> None:
    """Each text occurs once in its file, each test exists, and no two rows are the same."""
    mutants = read_table()
    wrong = [
        f"{each.path}: {each.text!r}"
        for each in mutants
        if (ROOT / each.path).read_text().count(each.text) != 1 or each.text == each.replacement
    ]
    for each in mutants:
        file, function = each.test.split("::")
        text = (ROOT / file).read_text()
        if f"def {function}(" not in text and f"\n{function} = " not in text:
            wrong.append(each.test)
    assert not wrong
    assert len({each.begin_of_row for each in mutants}) == len(mutants)


def test_the_page_lists_every_mutant_as_found() -> None:
    assert list(read_page()) == [each.begin_of_row for each in read_table()]


@pytest.fixture(scope="module")
def copy() -> Iterator[Path]:
    with copied_repository() as found:
        yield found


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_all_tests_of_the_table_pass_without_a_mutant(copy: Path) -> None:
    errors = list(check_without_mutants(copy, read_table()))
    assert not errors, "\n".join(errors)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutant", read_table(), ids=lambda each: f"{each.path}: {each.broken}")
def test_a_mutant_is_found(copy: Path, mutant: Mutant) -> None:
    """As .venv/bin/python -m tests.mutants --write does, without writing."""
    end, error = find_mutant(copy, mutant)
    assert not error
    assert end[0] == read_page()[mutant.begin_of_row][0], f"found in tier {end[0]}: write the page"
