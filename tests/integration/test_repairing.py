"""`accountant ledger repair` mends what the entries determine, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from accountant_service.ledger import database as opening
from accountant_service.ledger.repair import repair
from accountant_service.ledger.repository import Repository
from accountant_service.ledger.verification import verify
from tests.support.ledger_scenarios import SQL_MATTERS, Commands, Scenario, execute

ENDED = "(SELECT id FROM reservation WHERE state = 'committed')"
MENDED = [
    f"UPDATE reservation SET ended_entry = NULL WHERE id = {ENDED}",  # by servers of 0005
    f"UPDATE reservation SET state = 'open' WHERE id = {ENDED}",
    f"UPDATE reservation SET steps_granted = 0 WHERE id = {ENDED}",
    f"UPDATE reservation SET taken = '[0]' WHERE id = {ENDED}",
    f"UPDATE reservation SET charge = '{{}}' WHERE id = {ENDED}",
    f"DELETE FROM reservation WHERE id = {ENDED}",
    "UPDATE dataset SET spent = '[0, 0]'",
    "UPDATE dataset SET held = 'x'",
    "UPDATE dataset SET closed_at = NULL",
    "UPDATE entry SET kind = NULL, at = NULL",  # by servers of 0006
    "UPDATE entry SET kind = 'grant', at = 7 WHERE number = 1",
]
LEFT = {
    "UPDATE entry SET body = replace(body, '\"steps\":2', '\"steps\":1')": "was altered",
    "DELETE FROM entry WHERE number = 6": "entries were cut off",
    "UPDATE dataset SET version = 5": "entries were cut off",
    "UPDATE dataset SET head = 'x'": "entries were cut off",
    "UPDATE dataset SET size = 999": "size is",
    "UPDATE dataset SET policy = '{}'": "cannot be read",
    "INSERT INTO reservation SELECT 'x', dataset, state, mechanism, mechanism_hash, charge, "
    "steps_reserved, steps_granted, expires_at, purpose, key_id, team, taken, ended_entry, joint "
    f"FROM reservation WHERE id = {ENDED}": "has a row, and no entry",
}


def fill(scenario: Scenario) -> None:
    """Record a run that ended and one that goes on, of a dataset that was closed."""
    admin = scenario.admin
    admin.create()
    run = admin.reserve()
    admin.grant(run, 2)
    admin.commit(run)
    admin.reserve()
    admin.close()


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Repository]:
    with closing(opening.open_repository(f"sqlite:///{tmp_path}/ledger.db")) as repository:
        fill(Scenario(repository))
        yield repository


@SQL_MATTERS
def test_what_the_entries_determine_is_mended(scenario: Scenario) -> None:
    fill(scenario)
    before = scenario.dataset(), sorted(scenario.runs(), key=str)
    for statement in MENDED:
        scenario.execute(statement)
        shown = repair(scenario.repository, is_trial=True).mended
        report = repair(scenario.repository)
        assert report.mended == shown != [], statement
        assert report.left == []
        assert (scenario.dataset(), sorted(scenario.runs(), key=str)) == before, statement
        assert scenario.faults() == []
        assert repair(scenario.repository).mended == []
    assert len(scenario.audit("ledger-repaired")) == len(MENDED)


@pytest.mark.spread(first=5)
@pytest.mark.parametrize("statement", LEFT)
def test_nothing_is_derived_from_a_record_with_faults(statement: str, ledger: Repository) -> None:
    """Budget would come back, if entries that were cut off were taken for never written."""
    execute(ledger, statement)
    before = verify(ledger).faults
    report = repair(ledger)
    assert report.mended == []
    assert any(LEFT[statement] in each for each in report.left), report.left
    assert verify(ledger).faults == before != []


def test_the_command_says_what_it_mended_and_what_is_left(
    commands: Commands,
) -> None:
    with closing(opening.open_repository(commands.url)) as repository:
        fill(Scenario(repository))
        execute(repository, MENDED[0])
        status, said = commands("ledger repair --dry-run")
        assert (status, "would mend: dataset 'd': run" in said) == (1, True)
        status, said = commands("ledger repair")
        assert (status, "mended: 1, wrong: 0" in said) == (0, True)
        execute(repository, "UPDATE dataset SET version = 5")
        assert commands("ledger repair")[0] == 1
