"""Commands and the service name a row that they cannot read, instead of ending with a traceback."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy import event
from typer.testing import CliRunner

from accountant_service import cli
from accountant_service.ledger import database as opening
from accountant_service.ledger.api_keys import Scope
from accountant_service.ledger.errors import StoredRowError
from accountant_service.writing.canonical_json import read_json
from tests.support.earlier_ledgers import FIXTURES
from tests.support.ledger_scenarios import Scenario, started

RUN: Final = "(SELECT id FROM reservation WHERE state = 'committed' ORDER BY id LIMIT 1)"
OF_RUN: Final = f"WHERE id = {RUN}"
ITS_DATASET: Final = f"WHERE id = (SELECT dataset FROM reservation {OF_RUN})"
ITS_END: Final = f"WHERE body LIKE '%\"kind\":\"commit\"%' || {RUN} || '%'"
TABLES: Final[dict[str, list[str]]] = {  # the commands that read rows of a table
    "entry": ["ledger export", "ledger export --csv", "ledger entries"],
    "end": ["run certificate RUN", "report run RUN --format json"],
    "dataset": [
        "ledger show", "dataset list", "dataset show DATASET", "run list DATASET",
        "caps list DATASET", "report dataset DATASET --format json",
    ],
    "reservation": [
        "run list DATASET", "run show RUN", "report dataset DATASET --format json",
    ],
    "audit_event": ["ledger events"],
    "api_key": ["keys list"],
    "webhook": ["webhook list"],
    "cap": ["caps list DATASET"],
}  # fmt: skip
CASES: Final = [
    *(
        ("entry", f"UPDATE entry SET {change} {ITS_END}")
        for change in (
            "body = 'nonsense'",
            "body = '[]'",
            "body = '7'",
            "body = '{}'",
            "body = 'null'",
            "body = x'ff'",
            "body = CAST(x'ff' AS TEXT)",
            "body = '" + "[" * 100_000 + "'",
            "body = json_set(body, '$.at', 'x')",
            "body = json_set(body, '$.at', 9e99)",
            "body = json_set(body, '$.at', -1)",
            "body = json_set(body, '$.at', 9223372036854775807)",
            "body = json_remove(body, '$.at')",
            'body = replace(body, \'"steps":\', \'"x":1e999,"steps":\')',
            'body = replace(body, \'"steps":\', \'"x":NaN,"steps":\')',
            'body = replace(body, \'"steps":\', \'"steps":1,"steps":\')',
            "body = json_set(body, '$.key', json('\"\\ud800\"'))",
            "body = json_set(body, '$.reservation', json('[]'))",
            "hash = x'ff'",
        )
    ),
    *(
        ("end", f"UPDATE entry SET body = {change} {ITS_END}")
        for change in (
            "'nonsense'",
            "json_set(body, '$.at', 'x')",
            "json_set(body, '$.declared', json('[1]'))",
            "json_set(body, '$.declared', json('{\"x\": 1}'))",
            "json_set(body, '$.declared', json('{\"clip_norm\": \"x\"}'))",
            "json_set(body, '$.reservation', 'another')",
        )
    ),
    ("end", f"UPDATE reservation SET ended_entry = NULL {OF_RUN}"),
    ("end", f"UPDATE reservation SET ended_entry = 999 {OF_RUN}"),
    *(
        ("dataset", f"UPDATE dataset SET {change} {ITS_DATASET}")
        for change in (
            "size = 'x'",
            "size = -1",
            "epsilon = 9e999",
            "epsilon = -1.0",
            "delta = 1.5",
            "relation = 'cousins'",
            "policy = '{}'",
            "policy = '" + "[" * 100_000 + "'",
            "policy = json_set(policy, '$.filter', 'gdp')",
            "spent = '7'",
            "spent = '[\"1\", 2]'",
            "spent = '[1e999, 0]'",
            "held = '[1, 2, 3, 4, 5, 6]'",
            "closed_at = 9223372036854775807",
            "created_at = 'x'",
            "privacy_unit = CAST(x'ff' AS TEXT)",
        )
    ),
    *(
        ("reservation", f"UPDATE reservation SET {change} {OF_RUN}")
        for change in (
            "state = 'lost'",
            "mechanism = '[]'",
            'mechanism = \'{"kind": "gaussian", "noise_multiplier": 1e999}\'',
            'mechanism = \'{"kind": "\\ud800"}\'',
            "charge = '{}'",
            "charge = '[]'",
            "charge = replace(charge, ': ', ': \"x\"')",
            "steps_granted = 'x'",
            "taken = '{}'",
            "taken = '[]'",
            "taken = '[[1], 2]'",
            "expires_at = 9223372036854775807",
            "purpose = x'00ff'",
            "key_id = CAST(x'ff' AS TEXT)",
        )
    ),
    ("audit_event", "UPDATE audit_event SET at = 9223372036854775807"),
    ("audit_event", "UPDATE audit_event SET at = 'x'"),
    ("audit_event", "UPDATE audit_event SET subject = x'ff'"),
    ("api_key", "UPDATE api_key SET scopes = '7'"),
    ("api_key", "UPDATE api_key SET scopes = '[[]]'"),
    ("api_key", "UPDATE api_key SET datasets = '{\"a\":'"),
    ("api_key", "UPDATE api_key SET created_at = 'x'"),
    ("webhook", "UPDATE webhook SET shares = '[\"x\"]'"),
    ("webhook", "UPDATE webhook SET created_at = -1"),
    ("cap", f"INSERT INTO cap SELECT id, 'team', 'a', 'x' FROM dataset {ITS_DATASET}"),
    ("cap", f"INSERT INTO cap SELECT id, 'club', 'a', 0.5 FROM dataset {ITS_DATASET}"),
]


def write_fixture(file: Path, revision: str = "0006") -> None:
    with closing(sqlite3.connect(file)) as connection:
        connection.executescript((FIXTURES / f"ledger-{revision}.sql").read_text())


def alter(file: Path, statement: str) -> dict[str, str]:
    """Alter rows of the fixture; return a committed run and its dataset's name."""
    with closing(sqlite3.connect(file)) as connection, connection:
        (run,) = connection.execute(f"SELECT {RUN}").fetchone()
        (name,) = connection.execute(f"SELECT name FROM dataset {ITS_DATASET}").fetchone()
        assert connection.execute(statement).rowcount > 0
    return {"RUN": run, "DATASET": name}


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of the fixture."""
    file = tmp_path_factory.mktemp("fixture") / "ledger.db"
    write_fixture(file)
    return file.read_bytes()


@pytest.fixture
def file(kept: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the fixture, which commands read."""
    found = tmp_path / "ledger.db"
    found.write_bytes(kept)
    monkeypatch.setenv("ACCOUNTANT_DATABASE_URL", f"sqlite:///{found}")
    monkeypatch.delenv("ACCOUNTANT_API_KEY", raising=False)
    return found


