"""A closed dataset takes no further reservation; what was reserved before may end, and is kept."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import text
from typer.testing import CliRunner

from accountant_service import cli
from accountant_service.api.ledger_views import encode_answer
from accountant_service.app import create_app
from accountant_service.errors import CodedError
from accountant_service.guarantee import NeighbouringRelation
from accountant_service.ledger import certificate, hash_chain
from accountant_service.ledger import database as opening
from accountant_service.ledger.api_keys import Keys, Scope
from accountant_service.ledger.errors import (
    DatabaseAwayError,
    DatasetClosedError,
    ForbiddenError,
)
from accountant_service.ledger.repository import KeyRecord, Repository, Transaction
from accountant_service.ledger.rules import NewDataset, State
from accountant_service.ledger.service import Ledger, WriteRequest
from accountant_service.ledger.verification import verify
from accountant_service.mechanisms import DpSgd
from accountant_service.settings import Settings
from tests.support.databases import database
from training_client.client import AccountingService
from training_client.errors import ServiceRefusedError

# without sampling, for which charges are decided fast
RUN = DpSgd(20.0, sample_rate=1.0, steps=10, sampling="none")
PLAN = {"kind": "dp_sgd", "noise_multiplier": 20.0, "sample_rate": 1.0, "steps": 10,
        "sampling": "none"}  # fmt: skip
WRITERS = 8
Json = dict[str, Any]


def request(key: KeyRecord, idempotency: str | None = None) -> WriteRequest:
    return WriteRequest(key, idempotency or uuid.uuid4().hex, "test", None)


class Bench:
    """A dataset `d` and a key that may do everything with it."""

    def __init__(self, repository: Repository) -> None:
        self.repository, self.ledger = repository, Ledger(repository, encode_answer)
        self.keys = Keys(repository)
        self.key = self.keys.create([Scope.OWNER, Scope.RUN])[1]
        relation = NeighbouringRelation.ADD_OR_REMOVE_ONE
        new = NewDataset("d", 1000, 3.0, 1e-5, relation, "record", RUN, "renyi")
        self.ledger.create_dataset(request(self.key), new)

    def reserve(self, idempotency: str | None = None) -> str:
        found = self.ledger.reserve(request(self.key, idempotency), "d", RUN, 3600, "")
        return str(json.loads(found.text)["id"])

    def close(self, idempotency: str | None = None) -> Json:
        answer = self.ledger.close_dataset(request(self.key, idempotency), "d")
        found: Json = json.loads(answer.text)
        return found


def test_a_closed_dataset_takes_no_run_and_open_runs_end(repository: Repository) -> None:
    bench = Bench(repository)
    ledger, key = bench.ledger, bench.key
    going, unused = bench.reserve("first"), bench.reserve()
    ledger.grant(request(key), going, 4, 0)
    closed = bench.close("close")
    assert (closed["state"], closed["closed_at"] > 0) == ("closed", True)
    with pytest.raises(DatasetClosedError, match="takes no further reservation"):
        bench.reserve()
    assert bench.reserve("first") == going, "the answer of an earlier call is repeated"
    assert bench.close("close") == closed
    version = bench.close()["version"]
    assert version == closed["version"], "closing twice changes nothing"
    ledger.grant(request(key), going, 3, 4)
    ledger.renew(request(key), going, 7200)
    ledger.commit(request(key), going)
    ledger.release(request(key), unused)
    dataset = ledger.get_dataset(key, "d")
    assert dataset.balance.spent[0] > 0
    assert ledger.get_reservation(key, going)[1].steps_granted == 7
    assert dataset.balance.held[0] == 0
    assert dataset.closed_at == round(1e6 * closed["closed_at"])
    found = certificate.issue(*ledger.read_ended_run(key, going), 10**15)
    assert found["dates"]["dataset_closed"] == certificate.format_time(dataset.closed_at)
    assert certificate.check(found)[0] == []
    assert ledger.find_last_run(key, "d")[1] is not None
    assert verify(repository).faults == []


def test_who_may_create_a_budget_may_close_it(repository: Repository) -> None:
    bench = Bench(repository)
    for scopes, datasets in (([Scope.RUN], None), ([Scope.MONITOR], None), ([Scope.OWNER], ("d",))):
        other = bench.keys.create(scopes, datasets=datasets)[1]
        for name in ("d", "missing"):
            with pytest.raises(ForbiddenError):
                bench.ledger.close_dataset(request(other), name)
    admin = bench.keys.create([Scope.ADMIN])[1]
    bench.ledger.close_dataset(request(admin), "d")
    with repository.reading() as reading:
        last = reading.list_audit_events()[-1]
    assert (last["action"], last["subject"], last["key"]) == (
        "dataset-closed", "d", admin.identifier,
    )  # fmt: skip


def insist(call: Callable[[], Any]) -> Any:
    """Return what a call returns; repeat it while a slow machine's database answers too late."""
    while True:
        with suppress(DatabaseAwayError):
            return call()


