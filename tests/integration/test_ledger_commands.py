"""Commands for operators: copy the ledger, list who wrote what, and make all keys invalid."""

from __future__ import annotations

import json
import sqlite3
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from accountant_service import cli
from accountant_service.ledger import database
from accountant_service.ledger.api_keys import Keys
from accountant_service.ledger.errors import UnauthenticatedError

CREATE = "dataset create adult --size 32561 --epsilon 2 --delta 1e-5"


def call(words: str) -> Result:
    return CliRunner().invoke(cli.app, words.split())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_backup_of_a_ledger_in_use_is_whole_and_private(folder: Path) -> None:
    assert call(CREATE).exit_code == 0
    writer = sqlite3.connect("accountant.db")
    writer.execute("BEGIN IMMEDIATE")  # a server that writes
    try:
        assert call("db backup copy.db").exit_code == 0
    finally:
        writer.close()
    assert stat.S_IMODE((folder / "copy.db").stat().st_mode) == 0o600
    rows = [sqlite3.connect(name).execute("SELECT * FROM entry").fetchall()
            for name in ("accountant.db", "copy.db")]  # fmt: skip
    assert len(rows[0]) == 1
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqlite:///accountant.db", "'old.db' exists: name a new file"),
        ("sqlite:///missing.db", "there is no file 'missing.db'"),
        ("postgresql+psycopg://user@127.0.0.1/ledger", "back up PostgreSQL with pg_dump"),
    ],
)
def test_a_backup_writes_over_no_file_and_copies_no_other_database(
    url: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(CREATE)
    (folder / "old.db").write_text("old")
    monkeypatch.setenv("ACCOUNTANT_DATABASE_URL", url)
    found = call("db backup old.db")
    assert (found.exit_code, said in found.stderr) == (2, True)
    assert (folder / "old.db").read_text() == "old"
    assert not (folder / "missing.db").exists()


def test_a_reset_makes_every_key_invalid_and_is_recorded() -> None:
    token = call("keys create --scope admin").stdout.strip()
    assert call("keys reset").exit_code == 2
    repository = database.open_repository("sqlite:///accountant.db")
    try:
        assert Keys(repository).authenticate(token)
        assert call("keys reset --yes").exit_code == 0
        with pytest.raises(UnauthenticatedError):
            Keys(repository).authenticate(token)
    finally:
        repository.close()
    actions = [each["action"] for each in json.loads(call("ledger events --json").stdout)]
    assert actions == ["key-created", "keys-reset"]
    assert [row["revoked"] for row in json.loads(call("keys list --json").stdout)] == [True]


def test_entries_are_listed_by_key_and_by_dataset() -> None:
    call(CREATE)
    call(CREATE.replace("adult", "other"))
    rows = json.loads(call("ledger entries --json").stdout)
    assert [(row["dataset"], row["kind"], row["key"]) for row in rows] == [
        ("adult", "create", "command-line"),
        ("other", "create", "command-line"),
    ]
    assert json.loads(call("ledger entries --dataset other --json").stdout) == rows[1:]
    assert json.loads(call("ledger entries --key missing --json").stdout) == []
    assert "command-line" in call("ledger entries").stdout


def test_the_entries_of_a_key_name_its_runs() -> None:
    call(CREATE)
    run = call("run reserve adult -q 0.01 -s 1.1 -t 5").stdout.strip()
    rows = json.loads(call("ledger entries --key command-line --json").stdout)
    assert [row["run"] for row in rows] == [None, run]


def test_the_list_of_keys_says_when_each_was_used() -> None:
    token = call("keys create --scope admin").stdout.strip()
    assert "never" in call("keys list").stdout
    repository = database.open_repository("sqlite:///accountant.db")
    Keys(repository).authenticate(token)
    repository.close()
    assert json.loads(call("keys list --json").stdout)[0]["last_used_at"] > 1.7e9
    assert "never" not in call("keys list").stdout


def test_the_list_of_keys_says_until_when_each_is_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    call("keys create --scope run")
    call("keys create --scope run --expires-in-days 30")
    call("keys create --scope run --expires-in-days 0.00000001")
    call(f"keys revoke {call('keys create --scope run').stdout.split('_')[1]}")
    rows = json.loads(call("keys list --json").stdout)
    until = datetime.fromtimestamp(rows[1]["expires_at"], UTC)
    assert timedelta(29.99) < until - datetime.now(UTC) < timedelta(30)
    found = [line for line in call("keys list").stdout.splitlines() if line.startswith("│")]
    said = [line.rstrip(" │").rpartition("│")[2].strip() for line in found]
    assert said == ["no end", f"{until:%Y-%m-%d %H:%M}", "expired", "revoked"]
