"""The owner of a dataset sets or confirms the reference in whose steps its budget is counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from accountant_service.ledger import certificate, hash_chain, plans, schema_revision
from accountant_service.ledger.api_keys import Scope
from accountant_service.ledger.filters import LateReferenceFilter
from accountant_service.ledger.repository import Transaction
from accountant_service.ledger.verification import verify_export
from accountant_service.mechanisms import DpSgd, Laplace, to_json
from tests.support.ledger_scenarios import (
    ON_SQLITE,
    SQL_MATTERS,
    Commands,
    Json,
    Scenario,
    Service,
    insist,
    race,
    refusals,
    refused,
)
from training_client.errors import ServiceRefusedError

STEP = DpSgd(1.1, sample_rate=0.01, steps=1)
RUN = replace(STEP, steps=50)
OTHER = replace(RUN, noise_multiplier=1.5)
SMALL = Laplace(1000.0)  # ε = .001, which is added up


@pytest.fixture(autouse=True)
def one_ordinary_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count what fits of one ordinary run: of all it takes most of a choice's time."""
    # private: nobody chooses which runs are ordinary
    monkeypatch.setattr(plans, "_ORDINARY_RUNS", (STEP,))


def create(scenario: Scenario, name: str = "d", **fields: Any) -> None:
    """Create a dataset whose reference is chosen late."""
    scenario.admin.create(name, by="reference", plan=None, **fields)


def reference_of(scenario: Scenario, name: str = "d") -> tuple[Any, bool]:
    """Return the reference step of a dataset, and whether its owner chose it."""
    policy = scenario.dataset(name).policy
    assert isinstance(policy, LateReferenceFilter)
    return policy.rest.reference, policy.rest.is_planned


def test_no_reservation_replaces_what_the_owner_chose(scenario: Scenario) -> None:
    admin = scenario.admin
    create(scenario)
    admin.grant(admin.reserve(SMALL))
    chosen = admin.choose(RUN, once="first")
    assert chosen["accounting"]["reference"] == to_json(STEP)
    assert chosen["accounting"]["planned"] is True
    assert chosen["accounting"]["added_epsilon"] == "0.001"
    fitting = chosen["remaining"]["reference_steps"]
    assert chosen["admits"][0] == {"step": to_json(STEP), "steps": fitting}
    assert admin.choose(RUN)["version"] == chosen["version"], "a repeat changes nothing"
    admin.grant(admin.reserve(OTHER), 3)
    assert reference_of(scenario) == (STEP, True)
    assert admin.choose(RUN, once="first") == chosen, "the answer of an earlier call is repeated"
    with refused("reference-fixed", "another reference are spent or held"):
        admin.choose(OTHER)
    assert scenario.kinds() == ["create", "reserve", "grant", "reference", "reserve", "grant"]
    (event,) = scenario.audit("reference-set")
    assert event[:3] == (admin.identifier, "reference-set", "d")


def test_the_reference_of_a_run_is_confirmed_and_outlives_the_run(scenario: Scenario) -> None:
    admin = scenario.admin
    create(scenario)
    run = admin.reserve(RUN)
    assert reference_of(scenario) == (STEP, False)
    steps = scenario.dataset().policy.whole[0]
    confirmed = admin.choose(STEP)
    assert confirmed["accounting"]["reference_steps"] == steps
    admin.release(run)
    admin.reserve(OTHER)
    assert reference_of(scenario) == (STEP, True)


def test_the_owner_may_choose_again_until_a_step_is_taken(scenario: Scenario) -> None:
    admin = scenario.admin
    create(scenario)
    admin.choose(RUN)
    admin.choose(OTHER)
    assert reference_of(scenario)[0] == replace(OTHER, steps=1)
    run = admin.reserve(OTHER)
    with refused("reference-fixed"):
        admin.choose(RUN)
    admin.release(run)
    admin.choose(RUN)
    assert reference_of(scenario) == (STEP, True)


def test_only_an_owner_chooses(scenario: Scenario) -> None:
    create(scenario)
    create(scenario, "other")
    for other in (
        scenario.person(Scope.RUN),
        scenario.person(Scope.MONITOR),
        scenario.person(Scope.AUDITOR),
        scenario.person(Scope.COMPUTE),
    ):
        with refused("forbidden"):
            other.choose()
    bound = scenario.person(Scope.OWNER, datasets=("d",))
    with refused("not-found"):
        bound.choose(RUN, "other")
    bound.choose(RUN)
    assert reference_of(scenario, "other") == (None, False)


@pytest.mark.parametrize("fields", [
    {"by": "renyi"}, {"by": "addition", "plan": None}, {"by": "reference"},
    {"by": "reference", "plan": None, "delta": 0.0},
])  # fmt: skip
@ON_SQLITE
def test_other_budgets_have_no_reference_to_choose(scenario: Scenario, fields: Json) -> None:
    scenario.admin.create(**fields)
    with refused("reference-fixed"):
        scenario.admin.choose()
    assert scenario.kinds() == ["create"]


