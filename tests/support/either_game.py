"""The either filter as a filter of `privacy_filter_game`, with exact numerics on small mechanisms.

The bookkeeping is the ledger's own: `EitherFilter`, its charges, and those of its two sides. Only
what a mechanism costs in a side is of the game: the fewest steps of the reference that dominate it,
and its Rényi divergence. Every other filter below breaks one rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.ledger.filters import EitherFilter, PrivacyFilter, RenyiFilter
from accountant_service.ledger.filters.base import Amounts, add, subtract
from accountant_service.ledger.filters.either import EitherCharge
from accountant_service.ledger.filters.reference import ReferenceCharge
from accountant_service.ledger.filters.reference import ReferenceFilter as LedgerReferenceFilter
from accountant_service.ledger.filters.renyi import STEP_COST_NATS_MAX
from tests.support.discrete_mechanisms import ZERO, Mechanism, mixture, random_weights, weaken
from tests.support.privacy_filter_game import Menu, OpenRun

RELATION = NeighbouringRelation.ADD_OR_REMOVE_ONE
_ROUNDING = 1e-12
_ORDERS = (1.5, 2.0, 3.0, 5.0, 9.0)


class Step(NamedTuple):
    """A step of a plan: a mechanism's index on the menu, as something that releases."""

    mechanism: int
    atom_counts: tuple[int, ...] = (1,)


class Plan(NamedTuple):
    """A plan of the game, with what the filters read of a plan."""

    step: Step
    steps: int


@dataclass(frozen=True, slots=True)
class Steps(LedgerReferenceFilter):
    """The reference side.

    Attributes:
        prices: the reference steps that a run costs, by its mechanism and length.
        returns: the most reference steps that one step dominates, by its mechanism.
    """

    prices: tuple[tuple[tuple[int, int], int], ...] = ()
    returns: tuple[int, ...] = ()

    def compute_charge(self, plan: Any, taken: Amounts) -> ReferenceCharge:  # noqa: ARG002
        """Return the run's price in reference steps."""
        price = dict(self.prices)[plan.step.mechanism, plan.steps]
        return ReferenceCharge(plan.steps, price, is_reference=plan.step.mechanism == 0)

    def compute_refund(self, plan: Any, charge: Any, granted: int) -> Amounts:
        """Return what the step that a run did not make is exchanged for."""
        most = charge.reference_steps * (charge.steps - granted) // charge.steps
        return min(self.returns[plan.step.mechanism], most), 0


@dataclass(frozen=True, slots=True)
class Divergence(RenyiFilter):
    """The Rényi side: `costs` has one step's divergence in atto-nats, by mechanism."""

    costs: tuple[int, ...] = ()
    limit: int = 0

    @property
    def budget(self) -> int:
        """The filter's own budget, computed once."""
        return self.limit

    def step_costs(self, step: Any) -> tuple[int, ...]:
        """Return the divergence of one step."""
        return (self.costs[step.mechanism],)


def divergence_of(mechanism: Mechanism, order: float) -> int:
    """Return a mechanism's Rényi divergence in both directions, in atto-nats, rounded up."""
    worst = 0.0
    for each in (mechanism, mechanism.swapped()):
        if each.infinite:
            return int(1e18 * STEP_COST_NATS_MAX)
        moment = math.fsum(mass * 2.0 ** ((order - 1) * loss) for loss, mass in each.losses)
        worst = max(worst, math.log(moment) / (order - 1))
    return math.ceil(1e18 * (worst + 1e-15))


@dataclass(frozen=True)
class Game:
    """A menu whose first mechanism is the reference, and a budget.

    Attributes:
        menu: the mechanisms.
        epsilon: ε, in units of log 2.
        deltas: δ of each side.
        order: of the Rényi side.
    """

    menu: Menu
    epsilon: int
    deltas: tuple[float, float]
    order: float

    @property
    def delta(self) -> float:
        """δ of the budget."""
        return sum(self.deltas)

    def attained(self, profile: Any) -> float:
        """Return a profile at ε in the worse direction."""
        return float(profile[:, ZERO + self.epsilon].max())

    def sides(self, share: float = 1.0) -> tuple[PrivacyFilter, PrivacyFilter]:
        """Return both sides, each with a multiple of its δ."""
        epsilon, (first, second) = self.epsilon * math.log(2), self.deltas
        first, second = first * share, second * share
        copies = 0
        while copies < 6 and self.attained(self.menu.power(0, copies + 1)) <= first:
            copies += 1
        prices = tuple(
            ((each, steps), self._price(each, steps, copies))
            for each in range(len(self.menu.mechanisms))
            for steps in (1, 2)
        )
        returns = tuple(self._return(each, copies) for each in range(len(self.menu.mechanisms)))
        costs = tuple(divergence_of(each, self.order) for each in self.menu.mechanisms)
        limit = RenyiFilter(self.order, epsilon, second, RELATION).budget
        return (
            Steps(epsilon, first, RELATION, steps=copies, prices=prices, returns=returns),
            Divergence(self.order, epsilon, second, RELATION, costs=costs, limit=limit),
        )

    def filter(self, share: float = 1.0) -> EitherFilter:
        """Return the either filter of this game."""
        sides = self.sides(share)
        return EitherFilter(sides[0].epsilon, self.delta, RELATION, sides)

    def _price(self, mechanism: int, steps: int, most: int) -> int:
        """Return the fewest reference steps that dominate a run; one too many if none do."""
        if mechanism == 0:
            return steps
        run = self.menu.power(mechanism, steps)
        for copies in range(1, most + 1):
            if (run - self.menu.power(0, copies)).max() <= _ROUNDING:
                return copies
        return most + 1

    def _return(self, mechanism: int, most: int) -> int:
        """Return the most reference steps that one step dominates."""
        step = self.menu.power(mechanism, 1)
        copies = 0
        while copies < most and (self.menu.power(0, copies + 1) - step).max() <= _ROUNDING:
            copies += 1
        return copies


