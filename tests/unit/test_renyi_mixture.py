"""The Rényi filter of several orders: its bound, its rounding, and adversaries against it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import mp, mpf

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.errors import AccountingError, TooExpensiveError
from accountant_service.ledger.filters import renyi, renyi_mixture
from accountant_service.ledger.filters.renyi import DivergenceFilter
from accountant_service.ledger.filters.renyi_mixture import (
    Amounts,
    RenyiMixtureFilter,
    add_steps,
    choose_late_mixture,
    choose_mixture,
)
from accountant_service.ledger.step_plan import StepPlan
from accountant_service.mechanisms import Composed, DpSgd, Mechanism, Zcdp, canonical_form
from tests.support.two_step_adversary import Gate

RELATION = NeighbouringRelation.ADD_OR_REMOVE_ONE
MIXTURES = (
    RenyiMixtureFilter((4.9, 5.9, 7.0), (0.5, 0.125, 0.375), 3.0, 1e-5, RELATION),
    RenyiMixtureFilter((11.0, 13.4, 20.0), (0.6875, 0.125, 0.1875), 1.0, 1e-5, RELATION),
    RenyiMixtureFilter((1.05, 6.0, 250.0), (0.25, 0.25, 0.5), 3.0, 1e-6, RELATION),
    RenyiMixtureFilter((3.75,), (1.0,), 8.0, 1e-6, RELATION),
)
RUNS = tuple(
    canonical_form(DpSgd(sigma, sample_rate=rate, steps=1))
    for rate, sigma in ((0.01, 1.1), (0.001, 0.8), (0.1, 2.0), (1.0, 20.0))
)


# An independent computation of the supremum, at 50 digits.


def log_supremum(policy: RenyiMixtureFilter, taken: Amounts, epsilon: float | None = None) -> mpf:
    """Return the logarithm of sup (1 − e^{ε−L})₊/W, by bisection of a monotone derivative."""
    with mp.workdps(50):
        factors = [mpf(order) - 1 for order in policy.orders]
        at = mpf(policy.epsilon if epsilon is None else epsilon)
        terms = [
            mp.log(mpf(weight)) + factor * (at - mpf(amount) / 10**6)
            for factor, weight, amount in zip(factors, policy.weights, taken, strict=True)
        ]

        def powers(x: mpf) -> list[mpf]:
            return [mp.exp(t + f * x) for t, f in zip(terms, factors, strict=True)]

        low, high = mpf("1e-6"), mpf(100)
        for _ in range(120):
            middle = (low + high) / 2
            each = powers(middle)
            slope = sum(f * p for f, p in zip(factors, each, strict=True)) / sum(each)
            falls = slope < 1 / mp.expm1(middle)
            low, high = (middle, high) if falls else (low, middle)
        return mp.log(-mp.expm1(-low)) - mp.log(sum(powers(low)))


def largest_scale(policy: RenyiMixtureFilter, direction: Sequence[int]) -> int:
    """Return the most times that amounts in this direction are admitted."""
    low, high = 0, 1
    while policy.admits(tuple(high * each for each in direction)):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        admitted = policy.admits(tuple(middle * each for each in direction))
        low, high = (middle, high) if admitted else (low, middle)
    return low


DIRECTIONS = ((1, 1, 1), (1, 3, 9), (4, 5, 30), (1, 40, 4000), (1, 1, 10**9))


def check_boundary(policy: RenyiMixtureFilter, direction: Sequence[int]) -> None:
    """Check that the last admitted amounts have the guarantee, and little more has it."""
    last = largest_scale(policy, direction)
    inside = tuple(last * each for each in direction)
    outside = tuple(math.ceil((last + 2) * 1.0001) * each for each in direction)
    limit = mp.log(mpf(policy.delta))
    assert last > 0
    assert log_supremum(policy, inside) <= limit
    assert log_supremum(policy, outside) > limit


@pytest.mark.parametrize("policy", MIXTURES)
def test_the_boundary_is_inside_the_exact_one_and_close(
    policy: RenyiMixtureFilter,
) -> None:
    for direction in DIRECTIONS:
        check_boundary(policy, direction[: len(policy.orders)])


@pytest.mark.parametrize("margin", [-1e-3, -1e-6])
def test_rounding_inward_is_noticed(margin: float, monkeypatch: pytest.MonkeyPatch) -> None:
    renyi_mixture._compute_cell_bounds.cache_clear()
    monkeypatch.setattr(renyi_mixture, "rounding", SimpleNamespace(MARGIN=margin))
    try:
        with pytest.raises(AssertionError):
            check_boundary(MIXTURES[0], (1000, 1100, 1300) if margin < -1e-4 else (1, 1, 1))
    finally:
        renyi_mixture._compute_cell_bounds.cache_clear()


@pytest.mark.parametrize("policy", MIXTURES)
def test_cell_bounds_are_below_the_function_and_close(policy: RenyiMixtureFilter) -> None:
    """For random terms of W the least row is at most the exact minimum, within a share of 10⁻³."""
    rows = renyi_mixture._compute_cell_bounds(policy.orders)
    assert (rows >= 0).all()
    factors = np.array(policy.orders) - 1
    x = np.geomspace(1e-3, 20, 20_001)[:, None]
    functions = np.exp(np.minimum(factors * x, 600)) / -np.expm1(-x)
    generator = np.random.default_rng(1)
    for _ in range(5):
        terms = np.exp(generator.normal(0, 3, len(factors)))
        least = float((functions @ terms).min())
        assert least * (1 - 1e-3) <= (rows @ terms).min() <= least
    for _ in range(200):  # also where steep functions decide
        terms = np.exp(generator.uniform(-100, 5, len(factors)))
        assert (rows @ terms).min() <= float((functions @ terms).min())


def every_mixture(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test on each mixture."""
    return pytest.mark.spread(first=1)(pytest.mark.parametrize("policy", MIXTURES)(test))