def paired() -> Iterator[Any]:
    """Pair each case with one command in turn, and the first of each table with all of them."""
    seen: dict[str, int] = dict.fromkeys(TABLES, 0)
    for table, statement in CASES:
        commands = TABLES[table]
        at, seen[table] = seen[table], seen[table] + 1
        yield commands if at == 0 else [commands[at % len(commands)]], statement


@pytest.mark.parametrize(("commands", "statement"), list(paired()))
def test_a_command_names_the_row(commands: list[str], statement: str, file: Path) -> None:
    named = alter(file, statement)
    for command in commands:
        words = [named.get(word, word) for word in command.split()]
        found = CliRunner().invoke(cli.app, words)
        assert isinstance(found.exception, SystemExit), (command, found.exception)
        assert found.exit_code == 2, (command, found.output)
        assert "cannot be read" in found.stderr or "not UTF-8" in found.stderr, found.stderr
        assert len(found.stderr) < 1000
        found.output.encode()


def test_the_service_answers_503_and_other_datasets_go_on(file: Path) -> None:
    named = alter(file, f"UPDATE dataset SET spent = '[\"1\", 2]' {ITS_DATASET}")
    with started(f"sqlite:///{file}") as service:
        plan = {"mechanism": {"kind": "gaussian", "noise_multiplier": 50.0}}
        of = f"/v1/datasets/{named['DATASET']}"
        for method, path, body in (
            ("GET", of, None),
            ("GET", f"/v1/reservations/{named['RUN']}", None),
            ("POST", f"{of}/reservations", plan),
            ("POST", f"{of}/quotes", plan),
        ):
            status, problem = service.admin.ask(method, path, body)
            assert (status, problem["code"]) == (503, "stored-row-unreadable")
            assert "table dataset cannot be read" in problem["detail"]
        with closing(sqlite3.connect(file)) as connection:
            names = {name for (name,) in connection.execute("SELECT name FROM dataset")}
        for other in names - {named["DATASET"]}:
            service.admin.read(f"/v1/datasets/{other}")
        service.admin.read("/metrics")


def test_the_end_of_a_run_is_read_by_its_number(file: Path) -> None:
    """A search for its text reads the whole record of the dataset."""
    run, statements = alter(file, "UPDATE reservation SET purpose = 'x'")["RUN"], list[str]()
    with closing(opening.open_repository(f"sqlite:///{file}")) as repository:
        scenario = Scenario(repository)
        owner = scenario.person(Scope.OWNER).record
        scenario.ledger.read_ended_run(owner, run)  # creates the signing key
        event.listen(
            repository.engine,
            "before_cursor_execute",
            lambda _, __, statement, *___: statements.append(statement),
        )
        assert scenario.ledger.read_ended_run(owner, run)[0][0][2].at is not None
    of_entries = [each for each in statements if "FROM entry" in each]
    assert len(of_entries) == 1
    assert "LIKE" not in of_entries[0]
    assert not any("BEGIN IMMEDIATE" in each for each in statements)


def test_a_migrated_run_knows_the_entry_of_its_end(tmp_path: Path) -> None:
    write_fixture(tmp_path / "ledger.db", "0005")
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as connection, connection:
        connection.execute("UPDATE entry SET body = 'nonsense' WHERE number = 4")  # is left out
    read = 0
    with closing(opening.open_repository(f"sqlite:///{tmp_path}/ledger.db")) as repository:
        scenario = Scenario(repository)
        ledger, key = scenario.ledger, scenario.person(Scope.OWNER).record
        runs = [run for each in ledger.list_datasets(key) for run in scenario.runs(each.name)]
        for run in runs:
            if run.state.value == "open":
                assert run.ended_entry is None
            elif run.ended_entry is None:
                with pytest.raises(StoredRowError, match="entry None is not about it"):
                    ledger.read_ended_run(key, run.identifier)
            else:
                read += 1
                assert ledger.read_ended_run(key, run.identifier)[0][0][2].at is not None
    assert read > 10


def test_a_text_that_programs_read_differently_is_refused() -> None:
    for text in ("[1e999]", "[-1e999]", "[NaN]", '{"a": 1, "a": 1}', '"\\ud800"'):
        with pytest.raises(ValueError, match=r"large|valid JSON|more than once|surrogate"):
            read_json(text)
    assert read_json(json.dumps({"a": [1e308, 10**30]})) == {"a": [1e308, 10**30]}
