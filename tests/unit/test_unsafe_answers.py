"""Answers that were below the truth, and small questions that took all memory or failed."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import pytest

from accountant_service import calculator, mechanisms
from accountant_service.errors import (
    AccountingError,
    MethodNotApplicableError,
    NoFiniteEpsilonError,
    TooExpensiveError,
)
from accountant_service.guarantee import NeighbouringRelation, Status

ADD = NeighbouringRelation.ADD_OR_REMOVE_ONE
REPLACE = NeighbouringRelation.REPLACE_ONE
Json = dict[str, Any]


def gaussian(sigma: float) -> Json:
    return {"kind": "gaussian", "noise_multiplier": sigma}


def sampled(rate: float, inner: Json) -> Json:
    return {"kind": "poisson_sampled", "sample_rate": rate, "mechanism": inner}


def of_person(records: int, inner: Json) -> Json:
    return {"kind": "user_level", "records": records, "mechanism": inner}


def repeated(count: int, inner: Json) -> Json:
    return {"kind": "repeated", "count": count, "mechanism": inner}


TRUNCATED_LAPLACE = {
    "kind": "truncated_laplace",
    "scale": 1000.0,
    "bound": 3.0,
    "sensitivity": 1.0,
}

OUTSIDE = (math.exp(-2e-3) - math.exp(-3e-3)) / 2 / (1 - math.exp(-3e-3))  # of the other's range


@pytest.mark.parametrize(
    ("mechanism", "advantage"),
    [
        ({"kind": "approximate_dp", "epsilon": 0.0, "delta": 0.3}, 0.3),
        ({"kind": "privacy_profile", "epsilons": [0.0], "deltas": [0.49]}, 0.49),
        (TRUNCATED_LAPLACE, OUTSIDE),
        (sampled(0.3, TRUNCATED_LAPLACE), 0.3 * OUTSIDE),
    ],
)
def test_a_release_with_zero_epsilon_and_some_delta_reveals_something(
    mechanism: Json, advantage: float
) -> None:
    described = mechanisms.from_json(mechanism)
    found = calculator.trade_off(described, 0.5, 6, ADD)
    assert found.advantage.upper >= advantage * (1 - 1e-3)
    assert found.advantage.upper == pytest.approx(
        calculator.delta(described, 0.0, "pld", ADD).delta, rel=1e-3
    )
    assert found.success.upper >= 0.5 + advantage / 2 * (1 - 1e-3)
    for rate, missed in zip(found.false_positive_rates, found.false_negative_rates, strict=True):
        assert missed.lower <= max(0.0, 1 - rate - advantage) + 1e-4


def test_the_trade_off_of_a_tiny_leak_is_not_that_of_no_release() -> None:
    described = mechanisms.from_json(sampled(1e-4, gaussian(1e6)))
    assert calculator.trade_off(described, 0.5, 6, ADD).advantage.upper >= 3.9e-11


def test_the_trade_off_of_no_release_is_a_guess() -> None:
    described = mechanisms.from_json(repeated(0, gaussian(1.0)))
    assert calculator.trade_off(described, 0.5, 6, ADD).advantage.upper == 0.0


SAMPLES: list[Json] = [
    {"kind": "poisson_sampled", "sample_rate": 0.01},
    {"kind": "poisson_sampled", "sample_rate": 1e-6},
]


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_sample_contains_each_record_of_a_person_by_itself(sample: Json) -> None:
    """The user level inside a sample is the user level of releases on the sample."""
    inside = mechanisms.from_json({**sample, "mechanism": of_person(100, gaussian(1.0))})
    outside = mechanisms.from_json(of_person(100, {**sample, "mechanism": gaussian(1.0)}))
    assert mechanisms.canonical_form(inside).hash == mechanisms.canonical_form(outside).hash
    assert calculator.epsilon(inside, 1e-5, "pld", ADD).epsilon > 0


@pytest.mark.parametrize(
    "sample",
    [
        {"kind": "fixed_size_sampled", "dataset_size": 1000, "batch_size": 10},
        {
            "kind": "truncated_poisson_sampled",
            "dataset_size": 1000,
            "sample_rate": 0.01,
            "batch_size_max": 40,
        },
    ],
)
def test_other_samples_of_a_release_at_user_level_are_refused(sample: Json) -> None:
    described = mechanisms.from_json({**sample, "mechanism": of_person(20, gaussian(0.5))})
    with pytest.raises(AccountingError):
        calculator.epsilon(described, 0.02, "pld", ADD)


def test_the_most_records_of_a_person_hold_for_all_releases_on_a_sample() -> None:
    both = {"kind": "composed", "mechanisms": [of_person(5, gaussian(2.0)), gaussian(2.0)]}
    mixed = mechanisms.from_json(sampled(0.01, both))
    most = {"kind": "composed", "mechanisms": [gaussian(2.0), gaussian(2.0)]}
    same = mechanisms.from_json(of_person(5, sampled(0.01, most)))
    assert mechanisms.canonical_form(mixed).hash == mechanisms.canonical_form(same).hash


@pytest.mark.parametrize("categories", [2, 3, 10**6, 10**9])
@pytest.mark.parametrize("kept", [1e-12, 1e-10, 1e-4, 0.5])
def test_randomized_response_with_many_categories(categories: int, kept: float) -> None:
    """ε at a tiny δ is within the interval to its last digits, even if 1 − f is about f/k."""
    flip = 1 - kept
    described = mechanisms.from_json(
        {"kind": "randomized_response", "categories": categories, "flip_probability": flip}
    )
    with mpmath.workdps(60):
        f, k = mpmath.mpf(flip), mpmath.mpf(categories)
        truth = float(mpmath.log((1 - f + f / k - mpmath.mpf(1e-18)) / (f / k)))
        variation = float(1 - f)
    found = calculator.epsilon(described, 1e-18, "pld", ADD)
    assert found.certified is not None
    assert found.certified.upper >= truth * (1 - 1e-12)
    assert found.certified.lower <= truth * (1 + 1e-12)
    at_zero = calculator.delta(described, 0.0, "pld", ADD)
    assert at_zero.certified is not None
    assert at_zero.certified.lower <= variation * (1 + 1e-12)
    assert at_zero.certified.upper >= variation * (1 - 1e-12)


def test_an_allowance_for_many_records_is_no_lower_bound() -> None:
    """δ(3) of 256 records at a rate of 1e-6 is below 1e-1900."""
    described = mechanisms.from_json(of_person(256, sampled(1e-6, gaussian(10.0))))
    found = calculator.delta(described, 3.0, "pld", ADD)
    assert found.certified is not None
    assert found.certified.lower == 0.0


@pytest.mark.parametrize(
    "mechanism",
    [
        of_person(256, sampled(0.5, gaussian(0.01))),
        of_person(2, sampled(0.1, repeated(10**4, gaussian(0.01)))),
        {
            "kind": "truncated_poisson_sampled",
            "dataset_size": 1000,
            "sample_rate": 0.02,
            "batch_size_max": 40,
            "mechanism": repeated(10**6, gaussian(0.01)),
        },
    ],
)
@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_releases_with_too_little_noise_are_refused(
    mechanism: Json, relation: NeighbouringRelation
) -> None:
    with pytest.raises(AccountingError) as refusal:
        calculator.epsilon(mechanisms.from_json(mechanism), 1e-5, "pld", relation)
    assert isinstance(refusal.value, TooExpensiveError) or relation is REPLACE


def test_the_part_without_a_finite_epsilon_is_named() -> None:
    laplace = {"kind": "truncated_laplace", "scale": 2.0, "bound": 2.0, "sensitivity": 1.0}
    parts = {"kind": "parallel", "mechanisms": [laplace, {"kind": "zcdp", "rho": 0.05}]}
    with pytest.raises(NoFiniteEpsilonError, match="truncated_laplace"):
        calculator.epsilon(mechanisms.from_json(parts), 1e-10, "pld", ADD)


def test_a_truncated_sample_at_rate_one_with_a_replaced_record() -> None:
    described = mechanisms.from_json(
        {
            "kind": "truncated_poisson_sampled",
            "dataset_size": 1000,
            "sample_rate": 1.0,
            "batch_size_max": 40,
            "mechanism": gaussian(1.2),
        }
    )
    whole = calculator.epsilon(described, 1e-5, "pld", REPLACE)
    fixed = mechanisms.from_json(
        {
            "kind": "fixed_size_sampled",
            "dataset_size": 1000,
            "batch_size": 40,
            "mechanism": gaussian(1.2),
        }
    )
    assert whole.epsilon >= calculator.epsilon(fixed, 1e-5, "pld", REPLACE).epsilon * (1 - 1e-3)


def test_a_shuffled_run_at_rate_zero_releases_nothing() -> None:
    run = {"kind": "dp_sgd", "sample_rate": 0, "steps": 0, "sampling": "shuffled"}
    described = mechanisms.from_json({**run, "noise_multiplier": 1.0})
    assert isinstance(described, mechanisms.DpSgd)
    assert calculator.curve(described, 1e-5, ["pld"], 1, ADD) is not None
    assert calculator.epsilon(described, 1e-5, "pld", ADD).epsilon == 0.0


@pytest.mark.parametrize("shape", [5e-324, 1e-300, 1e-16, 1e-13])
def test_private_selection_with_a_negligible_shape_is_that_with_shape_zero(shape: float) -> None:
    def epsilon(eta: float) -> float:
        selection = {
            "kind": "private_selection",
            "repeats": {"distribution": "negative_binomial", "mean": 10.0, "shape": eta},
            "mechanism": gaussian(5.0),
        }
        return calculator.epsilon(mechanisms.from_json(selection), 1e-5, "pld", ADD).epsilon

    found = epsilon(shape)
    assert math.isfinite(found)
    assert found == pytest.approx(epsilon(0.0), rel=1e-6)


@pytest.mark.parametrize("relation", NeighbouringRelation)
def test_parts_with_several_records_of_a_person_are_no_parallel_releases(
    relation: NeighbouringRelation,
) -> None:
    """A person with 3 records in each part costs what both cost: ε 6.04, not 4.38 as one part."""
    parts = [of_person(3, gaussian(each)) for each in (3.0, 3.5)]
    tree = mechanisms.from_json({"kind": "parallel", "mechanisms": parts})
    with pytest.raises(MethodNotApplicableError, match="user_level of parallel"):
        calculator.epsilon(tree, 1e-5, relation=relation)
    one = mechanisms.from_json({"kind": "parallel", "mechanisms": parts[:1]})
    alone = calculator.epsilon(mechanisms.from_json(parts[0]), 1e-5, relation=relation)
    assert calculator.epsilon(one, 1e-5, relation=relation).epsilon == alone.epsilon


def test_claims_of_a_release_at_user_level_in_a_sample_are_not_free() -> None:
    described = mechanisms.from_json(repeated(9, sampled(1e-6, of_person(40, gaussian(0.2)))))
    found = calculator.epsilon(described, 1e-5, "pld", ADD)
    assert found.status is Status.PROVEN
    assert found.epsilon > 10
