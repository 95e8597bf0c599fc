"""Every page of the documentation is of one of four kinds, and in the menu under it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from tests.support.pages import ROOT

KINDS = ["Tutorial", "How-to", "Reference", "Explanation"]
DOCS = ROOT / "docs"
NAVIGATION = yaml.safe_load(
    re.search(r"^nav:\n(?:[ #].*\n)+", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)[0]
)["nav"]  # type: ignore[index]


def pages_below(entry: Any) -> Iterator[str]:
    """Yield the pages of a part of the menu."""
    match entry:
        case str():
            yield entry
        case dict():
            yield from (page for each in entry.values() for page in pages_below(each))
        case _:
            yield from (page for each in entry for page in pages_below(each))


def test_the_menu_has_the_start_page_and_the_four_kinds() -> None:
    assert [next(iter(section)) for section in NAVIGATION] == ["Start", *KINDS]


def test_every_page_is_in_the_menu_once() -> None:
    found = sorted(pages_below(NAVIGATION))
    pages = [*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]
    assert found == sorted(str(each.relative_to(DOCS)) for each in pages)


def test_the_start_page_explains_the_four_kinds() -> None:
    text = (DOCS / "index.md").read_text()
    positions = [text.index(f"\n**{kind}** — ") for kind in KINDS]
    assert positions == sorted(positions)
