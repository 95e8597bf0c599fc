"""Each kind of mechanism against its definition, enumerated or integrated at 30 digits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from mpmath import mp, mpf

from accountant_service import calculator, mechanisms
from accountant_service.errors import (
    MethodNotApplicableError,
    NoFiniteEpsilonError,
    TooExpensiveError,
)
from accountant_service.guarantee import NeighbouringRelation, Status
from accountant_service.numerics.laws.dominating_pair import (
    DIRECTIONS,
    Release,
    distinct_directions,
)
from accountant_service.numerics.laws.several_records import SeveralRecordsPair
from accountant_service.numerics.laws.truncated_poisson import binomial_below, binomial_tail
from accountant_service.numerics.privacy_profile import bounds_near
from tests.support import oracles

Json = dict[str, Any]
Pair = list[tuple[Any, Any]]  # the masses of each outcome under P and Q


def repeated(count: int, mechanism: Json) -> Json:
    return {"kind": "repeated", "count": count, "mechanism": mechanism}


def poisson(rate: float, mechanism: Json) -> Json:
    return {"kind": "poisson_sampled", "sample_rate": rate, "mechanism": mechanism}


def gaussian(sigma: float) -> Json:
    return {"kind": "gaussian", "noise_multiplier": sigma}


def composed(*parts: Json) -> Json:
    return {"kind": "composed", "mechanisms": list(parts)}


# ----------------------------------------------------------------- finitely many outcomes


def product(pairs: Sequence[Pair]) -> Pair:
    """The joint outcomes of independent releases; those of equal ratio are merged."""
    found: Pair = [(mpf(1), mpf(1))]
    for pair in pairs:
        merged: dict[str, tuple[Any, Any]] = {}
        for (p, q), (r, s) in itertools.product(found, pair):
            ratio = "inf" if q * s == 0 else mp.nstr(p * r / (q * s), 20)
            old = merged.get(ratio, (mpf(0), mpf(0)))
            merged[ratio] = (old[0] + p * r, old[1] + q * s)
        found = list(merged.values())
    return found


def sampled(pair: Pair, rate: float) -> Pair:
    return [((1 - mpf(rate)) * q + mpf(rate) * p, q) for p, q in pair]


def delta(pair: Pair, epsilon: float) -> Any:
    """The larger δ(ε) of both directions."""
    factor = mp.exp(epsilon)
    both = (pair, [(q, p) for p, q in pair])
    return max(mp.fsum(max(p - factor * q, mpf(0)) for p, q in each) for each in both)


def randomized_response(categories: int, flip: float) -> Pair:
    k, f = mpf(categories), mpf(flip)
    true, other = 1 - f + f / k, f / k
    return [(true, other), (other, true), ((k - 2) * other, (k - 2) * other)]


def shifted_noise(mass: Callable[[int], Any], reach: int, sensitivity: int) -> Pair:
    """Integer noise, shifted and not; the reach leaves less than 1e-30."""
    outcomes = range(-reach, reach + sensitivity + 1)
    total = mp.fsum(mass(j) for j in range(-reach - sensitivity, reach + sensitivity + 1))
    return [(mass(j - sensitivity) / total, mass(j) / total) for j in outcomes]


def discrete_laplace(scale: float, sensitivity: int) -> Pair:
    return shifted_noise(lambda j: mp.exp(-abs(j) / mpf(scale)), round(80 * scale), sensitivity)


def discrete_gaussian(std: float, sensitivity: int) -> Pair:
    return shifted_noise(
        lambda j: mp.exp(-(j**2) / (2 * mpf(std) ** 2)), round(13 * std), sensitivity
    )


def approximate(epsilon: float, reveal: float) -> Pair:
    kept, e = 1 - mpf(reveal), mp.exp(epsilon)
    infinite: Pair = [(mpf(reveal), mpf(0)), (mpf(0), mpf(reveal))]
    return [*infinite, (kept * e / (1 + e), kept / (1 + e)), (kept / (1 + e), kept * e / (1 + e))]


def profile_pair() -> Pair:
    """A pair with dyadic masses, and losses ±log 2 and ±log 4, 0 and ±∞."""
    half = [(mpf(8), mpf(4)), (mpf(4), mpf(1)), (mpf(1) / 2, mpf(0))]
    whole = half + [(q, p) for p, q in half]
    rest = 64 - mp.fsum(p for p, _ in whole)
    return [(p / 64, q / 64) for p, q in [*whole, (rest, rest)]]


def profile_of(pair: Pair) -> Json:
    epsilons = [0.0, math.log(2), math.log(4)]
    deltas = [float(delta(pair, each)) for each in epsilons]
    return {"kind": "privacy_profile", "epsilons": epsilons, "deltas": deltas}


ATTAINED: list[tuple[Json, Pair]] = [
    *(
        (
            {"kind": "randomized_response", "categories": k, "flip_probability": f},
            randomized_response(k, f),
        )
        for k, f in ((2, 0.5), (4, 0.6), (10**9, 0.9))
    ),
    *(
        ({"kind": "discrete_laplace", "scale": b, "sensitivity": s}, discrete_laplace(b, s))
        for b, s in ((5.0, 1), (0.5, 1), (2.0, 3))
    ),
    *(
        ({"kind": "discrete_gaussian", "noise_std": b, "sensitivity": s}, discrete_gaussian(b, s))
        for b, s in ((1.5, 1), (0.3, 1), (4.0, 5))
    ),
    *(
        ({"kind": "approximate_dp", "epsilon": e, "delta": d}, approximate(e, d))
        for e, d in ((0.3, 1e-7), (1.0, 0.01))
    ),
    (profile_of(profile_pair()), profile_pair()),
]
NAMES = [mechanism["kind"] for mechanism, _ in ATTAINED]
every_attained = pytest.mark.parametrize(("mechanism", "pair"), ATTAINED, ids=NAMES)


def assert_encloses(mechanism: Json, pair: Pair, *, width: float = 2e-3) -> None:
    """Assert that δ's proved interval holds the truth and is narrow, at ε over the whole range."""
    tree = mechanisms.from_json(mechanism)
    finite = [(abs(mp.log(p / q)), p) for p, q in pair if p > 0 and q > 0]
    largest = float(max(loss for loss, mass in finite if mass > 1e-9))
    for share in (0.0, 0.3, 0.8):
        found, exact = (
            calculator.delta(tree, share * largest).certified,
            delta(pair, share * largest),
        )
        assert found is not None
        assert found.lower <= exact <= found.upper, (mechanism, share * largest)
        assert found.upper - found.lower <= width * found.upper + 1e-12, (mechanism, share)


@every_attained
def test_one_release_is_enclosed(mechanism: Json, pair: Pair) -> None:
    assert_encloses(mechanism, pair)


@every_attained
def test_three_releases_are_enclosed(mechanism: Json, pair: Pair) -> None:
    assert_encloses(repeated(3, mechanism), product([pair] * 3), width=1e-2)


