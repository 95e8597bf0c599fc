"""Privacy loss distributions with proved lower and upper bounds.

This is the default method, and the referee of all other methods.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from accountant_service.accountants.base import DELTA_MIN, Accountant, Bound, Question, ReleaseGroup
from accountant_service.errors import MethodNotApplicableError, TooExpensiveError
from accountant_service.guarantee import Assumption, Interval, NeighbouringRelation
from accountant_service.numerics import certified_interval
from accountant_service.numerics.engines import small_noise
from accountant_service.numerics.epsilon_curve import SECONDS_MAX, epsilon_curve
from accountant_service.numerics.floats import rounding
from accountant_service.numerics.floats.bounds import Bounds, check_bounds, relative_width
from accountant_service.numerics.laws import gaussian
from accountant_service.numerics.laws.dominating_pair import (
    GaussianPair,
    LaplacePair,
    Release,
    ReleaseLaw,
    total_variation,
)
from accountant_service.numerics.laws.fixed_size_replacement import FixedSizeReplacement
from accountant_service.numerics.laws.replaced_record import ReplacedRecord

_POISSON: Final = "Zhu, Dong & Wang 2022, arXiv 2106.08567v4, Theorem 11"
_REPLACED: Final = "proved in docs/accountants/pld.md, section A replaced record"
_GAUSSIAN: Final = "Balle & Wang 2018, arXiv 1805.06530v2, Theorem 8"
_RELEASES_MAX: Final = 1200


class Pld(Accountant):
    """Privacy loss distribution: a proved interval around ε or δ, whose upper end is the answer.

    The bounds are computed in numerics/certified_interval.py and proved in docs/accountants/pld.md.
    Unsampled Gaussian releases have the closed form of the analytic Gaussian mechanism.
    """

    name = "pld"
    title = "Privacy loss distribution, proved from both sides"
    source = f"{_POISSON}; connect the dots: arXiv 2207.04380v1; papers/003 eq. (4) at q = 1"
    needs = (
        "Gaussian or Laplace noise; with sampling, add/remove or zero-out neighbours, or Gaussian "
        "noise and replace-one"
    )
    proves = "a lower and an upper bound of ε, at most a relative 1e-3 apart, usually 1e-8"

    def assumptions(self, question: Question) -> tuple[Assumption, ...]:
        """Return the hypothesis that every release has a dominating pair."""
        groups = question.release_groups
        if len(groups) > _RELEASES_MAX:
            raise TooExpensiveError(
                f"pld composes at most {_RELEASES_MAX} different releases, not {len(groups)}"
            )
        for group in groups:
            _require_dominating_pair(group, question)
        sources = dict.fromkeys(_source(group, question) for group in groups)
        statement = "each release is dominated by a pair of one-dimensional distributions"
        return tuple(Assumption(statement, True, source) for source in sources)

    def epsilon_bound(self, question: Question, delta: float) -> Bound:
        """Return the certified interval around ε."""
        mu, _, releases = _split_releases(question)
        if releases:
            return _capped_by_unsampled(
                question, _enclose_epsilon(question, releases, delta), delta
            )
        lower = rounding.down(float(gaussian.epsilon_lower(delta, mu)))
        return _bound(question, Bounds(lower, rounding.up(float(gaussian.epsilon(delta, mu)))))

    def epsilon_bounds(self, step: Question, times: Sequence[int], delta: float) -> list[Bound]:
        """Return the certified interval after each number of repetitions, from one shared curve."""
        _, _, releases = _split_releases(step)
        if not releases or small_noise.is_useful(releases):
            return super().epsilon_bounds(step, times, delta)
        try:
            curve = epsilon_curve(releases, times, delta, step.tolerance)
        except TimeoutError:
            raise TooExpensiveError(
                f"the curve of pld took more than {SECONDS_MAX:g} s: ask for fewer points"
            ) from None
        return [
            _capped_by_unsampled(step.repeated(each), bounds, delta)
            for each, bounds in zip(times, curve, strict=True)
        ]

    def delta_bound(self, question: Question, epsilon: float) -> Bound:
        """Return the certified interval around δ, which is at most δ without sampling."""
        mu, pure, releases = _split_releases(question)
        exact = 0.0
        if mu > 0:
            exact = math.exp(float(gaussian.log_delta(max(epsilon - pure, 0.0), mu)))
        cap = 1.0 if epsilon < pure else min(1.0, rounding.up(exact))
        if not releases:
            return _bound(question, Bounds(rounding.down(exact), cap))
        cap = min(cap, total_variation(releases))
        return _bound(question, _capped_at(_enclose_delta(question, releases, epsilon), cap))


def dominating_pairs(question: Question) -> list[tuple[ReleaseLaw, int]]:
    """Return the dominating pairs of the releases, with their counts.

    Args:
        question: a mechanism that `Pld` has checked.
    """
    mu, _, releases = _split_releases(question)
    return releases or [(Release(GaussianPair(mu)), 1)]


def _bound(question: Question, bounds: Bounds) -> Bound:
    """Return proved bounds as a `Bound`; the lower end is 0 if the pairs are not attained."""
    lower = bounds.lower if question.is_attained else 0.0
    return Bound(bounds.upper, interval=Interval(lower, bounds.upper))


def _enclose_epsilon(
    question: Question, releases: list[tuple[ReleaseLaw, int]], delta: float
) -> Bounds:
    """Return bounds of ε: 0 if the total variation is at most δ, else from the engines."""
    if total_variation(releases) <= delta:
        return Bounds(0.0, 0.0)
    found = small_noise.epsilon_bounds(releases, delta)
    if found is not None and relative_width(found) <= question.tolerance:
        return found
    return _intersection(
        found, certified_interval.epsilon_bounds(releases, delta, question.tolerance)
    )


def _enclose_delta(
    question: Question, releases: list[tuple[ReleaseLaw, int]], epsilon: float
) -> Bounds:
    """Return bounds of δ: in closed form if the noise is small, else from the engines."""
    found = small_noise.delta_bounds(releases, epsilon)
    if found is not None and found.upper - found.lower <= question.tolerance * found.upper:
        return found
    return _intersection(
        found, certified_interval.delta_bounds(releases, epsilon, question.tolerance)
    )


def _intersection(one: Bounds | None, other: Bounds) -> Bounds:
    """Return the intersection of two proved intervals.

    Raises:
        ContradictionError: they are disjoint, so one of them is wrong.
    """
    if one is None:
        return other
    lower, upper = max(one.lower, other.lower), min(one.upper, other.upper)
    check_bounds(lower, max(upper, DELTA_MIN))  # a smaller δ underflows
    return Bounds(min(lower, upper), upper)


def _capped_at(bounds: Bounds, cap: float) -> Bounds:
    """Return the bounds with an upper end of at most another proved upper bound."""
    return _intersection(Bounds(0.0, cap), bounds)


def _capped_by_unsampled(question: Question, bounds: Bounds, delta: float) -> Bound:
    """Return the bound of ε, at most the upper bound for the same releases without sampling.

    Sampling never hurts: Gaussian releases have a closed form, Laplace ones their pure ε.
    """
    if bounds.upper <= bounds.lower * (1 + question.tolerance):  # no cap is needed
        return _bound(question, bounds)
    mu, pure, releases = _split_releases(question)
    cap = rounding.up(float(gaussian.epsilon(delta, mu)) + pure)
    if total_variation(releases) <= delta:
        cap = 0.0
    return _bound(question, _capped_at(bounds, cap))


def _require_dominating_pair(group: ReleaseGroup, question: Question) -> None:
    """Raise MethodNotApplicableError if a release has no proved pair under the relation."""
    if group.rate == 1.0:
        return
    relation, sampling = question.relation, group.atom.sampling
    if relation is NeighbouringRelation.REPLACE_ONE and group.atom.noise == "gaussian":
        return
    added = relation is NeighbouringRelation.ADD_OR_REMOVE_ONE
    zeroed = relation is NeighbouringRelation.ZERO_OUT_ONE and sampling == "poisson"
    if not (added or zeroed):
        raise MethodNotApplicableError(
            f"pld has no proved dominating pair for {group.atom.noise} noise and {sampling} "
            f"sampling under {relation}; use subsampled_rdp",
            group.atom.pointer,
        )
    if group.atom.noise == "laplace" and sampling == "fixed_size":
        raise MethodNotApplicableError(
            "pld has no proved dominating pair for Laplace noise on fixed-size samples",
            group.atom.pointer,
        )


def _source(group: ReleaseGroup, question: Question) -> str:
    """Return the source of the proof that the pair dominates a release of the group."""
    if group.rate == 1.0:
        return _GAUSSIAN
    return _REPLACED if question.relation is NeighbouringRelation.REPLACE_ONE else _POISSON


def _split_releases(question: Question) -> tuple[float, float, list[tuple[ReleaseLaw, int]]]:
    """Return μ and ε of all Gaussian and Laplace releases unsampled, and the pairs to compose.

    Unsampled Gaussian releases compose to one Gaussian release. If there are no others, its closed
    form is exact, and the list of pairs is empty.
    """
    laplace = [p for p in question.release_groups if p.atom.noise == "laplace"]
    exact = [p for p in question.release_groups if p.rate == 1.0 and p.atom.noise == "gaussian"]
    releases = [
        (_dominating_pair(p, question), p.count) for p in question.release_groups if p not in exact
    ]
    if releases and exact:
        releases.append((Release(GaussianPair(_mu(exact))), 1))
    gaussians = [p for p in question.release_groups if p.atom.noise == "gaussian"]
    return _mu(gaussians), math.fsum(p.count / p.sigma for p in laplace), releases


def _mu(groups: Sequence[ReleaseGroup]) -> float:
    """Return μ = √(Σ T/σ²) of Gaussian releases without sampling."""
    return math.sqrt(math.fsum(group.count / group.sigma**2 for group in groups))


def _dominating_pair(group: ReleaseGroup, question: Question) -> ReleaseLaw:
    """Return the dominating pair of one release of the group."""
    if group.atom.noise == "laplace":
        return Release(LaplacePair(1 / group.sigma), group.rate)
    if group.replaces_record_in("poisson", question.relation):
        return ReplacedRecord(0.5 / group.sigma, group.rate)  # 2C apart, each C from absence
    if group.replaces_record_in("fixed_size", question.relation):
        return FixedSizeReplacement(1 / group.sigma, group.rate)
    return Release(GaussianPair(1 / group.sigma), group.rate)