@every_mixture
@given(data=st.data())
@settings(max_examples=8, deadline=None, derandomize=True)
def test_larger_amounts_are_never_admitted_where_smaller_were_not(
    policy: RenyiMixtureFilter, data: st.DataObject
) -> None:
    """At the boundary, where one micro-nat decides."""
    count = len(policy.orders)
    direction = data.draw(st.tuples(*[st.integers(1, 50)] * count))
    first = tuple((largest_scale(policy, direction) + 1) * each for each in direction)
    assert not policy.admits(first)
    more = data.draw(st.tuples(*[st.sampled_from([0, 1, 2, 1000, 10**9, 10**30])] * count))
    assert not policy.admits(tuple(a + b for a, b in zip(first, more, strict=True)))
    last = tuple(largest_scale(policy, direction) * each for each in direction)
    less = data.draw(st.tuples(*[st.sampled_from([0, 1, 2, 1000])] * count))
    assert policy.admits(tuple(max(a - b, 0) for a, b in zip(last, less, strict=True)))


@every_mixture
@given(data=st.data())
@settings(max_examples=6, deadline=None, derandomize=True)
def test_epsilon_agrees_with_admission(policy: RenyiMixtureFilter, data: st.DataObject) -> None:
    count = len(policy.orders)
    taken = data.draw(st.tuples(*[st.integers(0, 6_000_000)] * count))
    epsilon = policy.epsilon_of(taken)
    assert (epsilon <= policy.epsilon) == policy.admits(taken)
    assert policy.epsilon_of(tuple(2 * each + 1 for each in taken)) >= epsilon
    if epsilon > 0:
        assert policy._has_guarantee(taken, epsilon)
        limit = mp.log(mpf(policy.delta))
        assert log_supremum(policy, taken, epsilon) <= limit
        assert log_supremum(policy, taken, epsilon * (1 - 1e-4)) > limit


