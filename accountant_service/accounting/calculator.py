"""Compute ε, δ, comparisons, curves and trade-offs of a mechanism, without a server.

The API and the command line call these functions. To solve for a parameter of a run, see `solver`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from accountant_service.accounting import referee
from accountant_service.accounting.guarantee import (
    Assumption,
    Guarantee,
    Interval,
    NeighbouringRelation,
    Status,
)
from accountant_service.accounting.methods import ACCOUNTANTS, DEFAULT_METHOD, TOLERANCE, Question
from accountant_service.accounting.methods.base import report_contradictions
from accountant_service.accounting.methods.pld import dominating_pairs, stated_delta
from accountant_service.errors import (
    AccountingError,
    BoundsContradictError,
    MethodNotApplicableError,
    NoFiniteEpsilonError,
    TooExpensiveError,
)
from accountant_service.mechanisms import DpSgd, Mechanism, canonical_form
from accountant_service.numerics import trade_off as enclosure
from accountant_service.numerics.floats import rounding
from accountant_service.numerics.floats.special_functions import Array
from accountant_service.numerics.laws.dominating_pair import DIRECTIONS
from accountant_service.writing import number_format
from accountant_service.writing.presentation import Presented, Row

_RELATION: Final = NeighbouringRelation.ADD_OR_REMOVE_ONE
_TRADE_OFF_EPSILONS: Final = 128  # values of ε whose bounds of δ enclose the trade-off
_TRADE_OFF_DELTAS: Final = (1e-9, 1e-6, 1e-3, 0.5)  # δ at the largest of these ε, if it is finite
_TRADE_OFF_EPSILON_MAX: Final = 20.0  # if ε is finite at none of them
_TRADE_OFF_EPSILON_LEAST: Final = 1e-3  # of the largest of them: ε may be 0 at these δ


def epsilon(
    mechanism: Mechanism,
    delta: float,
    method: str = DEFAULT_METHOD,
    relation: NeighbouringRelation = _RELATION,
    tolerance: float | None = None,
) -> Guarantee:
    """Return the guarantee of a mechanism at δ: its ε, with status and certified interval.

    Args:
        mechanism: as read by `mechanisms.from_json`.
        delta: in [0, 1).
        method: a name in `ACCOUNTANTS`.
        relation: the neighbouring relation.
        tolerance: largest relative width of the certified interval; None allows any.

    Raises:
        AccountingError: the method has no formula, no ε is finite, the work limit is exceeded, or
            the tolerance cannot be reached.
    """
    question = _question(mechanism, relation, tolerance)
    stated = stated_delta(question, delta)
    found = referee.epsilon(ACCOUNTANTS[method], question, stated)
    return referee.require_tolerance(_warn_about_stated_delta(found, delta), tolerance)


def delta(
    mechanism: Mechanism,
    epsilon: float,
    method: str = DEFAULT_METHOD,
    relation: NeighbouringRelation = _RELATION,
    tolerance: float | None = None,
) -> Guarantee:
    """Return the guarantee of a mechanism at ε: its δ, with status and certified interval.

    Args:
        mechanism: as read by `mechanisms.from_json`.
        epsilon: at least 0.
        method: a name in `ACCOUNTANTS`.
        relation: the neighbouring relation.
        tolerance: largest relative width of the certified interval; None allows any.

    Raises:
        AccountingError: the method has no formula, the work limit is exceeded, or the tolerance
            cannot be reached.
    """
    question = _question(mechanism, relation, tolerance)
    return referee.require_tolerance(
        referee.delta(ACCOUNTANTS[method], question, epsilon), tolerance
    )


def prove_epsilon(mechanism: Mechanism, relation: NeighbouringRelation, delta: float) -> Guarantee:
    """Return a proven guarantee of a mechanism at δ, by the tightest method that applies.

    It comes from `pld`, or from `subsampled_rdp` where `pld` has no formula or is too expensive.
    """
    question = _question(mechanism, relation)
    try:
        return ACCOUNTANTS["pld"].epsilon(question, delta)
    except (MethodNotApplicableError, TooExpensiveError):
        return ACCOUNTANTS["subsampled_rdp"].epsilon(question, delta)


def _warn_about_stated_delta(guarantee: Guarantee, delta: float) -> Guarantee:
    """Return a guarantee with a warning if it holds at another δ than the one asked for."""
    if guarantee.delta == delta:
        return guarantee
    warning = (
        f"the guarantee is for δ = {guarantee.delta!r}, the probability of an infinite privacy "
        f"loss: δ = {delta!r} is below it by no more than the rounding of floating-point numbers"
    )
    return replace(guarantee, warnings=(*guarantee.warnings, warning))


def _question(
    mechanism: Mechanism, relation: NeighbouringRelation, tolerance: float | None = None
) -> Question:
    """Combine a mechanism's canonical form, relation and tolerance into a `Question`."""
    return Question(canonical_form(mechanism), relation, tolerance or TOLERANCE)


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """An accounting method that does not apply to a mechanism, with the error that says why."""

    method: str
    error: AccountingError


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Presented):
    """The guarantees of several methods for one mechanism, and the certified guarantee."""

    certified: referee.CertifiedAnswer
    answers: tuple[Guarantee | NoAnswer, ...]

    def __str__(self) -> str:
        """Return what is proved, and the ε and status of each method in a line."""
        return "\n".join("  ".join(row) for row in self.table())

    def table(self) -> list[Row]:
        """Return what is proved, then each method with its ε and status."""
        answers = [
            (each.method, number_format.round_up(each.epsilon), str(each.status))
            if isinstance(each, Guarantee)
            else (each.method, "–", str(each.error))
            for each in self.answers
        ]
        return [("proved", str(self.certified)), *answers]


