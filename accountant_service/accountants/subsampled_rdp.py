"""Rényi accounting of sampled Gaussian releases: the workhorse of today's libraries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from accountant_service.accountants.base import Accountant, Bound, Part, Question, require_noise
from accountant_service.errors import MethodNotApplicableError, TooExpensiveError
from accountant_service.guarantee import Assumption, NeighbouringRelation
from accountant_service.numerics import conversion, rounding, sampled_gaussian, without_replacement
from accountant_service.numerics.special import Array

_POISSON: Final = "Mironov, Talwar & Zhang 2019, arXiv 1908.10530v1, Theorem 4 and section 3.3"
_FIXED: Final = "Wang, Balle & Kasiviswanathan 2019, arXiv 1808.00087v2, Theorem 9"
_PAIR: Final = "Zhu, Dong & Wang 2022, arXiv 2106.08567v4, Theorem 11"
_NODES_MAX: Final = 1.5e8  # quadrature nodes × orders of one question

# Orders to try: dense where the optimum usually is, then octaves, each used only while useful.
_BASE_ORDERS: Final = 1 + np.geomspace(0.02, 63, 140)
_OCTAVES: Final = [1 + np.geomspace(63, 126, 13)[1:] * 2.0**k for k in range(18)]


class SubsampledRdp(Accountant):
    """Sum of Rényi divergences at each order, and the best conversion to (ε, δ).

    * Poisson or no sampling: the divergence of the sampled Gaussian at integer and fractional
      orders, add/remove or zero-out neighbours.
    * Fixed size, add/remove: the batch with and without the record are the mixtures
      (1−q)·N(0) + q·N(2C) and N(0), so the Poisson formula at half the noise.
    * Replace-one, and fixed size with zero-out: the general bound for sampling without
      replacement, at half the noise. Its proof takes three outputs apart, without the record, with
      it and with its replacement, pairwise at most 2C apart: Poisson samples have the same form.
    * Laplace without sampling: the closed form.
    """

    name = "subsampled_rdp"
    title = "Rényi accounting of sampled releases"
    source = f"{_POISSON}; {_FIXED}"
    needs = "Gaussian noise with any sampling, or Laplace noise without sampling"
    proves = "an upper bound of ε under the stated sampling and relation"

    def assumptions(self, question: Question) -> tuple[Assumption, ...]:
        """Whichever theorem each release needs; all hypotheses are visible in the mechanism."""
        require_noise(self.name, question, ["gaussian", "laplace"])
        for part in question.parts:
            if part.atom.noise == "laplace" and part.rate < 1:
                raise MethodNotApplicableError(
                    "subsampled_rdp has no formula for sampled Laplace noise; use pld",
                    part.atom.pointer,
                )
        _check_work(question)
        theorems = dict.fromkeys(_theorem(part, question) for part in question.parts)
        return tuple(Assumption(statement, True, source) for statement, source in theorems)

    def epsilon_bound(self, question: Question, delta: float) -> Bound:
        """The least ε over the orders."""
        if conversion.divergence_is_free(*next(_curves(question)), delta):
            return Bound(0.0)
        value, order = _least(
            question, lambda orders, m: conversion.tight_epsilons(orders, m, delta)
        )
        return Bound(rounding.up(max(value, 0.0)), order, conversion.TIGHTEST)

    def delta_bound(self, question: Question, epsilon: float) -> Bound:
        """The least δ over the orders."""
        log_delta, order = _least(
            question,
            lambda orders, m: conversion.tight_log_deltas(orders, rounding.up_each(m), epsilon),
        )
        value = rounding.up(math.exp(min(log_delta, 0.0)))
        return Bound(min(1.0, value), order, conversion.TIGHTEST)


def _is_replaced(part: Part, question: Question) -> bool:
    """Whether a sampled record's place in the batch is taken by another's."""
    if part.rate == 1.0:
        return False
    replaced = question.relation is NeighbouringRelation.REPLACE_ONE
    zeroed = question.relation is NeighbouringRelation.ZERO_OUT_ONE
    return replaced or (zeroed and part.atom.sampling == "fixed_size")


def _theorem(part: Part, question: Question) -> tuple[str, str]:
    if part.rate == 1.0:
        return "the releases use all the data", "Mironov 2017, arXiv 1702.07476v3, Table II"
    if _is_replaced(part, question):
        return "a record's place in a batch is taken by another record, 2C away at most", _FIXED
    if part.atom.sampling == "fixed_size":
        return "batches have a fixed size; without the record another takes its place", _PAIR
    return "each batch is a Poisson sample", _POISSON


def _check_work(question: Question) -> None:
    nodes = _nodes(question, _BASE_ORDERS)
    if nodes > _NODES_MAX:
        raise TooExpensiveError(
            f"{len(question.parts)} different releases at these noise levels need {nodes:.1e} "
            f"evaluations, more than {_NODES_MAX:.0e}: compose fewer different releases"
        )


def _nodes(question: Question, orders: Array) -> float:
    """How many terms these orders take."""
    highest = float(orders[-1])
    return len(orders) * math.fsum(
        sampled_gaussian.nodes_needed(1.0, highest, part.sigma)
        for part in question.parts
        if part.rate < 1.0
    )


def _curves(question: Question) -> Iterator[tuple[Array, Array]]:
    """Blocks of increasing orders with the composed log-moments (α − 1)·D_α."""
    replaced = any(_is_replaced(part, question) for part in question.parts)
    for orders in (_BASE_ORDERS, *_OCTAVES):
        too_high = replaced and orders[-1] > without_replacement.ORDER_MAX
        if too_high or _nodes(question, orders) > _NODES_MAX:
            return  # fewer orders: a looser bound, still a bound
        yield orders, log_moments(question, orders)


def log_moments(question: Question, orders: Array) -> Array:
    """The composed (α − 1)·D_α at each order: what a Rényi filter would charge.

    Args:
        question: of parts this method has a formula for.
        orders: > 1; up to 256 where a part is sampled and its record replaced.
    """
    total = np.zeros_like(orders)
    for part in question.parts:
        total += part.count * _part_log_moments(part, question, orders)
    return total


def _part_log_moments(part: Part, question: Question, orders: Array) -> Array:
    if part.atom.noise == "laplace":
        return _laplace_log_moments(part.sigma, orders)
    if _is_replaced(part, question):
        sigma = part.atom.noise_multiplier / question.relation.sensitivity
        unsampled = sampled_gaussian.log_moments(orders, 1.0, sigma)  # sampling never hurts
        return np.minimum(without_replacement.log_moments(orders, part.rate, part.sigma), unsampled)
    return sampled_gaussian.log_moments(orders, part.rate, part.sigma)


def _laplace_log_moments(scale: float, orders: Array) -> Array:
    """log[α/(2α−1)·e^{(α−1)/b} + (α−1)/(2α−1)·e^{−α/b}] (Mironov 2017, Proposition 6)."""
    share = orders / (2 * orders - 1)
    return np.logaddexp(
        np.log(share) + (orders - 1) / scale, np.log1p(-share) - orders / scale
    ) + 4e-16 * (1 + orders / scale)


def _least(
    question: Question, values: Callable[[Array, Array], Array]
) -> tuple[float, float | None]:
    """The least value over the orders, and its order.

    D_α never falls with α, so once a block of orders does not improve on the best, or has its
    best inside, no later block will; the search stops there and looks between the neighbours of
    the best order.
    """
    best, best_order = math.inf, None
    for orders, moments in _curves(question):
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
