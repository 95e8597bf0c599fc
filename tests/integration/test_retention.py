"""Idempotency keys are forgotten after a while, and what protects a budget then."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import inspect, text

from accountant_service.ledger import database as opening
from accountant_service.ledger import idempotency_cleanup
from accountant_service.ledger.errors import DatabaseAwayError
from accountant_service.ledger.idempotency_cleanup import IdempotencyCleanup
from accountant_service.ledger.repository import Repository, now
from accountant_service.operations.settings import Settings
from accountant_service.server.app import create_app
from tests.support.databases import database
from tests.support.earlier_ledgers import open_unmigrated
from tests.support.ledger_scenarios import (
    SQL_MATTERS,
    Scenario,
    execute,
    race,
    refused,
)

DAY = 86_400_000_000


def known(repository: Repository) -> set[str]:
    """The idempotency keys that are there."""
    with repository.reading() as reading:
        found = reading.connection.execute(text("SELECT value FROM idempotency_key"))
        return set(found.scalars())


def age(repository: Repository, days: float, *values: str) -> None:
    """Have it that these were used so many days ago."""
    at, names = now() - int(days * DAY), ", ".join(f"'{value}'" for value in values)
    update = f"UPDATE idempotency_key SET created_at = {at} WHERE value IN ({names})"
    execute(repository, update)


def add_old(repository: Repository, count: int) -> None:
    """Add keys that were used long ago, each later than the one before."""
    execute(repository, *(
        f"INSERT INTO idempotency_key VALUES ('k', 'old {at}', 'f', 200, '{{}}', {at})"
        for at in range(count)
    ))  # fmt: skip


@SQL_MATTERS
def test_old_idempotency_keys_are_deleted_in_small_batches(scenario: Scenario) -> None:
    repository, house = scenario.repository, IdempotencyCleanup(scenario.repository, 30)
    scenario.admin.create(once="create")
    for name in "abc":
        scenario.admin.reserve(once=name)
    age(repository, 31, "b")
    age(repository, 29.9, "a")
    add_old(repository, 202)
    assert house.delete_expired()
    assert known(repository) == {"a", "b", "c", "create", "old 200", "old 201"}, "the oldest first"
    for _ in range(2):
        assert not house.delete_expired()
        assert known(repository) == {"a", "c", "create"}


def test_a_repeat_within_the_retention_gets_the_first_answer(scenario: Scenario) -> None:
    scenario.admin.create()
    run = scenario.admin.reserve(once="once")
    age(scenario.repository, 29.9, "once")
    IdempotencyCleanup(scenario.repository, 30).delete_expired()
    assert scenario.admin.reserve(once="once") == run


def test_a_repeat_after_the_retention_spends_nothing_twice(scenario: Scenario) -> None:
    admin = scenario.admin
    admin.create(once="create")
    run, other = (admin.reserve(once=once) for once in ("reserve", "another"))
    late = admin.reserve()
    admin.grant(late, 2, once="late")
    admin.grant(run, 2, once="grant")
    admin.commit(run, once="commit")
    admin.release(other, once="release")
    spent = admin.look_at_dataset().balance.spent
    age(scenario.repository, 31, "create", "reserve", "late", "grant", "commit", "release")
    IdempotencyCleanup(scenario.repository, 30).delete_expired()
    assert known(scenario.repository) > {"another"}
    assert not known(scenario.repository) & {"create", "reserve", "late", "grant", "release"}
    with refused("name-taken"):
        admin.create(once="create")
    with refused("reservation-closed"):
        admin.grant(run, 2, once="grant")
    with refused("stale-sequence", "2 steps are granted, not 0"):
        admin.grant(late, 2, once="late")
    admin.commit(run, once="commit")
    admin.release(other, once="release")
    assert admin.reserve(once="reserve") != run
    assert admin.look_at_dataset().balance.spent == spent


@SQL_MATTERS
def test_two_servers_may_delete_old_keys_at_once(scenario: Scenario) -> None:
    scenario.admin.create(once="create")
    add_old(scenario.repository, 60)

    def forget() -> int:
        found = 0
        for _ in range(20):
            with scenario.repository.transaction() as transaction:
                found += transaction.delete_answers(now() - 30 * DAY, 5)
        return found

    assert sum(race(*[forget] * 4)) == 60
    assert known(scenario.repository) == {"create"}


def test_the_server_deletes_old_keys_by_itself_and_goes_on_after_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # private: no setting changes the hour between two deletions
    for name in ("_START_DELAY_SECONDS", "_IDLE_SECONDS"):
        monkeypatch.setattr(idempotency_cleanup, name, 0.05)
    app = create_app(Settings(database_url=f"sqlite:///{tmp_path}/ledger.db"))
    repository = app.state.repository
    add_old(repository, 1)
    away = threading.Event()
    genuine = repository.transaction

    def failing() -> Any:
        if not away.is_set():
            away.set()
            raise DatabaseAwayError("the database does not answer")
        return genuine()

    monkeypatch.setattr(repository, "transaction", failing)
    with TestClient(app):
        for _ in range(400):
            if not known(repository):
                break
            threading.Event().wait(0.05)
    assert away.is_set()
    assert known(repository) == set()


def index_names(repository: Repository) -> set[str | None]:
    with repository.reading() as reading:
        return {each["name"] for each in inspect(reading.connection).get_indexes("idempotency_key")}


@SQL_MATTERS
def test_a_migrated_ledger_deletes_keys_by_an_index(kind: str, tmp_path: Path) -> None:
    """Its earlier answers are repeated until then; `contract` shows that its rows are kept."""
    with database(kind, tmp_path) as url, closing(open_unmigrated(url, "0001")) as before:
        assert index_names(before) == set()
        add_old(before, 1)
        with before.transaction() as transaction:
            transaction.connection.execute(text("SELECT 1"))
            opening.upgrade(transaction.connection)
            if kind == "postgresql":  # an index of many rows may take longer than a statement may
                limit = transaction.connection.execute(text("SHOW statement_timeout")).scalar()
                assert limit == "0"
        assert index_names(before) == {"ix_idempotency_key_created_at"}
        with before.reading() as reading:
            answer = reading.find_answer("k", "old 0")
        assert answer is not None
        assert (answer.status, answer.text) == (200, "{}")
        IdempotencyCleanup(before, 30).delete_expired()
        assert "old 0" not in known(before)