# sampled randomized response is in test_changed_in_place.py: it may be an answer of each person
@pytest.mark.parametrize(
    ("mechanism", "pair"),
    [each for each in ATTAINED if each[0]["kind"] != "randomized_response"],
    ids=[each for each in NAMES if each != "randomized_response"],
)
def test_a_poisson_sampled_release_is_enclosed(mechanism: Json, pair: Pair) -> None:
    assert_encloses(poisson(0.2, mechanism), sampled(pair, 0.2))


def test_different_kinds_compose() -> None:
    chosen = [ATTAINED[0], ATTAINED[5], ATTAINED[10]]
    tree = composed(*(mechanism for mechanism, _ in chosen), poisson(0.5, ATTAINED[3][0]))
    pairs = [*(pair for _, pair in chosen), sampled(ATTAINED[3][1], 0.5)]
    assert_encloses(tree, product(pairs), width=1e-2)


@pytest.mark.parametrize("reveal", [0.01, 1e-6])
@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_a_lattice_adds_what_is_revealed_to_both_bounds(reveal: float, epsilon: float) -> None:
    """Given the loss l of the discrete release, the rest has the profile at ε − l."""

    def profile(x: Any) -> Any:
        if x >= 0:
            return oracles.gaussian_delta(x, 0.5)
        return 1 - mp.exp(x) + mp.exp(x) * oracles.gaussian_delta(-x, 0.5)

    known = approximate(0.4, reveal)
    exact = reveal + mp.fsum(p * profile(epsilon - mp.log(p / q)) for p, q in known if p and q)
    tree = composed(gaussian(2.0), {"kind": "approximate_dp", "epsilon": 0.4, "delta": reveal})
    found = calculator.delta(mechanisms.from_json(tree), epsilon).certified
    assert found is not None
    assert found.lower <= exact <= found.upper
    assert found.upper - found.lower <= 1e-2 * found.upper
    at = calculator.epsilon(mechanisms.from_json(tree), float(exact)).certified
    assert at is not None
    assert at.lower <= epsilon <= at.upper <= at.lower * 1.02 + 0.01


@every_attained
def test_sampling_is_refused_where_no_theorem_covers_it(mechanism: Json, pair: Pair) -> None:
    fixed = {
        "kind": "fixed_size_sampled",
        "dataset_size": 100,
        "batch_size": 10,
        "mechanism": mechanism,
    }
    for relation in (NeighbouringRelation.ADD_OR_REMOVE_ONE, NeighbouringRelation.ZERO_OUT_ONE):
        with pytest.raises(MethodNotApplicableError) as refused:
            calculator.epsilon(mechanisms.from_json(fixed), 1e-5, relation=relation)
        assert refused.value.pointer == ""


def test_no_epsilon_is_finite_below_the_mass_that_reveals_everything() -> None:
    tree = mechanisms.from_json(
        repeated(10, {"kind": "approximate_dp", "epsilon": 0.1, "delta": 1e-6})
    )
    total = -math.expm1(10 * math.log1p(-1e-6))
    with pytest.raises(NoFiniteEpsilonError):
        calculator.epsilon(tree, total * (1 - 1e-6))
    assert calculator.epsilon(tree, total * (1 + 1e-3)).epsilon <= 1.0 + 1e-6
    assert calculator.delta(tree, 50.0).certified.lower == pytest.approx(total, rel=1e-6)  # type: ignore[union-attr]


def test_an_infinite_epsilon_names_the_events_and_the_way_out() -> None:
    profile = {"kind": "privacy_profile", "epsilons": [0.5, 1.0], "deltas": [1e-3, 1e-4]}
    gaussian = {"kind": "gaussian", "noise_multiplier": 1.0}
    both = {"kind": "composed", "mechanisms": [gaussian, repeated(2, profile)]}
    for mechanism, pointer, least in (
        (profile, "", "0.0001"),
        (both, "/mechanisms/1/mechanism", "0.00019999"),
    ):
        with pytest.raises(NoFiniteEpsilonError) as refused:
            calculator.epsilon(mechanisms.from_json(mechanism), 1e-5)
        assert str(refused.value) == (
            "no finite ε holds at δ = 1e-05: as far as is known of privacy_profile, the privacy "
            f"loss may be infinite with a probability of {least}. To get a finite ε, choose a "
            "larger δ, or give the privacy_profile a point with a smaller δ"
        )
        assert refused.value.pointer == pointer


# ----------------------------------------------------------------------- one given bound


def upper_delta(tree: Json, epsilon: float) -> float:
    return calculator.delta(mechanisms.from_json(tree), epsilon).delta


def test_a_gdp_release_is_the_gaussian_mechanism() -> None:
    tree = composed(
        {"kind": "gdp", "mu": 0.3}, repeated(2, {"kind": "gdp", "mu": 0.4}), gaussian(2.0)
    )
    mu = math.sqrt(0.09 + 0.32 + 0.25)
    for relation, total in (
        (NeighbouringRelation.ADD_OR_REMOVE_ONE, mu),
        (NeighbouringRelation.REPLACE_ONE, math.sqrt(0.09 + 0.32 + 1.0)),  # only C is doubled
    ):
        found = calculator.epsilon(mechanisms.from_json(tree), 1e-6, relation=relation).certified
        assert found is not None
        exact = oracles.gaussian_epsilon(1e-6, total)
        assert found.lower <= exact <= found.upper <= exact * (1 + 1e-8)


def test_a_sampled_gdp_release_is_the_sampled_gaussian_mechanism() -> None:
    found, same = (
        calculator.epsilon(mechanisms.from_json(repeated(100, poisson(0.1, each))), 1e-6).epsilon
        for each in ({"kind": "gdp", "mu": 0.5}, gaussian(2.0))
    )
    assert found == same


def test_bounded_range_dominates_every_pair_and_is_the_least_that_does() -> None:
    bound = 1.3
    tree = {"kind": "exponential", "epsilon": bound}

    def worst(x: float) -> float:
        pairs = (
            float(delta(two_losses(t, bound), x)) for t in (bound * i / 400 for i in range(1, 400))
        )
        return max(pairs)

    for x in (0.0, 0.2, 0.9, 1.25):
        assert worst(x) <= upper_delta(tree, x) <= worst(x) * (1 + 1e-3) + 1e-6
    for t in (0.2, 0.65, 1.1):
        pairs = product([two_losses(t, bound)] * 3)
        assert delta(pairs, 1.0) <= upper_delta(repeated(3, tree), 1.0)
    found = calculator.epsilon(mechanisms.from_json(tree), 1e-3)
    assert found.status is Status.PROVEN
    assert found.certified is not None
    assert found.certified.lower == 0.0


def two_losses(t: float, bound: float) -> Pair:
    """The pair with the losses t and t − ε."""
    p = (1 - mp.exp(t - bound)) / (1 - mp.exp(-bound))
    return [(p, p * mp.exp(-t)), (1 - p, 1 - p * mp.exp(-t))]


def test_the_composition_of_bounded_range_pairs_is_that_of_their_densities() -> None:
    e, x = mpf("1.3"), mpf("0.7")
    scale = 1 / (4 * mp.sinh(e / 2))
    exact = mp.quad(
        lambda first: scale * mp.exp(first / 2) * (one_bounded_range(x - first, e)),
        [-e, x - e, 0, e],
    )
    found = upper_delta(repeated(2, {"kind": "exponential", "epsilon": 1.3}), 0.7)
    assert exact <= found <= exact * (1 + 2e-3)


