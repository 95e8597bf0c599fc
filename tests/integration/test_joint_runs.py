"""One run on several datasets: charged to each or to none, whatever fails, races or expires."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
import yaml

from accountant_service.ledger import certificate, exporting
from accountant_service.ledger import service as operations
from accountant_service.ledger.api_keys import Scope
from accountant_service.ledger.quotas import RunQuota
from accountant_service.ledger.repository import Transaction
from accountant_service.ledger.rules import State
from accountant_service.ledger.schema_revision import SCHEMA
from accountant_service.ledger.service import Ledger
from accountant_service.ledger.verification import verify_export
from tests.support.ledger_scenarios import (
    ANSWERS,
    ON_POSTGRESQL,
    ON_SQLITE,
    PLAN_JSON,
    SQL_MATTERS,
    Caller,
    Commands,
    Scenario,
    Service,
    race,
    refusals,
    refused,
    started,
)
from training_client.charging import LedgerDataset, approximate_dp, gaussian, laplace
from training_client.errors import BudgetExhaustedError

NAMES = ("a", "b", "c")


def taken(scenario: Scenario, *names: str) -> list[tuple[int, ...]]:
    return [scenario.dataset(name).balance.taken for name in names]


@pytest.fixture
def months(scenario: Scenario) -> Scenario:
    """A ledger with three datasets of different budgets and filters."""
    admin = scenario.admin
    admin.create("a")
    admin.create("b", by="reference", epsilon=2.0)
    admin.create("c", by="reference", plan=None)
    return scenario


# --- all together


@SQL_MATTERS
@pytest.mark.slow
def test_a_run_is_reserved_granted_and_committed_on_every_dataset(months: Scenario) -> None:
    admin = months.admin
    run = admin.reserve_jointly("b", "a", "c", plan=20)
    answer = admin.grant(run, 5)
    assert (answer["dataset"], answer["datasets"]) == (None, ["a", "b", "c"])
    assert [months.runs(name)[0].steps_granted for name in NAMES] == [5, 5, 5]
    parts = {months.runs(name)[0].identifier for name in NAMES}
    for name in NAMES:  # entries name each other
        assert set(months.entries(name)[1]["joint"]["reservations"]) == parts
        # the identifier of each part stands for the whole run
        part = months.runs(name)[0]
        admin.grant(part.identifier, 1, part.steps_granted)
    held = taken(months, *NAMES)
    assert admin.commit(run)["state"] == "committed"
    for name, before in zip(NAMES, held, strict=True):
        part, dataset = months.runs(name)[0], months.dataset(name)
        assert (part.state, part.steps_granted) == (State.COMMITTED, 8)
        assert dataset.balance.taken == dataset.balance.spent == part.taken
        assert 0 < part.taken[0] < before[0]  # each gives back its own rest


@pytest.mark.slow
def test_the_charge_is_that_of_the_same_run_alone(months: Scenario) -> None:
    """Each dataset's filter sees exactly its own run."""
    admin = months.admin
    for name in ("a", "b"):
        admin.create(f"{name}-alone", by=("renyi", "reference")[name == "b"],
                     epsilon=(3.0, 2.0)[name == "b"])  # fmt: skip
        alone = admin.reserve(20, f"{name}-alone")
        admin.grant(alone, 7)
        admin.commit(alone)
    run = admin.reserve_jointly("a", "b", plan=20)
    admin.grant(run, 7)
    admin.commit(run)
    assert taken(months, "a", "b") == taken(months, "a-alone", "b-alone")


def test_the_certificate_says_what_each_dataset_was_charged(months: Scenario) -> None:
    admin = months.admin
    run = admin.reserve_jointly("a", "b", plan=20)
    admin.grant(run, 7)
    with refused("reservation-open"):
        months.ledger.issue_certificate(admin.record, run)
    admin.commit(run)
    document = months.ledger.issue_certificate(admin.record, run)
    assert certificate.check(document)[0] == []
    assert (document["dataset"], document["dataset_size"]) == (None, 2000)
    for stated in document["datasets"]:
        dataset = months.dataset(stated["dataset"])
        spent = dataset.balance.spent
        assert stated["charged"]["share"] == dataset.policy.share_of(spent)
        assert spent[0] in stated["charged"].values()
        assert stated["budget"]["epsilon"] == dataset.policy.epsilon
        assert stated["record"]["head"] == dataset.head
    document["datasets"][0]["dataset_size"] -= 1
    faults = certificate.check(document)[0]
    assert any("1999 records" in fault for fault in faults)


