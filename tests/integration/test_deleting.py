"""A dataset that was never used can be deleted; one that was used, never."""

from __future__ import annotations

import pytest

from accountant_service.ledger.api_keys import Scope
from accountant_service.ledger.repository import Transaction
from accountant_service.ledger.service import Ledger
from accountant_service.ledger.webhooks import create_webhook
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


def test_an_unused_dataset_is_deleted_and_its_name_is_free(scenario: Scenario) -> None:
    admin, owner = scenario.admin, scenario.person(Scope.OWNER)
    admin.create(epsilon=1.0, once="made")
    head = scenario.dataset().head
    scenario.cap(0.5, team="vision")
    gone = owner.delete(once="gone")
    assert (gone["name"], gone["state"], gone["version"]) == ("d", "deleted", 1)
    with refused("not-found"):
        admin.look_at_dataset()
    with refused("not-found"):
        admin.delete()
    assert owner.delete(once="gone") == gone, "a retry gets the same answer"
    assert scenario.audit("dataset-deleted") == [(owner.identifier, "dataset-deleted", "d", head)]
    assert scenario.faults() == []
    admin.create(epsilon=2.0)
    assert owner.delete(once="gone") == gone, "and deletes nothing again"
    assert admin.create(once="made", epsilon=1.0)["budget"]["epsilon"] == 1.0, "the first answer"
    assert scenario.dataset().policy.epsilon == 2.0
    admin.grant(admin.reserve(3), 3)


def test_webhooks_and_keys_of_a_deleted_dataset_go_with_it(scenario: Scenario) -> None:
    """Webhooks of all datasets or of another one stay, and keys that are bound to several."""
    admin = scenario.admin
    for name in ("d", "other"):
        admin.create(name)
    own, several = (scenario.person(datasets=names) for names in (("d",), ("d", "other")))
    hooks = [create_webhook("https://example.org", name, (), 0) for name in ("d", "other", None)]
    with scenario.repository.transaction() as transaction:
        for hook in hooks:
            transaction.add_webhook(hook, "test")
    admin.delete()
    with scenario.repository.reading() as reading:
        assert {each.identifier for each in reading.list_webhooks()} == {
            each.identifier for each in hooks[1:]
        }
    admin.create()
    with refused("unauthenticated"):
        scenario.keys.authenticate(own.token)
    assert scenario.keys.authenticate(several.token).identifier == several.identifier
    (event,) = scenario.audit("key-revoked")
    assert event[:3] == (admin.identifier, "key-revoked", own.identifier)
    assert scenario.faults() == []


def test_a_used_or_closed_dataset_stays(scenario: Scenario) -> None:
    admin = scenario.admin
    admin.create()
    admin.release(admin.reserve())
    admin.create("closed")
    admin.close("closed")
    for name in ("d", "closed"):
        with refused("dataset-used", "close it instead"):
            admin.delete(name)
    assert scenario.kinds() == ["create", "reserve", "release"]


def test_who_may_create_a_budget_may_delete_it(scenario: Scenario) -> None:
    scenario.admin.create()
    for other in (
        scenario.person(Scope.RUN),
        scenario.person(Scope.OWNER, datasets=("d",)),
    ):
        for name in ("d", "missing"):
            with refused("forbidden"):
                other.delete(name)


@SQL_MATTERS
def test_of_racing_writers_none_reserves_in_a_dataset_that_was_deleted(scenario: Scenario) -> None:
    admin, granted = scenario.admin, list[str]()
    for _ in range(4):
        admin.create()
        *answers, deleted = race(
            *[lambda: granted.append(insist(admin.reserve))] * WRITERS,
            lambda: insist(admin.delete),
        )
        if isinstance(deleted, dict):
            assert set(refusals(answers)) == {"not-found"}
            assert not granted
        else:
            assert refusals([deleted]) == ["dataset-used"]
            break
        assert scenario.faults() == []


