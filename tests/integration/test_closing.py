"""A closed dataset takes no further reservation; what was reserved before may end, and is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accountant_service.ledger import certificate, hash_chain
from accountant_service.ledger.api_keys import Scope
from accountant_service.ledger.repository import Transaction
from accountant_service.ledger.rules import State
from tests.support.ledger_scenarios import (
    PLAN_JSON,
    SQL_MATTERS,
    Commands,
    Scenario,
    Service,
    insist,
    race,
    refusals,
    refused,
)
from training_client.errors import ServiceRefusedError

WRITERS = 8


def test_a_closed_dataset_takes_no_run_and_open_runs_end(scenario: Scenario) -> None:
    admin = scenario.admin
    admin.create()
    going, unused = admin.reserve(once="first"), admin.reserve()
    lost = admin.reserve(lease=60.0)
    admin.grant(going, 4)
    closed = admin.close(once="close")
    assert (closed["state"], closed["closed_at"] > 0) == ("closed", True)
    with refused("dataset-closed", "takes no further reservation"):
        admin.reserve()
    assert admin.reserve(once="first") == going, "the answer of an earlier call is repeated"
    assert admin.close(once="close") == closed
    assert admin.close()["version"] == closed["version"], "closing twice changes nothing"
    admin.grant(going, 3, 4)
    admin.renew(going)
    admin.commit(going)
    admin.release(unused)
    scenario.wait(61)
    assert admin.look(lost).state is State.EXPIRED
    with refused("reservation-closed"):
        admin.grant(lost)
    dataset = admin.look_at_dataset()
    assert dataset.balance.spent[0] > 0
    assert admin.look(going).steps_granted == 7
    assert dataset.balance.held[0] == 0
    assert dataset.closed_at == round(1e6 * closed["closed_at"])
    ended = scenario.ledger.read_ended_run(admin.record, going)
    found = certificate.issue(*ended, 10**15)
    assert found["dates"]["dataset_closed"] == certificate.format_time(dataset.closed_at)
    assert certificate.check(found)[0] == []
    assert scenario.ledger.find_last_run(admin.record, "d")[1] is not None


def test_who_may_create_a_budget_may_close_it(scenario: Scenario) -> None:
    scenario.admin.create()
    for other in (
        scenario.person(Scope.RUN),
        scenario.person(Scope.MONITOR),
        scenario.person(Scope.OWNER, datasets=("d",)),
    ):
        for name in ("d", "missing"):
            with refused("forbidden"):
                other.close(name)
    owner = scenario.person(Scope.OWNER)
    owner.close()
    (event,) = scenario.audit("dataset-closed")
    assert event[:3] == (owner.identifier, "dataset-closed", "d")


@SQL_MATTERS
def test_of_racing_writers_none_reserves_after_the_closing(scenario: Scenario) -> None:
    admin, granted = scenario.admin, list[str]()
    admin.create()

    def reserve() -> None:
        for _ in range(4):
            granted.append(insist(admin.reserve))

    *answers, closed = race(*[reserve] * WRITERS, lambda: insist(admin.close))
    assert set(refusals(answers)) <= {"dataset-closed"}
    with refused("dataset-closed"):
        admin.reserve()
    assert {run.identifier for run in scenario.runs()} == set(granted), "what was told is kept"
    assert isinstance(closed, dict)
    assert scenario.kinds()[closed["version"] - 1 :] == ["close"]


def test_without_the_lock_a_reservation_slips_in_and_verify_names_it(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant reads the state of the dataset before the other transaction closes it."""

    def make_stale(name: str) -> Any:
        genuine = getattr(Transaction, name)

        def find_stale(self: Transaction, of: str, *, lock: bool = False) -> Any:
            found = genuine(self, of, lock=lock)
            return found if found is None else replace(found, closed_at=None)

        return find_stale

    scenario.admin.create()
    with monkeypatch.context() as patch:
        for name in ("find_dataset", "find_dataset_by_id"):
            patch.setattr(Transaction, name, make_stale(name))
        scenario.admin.close()
        scenario.admin.reserve()
    faults = scenario.forge()
    assert any("breaks a rule" in fault and "was closed" in fault for fault in faults)