def compare(
    mechanism: Mechanism,
    delta: float,
    methods: Sequence[str] | None = None,
    relation: NeighbouringRelation = _RELATION,
    tolerance: float | None = None,
) -> Comparison:
    """Return the ε of several methods at δ, each checked against the certified interval.

    Args:
        mechanism: as read by `mechanisms.from_json`.
        delta: in (0, 1).
        methods: names in `ACCOUNTANTS`; all by default.
        relation: the neighbouring relation.
        tolerance: largest relative width of the certified interval; None allows any.

    Raises:
        ToleranceNotReachedError: the certified interval is wider.
    """
    question = _question(mechanism, relation, tolerance)
    stated = stated_delta(question, delta)
    certified = referee.certify(question, stated)
    if isinstance(certified, Guarantee):
        certified = _warn_about_stated_delta(certified, delta)
        referee.require_tolerance(certified, tolerance)

    def answer(method: str) -> Guarantee | NoAnswer:
        """Return one method's checked guarantee, or the reason why it does not apply."""
        if method == DEFAULT_METHOD:  # already computed
            if isinstance(certified, AccountingError):
                return NoAnswer(method, certified)
            return certified
        try:
            return referee.check_claim(ACCOUNTANTS[method].epsilon(question, stated), certified)
        except BoundsContradictError:
            raise
        except AccountingError as error:
            return NoAnswer(method, error)

    return Comparison(certified, tuple(answer(method) for method in methods or ACCOUNTANTS))


@dataclass(frozen=True, slots=True)
class MethodCurve:
    """One accounting method's ε after each of several step counts of a run.

    Attributes:
        method: the method's name.
        epsilons: ε after each step count; None where no ε is finite.
        status: the weakest status of all points.
        assumptions: the hypotheses for the longest run that has an ε.
        warnings: all warnings, each once.
    """

    method: str
    epsilons: tuple[float | None, ...]
    status: Status
    assumptions: tuple[Assumption, ...]
    warnings: tuple[str, ...] = ()


def curve(
    run: DpSgd,
    delta: float,
    methods: Sequence[str],
    points: int,
    relation: NeighbouringRelation = _RELATION,
) -> tuple[tuple[int, ...], tuple[MethodCurve | NoAnswer, ...]]:
    """Return each method's ε at δ after increasing numbers of steps of a run.

    Args:
        run: the whole run; the curve ends at its last step, or its last epoch if it is shuffled or
            sampled by balls in bins.
        delta: in (0, 1).
        methods: names in `ACCOUNTANTS`.
        points: number of step counts, evenly spaced; fewer if the run is shorter.
        relation: the neighbouring relation.

    Returns:
        The step counts, and for each method its curve or the error that says why it has none.
    """
    total, unit = _split_run(run)
    counts = tuple(sorted({math.ceil(total * i / points) for i in range(1, points + 1)}))
    step = Question(canonical_form(unit), relation)
    times = [max(each, 1) for each in counts]  # a run without steps has one empty part
    return counts, tuple(_method_curve(method, step, times, delta) for method in methods)


