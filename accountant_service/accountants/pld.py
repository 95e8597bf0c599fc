"""Privacy loss distributions with proved lower and upper bounds.

This is the default method, and the referee of all other methods.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from accountant_service.accountants import release_laws
from accountant_service.accountants.base import DELTA_MIN, Accountant, Bound, Question
from accountant_service.accountants.release_laws import ReleaseGroup
from accountant_service.errors import (
    MethodNotApplicableError,
    NoFiniteEpsilonError,
    TooExpensiveError,
)
from accountant_service.guarantee import Assumption, Interval
from accountant_service.numerics import certified_interval
from accountant_service.numerics.engines import enumeration, small_noise
from accountant_service.numerics.epsilon_curve import SECONDS_MAX, epsilon_curve
from accountant_service.numerics.floats import rounding
from accountant_service.numerics.floats.bounds import Bounds, check_bounds, relative_width
from accountant_service.numerics.laws import gaussian
from accountant_service.numerics.laws.characteristic_function import has_characteristic_function
from accountant_service.numerics.laws.dominating_pair import (
    DIRECTIONS,
    Composition,
    GaussianPair,
    Release,
    ReleaseLaw,
    infinite_mass,
    total_variation,
)

_REVEALING_SHARE: Final = 1e-3  # of δ, beyond which a mass of infinite loss is worth naming
_RELEASES_MAX: Final = 1200


class Pld(Accountant):
    """Privacy loss distribution (the default method): a proved interval around ε or δ.

    The bounds are computed in numerics/certified_interval.py and proved in docs/accountants/pld.md.
    Unsampled Gaussian releases have the closed form of the analytic Gaussian mechanism.
    """

    name = "pld"
    title = "Privacy loss distribution, proved from both sides"
    source = (
        f"{release_laws.POISSON_SOURCE}; connect the dots: arXiv 2207.04380v1; "
        "papers/003 eq. (4) at q = 1"
    )
    needs = (
        "any kind of mechanism; fixed-size samples of Gaussian releases with add/remove or "
        "replace-one neighbours, of others with replace-one"
    )
    proves = (
        "an upper bound of ε, and for most kinds a lower one, at most a relative 1e-3 apart, "
        "usually 1e-6"
    )

    def assumptions(self, question: Question) -> tuple[Assumption, ...]:
        """Return the hypotheses under which the releases' dominating pairs are proved."""
        groups = question.release_groups
        if len(groups) > _RELEASES_MAX:
            raise TooExpensiveError(
                f"pld composes at most {_RELEASES_MAX} different releases, not {len(groups)}"
            )
        for group in groups:
            release_laws.require_dominating_pair(group, question.relation)
        found = dict.fromkeys(release_laws.hypothesis(group, question.relation) for group in groups)
        return tuple(Assumption(statement, True, source) for statement, source in found)

    def epsilon_bound(self, question: Question, delta: float) -> Bound:
        """Return the upper end of a proved interval around ε at δ, with the interval."""
        mu, _, releases = _split_releases(question)
        if releases:
            return _capped_by_unsampled(
                question, _enclose_epsilon(question, releases, delta), delta
            )
        lower = rounding.down(float(gaussian.epsilon_lower(delta, mu)))
        return _bound(question, Bounds(lower, rounding.up(float(gaussian.epsilon(delta, mu)))))

    def epsilon_bounds(self, step: Question, times: Sequence[int], delta: float) -> list[Bound]:
        """Return a proved interval's upper end for ε after each number of repetitions of `step`."""
        _, _, releases = _split_releases(step)
        if not releases or small_noise.is_useful(releases) or _infinite_mass(releases) > 0:
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

    def explain_infinite_epsilon(self, question: Question, delta: float) -> NoFiniteEpsilonError:
        """Return the error: the events with a δ of their own, and the least δ of all."""
        relation = question.relation
        least, worst = max(
            ((_infinite_mass(_split_releases(each)[2]), each) for each in question.alternatives),
            key=lambda pair: pair[0],
        )
        masses = [
            (group, _infinite_mass([(release_laws.dominating_pair(group, relation), group.count)]))
            for group in worst.release_groups
        ]
        revealing = [group for group, mass in masses if mass > _REVEALING_SHARE * delta]
        if not revealing or least < delta:
            return super().explain_infinite_epsilon(question, delta)
        kinds = dict.fromkeys(group.atom.noise for group in revealing)
        way_out = "choose a larger δ"
        if "privacy_profile" in kinds:
            way_out += ", or give the privacy_profile a point with a smaller δ"
        return NoFiniteEpsilonError(
            f"no finite ε holds at δ = {delta:g}: as far as is known of {', '.join(kinds)}, the "
            f"privacy loss may be infinite with a probability of {least:.6g}. To get a finite ε, "
            f"{way_out}",
            revealing[0].atom.pointer if len(revealing) == 1 else None,
        )

    def delta_bound(self, question: Question, epsilon: float) -> Bound:
        """Return the upper end of a proved interval around δ at ε, with the interval."""
        mu, pure, releases = _split_releases(question)
        exact = 0.0
        if mu > 0 and pure < math.inf:
            exact = math.exp(float(gaussian.log_delta(max(epsilon - pure, 0.0), mu)))
        cap = 1.0 if epsilon < pure else min(1.0, rounding.up(exact))
        if not releases:
            return _bound(question, Bounds(rounding.down(exact), cap))
        cap = min(cap, total_variation(releases))
        if epsilon >= release_laws.pure_epsilon(question.release_groups, question.relation):
            cap = 0.0
        found = _enclose_delta(question, releases, epsilon)
        if not question.is_attained:
            found = Bounds(0.0, found.upper)  # the lower end is of another pair
        return _bound(question, _capped_at(found, cap))


