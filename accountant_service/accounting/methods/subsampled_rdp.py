"""Rényi accounting of sampled Gaussian releases, the usual method of DP libraries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from accountant_service.accounting.guarantee import Assumption, NeighbouringRelation
from accountant_service.accounting.methods.base import (
    Accountant,
    Bound,
    Question,
    require_noise,
)
from accountant_service.accounting.release_laws import ReleaseGroup
from accountant_service.errors import MethodNotApplicableError, TooExpensiveError
from accountant_service.numerics import renyi_conversion
from accountant_service.numerics.floats import rounding
from accountant_service.numerics.floats.special_functions import Array
from accountant_service.numerics.laws import sampled_gaussian, without_replacement
from accountant_service.numerics.laws.fixed_size_replacement import FixedSizeReplacement
from accountant_service.numerics.laws.replaced_record import ReplacedRecord

_POISSON: Final = "Mironov, Talwar & Zhang 2019, arXiv 1908.10530v1, Theorem 4 and section 3.3"
_FIXED: Final = "Wang, Balle & Kasiviswanathan 2019, arXiv 1808.00087v2, Theorem 9"
_REPLACED: Final = "proved in docs/accountants/pld.md, section A replaced record"
_PAIR: Final = "Zhu, Dong & Wang 2022, arXiv 2106.08567v4, Theorem 11"
_NODES_MAX: Final = 1.5e8  # quadrature nodes × orders of one question

# Orders to try: dense where the optimum usually is, then octaves, each used only while useful.
_BASE_ORDERS: Final = 1 + np.geomspace(0.02, 63, 140)
_OCTAVES: Final = [1 + np.geomspace(63, 126, 13)[1:] * 2.0**k for k in range(18)]


class SubsampledRdp(Accountant):
    """Rényi accounting: add the releases' divergences at each order; use the best order.

    * Poisson or no sampling: the divergence of the sampled Gaussian at integer and fractional
      orders, add/remove or zero-out neighbours.
    * Fixed size, add/remove: the batch with and without the record are the mixtures
      (1−q)·N(0) + q·N(2C) and N(0), so the Poisson formula at half the noise.
    * Poisson, replace-one: the divergence of the mixtures (1−q)·N(0) + q·N(C) and
      (1−q)·N(0) + q·N(−C), at any real order.
    * Fixed size, replace-one or zero-out: the lesser of the general bound for sampling without
      replacement and the divergence of a symmetric dominating pair, both at half the noise.
    * Laplace without sampling: the closed form.
    """

    name = "subsampled_rdp"
    title = "Rényi accounting of sampled releases"
    source = f"{_POISSON}; {_FIXED}"
    needs = "Gaussian noise with any sampling, or Laplace noise without sampling"
    proves = "an upper bound of ε under the stated sampling and relation"

    def assumptions(self, question: Question) -> tuple[Assumption, ...]:
        """Return the hypotheses of the theorems that bound the releases' Rényi divergences."""
        require_noise(self.name, question, ["gaussian", "laplace"])
        for group in question.release_groups:
            if group.atom.noise == "laplace" and group.rate < 1:
                raise MethodNotApplicableError(
                    "subsampled_rdp has no formula for sampled Laplace noise; use pld",
                    group.atom.pointer,
                )
        require_affordable(question)
        theorems = dict.fromkeys(_theorem(group, question) for group in question.release_groups)
        return tuple(Assumption(statement, True, source) for statement, source in theorems)

    def epsilon_bound(self, question: Question, delta: float) -> Bound:
        """Return ε at δ: the smallest over the Rényi orders, with its order."""
        if renyi_conversion.has_zero_epsilon(*next(_order_blocks(question)), delta):
            return Bound(0.0)
        value, order = _minimise_over_orders(
            question, lambda orders, m: renyi_conversion.tight_epsilons(orders, m, delta)
        )
        return Bound(rounding.up(max(value, 0.0)), order, renyi_conversion.TIGHTEST)

    def delta_bound(self, question: Question, epsilon: float) -> Bound:
        """Return δ at ε: the smallest over the Rényi orders, with its order."""
        log_delta, order = _minimise_over_orders(
            question,
            lambda orders, m: renyi_conversion.tight_log_deltas(
                orders, rounding.up_each(m), epsilon
            ),
        )
        value = rounding.up(math.exp(min(log_delta, 0.0)))
        return Bound(min(1.0, value), order, renyi_conversion.TIGHTEST)


def _has_fixed_sizes(group: ReleaseGroup, question: Question) -> bool:
    """Return whether batches have a fixed size and neighbouring datasets have equal sizes."""
    if group.rate == 1.0:
        return False
    added = question.relation is NeighbouringRelation.ADD_OR_REMOVE_ONE
    return group.atom.sampling == "fixed_size" and not added


