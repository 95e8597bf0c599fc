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

from accountant_service.accountants import ACCOUNTANTS, DEFAULT_METHOD, Question, verdict
from accountant_service.errors import AccountingError, NoFiniteEpsilonError
from accountant_service.guarantee import Guarantee, Interval, NeighbouringRelation, Status
from accountant_service.mechanisms import DpSgd, Mechanism, canonical_form

_RELATION: Final = NeighbouringRelation.ADD_OR_REMOVE_ONE
_TRADE_OFF_LINES: Final = 17  # (ε, δ) pairs whose lines bound the trade-off


def epsilon(
    mechanism: Mechanism,
    delta: float,
    method: str = DEFAULT_METHOD,
    relation: NeighbouringRelation = _RELATION,
) -> Guarantee:
    """The ε of a mechanism at δ.

    Args:
        mechanism: as read by `mechanisms.from_json`.
        delta: in (0, 1).
        method: a name in `ACCOUNTANTS`.
        relation: when two datasets are neighbours.

    Raises:
        AccountingError: the method has no formula, no ε is finite, or the work is too much.
    """
    return verdict.epsilon(
        ACCOUNTANTS[method], Question(canonical_form(mechanism), relation), delta
    )


def delta(
    mechanism: Mechanism,
    epsilon: float,
    method: str = DEFAULT_METHOD,
    relation: NeighbouringRelation = _RELATION,
) -> Guarantee:
    """The δ of a mechanism at ε ≥ 0; see `epsilon` for the rest."""
    question = Question(canonical_form(mechanism), relation)
    return verdict.delta(ACCOUNTANTS[method], question, epsilon)


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
) -> Comparison:
    """The ε of several methods (all by default) side by side, each with its verdict."""
    question = Question(canonical_form(mechanism), relation)
    certified = verdict.certify(question, delta)

    def answer(method: str) -> Guarantee | Inapplicable:
        if method == DEFAULT_METHOD:  # already known: do not compute it twice
            if isinstance(certified, AccountingError):
                return Inapplicable(method, certified)
            return certified
        try:
            return verdict.judge(ACCOUNTANTS[method].epsilon(question, delta), certified)
        except AccountingError as error:
            return Inapplicable(method, error)

    return Comparison(certified, tuple(answer(method) for method in methods or ACCOUNTANTS))


@dataclass(frozen=True, slots=True)
class Curve:
    """One method's ε at each step count (None where no ε is finite), with its weakest status."""

    method: str
    epsilons: tuple[float | None, ...]
    status: Status


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
    questions = [Question(canonical_form(unit).scaled(count), relation) for count in counts]
    return counts, tuple(_curve(method, questions, delta) for method in methods)


def _unit(run: DpSgd) -> tuple[int, DpSgd]:
    """How many equal pieces a run has, and one piece: a step, or an epoch of shuffled batches."""
    if run.sampling == "shuffled":
        epoch = DpSgd(run.noise_multiplier, sample_rate=1.0, steps=1, sampling="shuffled")
        return run.epoch_count(), epoch
    return run.step_count(), replace(run, steps=1, epochs=None)


def _curve(method: str, questions: Sequence[Question], delta: float) -> Curve | Inapplicable:
    epsilons: list[float | None] = []
    status = Status.PROVEN
    for question in questions:
        try:
            guarantee = ACCOUNTANTS[method].epsilon(question, delta)
        except NoFiniteEpsilonError:
            epsilons.append(None)
            continue
        except AccountingError as error:
            return Inapplicable(method, error)
        epsilons.append(guarantee.epsilon)
        status = status if guarantee.status is Status.PROVEN else guarantee.status
    return Curve(method, tuple(epsilons), status)


@dataclass(frozen=True, slots=True)
class TradeOff:
    """What a membership attacker can achieve at best against a mechanism.

    Attributes:
        false_positive_rates: error rates on absent records, from 0 to 1.
        false_negative_rates: a proved lower bound of the error rate on present records at each.
        advantage: the largest true-positive minus false-positive rate.
        success: the probability of guessing membership right, at the prior asked for.
        mechanism_hash: the canonical hash of the mechanism.
    """

    false_positive_rates: tuple[float, ...]
    false_negative_rates: tuple[float, ...]
    advantage: Interval
    success: Interval
    mechanism_hash: str


def trade_off(
    mechanism: Mechanism,
    prior: float,
    points: int,
    relation: NeighbouringRelation = _RELATION,
) -> TradeOff:
    """The attacker's trade-off between false positives and false negatives.

    An (ε, δ)-DP release keeps every test at FNR ≥ max(1 − δ − e^ε·FPR, e^{−ε}·(1 − δ − FPR))
    (Wasserman & Zhou 2010; Kairouz et al. 2015); here with the certified δ(ε) at many ε at once.
    The advantage is δ(0). At prior π the best guess is right with probability
    max(π, 1 − π) + min(π, 1 − π)·δ(|log((1 − π)/π)|).

    Args:
        mechanism: as read by `mechanisms.from_json`.
        prior: probability that the record is present, strictly between 0 and 1.
        points: how many false-positive rates.
        relation: when two datasets are neighbours.
    """
    question = Question(canonical_form(mechanism), relation)
    referee = ACCOUNTANTS[DEFAULT_METHOD]
    farthest = referee.epsilon(question, 1e-6).epsilon
    lines = [
        (eps, referee.delta(question, eps).delta)
        for eps in farthest * np.linspace(0.0, 1.0, _TRADE_OFF_LINES) ** 2
    ]
    rates = _false_positive_rates(points)
    lowest = np.zeros_like(rates)
    for eps, dlt in lines:
        steep, flat = 1 - dlt - math.exp(min(eps, 700)) * rates, math.exp(-eps) * (1 - dlt - rates)
        lowest = np.maximum(lowest, np.maximum(steep, flat))
    at_zero = _interval(referee.delta(question, 0.0))
    at_prior = _interval(referee.delta(question, abs(math.log((1 - prior) / prior))))
    larger, smaller = max(prior, 1 - prior), min(prior, 1 - prior)
    # δ is the larger of both directions; which one the prior asks for is known to be as large
    # only where they are equal. Elsewhere guessing the likelier answer is all that is proved.
    symmetric = all(part.rate == 1.0 for part in question.parts)
    least = larger + smaller * at_prior.lower if symmetric else larger
    return TradeOff(
        tuple(float(rate) for rate in rates),
        tuple(float(rate) for rate in lowest),
        at_zero,
        Interval(least, larger + smaller * at_prior.upper),
        question.form.hash,
    )


def _false_positive_rates(points: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Rates from 0 to 1, dense near 0, where membership attacks are judged."""
    return np.concatenate([[0.0], np.geomspace(1e-5, 1.0, points - 1)])


def _interval(guarantee: Guarantee) -> Interval:
    return guarantee.certified or Interval(0.0, guarantee.delta)
