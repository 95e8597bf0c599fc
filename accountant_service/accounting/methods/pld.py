"""Privacy loss distributions with proved lower and upper bounds.

This is the default method, and the referee of all other methods.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Final

from accountant_service.accounting import release_laws
from accountant_service.accounting.guarantee import (
    Assumption,
    Guarantee,
    Interval,
    NeighbouringRelation,
)
from accountant_service.accounting.methods.base import (
    DELTA_MIN,
    Accountant,
    Bound,
    Question,
    has_attained_pair,
    report_contradictions,
    width_warnings,
)
from accountant_service.accounting.release_laws import ReleaseGroup, SimpleCost
from accountant_service.errors import (
    AccountingError,
    MethodNotApplicableError,
    NoFiniteEpsilonError,
    TooExpensiveError,
)
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
from accountant_service.writing import number_format

_REVEALING_SHARE: Final = 1e-3  # of δ, beyond which a mass of infinite loss is worth naming
_RELEASES_MAX: Final = 1200
_NEARBY: Final = 1e-6  # relative, of a greater δ
_UNIT: Final = Fraction(1, 1 << 53)  # the rounding of a double, relative
_OWN_DELTA_ROUNDING_MAX: Final = Fraction(1, 10**9)  # relative
_FORMULA_ROUNDING: Final = 16 * _UNIT  # relative, of a δ with exponentials


class Pld(Accountant):
    """Privacy loss distribution (the default method): a proved interval around ε or δ.

    The bounds are computed in numerics/certified_interval.py and proved in docs/accountants/pld.md.
    Unsampled Gaussian releases have the closed form of the analytic Gaussian mechanism.
    """

    name = "pld"
    title = "Privacy loss distribution, proved from both sides"
    source = (
        f"{release_laws.POISSON_SOURCE}; connect the dots: arXiv 2207.04380v1; "
        "Cheng et al. 2020 eq. (4) at q = 1"
    )
    accepts_zero_delta = True
    needs = (
        "any kind of mechanism; fixed-size samples of Gaussian releases, of Laplace noise with "
        "replace-one or zero-out neighbours, of others with replace-one"
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
        sources: dict[str, dict[str, None]] = {}
        for group in groups:
            statement, source = release_laws.hypothesis(group, question.relation)
            sources.setdefault(statement, {})[source] = None
        return tuple(Assumption(each, True, "; ".join(found)) for each, found in sources.items())

    def epsilon_bound(self, question: Question, delta: float) -> Bound:
        """Return the upper end of a proved interval around ε at δ ≥ 0, with the interval."""
        cost, releases = _split_releases(question)
        written = rounding.as_written(delta)
        if cost.has_no_epsilon(written):
            return _bound(question, Bounds(math.inf, math.inf))
        if written == cost.loss.least_delta:  # then losses are bounded, by ε at this δ
            least = rounding.fraction_down(cost.loss.least_epsilon)
            upper = cost.epsilon if cost.bounds(written) else math.inf
            return _bound(question, Bounds(least, upper))
        if releases:
            return _capped(question, cost, _enclose_epsilon(question, releases, delta), delta)
        lower = rounding.down(float(gaussian.epsilon_lower(delta, cost.mu)))
        upper = rounding.up(float(gaussian.epsilon(delta, cost.mu)))
        return _bound(question, Bounds(lower, upper))

    def epsilon_bounds(self, step: Question, times: Sequence[int], delta: float) -> list[Bound]:
        """Return a proved interval's upper end for ε after each number of repetitions of `step`."""
        cost, releases = _split_releases(step)
        quick = releases and delta > 0 and not cost.loss.delta and not _infinite_mass(releases)
        if not quick or small_noise.is_useful(releases):
            return super().epsilon_bounds(step, times, delta)
        try:
            curve = epsilon_curve(releases, times, delta, step.tolerance)
        except TimeoutError:
            raise TooExpensiveError(
                f"the curve of pld took more than {SECONDS_MAX:g} s: ask for fewer points"
            ) from None
        repeated = [step.repeated(each) for each in times]
        return [
            _capped(question, _simple_cost(question), bounds, delta)
            for question, bounds in zip(repeated, curve, strict=True)
        ]

    def explain_infinite_epsilon(self, question: Question, delta: float) -> NoFiniteEpsilonError:
        """Return the error: whether no finite ε holds or none is proved, why, and the way out."""
        written = rounding.as_written(delta)
        costs = [(_simple_cost(each), each) for each in question.alternatives]
        without = [(cost, each) for cost, each in costs if cost.has_no_epsilon(written)]
        if without:
            worst, each = max(without, key=lambda pair: pair[0].loss.least_delta)
            return _explain_no_epsilon(each, worst.loss.least_delta, delta)
        return super().explain_infinite_epsilon(question, delta)

    def delta_bound(self, question: Question, epsilon: float) -> Bound:
        """Return the upper end of a proved interval around δ at ε, with the interval."""
        cost, releases = _split_releases(question)
        cap, least = cost.delta_at(epsilon), rounding.fraction_down(cost.loss.least_delta)
        if cost.is_bounded and rounding.as_written(epsilon) >= cost.loss.epsilon:
            return replace(_bound(question, Bounds(least, cap)), is_exact=True)
        if least == 1.0:
            return _bound(question, Bounds(1.0, 1.0))
        if not releases:
            exact = math.exp(float(gaussian.log_delta(epsilon, cost.mu)))
            return _bound(question, Bounds(rounding.down(exact), cap))
        found = _enclose_delta(question, releases, epsilon)
        if not question.is_attained:
            found = Bounds(0.0, found.upper)  # the lower end is of another pair
        return _bound(question, _capped_at(found, min(cap, total_variation(releases))))

    def with_lower_bound(self, question: Question, guarantee: Guarantee) -> Guarantee:
        """Return a guarantee with the lower bound of two datasets that exist.

        It is one for samples of fixed size in which a record is replaced or zeroed: no two datasets
        attain their dominating pair.
        """
        known = guarantee.certified
        if known is None or question.is_attained or not math.isfinite(known.upper):
            return guarantee
        epsilon, delta = guarantee.epsilon, guarantee.delta
        lower = known.lower
        with report_contradictions(question, f"ε = {epsilon!r}, δ = {delta!r}"):
            for each in question.alternatives:
                releases = _attained_pairs(each)
                if not releases or delta == 0:
                    continue
                if guarantee.solved_for == "epsilon":
                    found = _enclose_epsilon(each, releases, delta)
                else:
                    found = _enclose_delta(each, releases, epsilon)
                lower = max(lower, found.lower)
            check_bounds(lower, known.upper)
        certified = Interval(lower, known.upper)
        warnings = width_warnings(question, certified, guarantee.solved_for)
        return replace(guarantee, certified=certified, warnings=warnings)


