"""Servers that run while the database is upgraded, moved or replaced under them."""

from __future__ import annotations

import ast
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import text

from accountant_service.ledger import database as opening
from accountant_service.ledger import schema_revision
from accountant_service.ledger.api_keys import Scope
from accountant_service.ledger.repository import Repository, connect
from accountant_service.ledger.schema_revision import MIGRATIONS, REVISION, REVISIONS
from accountant_service.ledger.series import Template
from accountant_service.ledger.series_catalog import SeriesCatalog
from tests.support.ledger_scenarios import (
    ADD_OR_REMOVE,
    ON_POSTGRESQL,
    ON_SQLITE,
    SQL_MATTERS,
    Person,
    Scenario,
    Service,
    execute,
    refused,
)

CONTRACTED = (
    "UPDATE alembic_version SET version_num = '9999'",
    "UPDATE ledger_schema SET oldest_writer = '9999'",
)
EXPANDED = ("UPDATE alembic_version SET version_num = '9999'",)
CURRENT = (
    f"UPDATE alembic_version SET version_num = '{REVISION}'",
    "UPDATE ledger_schema SET oldest_writer = '0006'",
)
OLDER = ("UPDATE alembic_version SET version_num = '0001'",)
WRITES: dict[str, Callable[[Scenario, Person, str], object]] = {
    "create": lambda _, admin, __: admin.create("new"),
    "reserve": lambda _, admin, __: admin.reserve(),
    "grant": lambda _, admin, run: admin.grant(run, 1),
    "renew": lambda _, admin, run: admin.renew(run),
    "commit": lambda _, admin, run: admin.commit(run),
    "close": lambda _, admin, __: admin.close(),
    "cap": lambda scenario, _, __: scenario.cap(0.5, team="t"),
    "series": lambda scenario, admin, __: SeriesCatalog(scenario.repository).create(
        admin.record, "s", Template(1.0, 1e-9, ADD_OR_REMOVE, "record")
    ),
    "key": lambda scenario, _, __: scenario.person(Scope.RUN),
}


def rows(scenario: Scenario) -> list[str]:
    """Return every row that a write changes or adds."""
    tables = ("dataset", "reservation", "entry", "cap", "api_key", "idempotency_key", "audit_event")
    with Repository(scenario.repository.engine).reading() as reading:
        return [
            repr(row)
            for table in tables
            for row in reading.connection.execute(text(f"SELECT * FROM {table} ORDER BY 1, 2"))
        ]


def migrate(scenario: Scenario, *statements: str) -> None:
    """Do what a newer server's migration does; it does not check the revision."""
    execute(Repository(scenario.repository.engine), *statements)


@pytest.mark.spread(first=1)
@SQL_MATTERS
@pytest.mark.parametrize("statements", [CONTRACTED, OLDER, EXPANDED])
def test_each_write_checks_that_the_database_is_this_servers(
    scenario: Scenario, statements: tuple[str, ...]
) -> None:
    admin = scenario.admin
    admin.create()
    run = admin.reserve()
    migrate(scenario, *statements)
    for name, write in WRITES.items():
        before = rows(scenario)
        if statements is EXPANDED:
            write(scenario, admin, run)
            assert rows(scenario) != before, name
            continue
        with refused("database-schema", "restored" if statements is OLDER else "newer server"):
            write(scenario, admin, run)
        assert rows(scenario) == before, name
    migrate(scenario, *CURRENT)


@ON_SQLITE
def test_a_server_on_an_upgraded_database_is_not_ready(own_web: Service) -> None:
    admin = own_web.admin
    execute(own_web.repository, *CONTRACTED)
    for path in ("/readyz", "/v1/datasets"):
        status, problem = admin.get(path)
        assert (status, problem["code"]) == (503, "database-schema")
        assert "replace this server" in problem["detail"]
    execute(Repository(own_web.repository.engine), *CURRENT)


