"""Every proved interval against privacy profiles enumerated from the definition."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from accountant_service import calculator, mechanisms
from accountant_service.accountants import ACCOUNTANTS
from accountant_service.errors import AccountingError
from accountant_service.guarantee import Guarantee, NeighbouringRelation, Status
from accountant_service.numerics import certified_interval
from accountant_service.numerics.laws.dominating_pair import GaussianPair, Release
from tests.support import definition, oracles
from tests.support.helpers import ADD_OR_REMOVE, REPLACE, ZERO_OUT, question

Json = dict[str, Any]
EPSILONS = (0.0, 0.4, 1.2)
CELLS = 1e-2  # what the oracle's cells lose of δ, relative
RELATIONS = list(NeighbouringRelation)


def gaussian(sigma: float) -> Json:
    return {"kind": "gaussian", "noise_multiplier": sigma}


def laplace(scale: float) -> Json:
    return {"kind": "laplace", "noise_multiplier": scale}


def poisson(rate: float, mechanism: Json) -> Json:
    return {"kind": "poisson_sampled", "sample_rate": rate, "mechanism": mechanism}


def fixed(size: int, batch: int, mechanism: Json) -> Json:
    return {
        "kind": "fixed_size_sampled",
        "dataset_size": size,
        "batch_size": batch,
        "mechanism": mechanism,
    }


def composed(*parts: Json) -> Json:
    return {"kind": "composed", "mechanisms": list(parts)}


def repeated(count: int, mechanism: Json) -> Json:
    return {"kind": "repeated", "count": count, "mechanism": mechanism}


def fixed_sizes(tree: Json) -> list[tuple[int, int]]:
    """Dataset and batch size of every fixed-size sample in a tree."""
    inner = tree.get("mechanisms", [tree["mechanism"]] if "mechanism" in tree else [])
    own = [(tree["dataset_size"], tree["batch_size"])] if "dataset_size" in tree else []
    return own + [sizes for each in inner for sizes in fixed_sizes(each)]


def larger_sizes(tree: Json, relation: NeighbouringRelation) -> list[int]:
    """The sizes that the larger of two neighbours may have."""
    sizes = fixed_sizes(tree)
    if not sizes:
        return [2]
    if relation is not ADD_OR_REMOVE:
        return [sizes[0][0]]
    # of n records and one more; of n and one less only if that leaves a batch
    return [n + 1 for n, _ in sizes] + [n for n, b in sizes if all(b < n for n, b in sizes)]


def truth(tree: Json, relation: NeighbouringRelation) -> list[float]:
    found = [definition.delta(tree, relation, n, EPSILONS) for n in larger_sizes(tree, relation)]
    return [max(each) for each in zip(*found, strict=True)]


def answer(tree: Json, at: float, relation: NeighbouringRelation) -> Guarantee | None:
    try:
        return calculator.delta(mechanisms.from_json(tree), at, relation=relation)
    except AccountingError:
        return None


def assert_encloses(tree: Json, relation: NeighbouringRelation) -> None:
    for epsilon, exact in zip(EPSILONS, truth(tree, relation), strict=True):
        found = answer(tree, epsilon, relation)
        if found is None or found.certified is None:
            continue
        low, high = found.certified.lower, found.certified.upper
        assert low <= exact * (1 + CELLS) + 2e-4, (tree, relation, epsilon, exact)
        assert exact <= high + 1e-9, (tree, relation, epsilon, exact)


CASES = {
    "plain": gaussian(1.0),
    "poisson": poisson(0.3, gaussian(1.0)),
    "poisson of poisson": poisson(0.5, poisson(0.4, gaussian(1.0))),
    "all, fixed": fixed(3, 3, gaussian(2.0)),
    "the only record": fixed(1, 1, gaussian(2.0)),
    "two of three": fixed(3, 2, gaussian(2.0)),
    "all, fixed, laplace": fixed(2, 2, laplace(2.0)),
    "all, fixed, twice": fixed(2, 2, repeated(2, gaussian(2.0))),
    "sampled laplace": poisson(0.3, laplace(1.0)),
    "one sample, two releases": poisson(0.3, composed(gaussian(1.0), gaussian(2.0))),
    "poisson and all, fixed": composed(poisson(0.3, gaussian(1.0)), fixed(2, 2, gaussian(2.0))),
    "all and a part, fixed": composed(fixed(3, 3, gaussian(2.0)), fixed(3, 1, gaussian(0.7))),
    "gaussian and laplace": composed(gaussian(1.0), laplace(2.0)),
    "repeated": repeated(2, poisson(0.2, gaussian(0.7))),
}


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("case", CASES)
def test_the_interval_holds_the_profile_of_the_definition(
    case: str, relation: NeighbouringRelation
) -> None:
    assert_encloses(CASES[case], relation)


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("case", CASES)
def test_no_proven_method_claims_less_than_the_definition(
    case: str, relation: NeighbouringRelation
) -> None:
    epsilon, exact = EPSILONS[1], truth(CASES[case], relation)[1]
    if exact < 1e-4:
        return  # the largest loss is below this ε
    for method in set(ACCOUNTANTS) - {"pld"}:
        try:
            found = ACCOUNTANTS[method].epsilon(question(CASES[case], relation), exact)
        except AccountingError:
            continue
        assert found.status is not Status.PROVEN or found.epsilon >= epsilon, method


noises = st.floats(0.6, 4.0)
rates = st.floats(0.05, 1.0)
releases = st.one_of(noises.map(gaussian), noises.map(laplace))
twice = st.builds(composed, noises.map(gaussian), noises.map(gaussian))
batches = st.integers(1, 3).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))
sampled = st.one_of(
    st.builds(poisson, rates, releases),
    st.builds(poisson, rates, st.builds(poisson, rates, noises.map(gaussian))),
    st.builds(lambda sizes, inner: fixed(*sizes, inner), batches, releases),
)
parts = releases | sampled
trees = st.one_of(
    parts,
    st.builds(poisson, rates, twice),
    st.builds(composed, parts, parts),
    st.builds(repeated, st.just(2), parts),
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(tree=trees, relation=st.sampled_from(RELATIONS))
def test_random_trees_hold_the_profile_of_the_definition(
    tree: Json, relation: NeighbouringRelation
) -> None:
    assume(len({n for n, _ in fixed_sizes(tree)}) <= 1)  # a tree is run on one dataset
    assert_encloses(tree, relation)


# --- fixed-size samples of all the data


@pytest.mark.parametrize(
    ("relation", "mu"), [(ZERO_OUT, 0.5), (REPLACE, 1.0)], ids=["zeroed", "replaced"]
)
def test_a_batch_of_all_the_data_holds_the_record_for_certain(
    relation: NeighbouringRelation, mu: float
) -> None:
    tree = mechanisms.from_json(fixed(1000, 1000, gaussian(2.0)))
    found = calculator.epsilon(tree, 1e-5, relation=relation)
    exact = float(oracles.gaussian_epsilon(1e-5, mu))
    assert found.certified is not None
    assert found.certified.lower <= exact <= found.certified.upper
    assert found.certified.upper == pytest.approx(exact, rel=1e-8)


@pytest.mark.parametrize("size", [1, 2, 60_000])
def test_a_batch_of_all_the_data_leaves_one_of_one_more_out(size: int) -> None:
    tree = mechanisms.from_json(fixed(size, size, gaussian(2.0)))
    found = calculator.epsilon(tree, 1e-5)
    exact = float(oracles.single_step_epsilon(1e-5, size / (size + 1), 1.0))
    assert found.certified is not None
    assert found.certified.lower <= exact <= found.certified.upper
    assert found.certified.upper == pytest.approx(exact, rel=1e-3)


def test_nearly_all_the_data_is_charged_at_most_as_unsampled_where_a_record_is_zeroed() -> None:
    tree = mechanisms.from_json(repeated(50, fixed(1000, 999, gaussian(5.0))))
    whole = mechanisms.from_json(repeated(50, gaussian(5.0)))
    found = calculator.epsilon(tree, 1e-5, "subsampled_rdp", ZERO_OUT)
    unsampled = calculator.epsilon(whole, 1e-5, "subsampled_rdp", ZERO_OUT)
    assert found.epsilon <= unsampled.epsilon * (1 + 1e-9)


@pytest.mark.parametrize(
    "tree",
    [
        composed(fixed(3, 3, gaussian(2.0)), fixed(3, 1, gaussian(2.0))),
        composed(fixed(3, 1, gaussian(2.0)), fixed(4, 1, gaussian(2.0))),
        fixed(3, 3, laplace(2.0)),
        poisson(1e-12, poisson(1e-12, poisson(1e-12, gaussian(0.1)))),
    ],
    ids=["all-and-part", "two-sizes", "laplace", "rounded-up"],
)
def test_a_mechanism_that_does_not_attain_its_pair_has_no_lower_bound(tree: Json) -> None:
    tree = composed(tree, gaussian(3.0))
    found = calculator.epsilon(mechanisms.from_json(tree), 1e-5)
    assert found.status is Status.PROVEN
    assert found.certified is not None
    assert found.certified.lower == 0.0 < found.certified.upper
    assert found.warnings == ("only an upper bound is proved: the true value may lie far below it",)
    curve = calculator.trade_off(mechanisms.from_json(tree), 0.5, 11)
    assert curve.advantage.lower == 0.0


# --- products of sample rates


def test_products_of_sample_rates_are_not_rounded_up() -> None:
    tree = mechanisms.from_json(repeated(10**9, poisson(1e-8, poisson(1e-8, gaussian(0.2)))))
    found = calculator.epsilon(tree, 1e-6)
    assert found.certified is not None
    assert (found.certified.lower, found.certified.upper) == (0.0, 0.0)


def test_products_of_rates_are_told_apart() -> None:
    hashes = {
        question(poisson(rate, poisson(1e-9, gaussian(1.0)))).form.hash
        for rate in (1e-3, 1e-4, 1e-5, 1e-12)
    }
    assert len(hashes) == 4


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1e-13, 1e-18, 1e-24, 1e-30])
@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_tiny_rates_are_enclosed(rate: float, epsilon: float) -> None:
    release = Release(GaussianPair(2.5), rate)
    bounds = certified_interval.delta_bounds([(release, 1)], epsilon, 1e-3)
    exact = max(
        float(oracles.single_step_delta(epsilon, rate, 0.4, removing=removing))
        for removing in (True, False)
    )
    assert bounds.lower <= exact <= bounds.upper


@pytest.mark.parametrize("rates", [(1e-12, 1e-12), (1e-12,) * 4, (1e-12,) * 30])
@pytest.mark.parametrize("relation", RELATIONS)
def test_every_method_answers_or_refuses_the_tiniest_rates(
    rates: tuple[float, ...], relation: NeighbouringRelation
) -> None:
    tree = gaussian(0.5)
    for rate in rates:
        tree = poisson(rate, tree)
    for method in ACCOUNTANTS.values():
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
