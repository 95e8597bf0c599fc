"""The rest of a budget is told in steps: by the API, certificates and the command line."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from accountant_service import cli
from accountant_service.ledger import certificate, plans
from accountant_service.ledger.api_keys import Scope
from accountant_service.ledger.filters import ReferenceFilter
from accountant_service.ledger.rules import Balance, Dataset, NewDataset
from accountant_service.ledger.step_plan import StepPlan
from accountant_service.mechanisms import DpSgd, from_json
from accountant_service.operations.settings import Settings
from accountant_service.server.app import create_app
from tests.support.helpers import ADD_OR_REMOVE as ADD_OR_REMOVE_ONE
from tests.support.helpers import nightly
from tests.support.helpers import run as run_of

RUN = run_of(0.01, 1.1, 100)
BUDGET = {"epsilon": 1.0, "delta": 1e-5}
STEPS = 421  # of RUN, that are (1, 1e-5)-DP with a thousandth of δ as slack

Post = Callable[..., Any]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('steps')}/ledger.db"


@pytest.fixture(scope="module")
def post(database: str) -> Iterator[Post]:
    app = create_app(Settings(database_url=database))
    with TestClient(app) as http:
        key, _ = app.state.keys.create([Scope.ADMIN], "admin")
        http.headers["Authorization"] = f"Bearer {key}"

        def post(path: str, body: Any = None) -> Any:
            headers = {"Idempotency-Key": uuid.uuid4().hex}
            answer = http.get(path) if body is None else http.post(path, json=body, headers=headers)
            assert answer.is_success, answer.text
            return answer.json()

        yield post


@pytest.fixture(scope="module")
def run(post: Post) -> str:
    """A committed run of a hundred steps, which are the reference."""
    dataset = {"name": "patients", "size": 60_000, "budget": BUDGET}
    post("/v1/datasets", dataset)
    identifier: str = post("/v1/datasets/patients/reservations", {"mechanism": RUN})["id"]
    post(f"/v1/reservations/{identifier}/grants", {"steps": 100, "sequence": 0})
    post(f"/v1/reservations/{identifier}/commit", {})
    return identifier


def command(database: str, *arguments: str) -> str:
    """Return what a command prints."""
    environment = {"ACCOUNTANT_DATABASE_URL": database}
    done = CliRunner().invoke(cli.app, list(arguments), env=environment)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_new_budget_says_what_it_admits(post: Post) -> None:
    made = post("/v1/datasets", {"name": "new", "size": 100, "budget": BUDGET})
    steps = {each["step"]["sample_rate"]: each["steps"] for each in made["admits"]}
    assert steps[0.01] == STEPS
    assert steps[0.001] > STEPS > steps[0.1]
    assert made["warnings"] == []
    assert "admits" not in post("/v1/datasets/new"), "it is computed once"


def test_a_useless_budget_warns_and_names_the_way_out(post: Post) -> None:
    for name in ("reference", "renyi"):
        small = {"epsilon": 1e-4, "delta": 1e-40}
        made = post(
            "/v1/datasets", {"name": f"small-{name}", "size": 100, "budget": small, "filter": name}
        )
        assert {each["steps"] for each in made["admits"]} == {0}
        (warning,) = made["warnings"]
        assert "larger ε or δ" in warning
        assert ('"filter": "reference"' in warning) == (name == "renyi")


SEVERAL: dict[str, Any] = {
    "kind": "composed",
    "mechanisms": [RUN, {"kind": "gaussian", "noise_multiplier": 20.0}],
}


def test_the_reference_of_a_plan_of_several_mechanisms_is_a_small_part_of_it() -> None:
    """A hundred parts make up the plan, without slack; the rest of the budget is not lost."""
    plan, unused = StepPlan.of(from_json(SEVERAL)), (0, 0)
    policy = ReferenceFilter(1.0, 1e-5, ADD_OR_REMOVE_ONE).after_reserving(plan, unused)
    assert isinstance(policy, ReferenceFilter)
    assert policy.is_sound()
    charge = policy.compute_charge(plan, unused)
    assert charge.reserved == (100, 0)
    assert policy.is_charge_sufficient(plan, charge)
    assert not policy.is_charge_sufficient(plan, replace(charge, reference_steps=99))
    run = StepPlan.of(from_json(RUN))
    left = policy.count_affordable_steps(run, charge.reserved)
    assert left is not None
    assert left >= policy.steps - 100 >= 250


def test_unequal_numbers_of_steps_are_divided_as_far_as_they_can_be() -> None:
    counts = (60, 40, 20)
    parts = [RUN | {"noise_multiplier": 2.0 + at, "steps": n} for at, n in enumerate(counts)]
    plan = StepPlan.of(from_json({"kind": "composed", "mechanisms": parts}))
    policy = ReferenceFilter(1.0, 1e-5, ADD_OR_REMOVE_ONE).with_reference(plan, is_planned=True)
    assert policy.compute_charge(plan, (0, 0)).reserved == (20, 0)


def test_a_plainly_weaker_run_takes_no_slack_before_its_end() -> None:
    run = StepPlan.of(from_json(RUN))
    policy = ReferenceFilter(1.0, 1e-5, ADD_OR_REMOVE_ONE).with_reference(run, is_planned=True)
    quieter = StepPlan.of(from_json(RUN | {"noise_multiplier": 1.1001, "steps": 1}))
    assert policy.compute_charge(quieter, (0, 0)).reserved == (1, 0)


def test_a_planned_mechanism_that_does_not_fit_is_named() -> None:
    step = from_json(RUN | {"steps": 1, "sample_rate": 0.5})
    policy = ReferenceFilter(0.1, 1e-5, ADD_OR_REMOVE_ONE).with_reference(
        StepPlan.of(step), is_planned=True
    )
    preview = plans.preview_budget(policy, step)
    assert preview.runs[0].steps == 0
    assert "no step of the planned mechanism (DP-SGD, q = 0.5" in preview.warnings[0]


def test_an_admitted_run_fits_and_one_step_more_does_not() -> None:
    """The preview counts what a first run may reserve: neither less nor more."""
    policy = ReferenceFilter(1.0, 1e-5, ADD_OR_REMOVE_ONE)
    for run in plans.preview_budget(policy).runs:
        assert run.steps is not None
        for more, fits in ((0, True), (1, False)):
            whole = plans.StepPlan.of(plans.with_steps(run.step, run.steps + more))
            if whole.steps and run.steps + more:
                charge = policy.after_reserving(whole, (0, 0)).compute_charge(whole, (0, 0))
                assert policy.after_reserving(whole, (0, 0)).admits(charge.reserved) == fits


@pytest.mark.slow
def test_shares_and_steps_add_up(post: Post, run: str) -> None:
    found = post("/v1/datasets/patients")
    assert found["accounting"]["reference_steps"] == STEPS
    assert found["remaining"]["reference_steps"] == STEPS - 100
    parts = [found[part]["share"] for part in ("spent", "held", "remaining")]
    assert sum(parts) == pytest.approx(1)
    assert parts[0] == pytest.approx(100 / STEPS)
    assert "DP-SGD, q = 0.01, σ = 1.1, Poisson sampling" in found["accounting"]["description"]
    charge = post(f"/v1/reservations/{run}")["charge"]
    assert (charge["reference_steps"], charge["slack"]) == (100, 0)


@pytest.mark.slow
def test_a_certificate_names_the_filter(post: Post, run: str) -> None:
    document = post(f"/v1/reservations/{run}/certificate")
    budget = document["budget"]
    assert budget["scope"] == "filter_budget"
    assert f"{STEPS} reference steps" in budget["composition"]
    assert "0.1 % of δ is set aside" in budget["composition"]
    assert budget["filter"]["filter"] == "reference"
    assert budget["filter"]["reference_steps"] == STEPS
    assert certificate.check(document)[0] == []
    budget["filter"]["reference_steps"] += 1
    assert certificate.check(document)[0] != [], "the signature covers it"


def test_the_command_line_tells_it_in_steps(post: Post, run: str, database: str) -> None:
    shown = command(database, "ledger", "show")
    assert f"patients: {STEPS - 100} more steps like the last run (DP-SGD, q = 0.01" in shown
    views = {
        view["name"]: view for view in json.loads(command(database, "ledger", "show", "--json"))
    }
    left = views["patients"]["steps_left"]
    assert (left["steps"], left["is_exact"], left["run"]) == (STEPS - 100, True, run)


@pytest.mark.slow
def test_the_command_line_quotes(post: Post, run: str, database: str) -> None:
    plan = json.dumps(RUN | {"steps": 200})
    told = command(database, "ledger", "quote", "patients", "-m", plan)
    assert told.startswith("fits; it takes 47.6 % of the budget"), "rounded up"
    assert f"{STEPS - 100} fit what is left; as the only plan of the budget, {STEPS} would" in told
    plan = json.dumps(RUN | {"steps": STEPS})
    told = command(database, "ledger", "quote", "patients", "-m", plan)
    assert told.startswith("does not fit")
    assert "is enough" in told
    quoted = json.loads(command(database, "ledger", "quote", "patients", "--json", "-m", plan))
    assert quoted["affordable_alone"] == STEPS


def untouched(epsilon: float, planned: DpSgd | None = None) -> Dataset:
    """Return a dataset of which nothing is spent."""
    new = NewDataset("d", 60_000, epsilon, 1e-5, ADD_OR_REMOVE_ONE, "record", planned)
    policy = plans.choose_policy(new)
    nothing = Balance(policy.nothing, policy.nothing)
    return Dataset("", "d", 60_000, "record", policy, nothing, 0, "", 0)


def boundary_of(dataset: Dataset, run: Callable[[float], DpSgd]) -> float:
    """Return the least noise multiplier with which a run fits by `PrivacyFilter.fits`."""
    low, high = 0.3, 30.0
    for _ in range(45):
        middle = (low * high) ** 0.5
        fits = dataset.policy.fits(StepPlan.of(run(middle)), dataset.balance.taken)
        low, high = (low, middle) if fits else (middle, high)
    return high


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, nightly(3)])
def test_a_quoted_noise_multiplier_can_be_reserved(steps: int) -> None:
    """The run alone is within ε, and its Gaussian noise is a hair more than whole steps."""
    dataset = untouched(1.0)

    def run(noise_multiplier: float) -> DpSgd:
        return DpSgd(noise_multiplier, sample_rate=1.0, steps=steps, sampling="none")

    at = boundary_of(dataset, run)
    planned = plans.compute_charge(dataset, run(at))
    assert not planned.policy.admits(planned.charge.reserved), "one reference step too many"
    quote = plans.quote_plan(dataset, run(at))
    assert not quote.fits
    assert quote.least_noise_multiplier is not None
    assert quote.least_noise_multiplier == pytest.approx(at, rel=3e-4)
    assert quote.least_noise_multiplier > at
    fitting = plans.compute_charge(dataset, run(quote.least_noise_multiplier))
    assert fitting.policy.admits(fitting.charge.reserved)


@pytest.mark.slow
def test_a_quoted_number_of_steps_is_reduced_until_it_can_be_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The count and the charge are different searches, which may differ by a step."""
    genuine = ReferenceFilter.count_affordable_steps
    dataset = untouched(3.0, DpSgd(2.0, sample_rate=0.1, steps=1))
    run = DpSgd(1.5, sample_rate=0.05, steps=50)
    exact = plans.find_affordable(dataset, run)[0]
    monkeypatch.setattr(
        ReferenceFilter, "count_affordable_steps", lambda *of: (genuine(*of) or 0) + 1
    )
    found = plans.find_affordable(dataset, run)[0]
    assert exact is not None
    assert found is not None
    assert 0.99 * exact <= found <= exact + 1
    charge = plans.compute_charge(dataset, replace(run, steps=found)).charge
    assert dataset.policy.admits(charge.reserved)


def test_a_wrong_quote_is_an_error(post: Post, run: str, database: str) -> None:
    environment = {"ACCOUNTANT_DATABASE_URL": database}
    for name, plan in (("nobody", json.dumps(RUN)), ("patients", "{}")):
        done = CliRunner().invoke(cli.app, ["ledger", "quote", name, "-m", plan], env=environment)
        assert done.exit_code in (1, 2)
        assert "error:" in done.output
