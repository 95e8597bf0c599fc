"""All pages in all their states, in every width and theme."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.conftest import PAGES, WIDTHS, check_plots

pytestmark = [
    pytest.mark.nightly,
    # the driver leaves its pipes to the garbage collector
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_is_sound(open_page: Any, width: int) -> None:
    assert open_page(width).find_faults(PAGES) == {}


def test_plots_are_sound_on_a_wide_screen(open_page: Any) -> None:
    check_plots(open_page(WIDTHS[1]), "untouched-wide")
