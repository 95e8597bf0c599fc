"""Questions about a mechanism, without HTTP: what the API and the command line call.

The questions that solve for a parameter are in `solver`; both return guarantees that the referee
has seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from accountant_service.accountants import (
    ACCOUNTANTS,
    DEFAULT_METHOD,
    TOLERANCE,
    Question,
    verdict,
)
from accountant_service.accountants.base import refusing_contradictions
from accountant_service.accountants.pld import pairs
from accountant_service.errors import AccountingError, BoundsContradictError
from accountant_service.guarantee import (
    Assumption,
    Guarantee,
    Interval,
    NeighbouringRelation,
    Status,
)
from accountant_service.mechanisms import DpSgd, Mechanism, canonical_form
from accountant_service.numerics import rounding
from accountant_service.numerics import trade_off as enclosure
from accountant_service.numerics.privacy_loss import DIRECTIONS
from accountant_service.numerics.special import Array

_RELATION: Final = NeighbouringRelation.ADD_OR_REMOVE_ONE
_LINES: Final = 128  # ε whose lines and thresholds bound the trade-off, of each direction
_FARTHEST_DELTA: Final = 1e-9  # the last of these ε


def epsilon(
    mechanism: Mechanism,
    delta: float,
    method: str = DEFAULT_METHOD,
    relation: NeighbouringRelation = _RELATION,
    tolerance: float | None = None,
) -> Guarantee:
    """The ε of a mechanism at δ.

    Args:
        mechanism: as read by `mechanisms.from_json`.
        delta: in (0, 1).
        method: a name in `ACCOUNTANTS`.
        relation: when two datasets are neighbours.
        tolerance: the relative width that the proved interval must have, if any is asked for.

    Raises:
        AccountingError: the method has no formula, no ε is finite, the work is too much, or the
            tolerance is out of reach.
    """
    question = _question(mechanism, relation, tolerance)
    return verdict.require(verdict.epsilon(ACCOUNTANTS[method], question, delta), tolerance)


def delta(
    mechanism: Mechanism,
    epsilon: float,
    method: str = DEFAULT_METHOD,
    relation: NeighbouringRelation = _RELATION,
    tolerance: float | None = None,
) -> Guarantee:
    """The δ of a mechanism at ε ≥ 0; see `epsilon` for the rest."""
    question = _question(mechanism, relation, tolerance)
    return verdict.require(verdict.delta(ACCOUNTANTS[method], question, epsilon), tolerance)


def _question(
    mechanism: Mechanism, relation: NeighbouringRelation, tolerance: float | None = None
) -> Question:
    return Question(canonical_form(mechanism), relation, tolerance or TOLERANCE)


@dataclass(frozen=True, slots=True)
class Inapplicable:
    """A method that has no answer, and why."""

    method: str
    error: AccountingError


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every method's answer to one question, and the proved interval they are judged by."""

    certified: verdict.Certified
    answers: tuple[Guarantee | Inapplicable, ...]


def compare(
    mechanism: Mechanism,
    delta: float,
    methods: Sequence[str] | None = None,
    relation: NeighbouringRelation = _RELATION,
    tolerance: float | None = None,
) -> Comparison:
    """The ε of several methods (all by default) side by side, each with its verdict."""
    question = _question(mechanism, relation, tolerance)
    certified = verdict.certify(question, delta)
    if isinstance(certified, Guarantee):
        verdict.require(certified, tolerance)

    def answer(method: str) -> Guarantee | Inapplicable:
        if method == DEFAULT_METHOD:  # already known: do not compute it twice
            if isinstance(certified, AccountingError):
                return Inapplicable(method, certified)
            return certified
        try:
            return verdict.judge(ACCOUNTANTS[method].epsilon(question, delta), certified)
        except BoundsContradictError:
            raise
        except AccountingError as error:
            return Inapplicable(method, error)

    return Comparison(certified, tuple(answer(method) for method in methods or ACCOUNTANTS))


