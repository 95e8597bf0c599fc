"""A ledger moves from SQLite to PostgreSQL whole, and only one of the two grants afterwards."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event
from typer.testing import CliRunner, Result

from accountant_service import cli
from accountant_service.ledger import database as opening
from accountant_service.ledger import moving
from accountant_service.ledger.api_keys import Scope
from accountant_service.ledger.errors import LedgerError
from accountant_service.ledger.tables import METADATA
from accountant_service.ledger.verification import verify
from accountant_service.ledger.webhook_delivery import WebhookDelivery
from accountant_service.ledger.webhooks import create_webhook
from tests.support.databases import database
from tests.support.earlier_ledgers import read_rows
from tests.support.ledger_scenarios import PLAN_JSON, Service, started

pytestmark = pytest.mark.slow  # each moves a ledger to PostgreSQL
RUN = PLAN_JSON | {"steps": 100}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that `move` names; a folder of its own is the current one."""
    monkeypatch.setattr(WebhookDelivery, "start", lambda _: None)  # rows stay as they are
    monkeypatch.chdir(tmp_path)
    return tmp_path / "accountant.db"


@pytest.fixture
def running(file: Path) -> Iterator[Service]:
    """A service on SQLite with a closed dataset, and a run that ended and one that goes on."""
    with started(f"sqlite:///{file}") as service:
        admin = service.admin
        admin.dataset("d", filter="renyi")
        for number in (1, 2):
            service.run = admin.reserve("d", RUN, lease_seconds=600)["id"]  # type: ignore[attr-defined]
            admin.grant(service.run, 10, 0, f"{number}")  # type: ignore[attr-defined]
            if number == 1:
                admin.commit(service.run)  # type: ignore[attr-defined]
        service.caller(requests_per_minute=60)
        with service.repository.transaction() as transaction:
            transaction.add_webhook(
                create_webhook("http://127.0.0.1:9", "closed", (0.5,), 0), "test"
            )
        admin.dataset("closed", filter="renyi")
        admin.make("/v1/datasets/closed/close")
        yield service


@pytest.fixture
def target(tmp_path: Path) -> Iterator[str]:
    with database("postgresql", tmp_path) as url:
        yield url


@pytest.fixture
def other_target(tmp_path: Path) -> Iterator[str]:
    with database("postgresql", tmp_path) as url:
        yield url


def move(target: str, *options: str) -> Result:
    """Run accountant db move accountant.db with options, to the new database."""
    command = ["db", "move", "accountant.db", *options]
    return CliRunner().invoke(cli.app, command, env={"ACCOUNTANT_DATABASE_URL": target})


def change(file: Path, *statements: str) -> None:
    """Run statements on the file, without a check of foreign keys."""
    with closing(sqlite3.connect(file)) as connection, connection:
        for each in statements:
            connection.execute(each)


def is_refused(done: Result, said: str) -> None:
    assert (done.exit_code, said in done.stderr) == (2, True), (done.output, done.exception)


def assert_open(file: Path) -> None:
    """Check that a ledger can still be used, for it was not moved."""
    opening.open_repository(f"sqlite:///{file}").close()


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


def close_as_an_earlier_version(file: Path, *more: str) -> None:
    """Make a closed file what an earlier version left: it did not record the move."""
    change(file, "DROP TABLE ledger_move", *more)


def count_rows(url: str) -> dict[str, int]:
    """Return the number of rows of every table of a ledger."""
    with closing(opening.open_repository(url)) as found:
        return {table.name: len(read_rows(found, table.name)) for table in METADATA.sorted_tables}


def read_all(url: str) -> dict[str, list[str]]:
    """Return the rows of every table of a ledger; `verify` finds no fault."""
    with closing(opening.open_repository(url)) as found:
        assert verify(found).faults == []
        names = [table.name for table in METADATA.sorted_tables]
        return {name: sorted(map(repr, read_rows(found, name))) for name in names}


def test_every_row_is_moved_and_the_run_goes_on_in_the_new_database(
    running: Service, file: Path, target: str
) -> None:
    rows = read_all(f"sqlite:///{file}")
    assert rows["webhook_event"], "what waits is delivered from the new database"
    done = move(target)
    assert done.exit_code == 0, done.output
    assert "moved 2 datasets with" in done.stdout
    assert read_all(target) == rows
    run = running.run  # type: ignore[attr-defined]
    with started(target) as service:
        caller = service.with_key(running.admin.key)
        assert caller.grant(run, 10, 10)[1]["steps_granted"] == 20
        plan = {"mechanism": RUN}
        found = caller.refusal("POST", "/v1/datasets/closed/reservations", plan)
        assert found == (409, "dataset-closed")
        assert caller.grant(run, 10, 0, "2")[1]["steps_granted"] == 10, "earlier answers moved too"


