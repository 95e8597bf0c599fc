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


@pytest.mark.slow
def test_a_large_budget_says_what_it_allows(folder: Path) -> None:
    large = call("dataset create large --size 100 --epsilon 19.9 --delta .0099").output
    assert "this allows: an attacker with 10 false alarms in 1000 may find 1000 of 1000" in large
    assert "0.99 of 100 whole records may be published" in large
    assert "this allows" not in call("dataset create small -n 60000 -E 2 -d 1e-6").output
    weak = call("dataset create weak -n 100 -E 200 -d 1e-6 --accept-weak").output
    assert "may find 1000 of 1000" in weak


def test_a_weak_budget_begins_no_ledger_unless_it_is_accepted(folder: Path) -> None:
    weak = "dataset create survey --size 100 --epsilon 200 --delta .5"
    refused = call(weak)
    assert refused.exit_code == 2
    assert "(weak-guarantee)" in refused.output
    assert "--epsilon ε = 200 is above 20" in refused.output
    assert "set --accept-weak" in refused.output
    assert list(folder.iterdir()) == []
    assert "created survey" in call(f"{weak} --accept-weak").output


@pytest.mark.slow
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
@pytest.mark.slow
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
    assert actions == ["secret-created", "key-created", "keys-reset", "secret-created"]
    assert [row["revoked"] for row in json.loads(call("keys list --json").stdout)] == [True]


@pytest.mark.slow
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


@pytest.mark.slow
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


# --- nothing is not "all is well"

BEGINNING = {"dataset create", "keys create", "db move", "db upgrade"}  # a ledger, as `serve`
WITHOUT = {
    "dataset": ("list", "show x", "quote x -s 1 -q .1 -t 1", "close x",
                "reference x -s 1 -q .1 -t 1", "delete x"),
    "run": ("list x", "show x", "reserve x -s 1 -q .1 -t 1", "grant x -t 1", "commit x",
            "release x", "renew x", "certificate x"),
    "report": ("dataset x", "run x"),
    "keys": ("list", "limit x --requests-per-minute 5", "revoke x", "reset --yes"),
    "ledger": ("verify", "show", "quote x -m {}", "export", "entries", "events", "repair"),
    "caps": ("set x --team a --share .1", "list x", "remove x --team a"),
    "webhook": ("add https://example.org", "list", "remove x", "test x"),
    "db": ("backup copy.db",),
}  # fmt: skip
COMMANDS = [f"{group} {each}" for group, several in WITHOUT.items() for each in several]


def test_the_commands_without_a_ledger_are_all_that_open_one() -> None:
    tried = {" ".join(each.split()[:2]) for each in COMMANDS} | BEGINNING
    for group in WITHOUT:
        missing = {f"{group} {name}" for name in cli.load_command(group).commands} - tried
        assert missing <= {"report certificate"}


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_without_a_ledger_says_so_and_creates_none(words: str, folder: Path) -> None:
    found = call(words)
    assert found.exit_code == 2, found.output
    expected = "there is no file" if words.startswith("db") else "there is no ledger in sqlite:///"
    assert expected in found.output
    assert list(folder.iterdir()) == []


def test_a_mistake_begins_no_ledger(folder: Path) -> None:
    assert call("dataset create adult --size 0 --epsilon 2 --delta 2").exit_code == 2
    assert list(folder.iterdir()) == []


def test_a_file_of_another_program_is_left_as_it_is(folder: Path) -> None:
    """Opening it as a ledger would add tables, or change how SQLite writes it."""
    other = sqlite3.connect("accountant.db")
    other.execute("CREATE TABLE t (a)")
    other.close()
    before = Path("accountant.db").read_bytes()
    assert "no tables of a ledger" in call("ledger verify").output
    assert Path("accountant.db").read_bytes() == before
    Path("accountant.db").write_text("no database\n" * 1000)
    assert "file is not a database" in call("ledger verify").output
    assert [file.name for file in folder.iterdir()] == ["accountant.db"]


def test_an_empty_ledger_has_nothing_to_verify() -> None:
    call("keys create --scope admin")
    found = call("ledger verify")
    assert (found.exit_code, found.stdout.split(";")[0]) == (
        2,
        "nothing to verify: the ledger has no dataset",
    )
    assert call("ledger export --dataset missing").exit_code == 2
    call(CREATE)
    assert call("ledger verify").stdout.startswith("all is well")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is empty"),
        (b"hello\n" * 5, "line 1 cannot be read"),
        (b'{"a": 1}\n' * 1000, "line 1 cannot be read"),
        (b"\xff\xfe\x00" * 100, "can't decode"),
    ],
    ids=["empty", "text", "JSON", "binary"],
)
def test_a_foreign_file_is_no_export_and_no_certificate(content: bytes, said: str) -> None:
    Path("file").write_bytes(content)
    found = call("ledger verify --file file")
    assert found.exit_code == 2
    assert "--file is no export of the ledger: " in found.output
    assert said in found.output
    assert len(found.output.splitlines()) < 4
    assert "all is well" not in found.output
    found = call("verify file")
    assert (found.exit_code, found.stdout) == (2, "not valid\n")


def test_a_key_for_a_dataset_that_does_not_exist_is_made_with_a_warning() -> None:
    call(CREATE)
    found = call("keys create --scope run --dataset adult --dataset adlut")
    assert len(found.stdout.splitlines()) == 1
    assert found.stderr.count("warning") == 1
    assert "there is no dataset 'adlut'" in found.stderr