def one_bounded_range(x: Any, e: Any) -> Any:
    """H(x) at any real x."""
    if x >= e:
        return mpf(0)
    return 1 - mp.exp(x) if x <= -e else (1 - mp.exp((x - e) / 2)) ** 2 / (1 - mp.exp(-e))


@pytest.mark.slow
def test_truncated_laplace_is_enclosed() -> None:
    for scale, bound, sensitivity in ((1.0, 5.0, 1.0), (2.0, 1.5, 1.5), (0.5, 3.0, 2.0)):
        tree = {
            "kind": "truncated_laplace",
            "scale": scale,
            "bound": bound,
            "sensitivity": sensitivity,
        }
        kept = 2 * scale * (1 - mp.exp(-mpf(bound) / scale))

        def density(x: Any, scale: float = scale, bound: float = bound, kept: Any = kept) -> Any:
            return mp.exp(-abs(x) / scale) / kept if abs(x) <= bound else mpf(0)

        for share in (0.0, 0.4, 0.9, 1.1):
            epsilon = share * sensitivity / scale
            end = max(min((epsilon * scale + sensitivity) / 2, sensitivity), sensitivity - bound)
            if share > 1:  # only what reveals everything is left
                end = bound
            exact = mp.quad(
                lambda x, d=density, s=sensitivity, e=epsilon: d(x - s) - mp.exp(e) * d(x),
                sorted({end, bound, bound + sensitivity, max(end, sensitivity)}),
            )
            found = calculator.delta(mechanisms.from_json(tree), epsilon).certified
            assert found is not None
            assert found.lower <= exact * (1 + 1e-9)
            assert exact <= found.upper * (1 + 1e-9) <= exact * (1 + 3e-3)
        lazy = upper_delta(poisson(0.3, tree), 0.0)
        assert lazy == pytest.approx(0.3 * upper_delta(tree, 0.0), rel=1e-3)


def test_permute_and_flip_is_any_pure_release() -> None:
    flip, pure = (
        upper_delta(repeated(5, {"kind": kind, "epsilon": 0.5} | more), 1.0)
        for kind, more in (("permute_and_flip", {}), ("approximate_dp", {"delta": 0}))
    )
    assert flip == pure


# ------------------------------------------------------------------------ correlated noise


def factorization(coefficients: list[float], steps: int, separation: int, most: int) -> Json:
    return {
        "kind": "matrix_factorization",
        "noise_multiplier": 4.0,
        "coefficients": coefficients,
        "steps": steps,
        "min_separation": separation,
        "participations": most,
    }


@pytest.mark.parametrize("coefficients", [[1.0], [1.0, 0.5, 0.25], [1.0] * 7, [0.9, 0.3, 0.3, 0.1]])
def test_correlated_noise_is_the_gaussian_of_the_worst_pattern(coefficients: list[float]) -> None:
    """Over all patterns of three participations in seven steps, at least two apart, and signs."""
    steps, separation, most = 7, 2, 3
    columns = [
        [0.0] * start + (coefficients + [0.0] * steps)[: steps - start] for start in range(steps)
    ]
    worst = 0.0
    for number in range(1, most + 1):
        for pattern in itertools.combinations(range(steps), number):
            if all(b - a >= separation for a, b in itertools.pairwise(pattern)):
                for signs in itertools.product((1, -1), repeat=number):
                    total = [
                        sum(sign * columns[i][row] for sign, i in zip(signs, pattern, strict=True))
                        for row in range(steps)
                    ]
                    worst = max(worst, math.hypot(*total))
    tree = factorization(coefficients, steps, separation, most)
    ((atom, count),) = mechanisms.canonical_form(mechanisms.from_json(tree)).atom_counts
    assert (atom.noise, count) == ("gaussian", 1)
    assert atom.noise_multiplier == pytest.approx(4.0 / worst, rel=1e-12)


# ------------------------------------------------------------------------ private selection


def selection(distribution: str, mean: float, mechanism: Json, **more: float) -> Json:
    repeats = {"distribution": distribution, "mean": mean} | more
    return {"kind": "private_selection", "repeats": repeats, "mechanism": mechanism}


def selected_divergence(
    a: Any, orders: Sequence[Any], mean: float, shape: float, rho: float
) -> Any:
    """Theorem 2 at 30 digits, for D_α = ρα."""
    if shape == 0:
        gamma = mp.findroot(
            lambda g: (1 / g - 1) / mp.log(1 / g) - mean, (0.01, 0.9), solver="anderson"
        )
    else:
        gamma = mp.findroot(
            lambda g: shape * (1 - g) / (g * (1 - g**shape)) - mean, (0.01, 0.9), solver="anderson"
        )
    best = min((1 - 1 / b) * rho * b + mp.log(1 / gamma) / b for b in orders)
    return rho * a + (1 + shape) * best + mp.log(mean) / (a - 1)


@pytest.mark.parametrize(
    ("distribution", "shape", "more"),
    [("geometric", 1.0, {}), ("logarithmic", 0.0, {}), ("negative_binomial", 0.5, {"shape": 0.5})],
)
def test_selection_after_a_random_number_of_runs(
    distribution: str, shape: float, more: Json
) -> None:
    sigma, mean = 4.0, 10.0
    orders = [1 + mpf(10) ** (mpf(i) / 50) for i in range(-100, 150)]
    exact = min(
        selected_divergence(a, orders, mean, shape, mpf(1) / (2 * sigma**2))
        + mp.log(1 - 1 / a)
        - (mp.log(mpf("1e-6")) + mp.log(a)) / (a - 1)
        for a in orders
    )
    tree = mechanisms.from_json(selection(distribution, mean, gaussian(sigma), **more))
    found = calculator.epsilon(tree, 1e-6)
    assert exact * (1 - 1e-3) <= found.epsilon <= exact * (1 + 3e-3)
    assert found.status is Status.PROVEN


def test_selection_after_a_poisson_number_of_runs() -> None:
    sigma, mean = mpf(4), mpf(10)
    orders = [1 + mpf(10) ** (mpf(i) / 50) for i in range(-60, 150)]
    rho = 1 / (2 * sigma**2)

    def selected(a: Any) -> Any:
        delta_hat = converted(lambda b: rho * b, orders, mp.log(1 + 1 / (a - 1)))
        return rho * a + mean * delta_hat + mp.log(mean) / (a - 1)

    exact = min(
        selected(a) + mp.log(1 - 1 / a) - (mp.log(mpf("1e-6")) + mp.log(a)) / (a - 1)
        for a in orders[::3]
    )
    found = calculator.epsilon(mechanisms.from_json(selection("poisson", 10, gaussian(4.0))), 1e-6)
    assert exact * (1 - 1e-3) <= found.epsilon <= exact * (1 + 5e-3)