@ON_SQLITE
def test_the_mechanism_runs_on_all_records_together(web: Service) -> None:
    admin = web.admin
    for name in ("one", "two"):
        admin.dataset(name)
    plan = {"kind": "dp_sgd", "noise_multiplier": 60.0, "batch_size": 1200, "epochs": 0.1}
    asked = {"datasets": ["one", "two"], "mechanism": plan | {"dataset_size": 120_000}}
    admin.make("/v1/reservations", asked)
    asked["mechanism"] = plan | {"dataset_size": 60_000}
    status, said = admin.post("/v1/reservations", asked)
    assert (status, said["code"]) == (422, "dataset-size-mismatch")
    assert said["errors"][0]["pointer"] == "/mechanism/dataset_size"


# --- nothing by halves


@pytest.mark.spread(first=1)
@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda ledger: ledger.admin.reserve(ledger.admin.affords("b"), "b"), "budget-exhausted"),
        (lambda ledger: ledger.admin.close("b"), "dataset-closed"),
        (lambda ledger: ledger.cap(0.0, key=ledger.admin.identifier, name="b"), "cap-exhausted"),
        (lambda ledger: ledger.admin.delete("b"), "not-found"),
    ],
)
def test_a_refusal_by_one_dataset_charges_none(
    spoil: Callable[[Scenario], Any], code: str, months: Scenario
) -> None:
    spoil(months)
    before = months.dataset("a")
    with refused(code) as found:
        months.admin.reserve_jointly("a", "b", plan=20)
    assert months.dataset("a") == before
    assert found.value.mechanism_at + str(found.value.pointer) == "/datasets/1"


def test_a_key_at_its_limit_of_runs_on_one_dataset_is_charged_on_none(months: Scenario) -> None:
    months.ledger = Ledger(months.repository, ANSWERS, run_quota=RunQuota(open_max=2))
    person = months.person()
    for _ in range(2):
        person.reserve(2, "b")
    before = [months.dataset(name) for name in NAMES]
    with refused("too-many-runs") as found:
        person.reserve_jointly("a", "b", "c", plan=20)
    assert found.value.mechanism_at + str(found.value.pointer) == "/datasets/1"
    assert [months.dataset(name) for name in NAMES] == before
    person.reserve_jointly("a", "c", plan=20)
    months.admin.reserve_jointly("a", "b", plan=20)  # another key has a limit of its own


