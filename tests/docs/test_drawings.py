"""The drawings of the documentation are those that their scripts write today."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import draw_architecture, draw_concepts, draw_how_tos
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


def test_the_drawings_of_how_tos_are_those_of_today_and_shown_on_their_pages() -> None:
    """If one differs, write them again: make drawings."""
    for name, text in draw_how_tos.draw_all().items():
        assert (draw_how_tos.IMAGES / name).read_text() == text, name
        page = ROOT / "docs/how-to" / name.removeprefix("how-to-").replace(".svg", ".md")
        assert f"](../images/{name})" in page.read_text(), page


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
