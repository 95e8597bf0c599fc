"""The Rényi filter of several orders: one supermartingale, frozen when a dataset is created.

Let L be the privacy loss of everything released so far, and R(k) the sum of (α(k) − 1)·D of the
releases at order α(k). With frozen weights w(k) that sum to at most 1,
W = Σ w(k)·e^{(α(k)−1)L−R(k)} is a supermartingale that starts at most at 1. Releases are admitted
while (1 − e^{ε−L})₊ ≤ δ·W holds for every L. Then δ(ε) = E[(1 − e^{ε−L})₊] ≤ δ·E[W] ≤ δ for every
adaptive choice of releases (proof: docs/accountants/filters.md). With one order this is that of
`renyi`: the supremum is then Proposition 12 of Canonne, Kamath & Steinke (arXiv
2004.00010v7).

Amounts are micro-nats of Rényi divergence, one integer per order, and round up. An amount of 10⁹
nats or more counts as infinite; its order contributes 0 to W.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import ClassVar, Final

import numpy as np

from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.ledger.filters import renyi
from accountant_service.ledger.filters.base import Amounts, Json, PrivacyFilter
from accountant_service.ledger.filters.renyi import DivergenceFilter, RenyiCharge
from accountant_service.ledger.step_plan import StepPlan
from accountant_service.mechanisms import CanonicalForm
from accountant_service.numerics.floats import rounding
from accountant_service.numerics.floats.special_functions import Array

_MICRO: Final = 1_000_000
_INFINITE_MICRONATS: Final = int(renyi.STEP_COST_NATS_MAX) * _MICRO
_ORDER_MIN: Final = 1.01  # one micro-nat more changes e^{−R} by far more than a rounding error
_ORDER_MAX: Final = 512.0
_CELLS: Final = 512  # of the interval that contains the maximum over L
_STEEP: Final = 0.5  # a relative change over half a cell; from here on a constant is the bound
_EXPONENT_MAX: Final = 300.0  # the product of two capped factors, summed over orders, is finite
_BISECTIONS: Final = 60
_SHARE_UNITS: Final = 1 << 16
_EPSILON_MAX: Final = 1e12  # no budget is as large

# How mixtures are chosen: fits start at a few lowest orders, and use every second candidate order.
_LOWEST_BELOW_SINGLE: Final = 3
_SPACING: Final = 2
_ORDERS_MAX: Final = 6
_LOSSES: Final = 24  # where the fit computes W; what is admitted never depends on the fit's grid
_NEWTON_STEPS: Final = 4
_FIT_ITERATIONS: Final = 25
_SMALLEST_WEIGHT: Final = 2e-3
_SHIFT_MAX: Final = 0.5  # of the weights, to the best order of the first run
_SHIFT_PER_SHARE: Final = 5.0  # relative to the share of the budget that it takes
_WEIGHT_UNIT: Final = 2.0**-20  # sums of multiples are exact


@dataclass(frozen=True, slots=True)
class RenyiMixtureFilter(DivergenceFilter):
    """A filter that adds up Rényi divergences of several orders, each with a weight.

    Attributes:
        orders: increasing, each in [1.01, 512], the same for every release.
        weights: one per order, positive, with a sum of at most 1.
        epsilon: ε of the budget.
        delta: δ of the budget.
        relation: when two datasets are neighbours.

    Raises:
        ValueError: an attribute is out of its range.
    """

    has_scalar_caps: ClassVar[bool] = False  # a share is one of all orders together

    orders: tuple[float, ...]
    weights: tuple[float, ...]
    epsilon: float
    delta: float
    relation: NeighbouringRelation

    def __post_init__(self) -> None:
        """Refuse orders, weights and budgets that are out of range or do not match."""
        pairs = zip(self.orders, self.orders[1:], strict=False)
        if not self.orders or any(not low < high for low, high in pairs):
            raise ValueError(f"orders must be increasing, and at least one: {self.orders}")
        if self.orders[0] < _ORDER_MIN or self.orders[-1] > _ORDER_MAX:
            raise ValueError(f"orders must be in [{_ORDER_MIN}, {_ORDER_MAX:g}]: {self.orders}")
        if len(self.weights) != len(self.orders) or not all(w > 0 for w in self.weights):
            raise ValueError(f"there must be one positive weight per order: {self.weights}")
        if sum(map(Fraction, self.weights)) > 1:
            raise ValueError(f"weights must sum to at most 1: {self.weights}")
        if not (0 <= self.epsilon <= _EPSILON_MAX and 0 < self.delta < 1):
            raise ValueError(f"no budget: ε = {self.epsilon}, δ = {self.delta}")

    @property
    def description(self) -> str:
        """A sentence that describes the filter."""
        parts = ", ".join(
            f"{order:g} (weight {weight:g})"
            for order, weight in zip(self.orders, self.weights, strict=True)
        )
        return f"Rényi filter of a mixture of the orders {parts}"

    def admits(self, taken: Amounts) -> bool:
        """Return whether releases with these Rényi divergences provably stay within the budget.

        If they are not, no larger amounts are.

        Args:
            taken: micro-nats at each order, everything that is granted or held.
        """
        return self._has_guarantee(taken, self.epsilon)

    def epsilon_of(self, taken: Amounts) -> float:
        """Return the least ε that is proved for these divergences at the budget's δ, rounded up.

        It is 0 for nothing taken, at most the budget's ε if and only if `admits`, and infinite if
        all amounts are.
        """
        return _find_least_epsilon(self, taken)

    def share_of(self, taken: Amounts) -> float:
        """Return the fraction of the budget that these Rényi divergences use up.

        It is the inverse of the largest factor by which they grow and are still admitted.
        """
        return _find_share(self, taken)

    def entry_fields(self) -> Json:
        """Return the filter's orders and weights as ledger-entry fields."""
        return {"orders": list(self.orders), "weights": list(self.weights)}

    def to_json(self) -> Json:
        """Return the filter's orders and weights as JSON, for storage."""
        return {"filter": self.name} | self.entry_fields()

    def count_steps(self, step_costs: tuple[int, ...], taken: Amounts) -> int | None:
        """Return how many more steps of these costs fit; None if they cost nothing.

        Args:
            step_costs: atto-nats of one step at each order.
            taken: micro-nats at each order.
        """
        if not self.admits(taken):
            return 0
        endless = (max(amount, _INFINITE_MICRONATS) for amount in taken)
        pairs = zip(step_costs, taken, endless, strict=True)
        if self.admits(tuple(limit if cost else amount for cost, amount, limit in pairs)):
            return None
        low, high = 0, 1
        while self.admits(add_steps(taken, step_costs, high)):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            admitted = self.admits(add_steps(taken, step_costs, middle))
            low, high = (middle, high) if admitted else (low, middle)
        return low

    def _has_guarantee(self, taken: Amounts, epsilon: float) -> bool:
        """Return whether these Rényi divergences provably imply (ε, δ)-DP at this ε.

        The condition is (1 − e^{ε−L})₊ ≤ δ·W for all L.
        """
        if not any(taken):
            return True
        bounds = _compute_cell_bounds(self.orders) @ self._round_down_terms(taken, epsilon)
        return bool(bounds.min() * (1 - rounding.MARGIN) >= 1 / self.delta)

    def _round_down_terms(self, taken: Amounts, epsilon: float) -> Array:
        """Return, per order, a lower bound on its term in the sum that decides if ε is proved.

        The term of the order α is w·e^{(α−1)ε−R}, with the order's weight w, and R = (α − 1) times
        the divergence taken.

        Larger amounts never give a larger value: one micro-nat changes the exponent by 10⁻⁸ at
        least, far more than a rounding error of the exponential function.
        """
        amounts = np.array([min(each, _INFINITE_MICRONATS) for each in taken], dtype=float)
        factors = np.array(self.orders) - 1
        spent = factors * (amounts / _MICRO) * (1 + rounding.MARGIN)
        credit = factors * epsilon * (1 - rounding.MARGIN)
        exponents = credit + np.log(self.weights) * (1 + rounding.MARGIN) - spent
        terms = np.exp(np.minimum(exponents, _EXPONENT_MAX)) * (1 - rounding.MARGIN)
        return np.where(amounts < _INFINITE_MICRONATS, terms, 0.0)