def test_a_plan_priced_for_a_deleted_dataset_is_priced_again_for_its_successor(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    admin, genuine = scenario.admin, Ledger.hold_budget
    admin.create(epsilon=3.0)

    def replace_dataset_first(self: Ledger, *arguments: object, is_joint: bool) -> object:
        monkeypatch.setattr(Ledger, "hold_budget", genuine)
        admin.delete()
        admin.create(epsilon=4.0)
        return genuine(self, *arguments, is_joint=is_joint)  # type: ignore[arg-type]

    monkeypatch.setattr(Ledger, "hold_budget", replace_dataset_first)
    run = admin.reserve(3)
    assert admin.look(run).dataset == scenario.dataset().identifier


def test_without_the_lock_the_foreign_keys_keep_a_reservation(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant reads that the dataset is unused before another transaction reserves."""
    admin = scenario.admin
    admin.create()
    stale = scenario.dataset()
    admin.reserve()
    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "find_dataset", lambda *_, **__: stale)
        with refused("database-away", "nothing was charged"):
            admin.delete()
    assert scenario.kinds() == ["create", "reserve"]


def test_verify_tells_a_deletion_from_rows_that_are_gone(scenario: Scenario) -> None:
    admin = scenario.admin
    admin.create()
    gone = ("DELETE FROM entry", "DELETE FROM dataset")
    (fault,) = scenario.faults_after(*gone)
    assert "it was created, but it has no row" in fault
    admin.delete()
    admin.create()
    (fault,) = scenario.faults_after(*gone)
    assert "it was created, but it has no row" in fault
    (fault,) = scenario.faults_after(
        "UPDATE audit_event SET action = 'other' WHERE action = 'dataset-deleted'"
    )
    assert "created 2 times" in fault
    (fault,) = scenario.faults_after(
        "INSERT INTO audit_event SELECT 'again', at, key_id, action, subject, detail "
        "FROM audit_event WHERE action = 'dataset-deleted'"
    )
    assert "it was deleted, but it has a row" in fault


# --- HTTP, commands and pages


def test_deleting_over_http(own_web: Service) -> None:
    admin = own_web.admin
    admin.dataset("d", filter="renyi")
    status, found = admin.ask("DELETE", "/v1/datasets/d", once="gone")
    assert (status, found["state"]) == (200, "deleted")
    assert admin.ask("DELETE", "/v1/datasets/d", once="gone") == (status, found)
    assert admin.get("/v1/datasets/d")[0] == 404
    admin.dataset("d", filter="renyi")
    admin.reserve("d")
    assert admin.refusal("DELETE", "/v1/datasets/d") == (409, "dataset-used")


def test_deleting_by_the_client(own_web: Service) -> None:
    admin, client = own_web.admin, own_web.admin.client()
    admin.dataset("d", filter="renyi")
    gone = client.delete_dataset("d")
    assert (gone["name"], gone["state"]) == ("d", "deleted")
    admin.dataset("d", filter="renyi")
    client.reserve("d", PLAN_JSON)
    for name, code in (("d", "dataset-used"), ("missing", "not-found")):
        with pytest.raises(ServiceRefusedError) as told:
            client.delete_dataset(name)
        assert told.value.code == code


def test_deleting_on_the_command_line(commands: Commands) -> None:
    create = "dataset create d -n 1000 -d 1e-5 --filter renyi -E"
    commands.make(f"{create} 3")
    assert commands.make("dataset delete d").startswith("deleted d: 1000 records")
    commands.make(f"{create} 2")
    commands.make("ledger verify")
    commands.make("dataset close d")
    status, said = commands("dataset delete d")
    assert (status, "dataset-used" in said) == (2, True)


def test_deleting_on_a_page_asks_first(own_web: Service) -> None:
    admin, owner = own_web.admin, own_web.caller(Scope.OWNER)
    admin.dataset("d", filter="renyi")
    reader = own_web.caller(Scope.RUN)
    own_web.sign_in(reader)
    assert "/datasets/d/delete" not in own_web.http.get("/datasets/d").text
    assert own_web.http.get("/datasets/d/delete").status_code == 403
    token = own_web.sign_in(owner)
    assert "/datasets/d/delete" in own_web.http.get("/datasets/d").text
    assert "Delete d?" in own_web.http.get("/datasets/d/delete").text
    run = admin.reserve("d")["id"]
    assert "/datasets/d/delete" not in own_web.http.get("/datasets/d").text
    form = {"csrf": token, "once": "a"}
    assert own_web.http.post("/datasets/d/delete", data=form).status_code == 409
    assert admin.look("d")["version"] == 2, run
    admin.dataset("e", filter="renyi")
    assert own_web.http.post("/datasets/e/delete", data=form | {"once": "b"}).status_code == 200
    assert admin.get("/v1/datasets/e")[0] == 404
