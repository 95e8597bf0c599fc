"""Shuffled reports: the worst pair by enumeration, and randomizers that it must dominate."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from mpmath import mp, mpf
from scipy import stats

from accountant_service import calculator, mechanisms
from accountant_service.errors import MethodNotApplicableError
from accountant_service.guarantee import NeighbouringRelation, Status
from accountant_service.numerics.floats.special_functions import Array
from accountant_service.numerics.laws import shuffled_reports
from accountant_service.numerics.laws.atomic_pair import Atoms
from accountant_service.numerics.laws.shuffled_reports import ShuffledReportsPair, binomial_masses

Json = dict[str, Any]


def pure(epsilon: float) -> Json:
    return {"kind": "approximate_dp", "epsilon": epsilon, "delta": 0}


def shuffled(reports: int, randomizer: Json) -> Json:
    return {"kind": "shuffled_reports", "reports": reports, "mechanism": randomizer}


def delta_of(mechanism: Json, epsilon: float) -> float:
    found = calculator.delta(mechanisms.from_json(mechanism), epsilon).certified
    assert found is not None
    assert found.lower == 0.0, "no two datasets are proved to attain the pair"
    return found.upper


def worst_delta(reports: int, local: float, epsilon: float) -> Any:
    """δ(ε) of the clones' pair, summed over all clones and zeros at 30 digits."""
    e, total = mp.exp(mpf(local)), mpf(0)
    clone = 2 / (e + 1)
    for clones in range(reports):
        weight = mp.binomial(reports - 1, clones) * clone**clones
        weight *= (1 - clone) ** (reports - 1 - clones)
        for zeros in range(clones + 2):
            with_zero, with_one = (
                mp.binomial(clones, each) / mpf(2) ** clones if 0 <= each <= clones else mpf(0)
                for each in (zeros - 1, zeros)
            )
            p = (e * with_zero + with_one) / (e + 1)
            q = (with_zero + e * with_one) / (e + 1)
            total += weight * max(p - mp.exp(epsilon) * q, mpf(0))
    return total


@pytest.mark.parametrize(("reports", "local"), [(1, 1.0), (2, 0.5), (7, 1.0), (12, 3.0)])
def test_the_worst_pair_is_that_of_the_clones(reports: int, local: float) -> None:
    for share in (0.0, 0.2, 0.7):
        exact = worst_delta(reports, local, share * local)
        found = delta_of(shuffled(reports, pure(local)), share * local)
        assert exact <= found <= exact * (1 + 1e-3) + 1e-12


def test_two_rounds_compose() -> None:
    """The product of the pairs of two and of three reports, at 30 digits."""
    pairs = []
    for reports in (2, 3):
        e, outcomes = mp.exp(1), []
        for clones in range(reports):
            weight = mp.binomial(reports - 1, clones) * (2 / (e + 1)) ** clones
            weight *= (1 - 2 / (e + 1)) ** (reports - 1 - clones)
            for zeros, own in itertools.product(range(clones + 1), (0, 1)):
                mass = weight * mp.binomial(clones, zeros) / mpf(2) ** clones / (e + 1)
                shown = (clones, zeros + 1 - own)
                outcomes.append((shown, mass * (1 if own else e), mass * (e if own else 1)))
        merged: dict[Any, tuple[Any, Any]] = {}
        for shown, p, q in outcomes:
            old = merged.get(shown, (mpf(0), mpf(0)))
            merged[shown] = (old[0] + p, old[1] + q)
        pairs.append(list(merged.values()))
    exact = mp.fsum(
        max(p * r - mp.exp(0.6) * q * s, mpf(0)) for (p, q), (r, s) in itertools.product(*pairs)
    )
    rounds = [shuffled(2, pure(1.0)), shuffled(3, pure(1.0))]
    found = delta_of({"kind": "composed", "mechanisms": rounds}, 0.6)
    assert exact <= found <= exact * (1 + 1e-3)


def histogram_law(laws: list[Array]) -> dict[tuple[int, ...], float]:
    """The law of how often each output is reported; each report has a law of its own."""
    outputs = len(laws[0])
    found = {(0,) * outputs: 1.0}
    for law in laws:
        following: dict[tuple[int, ...], float] = {}
        for counts, mass in found.items():
            for output in range(outputs):
                key = (*counts[:output], counts[output] + 1, *counts[output + 1 :])
                following[key] = following.get(key, 0.0) + mass * law[output]
        found = following
    return found


def true_delta(randomizer: Array, others: tuple[int, ...], epsilon: float) -> float:
    """δ(ε) when one person's input changes from 0 to 1; the larger direction."""
    p, q = (
        histogram_law([randomizer[own], *(randomizer[each] for each in others)]) for own in (0, 1)
    )
    return max(
        sum(max(one[each] - math.exp(epsilon) * other[each], 0.0) for each in one)
        for one, other in ((p, q), (q, p))
    )


