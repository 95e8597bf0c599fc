"""Random trees against brute force, and products of sample rates.

The named cases are rows of `tests/support/kind_rows.py`.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, seed, settings
from hypothesis import strategies as st

from accountant_service import mechanisms
from accountant_service.accounting import calculator
from accountant_service.accounting.guarantee import NeighbouringRelation, Status
from accountant_service.accounting.methods import ACCOUNTANTS
from accountant_service.errors import AccountingError
from accountant_service.numerics import certified_interval
from accountant_service.numerics.laws.dominating_pair import GaussianPair, Release
from tests.support import oracles
from tests.support.helpers import question
from tests.support.kind_rows import BRUTE_EPSILONS, by_brute_force, fixed_sizes
from tests.support.kinds import (
    ZEROED,
    Json,
    composed,
    epsilon_at,
    fixed_size,
    gaussian,
    laplace,
    poisson,
    proved_epsilon,
    repeated,
)

RELATIONS = list(NeighbouringRelation)
noises = st.floats(0.6, 4.0)
rates = st.floats(0.05, 1.0)
releases = st.one_of(noises.map(gaussian), noises.map(laplace))
twice = st.builds(composed, noises.map(gaussian), noises.map(gaussian))
batches = st.integers(1, 3).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))
sampled = st.one_of(
    st.builds(poisson, rates, releases),
    st.builds(poisson, rates, st.builds(poisson, rates, noises.map(gaussian))),
    st.builds(lambda sizes, inner: fixed_size(*sizes, inner), batches, releases),
)
parts = releases | sampled
trees = st.one_of(
    parts,
    st.builds(poisson, rates, twice),
    st.builds(composed, parts, parts),
    st.builds(repeated, st.just(2), parts),
)


def check_tree(tree: Json, relation: NeighbouringRelation) -> None:
    """Check the interval of δ; the oracle's cells lose a hundredth of it."""
    truth = by_brute_force(tree)
    for epsilon in BRUTE_EPSILONS:
        try:
            found = calculator.delta(mechanisms.from_json(tree), epsilon, relation=relation)
        except AccountingError:
            return
        exact = truth(epsilon, relation)
        if found.certified is not None:
            low, high = found.certified.lower, found.certified.upper
            assert low <= exact * (1 + 1e-2) + 2e-4, (tree, relation, epsilon, exact)
            assert exact <= high + 1e-9, (tree, relation, epsilon, exact)


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True)
@given(tree=trees, relation=st.sampled_from(RELATIONS))
def test_random_trees_hold_the_profile_of_the_definition(
    tree: Json, relation: NeighbouringRelation
) -> None:
    assume(len({n for n, _ in fixed_sizes(tree)}) <= 1)  # a tree is run on one dataset
    check_tree(tree, relation)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_many_random_trees_hold_the_profile_of_the_definition(night_seed: int) -> None:
    @settings(max_examples=400, deadline=None, database=None)
    @seed(night_seed)
    @given(tree=trees, relation=st.sampled_from(RELATIONS))
    def check(tree: Json, relation: NeighbouringRelation) -> None:
        assume(len({n for n, _ in fixed_sizes(tree)}) <= 1)
        check_tree(tree, relation)

    check()


def test_nearly_all_the_data_is_charged_at_most_as_unsampled_where_a_record_is_zeroed() -> None:
    found, unsampled = (
        epsilon_at(repeated(50, each), 1e-5, ZEROED, "subsampled_rdp")
        for each in (fixed_size(1000, 999, gaussian(5.0)), gaussian(5.0))
    )
    assert found.epsilon <= unsampled.epsilon * (1 + 1e-9)


@pytest.mark.parametrize(
    "tree",
    [
        composed(fixed_size(3, 3, gaussian(2.0)), fixed_size(3, 1, gaussian(2.0))),
        composed(fixed_size(3, 1, gaussian(2.0)), fixed_size(4, 1, gaussian(2.0))),
        fixed_size(3, 3, laplace(2.0)),
        poisson(1e-12, poisson(1e-12, poisson(1e-12, gaussian(0.1)))),
    ],
    ids=["all-and-part", "two-sizes", "laplace", "rounded-up"],
)
def test_a_mechanism_that_does_not_attain_its_pair_has_no_lower_bound(tree: Json) -> None:
    tree = composed(tree, gaussian(3.0))
    found = epsilon_at(tree, 1e-5)
    assert found.status is Status.PROVEN
    assert found.certified is not None
    assert found.certified.lower == 0.0 < found.certified.upper
    assert found.warnings == ("only an upper bound is proved: the true value may lie far below it",)
    curve = calculator.trade_off(mechanisms.from_json(tree), 0.5, 11)
    assert curve.advantage.lower == 0.0


# --- products of sample rates


def test_products_of_sample_rates_are_not_rounded_up() -> None:
    found = proved_epsilon(repeated(10**9, poisson(1e-8, poisson(1e-8, gaussian(0.2)))), 1e-6)
    assert (found.lower, found.upper) == (0.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "epsilon"), [(1e-13, 0.5), (1e-18, 0.0), (1e-30, 0.5)])
def test_tiny_rates_are_enclosed(rate: float, epsilon: float) -> None:
    release = Release(GaussianPair(2.5), rate)
    bounds = certified_interval.delta_bounds([(release, 1)], epsilon, 1e-3)
    exact = max(
        float(oracles.single_step_delta(epsilon, rate, 0.4, removing=removing))
        for removing in (True, False)
    )
    assert bounds.lower <= exact <= bounds.upper


@pytest.mark.slow
@pytest.mark.parametrize("depth", [2, 4, 30])
def test_every_method_answers_or_refuses_the_tiniest_rates(depth: int) -> None:
    tree = gaussian(0.5)
    for _ in range(depth):
        tree = poisson(1e-12, tree)
    for method in ACCOUNTANTS.values():
        for relation in RELATIONS:
            try:
                found = method.epsilon(question(repeated(1000, tree), relation), 1e-10)
            except AccountingError:
                continue
            assert 0 <= found.epsilon < math.inf


@pytest.mark.slow
def test_a_single_participation_has_its_probability() -> None:
    """`gaussian_sampling_composition` was 2e-5 too low here, by its binomial probabilities."""
    tree = mechanisms.from_json(repeated(2, poisson(1e-12, gaussian(0.5))))
    exact = float(oracles.sampling_composition_delta(1.0, 1e-12, 0.5, 2))
    found = calculator.delta(tree, 1.0, "gaussian_sampling_composition").delta
    assert exact <= found <= exact * (1 + 1e-8)
