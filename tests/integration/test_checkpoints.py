"""`accountant ledger verify --checkpoint` goes on, says what it skips, and trusts no stranger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accountant_service.cli import ledger as ledger_commands
from accountant_service.ledger import checkpoint, hash_chain, signing, verification
from accountant_service.ledger.repository import Repository
from accountant_service.ledger.verification import States, verify, verify_snapshot
from tests.support.ledger_scenarios import (
    ON_SQLITE,
    SQL_MATTERS,
    Commands,
    Json,
    Scenario,
    undone,
)

SEED = bytes(range(32))


def fill(scenario: Scenario, **fields: Any) -> None:
    """Make a dataset with ended and open runs of a key and of a team under a cap."""
    scenario.admin.create(**fields)
    alone, member = scenario.person(), scenario.person(team="vision")
    scenario.cap(0.9, team="vision")
    ended, still_open = alone.reserve(20), member.reserve(30)
    alone.grant(ended, 3)
    member.grant(still_open, 2)
    alone.commit(ended)
    member.release(member.reserve(5))


def list_states(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> list[States]:
    """Return the states after every entry, as a checkpoint keeps them."""
    found: list[States] = []
    with monkeypatch.context() as patch:
        patch.setattr(verification, "PAGE_SIZE", 1)
        verify(repository, watch=lambda _, __, describe: found.append(_kept(describe())))
    return found


def _kept(states: States) -> States:
    """Return states that were written to a checkpoint and read again."""
    return checkpoint.read(checkpoint.write(states, SEED, 0), SEED)


@pytest.mark.spread(second=3)
@SQL_MATTERS
@pytest.mark.parametrize(
    "fields", [{}, {"by": "reference"}, {"by": "reference", "plan": None}], ids=str
)
@pytest.mark.slow
def test_a_verification_goes_on_from_every_entry(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch, fields: Json
) -> None:
    fill(scenario, **fields)
    whole = verify(scenario.repository)
    found = list_states(scenario.repository, monkeypatch)
    assert [each["d"]["dataset"]["version"] for each in found] == [*range(1, 9), 8]
    for known in found:
        report = verify(scenario.repository, known)
        assert (report.faults, report.entries) == ([], 8)
        assert report.entries_before == known["d"]["dataset"]["version"]
        assert report.states == whole.states


@pytest.mark.slow
@ON_SQLITE
def test_the_table_of_epsilon_is_computed_again_only_if_it_is_another(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(scenario, by="reference")
    *_, unfinished, finished = list_states(scenario.repository, monkeypatch)
    lower = "UPDATE dataset SET policy = replace(policy, '\"epsilons\": [', '\"epsilons\": [0.0, ')"
    for known in (unfinished, finished):
        with undone(scenario.repository) as transaction:
            transaction.connection.exec_driver_sql(lower)
            assert "its table of ε" in str(verify_snapshot(transaction, known).faults)
    policy = type(scenario.dataset().policy)
    with monkeypatch.context() as patch:
        patch.setattr(policy, "is_table_sound", lambda _: False)
        assert verify(scenario.repository, finished).faults == []
        assert "its table of ε" in str(verify(scenario.repository, unfinished).faults)


ENDED = "WHERE state = 'committed'"


@pytest.mark.spread(first=4)
@ON_SQLITE
@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE entry SET hash = 'x' WHERE number = 8", "entry 8 has the hash x"),
        ("DELETE FROM entry WHERE number = 2", "8 entries were verified, but 7 of them are there"),
        ("DELETE FROM entry WHERE number = 8", "an older copy of the ledger"),
        ("UPDATE dataset SET size = 10", "its size is 10, but was verified as 1000"),
        ("UPDATE dataset SET spent = '[0]'", "but the balance is"),
        ("UPDATE dataset SET closed_at = 5", "closed_at is 5"),
        (f"UPDATE reservation SET steps_granted = 2 {ENDED}", "a run that ended"),
        (f"UPDATE reservation SET purpose = 'x' {ENDED}", "a run that ended"),
        (f"UPDATE reservation SET ended_entry = NULL, state = 'open' {ENDED}", "a run that ended"),
        (f"UPDATE reservation SET taken = 'x' {ENDED}", "cannot be compared"),
        (f"DELETE FROM reservation {ENDED}", "a run that ended up to entry 8 was altered"),
        ("UPDATE reservation SET steps_granted = 9 WHERE state = 'open'", "but recorded as"),
        ("UPDATE dataset SET name = 'e'", "dataset 'd': it was verified before, and has no row"),
        ("DELETE FROM cap", "it has no row"),
    ],
)
def test_what_was_altered_before_the_checkpoint_is_named(
    scenario: Scenario, statement: str, said: str
) -> None:
    fill(scenario)
    known = _kept(verify(scenario.repository).states)
    with undone(scenario.repository) as transaction:
        transaction.connection.exec_driver_sql(statement)
        report = verify_snapshot(transaction, known)
        assert said in "\n".join(report.faults)
        assert report.states["d"] == known["d"]  # it moves beyond no fault


@ON_SQLITE
def test_an_entry_before_the_checkpoint_is_not_read_again(scenario: Scenario) -> None:
    fill(scenario)
    known = verify(scenario.repository).states
    with undone(scenario.repository) as transaction:
        transaction.connection.exec_driver_sql("UPDATE entry SET body = '{}' WHERE number = 3")
        assert verify_snapshot(transaction, known).faults == []
        assert verify_snapshot(transaction).faults != []


def rewrite_last(connection: Any, **fields: Any) -> None:
    """Alter fields of the last entry, and let every hash fit."""
    rows = connection.exec_driver_sql("SELECT body, hash FROM entry ORDER BY number").all()
    body = hash_chain.encode_entry(json.loads(rows[-1][0]) | fields)
    head = hash_chain.hash_entry(rows[-2][1], body)
    connection.exec_driver_sql(
        "UPDATE entry SET body = ?, hash = ? WHERE number = ?", (body, head, len(rows))
    )
    connection.exec_driver_sql("UPDATE dataset SET head = ?", (head,))


@ON_SQLITE
def test_what_was_forged_after_the_checkpoint_is_found(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(scenario)
    *_, last = list_states(scenario.repository, monkeypatch)
    member = scenario.person(team="vision")
    member.reserve(10)
    entry, policy = scenario.entries()[-1], scenario.dataset().policy
    share = policy.share_of((entry["held_micronats"],)) * 1.5
    before = [run for run in scenario.runs() if run.identifier != entry["reservation"]]
    runs = {run.state.value: run.identifier for run in before}
    cases: list[tuple[Json, str]] = [
        (
            {"caps": [entry["caps"][0] | {"share": share}]},
            "fit under a cap",
        ),  # with the run before it
        ({"reservation": runs["open"]}, "exists already"),
        ({"reservation": runs["committed"]}, "is in the entries, but has no row"),
        ({"held_micronats": 1}, "differs"),
    ]
    for fields, said in cases:
        with undone(scenario.repository) as transaction:
            rewrite_last(transaction.connection, **fields)
            faults = "\n".join(verify_snapshot(transaction, last).faults)
            assert said in faults


def test_a_checkpoint_is_refused_unless_this_ledger_and_version_signed_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = checkpoint.write({"d": {"a": 1}}, SEED, 0)
    assert checkpoint.read(text, SEED) == {"d": {"a": 1}}
    document = json.loads(text)
    altered = [
        text.replace('"a": 1', '"a": 2'),
        text.replace('"a": 1', '"a": 1, "a": 1'),
        json.dumps({name: each for name, each in document.items() if name != "signature"}),
        json.dumps(document | {"signature": "00" * 64}),
        json.dumps(signing.sign({"format": document["format"]}, SEED)),
        "", "[]", "{}", "null", "\ud800", "[" * 10**5,
    ]  # fmt: skip
    for each in altered:
        with pytest.raises(checkpoint.CheckpointRefusedError):
            checkpoint.read(each, SEED)
    with pytest.raises(checkpoint.CheckpointRefusedError, match="not signed with the given"):
        checkpoint.read(text, bytes(32))
    other = signing.sign(document | {"accountant_version": "0.0.1"}, SEED)
    with pytest.raises(checkpoint.CheckpointRefusedError, match="wrote it"):
        checkpoint.read(json.dumps(other), SEED)


@pytest.fixture
def made(commands: Commands) -> Commands:
    """A ledger with one dataset of one run."""
    commands.make("dataset create d --size 1000 --epsilon 3 --delta 1e-5 --filter renyi")
    run = commands.make("run reserve d --sample-rate 0.01 --noise-multiplier 9 --steps 9")
    for _ in range(3):
        commands.make(f"run grant {run} --steps 1")
    return commands


def test_the_command_goes_on_where_it_was(made: Commands, tmp_path: Path) -> None:
    verify_on = f"ledger verify --checkpoint {tmp_path}/point.json"
    assert made.make(verify_on) == "all is well; datasets: 1, entries: 5"
    said = "all is well; datasets: 1, entries: 5, not read again: 5"
    assert made.make(verify_on) == said
    made.make("dataset create e --size 1000 --epsilon 3 --delta 1e-5 --filter renyi")
    assert made.json(verify_on) == {
        "datasets": 2, "entries": 6, "entries_not_read_again": 5, "faults": [],
        "warnings": [],
    }  # fmt: skip
    assert [file.name for file in tmp_path.glob("point*")] == ["point.json"]
    assert made.make("ledger verify") == "all is well; datasets: 2, entries: 6"


def test_an_interrupted_verification_goes_on(
    made: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_columns = verification.find_column_faults

    def interrupt(row: Any) -> Any:
        if row.number == 4:
            raise KeyboardInterrupt
        return check_columns(row)

    verify_on = f"ledger verify --checkpoint {tmp_path}/point.json"
    with monkeypatch.context() as patch:
        patch.setattr(verification, "PAGE_SIZE", 1)
        patch.setattr(verification, "find_column_faults", interrupt)
        patch.setattr(ledger_commands, "_SAVING_SECONDS", 0.0)  # private: or it takes seconds
        assert made(verify_on)[0] not in (0, 1)
    assert made.json(verify_on)["entries_not_read_again"] == 3


def test_a_checkpoint_that_is_refused_has_a_way_out(made: Commands, tmp_path: Path) -> None:
    file = tmp_path / "point.json"
    verify_on = f"ledger verify --checkpoint {file}"
    made.make(verify_on)
    file.write_text(file.read_text().replace('"version": 5', '"version": 4'))
    status, said = made(verify_on)
    assert status == 2
    assert "--checkpoint is refused: this ledger did not sign it so: the signature" in said
    assert "to verify every entry" in said
    file.unlink()
    made.make(verify_on)
    made.make("keys reset --yes")
    assert made(verify_on)[0] == 2
    assert made(f"{verify_on} --file {file}")[0] == 2
    status, said = made(f"ledger verify --checkpoint {tmp_path}/missing/point.json")
    assert status == 2
    assert "--checkpoint cannot be written" in said


def test_progress_counts_the_entries_that_are_read(scenario: Scenario) -> None:
    fill(scenario)
    scenario.admin.create("e")
    known = verify(scenario.repository).states
    scenario.person().reserve(1)
    for states, total in (({}, 10), (known, 1)):
        counts: list[tuple[int, int]] = []
        verify(scenario.repository, states, lambda *now, counts=counts: counts.append(now[:2]))
        assert counts == sorted(counts)
        assert counts[-1] == (total, total)


def test_a_terminal_shows_the_progress(made: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "100%" not in made.make("ledger verify")
    monkeypatch.setenv("FORCE_COLOR", "1")  # by which Rich takes the output for a terminal
    assert "100%" in made.make("ledger verify")
