"""The figures of the architecture's page are those of today, and each can be wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scripts import structure
from scripts.page_parts import read_part
from tests.support.pages import ROOT


@pytest.mark.slow
def test_the_figures_of_the_page_are_what_the_command_prints() -> None:
    """If they differ, write them again: python -m scripts.structure --write."""
    command = [sys.executable, "-m", "scripts.structure"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert read_part(structure.PAGE, "structure") in printed


def test_code_lines_have_no_docstrings_comments_or_blank_lines() -> None:
    text = (
        '"""Title."""\n\n# why\nx = 1  # how\ndef f():\n    """Say\n    more."""\n    return "a"\n'
    )
    assert structure.count_code_lines(text) == 3


def test_a_circle_is_found_and_what_leads_into_it_is_not_part_of_it() -> None:
    a_to_c = {"a": "b", "b": "c", "c": "b"}
    arrows = {each: frozenset(targets) for each, targets in a_to_c.items()}
    assert structure.find_circles(arrows) == [frozenset("bc")]
    assert structure.find_circles(arrows | {"c": frozenset()}) == []
