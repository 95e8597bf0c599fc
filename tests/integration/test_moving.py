"""A ledger moves from SQLite to PostgreSQL whole, and only one of the two grants afterwards."""

from __future__ import annotations

import shlex
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import Connection, Engine, event
from typer.testing import CliRunner, Result

from accountant_service import cli
from accountant_service.app import create_app
from accountant_service.ledger import database as opening
from accountant_service.ledger import moving
from accountant_service.ledger.api_keys import Scope
from accountant_service.ledger.errors import LedgerError
from accountant_service.ledger.tables import METADATA
from accountant_service.ledger.verification import verify
from accountant_service.ledger.webhook_delivery import WebhookDelivery
from accountant_service.ledger.webhooks import create_webhook
from accountant_service.settings import Settings
from tests.support.databases import database
from tests.support.earlier_ledgers import read_rows

COMMAND = "accountant db move accountant.db"
RUN = {"kind": "dp_sgd", "noise_multiplier": 1.1, "sample_rate": 0.01, "steps": 100}


class Service:
    """The service on one database, called by one key."""

    def __init__(self, url: str) -> None:
        self.app = create_app(Settings(database_url=url))
        self.client = TestClient(self.app, raise_server_exceptions=False)
        self.client.__enter__()
        self.key = ""

    def create_key(self) -> str:
        self.key = self.app.state.keys.create([Scope.ADMIN])[0]
        return self.key

    def post(self, path: str, body: Any, name: str) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self.key}", "Idempotency-Key": name}
        answer = self.client.post(path, json=body, headers=headers)
        return answer.status_code, answer.json()

    def close(self) -> None:
        self.client.__exit__(None, None, None)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that `COMMAND` names; a folder of its own is the current one."""
    monkeypatch.setattr(WebhookDelivery, "start", lambda _: None)  # rows stay as they are
    monkeypatch.chdir(tmp_path)
    return tmp_path / "accountant.db"


@pytest.fixture
def running(file: Path) -> Iterator[Service]:
    """A service on SQLite with a dataset, a run that has ended and one with 10 granted steps."""
    service = Service(f"sqlite:///{file}")
    service.create_key()
    budget = {"epsilon": 3.0, "delta": 1e-5}
    service.post("/v1/datasets", {"name": "d", "size": 60_000, "budget": budget}, "dataset")
    for number in (1, 2):
        plan = {"mechanism": RUN, "lease_seconds": 600}
        _, run = service.post("/v1/datasets/d/reservations", plan, f"run {number}")
        service.post(
            f"/v1/reservations/{run['id']}/grants", {"steps": 10, "sequence": 0}, f"{number}"
        )
        if number == 1:
            service.post(f"/v1/reservations/{run['id']}/commit", {}, "commit")
    service.app.state.keys.create([Scope.RUN], requests_per_minute=60)
    hook = create_webhook("http://127.0.0.1:9", "closed", (0.5,), 0)
    with service.app.state.repository.transaction() as transaction:
        transaction.add_webhook(hook)
    service.post("/v1/datasets", {"name": "closed", "size": 60_000, "budget": budget}, "another")
    service.post("/v1/datasets/closed/close", {}, "close")
    service.run = run["id"]  # type: ignore[attr-defined]
    yield service
    service.close()


@pytest.fixture
def target(tmp_path: Path) -> Iterator[str]:
    with database("postgresql", tmp_path) as url:
        yield url


@pytest.fixture
def other_target(tmp_path: Path) -> Iterator[str]:
    with database("postgresql", tmp_path) as url:
        yield url


def move(target: str, *options: str) -> Result:
    environment = {"ACCOUNTANT_DATABASE_URL": target}
    return CliRunner().invoke(cli.app, [*shlex.split(COMMAND)[1:], *options], env=environment)


@contextmanager
def cut_before_the_copy_is_committed() -> Iterator[None]:
    """Context manager in which the target goes away once the source is closed."""
    commits = []

    def cut(connection: Connection) -> None:
        if connection.dialect.name == "postgresql":
            commits.append(connection)
            if len(commits) == 3:  # after the tables and the mark of the move
                raise moving.MoveRefusedError("the network was cut")

    event.listen(Engine, "commit", cut)
    try:
        yield
    finally:
        event.remove(Engine, "commit", cut)
    assert len(commits) == 3


def close_as_an_earlier_version(file: Path) -> None:
    """Make a closed file what an earlier version left: it did not record the move."""
    with sqlite3.connect(file) as closed:
        closed.execute("DROP TABLE ledger_move")
    closed.close()


def names_and_rows(url: str) -> dict[str, int]:
    """Return the number of rows of every table of a ledger."""
    repository = opening.open_repository(url)
    found = {table.name: len(read_rows(repository, table.name)) for table in METADATA.sorted_tables}
    repository.close()
    return found


def test_every_row_is_moved_and_the_run_goes_on_in_the_new_database(
    running: Service, file: Path, target: str
) -> None:
    before = opening.open_repository(f"sqlite:///{file}")
    tables = [table.name for table in METADATA.sorted_tables]
    rows = {name: read_rows(before, name) for name in tables}
    assert rows["webhook_event"], "what waits is delivered from the new database"
    before.close()
    done = move(target)
    assert done.exit_code == 0, done.output
    assert "moved 2 datasets with" in done.stdout
    after = opening.open_repository(target)
    for name in tables:
        assert sorted(map(repr, read_rows(after, name))) == sorted(map(repr, rows[name])), name
    assert verify(after).faults == []
    after.close()
    service = Service(target)
    service.key = running.key
    path = f"/v1/reservations/{running.run}/grants"  # type: ignore[attr-defined]
    status, granted = service.post(path, {"steps": 10, "sequence": 10}, "next")
    assert (status, granted["steps_granted"]) == (200, 20)
    status, problem = service.post("/v1/datasets/closed/reservations", {"mechanism": RUN}, "no")
    assert (status, problem["code"]) == (409, "dataset-closed")
    status, again = service.post(path, {"steps": 10, "sequence": 0}, "2")
    assert (status, again["steps_granted"]) == (200, 10), "answers of earlier calls moved too"
    service.close()


def test_a_server_that_still_runs_on_the_old_file_writes_nothing(
    running: Service, file: Path, target: str
) -> None:
    assert move(target).exit_code == 0
    path = f"/v1/reservations/{running.run}/grants"  # type: ignore[attr-defined]
    status, problem = running.post(path, {"steps": 10, "sequence": 10}, "next")
    assert (status, problem["code"]) == (503, "database-away")
    status, problem = running.post(
        "/v1/datasets/d/reservations", {"mechanism": RUN, "lease_seconds": 600}, "third"
    )
    assert status == 503
    headers = {"Authorization": f"Bearer {running.key}", "Idempotency-Key": "after the move"}
    for method, path, body in (
        ("POST", "/v1/keys", {"scopes": ["run"]}),
        ("DELETE", f"/v1/keys/{running.key.split('_')[1]}", None),
        ("PUT", "/v1/datasets/d/caps/teams/t", {"share": 0.1}),
        ("GET", "/readyz", None),
    ):
        answer = running.client.request(method, path, json=body, headers=headers)
        assert answer.status_code == 503, (method, path, answer.text)


def test_the_old_file_cannot_be_opened_again(running: Service, file: Path, target: str) -> None:
    assert move(target).exit_code == 0
    with pytest.raises(opening.MovedDatabaseError, match="moved"):
        opening.open_repository(f"sqlite:///{file}")
    for command in ("ledger show", "dataset list", "run list d", "report dataset d"):
        done = CliRunner().invoke(
            cli.app,
            command.split(),
            env={"ACCOUNTANT_DATABASE_URL": f"sqlite:///{file}", "ACCOUNTANT_API_KEY": None},
        )
        found = done.exit_code, "use that one" in done.stderr, "malformed" in done.stderr
        assert found == (2, True, False), (command, done.output, done.exception)


@pytest.mark.parametrize("by_an_earlier_version", [False, True])
def test_a_move_that_failed_is_continued_by_the_same_command(
    running: Service, file: Path, target: str, other_target: str, by_an_earlier_version: bool
) -> None:
    with cut_before_the_copy_is_committed():
        assert move(target).exit_code == 2
    with pytest.raises(opening.MovedDatabaseError):
        opening.open_repository(f"sqlite:///{file}")
    if by_an_earlier_version:  # it renamed the table of the entries only
        close_as_an_earlier_version(file)
        with sqlite3.connect(file) as closed:
            for table in METADATA.sorted_tables:
                if table.name != "entry":
                    closed.execute(f"ALTER TABLE {table.name}_moved RENAME TO {table.name}")
        closed.close()
    refused = move(target if by_an_earlier_version else other_target)
    assert (refused.exit_code, "--unfinished" in refused.stderr) == (2, True), refused.output
    assert move(target, *(["--unfinished"] if by_an_earlier_version else [])).exit_code == 0
    moved = opening.open_repository(target)
    assert verify(moved).entries > 5
    moved.close()
    refused = move(other_target, "--unfinished")
    assert (refused.exit_code, "already" in refused.stderr) == (2, True), refused.output


def test_an_interrupted_move_goes_to_another_database_only_if_that_is_confirmed(
    running: Service, file: Path, target: str, other_target: str
) -> None:
    with cut_before_the_copy_is_committed():
        assert move(target).exit_code == 2
    assert move(other_target).exit_code == 2
    assert set(names_and_rows(other_target).values()) == {0}
    assert move(other_target, "--unfinished").exit_code == 0
    assert names_and_rows(other_target)["dataset"] == 2
    refused = move(target)
    assert (refused.exit_code, "already" in refused.stderr) == (2, True)


def test_a_moved_ledger_is_moved_to_no_second_database(
    running: Service, file: Path, target: str, other_target: str
) -> None:
    """Both would grant the whole budget."""
    assert move(target).exit_code == 0
    for url, options in ((other_target, []), (other_target, ["--unfinished"]), (target, [])):
        refused = move(url, *options)
        assert (refused.exit_code, "moved to" in refused.stderr) == (2, True), refused.output
    assert set(names_and_rows(other_target).values()) == {0}


def test_a_file_that_an_earlier_version_moved_is_moved_again_only_if_that_is_confirmed(
    running: Service, file: Path, target: str, other_target: str
) -> None:
    assert move(target).exit_code == 0
    close_as_an_earlier_version(file)
    refused = move(other_target)
    assert (refused.exit_code, "earlier version" in refused.stderr) == (2, True), refused.output
    assert set(names_and_rows(other_target).values()) == {0}


def test_a_move_whose_end_was_not_recorded_is_verified_and_not_copied_again(
    running: Service, file: Path, target: str
) -> None:
    assert move(target).exit_code == 0
    rows = names_and_rows(target)
    with sqlite3.connect(file) as closed:
        closed.execute("UPDATE ledger_move SET is_finished = 0")
    closed.close()
    again = move(target)
    assert (again.exit_code, "moved 2 datasets" in again.stdout) == (0, True), again.output
    assert names_and_rows(target) == rows
    assert "already" in move(target).stderr


def test_of_two_moves_at_once_one_succeeds(
    running: Service, file: Path, target: str, other_target: str
) -> None:
    def try_to_move(url: str) -> Any:
        try:
            return moving.move_ledger(file, url, lambda *_: None)
        except (moving.MoveRefusedError, LedgerError) as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(try_to_move, (target, other_target)))
    assert sorted(isinstance(each, moving.Move) for each in found) == [False, True], found
    counts = [names_and_rows(url)["dataset"] for url in (target, other_target)]
    assert sorted(counts) == [0, 2]


def test_rows_that_a_server_writes_during_the_move_are_not_merged(
    running: Service, file: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server starts on the new database after it was found empty, and before the copy."""
    genuine = moving._lock_target

    def start_server_first(*arguments: Any) -> None:
        other = Service(target)
        other.create_key()
        other.close()
        genuine(*arguments)

    monkeypatch.setattr(moving, "_lock_target", start_server_first)
    refused = move(target)
    assert (refused.exit_code, "not empty" in refused.stderr) == (2, True), refused.output
    opening.open_repository(f"sqlite:///{file}").close()


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM dataset WHERE name = 'd'",
        "UPDATE webhook SET url = 'a' || char(0)",
        "DELETE FROM webhook",
    ],
)
def test_a_ledger_that_the_target_would_refuse_is_not_closed(
    running: Service, file: Path, target: str, statement: str
) -> None:
    with sqlite3.connect(file) as connection:  # which checks no foreign keys
        connection.execute(statement)
    connection.close()
    refused = move(target)
    assert refused.exit_code == 2, (refused.output, refused.exception)
    opening.open_repository(f"sqlite:///{file}").close()
    assert set(names_and_rows(target).values()) == {0}


def test_a_database_with_rows_is_refused_and_the_file_stays_open(
    running: Service, file: Path, target: str
) -> None:
    other = Service(target)
    other.create_key()
    other.close()
    done = move(target)
    assert (done.exit_code, "not empty" in done.stderr) == (2, True)
    opening.open_repository(f"sqlite:///{file}").close()


@pytest.mark.slow
def test_a_ledger_with_faults_is_refused_and_the_file_stays_open(
    running: Service, file: Path, target: str
) -> None:
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE dataset SET epsilon = 30")
    connection.close()
    done = move(target)
    assert (done.exit_code, "faults" in done.stderr) == (2, True)
    opening.open_repository(f"sqlite:///{file}").close()


@pytest.mark.parametrize("wrong", ["target", "file"])
def test_a_wrong_address_is_named(wrong: str, file: Path, tmp_path: Path, target: str) -> None:
    done = move(f"sqlite:///{tmp_path}/other.db" if wrong == "target" else target)
    message = "ACCOUNTANT_DATABASE_URL" if wrong == "target" else "no file"
    assert (done.exit_code, message in done.stderr) == (2, True)
