"""A release: its notes, README, man pages and checksums, and archives that are always the same."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from accountant_service import __version__
from scripts import man_pages, release
from scripts.package_metadata import render_readme
from tests.support.pages import ROOT


def test_the_version_stands_in_one_place_and_the_notes_describe_it() -> None:
    assert release.read_notes((ROOT / "CHANGELOG.md").read_text(), __version__)
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert not re.search(r"^version =", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for changes in ("", "## 0.2\n\n## 0.1\n\ntext\n", "## 0.20\n\ntext\n"):
        with pytest.raises(ValueError, match=r"no section '## 0\.2'"):
            release.read_notes(changes, "0.2")


def test_the_readme_of_an_index_has_no_link_that_leads_nowhere() -> None:
    text = (ROOT / "README.md").read_text()
    for repository, targets in (("", "https?:"), ("https://example.org/x", "https?:")):
        shown = render_readme(text, repository)
        assert "![" not in shown
        assert "<!--" not in shown
        assert all(re.match(targets, each) for each in re.findall(r"\]\(([^)]*)\)", shown))
    assert "[the tutorial](https://example.org/x/blob/main/docs/tutorial.md)" in shown


def test_an_archive_does_not_depend_on_when_and_where_it_is_made(tmp_path: Path) -> None:
    made = []
    for place, when in (("one", 1), ("two", 2)):
        folder = tmp_path / place / "pages"
        folder.mkdir(parents=True)
        for name in ("b", "a")[:: 1 if when == 1 else -1]:
            (folder / name).write_text(name)
            os.utime(folder / name, (when, when))
        release.pack(folder, tmp_path / place / "x.tar.gz", 1_700_000_000)
        made.append((tmp_path / place / "x.tar.gz").read_bytes())
    assert made[0] == made[1]


def test_checksums_are_those_of_sha256sum(tmp_path: Path) -> None:
    for name in ("b", "a", release.IMAGE):
        (tmp_path / name).write_text(name)
    release.write_checksums(tmp_path)
    checked = subprocess.run(
        ["sha256sum", "--check", release.CHECKSUMS],
        cwd=tmp_path, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert checked.stdout == "a: OK\nb: OK\n"


DOCKER = """#!/bin/sh
test "$1" != info || exit {status}
echo "$@" >> {folder}/calls
echo sha256:0123
"""


def test_an_image_is_built_where_a_docker_daemon_answers_and_only_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert release.build_image(tmp_path, "abc") is None
    docker, calls = tmp_path / "docker", tmp_path / "calls"
    docker.touch(0o755)
    docker.write_text(DOCKER.format(status=1, folder=tmp_path))
    assert release.build_image(tmp_path, "abc") is None
    assert not calls.exists()
    docker.write_text(DOCKER.format(status=0, folder=tmp_path))
    tag = f"privacy-accountant:{__version__}"
    made = {"image": tag, "digest": "sha256:0123", "revision": "abc"}
    assert release.build_image(tmp_path, "abc") == made
    given = calls.read_text().splitlines()[0]
    for words in (f"VERSION={__version__}", "REVISION=abc", "--target service", f"--tag {tag}"):
        assert words in given
    built = (ROOT / "Dockerfile").read_text()
    for name in ("version", "revision"):
        assert f'org.opencontainers.image.{name}="${name.upper()}"' in built


@pytest.mark.slow  # PyTorch comes with the options of `accountant-train run`
def test_each_command_has_a_man_page_with_its_options(tmp_path: Path) -> None:
    man_pages.write_all(tmp_path)
    names = {each.name for each in tmp_path.iterdir()}
    assert {"accountant.1", "accountant-epsilon.1", "accountant-keys-create.1"} <= names
    assert {"accountant-train.1", "accountant-train-run.1"} <= names
    for file in tmp_path.iterdir():
        text = file.read_text()
        assert text.startswith(f'.TH "{file.stem.upper()}" 1'.replace("-", "\\-")), file
        assert ".SH NAME\n" in text
        assert " object at " not in text
    assert r"\fB\-\-noise\-multiplier\fR" in (tmp_path / "accountant-epsilon.1").read_text()
    if shutil.which("groff") is None:
        return
    shown = subprocess.run(
        ["groff", "-man", "-Tutf8", "-K", "utf8", "-ww", *sorted(tmp_path.iterdir())],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert shown.stderr == ""
    assert "δ: 0, or from 1e-50 to below 1." in shown.stdout