@ON_POSTGRESQL
def test_a_migration_waits_for_transactions_and_they_for_it(scenario: Scenario, url: str) -> None:
    """Whatever began before a migration ends before it; whatever begins meanwhile is refused."""
    scenario.admin.create()
    migrated, newer = threading.Event(), Repository(connect(url))
    refusals: list[BaseException] = []

    def contract() -> None:
        with newer.transaction() as transaction:
            schema_revision.block_transactions(transaction.connection)
            migrated.set()
            for each in CONTRACTED:
                transaction.connection.execute(text(each))
            assert writer.is_alive(), "the write waits"
            writer.join(0.5)

    def write() -> None:
        assert migrated.wait(60)
        try:
            scenario.admin.reserve()
        except BaseException as error:
            refusals.append(error)

    migration, writer = threading.Thread(target=contract), threading.Thread(target=write)
    with scenario.repository.transaction():
        migration.start()
        writer.start()
        assert not migrated.wait(0.3), "a transaction runs"
    migration.join()
    writer.join()
    newer.close()
    assert [getattr(each, "code", each) for each in refusals] == ["database-schema"]
    migrate(scenario, *CURRENT)


@SQL_MATTERS
@pytest.mark.parametrize(
    ("statement", "undo"),
    [
        (f"ALTER TABLE {table} RENAME {column}TO replaced", f"ALTER TABLE {after} RENAME {back}")
        for table, column, after, back in (
            ("reservation", "COLUMN ended_entry ", "reservation", "COLUMN replaced TO ended_entry"),
            ("idempotency_key", "", "replaced", "TO idempotency_key"),
            ("ledger_schema", "", "replaced", "TO ledger_schema"),
        )
    ],
)
def test_a_missing_column_or_table_is_not_a_database_that_is_away(
    scenario: Scenario, statement: str, undo: str
) -> None:
    scenario.admin.create()
    migrate(scenario, statement)
    with refused("database-schema", "ended_entry|idempotency_key|ledger_schema"):
        scenario.admin.reserve()
    migrate(scenario, undo)


@ON_POSTGRESQL
def test_connections_that_the_database_closed_are_replaced(scenario: Scenario, url: str) -> None:
    scenario.admin.create()
    run, other = scenario.admin.reserve(), Repository(connect(url))
    for turn in range(3):
        with scenario.repository.reading() as one, scenario.repository.reading() as two:
            pids = [
                each.connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
                for each in (one, two)
            ]
        execute(other, *(f"SELECT pg_terminate_backend({pid})" for pid in pids))
        assert scenario.admin.grant(run, 1, turn)["steps_granted"] == turn + 1
        assert scenario.dataset().version == 3 + turn
    other.close()


@pytest.mark.parametrize("revision", [each for each in REVISIONS if each >= "0007"])
def test_a_migration_expands_or_says_which_servers_must_stop(revision: str) -> None:
    """Before a server of the last revision may write to it, it must only have added."""
    (file,) = MIGRATIONS.glob(f"versions/{revision}_*.py")
    tree = ast.parse(file.read_text())
    stated = {
        target.id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    removes = _removes(file)
    assert stated["oldest_writer"] <= revision
    assert not removes or stated["oldest_writer"] >= stated["down_revision"], removes
    if revision == REVISION:
        assert stated["oldest_writer"] == schema_revision.OLDEST_WRITER


def _removes(file: Path) -> list[str]:
    """Return the lines of a migration that a server of the revision before would notice.

    It does not notice a new table, whatever that requires.
    """
    words = ("drop_column", "drop_table", "rename", "RENAME", "DROP", "nullable=False", "alter_")
    lines = re.sub(r"op\.create_table\((.|\n)*?\n    \)", "", file.read_text()).splitlines()
    return [line for line in lines if any(word in line for word in words)]


def test_a_contracted_database_is_not_opened_by_an_older_server(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.db"
    opening.open_repository(url).close()
    newer = Repository(connect(url))
    with newer.transaction() as transaction:
        transaction.connection.execute(text(EXPANDED[0]))
    opening.open_repository(url).close()
    with newer.transaction() as transaction:
        transaction.connection.execute(text(CONTRACTED[1]))
    newer.close()
    with pytest.raises(opening.NewerDatabaseError):
        opening.open_repository(url)


@ON_SQLITE
def test_a_budget_that_older_servers_cannot_read_ends_them(scenario: Scenario) -> None:
    """They go on beside this one until the first such dataset, and are then told to be replaced."""

    def oldest_writer() -> str:
        with scenario.repository.reading() as reading:
            return str(reading.connection.execute(schema_revision.SCHEMA.select()).scalar_one())

    execute(scenario.repository, "UPDATE ledger_schema SET oldest_writer = '0006'")
    scenario.admin.create("old", by="renyi")
    assert oldest_writer() == "0006"
    scenario.admin.create("new", by="reference", plan=None)
    assert oldest_writer() == "0008"