def test_a_selection_costs_at_least_one_run_and_its_runs_compose() -> None:
    one = gaussian(5.0)
    both = [
        calculator.epsilon(mechanisms.from_json(each), 1e-6).epsilon
        for each in (
            one,
            selection("geometric", 1.01, one),
            selection("geometric", 3, one),
            selection("geometric", 3, repeated(4, poisson(0.9, one))),
        )
    ]
    assert both == sorted(both)
    revealing = {"kind": "approximate_dp", "epsilon": 0.1, "delta": 1e-9}
    for refused in (revealing, poisson(0.1, composed(one, {"kind": "gdp", "mu": 1.0}))):
        with pytest.raises(MethodNotApplicableError):
            calculator.epsilon(mechanisms.from_json(selection("poisson", 3, refused)), 1e-6)
    shuffled = {"kind": "dp_sgd", "noise_multiplier": 5.0, "sample_rate": 0.1, "steps": 10}
    tree = mechanisms.from_json(selection("poisson", 3, shuffled | {"sampling": "shuffled"}))
    assert calculator.epsilon(tree, 1e-6).status is Status.ESTIMATE


# ----------------------------------------------------------------------- Rényi curves


def converted(divergence: Callable[[Any], Any], orders: Sequence[Any], epsilon: float) -> Any:
    """The least δ of Canonne, Kamath & Steinke's Proposition 12 over some orders."""
    return min(
        mp.exp((a - 1) * (divergence(a) - epsilon) + a * mp.log(1 - 1 / mpf(a))) / (a - 1)
        for a in orders
    )


def test_zcdp_is_converted_as_one_curve() -> None:
    orders = [1 + mpf(i) / 50 for i in range(1, 3000)]
    for epsilon in (0.5, 2.0):
        exact = converted(lambda a: mpf("0.05") * a, orders, epsilon)
        together = composed(
            {"kind": "zcdp", "rho": 0.02}, repeated(3, {"kind": "zcdp", "rho": 0.01})
        )
        for tree in ({"kind": "zcdp", "rho": 0.05}, together):
            assert exact * (1 - 1e-4) <= upper_delta(tree, epsilon) <= exact * (1 + 3e-3)


def test_rdp_is_converted_at_its_orders_and_between() -> None:
    curve = {"kind": "rdp", "orders": [2, 4, 8, 16], "divergences": [0.1, 0.2, 0.4, 0.8]}
    for epsilon in (0.5, 2.0):
        at_orders = converted(lambda a: 0.05 * mpf(a), [2, 4, 8, 16], epsilon)
        every = converted(lambda a: 0.05 * mpf(a), [2 + mpf(i) / 20 for i in range(281)], epsilon)
        found = upper_delta(curve, epsilon)
        assert every * (1 - 1e-6) <= found <= at_orders * (1 + 3e-3)
    together = composed(repeated(2, curve), {"kind": "zcdp", "rho": 0.05})
    exact = converted(lambda a: 0.15 * mpf(a), [2, 4, 8, 16], 3.0)
    assert upper_delta(together, 3.0) <= exact * (1 + 3e-3)


def test_a_curve_of_gaussian_noise_is_above_the_gaussian_mechanism() -> None:
    for tree in (
        {"kind": "zcdp", "rho": 0.5},
        {"kind": "rdp", "orders": [1.5, 2, 3, 5, 9], "divergences": [0.75, 1, 1.5, 2.5, 4.5]},
    ):
        for times in (1, 4):
            for epsilon in (0.0, 1.0, 4.0):
                exact = oracles.gaussian_delta(epsilon, math.sqrt(times))
                assert exact <= upper_delta(repeated(times, tree), epsilon)
                mixed = composed(repeated(times, tree), gaussian(1.0))
                assert oracles.gaussian_delta(epsilon, math.sqrt(times + 1)) <= upper_delta(
                    mixed, epsilon
                )


def test_points_of_a_profile_dominate_the_mechanism_between_them() -> None:
    epsilons = [0.0, 0.25, 0.5, 1.0, 1.5, 2.5, 4.0]
    for first in (0, 3):  # without the smallest ε as well
        deltas = [float(oracles.gaussian_delta(each, 0.8)) for each in epsilons[first:]]
        tree = {"kind": "privacy_profile", "epsilons": epsilons[first:], "deltas": deltas}
        for epsilon in (0.0, 0.1, 0.7, 2.0, 4.0, 6.0):
            assert oracles.gaussian_delta(epsilon, 0.8) <= upper_delta(tree, epsilon)
            twice = upper_delta(repeated(2, tree), epsilon)
            assert oracles.gaussian_delta(epsilon, 0.8 * math.sqrt(2)) <= twice
        at_points = [upper_delta(tree, each) for each in epsilons[first:]]
        assert at_points == pytest.approx(deltas, rel=1e-3)


# --------------------------------------------------------------------------- sampling


def mixture_deltas(
    weights: Sequence[Any], shifts: Sequence[Any], epsilon: float, mu: float = 1.0
) -> Any:
    """δ(ε) of Σ w·N(shift·μ) and N(0): removing, and adding."""

    def ratio(z: Any) -> Any:
        return mp.fsum(
            w * mp.exp(s * mu * z - (s * mu) ** 2 / 2) for w, s in zip(weights, shifts, strict=True)
        )

    factor = mp.exp(epsilon)

    def above(threshold: Any) -> Any:
        """Return where the ratio, which increases, reaches the threshold."""
        low, high = mpf(-40), mpf(40)
        for _ in range(120):
            middle = (low + high) / 2
            low, high = (middle, high) if ratio(middle) < threshold else (low, middle)
        return low

    removing, adding = above(factor), above(1 / factor)

    def tail(z: Any) -> Any:
        return mp.fsum(w * mp.ncdf(s * mu - z) for w, s in zip(weights, shifts, strict=True))

    return (
        tail(removing) - factor * mp.ncdf(-removing),
        mp.ncdf(adding) - factor * (1 - tail(adding)),
    )


def mixture_delta(*args: Any) -> Any:
    """The larger δ(ε) of both directions."""
    return max(mixture_deltas(*args))


def binomial(records: int, rate: float) -> list[Any]:
    q = mpf(rate)
    return [mp.binomial(records, j) * q**j * (1 - q) ** (records - j) for j in range(records + 1)]


def user(records: int, mechanism: Json) -> Json:
    return {"kind": "user_level", "records": records, "mechanism": mechanism}


@pytest.mark.parametrize(
    ("records", "rate", "sigma"), [(2, 0.3, 1.0), (5, 0.05, 2.0), (3, 0.9, 4.0)]
)
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0])
def test_a_person_with_several_records_is_a_mixture(
    records: int, rate: float, sigma: float, epsilon: float
) -> None:
    tree = mechanisms.from_json(user(records, poisson(rate, gaussian(sigma))))
    exact = mixture_delta(binomial(records, rate), range(records + 1), epsilon, 1 / sigma)
    found = calculator.delta(tree, epsilon).certified
    assert found is not None
    assert found.lower <= exact * (1 + 1e-9)
    assert exact <= found.upper * (1 + 1e-9)
    assert found.upper - found.lower <= 2e-3 * found.upper + 1e-12