def test_an_empty_balance_costs_nothing() -> None:
    for policy in MIXTURES:
        nothing = (0,) * len(policy.orders)
        assert policy.epsilon_of(nothing) == 0.0
        assert policy.admits(nothing)
        assert policy.count_steps(nothing, nothing) is None


def test_infinite_amounts_leave_the_other_orders() -> None:
    policy = MIXTURES[0]
    infinite = 10**30
    alone = RenyiMixtureFilter(policy.orders[:1], policy.weights[:1], 3.0, 1e-5, RELATION)
    for amount in range(0, 3_000_000, 50_000):
        assert policy.admits((amount, infinite, infinite)) == (
            alone.admits((amount,)) if amount else alone.admits((1,))
        )
    assert not policy.admits((infinite,) * 3)
    assert policy.epsilon_of((infinite,) * 3) == math.inf
    assert policy.count_steps((1, 1, 1), (infinite,) * 3) == 0


def test_steps_that_some_order_never_charges_are_unlimited() -> None:
    policy = MIXTURES[0]
    assert policy.count_steps((0, 10**18, 10**18), (1000, 0, 0)) is None


# One order is the filter of today.


@pytest.mark.parametrize("order", [1.5, 3.7, 11.0, 40.0])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-5), (8.0, 1e-6)])
def test_a_mixture_of_one_order_is_the_one_order_filter(
    order: float, epsilon: float, delta: float
) -> None:
    single = renyi.RenyiFilter(order, epsilon, delta, RELATION)
    mixture = RenyiMixtureFilter((order,), (1.0,), epsilon, delta, RELATION)
    for step in RUNS:
        (cost,) = mixture.step_costs(step)
        assert cost == single.step_costs(step)[0]
        assert mixture.count_steps((cost,), (0,)) == pytest.approx(
            renyi.count_affordable_steps(cost, single.budget), rel=1e-5, abs=1
        )
    for micronats in (1, single.budget // 2, single.budget - 2, single.budget + 3):
        if micronats <= 0:
            continue
        assert mixture.admits((micronats,)) == (micronats <= single.budget)
        assert mixture.epsilon_of((micronats,)) == pytest.approx(
            single.epsilon_of((micronats,)), abs=3e-6
        )


# Counting steps, and choosing a mixture.


@pytest.mark.parametrize("policy", MIXTURES)
def test_the_number_of_affordable_steps_is_exact(policy: RenyiMixtureFilter) -> None:
    taken = tuple(100_000 + 7 * place for place in range(len(policy.orders)))
    for step in RUNS:
        costs = policy.step_costs(step)
        steps = policy.count_steps(costs, taken)
        assert steps is not None
        assert steps == 0 or policy.admits(add_steps(taken, costs, steps))
        assert not policy.admits(add_steps(taken, costs, steps + 1))


def test_a_mixture_admits_more_steps_of_the_reference_runs_than_one_order() -> None:
    for epsilon in (1.0, 3.0):
        mixture = choose_mixture(epsilon, 1e-5, RELATION)
        order = renyi.choose_filter(epsilon, 1e-5, RELATION).order
        single = RenyiMixtureFilter((order,), (1.0,), epsilon, 1e-5, RELATION)

        def score(policy: RenyiMixtureFilter) -> float:
            nothing = (0,) * len(policy.orders)
            steps = [
                policy.count_steps(policy.step_costs(step), nothing) or 0
                for rate in (0.001, 0.004, 0.01, 0.03, 0.1)
                for step in (
                    canonical_form(DpSgd(sigma, sample_rate=rate, steps=1))
                    for sigma in (0.7, 0.9, 1.1, 1.5, 2.5, 5.0)
                )
            ]
            return float(np.log1p(steps).mean())

        assert 2 <= len(mixture.orders) <= 6
        assert score(mixture) > score(single) + 0.08


def test_every_budget_has_a_mixture() -> None:
    budgets = ((0.01, 1e-9), (0.5, 1e-5), (50.0, 1e-5))
    for (epsilon, delta), relation in zip(budgets, NeighbouringRelation, strict=True):
        mixture = choose_mixture(epsilon, delta, relation)
        assert mixture == choose_mixture(epsilon, delta, relation)
        assert mixture.admits((0,) * len(mixture.orders))


def test_for_a_planned_mechanism_the_mixture_is_its_best_order() -> None:
    for step in RUNS:
        order = renyi.choose_filter(3.0, 1e-5, RELATION, step).order
        assert choose_mixture(3.0, 1e-5, RELATION, step).orders == (order,)


def test_no_mixture_admits_more_steps_of_one_mechanism_than_its_best_order() -> None:
    """The best order among many, and random mixtures of the others with it."""
    generator = np.random.default_rng(3)
    for step in RUNS:
        best = choose_mixture(3.0, 1e-5, RELATION, step)
        most = best.count_steps(best.step_costs(step), (0,)) or 0
        for _ in range(5):
            orders = np.sort(best.orders[0] + np.append(generator.uniform(-2, 4, 2), 0.0))
            weights = np.floor(generator.dirichlet([1, 1, 1]) * 2**20 + 1) / (2**20 + 3)
            mixture = RenyiMixtureFilter(
                tuple(np.maximum(orders, [1.05, 1.06, 1.07])), tuple(weights), 3.0, 1e-5, RELATION
            )
            steps = mixture.count_steps(mixture.step_costs(step), (0, 0, 0)) or 0
            assert steps <= most * 1.001 + 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"weights": (0.75, 0.125, 0.25)},
        {"weights": (0.5, 0.5, 2.0**-60)},
        {"weights": (0.5, 0.5)},
        {"weights": (0.5, 0.5, 0.0)},
        {"orders": (5.0, 4.0, 7.0)},
        {"orders": (1.0, 4.0, 7.0)},
        {"delta": 0.0},
        {"epsilon": -1.0},
        {"epsilon": math.nan},
        {"weights": (0.5, math.nan, 0.25)},
        {"orders": (2.0, math.nan, 7.0)},
    ],
)
def test_parameters_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"orders|weight|budget"):
        replace(MIXTURES[0], **wrong)  # type: ignore[arg-type]


