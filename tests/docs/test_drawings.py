"""The drawings of the documentation are those that their scripts write today."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import draw_architecture, draw_concepts, draw_how_tos
from scripts.how_to_chains import CHAINS
from tests.support.pages import ROOT, copy_repository

KILOBYTES_MAX = 150


def test_the_drawing_of_the_architecture_shows_the_imports_of_today() -> None:
    drawn = draw_architecture.IMAGE.read_text()
    assert drawn == draw_architecture.draw(), "write it again: make drawings"


def test_the_drawings_of_concepts_show_the_numbers_of_today() -> None:
    """If one differs, write them again: make drawings."""
    drawn = draw_concepts.DRAWINGS.items()
    images = draw_concepts.IMAGES
    assert [name for name, draw in drawn if (images / name).read_text() != draw()] == []


def test_every_how_to_shows_its_drawing_of_today() -> None:
    """If one differs, write them again: make drawings."""
    drawn = draw_how_tos.draw_all()
    for page in (ROOT / "docs/how-to").glob("*.md"):
        name = f"how-to-{page.stem}.svg"
        assert f"](../images/{name})" in page.read_text(), page
        assert (draw_how_tos.IMAGES / name).read_text() == drawn.pop(name), name
    assert not drawn, "a page was renamed"


def test_the_texts_of_chains_are_no_wider_than_their_boxes() -> None:
    for title, stages in CHAINS.values():
        for stage in stages:
            assert max(map(len, [title, *stage[0:1], *stage.lines, *stage.notes])) <= 55, stage
            assert len(stage.then) <= 50, stage


def test_the_pictures_of_the_readme_are_small() -> None:
    pictures = re.findall(r"\((docs/images/\w+\.png)\)", (ROOT / "README.md").read_text())
    assert len(pictures) == 2
    for picture in pictures:
        assert (ROOT / picture).stat().st_size < KILOBYTES_MAX * 1000


@pytest.mark.slow
def test_make_drawings_writes_every_drawing(tmp_path: Path) -> None:
    copy = tmp_path / "repository"
    copy_repository(copy)
    (copy / ".venv").symlink_to(sys.prefix)
    names = ["architecture.svg", *draw_concepts.DRAWINGS, *draw_how_tos.draw_all()]
    for name in names:
        (copy / "docs/images" / name).unlink()
    subprocess.run(["make", "--old-file=.venv/.ready", "drawings"], cwd=copy, check=True)
    for name in names:
        path = Path("docs/images") / name
        assert (copy / path).read_text() == (ROOT / path).read_text()
