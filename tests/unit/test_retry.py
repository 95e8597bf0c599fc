"""A client that waits for its service: as long as it is asked to, and no longer than it may."""

from __future__ import annotations

import itertools
import json
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from training_client.budget import LedgerBudget
from training_client.client import (
    AccountingService,
    Reservation,
    RetryTimer,
    parse_retry_after,
)
from training_client.errors import ServiceUnreachableError
from training_client.plan import Plan

PLAN = Plan(dataset_size=100, sample_rate=0.1, clip_norm=1.0, noise_multiplier=1.0)
NOON = "Fri, 13 Nov 2026 12:00:00 GMT"
CLAIM = {"epsilon": 1.0, "delta": 1e-5, "method": "pld", "status": "proven"}


class Clock:
    """Time that passes only by waiting, and by what a service does."""

    def __init__(self) -> None:
        self.now = 1000.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("training_client.client.time.sleep", found.sleep)
    monkeypatch.setattr("training_client.client.time.monotonic", lambda: found.now)
    return found


class Server:
    """Answers 503 until a time, and keeps what it was asked and when."""

    def __init__(self, clock: Clock, until: float, headers: dict[str, str], **more: Any) -> None:
        self.clock, self.until, self.headers = clock, clock.now + until, headers
        self.status = more.pop("status", 503)
        self.asked: list[tuple[float, httpx.Request]] = []
        self.service = AccountingService(
            "http://test", transport=httpx.MockTransport(self.answer), **more
        )

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((self.clock.now, request))
        if self.clock.now < self.until:
            problem = {"code": "database-read-only", "detail": "the database takes no writes"}
            return httpx.Response(self.status, json=problem, headers=self.headers)
        body = json.loads(request.content or b"null")
        if not request.url.path.endswith("/grants"):
            return httpx.Response(200, json=answered(request.url.path, body))
        granted = body["sequence"] + body["steps"]
        return httpx.Response(200, json=view(granted))

    @property
    def pauses(self) -> list[float]:
        times = [at for at, _ in self.asked]
        return [after - before for before, after in itertools.pairwise(times)]


def view(granted: int) -> dict[str, Any]:
    return {"id": "r", "state": "open", "steps_reserved": 300, "steps_granted": granted}


def answered(path: str, body: Any) -> dict[str, Any]:
    if path == "/v1/curve":
        points = range(1, body["points"] + 1)
        steps = [body["mechanism"]["steps"] * at // body["points"] for at in points]
        return {"steps": steps, "curves": [{"epsilon": [0.1] * len(steps)}]}
    return {"neighbouring_relation": "add_or_remove_one"} if "/datasets/" in path else CLAIM


def held() -> Reservation:
    return Reservation("r", "open", 300, 0, PLAN.mechanism(300))


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    with caplog.at_level(logging.WARNING, "training_client"):
        yield lambda: [record.getMessage() for record in caplog.records]


def test_a_grant_waits_for_a_failover_and_happens_once(
    clock: Clock, warned: Callable[[], list[str]]
) -> None:
    server = Server(clock, 60.0, {"Retry-After": "2"})
    assert server.service.grant(held(), 5).steps_granted == 5
    assert len({request.headers["Idempotency-Key"] for _, request in server.asked}) == 1
    assert all(pause >= 2.0 for pause in server.pauses), "it is not asked before it said"
    assert max(server.pauses) <= 12.0
    assert len(warned()) == len(server.pauses)
    assert "the database takes no writes" in warned()[0]
    assert "retrying in 2." in warned()[0]


@pytest.mark.parametrize("patience", [120.0, 30.0])
def test_the_client_gives_up_in_the_end_and_grants_nothing(clock: Clock, patience: float) -> None:
    more = {} if patience == 120.0 else {"patience_seconds": patience}
    server = Server(clock, 1e9, {"Retry-After": "2"}, **more)
    budget = LedgerBudget(server.service, PLAN, "d", 1e-5, held())
    began = clock.now
    with pytest.raises(ServiceUnreachableError, match=r"answered 503: the database takes no wri"):
        budget.take(1)
    assert patience - 2.5 <= clock.now - began <= patience + 0.1
    assert budget.made == budget.taken == 0


def test_a_date_is_waited_for_by_the_clock_of_the_service(clock: Clock) -> None:
    later = NOON.replace("12:00:00", "12:00:40")
    server = Server(clock, 40.0, {"Retry-After": later, "Date": NOON})
    server.service.epsilon(PLAN.mechanism(5), 1e-5)
    assert len(server.pauses) == 1
    assert 40.0 <= server.pauses[0] <= 40.2


def test_a_delay_longer_than_the_patience_is_not_waited_for(clock: Clock) -> None:
    server = Server(clock, 1e9, {"Retry-After": "3600"})
    with pytest.raises(ServiceUnreachableError, match="retry after 3600 s"):
        server.service.epsilon(PLAN.mechanism(5), 1e-5)
    assert len(server.asked) == 1


def test_a_fault_of_the_service_is_not_waited_for(clock: Clock) -> None:
    began = clock.now
    with pytest.raises(ServiceUnreachableError):
        Server(clock, 1e9, {}, status=500).service.epsilon(PLAN.mechanism(5), 1e-5)
    assert clock.now - began <= 3.1


def test_a_service_that_went_away_is_waited_for_and_one_that_never_was_is_not(
    clock: Clock,
) -> None:
    there = True

    def answer(_: httpx.Request) -> httpx.Response:
        if not there and clock.now < 1100:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json=CLAIM)

    def ask() -> float:
        began = clock.now
        accounting.epsilon(PLAN.mechanism(5), 1e-5)
        return clock.now - began

    accounting = AccountingService("http://test", transport=httpx.MockTransport(answer))
    assert ask() == 0
    there = False
    assert 100 <= ask() <= 110
    clock.now = 1000.0
    accounting = AccountingService("http://test", transport=httpx.MockTransport(answer))
    with pytest.raises(ServiceUnreachableError, match="accountant serve"):
        ask()
    assert clock.now <= 1003.1


