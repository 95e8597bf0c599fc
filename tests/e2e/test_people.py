"""The scripts of examples/people do their jobs from an empty folder with the project's commands."""

from __future__ import annotations

import re

import pytest

from scripts.people import FOLDER, PAGE, PEOPLE, do_job, read_purpose
from tests.support.findings import require_none

SAYS = {
    "researcher": "noise multiplier  0.9591017807",
    "engineer": "noise multiplier  2.11203687",
    "privacy_officer": "wrote registry.yaml (registry)",
    "training_engineer": "it is about this model: SHA-256 ",
    "operator": "all is well; datasets: 1, entries: 1",
    "auditor": "claim       ε = 10 at δ = 1e-5: refuted",
}


@pytest.mark.nightly
@pytest.mark.parametrize("person", PEOPLE)
def test_a_job_is_done_with_as_many_commands_as_the_page_says(person: str) -> None:
    job = do_job(person)
    assert job.exit_code == 0, job.output
    assert SAYS[person] in job.output
    purpose = re.escape(read_purpose(person))
    row = rf"^\| {purpose} \| `{person}.sh` \| {job.commands} \| \d+ \| \d+ \|$"
    assert re.search(row, PAGE.read_text(), re.MULTILINE), f"{job.commands} commands: write it anew"


def test_there_is_a_script_for_each_person_and_no_other() -> None:
    assert sorted(f"{each}.sh" for each in PEOPLE) == sorted(each.name for each in FOLDER.iterdir())


def test_no_step_needs_another_tool_or_json() -> None:
    other_tools = ("curl", "openssl", "Bearer", "jq ", "sqlite3", "python", '{"')
    scripts = {each: (FOLDER / f"{each}.sh").read_text() for each in PEOPLE}
    require_none(f"{who}: {word}" for who in PEOPLE for word in other_tools if word in scripts[who])
