"""The scripts of examples/people do their jobs from an empty folder with the project's commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts.people import FOLDER, PAGE, PEOPLE, Job, do_job, read_purpose
from tests.support import warm_commands

TRAINS = "training_engineer"
SLOW = (TRAINS, "operator", "privacy_officer")
CASES = [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in PEOPLE]
SAYS = {
    "researcher": "noise multiplier  0.9591017807",
    "engineer": "noise multiplier  2.112036729",
    "privacy_officer": "wrote registry.yaml (registry)",
    "training_engineer": "it is about this model: SHA-256 ",
    "operator": "all is well; datasets: 1, entries: 1",
    "auditor": "claim       ε = 10 at δ = 1e-5: refuted",
}


def job_of(person: str, folder: Path) -> Job:
    warm_commands.install(folder)
    return do_job(person, folder)


@pytest.mark.parametrize("person", CASES)
def test_a_job_is_done_with_as_many_commands_as_the_page_says(person: str, tmp_path: Path) -> None:
    job = job_of(person, tmp_path)
    assert job.exit_code == 0, job.output
    assert SAYS[person] in job.output
    purpose = re.escape(read_purpose(person))
    row = rf"^\| {purpose} \| `{person}.sh` \| {job.commands} \| \d+ \| \d+ \|$"
    assert re.search(row, PAGE.read_text(), re.MULTILINE), f"{job.commands} commands: write it anew"


def test_there_is_a_script_for_each_person_and_no_other() -> None:
    assert sorted(f"{each}.sh" for each in PEOPLE) == sorted(each.name for each in FOLDER.iterdir())


@pytest.mark.parametrize("person", PEOPLE)
def test_no_step_needs_another_tool_or_json(person: str) -> None:
    script = (FOLDER / f"{person}.sh").read_text()
    for word in ("curl", "openssl", "Bearer", "jq ", "sqlite3", "python", '{"'):
        assert word not in script, word
