"""Scheduled noise against the real ledger: each step is charged with its own noise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.ledger_client import LedgerClient
from tests.support.optimizer_cases import PLAN as UNSCHEDULED
from tests.support.stub_service import linear_accountant, service
from training_client.budget import Budget, LedgerBudget
from training_client.client import Reservation
from training_client.errors import BudgetExhaustedError, NoGuaranteeError
from training_client.integrations.flower.round_budget import RoundBudget
from training_client.lab.models import cross_entropy
from training_client.optimizers import PrivateOptimizer, make_optimizer
from training_client.phased_budget import ChargedBudget, PhasedLedgerBudget
from training_client.plan import AdaptiveClipping, Plan, Schedule
from training_client.run_report import settle

PLAN = Plan(
    dataset_size=1000, sample_rate=0.01, clip_norm=1.0, noise_multiplier=4.0,
    noise_schedule=Schedule.by_steps([(6, 1.0), (5, 0.5), (4, 0.25)]),
    adaptive_clipping=AdaptiveClipping(count_noise=10.0),
)  # fmt: skip
STEPS = 15


def steps_of(optimizer: PrivateOptimizer, count: int) -> None:
    """Make some steps."""
    for _ in range(count):
        optimizer.expect_examples(2)
        optimizer.step(torch.zeros(2, 6), torch.zeros(2, dtype=torch.int64), cross_entropy)


def granted(budget: PhasedLedgerBudget) -> list[int]:
    """Return the numbers of steps that each phase was charged for."""
    return [phase.reservation.steps_granted for phase in budget.phases]


@pytest.mark.slow
def test_each_phase_is_charged_as_it_is_made_and_the_run_goes_on(
    ledger: LedgerClient, tmp_path: Path
) -> None:
    budget = PhasedLedgerBudget.reserve(ledger, PLAN, ledger.patients, STEPS, block=2)
    assert granted(budget) == [0, 0, 0]
    optimizer = make_optimizer("dp_sgd", nn.Linear(6, 4), budget)
    steps_of(optimizer, 7)
    assert granted(budget) == [6, 2, 0]
    charged = [phase.reservation.mechanism["noise_multiplier"] for phase in budget.phases]
    assert charged == [part.charged_noise_multiplier for _, part in PLAN.phases(STEPS)]
    assert charged == sorted(charged, reverse=True)
    assert budget.spent == ledger.epsilon(PLAN.mechanism(8), 1e-5).epsilon

    resumed = PhasedLedgerBudget.resume(ledger, PLAN, ledger.patients, budget.reservations, block=2)
    assert resumed.made == 8  # step 8 was granted, and may have been made
    again = make_optimizer("dp_sgd", nn.Linear(6, 4), resumed)
    steps_of(again, STEPS - 8)
    with pytest.raises(BudgetExhaustedError, match="all 15 steps"):
        steps_of(again, 1)
    assert granted(resumed) == [6, 5, 4]
    claim = resumed.guarantee(again.steps_made)
    assert claim.epsilon == ledger.epsilon(PLAN.mechanism(STEPS), 1e-5).epsilon
    settle(resumed, again.steps_made, tmp_path)
    assert len(resumed.commit()["certificates"]) == 3


@pytest.mark.slow
def test_two_runs_cannot_take_the_same_steps(ledger: LedgerClient) -> None:
    budget = PhasedLedgerBudget.reserve(ledger, PLAN, ledger.patients, STEPS, block=20)
    first, second = (make_optimizer("dp_sgd", nn.Linear(6, 4), budget) for _ in range(2))
    steps_of(first, 7)
    with pytest.raises(NoGuaranteeError, match="another run uses the same budget"):
        steps_of(second, 1)


@pytest.mark.slow
def test_a_run_that_does_not_fit_reserves_nothing(ledger: LedgerClient) -> None:
    wasteful = replace(PLAN, noise_schedule=Schedule.by_steps([(6, 1.0), (9, 0.02)]))
    with pytest.raises(BudgetExhaustedError):
        PhasedLedgerBudget.reserve(ledger, wasteful, ledger.patients, 3000)
    found = ledger.dataset(ledger.patients)
    assert (found["held"]["epsilon"], found["spent"]["epsilon"]) == (0, 0)
    assert PhasedLedgerBudget.reserve(ledger, PLAN, ledger.patients, STEPS).reserved == STEPS


@pytest.mark.slow
def test_reservations_of_another_plan_are_refused(ledger: LedgerClient) -> None:
    budget = PhasedLedgerBudget.reserve(ledger, PLAN, ledger.patients, STEPS)
    other = replace(PLAN, noise_schedule=Schedule.by_steps([(6, 1.0), (5, 0.6), (4, 0.3)]))
    with pytest.raises(NoGuaranteeError, match="reserve budget for the plan that is run"):
        PhasedLedgerBudget.resume(ledger, other, ledger.patients, budget.reservations)
    with pytest.raises(NoGuaranteeError, match="2 reservations"):
        PhasedLedgerBudget.resume(ledger, PLAN, ledger.patients, budget.reservations[:1] * 2)
    whole = ledger.reserve(ledger.patients, PLAN.mechanism(STEPS))
    with pytest.raises(NoGuaranteeError, match="PhasedLedgerBudget"):
        LedgerBudget(ledger, PLAN, ledger.patients, 1e-5, whole)


@pytest.mark.slow
def test_reservations_of_another_dataset_are_refused(ledger: LedgerClient, tmp_path: Path) -> None:
    """Their steps would be charged to it, and claimed for records that they do not protect."""
    patients, toy_name = ledger.patients, ledger.add_dataset("toy")
    message = f"on dataset '{toy_name}', not on '{patients}'"
    plan = replace(UNSCHEDULED, sample_rate=0.01, noise_multiplier=4.0)
    toy = ledger.reserve(toy_name, plan.mechanism(50))
    with pytest.raises(NoGuaranteeError, match=message):
        LedgerBudget(ledger, plan, patients, 1e-5, toy)
    with pytest.raises(NoGuaranteeError, match=message):
        LedgerBudget(ledger, plan, patients, 1e-5, ledger.reservation(toy.identifier))
    LedgerBudget(ledger, plan, toy_name, 1e-5, toy)
    phases = PhasedLedgerBudget.reserve(ledger, PLAN, toy_name, STEPS)
    with pytest.raises(NoGuaranteeError, match=message):
        PhasedLedgerBudget.resume(ledger, PLAN, patients, phases.reservations)
    parts = [part for _, part in PLAN.phases(STEPS)]
    mixed = [
        LedgerBudget(ledger, part, name, 1e-5, ledger.reserve(name, part.mechanism(steps)))
        for part, name, steps in zip(parts, (toy_name, toy_name, patients), (6, 5, 4), strict=True)
    ]
    with pytest.raises(NoGuaranteeError, match=f"{patients}, {toy_name}"):
        PhasedLedgerBudget(PLAN, mixed)
    rounds = RoundBudget(ledger, patients, 1e-5, plan, rounds=50, folder=tmp_path)
    with pytest.raises(NoGuaranteeError, match=message):
        rounds.grant_round(toy)
    # a release before the first step, such as a private PCA
    pca = {"kind": "gaussian", "noise_multiplier": 10.0}
    own, other = ledger.reserve(patients, pca), ledger.reserve(toy_name, pca)
    held = ledger.reserve(patients, plan.mechanism(50))
    budget = LedgerBudget(ledger, plan, patients, 1e-5, held, (pca, pca), (own, other))
    with pytest.raises(NoGuaranteeError, match=message):
        budget.begin()
    for each in (toy, own, other):
        assert ledger.reservation(each.identifier).steps_granted == 0
    for name in (toy_name, patients):
        assert ledger.dataset(name)["spent"]["epsilon"] == 0


PCA = {"kind": "gaussian", "noise_multiplier": 10.0}
EARLIER = replace(UNSCHEDULED, sample_rate=0.01, noise_multiplier=4.0).mechanism(7)


def with_releases(
    ledger: LedgerClient,
    scheduled: bool,
    before: tuple[Any, ...],
    *reserved: Any,
    ended: tuple[Reservation, ...] = (),
) -> ChargedBudget:
    """Return a budget of steps that follow releases, for which other mechanisms are reserved."""
    releases = ended + tuple(ledger.reserve(ledger.patients, each) for each in reserved)
    if scheduled:
        return PhasedLedgerBudget.reserve(
            ledger, PLAN, ledger.patients, STEPS, before=before, releases=releases
        )
    plan = replace(UNSCHEDULED, noise_multiplier=4.0)
    held = ledger.reserve(ledger.patients, plan.mechanism(STEPS))
    return LedgerBudget(ledger, plan, ledger.patients, 1e-5, held, before, releases)


KINDS = [False, pytest.param(True, marks=pytest.mark.slow)]  # whether the noise changes


@pytest.mark.slow
@pytest.mark.parametrize("scheduled", KINDS)
def test_all_steps_of_the_releases_before_training_are_charged(
    ledger: LedgerClient, scheduled: bool
) -> None:
    budget = with_releases(ledger, scheduled, (EARLIER, PCA), EARLIER, PCA)
    found = [(each["steps"], each["steps_reserved"]) for each in budget.begin()]
    assert found == [(7, 7), (1, 1)]
    ended = tuple(ledger.reservation(each.identifier) for each in releases_of(budget))
    assert all(each.state == "committed" for each in ended)
    again = with_releases(ledger, scheduled, (EARLIER, PCA), ended=ended)
    spent = ledger.dataset(ledger.patients)["spent"]["reference_steps"]
    assert len(again.begin()) == 2
    assert ledger.dataset(ledger.patients)["spent"]["reference_steps"] == spent, "charged before"
    again.take(1)


def releases_of(budget: ChargedBudget) -> tuple[Reservation, ...]:
    first = budget.phases[0] if isinstance(budget, PhasedLedgerBudget) else budget
    return first.releases


@pytest.mark.slow
@pytest.mark.parametrize("scheduled", KINDS)
def test_releases_that_no_reservation_charges_are_refused(
    ledger: LedgerClient, scheduled: bool
) -> None:
    """The claim would name them, but the dataset's budget would not be charged for them."""
    uncharged = with_releases(ledger, scheduled, (PCA,))
    for refused in (uncharged.begin, lambda: uncharged.take(1), lambda: uncharged.allow(1)):
        with pytest.raises(NoGuaranteeError, match="reserve budget for each mechanism"):
            refused()
    uncharged.give_up()
    forgotten = with_releases(ledger, scheduled, (PCA,), PCA)
    with pytest.raises(NoGuaranteeError, match=r"call begin\(\) before"):
        forgotten.take(1)
    forgotten.give_up()
    released = tuple(ledger.reservation(each.identifier) for each in releases_of(forgotten))
    ended = with_releases(ledger, scheduled, (PCA,), ended=released)
    with pytest.raises(NoGuaranteeError, match="released without a granted step"):
        ended.begin()
    ended.give_up()
    assert ledger.dataset(ledger.patients)["spent"]["epsilon"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("scheduled", KINDS)
def test_releases_that_are_not_those_claimed_are_refused_before_a_charge(
    ledger: LedgerClient, scheduled: bool
) -> None:
    less = {**PCA, "noise_multiplier": 100.0}
    for claimed, reserved in (
        ((PCA,), (less,)),
        ((PCA, EARLIER), (EARLIER, PCA)),
        ((PCA, PCA), (PCA,)),
        ((), (PCA,)),
    ):
        budget = with_releases(ledger, scheduled, claimed, *reserved)
        with pytest.raises(NoGuaranteeError, match="reserve budget for each mechanism") as no:
            budget.begin()
        assert all(str(each) in str(no.value) for each in (*claimed, *reserved))
        budget.give_up()
    assert ledger.dataset(ledger.patients)["spent"]["epsilon"] == 0


@pytest.mark.slow
def test_a_budget_without_a_ledger_ends_where_the_composition_no_longer_fits(
    ledger: LedgerClient,
) -> None:
    plan = replace(PLAN, noise_schedule=Schedule.exponential(0.2, 60, levels=4))
    budget = Budget(ledger, plan, epsilon=0.7, delta=1e-5, block=5)
    optimizer = make_optimizer("dp_sgd", nn.Linear(6, 4), budget)
    with pytest.raises(BudgetExhaustedError):
        steps_of(optimizer, 100)
    made = optimizer.steps_made
    assert ledger.epsilon(plan.mechanism(made), 1e-5).epsilon <= 0.7
    assert ledger.epsilon(plan.mechanism(made + 1), 1e-5).epsilon > 0.7


def test_a_certificate_names_a_clip_norm_only_if_there_is_one() -> None:
    assert PLAN.constant_clip_norm is None
    assert replace(UNSCHEDULED, clip_schedule=Schedule.linear(0.5, 4)).constant_clip_norm is None
    assert UNSCHEDULED.constant_clip_norm == UNSCHEDULED.clip_norm


def test_ordinary_plans_are_charged_as_before() -> None:
    assert UNSCHEDULED.mechanism(3)["kind"] == "dp_sgd"
    budget = Budget(service(linear_accountant), UNSCHEDULED, epsilon=2.0, delta=1e-5)
    budget.allow(20)
    with pytest.raises(BudgetExhaustedError):
        budget.allow(21)
