"""All pages in all their states, in every width and theme."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.browser.conftest import PAGES, SENT, WIDTHS, check_plots, list_page_routes

pytestmark = [
    pytest.mark.nightly,
    # the driver leaves its pipes to the garbage collector
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_is_sound(open_page: Any, width: int) -> None:
    assert open_page(width).find_faults(PAGES) == {}


@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_is_sound_after_a_form_was_sent(open_page: Any, width: int) -> None:
    watched = open_page(width)
    assert watched.find_faults_after_sending(SENT) == {}
    for pattern in list_page_routes("POST") - {"/sign-out"}:
        assert any(re.fullmatch(pattern, path) for path in watched.sent_to), pattern


def test_plots_are_sound_on_a_wide_screen(open_page: Any) -> None:
    check_plots(open_page(WIDTHS[1]), "untouched-wide")
