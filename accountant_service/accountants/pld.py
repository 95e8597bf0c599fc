"""Privacy loss distributions, two-sided: the default method and the referee of all others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from accountant_service.accountants.base import DELTA_MIN, Accountant, Bound, Part, Question
from accountant_service.errors import MethodNotApplicableError, TooExpensiveError
from accountant_service.guarantee import Assumption, Interval, NeighbouringRelation
from accountant_service.numerics import gaussian, rounding, small_noise, two_sided
from accountant_service.numerics.epsilon_curve import SECONDS_MAX, epsilon_curve
from accountant_service.numerics.privacy_loss import (
    GaussianRatio,
    LaplaceRatio,
    Release,
    total_variation,
)
from accountant_service.numerics.two_sided import Bounds

_POISSON: Final = "Zhu, Dong & Wang 2022, arXiv 2106.08567v4, Theorem 11"
_GAUSSIAN: Final = "Balle & Wang 2018, arXiv 1805.06530v2, Theorem 8"
_PARTS_MAX: Final = 1200


class Pld(Accountant):
    """A proved interval around the true ε: its upper end is the answer.

    See numerics/two_sided.py for the bounds and docs/accountants/pld.md for their proofs. Unsampled
    Gaussian releases have the closed form of the analytic Gaussian mechanism.
    """

    name = "pld"
    title = "Privacy loss distribution, two-sided"
    source = f"{_POISSON}; connect the dots: arXiv 2207.04380v1; papers/003 eq. (4) at q = 1"
    needs = "Gaussian or Laplace noise; with sampling, add/remove or zero-out neighbours"
    proves = "a lower and an upper bound of ε, a relative 1e-3 apart or less, mostly 1e-8"

    def assumptions(self, question: Question) -> tuple[Assumption, ...]:
        """A dominating pair for every release."""
        parts = question.parts
        if len(parts) > _PARTS_MAX:
            raise TooExpensiveError(
                f"pld composes at most {_PARTS_MAX} different releases, not {len(parts)}"
            )
        for part in parts:
            _require_dominating_pair(part, question)
        sampled = any(part.rate < 1 for part in parts)
        statement = "each release is dominated by a pair of one-dimensional distributions"
        return (Assumption(statement, True, _POISSON if sampled else _GAUSSIAN),)

    def epsilon_bound(self, question: Question, delta: float) -> Bound:
        """The certified interval around ε."""
        mu, _, releases = _releases(question)
        if releases:
            return _capped(question, _enclose_epsilon(question, releases, delta), delta)
        lower = rounding.down(float(gaussian.epsilon_lower(delta, mu)))
        return _bound(question, Bounds(lower, rounding.up(float(gaussian.epsilon(delta, mu)))))

    def epsilon_bounds(self, step: Question, times: Sequence[int], delta: float) -> list[Bound]:
        """The same for many numbers of repetitions, at the cost of a few."""
        _, _, releases = _releases(step)
        if not releases or small_noise.is_useful(releases):
            return super().epsilon_bounds(step, times, delta)
        try:
            curve = epsilon_curve(releases, times, delta, step.tolerance)
        except TimeoutError:
            raise TooExpensiveError(
                f"the curve of pld took more than {SECONDS_MAX:g} s: ask for fewer points"
            ) from None
        return [
            _capped(step.repeated(each), bounds, delta)
            for each, bounds in zip(times, curve, strict=True)
        ]

    def delta_bound(self, question: Question, epsilon: float) -> Bound:
        """The certified interval around δ, capped alike."""
        mu, pure, releases = _releases(question)
        exact = 0.0
        if mu > 0:
            exact = math.exp(float(gaussian.log_delta(max(epsilon - pure, 0.0), mu)))
        cap = 1.0 if epsilon < pure else min(1.0, rounding.up(exact))
        if not releases:
            return _bound(question, Bounds(rounding.down(exact), cap))
        cap = min(cap, total_variation(releases))
        return _bound(question, _below(_enclose_delta(question, releases, epsilon), cap))


def pairs(question: Question) -> list[tuple[Release, int]]:
    """The dominating pairs of a question that this method answers, with their counts."""
    mu, _, releases = _releases(question)
    return releases or [(Release(GaussianRatio(mu)), 1)]


def _bound(question: Question, bounds: Bounds) -> Bound:
    """The interval, from 0 where the pairs charged are not attained."""
    lower = bounds.lower if question.is_attained else 0.0
    return Bound(bounds.upper, interval=Interval(lower, bounds.upper))


def _enclose_epsilon(
    question: Question, releases: list[tuple[Release, int]], delta: float
) -> Bounds:
    """Bounds of ε: 0 where hardly a record takes part, closed forms for little noise, or others."""
    if total_variation(releases) <= delta:
        return Bounds(0.0, 0.0)
    found = small_noise.epsilon_bounds(releases, delta)
    if found is not None and two_sided.relative_width(found) <= question.tolerance:
        return found
    return _intersection(found, two_sided.epsilon_bounds(releases, delta, question.tolerance))


def _enclose_delta(
    question: Question, releases: list[tuple[Release, int]], epsilon: float
) -> Bounds:
    """Bounds of δ, alike."""
    found = small_noise.delta_bounds(releases, epsilon)
    if found is not None and found.upper - found.lower <= question.tolerance * found.upper:
        return found
    return _intersection(found, two_sided.delta_bounds(releases, epsilon, question.tolerance))


def _intersection(one: Bounds | None, other: Bounds) -> Bounds:
    """Both intervals' common part.

    Raises:
        ContradictionError: they have none, so one of them is wrong.
    """
    if one is None:
        return other
    lower, upper = max(one.lower, other.lower), min(one.upper, other.upper)
    two_sided.consistent(lower, max(upper, DELTA_MIN))  # below it a δ underflows
    return Bounds(min(lower, upper), upper)


def _below(bounds: Bounds, cap: float) -> Bounds:
    """Bounds whose upper end is at most another proved upper bound."""
    return _intersection(Bounds(0.0, cap), bounds)


def _capped(question: Question, bounds: Bounds, delta: float) -> Bound:
    """Bounds of ε, the upper one at most that of the same releases without sampling.

    Sampling never hurts: Gaussian releases have a closed form, Laplace ones their pure ε.
    """
    if bounds.upper <= bounds.lower * (1 + question.tolerance):  # no cap is needed
        return _bound(question, bounds)
    mu, pure, releases = _releases(question)
    cap = rounding.up(float(gaussian.epsilon(delta, mu)) + pure)
    if total_variation(releases) <= delta:
        cap = 0.0
    return _bound(question, _below(bounds, cap))


def _require_dominating_pair(part: Part, question: Question) -> None:
    """Under which relation a dominating pair of a sampled release is proved here."""
    if part.rate == 1.0:
        return
    relation, sampling = question.relation, part.atom.sampling
    added = relation is NeighbouringRelation.ADD_OR_REMOVE_ONE
    zeroed = relation is NeighbouringRelation.ZERO_OUT_ONE and sampling == "poisson"
    if not (added or zeroed):
        raise MethodNotApplicableError(
            f"pld has no proved dominating pair for {sampling} sampling under {relation}; "
            "use subsampled_rdp",
            part.atom.pointer,
        )
    if part.atom.noise == "laplace" and sampling == "fixed_size":
        raise MethodNotApplicableError(
            "pld has no proved dominating pair for Laplace noise on fixed-size samples",
            part.atom.pointer,
        )


def _releases(question: Question) -> tuple[float, float, list[tuple[Release, int]]]:
    """μ of all Gaussian releases and ε of all Laplace ones, unsampled, and what needs a lattice.

    Unsampled Gaussian releases compose to a single one; if there is nothing else, its closed form
    is exact and there is no lattice.
    """
    laplace = [p for p in question.parts if p.atom.noise == "laplace"]
    exact = [p for p in question.parts if p.rate == 1.0 and p.atom.noise == "gaussian"]
    releases = [(_release(p), p.count) for p in question.parts if p not in exact]
    if releases and exact:
        releases.append((Release(GaussianRatio(_mu(exact))), 1))
    gaussians = [p for p in question.parts if p.atom.noise == "gaussian"]
    return _mu(gaussians), math.fsum(p.count / p.sigma for p in laplace), releases


def _mu(parts: Sequence[Part]) -> float:
    return math.sqrt(math.fsum(part.count / part.sigma**2 for part in parts))


def _release(part: Part) -> Release:
    if part.atom.noise == "laplace":
        return Release(LaplaceRatio(1 / part.sigma), part.rate)
    return Release(GaussianRatio(1 / part.sigma), part.rate)
