"""Each kind of mechanism against its outcomes, enumerated at 40 digits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from mpmath import mp, mpf

from accountant_service import calculator, mechanisms
from accountant_service.errors import MethodNotApplicableError
from accountant_service.guarantee import NeighbouringRelation, Status

Json = dict[str, Any]
Pair = list[tuple[Any, Any]]  # the masses of each outcome under P and Q


def composed(pairs: Sequence[Pair]) -> Pair:
    """The joint outcomes of independent releases; those of equal ratio are merged."""
    found: Pair = [(mpf(1), mpf(1))]
    for pair in pairs:
        merged: dict[str, tuple[Any, Any]] = {}
        for (p, q), (r, s) in itertools.product(found, pair):
            ratio = "inf" if q * s == 0 else mp.nstr(p * r / (q * s), 25)
            old = merged.get(ratio, (mpf(0), mpf(0)))
            merged[ratio] = (old[0] + p * r, old[1] + q * s)
        found = list(merged.values())
    return found


def swapped(pair: Pair) -> Pair:
    return [(q, p) for p, q in pair]


def sampled(pair: Pair, rate: float) -> Pair:
    return [((1 - mpf(rate)) * q + mpf(rate) * p, q) for p, q in pair]


def delta(pair: Pair, epsilon: float) -> Any:
    """The larger δ(ε) of both directions."""
    factor = mp.exp(epsilon)
    return max(
        mp.fsum(max(p - factor * q, mpf(0)) for p, q in each) for each in (pair, swapped(pair))
    )


def randomized_response(categories: int, flip: float) -> Pair:
    k, f = mpf(categories), mpf(flip)
    true, other = 1 - f + f / k, f / k
    return [(true, other), (other, true), ((k - 2) * other, (k - 2) * other)]


# name, mechanism, its outcomes' masses; all attained
ATTAINED: list[tuple[Json, Pair]] = [
    (
        {"kind": "randomized_response", "categories": k, "flip_probability": f},
        randomized_response(k, f),
    )
    for k, f in ((2, 0.5), (4, 0.6), (10**9, 0.9))
]
NAMES = [mechanism["kind"] for mechanism, _ in ATTAINED]


def assert_encloses(mechanism: Json, pair: Pair, *, width: float = 2e-3) -> None:
    """Assert that δ's proved interval holds the truth and is narrow, at ε over the whole range."""
    tree = mechanisms.from_json(mechanism)
    finite = [abs(mp.log(p / q)) for p, q in pair if p > 0 and q > 0]
    for share in (0.0, 0.3, 0.8):
        epsilon = share * float(max(finite))
        found, exact = calculator.delta(tree, epsilon).certified, delta(pair, epsilon)
        assert found is not None
        assert found.lower <= exact <= found.upper, (mechanism, epsilon)
        assert found.upper - found.lower <= width * found.upper + 1e-12, (mechanism, epsilon)


@pytest.mark.parametrize(("mechanism", "pair"), ATTAINED, ids=NAMES)
def test_one_release_is_enclosed(mechanism: Json, pair: Pair) -> None:
    assert_encloses(mechanism, pair)


@pytest.mark.parametrize(("mechanism", "pair"), ATTAINED, ids=NAMES)
def test_five_releases_are_enclosed(mechanism: Json, pair: Pair) -> None:
    repeated = {"kind": "repeated", "count": 5, "mechanism": mechanism}
    assert_encloses(repeated, composed([pair] * 5))


@pytest.mark.parametrize(("mechanism", "pair"), ATTAINED, ids=NAMES)
def test_a_poisson_sampled_release_is_enclosed(mechanism: Json, pair: Pair) -> None:
    tree = {"kind": "poisson_sampled", "sample_rate": 0.2, "mechanism": mechanism}
    assert_encloses(tree, sampled(pair, 0.2))


@pytest.mark.parametrize("mechanism", [each for each, _ in ATTAINED], ids=NAMES)
def test_sampling_is_refused_where_no_theorem_covers_it(mechanism: Json) -> None:
    poisson = {"kind": "poisson_sampled", "sample_rate": 0.2, "mechanism": mechanism}
    fixed = {
        "kind": "fixed_size_sampled",
        "dataset_size": 100,
        "batch_size": 10,
        "mechanism": mechanism,
    }
    for tree, relation in (
        (poisson, NeighbouringRelation.REPLACE_ONE),
        (poisson, NeighbouringRelation.ZERO_OUT_ONE),
        (fixed, NeighbouringRelation.ADD_OR_REMOVE_ONE),
    ):
        with pytest.raises(MethodNotApplicableError) as refused:
            calculator.epsilon(mechanisms.from_json(tree), 1e-5, relation=relation)
        assert refused.value.pointer == ""


@pytest.mark.parametrize("mechanism", [each for each, _ in ATTAINED], ids=NAMES)
def test_every_method_answers_or_names_the_kind(mechanism: Json) -> None:
    tree = mechanisms.from_json({"kind": "repeated", "count": 3, "mechanism": mechanism})
    compared = calculator.compare(tree, 1e-5)
    assert isinstance(compared.certified, calculator.Guarantee)
    for each in compared.answers:
        if isinstance(each, calculator.Guarantee):
            assert each.status is Status.PROVEN, each
            assert each.epsilon >= compared.certified.certified.lower  # type: ignore[union-attr]
        else:
            assert mechanism["kind"] in str(each.error.detail)


BAD: list[tuple[Json, str]] = [
    ({"kind": "randomized_response", "categories": 1, "flip_probability": 0.5}, "/categories"),
    ({"kind": "randomized_response", "categories": 2.5, "flip_probability": 0.5}, "/categories"),
    ({"kind": "randomized_response", "categories": 2, "flip_probability": 0}, "/flip_probability"),
    (
        {"kind": "randomized_response", "categories": 2, "flip_probability": 1.1},
        "/flip_probability",
    ),
]


@pytest.mark.parametrize(("mechanism", "pointer"), BAD)
def test_bad_fields_are_refused_with_their_pointer(mechanism: Json, pointer: str) -> None:
    with pytest.raises(mechanisms.MechanismError) as refused:
        mechanisms.from_json({"kind": "repeated", "count": 2, "mechanism": mechanism})
    assert [each for each, _ in refused.value.faults] == ["/mechanism" + pointer]