def _theorem(group: ReleaseGroup, question: Question) -> tuple[str, str]:
    """Return the theorem that bounds a release's Rényi divergence: its hypothesis and source."""
    if group.rate == 1.0:
        return "the releases use all the data", "Mironov 2017, arXiv 1702.07476v3, Table II"
    if _has_fixed_sizes(group, question):
        statement = "another record, at most 2C away, takes a record's place in a batch"
        return statement, f"{_FIXED}; {_REPLACED}"
    if group.replaces_record_in("poisson", question.relation):
        return "each batch is a Poisson sample, and one record is replaced by another", _REPLACED
    if group.atom.sampling == "fixed_size":
        return "batches have a fixed size: if a record is absent, another takes its place", _PAIR
    return "each batch is a Poisson sample", _POISSON


def require_affordable(question: Question) -> None:
    """Raise TooExpensiveError if Gaussian releases' divergences need too many quadrature nodes."""
    nodes = _node_count(question, _BASE_ORDERS)
    if nodes > _NODES_MAX:
        raise TooExpensiveError(
            f"{len(question.release_groups)} different releases at these noise levels need "
            f"{nodes:.1e} evaluations, more than {_NODES_MAX:.0e}: compose fewer different releases"
        )


def _node_count(question: Question, orders: Array) -> float:
    """Return the number of quadrature nodes that these Rényi orders need in total."""
    highest = float(orders[-1])
    return len(orders) * math.fsum(
        _replaced_record(group).count_nodes(highest - 1)
        if group.replaces_record_in("poisson", question.relation)
        else sampled_gaussian.count_nodes(1.0, highest, group.sigma)
        for group in question.release_groups
        if group.rate < 1.0 and group.atom.noise == "gaussian"
    )


def _replaced_record(group: ReleaseGroup) -> ReplacedRecord:
    """Return the dominating pair of a Poisson-sampled Gaussian release under replace-one."""
    return ReplacedRecord(0.5 / group.sigma, group.rate)


def _order_blocks(question: Question) -> Iterator[tuple[Array, Array]]:
    """Yield Rényi orders α in increasing blocks, each with the mechanism's log-moments."""
    replaced = any(_has_fixed_sizes(group, question) for group in question.release_groups)
    for orders in (_BASE_ORDERS, *_OCTAVES):
        too_high = replaced and orders[-1] > without_replacement.ORDER_MAX
        if too_high or _node_count(question, orders) > _NODES_MAX:
            return  # fewer orders: a looser bound, still a bound
        yield orders, log_moments(question, orders)


def log_moments(question: Question, orders: Array) -> Array:
    """Return the mechanism's log-moments: (α − 1) times a bound on its Rényi divergence at each α.

    Args:
        question: a mechanism that this method has a formula for.
        orders: α > 1; at most 256 for fixed-size samples under zero-out or replace-one.
    """
    total = np.zeros_like(orders)
    for group in question.release_groups:
        total += group.count * release_log_moments(group, question, orders)
    return total


def release_log_moments(group: ReleaseGroup, question: Question, orders: Array) -> Array:
    """Return one release's log-moments: (α − 1) times a bound on its Rényi divergence at each α."""
    if group.atom.noise == "laplace":
        return _laplace_log_moments(group.sigma, orders)
    if group.replaces_record_in("poisson", question.relation):
        return _replaced_record(group).log_moments("removing", orders - 1)
    if _has_fixed_sizes(group, question):
        sigma = group.atom.noise_multiplier / question.relation.sensitivity
        unsampled = sampled_gaussian.log_moments(orders, 1.0, sigma)  # sampling never hurts
        theorem = without_replacement.log_moments(orders, group.rate, group.sigma)
        # zeroing a record is one of its replacements
        pair = FixedSizeReplacement(1 / group.sigma, group.rate).log_moments("removing", orders - 1)
        least: Array = np.minimum(np.minimum(theorem, pair), unsampled)
        return least
    return sampled_gaussian.log_moments(orders, group.rate, group.sigma)


def _laplace_log_moments(scale: float, orders: Array) -> Array:
    """Return the Laplace mechanism's log-moment at each order (Mironov 2017, Proposition 6).

    log[α/(2α−1)·e^{(α−1)/b} + (α−1)/(2α−1)·e^{−α/b}].
    """
    share = orders / (2 * orders - 1)
    return np.logaddexp(
        np.log(share) + (orders - 1) / scale, np.log1p(-share) - orders / scale
    ) + 4e-16 * (1 + orders / scale)


def _minimise_over_orders(
    question: Question, values: Callable[[Array, Array], Array]
) -> tuple[float, float | None]:
    """Return the least of `values` over Rényi orders, and the order that gives it.

    D_α never falls with α. Once a block of orders does not improve on the best value, or has its
    best value inside, no later block improves it: the search stops there and refines between the
    neighbours of the best order.
    """
    best, best_order = math.inf, None
    for orders, moments in _order_blocks(question):
        found = values(orders, moments)
        place = int(np.argmin(found))
        if not found[place] < best:
            break
        best, best_order = float(found[place]), float(orders[place])
        if place < len(orders) - 1:
            between = np.linspace(orders[max(place - 1, 0)], orders[place + 1], 17)[1:-1]
            found = values(between, log_moments(question, between))
            place = int(np.argmin(found))
            inside = (float(found[place]), float(between[place]))
            best, best_order = min((best, best_order), inside)
            break
    return best, best_order
