"""The Rényi filter takes releases with a δ, by addition within a part of δ that is frozen.

The adversary is the best one, exactly, on small mechanisms of which some reveal everything with a
small probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest

from accountant_service import mechanisms
from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.accounting.methods import Question, renyi_curves
from accountant_service.errors import CodedError
from accountant_service.ledger import plans
from accountant_service.ledger.filters import (
    PrivacyFilter,
    RenyiFilter,
    RenyiSumFilter,
    addition,
    from_json,
    read_charge,
)
from accountant_service.ledger.filters.base import Amounts, add
from accountant_service.ledger.rules import NewDataset
from accountant_service.ledger.step_plan import StepPlan
from accountant_service.mechanisms import canonical_form
from tests.support import kinds
from tests.support.discrete_mechanisms import (
    NOTHING,
    ZERO,
    Mechanism,
    mixture,
    random_weights,
)
from tests.support.filter_history import History
from tests.support.helpers import nightly

RELATION = NeighbouringRelation.ADD_OR_REMOVE_ONE
MOVING = (251, 1952, 3237)  # games in which the adversary exceeds δ


def plan(document: dict[str, Any]) -> StepPlan:
    return StepPlan.of(mechanisms.from_json(document))


def new(epsilon: float = 1.0, delta: float = 1e-6, planned: Any = None) -> PrivacyFilter:
    mechanism = None if planned is None else mechanisms.from_json(planned)
    return plans.choose_policy(
        NewDataset("d", 60_000, epsilon, delta, RELATION, "record", mechanism, "renyi", True)
    )


# --- the best adversary


@dataclass(frozen=True)
class Game:
    """Mechanisms, and a budget.

    Attributes:
        menu: the mechanisms.
        order: of the divergence.
        epsilon: ε, in units of log 2.
        delta: δ of the divergences.
        summed: δ of the sums.
    """

    menu: tuple[Mechanism, ...]
    order: float
    epsilon: int
    delta: float
    summed: float

    def limit(self, delta: float) -> int:
        """Return the micro-nats that a δ admits."""
        return RenyiFilter(self.order, self.epsilon * math.log(2), delta, RELATION).budget

    def cost(self, mechanism: Mechanism) -> Amounts:
        """Return micro-nats of the outcomes with a finite loss, and units of δ of the others."""
        moments, infinite = [0.0], []
        for each in (mechanism, mechanism.swapped()):
            moment = math.fsum(
                mass * 2.0 ** ((self.order - 1) * loss) for loss, mass in each.losses
            )
            moments.append(math.log(max(moment, 1.0)) / (self.order - 1))
            infinite.append(Fraction(each.infinite))
        return math.ceil(1e6 * max(moments)), addition.units_up(max(infinite))

    def attain(self, admits: Callable[[Amounts], bool], releases: int) -> float:
        """Return the largest δ at ε over all adaptive choices of releases that are admitted."""
        costs = [self.cost(each) for each in self.menu]

        @cache
        def best(taken: Amounts, left: int) -> Any:
            found = NOTHING
            for each, cost in zip(self.menu, costs, strict=True) if left else ():
                after = add(taken, cost)
                if admits(after):
                    found = np.maximum(found, each.before(best(after, left - 1)))
            return found

        return float(best((0, 0), releases)[:, ZERO + self.epsilon].max())

    def frozen(self) -> Callable[[Amounts], bool]:
        """Return the ledger's own condition."""
        epsilon, units = self.epsilon * math.log(2), addition.units_up(Fraction(self.summed))
        rest = RenyiFilter(self.order, epsilon, self.delta, RELATION)
        own = RenyiSumFilter(epsilon, self.delta + self.summed, RELATION, units, rest)
        limit = self.limit(self.delta)  # of the rest, computed once
        assert own.admits((limit, units))
        assert not own.admits((limit + 1, 0))
        assert not own.admits((0, units + 1))
        return lambda taken: taken[0] <= limit and taken[1] <= units

    def moving(self) -> Callable[[Amounts], bool]:
        """Return a faulty condition: the divergences have what the sums have not taken yet."""
        total, limit = self.delta + self.summed, cache(self.limit)

        def admits(taken: Amounts) -> bool:
            left = total - float(Fraction(taken[1], addition.UNITS))
            return left > 0 and taken[0] <= limit(left)

        return admits

    def uncharged(self) -> Callable[[Amounts], bool]:
        """Return a faulty condition: the probability of an infinite loss costs nothing."""
        limit = self.limit(self.delta + self.summed)
        return lambda taken: taken[0] <= limit


