"""Parts of documentation pages that a command writes.

Two comments in the page enclose a part; the first names the command:

    <!-- begin counts: python -m scripts.peer_jobs --write -->
    <!-- end counts -->

All other text of a page is hand-written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

DOCS: Final = Path(__file__).parents[1] / "docs"
_PART: Final = re.compile(
    r"(?P<begin><!-- begin (?P<name>[\w-]+): (?P<command>[^\n]+) -->\n)"
    r"(?P<text>.*?)(?P<end><!-- end (?P=name) -->)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Part:
    """A generated part of a page.

    Attributes:
        name: of the part; a page may have several of one name.
        command: writes the part.
        text: Markdown, without blank lines around it.
    """

    name: str
    command: str
    text: str


def list_parts(page: str) -> Iterator[Part]:
    """Yield the generated parts of a page's text."""
    for found in _PART.finditer(page):
        yield Part(found["name"], found["command"], found["text"].strip())


def read_part(page: Path, name: str) -> str:
    """Return the text of the page's only generated part of this name."""
    (found,) = (each.text for each in list_parts(page.read_text()) if each.name == name)
    return found


def enclose_part(name: str, command: str, text: str) -> str:
    """Return a generated part with its comments."""
    return f"<!-- begin {name}: {command} -->\n\n{text.strip()}\n\n<!-- end {name} -->"


def write_part(page: Path, name: str, text: str) -> None:
    """Replace a page's generated part."""
    before = page.read_text()
    if [each.name for each in list_parts(before)].count(name) != 1:
        raise ValueError(f"{page.name} needs the comments of one part {name}, as {__name__} says")
    page.write_text(
        _PART.sub(
            lambda found: (
                f"{found['begin']}\n{text.strip()}\n\n{found['end']}"
                if found["name"] == name
                else found[0]
            ),
            before,
        )
    )


def remove_parts(page: str) -> str:
    """Return the hand-written text of a page."""
    return _PART.sub("", page)
