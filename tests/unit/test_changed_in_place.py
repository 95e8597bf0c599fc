"""Records that are replaced or zeroed in samples: Laplace noise, and pairs of any kind."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpmath import mp, mpf

from accountant_service import mechanisms
from accountant_service.accounting import calculator, release_laws
from accountant_service.accounting.guarantee import NeighbouringRelation, Status
from accountant_service.numerics.laws.dominating_pair import Release
from accountant_service.numerics.laws.fixed_size_replacement import FixedSizePairReplacement
from accountant_service.numerics.laws.replaced_laplace import ReplacedLaplacePair
from accountant_service.numerics.laws.revealed_sample import RevealedSamplePair

Json = dict[str, Any]
Masses = list[tuple[Any, Any]]
ADD = NeighbouringRelation.ADD_OR_REMOVE_ONE
REPLACE, ZERO = NeighbouringRelation.REPLACE_ONE, NeighbouringRelation.ZERO_OUT_ONE


def laplace(scale: float) -> Json:
    return {"kind": "laplace", "noise_multiplier": scale}


def poisson(rate: float, mechanism: Json) -> Json:
    return {"kind": "poisson_sampled", "sample_rate": rate, "mechanism": mechanism}


def fixed(size: int, batch: int, mechanism: Json) -> Json:
    sizes = {"dataset_size": size, "batch_size": batch}
    return {"kind": "fixed_size_sampled", "mechanism": mechanism} | sizes


def bounds(mechanism: Json, epsilon: float, relation: NeighbouringRelation) -> tuple[float, float]:
    found = calculator.delta(mechanisms.from_json(mechanism), epsilon, relation=relation)
    assert found.status is Status.PROVEN
    assert found.certified is not None
    return found.certified.lower, found.certified.upper


# ---------------------------------------------------------------------- Laplace noise


def density(scale: float, centre: float) -> Callable[[Any], Any]:
    return lambda z: mp.exp(-abs(z - centre) / scale) / (2 * scale)


def mixture(scale: float, rate: float, present: float, absent: float = 0.0) -> Callable[[Any], Any]:
    one, other = density(scale, absent), density(scale, present)
    return lambda z: (1 - rate) * one(z) + rate * other(z)


def hockey_stick(p: Callable[[Any], Any], q: Callable[[Any], Any], epsilon: float) -> Any:
    """∫ (p − e^ε·q)₊, between the kinks and with its zeros found by bisection."""

    def excess(z: Any) -> Any:
        return p(z) - mp.exp(epsilon) * q(z)

    grid = [mpf(each) / 40 for each in range(-80, 81)]
    cuts = [mpf(-60), *grid]
    for low, high in itertools.pairwise(grid):
        if excess(low) * excess(high) < 0:
            cuts.append(mp.findroot(excess, (low, high), solver="bisect"))
    cuts = sorted([*cuts, mpf(60)])
    return mp.fsum(
        mp.quad(excess, [low, high])
        for low, high in itertools.pairwise(cuts)
        if excess((low + high) / 2) > 0
    )


@pytest.mark.parametrize(("scale", "rate", "epsilon"), [(1.0, 0.2, 0.1), (0.5, 0.6, 1.0)])
def test_a_replaced_record_of_a_laplace_release_is_enclosed(
    scale: float, rate: float, epsilon: float
) -> None:
    with mp.workdps(20):
        exact = hockey_stick(mixture(scale, rate, 1.0), mixture(scale, rate, -1.0), epsilon)
    lower, upper = bounds(poisson(rate, laplace(scale)), epsilon, REPLACE)
    assert lower <= exact <= upper <= lower * (1 + 2e-3)


def test_two_replaced_records_of_laplace_releases_compose() -> None:
    """Two releases: masses of fine cells, whose product bounds δ from below."""
    scale, rate, epsilon = 1.0, 0.3, 0.4
    z = np.linspace(-30, 30, 6001)

    def cell_masses(centre: float) -> np.ndarray[Any, np.dtype[np.float64]]:
        below = np.where(
            z < centre, 0.5 * np.exp((z - centre) / scale), 1 - 0.5 * np.exp((centre - z) / scale)
        )
        return np.diff(below)

    p, q = ((1 - rate) * cell_masses(0.0) + rate * cell_masses(each) for each in (1.0, -1.0))
    order = np.argsort(p / q)
    p, q = p[order], q[order]
    tail_p, tail_q = (np.append(np.cumsum(each[::-1])[::-1], 0.0) for each in (p, q))
    first = np.searchsorted(p / q, math.exp(epsilon) * q / p)
    coarse = float(np.sum(p * tail_p[first] - math.exp(epsilon) * q * tail_q[first]))
    run = {"kind": "repeated", "count": 2, "mechanism": poisson(rate, laplace(scale))}
    lower, upper = bounds(run, epsilon, REPLACE)
    assert coarse <= upper
    assert lower <= coarse * (1 + 2e-3)
    assert upper <= lower * (1 + 2e-3)


@pytest.mark.parametrize("categories", [2, 3])
@pytest.mark.parametrize("relation", [ADD, REPLACE, ZERO])
def test_a_sampled_randomized_response_is_enclosed_as_one_answer_and_as_one_of_each_person(
    categories: int, relation: NeighbouringRelation
) -> None:
    """One answer: all true categories, of the record before and after, and of a sample without it.

    Of each person: who is not sampled does not answer.
    """
    flip, rate, epsilon = 0.2, 0.1, 0.5
    answers = (1 - flip) * np.eye(categories) + flip / categories
    exact = max(
        np.maximum(one - math.exp(epsilon) * other, 0).sum()
        for absent in answers
        for one, other in itertools.permutations(
            [(1 - rate) * absent + rate * present for present in answers], 2
        )
    )
    response = {"kind": "randomized_response", "flip_probability": flip, "categories": categories}
    of_each_person = rate * np.maximum(answers[0] - math.exp(epsilon) * answers[1], 0).sum()
    lower, upper = bounds(poisson(rate, response), epsilon, relation)
    assert lower <= exact <= of_each_person <= upper


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_every_replacement_costs_at_most_as_much(seed: int) -> None:
    """Contributions v and w in [−1, 1], at ε of either sign, both ways round."""
    rng = np.random.default_rng(seed)
    scale, rate = float(rng.uniform(0.4, 2)), float(rng.uniform(0.05, 0.9))
    v, w = rng.uniform(-1, 1, 2)
    epsilon = float(rng.uniform(-0.5, 0.5))
    with mp.workdps(15):
        worst = hockey_stick(mixture(scale, rate, 1.0), mixture(scale, rate, -1.0), epsilon)
        for one, other in ((v, w), (w, v)):
            p, q = (mixture(scale, rate, float(each)) for each in (one, other))
            assert hockey_stick(p, q, epsilon) <= worst * (1 + 1e-6)


@pytest.mark.parametrize(("scale", "rate"), [(1.0, 0.2), (0.2, 0.01)])
def test_moments_of_a_replaced_laplace_record_are_bounds(scale: float, rate: float) -> None:
    pair = Release(ReplacedLaplacePair(1 / scale, rate))
    p, q = mixture(scale, rate, 1.0), mixture(scale, rate, -1.0)
    for tilt in (0.5, 2.0):
        with mp.workdps(20):
            exact = mp.log(
                mp.quad(lambda z: p(z) * (p(z) / q(z)) ** tilt, [-40, -1, 0, 1, 40])  # noqa: B023
            )
        found = float(pair.log_moments("removing", np.array([tilt]))[0])
        assert exact <= found <= exact * (1 + 1e-3) + 1e-9


def test_the_record_at_half_the_distance_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = ReplacedLaplacePair
    monkeypatch.setattr(
        release_laws, "ReplacedLaplacePair", lambda beta, rate: genuine(beta / 2, rate)
    )
    with mp.workdps(20):
        exact = hockey_stick(mixture(1.0, 0.25, 1.0), mixture(1.0, 0.25, -1.0), 0.1)
    assert bounds(poisson(0.25, laplace(1.0)), 0.1, REPLACE)[1] < exact


# -------------------------------------------------------------------- pairs of any kind

E = mp.exp(1)
PAIRS: list[tuple[Json, Masses]] = [
    (
        {"kind": "approximate_dp", "epsilon": 1.0, "delta": 0.01},
        [
            (mpf("0.01"), mpf(0)),
            (mpf(0), mpf("0.01")),
            (mpf("0.99") * E / (1 + E), mpf("0.99") / (1 + E)),
            (mpf("0.99") / (1 + E), mpf("0.99") * E / (1 + E)),
        ],
    ),
    (
        {"kind": "randomized_response", "categories": 4, "flip_probability": 0.6},
        [
            (mpf("0.55"), mpf("0.15")),
            (mpf("0.15"), mpf("0.55")),
            (mpf("0.3"), mpf("0.3")),
        ],
    ),
]
NAMES = [mechanism["kind"] for mechanism, _ in PAIRS]


def delta(pair: Masses, epsilon: float) -> Any:
    return mp.fsum(max(p - mp.exp(epsilon) * q, mpf(0)) for p, q in pair)


def squared(pair: Masses) -> Masses:
    return [(p * r, q * s) for p, q in pair for r, s in pair]


@pytest.mark.parametrize("relation", [REPLACE, ZERO])
@pytest.mark.parametrize(("mechanism", "pair"), PAIRS, ids=NAMES)
def test_a_poisson_sample_is_revealed(
    mechanism: Json, pair: Masses, relation: NeighbouringRelation
) -> None:
    known = [*((p * mpf("0.25"), q * mpf("0.25")) for p, q in pair), (mpf("0.75"), mpf("0.75"))]
    once = poisson(0.25, mechanism)
    twice = {"kind": "repeated", "count": 2, "mechanism": once}
    for epsilon in (0.0, 0.4, 0.9):
        for tree, outcomes in ((once, known), (twice, squared(known))):
            exact = delta(outcomes, epsilon)
            lower, upper = bounds(tree, epsilon, relation)
            assert exact <= upper <= float(exact) * (1 + 1e-2) + 1e-12
            if mechanism["kind"] == "randomized_response":  # it cannot reveal who is missing
                assert lower == 0
            else:
                assert upper * (1 - 1e-2) - 1e-12 <= lower <= exact


@pytest.mark.parametrize(("mechanism", "pair"), PAIRS, ids=NAMES)
def test_a_fixed_size_sample_dilutes_the_pair(mechanism: Json, pair: Masses) -> None:
    """One release: q·δ(ε) at log(1 + q(e^ε − 1)); two: the pair that has it both ways round."""
    rate = mpf("0.25")
    mixed = [((1 - rate) * q + rate * p, q) for p, q in pair]
    positive = [(p, q) for p, q in mixed if p > q]
    both = [*positive, *((q, p) for p, q in positive)]
    rest = 1 - mp.fsum(p for p, _ in both)
    law = [*both, (rest, rest)]
    once = fixed(400, 100, mechanism)
    twice = {"kind": "repeated", "count": 2, "mechanism": once}
    for epsilon in (0.0, 0.05, 0.2):
        inner = math.log1p((math.exp(epsilon) - 1) / 0.25)
        assert abs(delta(law, epsilon) - rate * delta(pair, inner)) < 1e-12
        for tree, outcomes in ((once, law), (twice, squared(law))):
            exact = delta(outcomes, epsilon)
            lower, upper = bounds(tree, epsilon, REPLACE)
            assert lower == 0.0, "no two datasets are proved to attain the pair"
            assert exact <= upper <= exact * (1 + 1e-2) + 1e-12


@pytest.mark.parametrize(("mechanism", "pair"), PAIRS, ids=NAMES)
def test_moments_of_samples_are_bounds(mechanism: Json, pair: Masses) -> None:
    form = mechanisms.canonical_form(mechanisms.from_json(mechanism))
    groups = release_laws.release_groups(form.atom_counts, REPLACE)
    inner = release_laws.dominating_pair(groups[0], REPLACE)
    assert isinstance(inner, Release)
    finite = [(p, q) for p, q in pair if p > 0 and q > 0]
    rate, tilts = mpf("0.25"), np.array([0.5, 3.0])
    revealed = Release(RevealedSamplePair(inner.base_pair, 0.25)).log_moments("removing", tilts)
    diluted = FixedSizePairReplacement(inner.base_pair, 0.25).log_moments("removing", tilts)
    for tilt, one, other in zip(tilts, revealed, diluted, strict=True):
        moment = rate * mp.fsum(p * (p / q) ** tilt for p, q in finite) + 1 - rate
        assert mp.log(moment) <= one <= mp.log(moment) * (1 + 1e-3) + 0.01
        mixed = [((1 - rate) * q + rate * p, q) for p, q in pair if q > 0]
        positive = [(p, q) for p, q in mixed if p > q]
        both = [*positive, *((q, p) for p, q in positive)]
        rest = 1 - mp.fsum(p for p, _ in both)
        assert mp.log(mp.fsum(p * (p / q) ** tilt for p, q in both) + rest) <= other


def test_a_revealed_sample_is_not_sampled_again() -> None:
    pair = RevealedSamplePair(ReplacedLaplacePair(1.0, 0.5), 0.5)
    with pytest.raises(ValueError, match="sampled again"):
        pair.log_moments(np.array([2.0]), 0.5)


def test_less_is_charged_than_without_sampling() -> None:
    kinds: list[Json] = [
        {"kind": "gdp", "mu": 0.7},
        {"kind": "zcdp", "rho": 0.05},
        {"kind": "discrete_gaussian", "noise_std": 4.0, "sensitivity": 1},
        {"kind": "truncated_laplace", "scale": 2.0, "bound": 30.0, "sensitivity": 1.0},
        laplace(2.0),
    ]
    for each in kinds:
        whole, sample, batch = (
            calculator.epsilon(mechanisms.from_json(tree), 1e-4, relation=REPLACE).epsilon
            for tree in (each, poisson(0.1, each), fixed(1000, 100, each))
        )
        assert batch < whole
        assert sample < whole


def test_a_limited_poisson_sample_covers_a_replaced_record() -> None:
    """With a limit that is never reached it is the Poisson sample; else it costs more."""

    def run(most: int) -> Json:
        noise = {"kind": "gaussian", "noise_multiplier": 1.2}
        fields = {"dataset_size": 1000, "sample_rate": 0.02, "batch_size_max": most}
        return {"kind": "truncated_poisson_sampled", "mechanism": noise} | fields

    plain = poisson(0.02, {"kind": "gaussian", "noise_multiplier": 1.2})
    exact = bounds(plain, 0.5, REPLACE)
    wide, narrow = bounds(run(400), 0.5, REPLACE), bounds(run(20), 0.5, REPLACE)
    assert wide[1] == pytest.approx(exact[1], rel=1e-3)
    assert narrow[1] > exact[1]
    assert wide[0] == 0.0
    assert (
        exact[1]
        > bounds(plain, 0.5, ZERO)[1]
        == pytest.approx(bounds(run(400), 0.5, ZERO)[1], rel=1e-3)
    )
    assert narrow[1] > bounds(run(20), 0.5, ZERO)[1]