def random_game(seed: int) -> Game:
    """Return a game in which a release that may reveal everything is on the menu."""
    random = np.random.default_rng(seed)
    menu = [mixture(random_weights(random, int(random.integers(3, 6)))) for _ in range(2)]
    unit = 2.0 ** -int(random.integers(4, 9))
    menu.append(mixture([((None, None), unit)]))
    order, epsilon = float(random.choice((1.5, 2.0, 3.0, 5.0))), int(random.integers(0, 3))
    game = Game(tuple(menu), order, epsilon, 0.1, unit * int(random.integers(1, 3)))
    nats = 1e-6 * game.cost(menu[0])[0] * int(random.integers(1, 4)) + 3e-6
    # the least δ for which the conversion of Canonne, Kamath & Steinke admits these steps
    exponent = min((order - 1) * (nats - epsilon * math.log(2)), 0)
    delta = (1 - 1 / order) ** (order - 1) / order * math.exp(exponent)
    return replace(game, delta=min(max(delta, 2.0**-12), 0.4))


@pytest.mark.parametrize("seeds", [range(100), nightly(range(1000, 101_000))])
def test_no_adversary_beats_a_sum_of_its_own(seeds: range) -> None:
    for seed in seeds:
        game = random_game(seed)
        assert game.attain(game.frozen(), 4) <= game.delta + game.summed + 1e-12, seed


@pytest.mark.parametrize(("kind", "seeds"), [(Game.moving, MOVING), (Game.uncharged, (4, 7, 10))])
def test_a_delta_that_is_not_set_aside_is_beaten(kind: Any, seeds: tuple[int, ...]) -> None:
    for seed in seeds:
        game = random_game(seed)
        assert game.attain(kind(game), 4) > game.delta + game.summed + 1e-6, seed


# --- charges


def test_releases_with_a_delta_are_added_up() -> None:
    """A tenth of δ is for them: ten of a hundredth each, and their ε by Rényi divergence."""
    part = plan(kinds.approximate_dp(0.05, 1e-8))
    history = History(new())
    assert sum(1 for _ in range(20) if history.spend(part)) == 10
    policy = history.policy
    assert isinstance(policy, RenyiSumFilter)
    assert policy.is_sound()
    assert (policy.share_of(history.taken), history.left(part)) == (1.0, 0)
    assert history.left(plan(kinds.gaussian(30.0))), "that have no δ"
    assert policy.epsilon_of(history.taken) < 1
    # the weights are shifted by the first run alone
    assert not policy.may_be_replaced(history.taken)