def test_a_release_of_another_kind_does_not_lift_the_limit_on_the_work() -> None:
    runs = [DpSgd(0.01 + 1e-5 * i, sample_rate=0.5, steps=1) for i in range(60)]
    step = canonical_form(Composed((*runs, Zcdp(0.01))))
    with pytest.raises(TooExpensiveError, match="fewer different releases"):
        MIXTURES[0].step_costs(step)


def test_releases_without_a_proved_divergence_are_refused() -> None:
    step = canonical_form(DpSgd(1.1, sample_rate=0.01, steps=1, sampling="shuffled"))
    with pytest.raises(AccountingError):
        MIXTURES[0].step_costs(step)


# An adversary over many steps, by dynamic programming: the optimum of all adaptive strategies.

MENU = ((5, -5), (60, -1), (40, -2))  # losses of two outcomes each, in units
UNIT = 0.02
WIDTH = 400  # losses between −8 and 8; beyond, the value is bounded as if they were at the edge
LONG = RenyiMixtureFilter((3.0, 5.0, 9.0), (0.5, 0.25, 0.25), 1.0, 0.05, RELATION)


def two_outcomes(up: int, down: int) -> tuple[float, float]:
    """Return the probabilities under P of two losses, for which Q also sums to 1."""
    p = math.expm1(-down * UNIT) / (math.exp(-down * UNIT) - math.exp(-up * UNIT))
    return p, 1 - p


def charge_menu(up: int, down: int) -> Amounts:
    losses, p = np.array([up, down]) * UNIT, np.array(two_outcomes(up, down))
    amounts = []
    for order in LONG.orders:
        forth = math.log((p * np.exp((order - 1) * losses)).sum())
        back = math.log((p * np.exp(-order * losses)).sum())
        amounts.append(math.ceil(1e6 * max(forth, back) / (order - 1)))
    return tuple(amounts)