def random_game(seed: int) -> Game:
    """Return a game with two or three mechanisms, whose δ admits a few steps of the first."""
    random = np.random.default_rng(seed)
    weights = [random_weights(random, int(random.integers(3, 6)))]
    for _ in range(int(random.integers(1, 3))):
        is_like = random.random() < 0.5
        bits = int(random.integers(3, 6))
        weights.append(weaken(weights[0], random) if is_like else random_weights(random, bits))
    menu = Menu([mixture(each) for each in weights])
    epsilon, order = int(random.integers(0, 3)), float(random.choice(_ORDERS))
    steps = [int(random.integers(1, 4)) for _ in range(2)]
    first = float(menu.power(0, steps[0])[:, ZERO + epsilon].max())
    each = menu.mechanisms[int(random.integers(len(weights)))]
    cost = divergence_of(each, order) * steps[1] / 1e18
    # the least δ for which the conversion of Canonne, Kamath & Steinke admits these steps
    second = (
        (1 - 1 / order) ** (order - 1)
        / order
        * math.exp(min((order - 1) * (cost + 3e-6 - epsilon * math.log(2)), 0))
    )
    deltas = [
        min(max(delta * random.choice((1.0, 1.0, 0.5)), 2.0**-12), 0.4) for delta in (first, second)
    ]
    return Game(menu, epsilon, (deltas[0], deltas[1]), order)


class Run(NamedTuple):
    """An open run: its plan, its charge and its grants."""

    plan: Plan
    charge: EitherCharge
    granted: int


class Book(NamedTuple):
    """A state: the amounts taken, and the open runs."""

    taken: Amounts
    runs: tuple[Run, ...]


class Either:
    """The either filter in the game."""

    delta_share: ClassVar[float] = 1.0

    def __init__(self, game: Game) -> None:
        self.policy = game.filter(self.delta_share)

    def start(self) -> Book:
        """Return the state in which nothing is taken."""
        return Book(self.policy.nothing, ())

    def open_runs(self, state: Book) -> list[OpenRun]:
        """Return the open runs as the adversary sees them."""
        return [
            OpenRun(run.plan.step.mechanism, run.granted, run.plan.steps - run.granted)
            for run in state.runs
        ]

    def reserve(self, state: Book, mechanism: int, steps: int) -> list[Book]:
        """Return the state after a reservation, or none."""
        plan = Plan(Step(mechanism), steps)
        charge = self.charge(plan, state.taken)
        taken = add(state.taken, charge.reserved)
        if not self.policy.admits(taken):
            return []
        return [Book(taken, (*state.runs, Run(plan, charge, 0)))]

    def charge(self, plan: Any, taken: Amounts) -> EitherCharge:
        """Return a plan's cost in both sides."""
        return self.policy.compute_charge(plan, taken)

    def grant(self, state: Book, run: int) -> Book:
        """Return the state after one more step of a run."""
        granted = state.runs[run]._replace(granted=state.runs[run].granted + 1)
        return state._replace(runs=(*state.runs[:run], granted, *state.runs[run + 1 :]))

    def close(self, state: Book, run: int) -> Book:
        """Return the state after a run's end."""
        ended = state.runs[run]
        refund = self.refund(ended)
        return Book(subtract(state.taken, refund), state.runs[:run] + state.runs[run + 1 :])

    def refund(self, run: Run) -> Amounts:
        """Return what a run gives back."""
        plan: Any = run.plan
        found = run.charge.refund(run.granted)
        return found or self.policy.compute_refund(plan, run.charge, run.granted)

    def without_misses(self, amounts: Amounts) -> Amounts:
        """Return amounts in which no side has missed anything."""
        parts = self.policy.split(amounts)
        return tuple(each for _, _, own in parts for each in (0, *own))


class WholeDelta(Either):
    """A faulty filter whose sides each have the whole δ."""

    delta_share = 2.0


class MissesForgotten(Either):
    """A faulty filter in which a side that missed a run goes on as if it had not been made."""

    def reserve(self, state: Book, mechanism: int, steps: int) -> list[Book]:
        """Return the state after a reservation, without the misses."""
        return [
            book._replace(taken=self.without_misses(book.taken))
            for book in super().reserve(state, mechanism, steps)
        ]

    def refund(self, run: Run) -> Amounts:
        """Return what a run gives back; no miss was taken."""
        return self.without_misses(super().refund(run))


class ChargedOnce(MissesForgotten):
    """A faulty filter that charges each run to the first side that can take it, and not to both."""

    def charge(self, plan: Any, taken: Amounts) -> EitherCharge:
        """Return a plan's cost in one side; the other misses it."""
        charge = super().charge(plan, taken)
        first, second = charge.sides
        if first.own is None:
            return charge
        return replace(charge, sides=(first, replace(second, own=None)))


class MissesGivenBack(Either):
    """A faulty filter that gives a miss back at the end of a run that released something."""

    def refund(self, run: Run) -> Amounts:
        """Return what a run gives back, and every miss."""
        refund = super().refund(run)
        parts = zip(run.charge.sides, self.policy.split(refund), strict=True)
        return tuple(
            each for side, (_, _, own) in parts for each in (1 if side.own is None else 0, *own)
        )