def random_randomizer(rng: np.random.Generator, local: float) -> Array:
    """Three inputs and four outputs; ratios of any two inputs are at most e^ε₀, and attain it."""
    weights = np.exp(local * rng.integers(0, 2, (3, 4)))
    if rng.random() < 0.5:
        weights = np.exp(local * rng.random((3, 4)))
    masses: Array = weights / weights.sum(axis=1, keepdims=True)
    return masses


def least_local_epsilon(randomizer: Array) -> float:
    logs = np.log(randomizer)
    return float((logs.max(axis=0) - logs.min(axis=0)).max())


@pytest.mark.parametrize("seed", range(6))
def test_it_dominates_every_randomizer_and_dataset(seed: int) -> None:
    rng = np.random.default_rng(seed)
    local, reports = float(rng.choice([0.5, 1.0, 2.5])), int(rng.integers(2, 5))
    for _ in range(4):
        randomizer = random_randomizer(rng, local)
        epsilon = 0.3 * float(rng.random()) * least_local_epsilon(randomizer)
        bound = delta_of(shuffled(reports, pure(least_local_epsilon(randomizer))), epsilon)
        for others in itertools.product(range(3), repeat=reports - 1):
            assert true_delta(randomizer, others, epsilon) <= bound * (1 + 1e-9)


def response(categories: int, local: float) -> Array:
    rest = 1 / (math.exp(local) + categories - 1)
    masses: Array = np.full((categories, categories), rest)
    np.fill_diagonal(masses, math.exp(local) * rest)
    return masses


