"""Quotas of keys: exact over all servers of one database, with a time to wait."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from accountant_service.ledger import database as opening
from accountant_service.ledger.api_keys import Keys, Scope
from accountant_service.ledger.errors import DatabaseReadOnlyError, QuotaExceededError
from accountant_service.ledger.quotas import REQUESTS_PER_MINUTE_MAX, Quota
from accountant_service.ledger.repository import Repository, Transaction
from tests.support.ledger_scenarios import (
    SQL_MATTERS,
    Clock,
    Commands,
    Scenario,
    Service,
    race,
    refusals,
    refused,
)

STOPPED = pytest.mark.usefixtures("stopped")
MINUTE = 60_000_000
START = 1_700_000_000_000_000


@pytest.fixture
def stopped(clock: Clock) -> None:
    """Time passes only when a test lets it."""
    clock.stop()


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


@STOPPED
@SQL_MATTERS
def test_two_servers_of_one_database_count_together(url: str, scenario: Scenario) -> None:
    with closing(opening.open_repository(url)) as another:
        limited, other = scenario.person(requests_per_minute=6), scenario.person()
        first, second = scenario.keys, Keys(another)
        for server in (first, second, first, second):
            server.authenticate(limited.token)
        assert admit(second, limited.token) + admit(first, limited.token) == 2
        for _ in range(20):
            first.authenticate(other.token)
        with refused("quota-exceeded", r"6 requests a minute; try again in 10 s"):
            first.authenticate(limited.token)
        scenario.wait(10)
        assert admit(second, limited.token) == 1, "one leaves the bucket in ten seconds"
        scenario.wait(300)
        assert admit(first, limited.token) == 6, "an empty bucket takes the whole quota, no more"


@STOPPED
@pytest.mark.parametrize("minutes", [3, 365 * 24 * 60])
def test_a_clock_that_was_once_ahead_blocks_no_key(scenario: Scenario, minutes: int) -> None:
    token = scenario.person(requests_per_minute=6).token
    scenario.wait(60 * minutes)
    scenario.keys.authenticate(token)
    scenario.wait(-60 * minutes)
    assert admit(scenario.keys, token) == 6
    scenario.wait(60)
    assert admit(scenario.keys, token) == 6


def race_32_requests(scenario: Scenario) -> int:
    """Send 32 requests of a key that may send 10 a minute; return how many were admitted."""
    token = scenario.person(requests_per_minute=10).token

    def send() -> int:
        keys, admitted = Keys(scenario.repository), 0
        for _ in range(4):
            try:
                keys.authenticate(token)
            except QuotaExceededError:
                continue
            admitted += 1
        return admitted

    answers = race(*[send] * 8)
    assert refusals(answers) == []
    return sum(each for each in answers if isinstance(each, int))


@STOPPED
@SQL_MATTERS
def test_racing_requests_are_each_counted(scenario: Scenario) -> None:
    assert race_32_requests(scenario) == 10


def test_a_mutant_that_reads_and_then_writes_admits_more(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Transaction, "count_request", lambda *_: True)
    assert race_32_requests(scenario) == 32


def test_a_database_without_writes_still_answers_reads(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = scenario.person(requests_per_minute=1).token

    def refuse(_: Repository) -> Any:
        raise DatabaseReadOnlyError("the database takes no writes")

    with monkeypatch.context() as patch:
        patch.setattr(Repository, "transaction", refuse)
        for _ in range(3):
            scenario.keys.authenticate(token)


def test_a_quota_over_http(own_web: Service) -> None:
    admin = own_web.admin
    body = {"scopes": ["run"], "name": "sweep", "requests_per_minute": 2}
    made = admin.make("/v1/keys", body)
    assert made["requests_per_minute"] == 2
    limited = own_web.with_key(made["key"])
    for _ in range(2):
        limited.read("/v1/datasets")
    told = limited.send("GET", "/v1/datasets")
    assert (told.status_code, told.json()["code"]) == (429, "quota-exceeded")
    assert 1 <= int(told.headers["retry-after"]) <= 30
    shown = admin.read("/metrics")
    label = f'{{key="{made["id"]}",name="sweep"}}'
    assert f"accountant_key_quota_requests_per_minute{label} 2.0" in shown
    used = shown.split(f"accountant_key_quota_used_ratio{label} ")[1].split("\n")[0]
    assert 0.9 < float(used) <= 1
    assert 'accountant_refusals_total{code="quota-exceeded"} 1.0' in shown
    bound = own_web.caller(Scope.MONITOR, datasets=("d",))
    assert "accountant_key_quota_requests" not in bound.read("/metrics")
    path, lifted = f"/v1/keys/{made['id']}", {"requests_per_minute": None}
    assert admin.ask("PATCH", path, {"requests_per_minute": 600})[1]["requests_per_minute"] == 600
    limited.read("/v1/datasets")
    assert limited.refusal("PATCH", path, lifted) == (403, "forbidden")
    assert admin.ask("PATCH", path, lifted)[1]["requests_per_minute"] is None
    for wrong in ({}, {"requests_per_minute": 0}, {"requests_per_minute": 1.5}, {"scopes": []}):
        assert admin.refusal("PATCH", path, wrong) == (422, "invalid-request"), wrong
    missing = admin.refusal("PATCH", "/v1/keys/none", {"requests_per_minute": 1})
    assert missing == (404, "not-found")


def test_a_quota_on_the_command_line(commands: Commands) -> None:
    made = commands.make("keys create --scope run --requests-per-minute 60")
    identifier = made.split("_")[1]
    assert "60/min" in commands.make("keys list")
    said = commands.make("keys limit", identifier, "--requests-per-minute", "90")
    assert said == f"{identifier} has a quota of 90 requests a minute"
    assert commands.json("keys list")[0]["requests_per_minute"] == 90
    said = commands.make("keys limit", identifier, "--unlimited")
    assert said == f"{identifier} has no quota"
    for wrong in (
        identifier,
        f"{identifier} --unlimited --requests-per-minute 5",
        f"{identifier} --requests-per-minute 0",
        "none --requests-per-minute 5",
    ):
        assert commands(f"keys limit {wrong}")[0] == 2, wrong
    events = commands.json("ledger events")
    assert [(each["action"], each["detail"]) for each in events][2:] == [
        ("key-quota-set", "90 requests a minute"), ("key-quota-set", "none"),
    ]  # fmt: skip
