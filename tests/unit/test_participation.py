"""Correlated noise: banded matrices with records sampled in turn, and sums over a tree."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from accountant_service import calculator, mechanisms
from accountant_service.errors import MethodNotApplicableError
from accountant_service.guarantee import NeighbouringRelation, Status
from accountant_service.mechanisms.canonical import SAMPLED_IN_TURN
from accountant_service.mechanisms.tree import BandedMatrixFactorization, TreeAggregation

Json = dict[str, Any]


def banded(**fields: Any) -> Json:
    return {
        "kind": "banded_matrix_factorization",
        "noise_multiplier": 1.5,
        "coefficients": [1.0, 0.5],
        "steps": 6,
        "groups": 2,
        "sample_rate": 0.3,
    } | fields


def tree(**fields: Any) -> Json:
    return {"kind": "tree_aggregation", "noise_multiplier": 6.0, "steps": 8} | fields


def round_of(sigma: float, rate: float) -> Json:
    noise = {"kind": "gaussian", "noise_multiplier": sigma}
    return {"kind": "poisson_sampled", "sample_rate": rate, "mechanism": noise}


def releases_of(mechanism: Json, groups: str = "") -> set[tuple[mechanisms.Atom, int]]:
    """Return the counted releases; all must have the mark of groups, which is taken off."""
    counted = mechanisms.canonical_form(mechanisms.from_json(mechanism)).atom_counts
    assert {release.inner for release, _ in counted} == {groups}
    return {(replace(release, inner=""), count) for release, count in counted}


def hash_of(mechanism: Json) -> str:
    return mechanisms.canonical_form(mechanisms.from_json(mechanism)).hash


# ------------------------------------------------------- banded matrices, groups in turn


def test_a_banded_run_is_the_sampled_gaussian_releases_of_its_rounds() -> None:
    norm = math.hypot(1.0, 0.5)
    rounds = {"kind": "repeated", "count": 3, "mechanism": round_of(1.5 / norm, 0.3)}
    assert releases_of(banded(), SAMPLED_IN_TURN) == releases_of(rounds)


def test_the_last_round_is_cut_off_at_the_end_of_the_run() -> None:
    norm = math.hypot(1.0, 0.5)
    whole = {"kind": "repeated", "count": 3, "mechanism": round_of(1.5 / norm, 0.3)}
    parts = {"kind": "composed", "mechanisms": [whole, round_of(1.5, 0.3)]}
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
    found = calculator.delta(mechanisms.from_json(banded()), epsilon).certified
    assert found is not None
    assert simulated <= found.upper + 5 * error
    if not adding:  # the costlier direction here
        assert simulated >= found.lower - 5 * error


def test_a_replaced_record_stays_in_its_group() -> None:
    relation = NeighbouringRelation.REPLACE_ONE
    rounds = {"kind": "repeated", "count": 3, "mechanism": round_of(1.5 / math.hypot(1, 0.5), 0.3)}
    one, other = (
        calculator.epsilon(mechanisms.from_json(each), 1e-5, relation=relation)
        for each in (banded(), rounds)
    )
    assert one.epsilon == other.epsilon
    added = calculator.epsilon(mechanisms.from_json(banded()), 1e-5)
    assert one.epsilon > added.epsilon


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_the_ends_of_the_sample_rate(rate: float) -> None:
    found = calculator.epsilon(mechanisms.from_json(banded(sample_rate=rate)), 1e-5).epsilon
    if rate == 0.0:
        assert found == 0.0
        return
    all_rounds = {"kind": "gaussian", "noise_multiplier": 1.5 / math.hypot(1, 0.5)}
    three = {"kind": "repeated", "count": 3, "mechanism": all_rounds}
    assert found == calculator.epsilon(mechanisms.from_json(three), 1e-5).epsilon


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


def test_an_exact_tree_is_the_gaussian_release_of_its_nodes() -> None:
    """Four steps, two apart, in a tree of eight: 4·1 + 4·1 + 2·4 + 16 squares."""
    gaussian = {"kind": "gaussian", "noise_multiplier": 6.0 / math.sqrt(4 + 4 + 8 + 16)}
    assert hash_of(tree(participations=4, min_separation=2)) == hash_of(gaussian)
    once = {"kind": "gaussian", "noise_multiplier": 6.0 / math.sqrt(4)}
    assert hash_of(tree()) == hash_of(once)


def test_a_bound_above_the_worst_pattern_is_said_to_be_one() -> None:
    run = tree(steps=1000, participations=10, min_separation=100)
    lower, upper = mechanisms.from_json(run).squared_sensitivity_bounds()  # type: ignore[union-attr]
    assert lower < upper < lower * 1.5
    found = calculator.epsilon(mechanisms.from_json(run), 1e-6)
    gaussian = {"kind": "gaussian", "noise_multiplier": 6.0 / math.sqrt(upper)}
    closed = calculator.epsilon(mechanisms.from_json(gaussian), 1e-6)
    assert found.epsilon == closed.epsilon
    assert found.certified is not None
    assert found.certified.lower == 0.0
    assert any("only an upper bound" in each for each in found.warnings)


BAD: list[tuple[Json, str]] = [
    (banded(coefficients=[1.0, 0.5, 0.1]), "/coefficients"),
    (banded(coefficients=[]), "/coefficients"),
    (banded(coefficients=[1.0, -0.5]), "/coefficients/1"),
    (banded(coefficients=[0.0, 0.5], steps=7), "/noise_multiplier"),
    (banded(sample_rate=1.5), "/sample_rate"),
    (banded(groups=0), "/groups"),
    (banded(steps=0), "/steps"),
    (banded(noise_multiplier=0.0), "/noise_multiplier"),
    (banded(min_separation=2), "/min_separation"),
    (tree(steps=0), "/steps"),
    (tree(steps=10**6), "/steps"),
    (tree(participations=0), "/participations"),
    (tree(participations=9), "/participations"),
    (tree(participations=3, min_separation=4), "/participations"),
    (tree(noise_multiplier=0.01), "/noise_multiplier"),
]


@pytest.mark.parametrize(("mechanism", "pointer"), BAD, ids=lambda each: str(each)[9:90])
def test_bad_fields_are_refused_with_their_pointer(mechanism: Json, pointer: str) -> None:
    with pytest.raises(mechanisms.MechanismError) as refused:
        mechanisms.from_json(mechanism)
    assert pointer in [each for each, _ in refused.value.faults]


@pytest.mark.parametrize("relation", NeighbouringRelation)
def test_a_record_that_may_move_to_another_group_has_an_estimate_only(
    relation: NeighbouringRelation,
) -> None:
    found = calculator.epsilon(mechanisms.from_json(banded()), 1e-5, relation=relation)
    moves = relation is NeighbouringRelation.REPLACE_ONE
    assert found.status is (Status.ESTIMATE if moves else Status.PROVEN)
    (group,) = (each for each in found.assumptions if "one group of steps" in each.statement)
    assert group.holds == (not moves)


def test_records_of_a_person_in_several_groups_have_no_proof() -> None:
    tree = {"kind": "user_level", "records": 2, "mechanism": banded()}
    with pytest.raises(MethodNotApplicableError, match="groups sampled in turn"):
        calculator.epsilon(mechanisms.from_json(tree), 1e-5)
    one = {"kind": "user_level", "records": 1, "mechanism": banded()}
    assert calculator.epsilon(mechanisms.from_json(one), 1e-5).status is Status.PROVEN
