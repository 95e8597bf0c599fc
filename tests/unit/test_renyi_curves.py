"""Rényi divergences of every kind are at least those of its pair, and exact where that is known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from accountant_service import mechanisms
from accountant_service.accounting import calculator, release_laws
from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.accounting.methods import Question, renyi_curves
from accountant_service.errors import MethodNotApplicableError
from accountant_service.ledger.filters import renyi, renyi_mixture
from accountant_service.ledger.step_plan import StepPlan
from accountant_service.mechanisms import canonical_form
from accountant_service.numerics.laws.atomic_pair import AtomicPair
from accountant_service.numerics.laws.dominating_pair import Release

RELATION = NeighbouringRelation.ADD_OR_REMOVE_ONE
ORDERS = np.array([1.01, 1.5, 2.0, 5.0, 20.0, 100.0])
LAPLACE = {"kind": "laplace", "noise_multiplier": 2.0}


def question(kind: str, **fields: Any) -> Question:
    return Question(canonical_form(mechanisms.from_json({"kind": kind, **fields})), RELATION)


def enumerated(asked: Question) -> np.ndarray:
    """Return the larger log-moment of a pair's two directions, by its definition."""
    (group,) = asked.release_groups
    law = release_laws.dominating_pair(group, RELATION)
    assert isinstance(law, Release)
    assert isinstance(law.base_pair, AtomicPair)
    atoms = law.base_pair.list_atoms()
    return np.array(
        [
            max(
                float(np.logaddexp.reduce(atoms.log_without + order * atoms.log_ratios)),
                float(np.logaddexp.reduce(atoms.log_with - order * atoms.log_ratios)),
            )
            for order in ORDERS
        ]
    )


@pytest.mark.parametrize(
    ("asked", "is_exact"),
    [
        (question("randomized_response", categories=2, flip_probability=0.4), True),
        (question("randomized_response", categories=7, flip_probability=0.4), False),
        (question("discrete_laplace", scale=1.5), False),
        (question("discrete_gaussian", noise_std=3.0), True),
        (question("discrete_gaussian", noise_std=0.6, sensitivity=2), False),
        (question("approximate_dp", epsilon=0.7, delta=0), True),
    ],
)
def test_a_curve_is_at_least_the_enumerated_one(asked: Question, is_exact: bool) -> None:
    found, least = renyi_curves.log_moments(asked, ORDERS), enumerated(asked)
    assert np.all(found >= least * (1 - 1e-12))
    if is_exact:
        np.testing.assert_allclose(found, least, rtol=1e-6)


def test_curves_of_given_guarantees_are_what_they_say() -> None:
    gaussian = renyi_curves.log_moments(question("gaussian", noise_multiplier=4.0), ORDERS)
    for given in (question("gdp", mu=0.25), question("zcdp", rho=1 / 32)):
        np.testing.assert_allclose(renyi_curves.log_moments(given, ORDERS), gaussian, rtol=1e-9)
    curve = question("rdp", orders=[2, 10, 40], divergences=[0.01, 0.05, 0.2])
    found = renyi_curves.log_moments(curve, np.array([1.5, 2.0, 6.0, 40.0, 41.0])) / np.array(
        [0.5, 1.0, 5.0, 39.0, 40.0]
    )
    assert found[0] == pytest.approx(0.01)
    assert found[1] == pytest.approx(0.01)
    assert 0.01 < found[2] < 0.05
    assert found[3] == pytest.approx(0.2)
    assert math.isinf(found[4])


@pytest.mark.parametrize(
    "asked",
    [
        question("approximate_dp", epsilon=0.1, delta=1e-9),
        question("parallel", mechanisms=[LAPLACE, {"kind": "gdp", "mu": 0.1}]),
        question("poisson_sampled", sample_rate=0.1, mechanism={"kind": "zcdp", "rho": 0.1}),
        question("truncated_laplace", scale=2.0, bound=20.0),
    ],
)
def test_a_release_without_a_finite_curve_is_refused(asked: Question) -> None:
    with pytest.raises(MethodNotApplicableError, match="reference"):
        renyi_curves.log_moments(asked, ORDERS)


def test_a_mixture_admits_most_of_the_rho_of_the_best_order() -> None:
    """And the order that a planned zCDP release chooses admits all of it."""
    part = StepPlan.of(mechanisms.Zcdp(0.0001))
    for rho in (0.02, 0.1, 0.5):
        whole = mechanisms.Zcdp(rho)
        epsilon = calculator.prove_epsilon(whole, RELATION, 1e-6).epsilon * 1.01
        mixture = renyi_mixture.choose_mixture(epsilon, 1e-6, RELATION)
        planned = renyi.choose_filter(epsilon, 1e-6, RELATION, part.step)
        steps = [each.count_affordable_steps(part, each.nothing) for each in (mixture, planned)]
        assert None not in steps
        assert steps[0] * 0.0001 >= 0.85 * rho  # type: ignore[operator]
        assert steps[1] * 0.0001 >= 0.99 * rho  # type: ignore[operator]


def test_a_planned_curve_below_every_order_is_refused() -> None:
    """Else the filter would freeze an order at which nothing of it is ever admitted."""
    plan = question("rdp", orders=[1.01, 1.02], divergences=[0.1, 0.2])
    with pytest.raises(MethodNotApplicableError, match="no finite Rényi divergence"):
        renyi.choose_filter(3.0, 1e-5, RELATION, plan.form)
