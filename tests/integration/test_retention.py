"""Idempotency keys are forgotten after a while, and what protects a budget then."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import inspect, text

from accountant_service.api.ledger_views import encode_answer
from accountant_service.app import create_app
from accountant_service.guarantee import NeighbouringRelation
from accountant_service.ledger import database as opening
from accountant_service.ledger import idempotency_cleanup
from accountant_service.ledger.api_keys import Keys, Scope
from accountant_service.ledger.errors import DatabaseAwayError
from accountant_service.ledger.idempotency_cleanup import IdempotencyCleanup
from accountant_service.ledger.repository import KeyRecord, Repository, StoredAnswer, now
from accountant_service.ledger.rules import NewDataset
from accountant_service.ledger.service import Ledger, WriteRequest
from accountant_service.ledger.verification import verify
from accountant_service.mechanisms import DpSgd
from accountant_service.settings import Settings
from tests.support.databases import database
from tests.support.earlier_ledgers import open_unmigrated, read_rows

RUN = DpSgd(1.0, sample_rate=0.01, steps=60)
DAY = 86_400_000_000
ADD_OR_REMOVE = NeighbouringRelation.ADD_OR_REMOVE_ONE
KINDS = pytest.mark.parametrize("kind", ["sqlite", "postgresql"])


class Client:
    """A ledger and a key, whose writes may be repeated."""

    run: str

    def __init__(self, repository: Repository, key: KeyRecord | None = None) -> None:
        self.repository, self.ledger = repository, Ledger(repository, encode_answer)
        self.key: KeyRecord = key or Keys(repository).create([Scope.ADMIN])[1]

    def request(self, once: str = "") -> WriteRequest:
        return WriteRequest(self.key, once or uuid.uuid4().hex, "test", None)

    def dataset(self) -> None:
        new = NewDataset("d", 1000, 8.0, 1e-5, ADD_OR_REMOVE, "record")
        self.ledger.create_dataset(self.request("create"), new)

    def reserve(self, once: str) -> str:
        self.ledger.reserve(self.request(once), "d", RUN, 3600, "")
        with self.repository.reading() as reading:
            row = reading.connection.execute(
                text("SELECT answer FROM idempotency_key WHERE value = :once"), {"once": once}
            )
            answer: str = row.scalar_one()
        return answer.split('"id": "')[1][:32]

    def known(self) -> set[str]:
        """The idempotency keys that are there."""
        with self.repository.reading() as reading:
            return set(
                reading.connection.execute(text("SELECT value FROM idempotency_key")).scalars()
            )

    def age(self, days: float, *values: str) -> None:
        """Have it that these were used so many days ago."""
        with self.repository.transaction() as transaction:
            for value in values:
                transaction.connection.execute(
                    text("UPDATE idempotency_key SET created_at = :at WHERE value = :value"),
                    {"at": now() - int(days * DAY), "value": value},
                )


def test_old_idempotency_keys_are_deleted_in_small_batches(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency_cleanup, "_KEYS_PER_TRANSACTION", 2)
    client = Client(repository)
    client.dataset()
    for name in "abcde":
        client.reserve(name)
    client.age(31, "b", "c", "d")
    client.age(29.9, "a")
    client.age(40, "d")  # the oldest goes first
    house = IdempotencyCleanup(repository, 30)
    assert house.delete_expired()
    assert "d" not in client.known()
    assert client.known() > {"a", "e", "create"}
    assert not house.delete_expired()
    assert client.known() == {"a", "e", "create"}
    assert not house.delete_expired()
    assert verify(repository).faults == []


def test_a_repeat_within_the_retention_gets_the_first_answer(repository: Repository) -> None:
    client = Client(repository)
    client.dataset()
    run = client.reserve("once")
    client.age(29.9, "once")
    IdempotencyCleanup(repository, 30).delete_expired()
    assert client.reserve("once") == run


def test_a_repeat_after_the_retention_spends_nothing_twice(repository: Repository) -> None:
    client = Client(repository)
    client.dataset()
    run = client.reserve("reserve")

    def everything() -> list[str]:
        """Each write once more, as its client would; what became of it."""
        ledger, said = client.ledger, []
        for name, act in (
            ("create", lambda: client.dataset()),
            ("grant", lambda: ledger.grant(client.request("grant"), run, 20, 0)),
            ("commit", lambda: ledger.commit(client.request("commit"), run)),
            ("release", lambda: ledger.release(client.request("release"), other)),
        ):
            try:
                act()
                said.append(name)
            except Exception as error:
                said.append(f"{name}: {getattr(error, 'code', error)}")
        return said

    other = client.reserve("reserve another")
    assert everything() == ["create", "grant", "commit", "release"]
    spent = client.ledger.get_dataset(client.key, "d").balance.spent
    client.age(31, "create", "grant", "commit", "release", "reserve")
    IdempotencyCleanup(repository, 30).delete_expired()
    assert client.known() == {"reserve another"}
    assert everything() == [
        "create: name-taken", "grant: reservation-closed", "commit", "release",
    ]  # fmt: skip
    again = client.reserve("reserve")
    assert again != run
    assert client.ledger.get_dataset(client.key, "d").balance.spent == spent
    assert verify(repository).faults == []


def test_a_late_repeat_of_a_grant_is_stale(repository: Repository) -> None:
    client = Client(repository)
    client.dataset()
    run = client.reserve("reserve")
    client.ledger.grant(client.request("grant"), run, 20, 0)
    client.age(31, "grant")
    IdempotencyCleanup(repository, 30).delete_expired()
    with pytest.raises(Exception, match="20 steps are granted, not 0"):
        client.ledger.grant(client.request("grant"), run, 20, 0)


def test_two_servers_may_delete_old_keys_at_once(repository: Repository) -> None:
    client = Client(repository)
    client.dataset()
    names = [f"n{at}" for at in range(60)]
    with repository.transaction() as transaction:
        template = "INSERT INTO idempotency_key VALUES ('k', :value, 'f', 200, '{}', 0)"
        for name in names:
            transaction.connection.execute(text(template), {"value": name})
    start, found = threading.Barrier(4), []

    def forget() -> None:
        start.wait()
        for _ in range(20):
            with repository.transaction() as transaction:
                found.append(transaction.delete_answers(now() - 30 * DAY, 5))

    threads = [threading.Thread(target=forget) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(found) == 60
    assert client.known() == {"create"}


def test_the_server_deletes_old_keys_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idempotency_cleanup, "_START_DELAY_SECONDS", 0.05)
    app = create_app(Settings(database_url=f"sqlite:///{tmp_path}/ledger.db"))
    client = Client(app.state.repository)
    client.dataset()
    client.age(31, "create")
    with TestClient(app):
        ended = threading.Event()
        for _ in range(200):
            if not client.known():
                break
            ended.wait(0.05)
    assert client.known() == set()


def test_an_outage_does_not_end_the_deletion_of_old_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_START_DELAY_SECONDS", "_IDLE_SECONDS"):
        monkeypatch.setattr(idempotency_cleanup, name, 0.05)
    app = create_app(Settings(database_url=f"sqlite:///{tmp_path}/ledger.db"))
    client = Client(app.state.repository)
    client.dataset()
    client.age(31, "create")
    away, ended = threading.Event(), threading.Event()
    genuine = app.state.repository.transaction

    def failing() -> Any:
        if not away.is_set():
            away.set()
            raise DatabaseAwayError("the database does not answer")
        return genuine()

    monkeypatch.setattr(app.state.repository, "transaction", failing)
    with TestClient(app):
        for _ in range(200):
            if not client.known():
                break
            ended.wait(0.05)
    assert away.is_set()
    assert client.known() == set()


# --- the database of the version before


def made_by_a_version_before(url: str, revision: str) -> Client:
    """A ledger at an earlier revision, with a run and the answer to a grant."""
    repository = open_unmigrated(url, revision)
    with repository.reading() as reading:
        found = reading.connection.execute(text("SELECT id FROM api_key ORDER BY id")).scalars()
        identifier = str(found.first())
    scopes = frozenset({Scope.ADMIN.value})
    key = KeyRecord(identifier, "", b"", scopes, None, 0, None, None, None)
    client = Client(repository, key)
    with client.repository.transaction() as transaction:
        row = transaction.connection.execute(
            text("SELECT * FROM reservation WHERE steps_granted > 0 ORDER BY id")
        ).first()
        assert row is not None
        grant = StoredAnswer(client.request("grant").fingerprint, 200, f'{{"id": "{row.id}"}}')
        transaction.store_answer(client.key.identifier, "grant", grant)
    client.run = row.id
    return client


def index_names(repository: Repository) -> set[str | None]:
    with repository.reading() as reading:
        return {each["name"] for each in inspect(reading.connection).get_indexes("idempotency_key")}


@KINDS
@pytest.mark.parametrize("revision", ["0001", "0002"])
def test_a_ledger_of_a_version_before_goes_on(kind: str, revision: str, tmp_path: Path) -> None:
    with database(kind, tmp_path) as url:
        before = made_by_a_version_before(url, revision)
        index = "ix_idempotency_key_created_at"
        assert index_names(before.repository) == ({index} if revision >= "0002" else set())
        tables = ("entry", "api_key", "idempotency_key", "secret")
        rows = [read_rows(before.repository, table) for table in tables]
        with before.repository.transaction() as transaction:
            transaction.connection.execute(text("SELECT 1"))
            assert opening.upgrade(transaction.connection) == (revision, "0006")
            if kind == "postgresql":  # an index of many rows may take longer than a statement may
                limit = transaction.connection.execute(text("SHOW statement_timeout")).scalar()
                assert limit == "0"
        assert index_names(before.repository) == {index}
        for was, table in zip(rows, tables, strict=True):
            kept = [
                {name: row[name] for name in old}
                for old, row in zip(was, read_rows(before.repository, table), strict=True)
            ]
            assert kept == was
        before.repository.close()
        after = opening.open_repository(url)
        assert verify(after).faults == []
        client = Client(after, before.key)
        status = client.ledger.grant(client.request("grant"), before.run, 20, 0)
        assert before.run in status.text, "the first answer, again"
        assert verify(after).faults == []
        client.age(31, "grant")
        assert not IdempotencyCleanup(after, 30).delete_expired()
        assert "grant" not in client.known()
        after.close()
