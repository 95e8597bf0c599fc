"""Correlated noise: banded matrices with records sampled in turn, and sums over a tree."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from accountant_service import mechanisms
from accountant_service.accounting.guarantee import NeighbouringRelation, Status
from accountant_service.errors import MethodNotApplicableError
from accountant_service.mechanisms.canonical import SAMPLED_IN_TURN
from accountant_service.mechanisms.kinds import BandedMatrixFactorization, TreeAggregation
from tests.support import kinds
from tests.support.kinds import (
    REPLACED,
    Json,
    composed,
    epsilon_at,
    factorization,
    gaussian,
    poisson,
    proved_delta,
    repeated,
    tree_aggregation,
    user_level,
)


def banded(**fields: Any) -> Json:
    return kinds.banded(1.5, [1.0, 0.5], 6, 2, 0.3) | fields


def tree(**fields: Any) -> Json:
    return tree_aggregation(6.0, 8) | fields


def round_of(sigma: float, rate: float) -> Json:
    return poisson(rate, gaussian(sigma))


def releases_of(mechanism: Json, groups: str = "") -> set[tuple[mechanisms.Atom, int]]:
    """Return the counted releases; all must have the mark of groups, which is taken off."""
    counted = mechanisms.canonical_form(mechanisms.from_json(mechanism)).atom_counts
    assert {release.inner for release, _ in counted} == {groups}
    return {(replace(release, inner=""), count) for release, count in counted}


# ------------------------------------------------------- banded matrices, groups in turn


def test_a_banded_run_is_the_sampled_gaussian_releases_of_its_rounds() -> None:
    norm = math.hypot(1.0, 0.5)
    rounds = repeated(3, round_of(1.5 / norm, 0.3))
    assert releases_of(banded(), SAMPLED_IN_TURN) == releases_of(rounds)


def test_the_last_round_is_cut_off_at_the_end_of_the_run() -> None:
    norm = math.hypot(1.0, 0.5)
    parts = composed(repeated(3, round_of(1.5 / norm, 0.3)), round_of(1.5, 0.3))
    assert releases_of(banded(steps=7), SAMPLED_IN_TURN) == releases_of(parts)


def column_norms(run: BandedMatrixFactorization, group: int) -> list[float]:
    """The norms of C's columns at the steps of a group, from the whole matrix."""
    size = run.steps
    matrix = np.zeros((size, size))
    for column in range(size):
        for i, value in enumerate(run.coefficients[: size - column]):
            matrix[column + i, column] = value
    steps = list(range(group, size, run.groups))
    for one, other in itertools.combinations(steps, 2):
        assert not np.any(matrix[:, one] * matrix[:, other]), "two steps share noise"
    return [float(np.linalg.norm(matrix[:, each])) for each in steps]


@pytest.mark.parametrize("coefficients", [(1.0,), (1.0, 0.5, 0.25), (0.1, 1.0, 0.2)])
@pytest.mark.parametrize("steps", range(1, 11))
def test_the_first_group_has_the_most_and_largest_rounds(
    coefficients: tuple[float, ...], steps: int
) -> None:
    run = BandedMatrixFactorization(1.0, coefficients, steps, 4, 0.1)
    charged = sorted((norm for norm, n in run.rounds() for _ in range(n)), reverse=True)
    assert charged == pytest.approx(sorted(column_norms(run, 0), reverse=True))
    for group in range(1, min(4, steps)):
        others = sorted(column_norms(run, group), reverse=True)
        others += [0.0] * (len(charged) - len(others))
        assert all(a >= b - 1e-12 for a, b in zip(charged, others, strict=True))


@pytest.mark.parametrize("adding", [False, True])
def test_a_simulated_run_costs_as_much(adding: bool) -> None:
    """All rows of the run at once: the record is in group 0, others contribute nothing."""
    sigma, rate, epsilon, trials = 1.5, 0.3, 0.5, 400_000
    rng = np.random.default_rng(7)
    column = np.array([1.0, 0.5])
    taken = np.zeros((trials, 3)) if adding else rng.random((trials, 3)) < rate
    rows = taken[:, :, None] * column + sigma * rng.standard_normal((trials, 3, 2))
    exponent = (rows @ column - column @ column / 2) / sigma**2
    log_ratio = np.log1p(rate * np.expm1(exponent)).sum(axis=1) * (-1 if adding else 1)
    losses = np.maximum(-np.expm1(epsilon - log_ratio), 0.0)
    simulated, error = float(losses.mean()), float(losses.std()) / math.sqrt(trials)
    found = proved_delta(banded(), epsilon)
    assert simulated <= found.upper + 5 * error
    if not adding:  # the costlier direction here
        assert simulated >= found.lower - 5 * error


