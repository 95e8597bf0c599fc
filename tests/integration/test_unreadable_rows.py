"""Commands and the service name a row that they cannot read, instead of ending with a traceback."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import event
from typer.testing import CliRunner

from accountant_service import cli
from accountant_service.api.ledger_views import encode_answer
from accountant_service.app import create_app
from accountant_service.canonical_json import read_json
from accountant_service.ledger import database as opening
from accountant_service.ledger.api_keys import Keys, Scope
from accountant_service.ledger.errors import StoredRowError
from accountant_service.ledger.service import Ledger
from accountant_service.settings import Settings

FIXTURE: Final = Path(__file__).parents[1] / "contract" / "fixtures" / "ledger-0006.sql"
RUN: Final = "(SELECT id FROM reservation WHERE state = 'committed' ORDER BY id LIMIT 1)"
OF_RUN: Final = f"WHERE id = {RUN}"
ITS_DATASET: Final = f"WHERE id = (SELECT dataset FROM reservation {OF_RUN})"
ITS_END: Final = f"WHERE body LIKE '%\"kind\":\"commit\"%' || {RUN} || '%'"
TABLES: Final[dict[str, list[tuple[str, ...]]]] = {  # the commands that read rows of a table
    "entry": [("ledger", "export"), ("ledger", "export", "--csv"), ("ledger", "entries")],
    "end": [("run", "certificate", "RUN"), ("report", "run", "RUN", "--format", "json")],
    "dataset": [
        ("ledger", "show"), ("dataset", "list"), ("dataset", "show", "DATASET"),
        ("run", "list", "DATASET"), ("caps", "list", "DATASET"),
        ("report", "dataset", "DATASET", "--format", "json"),
    ],
    "reservation": [
        ("run", "list", "DATASET"), ("run", "show", "RUN"),
        ("report", "dataset", "DATASET", "--format", "json"),
    ],
    "audit_event": [("ledger", "events")],
    "api_key": [("keys", "list")],
    "webhook": [("webhook", "list")],
    "cap": [("caps", "list", "DATASET")],
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


def alter(folder: Path, statement: str) -> dict[str, str]:
    """Write the fixture with an altered row; return a committed run and its dataset's name."""
    with closing(sqlite3.connect(folder / "ledger.db")) as connection:
        connection.executescript(FIXTURE.read_text())
        (run,) = connection.execute(f"SELECT {RUN}").fetchone()
        (name,) = connection.execute(f"SELECT name FROM dataset {ITS_DATASET}").fetchone()
        assert connection.execute(statement).rowcount > 0
        connection.commit()
    return {"RUN": run, "DATASET": name}


@pytest.mark.parametrize(("table", "statement"), CASES)
def test_a_command_names_the_row(
    table: str, statement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCOUNTANT_DATABASE_URL", f"sqlite:///{tmp_path}/ledger.db")
    monkeypatch.delenv("ACCOUNTANT_API_KEY", raising=False)
    named = alter(tmp_path, statement)
    for command in TABLES[table]:
        found = CliRunner().invoke(cli.app, [named.get(word, word) for word in command])
        assert isinstance(found.exception, SystemExit), (command, found.exception)
        assert found.exit_code == 2, (command, found.output)
        assert "cannot be read" in found.stderr or "not UTF-8" in found.stderr, found.stderr
        assert len(found.stderr) < 1000
        found.output.encode()


def test_the_service_answers_503_and_other_datasets_go_on(tmp_path: Path) -> None:
    named = alter(tmp_path, f"UPDATE dataset SET spent = '[\"1\", 2]' {ITS_DATASET}")
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as connection:
        query = "SELECT name FROM dataset WHERE name <> ? ORDER BY name LIMIT 1"
        (other,) = connection.execute(query, (named["DATASET"],)).fetchone()
    app = create_app(Settings(database_url=f"sqlite:///{tmp_path}/ledger.db"))
    with TestClient(app, raise_server_exceptions=False) as http:
        token = app.state.keys.create([Scope.ADMIN])[0]
        http.headers["Authorization"] = f"Bearer {token}"
        plan = {"mechanism": {"kind": "gaussian", "noise_multiplier": 50.0}}
        calls: list[tuple[str, str, Any]] = [
            ("GET", f"/v1/datasets/{named['DATASET']}", None),
            ("GET", f"/v1/reservations/{named['RUN']}", None),
            ("POST", f"/v1/datasets/{named['DATASET']}/reservations", plan),
            ("POST", f"/v1/datasets/{named['DATASET']}/quotes", plan),
        ]
        for method, path, body in calls:
            answer = http.request(method, path, json=body, headers={"Idempotency-Key": path})
            assert (answer.status_code, answer.json()["code"]) == (503, "stored-row-unreadable")
            assert "table dataset cannot be read" in answer.json()["detail"]
        assert http.get(f"/v1/datasets/{other}").status_code == 200
        assert http.get("/metrics").status_code == 200


def test_the_end_of_a_run_is_read_by_its_number(tmp_path: Path) -> None:
    """A search for its text reads the whole record of the dataset."""
    run = alter(tmp_path, "UPDATE reservation SET purpose = 'x'")["RUN"]
    repository = opening.open_repository(f"sqlite:///{tmp_path}/ledger.db")
    key = Keys(repository).create([Scope.OWNER])[1]
    ledger, statements = Ledger(repository, encode_answer), []
    ledger.read_ended_run(key, run)  # creates the signing key
    event.listen(
        repository.engine,
        "before_cursor_execute",
        lambda _, __, statement, *___: statements.append(statement),
    )
    assert ledger.read_ended_run(key, run)[3].at is not None
    of_entries = [each for each in statements if "FROM entry" in each]
    assert len(of_entries) == 1
    assert "LIKE" not in of_entries[0]
    assert not any("BEGIN IMMEDIATE" in each for each in statements)
    repository.close()


def test_a_migrated_run_knows_the_entry_of_its_end(tmp_path: Path) -> None:
    text = FIXTURE.with_name("ledger-0005.sql").read_text()
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as connection:
        connection.executescript(text)
        connection.execute("UPDATE entry SET body = 'nonsense' WHERE number = 4")  # is left out
        connection.commit()
    repository = opening.open_repository(f"sqlite:///{tmp_path}/ledger.db")
    key = Keys(repository).create([Scope.OWNER])[1]
    ledger = Ledger(repository, encode_answer)
    read = 0
    for dataset in ledger.list_datasets(key):
        for run in ledger.list_reservations(key, dataset.name, 0, 100)[1]:
            if run.state.value == "open":
                assert run.ended_entry is None
            elif run.ended_entry is None:
                with pytest.raises(StoredRowError, match="entry None is not about it"):
                    ledger.read_ended_run(key, run.identifier)
            else:
                read += 1
                assert ledger.read_ended_run(key, run.identifier)[3].at is not None
    assert read > 10
    repository.close()


@pytest.mark.parametrize("text", ["[1e999]", "[-1e999]", "[NaN]", '{"a": 1, "a": 1}', '"\\ud800"'])
def test_a_text_that_programs_read_differently_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"large|valid JSON|more than once|surrogate"):
        read_json(text)
    assert read_json(json.dumps({"a": [1e308, 10**30]})) == {"a": [1e308, 10**30]}