def test_a_server_that_still_runs_on_the_old_file_writes_nothing(
    running: Service, file: Path, target: str
) -> None:
    assert move(target).exit_code == 0
    run, key = running.run, running.admin.identifier  # type: ignore[attr-defined]
    status, problem = running.admin.grant(run, 10, 10)
    assert (status, problem["code"]) == (503, "database-schema")
    for method, path, body in (
        ("POST", "/v1/datasets/d/reservations", {"mechanism": RUN, "lease_seconds": 600}),
        ("POST", "/v1/keys", {"scopes": ["run"]}),
        ("DELETE", f"/v1/keys/{key}", None),
        ("PUT", "/v1/datasets/d/caps/teams/t", {"share": 0.1}),
        ("GET", "/readyz", None),
    ):
        assert running.admin.ask(method, path, body)[0] == 503, (method, path)


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
        others = [table.name for table in METADATA.sorted_tables if table.name != "entry"]
        renamed = [f"ALTER TABLE {name}_moved RENAME TO {name}" for name in others]
        close_as_an_earlier_version(file, *renamed)
    is_refused(move(target if by_an_earlier_version else other_target), "--unfinished")
    assert move(target, *(["--unfinished"] if by_an_earlier_version else [])).exit_code == 0
    assert len(read_all(target)["entry"]) > 5
    is_refused(move(other_target, "--unfinished"), "already")


def test_an_interrupted_move_goes_to_another_database_only_if_that_is_confirmed(
    running: Service, file: Path, target: str, other_target: str
) -> None:
    with cut_before_the_copy_is_committed():
        assert move(target).exit_code == 2
    assert move(other_target).exit_code == 2
    assert set(count_rows(other_target).values()) == {0}
    assert move(other_target, "--unfinished").exit_code == 0
    assert count_rows(other_target)["dataset"] == 2
    is_refused(move(target), "already")


def test_a_moved_ledger_is_moved_to_no_second_database(
    running: Service, file: Path, target: str, other_target: str
) -> None:
    """Both would grant the whole budget."""
    assert move(target).exit_code == 0
    for url, options in ((other_target, []), (other_target, ["--unfinished"]), (target, [])):
        is_refused(move(url, *options), "moved to")
    assert set(count_rows(other_target).values()) == {0}


def test_a_file_that_an_earlier_version_moved_is_moved_again_only_if_that_is_confirmed(
    running: Service, file: Path, target: str, other_target: str
) -> None:
    assert move(target).exit_code == 0
    close_as_an_earlier_version(file)
    is_refused(move(other_target), "earlier version")
    assert set(count_rows(other_target).values()) == {0}


def test_a_move_whose_end_was_not_recorded_is_verified_and_not_copied_again(
    running: Service, file: Path, target: str
) -> None:
    assert move(target).exit_code == 0
    rows = count_rows(target)
    change(file, "UPDATE ledger_move SET is_finished = 0")
    again = move(target)
    assert (again.exit_code, "moved 2 datasets" in again.stdout) == (0, True), again.output
    assert count_rows(target) == rows
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
    counts = [count_rows(url)["dataset"] for url in (target, other_target)]
    assert sorted(counts) == [0, 2]


def test_rows_that_a_server_writes_during_the_move_are_not_merged(
    running: Service, file: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server starts on the new database after it was found empty, and before the copy."""
    genuine = moving._lock_target

    def start_server_first(*arguments: Any) -> None:
        start_another(target)
        genuine(*arguments)

    # private: nothing public happens between the two steps of a move that this is about
    monkeypatch.setattr(moving, "_lock_target", start_server_first)
    is_refused(move(target), "not empty")
    assert_open(file)


def start_another(target: str) -> None:
    """Start a server on the target, which creates a key there."""
    with started(target) as service:
        service.caller(Scope.ADMIN)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("DELETE FROM dataset WHERE name = 'd'", ""),
        ("UPDATE webhook SET url = 'a' || char(0)", ""),
        ("DELETE FROM webhook", ""),
        ("UPDATE dataset SET epsilon = 30", "faults"),
    ],
)
def test_a_ledger_that_the_target_would_refuse_is_not_closed(
    running: Service, file: Path, target: str, statement: str, said: str
) -> None:
    change(file, statement)
    is_refused(move(target), said)
    assert_open(file)
    assert set(count_rows(target).values()) == {0}


def test_a_database_with_rows_is_refused_and_the_file_stays_open(
    running: Service, file: Path, target: str
) -> None:
    start_another(target)
    is_refused(move(target), "not empty")
    assert_open(file)


def test_a_wrong_address_is_named(file: Path, tmp_path: Path, target: str) -> None:
    is_refused(move(f"sqlite:///{tmp_path}/other.db"), "ACCOUNTANT_DATABASE_URL")
    is_refused(move(target), "no file")
