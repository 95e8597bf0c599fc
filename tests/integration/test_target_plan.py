"""A plan for a target (ε, δ): the whole run fits, and would not with a little less noise."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from training_client.budget import Budget
from training_client.client import AccountingService
from training_client.errors import BudgetExhaustedError, ServiceRefusedError
from training_client.plan import AdaptiveClipping, Plan

TARGET: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-5}
RUN: dict[str, Any] = {"epochs": 3, "batch_size": 30, "dataset_size": 1000, "clip_norm": 0.5}


@pytest.mark.parametrize(
    "options",
    [{}, {"sampling": "balls_in_bins"}, {"adaptive_clipping": AdaptiveClipping(count_noise=10.0)}],
    ids=["poisson", "balls in bins", "adaptive clipping"],
)
def test_the_noise_is_the_least_with_which_the_run_fits(
    service: AccountingService, options: dict[str, Any]
) -> None:
    plan = Plan.for_target(service, **TARGET, **RUN, **options)
    steps = plan.steps_in(3)
    assert steps == (102 if plan.sampling == "balls_in_bins" else 100)
    assert (plan.dataset_size, plan.clip_norm) == (1000, 0.5)
    assert plan.adaptive_clipping == options.get("adaptive_clipping")
    budget = Budget(service, plan, **TARGET, steps=steps)
    budget.allow(steps)
    assert 0.99 * TARGET["epsilon"] < budget.guarantee(steps).epsilon <= TARGET["epsilon"]
    less = replace(plan, noise_multiplier=0.99 * plan.noise_multiplier)
    with pytest.raises(BudgetExhaustedError):
        Budget(service, less, **TARGET, steps=steps).allow(steps)


def test_what_no_plan_can_be_for_is_refused(service: AccountingService) -> None:
    for wrong in ({"epochs": 0}, {"epochs": math.inf}, {"batch_size": 0}, {"batch_size": 1001}):
        with pytest.raises(ValueError, match="expected finite epochs"):
            Plan.for_target(service, **TARGET, **RUN | wrong)
    with pytest.raises(ValueError, match="raise count_noise"):
        Plan.for_target(
            service, **TARGET, **RUN, adaptive_clipping=AdaptiveClipping(count_noise=0.5)
        )
    with pytest.raises(ServiceRefusedError):
        Plan.for_target(service, **TARGET | {"epsilon": -1.0}, **RUN)


@pytest.mark.parametrize("count_noise", [1.0 + 1e-9, 1.001, 2.0, 1e3, 1e12])
def test_noise_beside_a_count_is_rounded_up(count_noise: float) -> None:
    """The two together are charged as no less noise than was asked for, and hardly more."""
    clipping = AdaptiveClipping(count_noise)
    plan = Plan(1000, 0.1, 1.0, clipping.noise_beside_count(1.0), adaptive_clipping=clipping)
    assert 1.0 <= plan.charged_noise_multiplier <= 1.0 + 1e-12


def test_steps_of_epochs_are_whole() -> None:
    for size in range(1, 300):
        plan = Plan(size, 1 / size, 1.0, 1.0)
        assert plan.steps_in(1) == size
        assert plan.steps_in(7) == 7 * size
        assert plan.steps_in(0.5) == -(-size // 2)
    assert Plan.balls_in_bins(1000, 20, 1.0, 1.0).steps_in(1.5) == 40