@pytest.mark.parametrize("inner", [gaussian(2.0), {"kind": "laplace", "noise_multiplier": 2.0}])
def test_a_sample_that_is_never_cut_states_the_size_that_it_rests_on(inner: Json) -> None:
    """If the dataset had more records than the limit, samples would be cut, and ε larger."""
    sample = {"kind": "truncated_poisson_sampled", "dataset_size": 100, "sample_rate": 0.5}
    uncut, whole = (
        mechanisms.from_json(each)
        for each in (sample | {"batch_size_max": 100, "mechanism": inner}, poisson(0.5, inner))
    )
    found, same = calculator.epsilon(uncut, 1e-5), calculator.epsilon(whole, 1e-5)
    assert (found.epsilon, found.mechanism_hash) == (same.epsilon, same.mechanism_hash)
    assert any("has `dataset_size` records" in each.statement for each in found.assumptions)
    assert not any("dataset_size" in each.statement for each in same.assumptions)
    cut = mechanisms.from_json(sample | {"batch_size_max": 40, "mechanism": gaussian(2.0)})
    assert calculator.epsilon(cut, 1e-5).epsilon > calculator.epsilon(uncut, 1e-5).epsilon


@pytest.mark.parametrize("separation", [2, 5])
@pytest.mark.parametrize(
    "kind",
    [{"kind": "matrix_factorization", "coefficients": [1, 0.5]}, {"kind": "tree_aggregation"}],
)
def test_correlated_noise_states_the_participation_that_it_rests_on(
    kind: Json, separation: int
) -> None:
    """Most such releases are Gaussian to every method, and any method states it."""
    fields = {"noise_multiplier": 2.0, "steps": 10, "participations": 2}
    tree = mechanisms.from_json({**kind, **fields, "min_separation": separation})
    for method in ("pld", "subsampled_rdp"):
        try:
            found = calculator.epsilon(tree, 1e-5, method)
        except MethodNotApplicableError:
            assert (kind["kind"], method) == ("tree_aggregation", "subsampled_rdp")
            continue
        stated = [each.statement for each in found.assumptions]
        assert sum("at least `min_separation` steps apart" in each for each in stated) == 1


def test_the_addition_of_a_person_has_a_law_of_its_own() -> None:
    law, weights = Release(SeveralRecordsPair(3, 0.3, 1.0)), binomial(3, 0.3)
    assert distinct_directions([(law, 1)]) == DIRECTIONS
    for epsilon in (0.0, 0.5):
        both = mixture_deltas(weights, range(4), epsilon, 1.0)
        for direction, exact in zip(DIRECTIONS, both, strict=True):
            found = bounds_near([(law, 1)], direction, epsilon)
            assert found is not None
            lower, upper = found.delta(np.array([epsilon]))
            assert lower[0] <= exact <= upper[0] <= exact * 1.02


def test_a_person_with_one_record_is_a_record_and_all_of_them_are_one_sum() -> None:
    def form(tree: Json) -> str:
        return mechanisms.canonical_form(mechanisms.from_json(tree)).hash

    assert form(user(1, poisson(0.1, gaussian(2.0)))) == form(poisson(0.1, gaussian(2.0)))
    assert form(user(2, poisson(0.25, poisson(0.5, gaussian(2.0))))) == form(
        poisson(0.25, user(2, poisson(0.5, gaussian(2.0))))
    )
    assert form(user(4, gaussian(2.0))) == form(gaussian(0.5))
    assert form(user(3, repeated(7, poisson(0.1, gaussian(2.0))))) == form(
        repeated(7, user(3, poisson(0.1, gaussian(2.0))))
    )


def test_more_records_of_a_person_cost_more() -> None:
    trees = [repeated(50, user(k, poisson(0.05, gaussian(3.0)))) for k in (1, 2, 3, 20, 256)]
    found = [calculator.epsilon(mechanisms.from_json(each), 1e-5).epsilon for each in trees]
    assert found == sorted(found)


def truncated(size: int, rate: float, most: int, sigma: float) -> Json:
    return {
        "kind": "truncated_poisson_sampled",
        "dataset_size": size,
        "sample_rate": rate,
        "batch_size_max": most,
        "mechanism": gaussian(sigma),
    }


def batch_sums(values: Sequence[int], rate: float, most: int) -> dict[int, Any]:
    """The law of the sum of a truncated Poisson batch of records with these values."""
    law: dict[int, Any] = {}
    for size in range(len(values) + 1):
        chance = mpf(rate) ** size * (1 - mpf(rate)) ** (len(values) - size)
        for batch in itertools.combinations(values, size):
            kept = list(itertools.combinations(batch, min(size, most)))
            for each in kept:
                law[sum(each)] = law.get(sum(each), mpf(0)) + chance / len(kept)
    return law


@pytest.mark.slow
@pytest.mark.parametrize("others", [(-1, -1, -1), (-1, -1, 0), (0, 0, 0)])
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 1.5])
def test_truncated_poisson_dominates_all_that_a_record_can_do(
    others: tuple[int, ...], epsilon: float
) -> None:
    """Records −1, 0 or 1, batches of at most 2 of 4, in one dimension: both directions."""
    laws = [batch_sums(values, 0.5, 2) for values in ((*others, 1), others)]
    factor = mp.exp(epsilon)

    def density(law: dict[int, Any], z: Any) -> Any:
        return mp.fsum(chance * mp.npdf(z - value) for value, chance in law.items())

    ends = list(range(-9, 10, 3))

    def excess(one: dict[int, Any], other: dict[int, Any]) -> Any:
        return mp.quad(lambda z: max(density(one, z) - factor * density(other, z), 0), ends)

    exact = max(excess(*laws), excess(*laws[::-1]))
    assert exact <= upper_delta(truncated(4, 0.5, 2, 1.0), epsilon) + 1e-9


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_truncated_poisson_is_the_mixture_of_its_two_cases(epsilon: float) -> None:
    size, rate, most, sigma = 12, 0.3, 4, 2.0
    others, whole = binomial(size - 1, rate), binomial(size, rate)
    cut = mp.fsum(others[most:])
    exchanged = mp.fsum(whole[most + 1 :]) * most / size / cut
    direct = mp.fsum(rate * others[j] * most / (j + 1) for j in range(most, size)) / cut
    assert mp.almosteq(exchanged, direct, 1e-12)
    parts = (
        mixture_delta([1 - mpf(p), mpf(p)], [0, shift], epsilon, 1 / sigma)
        for p, shift in ((rate, 1), (exchanged, 2))
    )
    first, second = parts
    exact = (1 - cut) * first + cut * second
    found = upper_delta(truncated(size, rate, most, sigma), epsilon)
    assert exact * (1 - 1e-9) <= found <= exact * (1 + 2e-3)


