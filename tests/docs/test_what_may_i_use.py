"""The tables of what may be used are the calculator's answers of today."""

from __future__ import annotations

import pytest

from scripts.page_parts import read_part
from scripts.what_may_i_use import PAGE, render


@pytest.mark.slow
def test_the_page_has_the_tables_of_the_script() -> None:
    assert read_part(PAGE, "tables") == render()