def dominating_pairs(question: Question) -> list[tuple[ReleaseLaw, int]]:
    """Return the dominating pairs of the mechanism's releases, each with its count.

    Args:
        question: a mechanism that `Pld` has checked.
    """
    mu, _, releases = _split_releases(question)
    return releases or [(Release(GaussianPair(mu)), 1)]


def has_quick_curve(question: Question) -> bool:
    """Return whether one computation gives ε after every number of repetitions of the mechanism."""
    return all(has_characteristic_function(law) for law, _ in dominating_pairs(question))


def _bound(question: Question, bounds: Bounds) -> Bound:
    """Convert a proved interval to a `Bound`; lower end 0 if only an upper bound is proved."""
    lower = bounds.lower if question.is_attained else 0.0
    return Bound(bounds.upper, interval=Interval(lower, bounds.upper))


def _enclose_epsilon(
    question: Question, releases: list[tuple[ReleaseLaw, int]], delta: float
) -> Bounds:
    """Return a proved interval around ε at δ, by the cheapest algorithm that is accurate enough.

    They are infinite if outcomes of infinite loss alone exceed δ.
    """
    if total_variation(releases) <= delta:
        return Bounds(0.0, 0.0)
    if _infinite_mass(releases) >= delta:
        return Bounds(math.inf, math.inf)
    found = enumeration.epsilon_bounds(releases, delta)
    if found is None:
        found = small_noise.epsilon_bounds(releases, delta)
    if found is not None and relative_width(found) <= question.tolerance:
        return found
    return _intersection(
        found,
        certified_interval.epsilon_bounds(releases, delta, question.tolerance, question.threshold),
    )


def _enclose_delta(
    question: Question, releases: list[tuple[ReleaseLaw, int]], epsilon: float
) -> Bounds:
    """Return a proved interval around δ at ε, by the cheapest algorithm that is accurate enough."""
    found = enumeration.delta_bounds(releases, epsilon)
    if found is None:
        found = small_noise.delta_bounds(releases, epsilon)
    if found is not None and found.upper - found.lower <= question.tolerance * found.upper:
        return found
    return _intersection(
        found, certified_interval.delta_bounds(releases, epsilon, question.tolerance)
    )


def _intersection(one: Bounds | None, other: Bounds) -> Bounds:
    """Return the intersection of two proved intervals, or the second one if there is no first.

    Raises:
        ContradictionError: they are disjoint, so one of them is wrong.
    """
    if one is None:
        return other
    lower, upper = max(one.lower, other.lower), min(one.upper, other.upper)
    check_bounds(lower, max(upper, DELTA_MIN))  # a smaller δ underflows
    return Bounds(min(lower, upper), upper)


