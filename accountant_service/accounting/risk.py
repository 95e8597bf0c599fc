"""Measures of risk that a run may be solved for: what the best membership attacker achieves.

All follow from δ(ε) in the two directions, δ of "removing" and δ′ of "adding". With P the record
present and Q absent, a test has the false-positive rate Q(A) and the true-positive rate P(A).

    advantage            max TPR − FPR = δ(0)
    attack success       best guess at prior π: m + (1 − m)·δ(log(m/(1 − m))), m = max(π, 1 − π);
                         δ for π ≤ ½, δ′ above
    TPR at an FPR α      at most δ(ε) + e^ε·α and 1 − e^{−ε}(1 − δ′(ε) − α), for every ε ≥ 0
    μ up to a slack s    δ(ε) and δ′(ε) ≤ δ_μ(ε) + s for every ε ≥ 0, δ_μ of the Gaussian mechanism:
                         the trade-off function is at least G_μ(α) − s at every α

The last is what is claimed for μ. Without a slack, a sampled run is μ-GDP only at the μ = √(Σ T/σ²)
of the same run without sampling: with probability q^T the record is in every batch, and then the
tail of the loss is that of the unsampled run. Upper ends are rounded up, lower ends down.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Final

import numpy as np

from accountant_service.accounting import release_laws
from accountant_service.accounting.guarantee import Guarantee, Interval
from accountant_service.accounting.methods import ACCOUNTANTS, DEFAULT_METHOD, Question
from accountant_service.accounting.methods.base import report_contradictions
from accountant_service.accounting.methods.pld import dominating_pairs
from accountant_service.errors import MethodNotApplicableError
from accountant_service.numerics import trade_off as enclosure
from accountant_service.numerics.floats import rounding
from accountant_service.numerics.floats.special_functions import Array
from accountant_service.numerics.laws.dominating_pair import DIRECTIONS

_MU_POINTS: Final = 513
_NARROW: Final = 1e-3  # relative width of δ at which no other engine is tried
_NEGLIGIBLE: Final = 1e-9  # a δ below which none is tried either
_EPSILON_MAX: Final = 600.0  # e^ε is a double
_MU_MAX: Final = 1000.0  # of targets
_COARSE: Final = 0.05  # relative width of an ε that only ends a grid


class RiskMeasure(ABC):
    """A measure of how well a membership attack on a run succeeds.

    Attributes:
        name: its name in the API.
    """

    name: ClassVar[str]

    @abstractmethod
    def bounds(self, question: Question) -> Interval:
        """Return proved bounds on the risk of a mechanism with at least one release."""

    def proof_epsilon(self, question: Question) -> float:  # noqa: ARG002
        """Return the ε whose (ε, δ) guarantee implies the bound on the risk."""
        return 0.0

    @abstractmethod
    def least(self) -> float:
        """Return the risk of a mechanism that releases nothing, where attackers only guess."""

    def excess(self, value: float) -> float:
        """Return by how much a risk exceeds that of an attacker who only guesses."""
        return value - self.least()

    def risk(self, question: Question) -> Interval:
        """Return proved bounds on the risk of a mechanism, even if it releases nothing.

        Raises:
            AccountingError: no dominating pair is proved, or the work limit is exceeded.
        """
        question = question.of_common_part()
        ACCOUNTANTS[DEFAULT_METHOD].check_assumptions(question)
        if not question.form.atom_counts:
            return Interval(self.least(), self.least())
        with report_contradictions(question, self.name):
            found = self.bounds(question)
        return Interval(found.lower if question.is_attained else self.least(), found.upper)

    def guarantee(self, question: Question) -> Guarantee:
        """Return an (ε, δ) guarantee that implies a bound on the risk."""
        epsilon = self.proof_epsilon(question.of_common_part())
        return ACCOUNTANTS[DEFAULT_METHOD].delta(question, epsilon)


@dataclass(frozen=True, slots=True)
class Advantage(RiskMeasure):
    """Membership advantage, TPR − FPR of the best attack: the total variation distance δ(0)."""

    name: ClassVar = "advantage"

    def least(self) -> float:
        """Return 0, the advantage of an attacker who only guesses."""
        return 0.0

    def bounds(self, question: Question) -> Interval:
        """Return proved bounds on the advantage, δ(0)."""
        return _delta(question, 0.0)


@dataclass(frozen=True, slots=True)
class AttackSuccess(RiskMeasure):
    """The probability that the best guess of membership is right.

    Attributes:
        prior: probability that the record is present.
    """

    name: ClassVar = "attack_success"
    prior: float

    def least(self) -> float:
        """Return the success probability of an attacker who always guesses the likelier answer."""
        return max(self.prior, 1 - self.prior)

    def proof_epsilon(self, question: Question) -> float:  # noqa: ARG002
        """Return the ε at which δ bounds the success: the log-odds of the prior."""
        return abs(math.log((1 - self.prior) / self.prior))

    def bounds(self, question: Question) -> Interval:
        """Return proved bounds on an attack's probability of success, from δ(ε) at one ε."""
        epsilon = self.proof_epsilon(question)
        direction = DIRECTIONS[0] if self.prior <= 0.5 else DIRECTIONS[1]
        curve = enclosure.direction_curve(
            dominating_pairs(question), direction, np.array([epsilon])
        )
        lower, upper = float(curve.lower[0]), float(curve.upper[0])
        if self.prior <= 0.5 or (upper > _NEGLIGIBLE and upper - lower > _NARROW * upper):
            upper = _delta(question, epsilon).upper  # at least that of either direction
        low, high = (self.least() + (1 - self.least()) * delta for delta in (lower, upper))
        high = max(low, high)
        return Interval(max(self.least(), rounding.down(low)), min(1.0, rounding.up(high)))


