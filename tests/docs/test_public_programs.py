"""Public programs in small versions: they train, or are refused for the true reason."""

from __future__ import annotations

import pytest

from benchmarks.public_programs import PROGRAMS, run_program
from benchmarks.public_programs.__main__ import PAGE, render_row, render_tables
from scripts.page_parts import read_part

QUICK = {
    "vae": "layers",
    "deep_cross": "layers",
    "multi_task": "whole",
    "physics_informed": "single",
    "hardest_examples": None,
    "mean_loss": None,
}


@pytest.mark.parametrize("name", QUICK)
def test_a_program_trains_or_is_refused_for_its_reason(name: str) -> None:
    found = run_program(PROGRAMS[name])
    assert found.is_expected, found
    assert found.way == QUICK[name]
    assert render_row(found) in PAGE.read_text()


def test_each_program_has_its_own_row_and_source() -> None:
    titles = [each.title for each in PROGRAMS.values()]
    assert len(set(titles)) == len(titles) >= 58
    assert sum(each.refused is None for each in PROGRAMS.values()) >= 50
    assert all(each.address.startswith("https://") for each in PROGRAMS.values())
    text = PAGE.read_text()
    assert [each.title for each in PROGRAMS.values() if f"| {each.title} |" not in text] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_all_programs_are_as_on_the_page() -> None:
    """As .venv/bin/python -m benchmarks.public_programs --write does, without writing."""
    outcomes = [run_program(each) for each in PROGRAMS.values()]
    assert [each for each in outcomes if not each.is_expected] == []
    assert read_part(PAGE, "programs") == "".join(render_tables(outcomes)).strip()
