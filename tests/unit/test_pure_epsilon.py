"""Releases with a pure ε: no answer exceeds it, and it is not below the truth."""

from __future__ import annotations

import math

import pytest
from mpmath import mp, mpf

from accountant_service import mechanisms
from accountant_service.accountants import Question, release_laws
from accountant_service.guarantee import NeighbouringRelation
from accountant_service.numerics.laws.dominating_pair import LaplacePair, Release, total_variation
from tests.support.helpers import slow_cases_after
from tests.support.kinds import (
    ADDED,
    REPLACED,
    Json,
    approximate_dp,
    composed,
    discrete_laplace,
    epsilon_at,
    exponential,
    gaussian,
    laplace,
    permute_and_flip,
    poisson,
    privacy_profile,
    proved_delta,
    randomized_response,
    repeated,
    shuffled_reports,
    truncated_laplace,
    zcdp,
)

LAPLACE, EXPONENTIAL = laplace(1.0), exponential(0.5)
DISCRETE = discrete_laplace(8, 2)


def pure_epsilon(described: Json, relation: NeighbouringRelation = ADDED) -> float:
    form = mechanisms.canonical_form(mechanisms.from_json(described))
    return release_laws.pure_epsilon(Question(form, relation).release_groups, relation)


@pytest.mark.parametrize(
    ("described", "relation", "pure", "deltas"),
    [
        *slow_cases_after(
            1,
            [
                (LAPLACE, ADDED, 1.0, [1e-5]),
                (LAPLACE, REPLACED, 2.0, [1e-12, 1e-200]),
                (repeated(3, LAPLACE), ADDED, 3.0, [1e-5, 1e-60]),
                (composed(LAPLACE, DISCRETE, repeated(2, EXPONENTIAL)), ADDED, 2.25, [1e-12]),
            ],
        ),
        (DISCRETE, ADDED, 0.25, [1e-5, 1e-60]),
        (EXPONENTIAL, ADDED, 0.5, [1e-5, 1e-200]),
        (repeated(30, EXPONENTIAL), REPLACED, 15.0, [1e-12]),
        (repeated(30, permute_and_flip(0.5)), ADDED, 15.0, [1e-60]),
        (repeated(30, approximate_dp(0.5, 0)), ADDED, 15.0, [1e-200]),
        (repeated(3, privacy_profile([0, 1], [0.2, 0])), ADDED, 3.0, [1e-12]),
    ],
)
def test_no_epsilon_exceeds_the_sum_of_pure_ones(
    described: Json, relation: NeighbouringRelation, pure: float, deltas: list[float]
) -> None:
    assert pure_epsilon(described, relation) == pure
    for delta in deltas:
        assert epsilon_at(described, delta, relation).epsilon <= pure
    assert proved_delta(described, pure, relation).upper <= 1e-300


@pytest.mark.parametrize("rate", [1e-9, 0.1, 0.9])
@pytest.mark.parametrize(("inner", "epsilon"), [(LAPLACE, 1.0), (EXPONENTIAL, 0.5)])
def test_the_pure_epsilon_of_a_poisson_sample_is_amplified(
    rate: float, inner: Json, epsilon: float
) -> None:
    """And it is not if a record is changed in place: who is sampled may be visible."""
    run = repeated(5, poisson(rate, inner))
    with mp.workdps(40):
        truth = mp.log(1 + mpf(rate) * (mp.exp(epsilon) - 1))
        found = mpf(pure_epsilon(run))
        assert 5 * truth <= found <= 5 * truth * (1 + mpf(1e-9))
    assert epsilon_at(run, 1e-200).epsilon <= float(found)
    assert pure_epsilon(poisson(rate, inner), REPLACED) >= epsilon


@pytest.mark.parametrize("categories", [2, 10, 10**6])
@pytest.mark.parametrize("flip", [1e-6, 0.3, 1 - 1e-12])
def test_the_pure_epsilon_of_randomized_response_is_not_below_the_truth(
    categories: int, flip: float
) -> None:
    """A logarithm of a number near 1 lost digits, and the ε of shuffled reports was too small."""
    response = randomized_response(categories, flip)
    with mp.workdps(40):
        truth = mp.log1p((1 - mpf(flip)) * categories / mpf(flip))
        assert truth <= mpf(pure_epsilon(response)) <= truth * (1 + mpf(1e-9))
    assert pure_epsilon(shuffled_reports(1, response)) == pure_epsilon(response)


def test_other_releases_have_no_pure_epsilon() -> None:
    for described in (
        gaussian(1.0),
        composed(LAPLACE, gaussian(1.0)),
        approximate_dp(0.5, 1e-9),
        privacy_profile([0, 1], [0.2, 1e-9]),
        truncated_laplace(1.0, 3.0, 1.0),
        zcdp(0.1),
    ):
        assert math.isinf(pure_epsilon(described)), described


@pytest.mark.parametrize(("rate", "count"), [(0.3, 10), (1e-9, 10**9), (1e-3, 1)])
def test_delta_is_at_most_the_probability_that_the_record_is_ever_sampled(
    rate: float, count: int
) -> None:
    """A release that reveals everything has a total variation distance of 1."""
    found = total_variation([(Release(LaplacePair(1e4), rate), count)])
    with mp.workdps(40):
        truth = 1 - (1 - mpf(rate)) ** count
        assert truth <= mpf(found) <= truth * (1 + mpf(1e-9))


def test_the_cap_of_delta_is_used() -> None:
    """The sum of the distances would be 3."""
    found = proved_delta(repeated(10, poisson(0.3, laplace(0.05))), 0.0)
    assert found.lower <= found.upper <= (1 - 0.7**10) * (1 + 1e-9)