def _split_run(run: DpSgd) -> tuple[int, DpSgd]:
    """Divide a run into equal steps or epochs; return their number, and one of them.

    Shuffled batches and balls in bins are split into epochs. A run without steps has 0 parts, and
    the part returned releases nothing.
    """
    if run.sampling == "shuffled":
        total = run.epoch_count()
        steps = min(total, 1)
        return total, DpSgd(run.noise_multiplier, 1.0, steps, sampling="shuffled")
    unit = run.unit_steps()
    total = run.step_count() // unit
    return total, replace(run, steps=min(total, 1) * unit, epochs=None)


def _method_curve(
    method: str, step: Question, counts: Sequence[int], delta: float
) -> MethodCurve | NoAnswer:
    """Return a method's ε after each step count, or the error if it does not apply."""
    try:
        found = ACCOUNTANTS[method].curve(step, counts, delta)
    except BoundsContradictError:
        raise
    except AccountingError as error:
        return NoAnswer(method, error)
    statuses = [each.status for each in found if each and each.status is not Status.PROVEN]
    epsilons = tuple(each.epsilon if each else None for each in found)
    warnings = dict.fromkeys(text for each in found if each for text in each.warnings)
    weakest = statuses[-1] if statuses else Status.PROVEN
    assumptions = next((each.assumptions for each in reversed(found) if each), ())
    return MethodCurve(method, epsilons, weakest, assumptions, tuple(warnings))


@dataclass(frozen=True, slots=True)
class TradeOff:
    """Bounds on the error rates of the best membership inference attack on a mechanism.

    Attributes:
        false_positive_rates: error rates on absent records, from 0 to 1.
        false_negative_rates: bounds of the least error rate on present records, at each
            false-positive rate.
        posteriors: bounds of the probability that an accused record is present, at each
            false-positive rate.
        advantage: bounds of the largest true-positive minus false-positive rate.
        success: bounds of the probability of guessing membership right, at the given prior.
        mu: μ of the Gaussian mechanism with the nearest trade-off.
        mu_error: largest difference between the false-negative rates of that Gaussian mechanism
            and of this mechanism.
        mechanism_hash: the canonical hash of the mechanism.
        assumptions: the hypotheses of the bounds.
        status: proven, or estimate if a hypothesis fails: then the bounds are not proved.
    """

    false_positive_rates: tuple[float, ...]
    false_negative_rates: tuple[Interval, ...]
    posteriors: tuple[Interval, ...]
    advantage: Interval
    success: Interval
    mu: float
    mu_error: float
    mechanism_hash: str
    assumptions: tuple[Assumption, ...]
    status: Status = Status.PROVEN