def test_a_replaced_record_stays_in_its_group() -> None:
    rounds = repeated(3, round_of(1.5 / math.hypot(1, 0.5), 0.3))
    one, other = (epsilon_at(each, 1e-5, REPLACED).epsilon for each in (banded(), rounds))
    assert one == other > epsilon_at(banded(), 1e-5).epsilon


def test_the_ends_of_the_sample_rate() -> None:
    assert epsilon_at(banded(sample_rate=0.0), 1e-5).epsilon == 0.0
    three = repeated(3, gaussian(1.5 / math.hypot(1, 0.5)))
    assert epsilon_at(banded(sample_rate=1.0), 1e-5).epsilon == epsilon_at(three, 1e-5).epsilon


# --------------------------------------------------------------------- sums over a tree


def node_counts(steps: int, pattern: tuple[int, ...]) -> int:
    """Σ m² over all blocks of 1, 2, 4, … whole steps, counted one by one."""
    total, size = 0, 1
    while size <= steps:
        for first in range(0, steps - size + 1, size):
            total += sum(first <= each < first + size for each in pattern) ** 2
        size *= 2
    return total


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 11])
def test_the_bounds_hold_the_worst_of_all_patterns(steps: int) -> None:
    exact = 0
    for separation in range(1, steps + 1):
        for most in range(1, -(-steps // separation) + 1):
            run = TreeAggregation(1.0, steps, most, separation)
            lower, upper = run.squared_sensitivity_bounds()
            worst = max(
                node_counts(steps, pattern)
                for number in range(1, most + 1)
                for pattern in itertools.combinations(range(steps), number)
                if all(b - a >= separation for a, b in itertools.pairwise(pattern))
            )
            assert lower <= worst <= upper
            assert most > 1 or lower == upper == steps.bit_length()
            exact += lower == upper
    assert exact


def test_a_bound_above_the_worst_pattern_is_said_to_be_one() -> None:
    run = tree(steps=1000, participations=10, min_separation=100)
    lower, upper = mechanisms.from_json(run).squared_sensitivity_bounds()  # type: ignore[union-attr]
    assert lower < upper < lower * 1.5
    found = epsilon_at(run, 1e-6)
    assert found.epsilon == epsilon_at(gaussian(6.0 / math.sqrt(upper)), 1e-6).epsilon
    assert found.certified is not None
    assert found.certified.lower == 0.0
    assert any("only an upper bound" in each for each in found.warnings)


@pytest.mark.parametrize("relation", NeighbouringRelation)
def test_a_record_that_may_move_to_another_group_has_an_estimate_only(
    relation: NeighbouringRelation,
) -> None:
    found = epsilon_at(banded(), 1e-5, relation)
    moves = relation is REPLACED
    assert found.status is (Status.ESTIMATE if moves else Status.PROVEN)
    (group,) = (each for each in found.assumptions if "one group of steps" in each.statement)
    assert group.holds == (not moves)


def test_one_record_of_a_person_is_in_one_group() -> None:
    assert epsilon_at(user_level(1, banded()), 1e-5).status is Status.PROVEN


# ------------------------------------------------------------- noise of a whole matrix


@pytest.mark.parametrize("coefficients", [[1.0], [1.0, 0.5, 0.25], [1.0] * 7, [0.9, 0.3, 0.3, 0.1]])
def test_correlated_noise_is_the_gaussian_of_the_worst_pattern(coefficients: list[float]) -> None:
    """Over all patterns of three participations in seven steps, at least two apart, and signs."""
    steps, separation, most = 7, 2, 3
    columns = np.zeros((steps, steps))
    for start in range(steps):
        column = coefficients[: steps - start]
        columns[start, start : start + len(column)] = column
    worst = max(
        float(np.linalg.norm(np.array(signs) @ columns[list(pattern)]))
        for number in range(1, most + 1)
        for pattern in itertools.combinations(range(steps), number)
        if all(b - a >= separation for a, b in itertools.pairwise(pattern))
        for signs in itertools.product((1, -1), repeat=number)
    )
    read = mechanisms.from_json(factorization(4.0, coefficients, steps, separation, most))
    ((atom, count),) = mechanisms.canonical_form(read).atom_counts
    assert (atom.noise, count) == ("gaussian", 1)
    assert atom.noise_multiplier == pytest.approx(4.0 / worst, rel=1e-12)


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
    document = {**kind, **fields, "min_separation": separation}
    for method in ("pld", "subsampled_rdp"):
        try:
            found = epsilon_at(document, 1e-5, method=method)
        except MethodNotApplicableError:
            assert (kind["kind"], method) == ("tree_aggregation", "subsampled_rdp")
            continue
        stated = [each.statement for each in found.assumptions]
        assert sum("at least `min_separation` steps apart" in each for each in stated) == 1
