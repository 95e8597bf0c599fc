"""The page of other libraries has the steps and lines of the scripts in examples/peers."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import peer_jobs
from scripts.page_parts import read_part
from scripts.peer_jobs import FOLDER, JOBS, LIBRARIES, OURS, PAGE, Count, find_script


def test_the_page_has_the_steps_and_lines_of_the_scripts() -> None:
    assert peer_jobs.render_counts() in PAGE.read_text(), "python -m scripts.peer_jobs --write"


def test_every_script_is_of_a_job_and_a_library() -> None:
    found = {find_script(job, each) for job in JOBS for each in (OURS, *LIBRARIES)}
    assert found - {None} == {path for path in FOLDER.rglob("*.*") if path.suffix != ".pyc"}


def test_this_project_does_every_job() -> None:
    assert all(find_script(job, OURS) for job in JOBS)


def test_comments_imports_and_empty_lines_are_no_steps(tmp_path: Path) -> None:
    script = tmp_path / "with_it.py"
    script.write_text("import os\n\n# a word\nfor each in os.environ:\n    print(each)\n")
    assert peer_jobs.count(script) == Count(steps=2, lines=3)
    commands = tmp_path / "ours.sh"
    commands.write_text("# a word\necho 1 > a\nRUN=$(accountant run list)\naccountant plan\n")
    assert peer_jobs.count(commands) == Count(steps=2, lines=3)


def test_a_program_named_by_a_relative_path_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    assert peer_jobs.find_program("./python") == str(tmp_path / "python")
    with pytest.raises(argparse.ArgumentTypeError, match="there is no program"):
        peer_jobs.find_program("./none")


@pytest.mark.nightly
@pytest.mark.parametrize("job", ["epsilon", "noise", "two_runs", "unsampled"])
def test_numbers_are_those_of_the_page(job: str) -> None:
    """The page shows what the scripts of this project and of dp_accounting print today."""
    _, numbers = PAGE.read_text().split("this project | Opacus 1", 1)
    row = re.search(rf"^\| {re.escape(JOBS[job])} \| (.*) \|$", numbers, re.MULTILINE)
    assert row is not None
    cells = row[1].split(" | ")
    for library, at in ((OURS, 0), ("dp-accounting", 2)):
        script = find_script(job, library)
        assert script is not None
        assert peer_jobs.read_number(peer_jobs.run(script, sys.executable)) == cells[at]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_all_libraries_do_their_jobs_with_the_numbers_of_the_page(tmp_path: Path) -> None:
    commands = """
python -m venv build/peers
build/peers/bin/pip install opacus==1.6.0 dp-accounting==0.6.0 opendp==0.16.0 riskcal==1.5.1
python -m scripts.peer_jobs --python build/peers/bin/python
"""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", commands],
        cwd=tmp_path,
        env=os.environ | {"PATH": path, "PYTHONPATH": str(peer_jobs.ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert read_part(PAGE, "tables") in done.stdout