@pytest.mark.parametrize("fault", [{}, {"clones": 1.3}])
def test_three_categories_nearly_attain_it(
    fault: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others in a third category: with more clones than there are, the bound is too small."""
    original = binomial_masses

    def more_clones(trials: int, probability: float) -> tuple[int, Array, float]:
        factor = fault.get("clones", 1.0) if probability != 0.5 else 1.0
        return original(trials, probability * factor)

    monkeypatch.setattr(shuffled_reports, "binomial_masses", more_clones)
    reports, local = 14, 4.0 + 1e-6 * len(fault)  # laws are cached by their parameters
    true = true_delta(response(3, local), (2,) * (reports - 1), 1.0)
    atoms = ShuffledReportsPair(reports, local).list_atoms()
    bound = delta_of_atoms(atoms, 1.0)
    assert (true <= bound) == (not fault)
    assert bound <= true * 1.05


def delta_of_atoms(atoms: Atoms, epsilon: float) -> float:
    return float(
        np.maximum(np.exp(atoms.log_with) - math.exp(epsilon) * np.exp(atoms.log_without), 0).sum()
    )


@pytest.mark.parametrize(("reports", "local"), [(500, 1.0), (1500, 2.0), (20_000, 6.0)])
def test_blocks_and_the_grid_raise_delta_a_little(reports: int, local: float) -> None:
    """Against sums over all numbers of clones by another library's binomial masses."""
    atoms = ShuffledReportsPair(reports, local).list_atoms()
    clone = 2 / (math.exp(local) + 1)
    middle = stats.binom(reports - 1, clone)
    low, high = (int(middle.ppf(each)) for each in (1e-13, 1 - 1e-13))
    deviations = 2 / math.sqrt((low + high) / 2)
    for epsilon in (0.0, deviations, 3 * deviations):
        exact = 0.0
        for clones in range(low, high + 1):
            zeros = np.arange(clones + 2)
            with_zero, with_one = (stats.binom.pmf(zeros - i, clones, 0.5) for i in (1, 0))
            e = math.exp(local)
            excess = (e * with_zero + with_one) - math.exp(epsilon) * (with_zero + e * with_one)
            exact += middle.pmf(clones) * float(np.maximum(excess, 0).sum()) / (e + 1)
        found = delta_of_atoms(atoms, epsilon)
        assert exact * (1 - 1e-9) - 1e-12 <= found <= exact * (1 + 4e-3)


@pytest.mark.parametrize(
    ("trials", "probability"), [(0, 0.3), (5, 0.2), (10**6, 0.5), (10**9, 1e-9)]
)
def test_binomial_masses_are_within_their_error(trials: int, probability: float) -> None:
    first, masses, error = binomial_masses(trials, probability)
    assert masses.sum() == pytest.approx(1.0, abs=1e-12)
    for at in {0, len(masses) // 2, int(masses.argmax()), len(masses) - 1}:
        with mp.workdps(40):
            exact = exact_mass(trials, first + at, mpf(probability))
        assert abs(masses[at] - exact) <= error * exact + mpf(10) ** -300


def exact_mass(trials: int, successes: int, probability: Any) -> Any:
    failures = trials - successes
    log = mp.loggamma(trials + 1) - mp.loggamma(successes + 1) - mp.loggamma(failures + 1)
    return mp.exp(log + successes * mp.log(probability) + failures * mp.log1p(-probability))


def test_more_reports_hide_more_and_a_single_one_nothing() -> None:
    tree = mechanisms.from_json(shuffled(1, pure(1.0)))
    one = calculator.epsilon(tree, 1e-9)
    assert one.epsilon == pytest.approx(1.0, abs=1e-6)
    found = [
        calculator.epsilon(mechanisms.from_json(shuffled(n, pure(1.0))), 1e-6).epsilon
        for n in (1, 10, 1000, 10**7)
    ]
    assert found == sorted(found, reverse=True)
    assert found[-1] < 1e-3


@pytest.mark.parametrize("local", [1e-10, 1e-7, 12.0])
@pytest.mark.parametrize("reports", [1, 201, 10**5])
def test_shuffling_never_costs_more_than_the_reports_themselves(reports: int, local: float) -> None:
    """The pair alone says more if ε₀ is below the rounding of the masses."""
    for rounds, delta in ((1, 1e-12), (5, 1e-12), (5, 1e-15)):
        one = shuffled(reports, pure(local))
        tree = mechanisms.from_json({"kind": "repeated", "count": rounds, "mechanism": one})
        assert calculator.epsilon(tree, delta).epsilon <= rounds * local * (1 + 1e-8)
        found = calculator.delta(tree, rounds * local * (1 + 1e-8)).certified
        assert found is not None
        assert found.upper <= 1e-200


@pytest.mark.parametrize("local", [1e-10, 100.0])
@pytest.mark.parametrize("reports", [2, 201, 10**9])
def test_the_outcomes_of_any_size_have_all_the_mass(reports: int, local: float) -> None:
    """Grids whose neighbours lie closer than rounding are thinned, not emptied."""
    atoms = ShuffledReportsPair(reports, local).list_atoms()
    assert np.all(np.diff(atoms.log_ratios) > 0)
    for logs in (atoms.log_with, atoms.log_without):
        assert abs(np.exp(logs).sum() - 1) <= atoms.error


@pytest.mark.parametrize(
    ("randomizer", "local"),
    [
        ({"kind": "randomized_response", "categories": 4, "flip_probability": 0.5}, math.log(5)),
        ({"kind": "discrete_laplace", "scale": 2.0, "sensitivity": 3}, 1.5),
        ({"kind": "exponential", "epsilon": 0.5}, 0.5),
        ({"kind": "permute_and_flip", "epsilon": 0.5}, 0.5),
    ],
)
def test_only_the_local_epsilon_counts(randomizer: Json, local: float) -> None:
    for relation in NeighbouringRelation:
        one, other = (
            calculator.epsilon(mechanisms.from_json(shuffled(100, each)), 1e-6, relation=relation)
            for each in (randomizer, pure(local))
        )
        assert one.epsilon == pytest.approx(other.epsilon, rel=1e-6)
        assert one.status is Status.PROVEN
        assert any("only an upper bound" in each for each in one.warnings)


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"reports": 0}, "/reports"),
        ({"reports": 1.5}, "/reports"),
        ({"reports": 10**10}, "/reports"),
        ({"mechanism": {"kind": "gaussian", "noise_multiplier": 1.0}}, "/mechanism"),
        ({"mechanism": {"kind": "laplace", "noise_multiplier": 1.0}}, "/mechanism"),
        ({"mechanism": {"kind": "repeated", "count": 2, "mechanism": pure(1.0)}}, "/mechanism"),
        ({"mechanism": pure(1.0) | {"delta": 1e-9}}, "/mechanism/delta"),
        ({"mechanism": pure(-1.0)}, "/mechanism/epsilon"),
        ({"rounds": 2}, "/rounds"),
    ],
)
def test_bad_fields_are_refused_with_their_pointer(fields: Json, pointer: str) -> None:
    with pytest.raises(mechanisms.MechanismError) as refused:
        mechanisms.from_json(shuffled(10, pure(1.0)) | fields)
    assert pointer in [each for each, _ in refused.value.faults]


@pytest.mark.parametrize("outer", ["poisson_sampled", "fixed_size_sampled", "user_level"])
def test_samples_of_people_are_refused(outer: str) -> None:
    """The number of reports is a part of the description."""
    fields: Json = {
        "poisson_sampled": {"sample_rate": 0.1},
        "fixed_size_sampled": {"dataset_size": 100, "batch_size": 10},
        "user_level": {"records": 2},
    }[outer]
    tree = {"kind": outer, "mechanism": shuffled(10, pure(1.0))} | fields
    for relation in NeighbouringRelation:
        with pytest.raises(MethodNotApplicableError):
            calculator.epsilon(mechanisms.from_json(tree), 1e-5, relation=relation)


def test_a_report_without_privacy_loss_costs_nothing() -> None:
    nothing = {"kind": "randomized_response", "categories": 3, "flip_probability": 1.0}
    for randomizer in (nothing, pure(0.0)):
        found = calculator.epsilon(mechanisms.from_json(shuffled(100, randomizer)), 1e-6)
        assert found.epsilon <= 1e-6