def trade_off(
    mechanism: Mechanism,
    prior: float,
    points: int,
    relation: NeighbouringRelation = _RELATION,
    false_positive_rates: Sequence[float] | None = None,
) -> TradeOff:
    """Bound the lowest false-negative rate of membership attacks at each false-positive rate.

    The advantage is δ(0). At prior π the best guess is right with probability
    1 − π + π·δ(log((1 − π)/π)) for π ≤ ½, and π + (1 − π)·δ′(log(π/(1 − π))) above, with δ of the
    direction "removing" and δ′ of "adding".

    Args:
        mechanism: as read by `mechanisms.from_json`.
        prior: probability that the record is present, strictly between 0 and 1.
        points: number of false-positive rates, from 0 to 1 and dense near 0.
        relation: the neighbouring relation.
        false_positive_rates: these, in [0, 1], instead of `points` others.

    Raises:
        AccountingError: a release has no proved dominating pair, or the work limit is exceeded.
    """
    question = _question(mechanism, relation)
    rates = np.array(false_positive_rates or _false_positive_rates(points), float)
    accountant = ACCOUNTANTS[DEFAULT_METHOD]
    claim = accountant.delta(question, 0.0)  # it also checks the hypotheses
    if not question.form.atom_counts:
        return _trade_off_of_no_release(rates, prior, claim)
    largest_epsilon = max(_largest_useful_epsilon(question), _TRADE_OFF_EPSILON_LEAST)
    common = question.of_common_part()
    releases, attained = dominating_pairs(common), common.is_attained
    at_prior = abs(math.log((1 - prior) / prior))
    epsilons = np.union1d(
        largest_epsilon * np.linspace(0.0, 1.0, _TRADE_OFF_EPSILONS) ** 2, [at_prior]
    )
    known = {0.0: claim, at_prior: accountant.delta(question, at_prior)}
    with report_contradictions(question, f"{len(rates)} points of the trade-off"):
        removing, adding = (
            enclosure.direction_curve(releases, direction, epsilons).intersected(
                {epsilon: proved.delta for epsilon, proved in known.items()},
                _certified_lower(claim) if attained else 0.0,
            )
            for direction in DIRECTIONS
        )
        found = enclosure.trade_off(removing, adding, rates, attained=attained)
    likelier = removing if prior <= 0.5 else adding
    at = int(np.searchsorted(epsilons, at_prior))
    larger, smaller = max(prior, 1 - prior), min(prior, 1 - prior)
    least = float(likelier.lower[at]) if attained else 0.0
    return TradeOff(
        tuple(rates.tolist()),
        _intervals(found.lower, found.upper),
        tuple(
            _probability_interval(float(low), float(high))
            for low, high in zip(*_posteriors(prior, rates, found.upper, found.lower), strict=True)
        ),
        _probability_interval(
            float(removing.lower[0]) if attained else 0.0, float(removing.upper[0])
        ),
        _probability_interval(
            larger + smaller * least, larger + smaller * float(likelier.upper[at]), larger
        ),
        found.mu,
        found.mu_error,
        question.form.hash,
        claim.assumptions,
        claim.status,
    )


def _largest_useful_epsilon(question: Question) -> float:
    """Return ε at the smallest δ of `_TRADE_OFF_DELTAS` at which it is finite."""
    for delta in _TRADE_OFF_DELTAS:
        with contextlib.suppress(NoFiniteEpsilonError):
            return ACCOUNTANTS[DEFAULT_METHOD].epsilon(question, delta).epsilon
    return _TRADE_OFF_EPSILON_MAX


def _certified_lower(claim: Guarantee) -> float:
    """Return the lower end of a guarantee's proved interval, or 0."""
    return claim.certified.lower if claim.certified else 0.0


def _probability_interval(lower: float, upper: float, least: float = 0.0) -> Interval:
    """Return an interval for a probability, rounded outward but within [`least`, 1]."""
    return Interval(max(least, rounding.down(lower)), min(1.0, rounding.up(upper)))


def _posteriors(prior: float, rates: Array, *false_negatives: Array) -> list[Array]:
    """Return, by Bayes' rule, the probability of membership at each pair of error rates.

    π·TPR/(π·TPR + (1 − π)·FPR), and π at 0/0.
    """
    found = []
    for rate in false_negatives:
        present, absent = prior * (1 - rate), (1 - prior) * rates
        total = present + absent
        found.append(np.where(total > 0, present / np.where(total > 0, total, 1.0), prior))
    return found


def _trade_off_of_no_release(rates: Array, prior: float, claim: Guarantee) -> TradeOff:
    """Return the trade-off curve of a mechanism without a release: the attacker can only guess."""
    larger = max(prior, 1 - prior)
    false_negatives, priors = 1 - rates, np.full_like(rates, prior)
    nothing, certain = Interval(0.0, 0.0), Interval(larger, larger)
    return TradeOff(
        tuple(rates.tolist()),
        _intervals(false_negatives, false_negatives),
        _intervals(priors, priors),
        nothing,
        certain,
        0.0,
        0.0,
        claim.mechanism_hash,
        claim.assumptions,
    )


def _false_positive_rates(points: int) -> Array:
    """Return a grid of false-positive rates from 0 to 1 that is dense near 0."""
    return np.concatenate([[0.0], np.geomspace(1e-5, 1.0, points - 1)])


def _intervals(lower: Array, upper: Array) -> tuple[Interval, ...]:
    """Return the interval between each lower bound and the upper bound at the same index."""
    return tuple(map(Interval, lower.tolist(), upper.tolist()))