def _attained_pairs(question: Question) -> list[tuple[ReleaseLaw, int]]:
    """Return pairs that two datasets attain together.

    What a record contributes may differ from release to release. The list is empty if some release
    has no pair, or if samples of fixed size differ in the size of the dataset: then there are no
    such datasets. With an added record there are none either.
    """
    found: list[tuple[ReleaseLaw, int]] = []
    sizes = set()
    if question.relation is NeighbouringRelation.ADD_OR_REMOVE_ONE:
        return found
    for group in question.release_groups:
        law = release_laws.attained_pair(group, question.relation)
        if law is None and not has_attained_pair(group.atom, question.relation):
            return []
        if group.atom.sampling == "fixed_size" and group.atom.fixed_sizes:
            sizes.add(group.atom.fixed_sizes[0])
        law = law or release_laws.dominating_pair(group, question.relation)
        found.append((law, release_laws.count_pairs(group)))
    return found if len(sizes) <= 1 else []


def dominating_pairs(question: Question) -> list[tuple[ReleaseLaw, int]]:
    """Return the dominating pairs of the mechanism's releases, each with its count.

    Args:
        question: a mechanism that `Pld` has checked.
    """
    cost, releases = _split_releases(question)
    return releases or [(Release(GaussianPair(cost.mu)), 1)]