def race(bench: Bench) -> tuple[list[str], int]:
    """Reserve from many threads while one closes; return who got a run, and the closing entry."""
    granted: list[str] = []
    barrier = threading.Barrier(WRITERS + 1)
    closing: list[int] = []

    def reserve() -> None:
        barrier.wait()
        for _ in range(4):
            try:
                granted.append(insist(bench.reserve))
            except DatasetClosedError:
                return

    def close() -> None:
        barrier.wait()
        closing.append(insist(bench.close)["version"])

    threads = [threading.Thread(target=reserve) for _ in range(WRITERS)]
    threads.append(threading.Thread(target=close))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return granted, closing[0]


def test_of_racing_writers_none_reserves_after_the_closing(repository: Repository) -> None:
    bench = Bench(repository)
    granted, closing = race(bench)
    with pytest.raises(DatasetClosedError):
        bench.reserve()
    with repository.reading() as reading:
        dataset = reading.find_dataset("d")
        assert dataset is not None
        stored = [json.loads(row.body) for row in reading.list_entries(dataset, 0)]
        runs = reading.list_reservations(dataset)
    assert {run.identifier for run in runs} == set(granted), "what was acknowledged is kept"
    assert [entry["kind"] for entry in stored[closing - 1 :]] == ["close"]
    assert verify(repository).faults == []