def test_retries_end_when_the_caller_asks_to_stop(clock: Clock) -> None:
    server = Server(clock, 1e9, {"Retry-After": "100"})
    began = clock.now
    with (
        server.service.giving_up_when(lambda: clock.now > began + 10),
        pytest.raises(ServiceUnreachableError),
    ):
        server.service.epsilon(PLAN.mechanism(5), 1e-5)
    assert clock.now - began <= 11
    server.until = 0.0
    server.service.epsilon(PLAN.mechanism(5), 1e-5)  # and may be asked again


def test_releasing_a_reservation_waits_only_briefly(clock: Clock) -> None:
    server = Server(clock, 1e9, {})
    began = clock.now
    LedgerBudget(server.service, PLAN, "d", 1e-5, held()).give_up()
    assert clock.now - began <= 3.1


def test_an_outage_is_no_reason_for_longer_blocks(clock: Clock) -> None:
    server = Server(clock, 0.0, {"Retry-After": "2"})
    budget = LedgerBudget(server.service, PLAN, "d", 1e-5, held(), block=5)
    budget.take(1)
    server.until = clock.now + 30
    for step in range(2, 30):
        budget.take(step)
        clock.now += 0.4
    assert budget.block == 5


def test_clients_that_failed_together_do_not_come_back_together() -> None:
    state = random.getstate()
    pauses = {RetryTimer().next_delay(2.0, 120.0) for _ in range(20)}
    assert len(pauses) > 10
    assert all(pause is not None and 2.0 < pause <= 2.2 for pause in pauses)
    assert random.getstate() == state, "a program's own random numbers stay as they were"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7", 7.0),
        (" 0 ", 0.0),
        (NOON.replace("12:00:00", "12:01:30"), 90.0),
        ("Friday, 13-Nov-26 12:00:05 GMT", 5.0),
        (NOON.replace("GMT", "-0000"), 0.0),
        (NOON.replace("2026", "2016"), 0.0),
        ("-5", 0.0),
        ("1.5", 0.0),
        ("", 0.0),
        ("soon", 0.0),
        ("²", 0.0),
        ("Fri, 13 Nov 999999 12:00:00 GMT", 0.0),
        ("Fri, 13 Nov 2026 12:00:00 +999999999999", 0.0),
        ("9" * 400, float("inf")),
    ],
)
def test_retry_after_headers_are_parsed(text: str, seconds: float) -> None:
    assert parse_retry_after(httpx.Headers({"Retry-After": text.encode(), "Date": NOON})) == seconds


def test_without_a_date_of_its_own_the_local_clock_counts() -> None:
    assert parse_retry_after({"Retry-After": "Fri, 13 Nov 2076 12:00:00 GMT"}) > 86400
    assert parse_retry_after({}) == 0.0