@dataclass(frozen=True, slots=True)
class LateMixtureFilter(RenyiMixtureFilter):
    """A mixture in which the first run shifts weight to its own best order.

    Nothing was released before the first run, so its choice tells nothing, and any weights that sum
    to at most 1 are sound from then on. The orders stay. The weight that is shifted is in
    proportion to what the run takes of the budget, so a small run costs later ones little.

    Attributes:
        general: the weights without a run.
    """

    oldest_reader: ClassVar[str] = "0009"
    general: tuple[float, ...]

    @property
    def initial(self) -> LateMixtureFilter:
        """The filter that the dataset was created with."""
        return replace(self, weights=self.general)

    def may_be_replaced(self, taken: Amounts) -> bool:
        """Return whether nothing is spent or held, so that a run may still shift weight."""
        return not any(taken)

    def after_reserving(self, plan: StepPlan, taken: Amounts) -> LateMixtureFilter:
        """Return the filter with weight shifted to a first plan's best order."""
        if not self.may_be_replaced(taken):
            return self
        first = self.initial
        costs = renyi.compute_step_costs(
            plan.step, self.relation, self.orders, allows_infinite=True
        )
        reserved = RenyiCharge(plan.steps, costs).reserved
        if not any(reserved):
            return first
        shift = min(_SHIFT_MAX, _SHIFT_PER_SHARE * first.share_of(reserved))
        budgets = [
            renyi.RenyiFilter(order, self.epsilon, self.delta, self.relation).budget
            for order in self.orders
        ]
        steps = [budget / max(cost, 1) for budget, cost in zip(budgets, costs, strict=True)]
        best = steps.index(max(steps))
        weights = [(1 - shift) * weight for weight in self.general]
        weights[best] += shift
        units = (max(math.floor(weight / _WEIGHT_UNIT), 1) * _WEIGHT_UNIT for weight in weights)
        found = tuple(units)
        return replace(self, weights=found) if sum(map(Fraction, found)) <= 1 else first

    def allows_replacement(self, other: PrivacyFilter, plan: StepPlan, taken: Amounts) -> bool:
        """Return whether reserving a plan may replace this filter by `other`: by other weights."""
        return (
            self.may_be_replaced(taken)
            and isinstance(other, LateMixtureFilter)
            and replace(other, weights=self.weights) == self  # its own are checked when it is made
        )

    def entry_fields(self) -> Json:
        """Return the filter's orders and weights as ledger-entry fields."""
        return {
            "filter": self.name,
            "orders": list(self.orders),
            "weights": list(self.weights),
            "general_weights": list(self.general),
        }


