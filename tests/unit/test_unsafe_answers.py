"""Answers that were below the truth, and small questions that took all memory or failed."""

from __future__ import annotations

import math

import mpmath
import pytest

from accountant_service import mechanisms
from accountant_service.accounting import calculator
from accountant_service.accounting.guarantee import NeighbouringRelation, Status
from accountant_service.errors import AccountingError, NoFiniteEpsilonError, TooExpensiveError
from tests.support.kinds import (
    ADDED,
    REPLACED,
    Json,
    approximate_dp,
    dp_sgd,
    epsilon_at,
    fixed_size,
    gaussian,
    parallel,
    poisson,
    privacy_profile,
    proved_delta,
    proved_epsilon,
    randomized_response,
    repeated,
    selection,
    truncated_laplace,
    truncated_poisson,
    user_level,
    zcdp,
)

TRUNCATED_LAPLACE = truncated_laplace(1000.0, 3.0, 1.0)
OUTSIDE = (math.exp(-2e-3) - math.exp(-3e-3)) / 2 / (1 - math.exp(-3e-3))  # of the other's range


@pytest.mark.parametrize(
    ("mechanism", "advantage"),
    [
        (approximate_dp(0.0, 0.3), 0.3),
        (privacy_profile([0.0], [0.49]), 0.49),
        (TRUNCATED_LAPLACE, OUTSIDE),
        (poisson(0.3, TRUNCATED_LAPLACE), 0.3 * OUTSIDE),
    ],
)
def test_a_release_with_zero_epsilon_and_some_delta_reveals_something(
    mechanism: Json, advantage: float
) -> None:
    described = mechanisms.from_json(mechanism)
    found = calculator.trade_off(described, 0.5, 6)
    assert found.advantage.upper >= advantage * (1 - 1e-3)
    assert found.advantage.upper == pytest.approx(proved_delta(mechanism, 0.0).upper, rel=1e-3)
    assert found.success.upper >= 0.5 + advantage / 2 * (1 - 1e-3)
    for rate, missed in zip(found.false_positive_rates, found.false_negative_rates, strict=True):
        assert missed.lower <= max(0.0, 1 - rate - advantage) + 1e-4


def test_the_trade_off_of_a_tiny_leak_is_not_that_of_no_release() -> None:
    described = mechanisms.from_json(poisson(1e-4, gaussian(1e6)))
    assert calculator.trade_off(described, 0.5, 6).advantage.upper >= 3.9e-11


def test_the_trade_off_of_no_release_is_a_guess() -> None:
    described = mechanisms.from_json(repeated(0, gaussian(1.0)))
    assert calculator.trade_off(described, 0.5, 6).advantage.upper == 0.0


@pytest.mark.parametrize("sample", [fixed_size(1000, 10), truncated_poisson(1000, 0.01, 40)])
def test_other_samples_of_a_release_at_user_level_are_refused(sample: Json) -> None:
    with pytest.raises(AccountingError):
        epsilon_at({**sample, "mechanism": user_level(20, gaussian(0.5))}, 0.02)


@pytest.mark.parametrize("categories", [2, 3, 10**6, 10**9])
@pytest.mark.parametrize("kept", [1e-12, 1e-10, 1e-4, 0.5])
def test_randomized_response_with_many_categories(categories: int, kept: float) -> None:
    """ε at a tiny δ is within the interval to its last digits, even if 1 − f is about f/k."""
    flip = 1 - kept
    described = randomized_response(categories, flip)
    with mpmath.workdps(60):
        f, k = mpmath.mpf(flip), mpmath.mpf(categories)
        truth = float(mpmath.log((1 - f + f / k - mpmath.mpf(1e-18)) / (f / k)))
        variation = float(1 - f)
    for found, exact in (
        (proved_epsilon(described, 1e-18), truth),
        (proved_delta(described, 0.0), variation),
    ):
        assert found.upper >= exact * (1 - 1e-12)
        assert found.lower <= exact * (1 + 1e-12)


def test_an_allowance_for_many_records_is_no_lower_bound() -> None:
    """δ(3) of 256 records at a rate of 1e-6 is below 1e-1900."""
    assert proved_delta(user_level(256, poisson(1e-6, gaussian(10.0))), 3.0).lower == 0.0


@pytest.mark.parametrize(
    "mechanism",
    [
        user_level(256, poisson(0.5, gaussian(0.01))),
        user_level(2, poisson(0.1, repeated(10**4, gaussian(0.01)))),
        truncated_poisson(1000, 0.02, 40, repeated(10**6, gaussian(0.01))),
    ],
)
@pytest.mark.parametrize("relation", [ADDED, REPLACED])
def test_releases_with_too_little_noise_are_refused(
    mechanism: Json, relation: NeighbouringRelation
) -> None:
    with pytest.raises(AccountingError) as refusal:
        epsilon_at(mechanism, 1e-5, relation)
    assert isinstance(refusal.value, TooExpensiveError) or relation is REPLACED


def test_the_part_without_a_finite_epsilon_is_named() -> None:
    with pytest.raises(NoFiniteEpsilonError, match="truncated_laplace"):
        epsilon_at(parallel(truncated_laplace(2.0, 2.0, 1.0), zcdp(0.05)), 1e-10)


def test_a_truncated_sample_at_rate_one_with_a_replaced_record() -> None:
    whole = truncated_poisson(1000, 1.0, 40, gaussian(1.2))
    fixed = fixed_size(1000, 40, gaussian(1.2))
    found, least = (epsilon_at(each, 1e-5, REPLACED).epsilon for each in (whole, fixed))
    assert found >= least * (1 - 1e-3)


def test_a_shuffled_run_at_rate_zero_releases_nothing() -> None:
    run = dp_sgd(1.0, sample_rate=0, steps=0, sampling="shuffled")
    described = mechanisms.from_json(run)
    assert isinstance(described, mechanisms.DpSgd)
    assert calculator.curve(described, 1e-5, ["pld"], 1, ADDED) is not None
    assert epsilon_at(run, 1e-5).epsilon == 0.0


@pytest.mark.parametrize("shape", [5e-324, 1e-16, 1e-13])
def test_private_selection_with_a_negligible_shape_is_that_with_shape_zero(shape: float) -> None:
    def epsilon(eta: float) -> float:
        best = selection("negative_binomial", 10.0, gaussian(5.0), shape=eta)
        return epsilon_at(best, 1e-5).epsilon

    found = epsilon(shape)
    assert math.isfinite(found)
    assert found == pytest.approx(epsilon(0.0), rel=1e-6)


def test_claims_of_a_release_at_user_level_in_a_sample_are_not_free() -> None:
    found = epsilon_at(repeated(9, poisson(1e-6, user_level(40, gaussian(0.2)))), 1e-5)
    assert found.status is Status.PROVEN
    assert found.epsilon > 10