@pytest.mark.slow
@SQL_MATTERS
def test_a_failure_in_the_middle_undoes_every_part(
    months: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write whose change of the last dataset fails changes no dataset."""
    admin = months.admin
    run, other = (admin.reserve_jointly(*NAMES, plan=20) for _ in range(2))
    admin.grant(other, 3)
    calls = [0]

    def fail_after(self: Transaction, method: Callable[..., Any], *arguments: Any) -> Any:
        done = method(self, *arguments)
        calls[0] -= 1
        if calls[0] == 0:
            raise KeyboardInterrupt
        return done

    for act, changes in (
        (lambda: admin.reserve_jointly(*NAMES, plan=20), 3),
        (lambda: admin.grant(run, 3), 3),
        (lambda: admin.renew(run), 3),
        (lambda: admin.release(run), 3),
        (lambda: admin.commit(other), 3),
        (lambda: admin.close("b"), 1),
    ):
        calls[0] = changes
        before = [months.dataset(name) for name in NAMES]
        with monkeypatch.context() as patch:
            for name in ("apply_change", "close_dataset"):
                method = getattr(Transaction, name)
                patch.setattr(Transaction, name, partialmethod(fail_after, method))
            with pytest.raises(KeyboardInterrupt):
                act()
        assert [months.dataset(name) for name in NAMES] == before
        act()
        assert [months.dataset(name) for name in NAMES] != before


# what every surface refuses: datasets of one run, the status, the code, and the pointer
BAD_DATASETS: list[tuple[Any, int, str, str]] = [
    (["plain", "plain"], 422, "invalid-request", "/datasets/1"),
    (["plain", "other"], 422, "datasets-differ", "/datasets/1"),
    (["plain", "person"], 422, "datasets-differ", "/datasets/1"),
    (["plain", "closed"], 409, "dataset-closed", "/datasets/1"),
    (["none", "plain"], 404, "not-found", "/datasets/0"),
    ([f"d{at}" for at in range(37)], 422, "invalid-request", "/datasets"),
    (["plain", "a b"], 422, "invalid-request", "/datasets/1"),
]
LONG = "0.3" + "0" * 398 + "1"  # a double keeps .3, which is less


def _amount(text: str, name: str = "epsilon") -> str:
    """Return a release of which one amount has this text, as JSON."""
    other = {"epsilon": "delta", "delta": "epsilon"}[name]
    return f'{{"kind": "approximate_dp", "{name}": {text}, "{other}": 1e-10}}'


# what every surface refuses: a mechanism, the status, and the pointer if it is about a place
BAD_AMOUNTS: list[tuple[str, int, str | None]] = [
    *(
        (_amount(text), 422, "/mechanism/epsilon")
        for text in (
            LONG, "0.30000000000000001665", "1.0000000000000001", "-0.1", "-1e-400", "1e999",
            "9" * 400, "1e-400", '"0.1"', "1e308",
        )
    ),
    *((_amount(text, "delta"), 422, "/mechanism/delta") for text in ("-1e-9", "2", "1e-400")),
    *((_amount(text), 400, None) for text in ("NaN", "Infinity", "-Infinity")),
    (_amount("100"), 409, None),
    ('{"kind": "zcdp", "rho": -1}', 422, "/mechanism/rho"),
    ('{"kind": "laplace", "noise_multiplier": 0}', 422, "/mechanism/noise_multiplier"),
    (f'{{"kind": "composed", "mechanisms": [{_amount("50")}, {_amount("1e308")}]}}', 422,
     "/mechanism/mechanisms/1/epsilon"),
    (f'{{"kind": "repeated", "count": 999999999, "mechanism": {_amount("90")}}}', 409, None),
]  # fmt: skip


def fill(admin: Caller) -> None:
    """Create datasets that may not be in one run, each with the budget (1, 1e-9)."""
    for name, fields in (
        ("plain", {}),
        ("same", {}),
        ("other", {"neighbouring_relation": "replace_one"}),
        ("person", {"privacy_unit": "person"}),
        ("closed", {}),
    ):
        admin.dataset(name, {"epsilon": 1.0, "delta": 1e-9}, **fields)
    admin.make("/v1/datasets/closed/close")


@ON_SQLITE
def test_bad_datasets_and_amounts_are_refused_with_a_pointer(own_web: Service) -> None:
    admin = own_web.admin
    fill(admin)
    no_lists = [(names, 422, "invalid-request", "/datasets") for names in ([], "plain")]
    for names, status, code, pointer in [*BAD_DATASETS, *no_lists]:
        said = admin.post("/v1/reservations", {"datasets": names, "mechanism": PLAN_JSON})
        found = (said[0], said[1]["code"], said[1]["errors"][0]["pointer"])
        assert found == (status, code, pointer), names
    headers = {"Authorization": f"Bearer {admin.key}", "Content-Type": "application/json"}
    for at, (mechanism, status, place) in enumerate(BAD_AMOUNTS):
        for listed in ('["plain"]', '["plain", "same"]'):
            body = f'{{"datasets": {listed}, "mechanism": {mechanism}}}'
            once = {"Idempotency-Key": f"{at} {listed}"}
            answer = own_web.http.post("/v1/reservations", content=body, headers=headers | once)
            told = answer.json()
            assert answer.status_code == status, (mechanism, told)
            assert place is None or told["errors"][0]["pointer"] == place, (mechanism, told)
    versions = [admin.look(name)["version"] for name in ("plain", "same", "other", "person")]
    assert versions == [1, 1, 1, 1], "none is charged"


@pytest.mark.slow
def test_commands_refuse_the_same_datasets_and_amounts(commands: Commands) -> None:
    with started(commands.url) as service:
        fill(service.admin)
    plan = json.dumps({"kind": "laplace", "noise_multiplier": 1000})
    for names, status, code, _ in BAD_DATASETS:
        found, said = commands("charge", *names, "-m", plan, "--json")
        problem = json.loads(said)
        assert (found, problem["status"], problem["code"]) == (2, status, code), (names, said)
    for mechanism, status, _ in BAD_AMOUNTS:
        for names in (["plain"], ["plain", "same"]):
            found, said = commands("charge", *names, "-m", mechanism, "--json")
            assert found == 2, (mechanism, said)
            assert json.loads(said)["status"] in (status, 422), (mechanism, said)
    for name in ("plain", "same", "other", "person"):
        assert commands.json(f"dataset show {name}")["version"] == 1, "none is charged"


# --- leases, retries, access


@SQL_MATTERS
def test_a_lease_may_end_on_one_dataset_first(months: Scenario) -> None:
    admin = months.admin
    run = admin.reserve_jointly("a", "b", plan=20, lease=60.0)
    admin.grant(run, 3)
    months.wait(61)
    admin.look_at_dataset("a")
    assert [months.runs(name)[0].state for name in "ab"] == [State.EXPIRED, State.OPEN]
    months.check()  # which is sound
    months.wait(-61)  # on a server whose clock is behind, the lease has not ended
    for act in (
        lambda: admin.grant(run, 1, 3),
        lambda: admin.renew(run),
        lambda: admin.commit(run),
    ):
        before = months.dataset("b")
        with refused("reservation-closed"):
            act()
        assert months.dataset("b") == before
    months.wait(61)
    assert {run.state for _, run in months.ledger.get_run(admin.record, run)} == {State.EXPIRED}
    for name in "ab":
        balance = months.dataset(name).balance
        assert balance.taken == balance.spent


def test_a_renewal_extends_every_lease(months: Scenario) -> None:
    run = months.admin.reserve_jointly("a", "b", plan=20, lease=60.0)
    months.admin.renew(run, 7200.0)
    months.wait(61)
    months.admin.look_at_dataset("a")
    months.admin.grant(run, 1)


@SQL_MATTERS
def test_a_retry_takes_effect_once(months: Scenario) -> None:
    admin = months.admin
    run = admin.reserve_jointly("a", "b", plan=20, once="first")
    first = admin.grant(run, 3, once="grant")
    admin.close("a")
    assert admin.reserve_jointly("a", "b", plan=20, once="first") == run
    assert admin.grant(run, 3, once="grant") == first
    assert [len(months.runs(name)) for name in "ab"] == [1, 1]


@ON_SQLITE
def test_a_key_of_one_dataset_sees_nothing_of_the_others(web: Service) -> None:
    admin = web.admin
    for name in ("mine", "theirs"):
        admin.dataset(name)
    asked = {"datasets": ["mine", "theirs"], "mechanism": PLAN_JSON}
    run = admin.make("/v1/reservations", asked)
    bound = web.caller(Scope.OWNER, Scope.RUN, datasets=("mine",))
    assert bound.post("/v1/reservations", asked)[0] == 404
    listed = bound.read("/v1/datasets/mine/reservations")["items"][0]
    assert (listed["dataset"], listed["run"]) == ("mine", run["id"])
    for part in {listed["id"], run["id"]}:
        assert bound.get(f"/v1/reservations/{part}")[0] == 404
        assert bound.post(f"/v1/reservations/{part}/release")[0] == 404
    shown = [bound.read(f"/v1/datasets/mine{part}") for part in ("/reservations", "/entries")]
    assert "theirs" not in json.dumps(shown)
    other = web.caller()
    assert other.post(f"/v1/reservations/{run['id']}/release")[0] == 403
    assert admin.refusal("DELETE", "/v1/datasets/theirs") == (409, "dataset-used")


@ON_SQLITE
def test_pages_reports_and_the_client_speak_of_all_datasets(web: Service) -> None:
    admin = web.admin
    for name in ("spring", "summer"):
        admin.dataset(name)
    client = admin.client()
    run = client.reserve(["spring", "summer"], PLAN_JSON)
    assert (run.dataset, run.datasets) == ("", ("spring", "summer"))
    run = client.commit(client.grant(run, 4))
    assert client.certificate(run)["datasets"][1]["dataset"] == "summer"
    assert client.reservation(run.identifier) == run
    report = admin.read(f"/v1/reservations/{run.identifier}/report")
    assert report["dataset"]["name"] == "spring, summer"
    record = admin.read(f"/v1/reservations/{run.identifier}/report?format=registry")
    assert "spring, summer" in str(yaml.safe_load(record))
    shown = admin.read("/metrics")
    for name in ("spring", "summer"):
        (taken,) = re.findall(f'accountant_budget_taken_epsilon{{dataset="{name}"}} (.*)', shown)
        assert float(taken) == admin.look(name)["spent"]["epsilon"] > 0
    web.sign_in(admin)
    assert "of summer" in web.http.get(f"/runs/{run.identifier}").text
    assert web.http.get("/datasets/spring").status_code == 200


@pytest.mark.slow
def test_a_run_on_several_datasets_by_commands(commands: Commands) -> None:
    for name in ("a", "b"):
        commands.make(f"dataset create {name} -n 1000 -E 3 -d 1e-5")
    run = commands.make("run reserve a b -s 6 -b 200 -t 9")
    assert "on a, b" in commands.make(f"run grant {run} --steps 9")
    assert commands.json(f"run show {run}")["mechanism"]["dataset_size"] == 2000
    assert "budget of b" in commands.make(f"run commit {run}")
    status, said = commands("run reserve a a -s 6 -q .1 -t 9")
    assert (status, "DATASET 'a' is named twice" in said) == (2, True), said
    assert commands("ledger verify")[0] == 0


# --- charges without a training program


@pytest.mark.slow
def test_a_release_is_charged_by_one_command(commands: Commands, tmp_path: Path) -> None:
    for name in ("a", "b"):
        commands.make(f"dataset create {name} -n 1000 -E .3 -d 1e-9")
    file = tmp_path / "certificate.json"
    said = commands.make("charge a --laplace 10 --purpose orders -o", str(file))
    assert "33.4 % of the budget" in said
    assert commands("verify", str(file))[0] == 0
    found = commands.json("charge a b --laplace 20 --epsilon .05")
    assert found["run"]["state"] == "committed"
    assert [each["dataset"] for each in found["certificate"]["datasets"]] == ["a", "b"]
    assert commands.json("dataset show a")["spent"]["added_epsilon"] == "0.2"
    charged = commands.json("charge b --epsilon 1/30")["run"]["mechanism"]["epsilon"]
    assert Fraction(repr(charged)) > Fraction(1, 30) > Fraction(repr(1 / 30)), "rounded up"
    status, said = commands("charge a --laplace 5")
    assert (status, "do not fit" in said) == (2, True)
    for line, words in (
        ("charge a", "--laplace"), ("charge a --laplace 0", "--laplace must be"),
        (f"charge a --epsilon {LONG}", "epsilon must be"),
    ):  # fmt: skip
        status, said = commands(line)
        assert (status, words in said) == (2, True), said
    assert commands("ledger verify")[0] == 0


@ON_SQLITE
def test_a_release_is_charged_before_the_body_makes_it(web: Service) -> None:
    web.admin.dataset("query", {"epsilon": 0.3, "delta": 1e-9})
    dataset = LedgerDataset(web.admin.client(), "query")
    with dataset.charge(laplace(10), "orders") as charge:
        assert web.admin.look("query")["spent"]["added_epsilon"] == "0.1"
    assert charge.certificate is not None
    assert charge.certificate["state"] == "committed"
    with pytest.raises(RuntimeError), dataset.charge(gaussian(400)):
        raise RuntimeError  # what it had released by then is unknown
    assert web.admin.look("query")["held"]["share"] == 0
    before = web.admin.look("query")
    with pytest.raises(BudgetExhaustedError), dataset.charge(approximate_dp(0.3)):
        raise AssertionError
    assert web.admin.look("query") == before


# --- verification


def cut_off(scenario: Scenario, name: str, number: int) -> list[str]:
    """Return statements that cut off a dataset's entries after a number, its rows in accord."""
    dataset, run = scenario.dataset(name), scenario.runs(name)[0]
    with scenario.repository.reading() as reading:
        last = reading.list_entries(dataset, number - 1)[0]
    held = json.dumps(dataset.policy.nothing and list(run.charge.reserved))
    return [
        f"DELETE FROM entry WHERE dataset = '{dataset.identifier}' AND number > {number}",
        f"UPDATE reservation SET steps_granted = 0 WHERE id = '{run.identifier}'",
        f"UPDATE dataset SET version = {number}, head = '{last.hash}', held = '{held}', "
        f"spent = '{json.dumps(list(dataset.policy.nothing))}' WHERE name = '{name}'",
    ]


@pytest.mark.slow
def test_verify_compares_the_parts_of_a_run(months: Scenario) -> None:
    admin = months.admin
    run = admin.reserve_jointly("a", "b", plan=20)
    admin.grant(run, 3)
    found = months.faults_after(*cut_off(months, "a", 2))
    assert len(found) == 1  # the dataset alone is sound
    assert "steps_granted" in found[0]
    part = months.runs("b")[0].identifier
    gone = months.faults_after(f"DELETE FROM reservation WHERE id = '{part}'")
    assert any("lacks its reservations" in fault for fault in gone)
    assert months.faults_after(f"UPDATE reservation SET joint = NULL WHERE id = '{part}'")


@pytest.mark.slow
def test_an_export_of_all_datasets_is_compared_too(months: Scenario) -> None:
    admin = months.admin
    run = admin.reserve_jointly("a", "b", plan=20)
    admin.grant(run, 3)

    def export(*names: str) -> list[str]:
        query = exporting.EntryQuery(names)
        with months.repository.snapshot() as reading:
            found = list(exporting.iterate_entries(reading, query))
        return [json.dumps(entry.to_json()) for entry in found]

    assert verify_export(export("a", "b")).faults == verify_export(export("a")).faults == []
    torn = export("a")[:-1] + export("b")
    assert "steps_granted" in verify_export(torn).faults[0]


@pytest.mark.slow
def test_earlier_servers_must_not_write_beside_a_joint_run(months: Scenario) -> None:
    months.admin.reserve_jointly("a", plan=3)
    with months.repository.reading() as reading:
        assert reading.connection.execute(SCHEMA.select()).scalar() == "0009"


# --- races


def race_on_three_datasets(scenario: Scenario, seed: int) -> list[Any]:
    """Racing runs on two or three datasets, named in any order, and runs on one beside them."""
    random_numbers = random.Random(seed)
    people = [scenario.person(Scope.RUN) for _ in range(12)]

    def work(at: int) -> None:
        names = random_numbers.sample(NAMES, 1 + at % 3)
        run = people[at].reserve_jointly(*names, plan=400)
        people[at].grant(run, 100)
        if at % 2:
            people[at].commit(run)

    return race(*(partial(work, at) for at in range(len(people))))


@SQL_MATTERS
@pytest.mark.slow
def test_racing_runs_neither_wait_for_each_other_nor_overspend(
    months: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations.plans, "find_affordable", lambda *_: (0, None))
    months.admin.delete("c")  # its first run would choose the reference
    months.admin.create("c", epsilon=4.0)
    answers = race_on_three_datasets(months, 1)
    assert set(refusals(answers)) <= {"budget-exhausted"}
    assert None in answers
    for name in NAMES:
        dataset = months.dataset(name)
        assert dataset.policy.admits(dataset.balance.taken)


@ON_POSTGRESQL
def test_runs_over_http_that_queue_at_one_dataset_only_never_wait_in_a_circle(
    own_web: Service,
) -> None:
    """Runs on any of four datasets, by twelve callers; caps and looks take locks beside them.

    A run queues in the server at the dataset that it locks first, and in the database at the
    others. A deadlock would be answered with 503, and so would a wait of 5 s.
    """
    admin, names = own_web.admin, [f"d{at}" for at in range(4)]
    for name in names:
        admin.dataset(name, filter="renyi", planned_mechanism=PLAN_JSON)
    random_numbers = random.Random(4)
    chosen = [
        [random_numbers.sample(names, random_numbers.randint(1, 4)) for _ in range(3)]
        for _ in range(12)
    ]

    def work(caller: Caller, runs: list[list[str]]) -> list[int]:
        """Make three runs; return the statuses of all answers."""
        found = []
        for each in runs:
            asked = {"datasets": each, "mechanism": PLAN_JSON}
            status, run = caller.post("/v1/reservations", asked)
            cap = f"/v1/datasets/{each[-1]}/caps/keys/{caller.identifier}"
            found += [status, admin.ask("PUT", cap, {"share": 0.9})[0]]
            found += [caller.grant(run["id"], 3, 0)[0], caller.get(f"/v1/datasets/{each[0]}")[0]]
            found += [caller.commit(run["id"])[0]]
        return found

    works = [partial(work, own_web.caller(), runs) for runs in chosen]
    statuses = [status for found in race(*works) for status in found]  # type: ignore[union-attr]
    assert set(statuses) == {200, 201}
    for name in names:
        runs = sum(name in each for every in chosen for each in every)
        assert admin.look(name)["version"] == 1 + 3 * runs