@lru_cache(maxsize=4096)  # a balance is shown far more often than it changes
def _find_least_epsilon(policy: RenyiMixtureFilter, taken: Amounts) -> float:
    """Find the least ε that is proved for these divergences, rounded up."""
    if policy._has_guarantee(taken, 0.0):
        return 0.0
    low, high = 0.0, policy.epsilon
    while not policy._has_guarantee(taken, high):
        if high > _EPSILON_MAX:
            return math.inf
        low, high = high, 2 * high + 1
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if policy._has_guarantee(taken, middle) else (middle, high)
    return high


@lru_cache(maxsize=4096)  # each grant of a run shows the share that its plan takes
def _find_share(policy: RenyiMixtureFilter, taken: Amounts) -> float:
    """Return the fraction of a budget that Rényi divergences use up; see `share_of`."""
    if not any(taken):
        return 0.0
    low, high = 0, _SHARE_UNITS  # of the factor, in units of 1/_SHARE_UNITS
    while policy.admits(_scale(taken, high)):
        low, high = high, 2 * high
    while high - low > max(1, low >> 12):
        middle = (low + high) // 2
        low, high = (middle, high) if policy.admits(_scale(taken, middle)) else (low, middle)
    return _SHARE_UNITS / low if low else math.inf


def _scale(taken: Amounts, units: int) -> Amounts:
    """Multiply divergences by the fraction `units` / `_SHARE_UNITS`, rounded up."""
    return tuple(-(-each * units // _SHARE_UNITS) for each in taken)


def add_steps(taken: Amounts, step_costs: Sequence[int], steps: int) -> Amounts:
    """Add the cost of `steps` further steps to the amounts, rounded up once for all of them."""
    return tuple(
        amount + renyi.compute_cost(cost, steps)
        for amount, cost in zip(taken, step_costs, strict=True)
    )


@lru_cache(maxsize=256)
def _compute_cell_bounds(orders: tuple[float, ...]) -> Array:
    """Return coefficients of linear lower bounds on the ratio by which the filter proves an ε.

    It has two rows per cell of privacy losses. The least product bounds the ratio for all x.

    Here x = L − ε, and a row's value is its product with the terms of W at L = ε. All coefficients
    are at least 0, so that a row's value never falls when a term grows.

    W/(1 − e^{−x}) = Σ term(k)·g(k, x) with g(k, x) = e^{(α(k)−1)x}/(1 − e^{−x}). Each g is
    log-convex, with the slope α − 1 − 1/(e^x − 1) of its logarithm. So every g falls left of
    log(1 + 1/(α_max − 1)) and rises right of log(1 + 1/(α_min − 1)): the minimum lies between. This
    interval is divided into cells. On a cell, g is above its tangent at the centre, and also above
    the constant g(centre)·e^{−|slope|·half width}, which bounds a steep g better. The sum of these
    straight lines is least at one of the two ends: two rows per cell.
    """
    factors = np.array(orders) - 1
    slack = 1e-9  # the rounding of the ends
    first, last = math.log1p(1 / factors[-1]), math.log1p(1 / factors[0])
    edges = np.geomspace(first * (1 - slack), last * (1 + slack), _CELLS + 1)
    centres = 0.5 * (edges[1:] + edges[:-1])[:, None]
    half_widths = 0.5 * np.diff(edges)[:, None] * (1 + slack) + 1e-12 * centres
    rises = (factors - 1 / np.expm1(centres)) * half_widths  # over half a cell, relative to g
    values = np.exp(np.minimum(factors * centres, _EXPONENT_MAX)) / -np.expm1(-centres)
    values *= 1 - rounding.MARGIN
    flat = np.exp(-np.abs(rises)) * (1 - rounding.MARGIN)
    ends = [1 + sign * rises - rounding.MARGIN * (1 + np.abs(rises)) for sign in (1, -1)]
    rows = np.concatenate([values * np.where(np.abs(rises) < _STEEP, end, flat) for end in ends])
    rows.flags.writeable = False
    return rows


def choose_mixture(
    epsilon: float,
    delta: float,
    relation: NeighbouringRelation,
    planned: CanonicalForm | None = None,
) -> RenyiMixtureFilter:
    """Return the filter whose orders and weights admit the most steps of typical runs.

    The mixture maximises the geometric mean of 1 + steps over the reference runs of
    `renyi.choose_filter`; the 1 keeps runs from counting that no mixture admits. For a
    planned mechanism alone its best order is the best mixture, and is returned: let m(α) =
    (α − 1)·D_α, convex in α, and T the most steps that any order admits. φ(α, x) = (α − 1)(ε + x) −
    T·m(α) − log(1 − e^{−x}) + log δ is concave in α and convex in x, and max_α min_x φ = 0. So at
    some x, φ ≤ 0 for all α, and δ·W/(1 − e^{−x}) ≤ 1 for every mixture of more than T steps.

    Args:
        epsilon: ε of the budget.
        delta: δ of the budget.
        relation: when two datasets are neighbours.
        planned: one step of the planned mechanism.
    """
    single = renyi.choose_filter(epsilon, delta, relation, planned)
    single_order = RenyiMixtureFilter((single.order,), (1.0,), epsilon, delta, relation)
    return single_order if planned is not None else _choose_general_mixture(single_order)


def choose_late_mixture(
    epsilon: float, delta: float, relation: NeighbouringRelation
) -> LateMixtureFilter:
    """Return the filter of a dataset without a plan, whose first run may shift its weights."""
    found = choose_mixture(epsilon, delta, relation)
    return LateMixtureFilter(found.orders, found.weights, epsilon, delta, relation, found.weights)


@lru_cache(maxsize=256)
def _choose_general_mixture(single_order: RenyiMixtureFilter) -> RenyiMixtureFilter:
    """Return the best weighting of several orders; `single_order` if none is better."""
    candidates = renyi.CANDIDATE_ORDERS
    moments = renyi.compute_reference_step_costs(single_order.relation) * (candidates - 1)
    place = int(np.searchsorted(candidates, single_order.orders[0]))
    best, best_value = single_order, 0.0  # a mixture that admits nothing is no improvement
    for lowest in range(max(place - _LOWEST_BELOW_SINGLE, 0), place + 1):
        chosen = np.arange(lowest, len(candidates), _SPACING)[:_ORDERS_MAX]
        fit = _MixtureWeightsFit(
            candidates[chosen], moments[:, chosen], single_order.epsilon, single_order.delta
        )
        value, weights = fit.maximise()
        if value > best_value:
            best_value = value
            best = _build_filter(single_order, candidates[chosen], weights)
    return best


def _build_filter(
    single_order: RenyiMixtureFilter, orders: Array, weights: Array
) -> RenyiMixtureFilter:
    """Build a filter from fitted weights: drop negligible ones, and round the others down."""
    kept = weights >= min(_SMALLEST_WEIGHT, float(weights.max()))
    shares = weights[kept] / weights[kept].sum()
    units = np.floor(shares * (1 - 1e-12) / _WEIGHT_UNIT) * _WEIGHT_UNIT
    return RenyiMixtureFilter(
        tuple(map(float, orders[kept])),
        tuple(map(float, units)),
        single_order.epsilon,
        single_order.delta,
        single_order.relation,
    )


class _MixtureWeightsFit:
    """A search for weights of Rényi orders with which a filter admits the most steps of runs.

    Args:
        orders: increasing.
        moments: (α − 1)·D of one step of each run (rows) at each order (columns).
        epsilon: ε of the budget.
        delta: δ of the budget.
    """

    def __init__(self, orders: Array, moments: Array, epsilon: float, delta: float) -> None:
        factors = orders - 1
        losses = np.geomspace(math.log1p(1 / factors[-1]), math.log1p(1 / factors[0]), _LOSSES)
        self._moments = moments
        self._exponents = (
            factors * (losses[:, None] + epsilon)
            - np.log(-np.expm1(-losses))[:, None]
            + math.log(delta)
        )

    def maximise(self) -> tuple[float, Array]:
        """Return the largest mean of log(1 + steps) over the runs, and the weights that give it."""
        count = self._moments.shape[1]
        start = np.full(count, math.log(0.4 / count))
        start[0] = math.log(0.6)
        from scipy import optimize  # 25 MB, and .3 s of every start, for one question

        found = optimize.minimize(
            self._loss_and_gradient,
            start,
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": _FIT_ITERATIONS},
        )
        return -float(found.fun), np.exp(found.x - np.logaddexp.reduce(found.x))

    def _loss_and_gradient(self, logits: Array) -> tuple[float, Array]:
        """Return the negative mean of log(1 + steps), and its gradient with respect to `logits`."""
        log_weights = logits - np.logaddexp.reduce(logits)
        steps, shares = self._count_steps(log_weights)
        rates = (shares * self._moments).sum(axis=1)
        steps = np.maximum(steps, 0.0)
        each = shares / (rates * (1 + steps))[:, None] * (steps > 0)[:, None]
        gradient = each.mean(axis=0)
        gradient -= np.exp(log_weights) * gradient.sum()
        return -float(np.log1p(steps).mean()), -gradient

    def _count_steps(self, log_weights: Array) -> tuple[Array, Array]:
        """Return each run's admitted steps (a real number), and each order's share in the bound.

        At each loss, log W falls with the steps and is convex. Newton's method starts where one
        order suffices, left of the solution, and approaches it from there.
        """
        exponents = self._exponents + log_weights
        moments = self._moments[:, None, :]
        steps = (exponents / moments).max(axis=2)
        for _ in range(_NEWTON_STEPS):
            terms = exponents - steps[:, :, None] * moments
            top = terms.max(axis=2, keepdims=True)
            shares = np.exp(terms - top)
            total = shares.sum(axis=2)
            shares /= total[:, :, None]
            steps += (top[:, :, 0] + np.log(total)) / (shares * moments).sum(axis=2)
        tightest = steps.argmin(axis=1)
        runs = np.arange(len(steps))
        return steps[runs, tightest], shares[runs, tightest]