@ON_SQLITE
def test_a_closed_dataset_and_a_wrong_mechanism_are_refused(scenario: Scenario) -> None:
    create(scenario)
    for mechanism, code in (
        (DpSgd(1e6, sample_rate=1e-12, steps=1), "unsuitable-reference"),
        (DpSgd(1.1, batch_size=10, dataset_size=999, steps=1), "dataset-size-mismatch"),
    ):
        with refused(code):
            scenario.admin.choose(mechanism)
    scenario.admin.close()
    with refused("dataset-closed"):
        scenario.admin.choose()
    assert scenario.kinds() == ["create", "close"]


@SQL_MATTERS
def test_of_two_owners_at_once_one_is_last(scenario: Scenario) -> None:
    create(scenario)
    owners = [scenario.person(Scope.OWNER) for _ in range(4)]

    def choose(at: int) -> Json:
        return insist(lambda: owners[at].choose((RUN, OTHER)[at % 2]))

    answers = race(*(partial(choose, at) for at in range(4)))
    assert refusals(answers) == []
    told = {each["version"]: each["accounting"] for each in answers if isinstance(each, dict)}
    last = scenario.entries()[-1]["filter"]
    assert told[scenario.dataset().version]["reference"] == last["reference"]
    assert set(scenario.kinds()[1:]) == {"reference"}


@SQL_MATTERS
@pytest.mark.parametrize("plan", [SMALL, OTHER], ids=["added", "exchanged"])
def test_a_charge_at_once_is_subtracted_or_comes_after(scenario: Scenario, plan: Any) -> None:
    """In each order, the budget of the reference is what the releases before it leave."""
    create(scenario)
    answers = race(
        lambda: insist(lambda: scenario.admin.choose(RUN)),
        lambda: scenario.admin.grant(insist(lambda: scenario.admin.reserve(plan))),
    )
    assert set(refusals(answers)) <= {"reference-fixed"}, answers
    kinds = scenario.kinds()
    reference, is_chosen = reference_of(scenario)
    assert is_chosen == ("reference" in kinds) == (not refusals(answers))
    if is_chosen:
        assert reference == STEP
        before = kinds.index("reference") > kinds.index("reserve")
        added = scenario.entries()[kinds.index("reference")]["filter"]["added_epsilon"]
        assert added == ("0.001" if before and plan is SMALL else "0")


