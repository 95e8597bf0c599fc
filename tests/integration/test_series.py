"""Series of datasets: a template, a dataset for each period, and one run on the last ones."""

from __future__ import annotations

import math
from functools import partial
from statistics import NormalDist
from typing import Any

import pytest

from accountant_service.ledger import plans
from accountant_service.ledger.api_keys import Scope
from accountant_service.ledger.rules import Cap, HolderKind
from accountant_service.ledger.series import Template, bound_loss_in_all
from accountant_service.ledger.series_catalog import SeriesCatalog
from accountant_service.ledger.verification import verify_snapshot
from tests.support.ledger_scenarios import (
    ADD_OR_REMOVE,
    ON_POSTGRESQL,
    ON_SQLITE,
    PLAN_JSON,
    SQL_MATTERS,
    Commands,
    Scenario,
    Service,
    race,
    refusals,
    refused,
    undone,
)

BUDGET = {"epsilon": 1.0, "delta": 1e-9}
TEMPLATE = Template(1.0, 1e-9, ADD_OR_REMOVE, "sale")
QUERY = {"kind": "laplace", "noise_multiplier": 10}


class Months:
    """A series `sales` in a ledger of this process."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.catalog = scenario, SeriesCatalog(scenario.repository)
        self.key = scenario.admin.record
        self.catalog.create(self.key, "sales", TEMPLATE)

    def add(self, label: str, size: int = 1000, series: str = "sales") -> tuple[str, bool]:
        policy = plans.choose_policy(TEMPLATE.example)
        found, is_new = self.catalog.add_dataset(self.key, series, label, size, policy)
        return found.name, is_new

    def cap(self, share: float) -> None:
        self.catalog.set_cap(self.key, "sales", Cap(HolderKind.TEAM, "vision", share))

    def shares(self, name: str) -> list[float]:
        return [use.cap.share for use in self.scenario.caps.list_uses(name)[1]]


@pytest.fixture
def months(scenario: Scenario) -> Months:
    return Months(scenario)


@pytest.fixture
def sales(web: Service) -> str:
    """The name of a series over HTTP with two months; the tests share the ledger."""
    assert web.admin.ask("PUT", "/v1/series/sales", {"budget": BUDGET})[0] in (200, 201)
    for label in ("2026-10", "2026-11"):
        web.admin.ask("PUT", f"/v1/series/sales/datasets/{label}", {"size": 1000})
    return "sales"


@SQL_MATTERS
def test_a_month_is_created_once_with_the_budget_and_caps_of_the_series(months: Months) -> None:
    months.cap(0.3)
    assert months.add("2026-10") == ("sales-2026-10", True)
    assert months.add("2026-10") == ("sales-2026-10", False)
    months.add("2026-12")
    months.add("2026-11")  # late
    dataset = months.scenario.dataset("sales-2026-10")
    assert (dataset.policy.epsilon, dataset.privacy_unit, dataset.series) == (1.0, "sale", "sales")
    assert months.shares("sales-2026-12") == [0.3]
    months.cap(0.2)  # those before too
    assert months.shares("sales-2026-10") == [0.2]
    assert months.catalog.find_window(months.key, "sales", 2) == ["sales-2026-11", "sales-2026-12"]
    months.catalog.remove_cap(months.key, "sales", HolderKind.TEAM, "vision")
    months.add("2027-01")
    assert [months.shares(f"sales-{each}") for each in ("2026-10", "2027-01")] == [[], []]


@SQL_MATTERS
def test_what_is_no_month_of_the_series_is_refused_and_nothing_is_made(months: Months) -> None:
    months.add("2026-10")
    months.scenario.admin.create("sales-2026-11")
    for label, size, code in (
        ("2026-9", 1000, "series-label"),
        ("2026-10", 999, "name-taken"),
        ("2026-11", 1000, "name-taken"),
        ("2026-12", 10**9, "weak-guarantee"),
    ):
        before = months.scenario.audit("dataset-created", "series-extended")
        with refused(code):
            months.add(label, size)
        assert months.scenario.audit("dataset-created", "series-extended") == before
    with refused("name-taken", "template"):
        months.catalog.create(months.key, "sales", Template(2.0, 1e-9, ADD_OR_REMOVE, "sale"))
    with refused("name-taken"):
        months.scenario.admin.create("sales")
    with refused("name-taken"):
        months.catalog.create(months.key, "sales-2026-11", TEMPLATE)
    with refused("series-too-short", "1 datasets, fewer than 2"):
        months.catalog.find_window(months.key, "sales", 2)
    months.scenario.admin.delete("sales-2026-10")
    months.add("2026-9")  # no other label is left


def test_a_series_gets_no_name_that_a_key_is_bound_to(scenario: Scenario) -> None:
    """The key was for one dataset, and would be for all of the series."""
    catalog, key = SeriesCatalog(scenario.repository), scenario.admin.record
    bound = scenario.person(datasets=("other", "sales"))
    with refused("name-taken", f"key {bound.identifier} is bound"):
        catalog.create(key, "sales", TEMPLATE)
    scenario.keys.revoke(bound.identifier, "test")
    assert catalog.create(key, "sales", TEMPLATE)[1]
    scenario.person(datasets=("sales",))  # of the series, which is there
    assert not catalog.create(key, "sales", TEMPLATE)[1], "a repeat changes nothing"


@ON_SQLITE
def test_verify_warns_of_a_name_of_a_dataset_and_of_a_series_that_a_key_is_bound_to(
    months: Months,
) -> None:
    """Only a ledger of an earlier version has such a pair; it is no fault."""
    scenario = months.scenario
    key = scenario.person(datasets=("sales",))
    scenario.admin.create()
    with undone(scenario.repository) as transaction:
        assert verify_snapshot(transaction).warnings == ()
        transaction.connection.exec_driver_sql("UPDATE dataset SET name = 'sales'")
        (warning,) = verify_snapshot(transaction).warnings
        assert f"key {key.identifier} is bound to 'sales'" in warning
        transaction.connection.exec_driver_sql("UPDATE api_key SET revoked_at = 1")
        assert verify_snapshot(transaction).warnings == ()


@SQL_MATTERS
def test_a_key_of_the_series_follows_it(months: Months) -> None:
    months.add("2026-10")
    scenario = months.scenario
    key = scenario.person(Scope.RUN, datasets=("sales",))
    scenario.admin.create("sales-of-others")  # its name alone gives no right
    before = scenario.keys.authenticate(key.token)
    months.add("2026-11")
    after = scenario.keys.authenticate(key.token)
    assert set(before.datasets or ()) == {"sales", "sales-2026-10"}
    assert set(after.datasets or ()) == {"sales", "sales-2026-10", "sales-2026-11"}
    assert [each.name for each in scenario.ledger.list_datasets(after)] == [
        "sales-2026-10",
        "sales-2026-11",
    ]
    with refused("not-found"):
        scenario.ledger.get_dataset(after, "sales-of-others")
    with refused("forbidden"):
        policy = plans.choose_policy(TEMPLATE.example)
        months.catalog.add_dataset(after, "sales", "2026-12", 10, policy)
    scenario.caps.set("sales-2026-11", Cap(HolderKind.KEY, key.identifier, 0.5), "owner")
    other = scenario.keys.authenticate(scenario.person(datasets=("sales-2026-10",)).token)
    with refused("not-found"):
        months.catalog.get(other, "sales")
    assert months.catalog.list_series(other) == []


@ON_POSTGRESQL
def test_racing_months_and_caps_leave_every_month_with_the_last_cap(months: Months) -> None:
    """Eight servers create two months while two caps are set: each month once, with the last."""
    acts: list[Any] = [lambda at=at: months.add(f"2026-0{1 + at % 2}") for at in range(8)]
    acts += [lambda share=share: months.cap(share) for share in (0.1, 0.2)]
    answers = race(*acts)
    assert refusals(answers) == []
    assert sorted(is_new for _, is_new in answers[:8]) == [False] * 6 + [True] * 2  # type: ignore[misc]
    state = months.catalog.get(months.key, "sales")
    assert {tuple(months.shares(name)) for name in state.names} == {(state.caps[0].share,)}


@ON_POSTGRESQL
def test_a_series_and_a_dataset_that_are_created_at_once_get_no_common_name(months: Months) -> None:
    for name in (f"x{at}" for at in range(20)):
        answers = race(
            partial(months.catalog.create, months.key, name, TEMPLATE),
            partial(months.scenario.admin.create, name),
        )
        assert refusals(answers) == ["name-taken"]


@SQL_MATTERS
def test_an_altered_series_is_found(months: Months) -> None:
    months.add("2026-10")
    months.cap(0.3)
    months.scenario.admin.create("other")
    for statement, fault in (
        ("UPDATE series SET template = replace(template, '1.0', '9.0')", "was altered"),
        ("UPDATE series SET template = '{}'", "cannot be read"),
        ("UPDATE dataset SET series = 'sales' WHERE name = 'other'", "'other': it is in series"),
        ("UPDATE dataset SET series = NULL WHERE series = 'sales'", "it is in series None"),
        ("UPDATE series_cap SET share = 1.0", "the cap of team vision is 1.0"),
        ("DELETE FROM series_cap", "has no row"),
    ):
        found = months.scenario.faults_after(statement)
        assert any(fault in each for each in found), (statement, found)


# --- over HTTP


@ON_SQLITE
def test_a_window_says_what_a_run_costs_each_month_and_what_is_proved(
    sales: str, web: Service
) -> None:
    admin = web.admin
    october = f"{sales}-2026-10"
    assert admin.ask("PUT", f"/v1/series/{sales}/datasets/2026-10", {"size": 1000})[0] == 200
    run = admin.make(f"/v1/datasets/{october}/reservations", {"mechanism": QUERY | {
        "noise_multiplier": 2}})  # fmt: skip
    window = admin.read(f"/v1/series/{sales}/window?last=2")
    assert [each["name"] for each in window["items"]] == [october, f"{sales}-2026-11"]
    assert (window["size"], window["protection"]["one"]) == (2000, BUDGET)
    together = window["protection"]["all"]
    assert together["epsilon"] == 2.0
    assert 1 <= together["delta"] / (1e-9 * (1 + math.e)) < 1 + 1e-8
    asked = {"mechanism": QUERY, "last": 2}
    status, quote = admin.post(f"/v1/series/{sales}/quotes", asked)
    assert (status, quote["fits"], quote["protection"]) == (200, True, window["protection"])
    used, fresh = quote["items"]
    assert (used["dataset"], fresh["share_of_budget"]) == (october, pytest.approx(0.1, rel=1e-3))
    assert used["epsilon_after"] > fresh["epsilon_after"]
    names = [each["name"] for each in window["items"]]
    assert admin.post("/v1/quotes", {"datasets": names, "mechanism": QUERY}) == (200, quote)
    large = {"kind": "laplace", "noise_multiplier": 1.6}  # fits November alone
    quote = admin.make(f"/v1/series/{sales}/quotes", {"mechanism": large, "last": 2})
    assert [quote["fits"], *(each["fits"] for each in quote["items"])] == [False, False, True]
    admin.make(f"/v1/reservations/{run['id']}/release")
    joint = admin.make("/v1/reservations", {"datasets": names, "mechanism": large})
    admin.make(f"/v1/reservations/{joint['id']}/release")


@ON_SQLITE
def test_bad_requests_about_series_are_refused_with_a_pointer(sales: str, web: Service) -> None:
    admin = web.admin
    plan = {"kind": "dp_sgd", "noise_multiplier": 4.0, "dataset_size": 1000, "batch_size": 10,
            "epochs": 1}  # fmt: skip
    for method, path, body, status, pointer in (
        ("PUT", "/v1/series/new", {"budget": BUDGET | {"epsilon": -1}}, 422, "/budget/epsilon"),
        ("PUT", "/v1/series/new", {"budget": BUDGET | {"epsilon": 21}}, 422, "/budget/epsilon"),
        ("PUT", "/v1/series/new", {"budget": BUDGET, "size": 3}, 422, "/size"),
        ("PUT", "/v1/series/new", {"budget": BUDGET, "planned_mechanism": plan}, 422,
         "/planned_mechanism/dataset_size"),
        ("PUT", f"/v1/series/{sales}", {"budget": BUDGET, "privacy_unit": "x"}, 409, None),
        ("PUT", f"/v1/series/{sales}/datasets/2026-12", {"size": 0}, 422, "/size"),
        ("PUT", f"/v1/series/{sales}/datasets/2026-12", {"size": 10**10}, 422, "/size"),
        ("PUT", f"/v1/series/{sales}/datasets/12", {"size": 10}, 422, "/path/label"),
        ("PUT", f"/v1/series/{sales}/datasets/a b", {"size": 10}, 422, "/path/label"),
        ("PUT", "/v1/series/none/datasets/2026-12", {"size": 10}, 404, None),
        ("GET", f"/v1/series/{sales}/window?last=0", None, 422, "/query/last"),
        ("GET", f"/v1/series/{sales}/window?last=37", None, 422, "/query/last"),
        ("GET", f"/v1/series/{sales}/window?last=3", None, 409, "/last"),
        ("POST", f"/v1/series/{sales}/quotes", {"last": 3, "mechanism": QUERY}, 409, "/last"),
        ("POST", f"/v1/series/{sales}/quotes", {"last": 2, "mechanism": plan}, 422,
         "/mechanism/dataset_size"),
        ("POST", "/v1/quotes", {"datasets": [f"{sales}-2026-10"] * 2, "mechanism": QUERY}, 422,
         "/datasets/1"),
        ("POST", "/v1/quotes", {"datasets": [f"{sales}-2026-10", "none"], "mechanism": QUERY}, 404,
         "/datasets/1"),
        ("PUT", f"/v1/series/{sales}/caps/teams/vision", {"share": 2}, 422, "/share"),
        ("PUT", f"/v1/series/{sales}/caps/keys/none", {"share": 0.2}, 404, None),
        ("DELETE", f"/v1/series/{sales}/caps/teams/vision", None, 404, None),
    ):  # fmt: skip
        found, said = admin.ask(method, path, body)
        pointers = [each["pointer"] for each in said.get("errors", [])]
        assert (found, pointers) == (status, [] if pointer is None else [pointer]), (path, said)
    assert [each["name"] for each in admin.read("/v1/series")["items"]] == [sales]
    assert admin.read(f"/v1/series/{sales}")["dataset_count"] == 2


@ON_SQLITE
def test_an_owner_key_of_the_series_creates_months_and_nothing_else(
    sales: str, web: Service
) -> None:
    bound = web.caller(Scope.OWNER, Scope.RUN, datasets=(sales,))
    assert bound.ask("PUT", f"/v1/series/{sales}/caps/teams/vision", {"share": 0.5})[0] == 200
    assert bound.ask("PUT", f"/v1/series/{sales}/datasets/2027-01", {"size": 1000})[0] == 201
    assert bound.look(f"{sales}-2027-01")["series"] == sales
    assert bound.read(f"/v1/series/{sales}/window?last=3")["size"] == 3000
    assert bound.ask("PUT", "/v1/series/more", {"budget": BUDGET})[0] == 403
    assert web.admin.ask("DELETE", f"/v1/series/{sales}/caps/teams/vision")[0] == 204
    web.admin.ask("DELETE", f"/v1/datasets/{sales}-2027-01")


# --- what several budgets prove together


def delta_of_gaussian(mu: float, epsilon: float) -> float:
    phi = NormalDist().cdf
    return phi(mu / 2 - epsilon / mu) - math.exp(epsilon) * phi(-mu / 2 - epsilon / mu)


def test_a_person_in_several_months_is_protected_by_group_privacy_and_not_by_addition() -> None:
    """A run with μ = 1 for a record has μ = 2 for a person with one in each of two months."""
    delta = delta_of_gaussian(1, 3)  # of each month's budget, all of it taken by the run
    at_risk = delta_of_gaussian(2, 6)
    assert at_risk > 3 * (2 * delta)
    proved = bound_loss_in_all([(3.0, delta)] * 2)
    assert proved is not None
    assert proved[0] == 6.0
    assert at_risk <= proved[1]


def test_budgets_that_prove_nothing_together_are_none() -> None:
    assert bound_loss_in_all([(1.0, 0.0)] * 900) == (900.0, 0.0)
    assert bound_loss_in_all([(10.0, 1e-9)] * 4) is None
    assert bound_loss_in_all([(1000.0, 1e-50)] * 2) is None
    assert bound_loss_in_all([(0.1, 1e-9)] * 3) == (0.3, pytest.approx(3.3266e-9, rel=1e-3))
    # of unequal budgets, the largest δ grows least
    assert bound_loss_in_all([(1.0, 0.0), (5.0, 1e-3)]) == (6.0, pytest.approx(1e-3))


# --- by commands


@pytest.mark.slow
def test_a_series_by_commands(commands: Commands) -> None:
    said = commands.make("series create sales -E 1 -d 1e-9 --unit sale")
    assert "each dataset has ε = 1, δ = 1e-9" in said
    commands.make("caps set sales --share .5 --team vision")
    for label in ("2026-10", "2026-11"):
        assert "created sales-" in commands.make(f"series add sales {label} -n 1000")
    assert "created before" in commands.make("series add sales 2026-11 -n 1000")
    assert commands.json("series list")[0]["last_dataset"] == "sales-2026-11"
    assert "team vision may take 0.5" in commands.make("series show sales")
    said = commands.make("series window sales --last 2 -s 20 -b 200 -t 9")
    for words in ("this run", "the run fits all of them", "in all of them: ε = 2, δ = 3.7"):
        assert words in said, said
    names = commands.make("series window sales --last 2 --names").split()
    assert names == ["sales-2026-10", "sales-2026-11"]
    commands.make(f"run reserve {' '.join(names)} -s 20 -b 200 -t 9")
    for line, words in (
        ("series add sales 2026-9 -n 5", "LABEL"),
        ("series add sales x/y -n 5", "LABEL"),
        ("series add sales 2026-12", "--size"),
        ("series add none 2026-12 -n 5", "no series"),
        ("series window sales --last 0", "--last"),
        ("series window sales --last 3", "fewer than 3"),
        ("series create sales -E 2 -d 1e-9", "another template"),
    ):
        status, said = commands(line)
        assert (status, words in said) == (2, True), said
    commands.make("caps remove sales --team vision")
    assert commands("ledger verify")[0] == 0


@ON_SQLITE
def test_pages_and_the_client_show_series(sales: str, web: Service) -> None:
    client = web.admin.client()
    assert client.add_to_series(sales, "2026-11", 1000)["name"] == f"{sales}-2026-11"
    window = client.window(sales, 2)
    assert window.names == (f"{sales}-2026-10", f"{sales}-2026-11")
    assert window.size == 2000
    assert client.quote(window.names, PLAN_JSON).fits
    web.sign_in(web.admin)
    listed, page = (web.http.get(path).text for path in ("/series", f"/series/{sales}?last=2"))
    assert f'href="/series/{sales}"' in listed
    assert "A person in all of them" in page
    assert web.http.get(f"/series/{sales}?last=99").status_code == 200
    assert web.http.get("/series/none").status_code == 404