def sums_over_binomial(trials: int, rate: float, values: Callable[[int], Any]) -> Any:
    """Return the mean of a function of a binomial variable, over 40 deviations around its mean."""
    reach = 40 * math.sqrt(trials * rate * (1 - rate)) + 40
    low, high = (int(trials * rate + sign * reach) for sign in (-1, 1))
    first = max(0, low)
    chance = mp.exp(
        mp.loggamma(trials + 1) - mp.loggamma(first + 1) - mp.loggamma(trials - first + 1)
        + first * mp.log(mpf(rate)) + (trials - first) * mp.log1p(-mpf(rate))
    )  # fmt: skip
    odds, total = mpf(rate) / (1 - mpf(rate)), mpf(0)
    for j in range(first, min(trials, high) + 1):
        total += chance * values(j)
        chance *= odds * (trials - j) / (j + 1)
    return total


@pytest.mark.parametrize(
    ("size", "rate", "most"),
    [
        (31, 0.5, 1),  # hardly ever are fewer sampled than are kept
        (100, 0.19, 1),
        (1000, 0.0206, 1),
        (1_000_000, 1e-4, 90),
        pytest.param(1_000_000_000, 1e-5, 9900, marks=pytest.mark.slow),
    ],
)
def test_a_record_in_the_truncated_sample_is_seen(size: int, rate: float, most: int) -> None:
    """The others contribute −C and noise is little, so that its presence is seen from the sum."""
    with mp.workdps(30):
        present = sums_over_binomial(
            size - 1, rate, lambda j: mpf(rate) * min(mpf(1), mpf(most) / (j + 1))
        )
        certain = present * (1 - mp.erfc(50 / mp.sqrt(2)) / 2)
    for epsilon in (0.5, 5.0):
        assert upper_delta(truncated(size, rate, most, 0.01), epsilon) >= certain


@pytest.mark.parametrize(("trials", "rate"), [(30, 0.5), (10_000, 0.01), (1_000_000, 1e-4)])
def test_tails_of_a_binomial_are_far_more_exact_than_what_is_added_to_them(
    trials: int, rate: float
) -> None:
    spread = math.sqrt(trials * rate * (1 - rate))
    with mp.workdps(30):
        for deviations in (-5, -1, 0, 1, 5):
            least = max(1, round(trials * rate + deviations * spread))
            tail = sums_over_binomial(trials, rate, lambda j, least=least: j >= least)  # type: ignore[misc]
            below = sums_over_binomial(trials, rate, lambda j, least=least: j < least)  # type: ignore[misc]
            assert abs(binomial_tail(least, trials, rate) / tail - 1) < 1e-11
            assert abs(binomial_below(least, trials, rate) / below - 1) < 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.0, 1e-10, 1e-9])
@pytest.mark.parametrize("rate", [1e-9, 1e-7])
@pytest.mark.parametrize(
    ("inner", "total_variation"),
    [
        ({"kind": "discrete_gaussian", "noise_std": 0.6, "sensitivity": 1}, 0.6638150449),
        ({"kind": "gdp", "mu": 1.0}, 0.3829249226),
    ],
)
def test_rare_samples_cost_the_total_variation_at_epsilon_0(
    inner: Json, total_variation: float, rate: float, epsilon: float
) -> None:
    """A sampled release has δ(0) = q·TV, and δ falls with ε by at most e^ε − 1."""
    found = upper_delta(poisson(rate, inner), epsilon)
    assert found >= rate * total_variation * (1 - 1e-9) - 1.1 * epsilon
    assert found <= rate * total_variation * (1 + 1e-6)
    assert upper_delta(poisson(rate, inner), 0.0) >= found


def test_a_limit_that_is_never_reached_is_poisson_sampling() -> None:
    form = mechanisms.canonical_form
    assert form(mechanisms.from_json(truncated(100, 0.1, 100, 2.0))) == form(
        mechanisms.from_json(poisson(0.1, gaussian(2.0)))
    )
    rare = repeated(100, truncated(100_000, 0.001, 400, 2.0))
    plain = repeated(100, poisson(0.001, gaussian(2.0)))
    found, least = (
        calculator.epsilon(mechanisms.from_json(each), 1e-5).epsilon for each in (rare, plain)
    )
    assert found == pytest.approx(least, rel=3e-3)


@pytest.mark.parametrize("records", [3, 7, 200])
def test_releases_whose_noise_rounds_to_the_same_number_are_all_counted(records: int) -> None:
    """One of two counts was lost: a million releases cost as much as one."""
    sigma = 250.0
    while sigma / records != math.nextafter(sigma, math.inf) / records:
        sigma = math.nextafter(sigma, math.inf)
    other = math.nextafter(sigma, math.inf)
    mixed, plain = (
        mechanisms.from_json(user(records, composed(repeated(10**6, gaussian(sigma)), last)))
        for last in (gaussian(other), gaussian(sigma))
    )
    assert mechanisms.canonical_form(mixed).steps == 10**6 + 1
    found, honest = calculator.epsilon(mixed, 1e-5), calculator.epsilon(plain, 1e-5)
    assert found.epsilon == pytest.approx(honest.epsilon, rel=1e-9)


# ---------------------------------------------------------------------- disjoint parts


def parallel(*parts: Json) -> Json:
    return {"kind": "parallel", "mechanisms": list(parts)}


def test_the_worst_part_counts_at_each_delta() -> None:
    pure, noisy = {"kind": "laplace", "noise_multiplier": 1.0}, gaussian(2.0)
    rest = poisson(0.1, gaussian(1.0))
    for tree, alternatives in (
        (parallel(pure, noisy), [pure, noisy]),
        (
            composed(rest, repeated(3, parallel(pure, noisy))),
            [composed(rest, repeated(3, each)) for each in (pure, noisy)],
        ),
        (
            composed(parallel(pure, noisy), parallel(rest, repeated(2, noisy))),
            [composed(a, b) for a in (pure, noisy) for b in (rest, repeated(2, noisy))],
        ),
    ):
        for at in (1e-2, 1e-9):  # another part is the worst
            parts = [calculator.epsilon(mechanisms.from_json(each), at) for each in alternatives]
            found = calculator.epsilon(mechanisms.from_json(tree), at)
            assert found.epsilon == max(each.epsilon for each in parts)
            assert found.certified is not None
            assert found.certified.lower == max(each.certified.lower for each in parts)  # type: ignore[union-attr]
            assert found.status is Status.PROVEN
            basic = calculator.epsilon(mechanisms.from_json(tree), at, "basic_composition")
            assert basic.status is Status.PROVEN
        least = max(upper_delta(each, 0.7) for each in alternatives)
        assert upper_delta(tree, 0.7) == least


def test_equal_parts_are_one_and_their_order_does_not_matter() -> None:
    def form(tree: Json) -> str:
        return mechanisms.canonical_form(mechanisms.from_json(tree)).hash

    run = repeated(3, gaussian(2.0))
    assert form(parallel(run, run)) == form(parallel(run, run, run)) != form(run)
    assert form(parallel(run)) == form(run) != form(parallel(run, parallel()))
    assert form(parallel(parallel(), parallel())) == form(parallel())
    found, one = (
        calculator.epsilon(mechanisms.from_json(each), 1e-5) for each in (parallel(run, run), run)
    )
    assert found.epsilon == one.epsilon
    assert form(parallel(run, gaussian(1.0))) == form(parallel(gaussian(1.0), run)) != form(run)


