"""Shuffled reports: randomizers that the worst pair must dominate, and its masses."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from mpmath import mp, mpf
from scipy import stats

from accountant_service.accounting.guarantee import NeighbouringRelation, Status
from accountant_service.numerics.floats.special_functions import Array
from accountant_service.numerics.laws import shuffled_reports as law_of_reports
from accountant_service.numerics.laws.atomic_pair import Atoms
from accountant_service.numerics.laws.shuffled_reports import ShuffledReportsPair, binomial_masses
from tests.support.kinds import (
    Json,
    approximate_dp,
    discrete_laplace,
    epsilon_at,
    exponential,
    permute_and_flip,
    proved_delta,
    randomized_response,
    repeated,
    shuffled_reports,
)


def pure(epsilon: float) -> Json:
    return approximate_dp(epsilon, 0)


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
        local = least_local_epsilon(randomizer)
        bound = proved_delta(shuffled_reports(reports, pure(local)), epsilon).upper
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

    monkeypatch.setattr(law_of_reports, "binomial_masses", more_clones)
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


@pytest.mark.spread(first=1)
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
    assert epsilon_at(shuffled_reports(1, pure(1.0)), 1e-9).epsilon == pytest.approx(1.0, abs=1e-6)
    found = [epsilon_at(shuffled_reports(n, pure(1.0)), 1e-6).epsilon for n in (1, 10, 1000, 10**7)]
    assert found == sorted(found, reverse=True)
    assert found[-1] < 1e-3


@pytest.mark.spread(first=1)
@pytest.mark.parametrize(
    ("reports", "local"),
    [(201, 1e-10), (1, 1e-7), (10**5, 1e-7), (1, 12.0), (10**5, 12.0), (10**5, 1e-10)],
)
def test_shuffling_never_costs_more_than_the_reports_themselves(reports: int, local: float) -> None:
    """The pair alone says more if ε₀ is below the rounding of the masses."""
    for rounds, delta in ((1, 1e-12), (5, 1e-12), (5, 1e-15)):
        tree, most = repeated(rounds, shuffled_reports(reports, pure(local))), rounds * local
        assert epsilon_at(tree, delta).epsilon <= most * (1 + 1e-8)
        assert proved_delta(tree, most * (1 + 1e-8)).upper <= 1e-200


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
        (randomized_response(4, 0.5), math.log(5)),
        (discrete_laplace(2.0, 3), 1.5),
        (exponential(0.5), 0.5),
        (permute_and_flip(0.5), 0.5),
    ],
)
def test_only_the_local_epsilon_counts(randomizer: Json, local: float) -> None:
    for relation in NeighbouringRelation:
        one, other = (
            epsilon_at(shuffled_reports(100, each), 1e-6, relation)
            for each in (randomizer, pure(local))
        )
        assert one.epsilon == pytest.approx(other.epsilon, rel=1e-6)
        assert one.status is Status.PROVEN
        assert any("only an upper bound" in each for each in one.warnings)


def test_a_report_without_privacy_loss_costs_nothing() -> None:
    for randomizer in (randomized_response(3, 1.0), pure(0.0)):
        assert epsilon_at(shuffled_reports(100, randomizer), 1e-6).epsilon <= 1e-6