def stated_delta(question: Question, delta: float) -> float:
    """Return the δ at which a question is answered: the mechanism's own, if rounding hides it.

    Who computes q·δ or 1 − Π(1 − δᵢ) in floating point may get a number just below the probability
    of an infinite loss, where no finite ε holds. The δ returned is then that probability, rounded
    up. A δ that no product, difference or exponential enters is taken as written.
    """
    try:
        Pld().check_assumptions(question)
        costs = [(_simple_cost(each), each) for each in question.alternatives]
    except AccountingError:
        return delta
    cost, worst = max(costs, key=lambda pair: pair[0].loss.delta, default=(None, question))
    if cost is None or not cost.is_bounded:
        return delta
    below = cost.loss.delta - rounding.as_written(delta)
    is_hidden = 0 < below <= _rounding_of_own_delta(worst, cost.loss.delta)
    return rounding.fraction_up(cost.loss.delta) if is_hidden else delta


def _rounding_of_own_delta(question: Question, own: Fraction) -> Fraction:
    """Bound the rounding error of a mechanism's own δ if it is computed in floating point."""
    losses = [
        (group, release_laws.simple_cost([group], question.relation).loss)
        for group in question.release_groups
    ]
    revealing = [(group, loss) for group, loss in losses if loss.delta]
    factors = sum(group.count for group, _ in revealing)
    product = 2 * _UNIT * own if factors > 1 or any(each.rate < 1 for each, _ in revealing) else 0
    difference = (factors + 1) * _UNIT if factors > 1 else Fraction()
    is_formula = any(loss.least_delta < loss.delta for _, loss in revealing)
    formula = _FORMULA_ROUNDING * own if is_formula else 0
    return min(product + difference + formula, own * _OWN_DELTA_ROUNDING_MAX)


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

    δ may be so close to the probability of an infinite loss that it is below it when that is
    rounded up: then a greater δ gives the lower end, and there is no upper one.
    """
    if total_variation(releases) <= delta:
        return Bounds(0.0, 0.0)
    if _infinite_mass(releases) >= delta:
        nearby = delta * (1 + _NEARBY)
        if not question.is_attained or _infinite_mass(releases) >= nearby or nearby >= 1.0:
            return Bounds(0.0, math.inf)
        return Bounds(_enclose_epsilon(question, releases, nearby).lower, math.inf)
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
    if _shows_nearly_always_who_took_part(question, releases):
        lower = _largest_delta_of_parts(question, releases, epsilon)
        if lower >= 1.0 - question.tolerance:
            return Bounds(lower, 1.0)
    return _intersection(
        found, certified_interval.delta_bounds(releases, epsilon, question.tolerance)
    )


def _shows_nearly_always_who_took_part(
    question: Question, releases: list[tuple[ReleaseLaw, int]]
) -> bool:
    """Return whether one of several releases may have a δ(0) of nearly 1.

    Lattices for all of them are wide and slow then.
    """
    nearly_one = 1.0 - question.tolerance
    return any(count > 1 and total_variation([(law, 1)]) >= nearly_one for law, count in releases)


def _largest_delta_of_parts(
    question: Question, releases: list[tuple[ReleaseLaw, int]], epsilon: float
) -> float:
    """Return a lower bound on δ at ε: that of some of the releases, from few to many."""
    lower, most = 0.0, max(count for _, count in releases)
    for part in itertools.takewhile(lambda each: each < most, (4**i for i in itertools.count())):
        some = [(law, min(count, part)) for law, count in releases]
        found = certified_interval.delta_bounds(some, epsilon, question.tolerance)
        lower = max(lower, found.lower)
        if lower >= 1.0 - question.tolerance:
            break
    return lower


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


def _capped(question: Question, cost: SimpleCost, bounds: Bounds, delta: float) -> Bound:
    """Return the interval around ε, capped at the ε of the same releases charged more simply.

    Sampling and shuffling never hurt: Gaussian releases have a closed form, others their (ε, δ). If
    all releases are (ε, δ)-DP, no finite loss exceeds the sum, not even by a tolerance.
    """
    if not question.is_attained:
        bounds = Bounds(0.0, bounds.upper)  # the lower end is of another pair, above the cap maybe
    if cost.bounds(rounding.as_written(delta)) and cost.epsilon < bounds.upper:
        bounds = _capped_at(bounds, cost.epsilon)
    if _is_below(bounds.upper, cost, delta):
        return _bound(question, bounds)  # the cap is higher, and costs more to compute
    cap = cost.epsilon_at(delta)
    if cap < math.inf == bounds.lower:  # the mass of infinite loss was an allowance
        bounds = Bounds(0.0, math.inf)
    return _bound(question, _capped_at(bounds, cap))


def _explain_no_epsilon(question: Question, least: Fraction, delta: float) -> NoFiniteEpsilonError:
    """Return the error for a δ at which the dominating pairs of the releases have no finite ε.

    Args:
        question: without disjoint parts of the data.
        least: the probability of an infinite loss.
        delta: the δ asked for.
    """
    groups, written = question.release_groups, rounding.as_written(delta)
    costs = [release_laws.simple_cost([each], question.relation) for each in groups]
    revealing = [
        group
        for group, cost in zip(groups, costs, strict=True)
        if cost.loss.least_delta > _REVEALING_SHARE * written
    ]
    claim = "no finite ε holds" if question.is_attained else "pld proves no finite ε"
    at = f"{claim} at δ = {number_format.exactly(delta)}"
    if not revealing:
        unbounded = [
            group for group, cost in zip(groups, costs, strict=True) if not cost.is_bounded
        ]
        kinds = dict.fromkeys(group.atom.noise for group in unbounded)
        bound = "no bound" if question.is_attained else "no known bound"
        reason = f"the privacy loss of {', '.join(kinds)} has {bound}. Choose a δ above 0"
        return NoFiniteEpsilonError(f"{at}: {reason}", _only_pointer(unbounded))
    kinds = dict.fromkeys(group.atom.noise for group in revealing)
    way_out = "choose a larger δ"
    if "privacy_profile" in kinds:
        way_out += ", or give the privacy_profile a point with a smaller δ"
    mass = f"{float(least):.6g}"
    if Fraction(mass) <= written < least:  # six digits do not show the difference
        mass = repr(float(least))
    return NoFiniteEpsilonError(
        f"{at}: as far as is known of {', '.join(kinds)}, the privacy loss may be infinite with a "
        f"probability of {mass}. To get a finite ε, {way_out}",
        _only_pointer(revealing),
    )


def _only_pointer(groups: Sequence[ReleaseGroup]) -> str | None:
    """Return the JSON pointer of the only release, or None if there are several."""
    return groups[0].atom.pointer if len(groups) == 1 else None


def _is_below(epsilon: float, cost: SimpleCost, delta: float) -> bool:
    """Return whether the simple cost at δ is certainly larger than ε."""
    if not (epsilon < math.inf and cost.mu > 0 and delta > 0):
        return cost.epsilon > epsilon
    if epsilon <= cost.epsilon:
        return True
    log_delta = float(gaussian.log_delta(epsilon - cost.epsilon, cost.mu))
    return log_delta > math.log(delta) + rounding.MARGIN


def _infinite_mass(releases: Composition) -> float:
    """Return an upper bound on the probability of an infinite privacy loss."""
    return max(infinite_mass(releases, direction) for direction in DIRECTIONS)


def _simple_cost(question: Question) -> SimpleCost:
    """Return the cost of a question's releases if they are charged as Gaussian or (ε, δ)-DP."""
    return release_laws.simple_cost(question.release_groups, question.relation)


def _split_releases(question: Question) -> tuple[SimpleCost, list[tuple[ReleaseLaw, int]]]:
    """Return the simple cost of a question's releases, and the dominating pairs to compose.

    Unsampled Gaussian releases compose to one Gaussian release. If there are no others, its closed
    form is exact, and the list of pairs is empty.
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
        mu = release_laws.simple_cost(exact, question.relation).mu
        releases.append((Release(GaussianPair(mu)), 1))
    return _simple_cost(question), releases


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