def test_without_the_lock_a_reservation_slips_in_and_verify_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant reads the state of the dataset before the other transaction closes it."""
    with database("postgresql", tmp_path) as url:
        repository = opening.open_repository(url)
        bench = Bench(repository)
        genuine = Transaction.find_dataset

        def find_stale(self: Transaction, name: str, *, lock: bool = False) -> Any:
            found = genuine(self, name, lock=lock)
            return found if found is None else replace(found, closed_at=None)

        monkeypatch.setattr(Transaction, "find_dataset", find_stale)
        bench.close()
        bench.reserve()
        monkeypatch.undo()
        faults = verify(repository).faults
        repository.close()
    assert any("breaks a rule" in fault and "was closed" in fault for fault in faults)


@pytest.mark.parametrize(
    ("statements", "fault"),
    [
        (["UPDATE dataset SET closed_at = NULL"], "closed_at is None, but recorded as"),
        (["UPDATE dataset SET closed_at = closed_at + 1"], "but recorded as"),
    ],
)
def test_verify_finds_a_dataset_that_was_opened_again(
    statements: list[str], fault: str, tmp_path: Path
) -> None:
    repository = opening.open_repository(f"sqlite:///{tmp_path}/ledger.db")
    Bench(repository).close()
    with repository.transaction() as transaction:
        for statement in statements:
            transaction.connection.execute(text(statement))
    assert any(fault in found for found in verify(repository).faults)
    repository.close()


def test_verify_finds_a_second_closing_with_a_matching_hash(tmp_path: Path) -> None:
    repository = opening.open_repository(f"sqlite:///{tmp_path}/ledger.db")
    Bench(repository).close()
    with repository.transaction() as transaction:
        dataset = transaction.find_dataset("d")
        assert dataset is not None
        body = transaction.list_entries(dataset, 1)[0].body
        forged = hash_chain.encode_entry(json.loads(body) | {"number": 3})
        head = hash_chain.hash_entry(dataset.head, forged)
        transaction.connection.execute(
            text("INSERT INTO entry VALUES (:dataset, 3, :body, :hash)"),
            {"dataset": dataset.identifier, "body": forged, "hash": head},
        )
        transaction.connection.execute(
            text("UPDATE dataset SET version = 3, head = :head"), {"head": head}
        )
    assert verify(repository).faults == [
        "dataset 'd': entry 3: it breaks a rule: the dataset was closed before"
    ]
    repository.close()


# --- HTTP and commands


class Service:
    """A service over HTTP with a dataset `d`, and the typed client of it."""

    def __init__(self, http: TestClient) -> None:
        self.http = http
        self.token = http.app.state.keys.create([Scope.ADMIN])[0]  # type: ignore[attr-defined]
        budget = {"epsilon": 3.0, "delta": 1e-5}
        body = {"name": "d", "size": 1000, "budget": budget, "filter": "renyi"}
        assert self.ask("POST", "/v1/datasets", body)[0] == 201
        transport = httpx.MockTransport(self._forward)
        self.client = AccountingService("http://test", api_key=self.token, transport=transport)

    def _forward(self, sent: httpx.Request) -> httpx.Response:
        answer = self.http.request(
            sent.method, sent.url.path, content=sent.content, headers=sent.headers
        )
        return httpx.Response(answer.status_code, content=answer.content)

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self.token}", "Idempotency-Key": uuid.uuid4().hex}
        found = self.http.request(method, path, json=body, headers=headers)
        return found.status_code, found.json() if "json" in found.headers[
            "content-type"
        ] else found.text


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with TestClient(create_app(Settings(database_url=f"sqlite:///{tmp_path}/web.db"))) as http:
        yield Service(http)


@pytest.mark.slow
def test_closing_over_http_and_by_the_client(service: Service) -> None:
    run = service.client.reserve("d", PLAN)
    assert service.ask("GET", "/v1/datasets/d")[1]["state"] == "open"
    assert 'accountant_budget_closed{dataset="d"} 0.0' in service.ask("GET", "/metrics")[1]
    assert service.client.close_dataset("d")["state"] == "closed"
    assert 'accountant_budget_closed{dataset="d"} 1.0' in service.ask("GET", "/metrics")[1]
    for path, body in (
        ("reservations", {"mechanism": PLAN}),
        ("quotes", {"mechanism": PLAN}),
        ("quotes/batch", {"mechanisms": [PLAN, PLAN]}),
    ):
        status, problem = service.ask("POST", f"/v1/datasets/d/{path}", body)
        assert (status, problem["code"]) == (409, "dataset-closed"), path
    with pytest.raises(ServiceRefusedError) as refused:
        service.client.reserve("d", PLAN)
    assert refused.value.code == "dataset-closed"
    run = service.client.commit(service.client.grant(run, 10))
    found = service.client.certificate(run)
    assert found["dates"]["dataset_closed"] is not None
    facts = service.ask("GET", f"/v1/reservations/{run.identifier}/report")[1]
    assert facts["dataset"]["closed"] == found["dates"]["dataset_closed"]
    assert service.ask("GET", "/v1/datasets/d/report")[1]["dataset"]["closed"] is not None
    html = service.ask("GET", "/v1/datasets/d/report?format=html")[1]
    assert "closed for further runs" in html
    assert service.ask("POST", "/v1/datasets/missing/close", {})[0] == 404
    assert service.ask("POST", "/v1/datasets/d/close", {"when": 1})[0] == 422
    kinds = [each["kind"] for each in service.ask("GET", "/v1/datasets/d/entries")[1]["items"]]
    assert kinds == ["create", "reserve", "close", "grant", "commit"]


@pytest.mark.parametrize("budget", [{"epsilon": 9.0}, {"state": "open"}, {"closed_at": None}])
def test_no_call_raises_a_budget_or_opens_a_dataset_again(service: Service, budget: Json) -> None:
    service.client.close_dataset("d")
    before = service.ask("GET", "/v1/datasets/d")[1]
    for method in ("PUT", "PATCH", "POST", "DELETE"):
        assert service.ask(method, "/v1/datasets/d", budget)[0] == 405
    assert service.ask("POST", "/v1/datasets/d/reopen", budget)[0] == 404
    assert service.ask("GET", "/v1/datasets/d")[1] == before


def test_closing_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCOUNTANT_DATABASE_URL", f"sqlite:///{tmp_path}/ledger.db")
    monkeypatch.delenv("ACCOUNTANT_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: str) -> tuple[int, str]:
        found = CliRunner().invoke(cli.app, list(arguments))
        return found.exit_code, found.output

    plan = ("-m", json.dumps(PLAN))
    create = ("dataset", "create", "d", "-n", "1000", "-E", "3", "-d", "1e-5", "--filter", "renyi")
    assert call(*create, *plan)[0] == 0
    run = call("run", "reserve", "d", *plan)[1].strip()
    status, said = call("dataset", "close", "d")
    assert status == 0
    assert said.startswith("d: closed since ")
    assert "open runs hold" in said
    status, said = call("run", "reserve", "d", *plan)
    assert (status, "dataset-closed" in said) == (2, True)
    assert json.loads(call("dataset", "close", "d", "--json")[1])["state"] == "closed"
    assert call("run", "grant", run, "--steps", "2")[0] == 0
    assert call("run", "commit", run)[0] == 0
    kept = tmp_path / "certificate.json"
    assert call("run", "certificate", run, "-o", str(kept))[0] == 0
    assert "the dataset was closed at " in call("verify", str(kept))[1]
    assert "closed" in call("dataset", "show", "d")[1]
    assert "closed" in call("dataset", "list")[1]
    shown = call("ledger", "show")[1]
    assert "closed" in shown
    assert "more steps" not in shown
    assert call("ledger", "verify")[0] == 0
    assert call("dataset", "close", "missing")[0] == 2
    exported = [json.loads(line)["kind"] for line in call("ledger", "export")[1].splitlines()]
    assert exported == ["create", "reserve", "close", "grant", "commit"]


def test_states_of_runs_after_the_closing(repository: Repository) -> None:
    """A lease that ends after the closing gives back what was never granted."""
    bench = Bench(repository)
    answer = bench.ledger.reserve(request(bench.key), "d", RUN, 0.0, "")
    run = json.loads(answer.text)["id"]
    bench.close()
    assert bench.ledger.get_reservation(bench.key, run)[1].state is State.EXPIRED
    with pytest.raises(CodedError):
        bench.ledger.grant(request(bench.key), run, 1, 0)
    assert bench.ledger.get_dataset(bench.key, "d").balance.taken[0] == 0
    assert verify(repository).faults == []
