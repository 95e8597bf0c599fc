"""The tables of what may be used are the calculator's answers of today."""

from __future__ import annotations

import pytest

from scripts.what_may_i_use import MARKS, PAGE, render


@pytest.mark.slow
def test_the_page_has_the_tables_of_the_script() -> None:
    begin, end = MARKS
    assert PAGE.read_text().split(begin)[1].split(end)[0].strip() == render()