def _capped_at(bounds: Bounds, cap: float) -> Bounds:
    """Intersect an interval with (−∞, cap], where `cap` is a proved upper bound."""
    return _intersection(Bounds(0.0, cap), bounds)


def _capped_by_unsampled(question: Question, bounds: Bounds, delta: float) -> Bound:
    """Return the interval around ε, capped at the ε of the same releases without sampling.

    Sampling and shuffling never hurt: Gaussian releases have a closed form, others their pure ε. If
    all releases have a pure ε, no loss exceeds the sum, not even by a tolerance.
    """
    if not question.is_attained:
        bounds = Bounds(0.0, bounds.upper)  # the lower end is of another pair, above the cap maybe
    pure = release_laws.pure_epsilon(question.release_groups, question.relation)
    if pure < bounds.upper:
        bounds = _capped_at(bounds, pure)
    mu, pure, releases = _split_releases(question)
    if total_variation(releases) > delta and _is_below_gaussian(bounds.upper, mu, pure, delta):
        return _bound(question, bounds)  # the cap is higher, and costs more to compute
    cap = rounding.up(float(gaussian.epsilon(delta, mu)) + pure)
    if cap < math.inf == bounds.lower:  # the mass of infinite loss was an allowance
        bounds = Bounds(0.0, math.inf)
    if total_variation(releases) <= delta:
        cap = 0.0
    return _bound(question, _capped_at(bounds, cap))


def _is_below_gaussian(epsilon: float, mu: float, pure: float, delta: float) -> bool:
    """Return whether a Gaussian and a pure release have certainly a larger ε at δ than this one."""
    if not epsilon < math.inf or not mu > 0:
        return pure > epsilon
    if epsilon <= pure:
        return True
    return float(gaussian.log_delta(epsilon - pure, mu)) > math.log(delta) + rounding.MARGIN


def _infinite_mass(releases: Composition) -> float:
    """Return an upper bound on the probability of an infinite privacy loss."""
    return max(infinite_mass(releases, direction) for direction in DIRECTIONS)


def _split_releases(question: Question) -> tuple[float, float, list[tuple[ReleaseLaw, int]]]:
    """Return the total μ and pure ε without sampling, and the dominating pairs to compose.

    Unsampled Gaussian releases compose to one Gaussian release. If there are no others, its closed
    form is exact, and the list of pairs is empty. The ε is infinite if another kind is released.
    """
    groups = question.release_groups
    _require_common_pair(groups)
    curves = [each for each in groups if question.adds_curves and release_laws.is_renyi_curve(each)]
    alone = [each for each in groups if each not in curves]
    laws = [release_laws.dominating_pair(each, question.relation) for each in alone]
    exact = [each for each, law in zip(alone, laws, strict=True) if _is_unsampled_gaussian(law)]
    releases = [
        (law, release_laws.count_pairs(each))
        for each, law in zip(alone, laws, strict=True)
        if each not in exact
    ]
    if curves:
        releases.append((release_laws.renyi_law(curves, question.relation), 1))
    if releases and exact:
        releases.append((Release(GaussianPair(release_laws.unsampled_cost(exact)[0])), 1))
    return *release_laws.unsampled_cost(groups), releases


def _require_common_pair(groups: Sequence[ReleaseGroup]) -> None:
    """Raise if releases use disjoint parts of the data: no single dominating pair covers that."""
    for group in groups:
        if group.atom.parts:
            raise MethodNotApplicableError(
                "mechanisms on disjoint parts have no common dominating pair; account "
                "for each part by itself, in a ledger as a dataset of its own",
                group.atom.pointer,
            )


def _is_unsampled_gaussian(law: ReleaseLaw) -> bool:
    """Return whether a release's dominating pair is that of Gaussian noise without sampling."""
    if not isinstance(law, Release) or law.sample_rate < 1.0:
        return False
    return isinstance(law.base_pair, GaussianPair)
