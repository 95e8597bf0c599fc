"""Print how many words of each documentation page are hand-written and how many generated.

python -m scripts.count_words
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scripts.page_parts import DOCS, list_parts, remove_parts

_COMMENT: Final = re.compile(r"<!--.*?-->", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Count:
    """The words of a page, as `wc -w` counts them, without comments.

    Attributes:
        page: its path below the documentation's folder.
        written: words of hand-written text and commands.
        generated: words of the parts that a command writes.
    """

    page: Path
    written: int
    generated: int


def count_words(text: str) -> int:
    """Return the number of words of a text, without comments."""
    return len(_COMMENT.sub("", text).split())


def count_pages() -> Iterator[Count]:
    """Yield the counts of all pages, in the order of their paths."""
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text()
        generated = sum(count_words(each.text) for each in list_parts(text))
        yield Count(page.relative_to(DOCS), count_words(remove_parts(text)), generated)


def main() -> None:
    """Print a table of all pages."""
    counts = list(count_pages())
    print(f"{'hand-written':>12} {'generated':>10}  page")
    for each in counts:
        print(f"{each.written:12} {each.generated:10}  {each.page}")
    written, generated = (
        sum(each.written for each in counts),
        sum(each.generated for each in counts),
    )
    print(f"{written:12} {generated:10}  all {len(counts)} pages")


if __name__ == "__main__":
    main()
