"""Privacy loss distributions, two-sided: the default method and the referee of all others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from accountant_service.accountants.base import Accountant, Bound, Part, Question
from accountant_service.errors import MethodNotApplicableError, TooExpensiveError
from accountant_service.guarantee import Assumption, Interval, NeighbouringRelation
from accountant_service.numerics import gaussian, rounding, two_sided
from accountant_service.numerics.privacy_loss import GaussianRatio, LaplaceRatio, Release

_POISSON: Final = "Zhu, Dong & Wang 2022, arXiv 2106.08567v4, Theorem 11"
_GAUSSIAN: Final = "Balle & Wang 2018, arXiv 1805.06530v2, Theorem 8"
_TOLERANCE: Final = 1e-3
_PARTS_MAX: Final = 1200


class Pld(Accountant):
    """A proved interval around the true ε: its upper end is the answer.

    See numerics/lattice.py for the bounds and docs/accountants/pld.md for their proofs. Unsampled
    Gaussian releases have the closed form of the analytic Gaussian mechanism.
    """

    name = "pld"
    title = "Privacy loss distribution, two-sided"
    source = f"{_POISSON}; connect the dots: arXiv 2207.04380v1; papers/003 eq. (4) at q = 1"
    needs = "Gaussian or Laplace noise; with sampling, add/remove or zero-out neighbours"
    proves = "a lower and an upper bound of ε, a relative 1e-3 apart or less in almost all cases"

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
        """The certified interval around ε.

        Sampling never hurts, so the closed form of the same releases without it caps the lattice.
        """
        whole, releases = _releases(question)
        exact = float(gaussian.epsilon(delta, whole)) if math.isfinite(whole) else math.inf
        if not releases:
            return _bound(rounding.down(exact), rounding.up(exact))
        bounds = two_sided.epsilon_bounds(releases, delta, _TOLERANCE)
        return _bound(bounds.lower, min(bounds.upper, rounding.up(exact)))

    def delta_bound(self, question: Question, epsilon: float) -> Bound:
        """The certified interval around δ."""
        whole, releases = _releases(question)
        exact = math.exp(float(gaussian.log_delta(epsilon, whole))) if math.isfinite(whole) else 1.0
        if not releases:
            return _bound(rounding.down(exact), min(1.0, rounding.up(exact)))
        bounds = two_sided.delta_bounds(releases, epsilon, _TOLERANCE)
        return _bound(bounds.lower, min(1.0, bounds.upper, rounding.up(exact)))


def _bound(lower: float, upper: float) -> Bound:
    return Bound(upper, interval=Interval(lower, upper))


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


def _releases(question: Question) -> tuple[float, list[tuple[Release, int]]]:
    """The μ of all releases made without sampling, and the composition to put on a lattice.

    Unsampled Gaussian releases compose to a single one. If there is nothing else, there is no
    lattice; with Laplace noise there is no such μ, and it is infinite.
    """
    exact = [p for p in question.parts if p.rate == 1.0 and p.atom.noise == "gaussian"]
    others = [p for p in question.parts if p not in exact]
    releases = [(_release(p), p.count) for p in others]
    if releases and exact:
        releases.append((Release(GaussianRatio(_mu(exact))), 1))
    laplace = any(p.atom.noise == "laplace" for p in others)
    return (math.inf if laplace else _mu(question.parts)), releases


def _mu(parts: Sequence[Part]) -> float:
    return math.sqrt(math.fsum(part.count / part.sigma**2 for part in parts))


def _release(part: Part) -> Release:
    if part.atom.noise == "laplace":
        return Release(LaplaceRatio(1 / part.sigma), part.rate)
    return Release(GaussianRatio(1 / part.sigma), part.rate)