def test_a_plan_with_a_delta_costs_what_its_steps_do() -> None:
    policy = new()
    charge = policy.compute_charge(plan(kinds.repeated(3, kinds.approximate_dp(0.1, 1e-9))), ())
    assert charge.reserved[-1] == 3 * addition.units_up(Fraction(1, 10**9))
    assert charge.spent(1)[-1] == addition.units_up(Fraction(1, 10**9))
    assert charge.refund(1) == charge.held(1)
    one = plan(kinds.repeated(3, kinds.approximate_dp(0.1, 1e-9)))
    assert policy.is_charge_sufficient(one, charge)
    for name in ("step_delta", "step_costs"):
        value = getattr(charge, name)
        less = value - 1 if name == "step_delta" else tuple(each * 99 // 100 for each in value)
        assert not policy.is_charge_sufficient(one, replace(charge, **{name: less}))


def test_parts_of_delta_are_at_most_the_whole() -> None:
    for delta in (1e-5, 3e-7, 0.1, 1.2345678901234567e-9, 1e-300):
        policy = new(1.0, delta)
        assert isinstance(policy, RenyiSumFilter)
        parts = Fraction(repr(policy.rest.delta)) + Fraction(policy.summed, addition.UNITS)
        assert 0.999 * delta < parts <= Fraction(repr(delta))
    forged = new().to_json() | {"summed_delta": "0.000002"}
    with pytest.raises(ValueError, match="no part of"):
        from_json(forged, 1.0, 1e-6, RELATION)
    policy = new()
    assert isinstance(policy, RenyiSumFilter)
    assert not replace(policy, summed=2 * policy.summed).is_sound()
    for order in (0.0, 1.0, -2.0, math.inf, math.nan):
        single = RenyiFilter(order, 1.0, policy.rest.delta, RELATION)
        assert not single.is_sound()
        assert not replace(policy, rest=single).is_sound()


EVERY_KIND = {
    "approximate": kinds.approximate_dp(0.1, 1e-9),
    "on a sample": kinds.poisson(0.1, kinds.approximate_dp(0.5, 1e-8)),
    "truncated": kinds.truncated_laplace(20.0, 400.0),
    "profile": {"kind": "privacy_profile", "epsilons": [0.0, 1.0], "deltas": [0.1, 1e-9]},
    "bins": {"kind": "balls_in_bins", "bins": 20, "mechanism": kinds.gaussian(2.0)},
    "response": kinds.randomized_response(4, 0.9),
    "curve": kinds.rdp([2.0, 8.0], [0.01, 0.05]),
}


@pytest.mark.parametrize("name", EVERY_KIND)
def test_every_kind_has_a_charge(name: str) -> None:
    one, policy = plan(EVERY_KIND[name]), new()
    chosen = policy.after_reserving(one, policy.nothing)
    charge = chosen.compute_charge(one, policy.nothing)
    assert any(charge.reserved)
    assert chosen.is_charge_sufficient(one, charge)
    assert read_charge(charge.to_json(), one.steps) == charge


def test_parallel_releases_are_refused() -> None:
    both = plan(kinds.parallel(kinds.laplace(9.0), kinds.laplace(10.0)))
    for ask in (
        lambda: new().compute_charge(both, ()),
        lambda: new().count_affordable_steps(both, (0,)),
        lambda: new(planned=kinds.parallel(kinds.laplace(9.0), kinds.laplace(10.0))),
    ):
        with pytest.raises(CodedError, match="parallel"):
            ask()


def test_a_planned_release_with_a_delta_has_the_best_order() -> None:
    policy = new(planned=kinds.approximate_dp(0.05, 1e-8))
    assert isinstance(policy, RenyiSumFilter)
    assert isinstance(policy.rest, RenyiFilter)
    assert policy.count_affordable_steps(plan(kinds.approximate_dp(0.05, 1e-8)), (0, 0)) == 10
    assert isinstance(new(planned=kinds.gaussian(30.0)), RenyiFilter)


def test_a_curve_is_at_least_the_moment_of_two_datasets() -> None:
    """Noise 2 on a sum that a sampled record moves by 1 or 2: the third moment in closed form."""
    release = kinds.poisson(0.5, kinds.gaussian_mixture(2.0, [1.0, 2.0], [0.5, 0.5]))
    shifts, chances = [0.0, 1.0, 2.0], [0.5, 0.25, 0.25]
    form = canonical_form(mechanisms.from_json(release))
    found = renyi_curves.log_moments(Question(form, RELATION), np.array([3.0]))[0]
    pairs = list(zip(shifts, chances, strict=True))
    moment = sum(
        p * q * r * math.exp((a * b + a * c + b * c) / 4)
        for a, p in pairs
        for b, q in pairs
        for c, r in pairs
    )
    assert math.log(moment) * (1 - 1e-12) <= found


def test_probabilities_of_infinite_losses_add_up() -> None:
    form = canonical_form(mechanisms.from_json(kinds.repeated(3, kinds.approximate_dp(0.1, 1e-9))))
    assert renyi_curves.infinite_mass(Question(form, RELATION)) == Fraction(3, 10**9)
