"""Print how many words of each documentation page are hand-written and how many generated.

python -m scripts.count_words [--since COMMIT]
"""

from __future__ import annotations

import argparse
import re
import subprocess
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


def count_page(page: Path, text: str) -> Count:
    """Return the counts of a page's text."""
    generated = sum(count_words(each.text) for each in list_parts(text))
    return Count(page, count_words(remove_parts(text)), generated)


def count_pages() -> Iterator[Count]:
    """Yield the counts of all pages, in the order of their paths."""
    for page in sorted(DOCS.rglob("*.md")):
        yield count_page(page.relative_to(DOCS), page.read_text())


def count_pages_of(commit: str) -> Iterator[Count]:
    """Yield the counts of the pages as they were in a commit.

    Raises:
        subprocess.CalledProcessError: git knows no such commit.
    """
    git = ["git", "-C", str(DOCS)]
    tree = subprocess.check_output([*git, "ls-tree", "-rz", "--name-only", commit, "."], text=True)
    for name in tree.split("\0"):
        if name.endswith(".md"):
            text = subprocess.check_output([*git, "show", f"{commit}:./{name}"], text=True)
            yield count_page(Path(name), text)


def print_counts(counts: list[Count]) -> None:
    """Print a table of all pages."""
    print(f"{'hand-written':>12} {'generated':>10}  page")
    for each in counts:
        print(f"{each.written:12} {each.generated:10}  {each.page}")
    written = sum(each.written for each in counts)
    generated = sum(each.generated for each in counts)
    print(f"{written:12} {generated:10}  all {len(counts)} pages")


def print_changes(earlier: list[Count], today: list[Count]) -> None:
    """Print the hand-written words then and now of each page in which their number differs.

    A page that has no words in one column was joined with another then, or split from it.
    """
    then, now = ({each.page: each.written for each in counts} for counts in (earlier, today))
    print(f"{'then':>7} {'now':>7}  page")
    for page in sorted({*then, *now}):
        if then.get(page) != now.get(page):
            print(f"{then.get(page, '–'):>7} {now.get(page, '–'):>7}  {page}")
    print(f"{sum(then.values()):7} {sum(now.values()):7}  all pages, {len(then)} and {len(now)}")


def main() -> None:
    """Print the words of all pages, or what changed since a commit."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.count_words",
        description="Print the hand-written and the generated words of each documentation page.",
    )
    parser.add_argument(
        "--since", metavar="COMMIT", help="print hand-written words then and now instead"
    )
    commit = parser.parse_args().since
    if commit is None:
        print_counts(list(count_pages()))
        return
    try:
        print_changes(list(count_pages_of(commit)), list(count_pages()))
    except subprocess.CalledProcessError as error:
        parser.exit(1, f"git cannot read {commit!r}: exit code {error.returncode}\n")


if __name__ == "__main__":
    main()