def test_parts_are_refused_or_doubted_where_a_record_may_be_in_two() -> None:
    for other in (1.0, 2.0):
        tree = parallel(gaussian(1.0), gaussian(other))
        found = calculator.epsilon(
            mechanisms.from_json(tree), 1e-5, relation=NeighbouringRelation.REPLACE_ONE
        )
        assert found.status is Status.ESTIMATE
    for refused in (user(2, tree), poisson(0.1, tree), selection("poisson", 2, tree)):
        with pytest.raises(MethodNotApplicableError):
            calculator.epsilon(mechanisms.from_json(refused), 1e-5)
    with pytest.raises(MethodNotApplicableError):
        calculator.trade_off(mechanisms.from_json(tree), 0.5, 11)
    many = [parallel(gaussian(1.0 + i), gaussian(2.0 + i)) for i in range(7)]
    for expensive in (composed(*many), composed(*[tree] * 64), composed(*[tree] * 3000)):
        with pytest.raises(TooExpensiveError, match="as one `repeated`"):
            calculator.epsilon(mechanisms.from_json(expensive), 1e-5)


WIDE: Json = {"kind": "privacy_profile", "epsilons": [0, 8], "deltas": [0.002, 0.0]}
PURE: Json = {"kind": "approximate_dp", "epsilon": 4, "delta": 0}


@pytest.mark.parametrize(
    ("tree", "alternatives"),
    [
        (composed(parallel(WIDE, PURE), parallel(PURE, WIDE)), [[2, 0], [1, 1], [0, 2]]),
        (composed(parallel(WIDE, PURE), parallel(WIDE, PURE)), [[2, 0], [1, 1], [0, 2]]),
        (repeated(2, parallel(WIDE, PURE)), [[2, 0], [0, 2]]),
        (
            composed(repeated(2, parallel(WIDE, PURE)), parallel(PURE, WIDE)),
            [[3, 0], [2, 1], [1, 2], [0, 3]],
        ),
        (
            repeated(2, composed(parallel(WIDE, PURE), parallel(PURE, WIDE))),
            [[4, 0], [2, 2], [0, 4]],
        ),
        (
            parallel(composed(parallel(WIDE, PURE), PURE), repeated(3, PURE)),
            [[1, 1], [0, 2], [0, 3]],
        ),
        (parallel(repeated(2, WIDE), parallel()), [[2, 0]]),
    ],
)
@pytest.mark.parametrize("delta", [1e-5, 5e-3])
def test_a_record_may_be_in_another_part_of_each_parallel_release_but_a_repeated_one(
    tree: Json, alternatives: list[list[int]], delta: float
) -> None:
    """`parallel[A, B]` and `parallel[B, A]` may divide the data alike: one record gets A then B."""
    releases = [composed(repeated(a, WIDE), repeated(b, PURE)) for a, b in alternatives]
    least = [calculator.epsilon(mechanisms.from_json(each), delta).epsilon for each in releases]
    found = calculator.epsilon(mechanisms.from_json(tree), delta)
    assert found.epsilon == max(least)
    assert found.status is Status.PROVEN
    at = found.epsilon / 2
    assert upper_delta(tree, at) == max(upper_delta(each, at) for each in releases)


def test_a_repeated_parallel_is_the_parallel_of_repeated_parts() -> None:
    def form(tree: Json) -> str:
        return mechanisms.canonical_form(mechanisms.from_json(tree)).hash

    tree = parallel(WIDE, PURE)
    folded = parallel(repeated(6, WIDE), repeated(6, PURE))
    assert form(repeated(2, repeated(3, tree))) == form(folded)
    assert form(repeated(0, tree)) == form(parallel())
    assert form(composed(tree, tree)) != form(repeated(2, tree))
    assert form(composed(tree, tree)) == form(composed(parallel(PURE, WIDE), tree))


def test_a_replaced_record_may_move_to_a_part_without_releases() -> None:
    for tree in (parallel(WIDE, parallel()), parallel(parallel(), WIDE, repeated(0, PURE))):
        for relation in NeighbouringRelation:
            found = calculator.epsilon(mechanisms.from_json(tree), 5e-3, relation=relation)
            replaced = relation is NeighbouringRelation.REPLACE_ONE
            assert found.status is (Status.ESTIMATE if replaced else Status.PROVEN)
            assert any("each record belongs to one part" in e.statement for e in found.assumptions)
    whole = calculator.epsilon(
        mechanisms.from_json(parallel(WIDE)), 5e-3, relation=NeighbouringRelation.REPLACE_ONE
    )
    assert whole.status is Status.PROVEN


def test_equal_parts_and_parts_without_releases_have_the_trade_off_of_one_part() -> None:
    """Nested parts too. Different parts have none in common."""

    def charged(tree: Json) -> str:
        return mechanisms.canonical_form(mechanisms.from_json(tree)).of_common_part().hash

    run = repeated(3, gaussian(2.0))
    expected = calculator.trade_off(mechanisms.from_json(run), 0.5, 5)
    for tree in (
        parallel(run, parallel()),
        parallel(run, run),
        parallel(parallel(run, parallel()), run),
        repeated(3, parallel(gaussian(2.0), parallel())),
        composed(*[parallel(gaussian(2.0), parallel())] * 3),
    ):
        read = mechanisms.from_json(tree)
        assert charged(tree) == mechanisms.canonical_form(mechanisms.from_json(run)).hash
        found = calculator.trade_off(read, 0.5, 5)
        assert found.advantage == expected.advantage
        assert found.false_negative_rates == expected.false_negative_rates
        assert found.status is Status.PROVEN
        replaced = calculator.trade_off(read, 0.5, 5, NeighbouringRelation.REPLACE_ONE)
        assert replaced.status is Status.ESTIMATE
    for tree in (parallel(gaussian(1.0), gaussian(2.0)), parallel(parallel(WIDE, PURE), WIDE)):
        assert charged(tree) == mechanisms.canonical_form(mechanisms.from_json(tree)).hash
    nested = parallel(parallel(WIDE, PURE), parallel())
    assert charged(nested) == charged(parallel(WIDE, PURE))


# ------------------------------------------------------------------- all kinds, all methods

KINDS: list[Json] = [
    *(mechanism for mechanism, _ in ATTAINED[::3]),
    {"kind": "exponential", "epsilon": 0.5},
    {"kind": "gdp", "mu": 0.7},
    {"kind": "zcdp", "rho": 0.05},
    {"kind": "rdp", "orders": [2, 4, 8], "divergences": [0.1, 0.2, 0.5]},
    {"kind": "permute_and_flip", "epsilon": 0.5},
    {"kind": "truncated_laplace", "scale": 2.0, "bound": 30.0, "sensitivity": 1.0},
    selection("poisson", 10, gaussian(4.0)),
    user(4, poisson(0.01, gaussian(2.0))),
    truncated(1000, 0.02, 40, 1.2),
    {
        "kind": "shuffled_reports",
        "reports": 50,
        "mechanism": {"kind": "exponential", "epsilon": 1.0},
    },
    {
        "kind": "tree_aggregation",
        "noise_multiplier": 9.0,
        "steps": 1000,
        "participations": 10,
        "min_separation": 100,
    },
]