def test_verify_finds_a_dataset_that_was_opened_again_or_closed_twice(scenario: Scenario) -> None:
    scenario.admin.create()
    scenario.admin.close()
    for change, said in (("NULL", "closed_at is None, but recorded as"),
                         ("closed_at + 1", "but recorded as")):  # fmt: skip
        faults = scenario.faults_after(f"UPDATE dataset SET closed_at = {change}")
        assert any(said in fault for fault in faults)
    dataset, body = scenario.dataset(), scenario.entries()[1]
    again = hash_chain.encode_entry(body | {"number": 3})
    head = hash_chain.hash_entry(dataset.head, again)
    faults = scenario.faults_after(
        "INSERT INTO entry (dataset, number, body, hash) "
        f"VALUES ('{dataset.identifier}', 3, '{again}', '{head}')",
        f"UPDATE dataset SET version = 3, head = '{head}'",
    )
    assert faults == ["dataset 'd': entry 3: it breaks a rule: the dataset was closed before"]


# --- HTTP and commands


def test_closing_over_http_and_by_the_client(own_web: Service) -> None:
    admin, client = own_web.admin, own_web.admin.client()
    admin.dataset("d", filter="renyi")
    run = client.reserve("d", PLAN_JSON)
    assert admin.read("/v1/datasets/d")["state"] == "open"
    assert 'accountant_budget_closed{dataset="d"} 0.0' in admin.read("/metrics")
    assert client.close_dataset("d")["state"] == "closed"
    assert 'accountant_budget_closed{dataset="d"} 1.0' in admin.read("/metrics")
    for path, body in (
        ("reservations", {"mechanism": PLAN_JSON}),
        ("quotes", {"mechanism": PLAN_JSON}),
        ("quotes/batch", {"mechanisms": [PLAN_JSON, PLAN_JSON]}),
    ):
        found = admin.refusal("POST", f"/v1/datasets/d/{path}", body)
        assert found == (409, "dataset-closed"), path
    with pytest.raises(ServiceRefusedError) as told:
        client.reserve("d", PLAN_JSON)
    assert told.value.code == "dataset-closed"
    run = client.commit(client.grant(run, 10))
    found = client.certificate(run)
    assert found["dates"]["dataset_closed"] is not None
    facts = admin.read(f"/v1/reservations/{run.identifier}/report")
    assert facts["dataset"]["closed"] == found["dates"]["dataset_closed"]
    assert admin.read("/v1/datasets/d/report")["dataset"]["closed"] is not None
    assert "closed for further runs" in admin.read("/v1/datasets/d/report?format=html")
    assert admin.post("/v1/datasets/missing/close")[0] == 404
    assert admin.post("/v1/datasets/d/close", {"when": 1})[0] == 422
    kinds = [each["kind"] for each in admin.read("/v1/datasets/d/entries")["items"]]
    assert kinds == ["create", "reserve", "close", "grant", "commit"]


def test_no_call_raises_a_budget_or_opens_a_dataset_again(web: Service) -> None:
    web.admin.dataset("closed", filter="renyi")
    web.admin.make("/v1/datasets/closed/close")
    before = web.admin.read("/v1/datasets/closed")
    for body in ({"epsilon": 9.0}, {"state": "open"}, {"closed_at": None}):
        for method, status in (("PUT", 405), ("PATCH", 405), ("POST", 405), ("DELETE", 409)):
            assert web.admin.ask(method, "/v1/datasets/closed", body)[0] == status
        assert web.admin.post("/v1/datasets/closed/reopen", body)[0] == 404
    assert web.admin.read("/v1/datasets/closed") == before


def test_closing_on_the_command_line(commands: Commands, tmp_path: Path) -> None:
    plan = ("-m", json.dumps(PLAN_JSON))
    commands.make("dataset create d -n 1000 -E 3 -d 1e-5 --filter renyi", *plan)
    run = commands.make("run reserve d", *plan)
    said = commands.make("dataset close d")
    assert said.startswith("d: closed since ")
    assert "open runs hold" in said
    status, said = commands("run reserve d", *plan)
    assert (status, "dataset-closed" in said) == (2, True)
    assert commands.json("dataset close d")["state"] == "closed"
    commands.make("run grant", run, "--steps", "2")
    commands.make("run commit", run)
    kept = tmp_path / "certificate.json"
    commands.make("run certificate", run, "-o", str(kept))
    assert "the dataset was closed at " in commands("verify", str(kept))[1]
    for shown in ("dataset show d", "dataset list", "ledger show"):
        assert "closed" in commands.make(shown)
    assert "more steps" not in commands.make("ledger show")
    commands.make("ledger verify")
    assert commands("dataset close missing")[0] == 2
    exported = [json.loads(line)["kind"] for line in commands("ledger export")[1].splitlines()]
    assert exported == ["create", "reserve", "close", "grant", "commit"]