@SQL_MATTERS
def test_without_the_lock_a_charge_is_spent_twice_and_verify_names_it(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant reads the balance before the other transaction charges it."""
    admin = scenario.admin
    create(scenario)
    before = scenario.dataset()
    admin.grant(admin.reserve(Laplace(100.0)))
    genuine = Transaction.find_dataset_by_id

    def find_stale(self: Transaction, of: str, *, lock: bool = False) -> Any:
        found = genuine(self, of, lock=lock)
        assert found is not None
        return replace(found, balance=before.balance)

    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "find_dataset_by_id", find_stale)
        patch.setattr(scenario.ledger, "find_dataset", lambda *_: before)
        admin.choose(RUN)
    faults = scenario.forge()
    assert any("breaks a rule" in fault and "taken meanwhile" in fault for fault in faults), faults


def _raise_steps(entry: Json) -> None:
    entry["filter"]["reference_steps"] += 1


def _forget_added(entry: Json) -> None:
    entry["filter"]["added_epsilon"] = "0"


def _leave_to_runs(entry: Json) -> None:
    entry["filter"]["planned"] = False


def _use_another_filter(entry: Json) -> None:
    entry["filter"] = {"filter": "addition"}


FORGERIES: list[tuple[Callable[[Json], None], str]] = [
    (_raise_steps, "admits more than the budget"),
    (_forget_added, "taken meanwhile"),
    (_leave_to_runs, "taken meanwhile"),
    (_use_another_filter, "taken meanwhile"),
]


@ON_SQLITE
@pytest.mark.parametrize(("forge", "said"), FORGERIES)
def test_a_forged_choice_is_named(
    scenario: Scenario, forge: Callable[[Json], None], said: str
) -> None:
    create(scenario)
    scenario.admin.grant(scenario.admin.reserve(Laplace(100.0)))
    scenario.admin.choose(RUN)
    dataset, entries = scenario.dataset(), scenario.entries()
    forge(entries[-1])
    body = hash_chain.encode_entry(entries[-1])
    with scenario.repository.reading() as reading:
        before = [row.hash for row in reading.list_entries(dataset, 0)][-2]
    head = hash_chain.hash_entry(before, body)
    faults = scenario.faults_after(
        f"UPDATE entry SET body = '{body}', hash = '{head}' WHERE number = {dataset.version}",
        f"UPDATE dataset SET head = '{head}'",
    )
    assert any(f"entry {dataset.version}: it breaks a rule" in each for each in faults), faults
    assert any(said in each for each in faults), faults


@ON_SQLITE
def test_a_choice_once_steps_are_taken_is_named(scenario: Scenario) -> None:
    """A forger moves the choice of another reference behind a run that took steps of the first."""
    create(scenario)
    scenario.admin.choose(OTHER)
    scenario.admin.choose(RUN)
    scenario.admin.grant(scenario.admin.reserve(RUN))
    dataset, entries = scenario.dataset(), scenario.entries()
    late = entries[1] | {"number": dataset.version + 1}
    body = hash_chain.encode_entry(late)
    head = hash_chain.hash_entry(dataset.head, body)
    faults = scenario.faults_after(
        "INSERT INTO entry (dataset, number, body, hash) "
        f"VALUES ('{dataset.identifier}', {late['number']}, '{body}', '{head}')",
        f"UPDATE dataset SET version = {late['number']}, head = '{head}'",
    )
    assert any("breaks a rule" in each and "taken meanwhile" in each for each in faults), faults


@ON_SQLITE
def test_a_row_with_another_reference_than_the_entries_is_named(scenario: Scenario) -> None:
    create(scenario)
    scenario.admin.choose(RUN)
    stored = json.dumps(scenario.dataset().policy.to_json() | {"planned": False})
    faults = scenario.faults_after(f"UPDATE dataset SET policy = '{stored}'")
    assert any("the filter is stored as" in each for each in faults)


@ON_SQLITE
def test_it_is_certified_and_exported(scenario: Scenario) -> None:
    admin = scenario.admin
    create(scenario)
    admin.choose(RUN)
    run = admin.reserve(RUN)
    admin.grant(run, 50)
    admin.commit(run)
    found = certificate.issue(*scenario.ledger.read_ended_run(admin.record, run), 10**15)
    assert certificate.check(found)[0] == []
    dataset = scenario.dataset()
    with scenario.repository.reading() as reading:
        lines = [
            json.dumps(json.loads(row.body) | {"dataset": "d", "hash": row.hash})
            for row in reading.list_entries(dataset, 0)
        ]
    report = verify_export(lines)
    assert report.faults == []
    assert report.heads == {"d": (dataset.version, dataset.head)}


@ON_SQLITE
def test_servers_that_cannot_read_it_end_with_the_first_choice(scenario: Scenario) -> None:
    def oldest_writer() -> str:
        with scenario.repository.reading() as reading:
            return str(reading.connection.execute(schema_revision.SCHEMA.select()).scalar_one())

    create(scenario)
    assert oldest_writer() < "0011"
    scenario.admin.choose(RUN)
    assert oldest_writer() == "0011"


# --- HTTP, the client and commands


def test_over_http_and_by_the_client(own_web: Service) -> None:
    admin, client = own_web.admin, own_web.admin.client()
    admin.dataset("d")
    run = to_json(RUN)
    told = client.quote_reference("d", run)
    assert admin.read("/v1/datasets/d")["version"] == 1, "a quote sets nothing"
    chosen = client.set_reference("d", run)
    assert told["accounting"] == chosen["accounting"]
    assert told["after"] == chosen["admits"]
    assert [each["step"] for each in told["before"]] == [each["step"] for each in told["after"]]
    assert admin.read("/v1/datasets/d") == {
        name: chosen[name] for name in chosen if name not in ("admits", "warnings")
    }
    runner = own_web.caller(Scope.RUN)
    for path in ("reference", "reference/quotes"):
        found = runner.refusal("POST", f"/v1/datasets/d/{path}", {"mechanism": run})
        assert found == (403, "forbidden"), path
    client.grant(client.reserve("d", to_json(OTHER)), 5)
    with pytest.raises(ServiceRefusedError) as refusal:
        client.set_reference("d", to_json(OTHER))
    assert refusal.value.code == "reference-fixed"
    items = admin.read("/v1/datasets/d/entries")["items"]
    assert [each["kind"] for each in items] == ["create", "reference", "reserve", "grant"]
    assert items[1]["filter"]["planned"] is True
    assert admin.read("/v1/datasets/d/report")["dataset"]["name"] == "d"


def test_on_the_command_line(commands: Commands) -> None:
    plan = ("-q", "0.01", "-s", "1.1", "-t", "50")
    commands.make("dataset create d -n 60000 -E 3 -d 1e-5")
    said = commands.make("dataset reference d --quote", *plan)
    assert "3712 reference steps (DP-SGD, q = 0.01, σ = 1.1, Poisson sampling)" in said
    assert "left for a single run of 3712 steps of DP-SGD, q = 0.01, σ = 1.1" in said
    assert "; now 3712" in said
    assert commands.json("dataset show d")["version"] == 1
    assert "3712 reference steps" in commands.make("dataset reference d", *plan)
    chosen = commands.json("dataset reference d", *plan)
    assert (chosen["version"], chosen["accounting"]["planned"]) == (2, True)
    commands.make("run grant", commands.make("run reserve d", *plan), "--steps", "2")
    status, said = commands("dataset reference d -q 0.1 -s 5 -t 1")
    assert (status, "reference-fixed" in said) == (2, True)
    commands.make("ledger verify")
    kinds = [json.loads(line)["kind"] for line in commands("ledger export")[1].splitlines()]
    assert kinds == ["create", "reference", "reserve", "grant"]
