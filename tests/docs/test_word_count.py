"""The documentation stays short, and each generated part names the command that writes it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from scripts.count_words import Count, count_pages, count_pages_of, print_changes
from scripts.page_parts import DOCS, enclose_part, list_parts, read_part, write_part
from tests.support.pages import ROOT

WRITTEN_MAX = 60_000  # hand-written words of all pages; lower it when you cut a page


def test_all_pages_together_are_short() -> None:
    counts = list(count_pages())
    longest = sorted(counts, key=lambda each: -each.written)[:10]
    assert sum(each.written for each in counts) <= WRITTEN_MAX, longest


def test_each_generated_part_names_the_module_that_writes_it() -> None:
    for page in DOCS.rglob("*.md"):
        text = page.read_text()
        parts = list(list_parts(text))
        assert text.count("<!-- begin ") == text.count("<!-- end ") == len(parts), page
        for part in parts:
            found = re.match(r"accountant \w+|python (?:-m ([\w.]+)|(\S+\.py))", part.command)
            assert found is not None, part
            path = found[2] or (found[1] or "accountant_service").replace(".", "/")
            assert any((ROOT / f"{path}{suffix}").exists() for suffix in ("", ".py")), part


def test_a_part_is_written_between_its_comments_and_not_counted_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"one two\n\n{enclose_part('sum', 'python -m a', '')}\n\nthree\n")
    write_part(page, "sum", "1 2 3\n4")
    assert read_part(page, "sum") == "1 2 3\n4"
    monkeypatch.setattr("scripts.count_words.DOCS", tmp_path)
    assert list(count_pages()) == [Count(Path("page.md"), 3, 4)]
    with pytest.raises(ValueError, match="needs the comments of one part product"):
        write_part(page, "product", "")


def test_words_are_compared_with_an_earlier_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One page is cut, one joined with it, one new, and one stays."""
    docs = tmp_path / "docs"
    docs.mkdir()
    for name, text in (("cut.md", "1 2 3"), ("joined.md", "4 5"), ("stays.md", "6")):
        (docs / name).write_text(text)
    git = [
        "git",
        "-C",
        str(tmp_path),
        "-c",
        "user.name=nobody",
        "-c",
        "user.email=nobody@localhost",
    ]
    for command in (["init"], ["add", "."], ["commit", "--message=all"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    (docs / "cut.md").write_text("1 4")
    (docs / "joined.md").unlink()
    (docs / "new.md").write_text("7 8 9 0")
    monkeypatch.setattr("scripts.count_words.DOCS", docs)
    print_changes(list(count_pages_of("HEAD")), list(count_pages()))
    printed = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert printed[:3] == [["3", "2", "cut.md"], ["2", "–", "joined.md"], ["–", "4", "new.md"]]
    assert printed[3][:2] == ["6", "7"]