@pytest.mark.parametrize("mechanism", KINDS, ids=lambda each: each["kind"])
def test_every_method_answers_or_names_the_kind(mechanism: Json) -> None:
    tree = mechanisms.from_json(repeated(3, mechanism))
    compared = calculator.compare(tree, 1e-3)
    assert isinstance(compared.certified, calculator.Guarantee)
    for each in compared.answers:
        if isinstance(each, calculator.Guarantee):
            assert each.status is Status.PROVEN, each
        else:
            assert mechanism["kind"] in str(each.error.detail)


@pytest.mark.parametrize("mechanism", KINDS, ids=lambda each: each["kind"])
def test_the_trade_off_holds_delta_at_zero(mechanism: Json) -> None:
    tree = mechanisms.from_json(mechanism)
    found, at_zero = calculator.trade_off(tree, 0.5, 11), calculator.delta(tree, 0.0).certified
    assert at_zero is not None
    assert found.advantage.lower <= at_zero.upper
    assert at_zero.lower <= found.advantage.upper <= at_zero.upper * (1 + 5e-3)


BAD: list[tuple[Json, str]] = [
    ({"kind": "randomized_response", "categories": 1, "flip_probability": 0.5}, "/categories"),
    ({"kind": "randomized_response", "categories": 2.5, "flip_probability": 0.5}, "/categories"),
    ({"kind": "randomized_response", "categories": 2, "flip_probability": 0}, "/flip_probability"),
    ({"kind": "randomized_response", "categories": 2, "flip_probability": 2}, "/flip_probability"),
    ({"kind": "discrete_laplace", "scale": 0, "sensitivity": 1}, "/scale"),
    ({"kind": "discrete_laplace", "scale": 1.0, "sensitivity": 1000}, "/scale"),
    ({"kind": "discrete_laplace", "scale": 1.0, "sensitivity": 0.5}, "/sensitivity"),
    ({"kind": "discrete_gaussian", "noise_std": 1e9, "sensitivity": 1}, "/noise_std"),
    ({"kind": "discrete_gaussian", "noise_std": 1.0, "sensitivity": 100}, "/noise_std"),
    ({"kind": "discrete_gaussian", "noise_std": 1.0, "sensitivity": 10**9}, "/sensitivity"),
    ({"kind": "exponential", "epsilon": 0}, "/epsilon"),
    ({"kind": "approximate_dp", "epsilon": -1, "delta": 0}, "/epsilon"),
    ({"kind": "approximate_dp", "epsilon": 1, "delta": 1.5}, "/delta"),
    ({"kind": "gdp", "mu": 0}, "/mu"),
    ({"kind": "zcdp", "rho": -0.1}, "/rho"),
    ({"kind": "rdp", "orders": [2], "divergences": [-1]}, "/divergences/0"),
    ({"kind": "rdp", "orders": [1], "divergences": [1]}, "/orders/0"),
    ({"kind": "rdp", "orders": [], "divergences": []}, "/orders"),
    ({"kind": "rdp", "orders": [2, 4], "divergences": [1]}, "/divergences"),
    ({"kind": "rdp", "orders": [4, 2], "divergences": [1, 2]}, "/orders/1"),
    ({"kind": "rdp", "orders": [2, 4], "divergences": [2, 1]}, "/divergences/1"),
    ({"kind": "rdp", "orders": [2, 3, 4], "divergences": [1, 9, 9.5]}, "/divergences/1"),
    ({"kind": "privacy_profile", "epsilons": [0, 1], "deltas": [0.1, 0.2]}, "/deltas/1"),
    ({"kind": "privacy_profile", "epsilons": [1, 0], "deltas": [0.2, 0.1]}, "/epsilons/1"),
    ({"kind": "privacy_profile", "epsilons": [-1], "deltas": [0.1]}, "/epsilons/0"),
    ({"kind": "privacy_profile", "epsilons": [0], "deltas": [1.1]}, "/deltas/0"),
    ({"kind": "privacy_profile", "epsilons": [0, 1], "deltas": [0.1]}, "/deltas"),
    ({"kind": "privacy_profile", "epsilons": [0, 1, 2], "deltas": [0.3, 0.29, 0]}, "/deltas/1"),
    ({"kind": "privacy_profile", "epsilons": [0] * 9999, "deltas": [0]}, "/epsilons"),
    ({"kind": "truncated_laplace", "scale": 1, "bound": 1, "sensitivity": 2}, "/bound"),
    ({"kind": "truncated_laplace", "scale": 0.01, "bound": 9, "sensitivity": 2}, "/scale"),
    ({"kind": "permute_and_flip", "epsilon": -1}, "/epsilon"),
    (factorization([0.5, 1.0], 10, 2, 2), "/coefficients/1"),
    (factorization([1.0, -1.0], 10, 2, 2), "/coefficients/1"),
    (factorization([1.0], 10, 2, 6), "/participations"),
    (factorization([1.0] * 100_000, 100_000, 1, 100_000), "/coefficients"),
    (factorization([0.0], 10, 2, 2), "/noise_multiplier"),
    (selection("poisson", 1, gaussian(1.0)), "/repeats/mean"),
    (selection("poisson", 2, gaussian(1.0), shape=1), "/repeats/shape"),
    (selection("negative_binomial", 2, gaussian(1.0)), "/repeats/shape"),
    (selection("binomial", 2, gaussian(1.0)), "/repeats/distribution"),
    (user(0, gaussian(1.0)), "/records"),
    (user(10**6, gaussian(1.0)), "/records"),
    (truncated(100, 1.5, 10, 1.0), "/sample_rate"),
    (truncated(100, 0.5, 0, 1.0), "/batch_size_max"),
    (truncated(0, 0.5, 1, 1.0), "/dataset_size"),
]


@pytest.mark.parametrize(("mechanism", "pointer"), BAD, ids=lambda each: str(each)[9:60])
def test_bad_fields_are_refused_with_their_pointer(mechanism: Json, pointer: str) -> None:
    with pytest.raises(mechanisms.MechanismError) as refused:
        mechanisms.from_json(repeated(2, mechanism))
    assert "/mechanism" + pointer in [each for each, _ in refused.value.faults]


@pytest.mark.parametrize(
    "mechanism",
    [
        user(2, {"kind": "laplace", "noise_multiplier": 1.0}),
        user(2, user(2, poisson(0.1, gaussian(1.0)))),
        user(2, truncated(100, 0.1, 20, 1.0)),
        truncated(100, 0.1, 20, 1.0) | {"mechanism": {"kind": "gdp", "mu": 1.0}},
        truncated(100, 0.1, 20, 1.0) | {"mechanism": poisson(0.1, gaussian(1.0))},
        poisson(0.1, truncated(100, 0.1, 20, 1.0)),
        poisson(0.1, repeated(2, {"kind": "zcdp", "rho": 0.1})),
    ],
    ids=lambda each: str(each)[9:80],
)
def test_combinations_without_a_proof_are_refused(mechanism: Json) -> None:
    with pytest.raises(MethodNotApplicableError):
        calculator.epsilon(mechanisms.from_json(mechanism), 1e-5)
