"""A database that cannot be written, for whatever reason: nothing is granted, nothing fails."""

from __future__ import annotations

import resource
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import event, text

from accountant_service.ledger import repository as storage
from accountant_service.ledger.api_keys import Scope
from accountant_service.ledger.database import open_repository
from accountant_service.ledger.errors import DatabaseAwayError
from accountant_service.ledger.repository import Repository
from accountant_service.ledger.verification import verify
from accountant_service.operations.settings import Settings
from accountant_service.server.app import create_app
from tests.support.databases import PrivateServer, database, private_server

RUN = {"kind": "dp_sgd", "noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 60}
BUDGET = {"epsilon": 3.0, "delta": 1e-5}
Outage = Callable[[FastAPI], AbstractContextManager[None]]


class Caller:
    """Someone with an administrator's key."""

    def __init__(self, app: FastAPI, http: TestClient) -> None:
        self.token, self.key = app.state.keys.create([Scope.ADMIN])
        self.http = http

    def call(self, method: str, path: str, body: Any = None, once: str = "") -> Any:
        headers = {"Authorization": f"Bearer {self.token}", "Idempotency-Key": once or path}
        return self.http.request(method, path, json=body, headers=headers)

    def post(self, path: str, body: Any) -> Any:
        answer = self.call("POST", path, body, uuid.uuid4().hex)
        assert answer.status_code < 300, answer.text
        return answer.json()


# --- ways in which a database cannot be written


@contextmanager
def pragma(app: FastAPI, statement: str, undone: str) -> Iterator[None]:
    """A setting of SQLite that holds on every connection."""
    engine, wanted = app.state.repository.engine, [statement]

    def prepare(connection: Any, *_: Any) -> None:
        connection.execute(wanted[0])

    event.listen(engine, "checkout", prepare)
    yield
    wanted[0] = undone


def read_only(app: FastAPI) -> AbstractContextManager[None]:
    return pragma(app, "PRAGMA query_only = ON", "PRAGMA query_only = OFF")


@contextmanager
def failing_disk(app: FastAPI) -> Iterator[None]:
    """The write-ahead log may not grow: the kernel refuses it as it does on a full quota."""
    with app.state.repository.engine.connect() as connection:
        connection.exec_driver_sql("ROLLBACK")
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.exec_driver_sql("BEGIN")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def standby(server: PrivateServer) -> Outage:
    @contextmanager
    def outage(_: FastAPI) -> Iterator[None]:
        server.demote()
        yield
        server.promote()

    return outage


def read_only_by_default(server: PrivateServer) -> Outage:
    """The server stays, and with it every connection."""
    reload = "SELECT pg_reload_conf()"

    @contextmanager
    def outage(_: FastAPI) -> Iterator[None]:
        server.execute("ALTER SYSTEM SET default_transaction_read_only = on", reload)
        time.sleep(0.2)
        yield
        allowed = "SET default_transaction_read_only = off"
        server.execute(allowed, "ALTER SYSTEM RESET default_transaction_read_only", reload)
        time.sleep(0.2)

    return outage


def without_permission(server: PrivateServer) -> Outage:
    @contextmanager
    def outage(_: FastAPI) -> Iterator[None]:
        server.execute("REVOKE INSERT, UPDATE ON ALL TABLES IN SCHEMA public FROM clerk")
        yield
        server.execute("GRANT INSERT, UPDATE ON ALL TABLES IN SCHEMA public TO clerk")

    return outage


@contextmanager
def a_situation(name: str, folder: Path) -> Iterator[tuple[str, Outage]]:
    """The URL of a database, and how it comes that nothing can be written."""
    if name in (_SQLITE := {"read-only": read_only, "failing disk": failing_disk}):
        yield f"sqlite:///{folder}/ledger.db", _SQLITE[name]
        return
    with private_server() as server:
        if name == "no permission":
            open_repository(server.url).close()  # the tables are another's
            server.execute(
                "CREATE ROLE clerk LOGIN",
                "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO clerk",
            )
            yield server.url.replace("postgres@", "clerk@"), without_permission(server)
        else:
            made = {"standby": standby, "read-only by default": read_only_by_default}[name]
            yield server.url, made(server)


def every_write(runs: list[str], key: str) -> list[tuple[str, str, Any]]:
    """One of each kind of write."""
    plan = {"mechanism": RUN}
    grant, renew, commit, release = (f"/v1/reservations/{run}" for run in runs)
    return [
        ("POST", "/v1/datasets", {"name": "new", "size": 9, "budget": BUDGET}),
        ("POST", "/v1/datasets/d/reservations", plan),
        ("POST", grant + "/grants", {"steps": 5, "sequence": 0}),
        ("POST", renew + "/renew", {"lease_seconds": 60.0}),
        ("POST", commit + "/commit", {}),
        ("POST", release + "/release", {}),
        ("PUT", "/v1/datasets/d/caps/teams/a", {"share": 0.5}),
        ("POST", "/v1/keys", {"scopes": ["run"]}),
        ("DELETE", f"/v1/keys/{key}", None),
    ]


@pytest.mark.spread(second=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "situation",
    ["read-only", "failing disk", "standby", "read-only by default", "no permission"],
)
def test_every_write_waits_for_a_database_that_takes_none(situation: str, tmp_path: Path) -> None:
    with a_situation(situation, tmp_path) as (url, outage):
        app = create_app(Settings(database_url=url))
        with TestClient(app, raise_server_exceptions=False) as http:
            admin = Caller(app, http)
            admin.post("/v1/datasets", {"name": "d", "size": 9, "budget": BUDGET})
            plan = {"mechanism": RUN}
            runs = [admin.post("/v1/datasets/d/reservations", plan)["id"] for _ in range(4)]
            _, other = app.state.keys.create([Scope.RUN])
            writes = every_write(runs, other.identifier)
            assert http.get("/readyz").status_code == 200
            before = admin.call("GET", "/v1/datasets/d").json()
            with app.state.repository.transaction() as transaction:  # its use is to be noted anew
                transaction.connection.execute(text("UPDATE api_key SET last_used_at = NULL"))
            with outage(app):
                for method, path, body in writes:
                    answer = admin.call(method, path, body)
                    found = (path, answer.status_code, answer.json()["code"])
                    assert found == (path, 503, "database-read-only"), answer.text
                    assert int(answer.headers["Retry-After"]) >= 1
                ready = http.get("/readyz")
                assert (ready.status_code, ready.json()["code"]) == (503, "database-read-only")
                assert int(ready.headers["Retry-After"]) >= 1
                assert "accountant_ledger_up 0.0" in http.get("/metrics").text
                seen = admin.call("GET", "/v1/datasets/d")
                assert (seen.status_code, seen.json()) == (200, before), "reading goes on"
            assert http.get("/readyz").status_code == 200
            assert "accountant_ledger_up 1.0" in http.get("/metrics").text
            for method, path, body in writes:
                answer = admin.call(method, path, body)
                assert answer.status_code in (200, 201), answer.text
            assert admin.call("GET", "/v1/datasets/d").json()["version"] == 10
            assert verify(app.state.repository).faults == []


def test_a_full_disk_is_waited_for(tmp_path: Path) -> None:
    """Writes succeed while half-empty pages have room; then they fail, and `/readyz` says so."""
    app = create_app(Settings(database_url=f"sqlite:///{tmp_path}/ledger.db"))
    with TestClient(app, raise_server_exceptions=False) as http:
        admin = Caller(app, http)
        with app.state.repository.reading() as reading:
            pages = reading.connection.exec_driver_sql("PRAGMA page_count").scalar()
        limit = "PRAGMA max_page_count = "
        with pragma(app, f"{limit}{pages}", f"{limit}1000000"):
            answers = []
            while not answers or answers[-1].status_code == 201:
                body = {"name": f"d{len(answers)}", "size": 9, "budget": BUDGET}
                answers.append(admin.call("POST", "/v1/datasets", body, str(len(answers))))
            answer = answers[-1]
            assert (answer.status_code, answer.json()["code"]) == (503, "database-read-only")
            assert "its disk is full" in answer.json()["detail"]
            assert http.get("/readyz").status_code == 503
        again = admin.call("POST", "/v1/datasets", body, str(len(answers) - 1))
        assert (again.status_code, http.get("/readyz").status_code) == (201, 200)
        assert verify(app.state.repository).faults == []


@pytest.mark.slow
def test_being_ready_is_found_out_without_leaving_anything(tmp_path: Path) -> None:
    app = create_app(Settings(database_url=f"sqlite:///{tmp_path}/ledger.db"))
    with TestClient(app) as http:
        admin = Caller(app, http)
        admin.post("/v1/datasets", {"name": "d", "size": 9, "budget": BUDGET})
        with closing(sqlite3.connect(tmp_path / "ledger.db")) as connection:
            before = (
                list(connection.iterdump()),
                connection.execute("PRAGMA data_version").fetchone(),
            )
            for _ in range(20):
                assert http.get("/readyz").status_code == 200
            after = (
                list(connection.iterdump()),
                connection.execute("PRAGMA data_version").fetchone(),
            )
        assert before == after


def started_before_it_can_write(url: str, token: str) -> FastAPI:
    """A service of which only reading works, and `/readyz` says so."""
    app = create_app(Settings(database_url=url))
    with TestClient(app, raise_server_exceptions=False) as http:
        headers = {"Authorization": f"Bearer {token}"}
        assert http.get("/v1/datasets", headers=headers).status_code == 200
        assert http.get("/readyz").json()["code"] == "database-read-only"
    return app


def new_ledger(url: str) -> str:
    """A key of a ledger that was made just now."""
    app = create_app(Settings(database_url=url))
    with TestClient(app) as http:
        return Caller(app, http).token


@pytest.mark.slow
def test_a_service_may_start_on_a_read_only_file(tmp_path: Path) -> None:
    token = new_ledger(f"sqlite:///{tmp_path}/ledger.db")
    started_before_it_can_write(f"sqlite:///file:{tmp_path}/ledger.db?mode=ro&uri=true", token)


@pytest.mark.slow
def test_a_service_may_start_on_a_standby_that_is_promoted_later() -> None:
    with private_server() as server:
        token = new_ledger(server.url)
        server.demote()
        app = started_before_it_can_write(server.url, token)
        server.promote()
        with TestClient(app) as http:
            assert http.get("/readyz").status_code == 200


# --- siblings: what else a database says when it cannot do what it was asked


@pytest.mark.slow
def test_a_deadlock_is_waited_for(tmp_path: Path) -> None:
    with database("postgresql", tmp_path) as url:
        repository = Repository(storage.connect(url))
        with repository.transaction() as transaction:
            transaction.connection.execute(text("CREATE TABLE a AS SELECT 1 AS x"))
            transaction.connection.execute(text("CREATE TABLE b AS SELECT 1 AS x"))
        both, found = threading.Barrier(2), []

        def lock(*tables: str) -> None:
            try:
                with repository.transaction() as transaction:
                    for table in tables:
                        transaction.connection.execute(text(f"LOCK TABLE {table}"))
                        if table == tables[0]:
                            both.wait()
            except DatabaseAwayError as error:
                found.append(error)

        threads = [threading.Thread(target=lock, args=each) for each in ("ab", "ba")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 1
        assert "deadlock" in str(found[0].__cause__)
        repository.close()


@pytest.mark.slow
def test_a_serialization_failure_is_waited_for(tmp_path: Path) -> None:
    with database("postgresql", tmp_path) as url:
        repository = Repository(storage.connect(url))
        with repository.transaction() as transaction:
            transaction.connection.execute(text("CREATE TABLE a AS SELECT 1 AS x"))
        change = text("UPDATE a SET x = x + 1")

        def overtaken() -> None:
            with repository.snapshot() as late:
                late.connection.execute(text("SELECT x FROM a"))
                with repository.transaction() as early:
                    early.connection.execute(change)
                late.connection.execute(change)

        with pytest.raises(DatabaseAwayError) as found:
            overtaken()
        assert "serialize" in str(found.value.__cause__)
        repository.close()


@pytest.mark.slow
def test_too_many_connections_are_waited_for() -> None:
    with private_server() as server:
        open_repository(server.url).close()
        server.execute("CREATE ROLE few LOGIN SUPERUSER")
        app = create_app(Settings(database_url=server.url.replace("postgres@", "few@")))
        with TestClient(app, raise_server_exceptions=False) as http:
            app.state.repository.close()
            server.execute("ALTER ROLE few NOSUPERUSER CONNECTION LIMIT 0")
            answer = http.get("/readyz")
            assert (answer.status_code, answer.json()["code"]) == (503, "database-away")
            assert "too many connections" in why(app)
            server.execute("ALTER ROLE few SUPERUSER CONNECTION LIMIT -1")
            assert http.get("/readyz").status_code == 200


@pytest.mark.slow
def test_a_server_that_starts_or_stops_is_waited_for() -> None:
    with private_server() as server:
        app = create_app(Settings(database_url=server.url))
        with TestClient(app, raise_server_exceptions=False) as http:
            admin = Caller(app, http)
            body = {"name": "d", "size": 9, "budget": BUDGET}
            starting = partial(server.demote, "-c hot_standby=off")  # recovery without an end
            for stop, said in ((server.crash, "refused"), (starting, "not accepting connections")):
                stop()
                assert said in why(app)
                for answer in (http.get("/readyz"), admin.call("POST", "/v1/datasets", body)):
                    assert (answer.status_code, answer.json()["code"]) == (503, "database-away")
                    assert int(answer.headers["Retry-After"]) >= 1
                if said == "refused":
                    server.start()
                    assert http.get("/readyz").status_code == 200


def why(app: FastAPI) -> str:
    """Return the database's own error message."""
    with pytest.raises(DatabaseAwayError) as away:
        app.state.repository.ping()
    return str(away.value.__cause__)