def best_adversary(gate: Gate) -> float:
    """Return the largest δ that any adaptive choice of the menu's laws attains, over δ."""
    losses = np.arange(-WIDTH, WIDTH + 1)
    stop = np.maximum(-np.expm1(LONG.epsilon - losses * UNIT), 0.0)
    charges = [charge_menu(*law) for law in MENU]
    known: dict[tuple[int, ...], np.ndarray | None] = {}

    def value(counts: tuple[int, ...]) -> np.ndarray | None:
        """Return the value at each loss so far, or None if the gate does not admit the counts."""
        if counts not in known:
            known[counts] = compute(counts)
        return known[counts]

    def compute(counts: tuple[int, ...]) -> np.ndarray | None:
        taken = tuple(
            sum(n * each[k] for n, each in zip(counts, charges, strict=True))
            for k in range(len(LONG.orders))
        )
        if not gate(taken):
            return None
        best = stop
        for place, (up, down) in enumerate(MENU):
            after = value((*counts[:place], counts[place] + 1, *counts[place + 1 :]))
            if after is not None:
                p, rest = two_outcomes(up, down)
                # clipping raises losses at the lower edge; the upper edge is worth nearly 1
                gain = p * after[np.minimum(losses + up, WIDTH) + WIDTH]
                gain += rest * after[np.maximum(losses + down, -WIDTH) + WIDTH]
                best = np.maximum(best, gain)
        return best

    start = value((0,) * len(MENU))
    assert start is not None
    return float(start[WIDTH]) / LONG.delta


def test_no_adaptive_strategy_over_many_steps_exceeds_the_budget() -> None:
    reached = best_adversary(LONG.admits)
    print(f"{reached:.3f} of δ")
    assert 0.2 < reached <= 1.0


def test_the_dynamic_program_finds_a_gate_that_is_too_wide() -> None:
    def twice(taken: Amounts) -> bool:
        return LONG.admits(tuple(each // 2 for each in taken))

    assert best_adversary(twice) > 1.0


# --- the first run shifts weight


def admitted(policy: DivergenceFilter, mechanism: Mechanism) -> int:
    """Return how many of a mechanism's steps a filter admits."""
    return policy.count_affordable_steps(StepPlan.of(mechanism), policy.nothing) or 0


def test_the_first_run_shifts_weight_in_proportion_to_what_it_takes() -> None:
    """ρ-zCDP parts of .1 fit a budget of its ε and 3 % more, whatever their order."""
    late = choose_late_mixture(2.2062, 1e-6, RELATION)
    part, work = Zcdp(1e-4), DpSgd(1.1, sample_rate=0.01, steps=1)
    before = [admitted(late, each) for each in (part, work)]
    assert before[0] < 1000
    for rho, least in ((1e-9, before), (1e-3, (before[0], 0.95 * before[1])), (0.01, (1000, 0))):
        after = late.after_reserving(StepPlan.of(Zcdp(rho)), late.nothing)
        assert after.initial == late
        assert late.allows_replacement(after, StepPlan.of(part), late.nothing)
        assert admitted(after, part) >= least[0]
        assert admitted(after, work) >= least[1]


def test_weights_are_frozen_once_something_is_spent_or_held() -> None:
    late = choose_late_mixture(2.2062, 1e-6, RELATION)
    plan, taken = StepPlan.of(Zcdp(0.01)), tuple(1 for _ in late.nothing)
    shifted = late.after_reserving(plan, late.nothing)
    assert late.after_reserving(plan, taken) == late
    assert not late.allows_replacement(shifted, plan, taken)
    other = replace(shifted, epsilon=2.3)
    assert not late.allows_replacement(other, plan, late.nothing)
    with pytest.raises(ValueError, match="at most 1"):
        replace(shifted, weights=tuple(2 * each for each in shifted.weights))
