"""Quotas of keys: exact over all servers of one database, with a time to wait."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as some
from typer.testing import CliRunner

from accountant_service import cli
from accountant_service.app import create_app
from accountant_service.ledger import api_keys
from accountant_service.ledger import database as opening
from accountant_service.ledger.api_keys import Keys, Scope
from accountant_service.ledger.errors import DatabaseReadOnlyError, QuotaExceededError
from accountant_service.ledger.quotas import REQUESTS_PER_MINUTE_MAX, Quota
from accountant_service.ledger.repository import Repository, Transaction
from accountant_service.settings import Settings
from tests.support.databases import database

MINUTE = 60_000_000
START = 1_700_000_000_000_000
Json = dict[str, Any]


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.at = START

    def __call__(self) -> int:
        return self.at


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(api_keys, "now", found)
    return found


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with database(request.param, tmp_path) as found:
        yield found


@settings(max_examples=40, deadline=None)
@given(
    some.integers(1, 200),
    some.lists(some.integers(0, 3_000_000), min_size=1, max_size=60),
)
def test_no_minute_admits_more_than_a_burst_and_its_refill(quota: int, pauses: list[int]) -> None:
    """A burst of the quota, and what left the bucket since: never more, whatever the times."""
    bucket, at, empty_at = Quota(quota), START, None
    admitted: list[int] = []
    for pause in pauses:
        at += pause
        while not (wait := bucket.compute_wait(empty_at, at)) and len(admitted) < 400:
            empty_at = max(empty_at or 0, at) + bucket.interval
            admitted.append(at)
        if wait:
            after = at + 1_000_000 * wait
            assert bucket.compute_wait(empty_at, after) == 0, "the time to wait is enough"
            assert 0 < bucket.used_share(empty_at, at) <= 1
    for first, begun in enumerate(admitted):
        for last in range(first, len(admitted)):
            refill = (admitted[last] - begun) * quota / MINUTE
            assert last - first + 1 <= quota + refill + 1e-6


def test_the_interval_is_rounded_up() -> None:
    assert [Quota(each).interval for each in (1, 7, 60)] == [MINUTE, 8_571_429, 1_000_000]
    assert Quota(REQUESTS_PER_MINUTE_MAX).interval == 60


def admit(keys: Keys, token: str) -> int:
    """Send requests until one is refused; return how many were admitted."""
    for count in range(1000):
        try:
            keys.authenticate(token)
        except QuotaExceededError:
            return count
    raise AssertionError("no quota")


def test_two_servers_of_one_database_count_together(url: str, clock: Clock) -> None:
    one, two = opening.open_repository(url), opening.open_repository(url)
    token = Keys(one).create([Scope.RUN], requests_per_minute=6)[0]
    other = Keys(one).create([Scope.RUN])[0]
    first, second = Keys(one), Keys(two)
    for server in (first, second, first, second):
        server.authenticate(token)
    assert admit(second, token) + admit(first, token) == 2
    for _ in range(20):
        first.authenticate(other)
    with pytest.raises(QuotaExceededError, match=r"6 requests a minute; try again in 10 s"):
        first.authenticate(token)
    clock.at += 10_000_000
    assert admit(second, token) == 1, "one leaves the bucket in ten seconds"
    clock.at += 5 * MINUTE
    assert admit(first, token) == 6, "an empty bucket takes the whole quota, and no more"
    for each in (one, two):
        each.close()


@pytest.mark.parametrize("minutes", [3, 365 * 24 * 60])
def test_a_clock_that_was_once_ahead_blocks_no_key(url: str, clock: Clock, minutes: int) -> None:
    repository = opening.open_repository(url)
    token = Keys(repository).create([Scope.RUN], requests_per_minute=6)[0]
    keys = Keys(repository)
    clock.at += minutes * MINUTE
    keys.authenticate(token)
    clock.at -= minutes * MINUTE
    assert admit(keys, token) == 6
    clock.at += MINUTE
    assert admit(keys, token) == 6
    repository.close()


def race(repository: Repository, token: str) -> int:
    """Send requests of one key from many threads; return how many were admitted."""
    barrier, admitted = threading.Barrier(8), []

    def send() -> None:
        keys = Keys(repository)
        barrier.wait()
        for _ in range(4):
            try:
                keys.authenticate(token)
            except QuotaExceededError:
                continue
            admitted.append(1)

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(admitted)


def test_racing_requests_are_each_counted(url: str, clock: Clock) -> None:
    repository = opening.open_repository(url)
    token = Keys(repository).create([Scope.RUN], requests_per_minute=10)[0]
    assert race(repository, token) == 10
    repository.close()


def test_a_mutant_that_reads_and_then_writes_admits_more(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Transaction, "count_request", lambda *_: True)
    repository = opening.open_repository(f"sqlite:///{tmp_path}/ledger.db")
    token = Keys(repository).create([Scope.RUN], requests_per_minute=10)[0]
    assert race(repository, token) == 32
    repository.close()


def test_a_database_without_writes_still_answers_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = opening.open_repository(f"sqlite:///{tmp_path}/ledger.db")
    token = Keys(repository).create([Scope.RUN], requests_per_minute=1)[0]

    def refuse(_: Repository) -> Any:
        raise DatabaseReadOnlyError("the database takes no writes")

    monkeypatch.setattr(Repository, "transaction", refuse)
    for _ in range(3):
        Keys(repository).authenticate(token)
    monkeypatch.undo()
    repository.close()


# --- HTTP and commands


class Service:
    """A service over HTTP, and an administrator's key."""

    def __init__(self, http: TestClient) -> None:
        self.http = http
        self.admin = http.app.state.keys.create([Scope.ADMIN])[0]  # type: ignore[attr-defined]

    def ask(self, key: str, method: str, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": uuid.uuid4().hex}
        return self.http.request(method, path, json=body, headers=headers)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with TestClient(create_app(Settings(database_url=f"sqlite:///{tmp_path}/web.db"))) as http:
        yield Service(http)


def test_a_quota_over_http(service: Service) -> None:
    body = {"scopes": ["run"], "name": "sweep", "requests_per_minute": 2}
    made = service.ask(service.admin, "POST", "/v1/keys", body).json()
    assert made["requests_per_minute"] == 2
    for _ in range(2):
        assert service.ask(made["key"], "GET", "/v1/datasets").status_code == 200
    refused = service.ask(made["key"], "GET", "/v1/datasets")
    assert (refused.status_code, refused.json()["code"]) == (429, "quota-exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    shown = service.ask(service.admin, "GET", "/metrics").text
    label = f'{{key="{made["id"]}",name="sweep"}}'
    assert f"accountant_key_quota_requests_per_minute{label} 2.0" in shown
    used = shown.split(f"accountant_key_quota_used_ratio{label} ")[1].split("\n")[0]
    assert 0.9 < float(used) <= 1
    assert 'accountant_refusals_total{code="quota-exceeded"} 1.0' in shown
    bound = service.ask(
        service.admin, "POST", "/v1/keys", {"scopes": ["monitor"], "datasets": ["d"]}
    ).json()["key"]
    assert "accountant_key_quota_requests" not in service.ask(bound, "GET", "/metrics").text
    path = f"/v1/keys/{made['id']}"
    changed = service.ask(service.admin, "PATCH", path, {"requests_per_minute": 600})
    assert (changed.status_code, changed.json()["requests_per_minute"]) == (200, 600)
    assert service.ask(made["key"], "GET", "/v1/datasets").status_code == 200
    assert service.ask(made["key"], "PATCH", path, {"requests_per_minute": None}).status_code == 403
    lifted = service.ask(service.admin, "PATCH", path, {"requests_per_minute": None})
    assert lifted.json()["requests_per_minute"] is None
    for wrong in ({}, {"requests_per_minute": 0}, {"requests_per_minute": 1.5}, {"scopes": []}):
        assert service.ask(service.admin, "PATCH", path, wrong).status_code == 422, wrong
    missing = service.ask(service.admin, "PATCH", "/v1/keys/none", {"requests_per_minute": 1})
    assert missing.status_code == 404


def test_a_quota_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCOUNTANT_DATABASE_URL", f"sqlite:///{tmp_path}/ledger.db")
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments: str) -> tuple[int, str]:
        found = CliRunner().invoke(cli.app, list(arguments))
        return found.exit_code, found.output

    made = call("keys", "create", "--scope", "run", "--requests-per-minute", "60")
    identifier = made[1].split("_")[1]
    assert "60/min" in call("keys", "list")[1]
    assert call("keys", "limit", identifier, "--requests-per-minute", "90")[1] == (
        f"{identifier} has a quota of 90 requests a minute\n"
    )
    assert json.loads(call("keys", "list", "--json")[1])[0]["requests_per_minute"] == 90
    assert call("keys", "limit", identifier, "--unlimited")[1] == f"{identifier} has no quota\n"
    for wrong in (
        ("limit", identifier),
        ("limit", identifier, "--unlimited", "--requests-per-minute", "5"),
        ("limit", identifier, "--requests-per-minute", "0"),
        ("limit", "none", "--requests-per-minute", "5"),
    ):
        assert call("keys", *wrong)[0] == 2, wrong
    events = json.loads(call("ledger", "events", "--json")[1])
    assert [(each["action"], each["detail"]) for each in events][1:] == [
        ("key-quota-set", "90 requests a minute"), ("key-quota-set", "none"),
    ]  # fmt: skip
