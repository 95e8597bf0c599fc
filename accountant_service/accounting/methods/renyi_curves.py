"""Upper bounds on the Rényi divergence of one release of any kind, at every order.

With M(α) = (α − 1)·D_α, the logarithm of the moment E_Q[(P/Q)^α]:

* Gaussian noise with any sampling, and Laplace noise without: as `subsampled_rdp`.
* A release that is dominated by a Gaussian pair of distance μ: M ≤ α(α − 1)μ²/2. Discrete Gaussian
  noise: the same with μ = Δ/σ (Canonne, Kamath & Steinke 2020, arXiv 2004.00010v7, Proposition 5).
* ρ-zCDP: M ≤ ρα(α − 1), by definition. A Rényi curve: M is convex in α and M(1) = 0, so a chord
  bounds it between two of its orders, and below the first.
* A pure ε-DP release is a function of randomized response (Kairouz, Oh & Viswanathan 2015, arXiv
  1311.0776v4, Theorem 3.4): M ≤ log((e^{αε} + e^{(1−α)ε})/(1 + e^ε)). A sample of it is pure too.
* Any other release is a function of its dominating pair (Blackwell's theorem): M is at most the
  pair's, in the worse direction.

A release with an infinite loss of probability δ has a curve on all other outcomes of its pair. That
of an (ε, δ)-DP release is the curve of a pure one, by the theorem of Kairouz, Oh & Viswanathan.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Final

import numpy as np

from accountant_service.accounting import release_laws
from accountant_service.accounting.guarantee import NeighbouringRelation
from accountant_service.accounting.methods import ACCOUNTANTS, subsampled_rdp
from accountant_service.accounting.methods.base import Question
from accountant_service.accounting.release_laws import ReleaseGroup
from accountant_service.errors import MethodNotApplicableError
from accountant_service.numerics.floats import rounding
from accountant_service.numerics.floats.special_functions import Array
from accountant_service.numerics.laws.dominating_pair import DIRECTIONS

_USUAL: Final = {"gaussian", "laplace"}  # the kinds with formulas of their own


def infinite_mass(question: Question) -> Fraction:
    """Return an upper bound on the probability that a loss of a mechanism's releases is infinite.

    It is the sum of those of all releases.

    Raises:
        MethodNotApplicableError: no pair is proved for a release, or a hypothesis fails.
    """
    require_proof(question)
    groups, relation = question.release_groups, question.relation
    return sum((group.count * _infinite_mass(group, relation) for group in groups), Fraction())


def log_moments(question: Question, orders: Array, *, allows_infinite: bool = False) -> Array:
    """Return upper bounds on (α − 1) times the Rényi divergence of a mechanism, at each order.

    Args:
        question: a mechanism without parallel releases.
        orders: α > 1; at most 256 for fixed-size samples under zero-out or replace-one.
        allows_infinite: whether outcomes with an infinite loss are left out, because their
            probability, `infinite_mass`, is charged elsewhere.

    Raises:
        MethodNotApplicableError: no finite curve is proved for a release, or a hypothesis fails.
    """
    require_proof(question)
    for group in () if allows_infinite else question.release_groups:
        if _infinite_mass(group, question.relation):
            raise MethodNotApplicableError(
                f"no finite Rényi curve is proved for {group.atom.noise}"
                f"{' on a sample' if group.rate < 1 else ''}. Use a dataset with the filter "
                '"reference" or "addition", or a new one with "renyi" and no planned_mechanism',
                group.atom.pointer,
            )
    total = np.zeros_like(orders)
    for group in question.release_groups:
        total += group.count * _of_release(replace(group, count=1), question, orders)
    return total


def require_proof(question: Question) -> None:
    """Raise if a hypothesis fails under which a mechanism's Rényi divergences are bounded.

    Raises:
        MethodNotApplicableError: it does, or a release has no proved bound.
        TooExpensiveError: the bounds take too long to compute.
    """
    groups = question.release_groups
    kinds = {group.atom.noise for group in groups}
    for group in groups:
        if group.atom.sampling == "shuffled":
            raise MethodNotApplicableError(
                "the ledger cannot charge shuffled batches: it has no proved Rényi divergence for "
                "them. Use sampling poisson or fixed_size, or sampling none with one step an epoch",
                group.atom.pointer,
            )
        if group.atom.is_parallel:
            raise MethodNotApplicableError(
                "a Rényi filter has no divergence for parallel releases, which differ by record. "
                'Use a dataset with the filter "reference" or "addition"',
                group.atom.pointer,
            )
    is_usual = kinds <= _USUAL and not any(map(_is_sampled_laplace, question.release_groups))
    subsampled_rdp.require_affordable(question)
    accountant = ACCOUNTANTS["subsampled_rdp" if is_usual else "pld"]
    for assumption in accountant.check_assumptions(question):
        if not assumption.holds:
            raise MethodNotApplicableError(f"a hypothesis fails: {assumption.statement}")


def _is_sampled_laplace(group: ReleaseGroup) -> bool:
    """Return whether a release is Laplace noise on a sample."""
    return group.atom.noise == "laplace" and group.rate < 1.0


def _of_release(group: ReleaseGroup, question: Question, orders: Array) -> Array:
    """Return the log-moments of one release."""
    noise, relation = group.atom.noise, question.relation
    if noise in _USUAL and not _is_sampled_laplace(group):
        return subsampled_rdp.release_log_moments(group, question, orders)
    if noise == "discrete_gaussian" and group.rate == 1.0:
        deviation, sensitivity = map(float, group.atom.parameters)  # type: ignore[arg-type]
        return _of_gaussian(rounding.up((sensitivity / deviation) ** 2), orders)
    if release_laws.is_renyi_curve(group):
        return _of_curve(group, relation, orders)
    cost = release_laws.simple_cost([group], relation)
    if cost.is_bounded:
        return _of_pure(rounding.fraction_up(cost.loss.epsilon), orders)
    if cost.is_gaussian:
        return _of_gaussian(rounding.up(cost.mu**2), orders)
    law = release_laws.dominating_pair(group, relation)
    found = [law.log_moments(direction, orders - 1) for direction in DIRECTIONS]
    return np.maximum(np.maximum(*found), 0.0)


def _infinite_mass(group: ReleaseGroup, relation: NeighbouringRelation) -> Fraction:
    """Return an upper bound on the probability that the loss of one release is infinite."""
    noise = group.atom.noise
    if noise in _USUAL or release_laws.is_renyi_curve(group):
        return Fraction()
    cost = release_laws.simple_cost([replace(group, count=1)], relation)
    if cost.is_known:
        return cost.loss.delta
    law = release_laws.dominating_pair(group, relation)
    found = max(law.infinite_mass(direction) for direction in DIRECTIONS)
    if release_laws.is_renyi_curve(replace(group, rate=1.0)):
        found = max(found, rounding.SMALLEST)  # the pair's ends where its δ is no normal double
    return Fraction(found)


def _of_gaussian(squared_mu: float, orders: Array) -> Array:
    """Return the log-moments of a Gaussian release with this μ²."""
    return rounding.up_each(orders * (orders - 1) * squared_mu / 2)


def _of_pure(epsilon: float, orders: Array) -> Array:
    """Return bounds on the log-moments of any ε-DP release.

    Those of randomized response; they are at most those of ε²/2-zCDP (Bun & Steinke 2016, arXiv
    1605.02065v1, Proposition 1.4), which has the smaller rounding error where ε is small.
    """
    exact = np.logaddexp(orders * epsilon, (1 - orders) * epsilon) - np.logaddexp(0.0, epsilon)
    exact += 4e-16 * (1 + orders * epsilon)
    least: Array = np.minimum(exact, _of_gaussian(epsilon**2, orders))
    return least


def _of_curve(group: ReleaseGroup, relation: NeighbouringRelation, orders: Array) -> Array:
    """Return the log-moments of a release that is specified by its Rényi divergences."""
    if group.atom.noise == "zcdp":
        return _of_gaussian(2 * release_laws.zcdp_rho(group), orders)
    own, divergences = map(np.array, release_laws.renyi_curve(group, relation))
    divergences, own = divergences[own > 1], own[own > 1]
    moments = np.interp(orders, np.append(1.0, own), np.append(0.0, (own - 1) * divergences))
    moments[orders > own[-1]] = np.inf
    return rounding.up_each(moments * (1 + 1e-15))
