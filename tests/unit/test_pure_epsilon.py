"""Releases with a pure ε: no answer exceeds it, and it is not below the truth."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import pytest

from accountant_service import calculator, mechanisms
from accountant_service.accountants import Question, release_laws
from accountant_service.guarantee import NeighbouringRelation
from accountant_service.numerics.laws.dominating_pair import LaplacePair, Release, total_variation

Json = dict[str, Any]
ADDED, REPLACED = NeighbouringRelation.ADD_OR_REMOVE_ONE, NeighbouringRelation.REPLACE_ONE
LAPLACE: Json = {"kind": "laplace", "noise_multiplier": 1.0}
EXPONENTIAL: Json = {"kind": "exponential", "epsilon": 0.5}
DISCRETE: Json = {"kind": "discrete_laplace", "scale": 8, "sensitivity": 2}
PERMUTE: Json = {"kind": "permute_and_flip", "epsilon": 0.5}
PURE: Json = {"kind": "approximate_dp", "epsilon": 0.5, "delta": 0}
PROFILE: Json = {"kind": "privacy_profile", "epsilons": [0, 1], "deltas": [0.2, 0]}


def repeated(count: int, inner: Json) -> Json:
    return {"kind": "repeated", "count": count, "mechanism": inner}


def composed(*inner: Json) -> Json:
    return {"kind": "composed", "mechanisms": list(inner)}


def sampled(rate: float, inner: Json) -> Json:
    return {"kind": "poisson_sampled", "sample_rate": rate, "mechanism": inner}


def pure_epsilon(described: Json, relation: NeighbouringRelation = ADDED) -> float:
    form = mechanisms.canonical_form(mechanisms.from_json(described))
    return release_laws.pure_epsilon(Question(form, relation).release_groups, relation)


@pytest.mark.parametrize("delta", [1e-5, 1e-12, 1e-60, 1e-200])
@pytest.mark.parametrize(
    ("described", "relation", "pure"),
    [
        (LAPLACE, ADDED, 1.0),
        (LAPLACE, REPLACED, 2.0),
        (repeated(3, LAPLACE), ADDED, 3.0),
        (composed(LAPLACE, DISCRETE, repeated(2, EXPONENTIAL)), ADDED, 2.25),
        (DISCRETE, ADDED, 0.25),
        (EXPONENTIAL, ADDED, 0.5),
        (repeated(30, EXPONENTIAL), REPLACED, 15.0),
        (repeated(30, PERMUTE), ADDED, 15.0),
        (repeated(30, PURE), ADDED, 15.0),
        (repeated(3, PROFILE), ADDED, 3.0),
    ],
)
def test_no_epsilon_exceeds_the_sum_of_pure_ones(
    described: Json, relation: NeighbouringRelation, pure: float, delta: float
) -> None:
    assert pure_epsilon(described, relation) == pure
    read = mechanisms.from_json(described)
    assert calculator.epsilon(read, delta, relation=relation).epsilon <= pure
    assert calculator.delta(read, pure, relation=relation).delta <= 1e-300


@pytest.mark.parametrize("rate", [1e-9, 0.1, 0.9])
@pytest.mark.parametrize(("inner", "epsilon"), [(LAPLACE, 1.0), (EXPONENTIAL, 0.5)])
def test_the_pure_epsilon_of_a_poisson_sample_is_amplified(
    rate: float, inner: Json, epsilon: float
) -> None:
    """And it is not if a record is changed in place: who is sampled may be visible."""
    with mpmath.workdps(40):
        truth = mpmath.log(1 + mpmath.mpf(rate) * (mpmath.exp(epsilon) - 1))
        found = mpmath.mpf(pure_epsilon(repeated(5, sampled(rate, inner))))
        assert 5 * truth <= found <= 5 * truth * (1 + mpmath.mpf(1e-9))
    answer = calculator.epsilon(mechanisms.from_json(repeated(5, sampled(rate, inner))), 1e-200)
    assert answer.epsilon <= float(found)
    assert pure_epsilon(sampled(rate, inner), REPLACED) >= epsilon


@pytest.mark.parametrize("categories", [2, 10, 10**6])
@pytest.mark.parametrize("flip", [1e-6, 0.3, 1 - 1e-12])
def test_the_pure_epsilon_of_randomized_response_is_not_below_the_truth(
    categories: int, flip: float
) -> None:
    """A logarithm of a number near 1 lost digits, and the ε of shuffled reports was too small."""
    response = {
        "kind": "randomized_response", "categories": categories, "flip_probability": flip
    }  # fmt: skip
    with mpmath.workdps(40):
        truth = mpmath.log1p((1 - mpmath.mpf(flip)) * categories / mpmath.mpf(flip))
        assert truth <= mpmath.mpf(pure_epsilon(response)) <= truth * (1 + mpmath.mpf(1e-9))
    reports = {"kind": "shuffled_reports", "reports": 1, "mechanism": response}
    assert pure_epsilon(reports) == pure_epsilon(response)


@pytest.mark.parametrize(
    "described",
    [
        {"kind": "gaussian", "noise_multiplier": 1.0},
        composed(LAPLACE, {"kind": "gaussian", "noise_multiplier": 1.0}),
        {"kind": "approximate_dp", "epsilon": 0.5, "delta": 1e-9},
        {"kind": "privacy_profile", "epsilons": [0, 1], "deltas": [0.2, 1e-9]},
        {"kind": "truncated_laplace", "scale": 1.0, "bound": 3.0, "sensitivity": 1.0},
        {"kind": "zcdp", "rho": 0.1},
    ],
)
def test_other_releases_have_no_pure_epsilon(described: Json) -> None:
    assert math.isinf(pure_epsilon(described))


@pytest.mark.parametrize(("rate", "count"), [(0.3, 10), (1e-9, 10**9), (1e-3, 1)])
def test_delta_is_at_most_the_probability_that_the_record_is_ever_sampled(
    rate: float, count: int
) -> None:
    """A release that reveals everything has a total variation distance of 1."""
    found = total_variation([(Release(LaplacePair(1e4), rate), count)])
    with mpmath.workdps(40):
        truth = 1 - (1 - mpmath.mpf(rate)) ** count
        assert truth <= mpmath.mpf(found) <= truth * (1 + mpmath.mpf(1e-9))


def test_the_cap_of_delta_is_used() -> None:
    """The sum of the distances would be 3."""
    noisy = {"kind": "laplace", "noise_multiplier": 0.05}
    run = mechanisms.from_json(repeated(10, sampled(0.3, noisy)))
    found = calculator.delta(run, 0.0)
    assert found.certified is not None
    assert found.certified.lower <= found.delta <= (1 - 0.7**10) * (1 + 1e-9)
