"""What every answer says: a number, how far it can be trusted, and on which hypotheses."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from accountant_service import __version__


class Status(StrEnum):
    """How far a claim can be trusted."""

    PROVEN = "proven"
    ESTIMATE = "estimate"
    REFUTED = "refuted"


class NeighbouringRelation(StrEnum):
    """When two datasets are neighbours.

    Under `replace_one` a clipped sum moves by up to 2C, so the effective noise multiplier is half
    the stated one; under the other two it moves by up to C.
    """

    ADD_OR_REMOVE_ONE = "add_or_remove_one"
    REPLACE_ONE = "replace_one"
    ZERO_OUT_ONE = "zero_out_one"

    @property
    def sensitivity(self) -> float:
        """The ℓ2 sensitivity of a sum of vectors clipped to norm C, in units of C."""
        return 2.0 if self is NeighbouringRelation.REPLACE_ONE else 1.0


@dataclass(frozen=True, slots=True)
class Assumption:
    """One hypothesis of a method's theorem, and whether it holds for the question asked."""

    statement: str
    holds: bool
    source: str


@dataclass(frozen=True, slots=True)
class Interval:
    """A proved enclosure: the true value is at least `lower` and at most `upper`."""

    lower: float
    upper: float


@dataclass(frozen=True, slots=True)
class Guarantee:
    """A claim that a mechanism is (ε, δ)-differentially private.

    Attributes:
        epsilon: ε ≥ 0. When δ was asked for, the ε of the question.
        delta: δ in (0, 1]. When ε was asked for, the δ of the question.
        solved_for: which of the two is the answer; the certified interval is about it.
        method: the accountant's name.
        status: proven, estimate or refuted.
        certified: a proved interval around the true answer, where one was computed.
        certified_reason: why there is none, when there is none.
        neighbouring_relation: for which notion of neighbours the claim holds.
        sampling: the sampling of the mechanism's releases, `mixed` if they differ.
        assumptions: the hypotheses, with whether they hold.
        optimal_order: the Rényi or moment order that gave the value, for methods that have one.
        mechanism_hash: the canonical hash of the mechanism.
        conversion: the theorem that turned a divergence into (ε, δ), for methods that use one.
        warnings: why the certified interval is wider than was aimed at, where it is.
    """

    epsilon: float
    delta: float
    solved_for: str
    method: str
    status: Status
    neighbouring_relation: NeighbouringRelation
    sampling: str
    assumptions: tuple[Assumption, ...]
    mechanism_hash: str
    certified: Interval | None = None
    certified_reason: str | None = None
    optimal_order: float | None = None
    conversion: str | None = None
    warnings: tuple[str, ...] = ()
    accountant_version: str = field(default=__version__)