@dataclass(frozen=True, slots=True)
class TruePositiveRate(RiskMeasure):
    """The largest true-positive rate of an attack with a given false-positive rate.

    Attributes:
        false_positive_rate: in (0, 1).
    """

    name: ClassVar = "true_positive_rate"
    false_positive_rate: float

    def least(self) -> float:
        """Return the false-positive rate, which is the true-positive rate of random accusations."""
        return self.false_positive_rate

    def proof_epsilon(self, question: Question) -> float:
        """Return the ε whose δ gives the least upper bound on the true-positive rate."""
        return _true_positive_rate(question, self.false_positive_rate)[0]

    def bounds(self, question: Question) -> Interval:
        """Return proved bounds on the true-positive rate, from bounds on δ at many ε."""
        _, upper, lower = _true_positive_rate(question, self.false_positive_rate)
        return Interval(lower, upper)


@lru_cache(maxsize=4)  # a solution asks for its risk and for the guarantee that implies it
def _true_positive_rate(question: Question, rate: float) -> tuple[float, float, float]:
    """Return the ε of the best bound on a true-positive rate, that bound, and a lower bound."""
    return enclosure.true_positive_rate(dominating_pairs(question), rate)


@dataclass(frozen=True, slots=True)
class GaussianMu(RiskMeasure):
    """The least μ for which a mechanism is μ-Gaussian DP, up to a chosen error `slack`.

    Attributes:
        slack: s in f ≥ G_μ − s; 0 for μ-GDP at all rates.
    """

    name: ClassVar = "mu"
    slack: float = 0.0

    def least(self) -> float:
        """Return 0, the μ of a mechanism that releases nothing."""
        return 0.0

    def bounds(self, question: Question) -> Interval:
        """Return proved bounds on the least μ for which the mechanism is μ-Gaussian DP.

        Without slack, the least μ of sampled Gaussian releases is exactly that without sampling.

        Raises:
            MethodNotApplicableError: there is no slack, and a release is not charged as Gaussian.
        """
        cost = release_laws.simple_cost(question.release_groups, question.relation)
        unsampled = cost.mu if cost.is_gaussian else math.inf
        if unsampled == 0.0:
            return Interval(0.0, 0.0)
        if self.slack == 0.0:
            return _exact_mu(question, unsampled)
        coarse = replace(question, tolerance=_COARSE)
        last = ACCOUNTANTS[DEFAULT_METHOD].epsilon_bound(coarse, self.slack / 2).value
        largest = min(last, _EPSILON_MAX)
        grid = np.linspace(0.0, max(largest, 1e-6), _MU_POINTS)
        curves = _both_directions(question, grid)
        low, high = enclosure.least_mu(curves, self.slack, min(unsampled, _MU_MAX))
        return Interval(low, min(high, rounding.up(unsampled)))


def _both_directions(
    question: Question, grid: Array
) -> tuple[enclosure.DirectionCurve, enclosure.DirectionCurve]:
    """Return bounds on δ at each ε of a grid: for a removed and for an added record."""
    removing, adding = (
        enclosure.direction_curve(dominating_pairs(question), direction, grid)
        for direction in DIRECTIONS
    )
    return removing, adding


def _delta(question: Question, epsilon: float) -> Interval:
    """Return proved bounds on δ at ε."""
    bound = ACCOUNTANTS[DEFAULT_METHOD].delta_bound(question, epsilon)
    assert bound.interval is not None
    return Interval(bound.interval.lower, min(1.0, bound.interval.upper))


def _exact_mu(question: Question, unsampled: float) -> Interval:
    """Return bounds on the least μ without slack, from that of the releases without sampling.

    Raises:
        MethodNotApplicableError: that is infinite.
    """
    for group in question.release_groups:
        if not release_laws.simple_cost([group], question.relation).is_gaussian:
            raise MethodNotApplicableError(
                f"mu without delta needs Gaussian releases, not {group.atom.noise}",
                group.atom.pointer,
            )
    is_exact = all(group.atom.noise == "gaussian" for group in question.release_groups)
    return Interval(rounding.down(unsampled) if is_exact else 0.0, rounding.up(unsampled))