@dataclass(frozen=True, slots=True)
class Curve:
    """One method's ε along the steps.

    Attributes:
        method: its name.
        epsilons: at each step count; None where no ε is finite.
        status: the weakest of all.
        assumptions: of the longest run that has an ε.
        warnings: of any.
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
) -> tuple[tuple[int, ...], tuple[Curve | Inapplicable, ...]]:
    """ε along the steps of a run, for each method.

    Args:
        run: the whole run; the curve ends at its last step (its last epoch, if shuffled).
        delta: in (0, 1).
        methods: names in `ACCOUNTANTS`.
        points: how many step counts, spread evenly; fewer if the run is shorter.
        relation: when two datasets are neighbours.

    Returns:
        The step counts, and a curve per method.
    """
    total, unit = _unit(run)
    counts = tuple(sorted({math.ceil(total * i / points) for i in range(1, points + 1)}))
    step = Question(canonical_form(unit), relation)
    times = [max(each, 1) for each in counts]  # a run without steps: a piece of nothing, once
    return counts, tuple(_curve(method, step, times, delta) for method in methods)


def _unit(run: DpSgd) -> tuple[int, DpSgd]:
    """How many equal pieces a run has, and one piece: a step, or an epoch of shuffled batches.

    The piece of a run without any releases nothing.
    """
    if run.sampling == "shuffled":
        total = run.epoch_count()
        steps = min(total, 1)
        return total, DpSgd(run.noise_multiplier, 1.0, steps, sampling="shuffled")
    total = run.step_count()
    return total, replace(run, steps=min(total, 1), epochs=None)


def _curve(
    method: str, step: Question, counts: Sequence[int], delta: float
) -> Curve | Inapplicable:
    try:
        found = ACCOUNTANTS[method].curve(step, counts, delta)
    except BoundsContradictError:
        raise
    except AccountingError as error:
        return Inapplicable(method, error)
    statuses = [each.status for each in found if each and each.status is not Status.PROVEN]
    epsilons = tuple(each.epsilon if each else None for each in found)
    warnings = dict.fromkeys(text for each in found if each for text in each.warnings)
    weakest = statuses[-1] if statuses else Status.PROVEN
    assumptions = next((each.assumptions for each in reversed(found) if each), ())
    return Curve(method, epsilons, weakest, assumptions, tuple(warnings))


@dataclass(frozen=True, slots=True)
class TradeOff:
    """What a membership attacker can achieve at best against a mechanism.

    Attributes:
        false_positive_rates: error rates on absent records, from 0 to 1.
        false_negative_rates: proved bounds of the least error rate on present records at each.
        posteriors: at each, bounds of the probability that an accused record is present.
        advantage: the largest true-positive minus false-positive rate.
        success: the probability of guessing membership right, at the prior asked for.
        mu: of the Gaussian mechanism whose trade-off is nearest.
        mu_error: the most its false-negative rate differs from the mechanism's, at any rate.
        mechanism_hash: the canonical hash of the mechanism.
        assumptions: the hypotheses of the bounds.
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


def trade_off(
    mechanism: Mechanism,
    prior: float,
    points: int,
    relation: NeighbouringRelation = _RELATION,
) -> TradeOff:
    """The attacker's trade-off between false positives and false negatives.

    The advantage is δ(0). At prior π the best guess is right with probability
    1 − π + π·δ(log((1 − π)/π)) for π ≤ ½, and π + (1 − π)·δ′(log(π/(1 − π))) above, with δ of the
    direction "removing" and δ′ of "adding".

    Args:
        mechanism: as read by `mechanisms.from_json`.
        prior: probability that the record is present, strictly between 0 and 1.
        points: how many false-positive rates.
        relation: when two datasets are neighbours.

    Raises:
        AccountingError: there is no proved pair, or the work is too much.
    """
    question = _question(mechanism, relation)
    referee = ACCOUNTANTS[DEFAULT_METHOD]
    rates = _false_positive_rates(points)
    claim = referee.epsilon(question, _FARTHEST_DELTA)  # it also checks the hypotheses
    farthest = claim.epsilon
    if not question.parts or farthest == 0.0:
        return _blind(rates, prior, claim)
    releases, attained = pairs(question), question.is_attained
    at_prior = abs(math.log((1 - prior) / prior))
    epsilons = np.union1d(farthest * np.linspace(0.0, 1.0, _LINES) ** 2, [at_prior])
    with refusing_contradictions(question, f"{points} points of the trade-off"):
        removing, adding = (
            enclosure.direction_curve(releases, direction, epsilons) for direction in DIRECTIONS
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
            _outward(float(low), float(high))
            for low, high in zip(*_posteriors(prior, rates, found.upper, found.lower), strict=True)
        ),
        _outward(float(removing.lower[0]) if attained else 0.0, float(removing.upper[0])),
        _outward(larger + smaller * least, larger + smaller * float(likelier.upper[at]), larger),
        found.mu,
        found.mu_error,
        question.form.hash,
        claim.assumptions,
    )


def _outward(lower: float, upper: float, least: float = 0.0) -> Interval:
    """Bounds of a probability that is at least `least`, past the rounding of their formula."""
    return Interval(max(least, rounding.down(lower)), min(1.0, rounding.up(upper)))


def _posteriors(prior: float, rates: Array, *false_negatives: Array) -> list[Array]:
    """π·TPR/(π·TPR + (1 − π)·FPR) for each bound of the false-negative rate; the prior at 0/0."""
    found = []
    for rate in false_negatives:
        present, absent = prior * (1 - rate), (1 - prior) * rates
        total = present + absent
        found.append(np.where(total > 0, present / np.where(total > 0, total, 1.0), prior))
    return found


def _blind(rates: Array, prior: float, claim: Guarantee) -> TradeOff:
    """The trade-off where nothing can be learnt."""
    larger = max(prior, 1 - prior)
    blind, priors = 1 - rates, np.full_like(rates, prior)
    nothing, certain = Interval(0.0, 0.0), Interval(larger, larger)
    return TradeOff(
        tuple(rates.tolist()),
        _intervals(blind, blind),
        _intervals(priors, priors),
        nothing,
        certain,
        0.0,
        0.0,
        claim.mechanism_hash,
        claim.assumptions,
    )


def _false_positive_rates(points: int) -> Array:
    """Rates from 0 to 1, dense near 0, where membership attacks are judged."""
    return np.concatenate([[0.0], np.geomspace(1e-5, 1.0, points - 1)])


def _intervals(lower: Array, upper: Array) -> tuple[Interval, ...]:
    return tuple(map(Interval, lower.tolist(), upper.tolist()))
