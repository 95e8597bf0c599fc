"""Rényi filters of one order and of several against an adversary in two steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import optimize

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.ledger.filters.base import Amounts
from accountant_service.ledger.filters.renyi import RenyiFilter
from accountant_service.ledger.filters.renyi_mixture import RenyiMixtureFilter
from tests.support.two_step_adversary import (
    BOUNDS,
    CUNNING,
    DELTA,
    EPSILON,
    ORDERS,
    Gate,
    attained,
    attained_at_once,
)

RELATION = NeighbouringRelation.ADD_OR_REMOVE_ONE
MIXTURE = RenyiMixtureFilter(ORDERS, (0.5, 0.5), EPSILON, DELTA, RELATION)


def one_order(place: int) -> Gate:
    budget = RenyiFilter(ORDERS[place], EPSILON, DELTA, RELATION).budget
    return lambda taken: taken[place] <= budget


def some_order_has_room(taken: Amounts) -> bool:
    """The order is chosen after the results: a mutant."""
    return any(one_order(place)(taken) for place in range(len(ORDERS)))


def with_weights(*weights: float) -> Gate:
    """A filter with weights that the constructor refuses: a mutant."""
    wrong = replace(MIXTURE)
    object.__setattr__(wrong, "weights", weights)
    return wrong.admits


def holds_on_a_coarse_grid(taken: Amounts) -> bool:
    """The condition is checked at two losses only: a mutant."""
    factors = np.array(ORDERS) - 1
    losses = EPSILON + np.log1p(1 / factors)
    spent = factors * np.array(taken) / 1e6
    supermartingale = np.exp(losses[:, None] * factors - spent) @ np.array(MIXTURE.weights)
    return bool((-np.expm1(EPSILON - losses) <= DELTA * supermartingale).all())


SOUND = {"order 4": one_order(0), "order 40": one_order(1), "mixture": MIXTURE.admits}


@pytest.mark.parametrize("name", SOUND)
def test_sound_filters_hold_against_the_known_adversary(name: str) -> None:
    assert attained(CUNNING, SOUND[name]) <= 1.0


def test_one_step_nearly_attains_the_budget_of_a_mixture() -> None:
    assert 0.8 < attained_at_once(MIXTURE.admits) <= 1.0


def test_filters_that_break_a_rule_are_unsound() -> None:
    late = attained(CUNNING, some_order_has_room)
    heavy = attained_at_once(with_weights(1.0, 1.0))
    coarse = attained_at_once(holds_on_a_coarse_grid)
    print(f"of δ: some order has room {late:.2f}, weights 2 {heavy:.2f}, two losses {coarse:.2f}")
    assert late > 1.5
    assert heavy > 1.5
    assert coarse > 1.2


def best(gate: Gate, seed: int, maxiter: int, popsize: int) -> float:
    """Return δ, over the promised one, of the best adversary that a search finds."""
    found = optimize.differential_evolution(
        lambda by: -attained(by, gate),
        BOUNDS,
        seed=seed,
        maxiter=maxiter,
        popsize=popsize,
        tol=1e-8,
        polish=False,
    )
    return float(-found.fun)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["order 40", "mixture"])
def test_a_short_search_finds_no_adversary_against_a_sound_filter(name: str) -> None:
    assert 0.3 < best(SOUND[name], 1, 8, 6) <= 1.0


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", [*SOUND, "some order"])
def test_a_search_for_the_best_adversary(name: str, night_seed: int) -> None:
    """Against one frozen order or a mixture it never exceeds δ; against “some order” it does."""
    found = best(SOUND.get(name, some_order_has_room), night_seed, 60, 12)
    print(f"{name}: {found:.3f} of δ")
    assert (found <= 1.0) == (name in SOUND)
