"""A guarantee: ε and δ, with the status, the certified interval and the hypotheses."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum
from typing import Final

from accountant_service.version import __version__
from accountant_service.writing import number_format
from accountant_service.writing.presentation import Presented, Row

WEAK_EPSILON: Final = 20


class Status(StrEnum):
    """The status of a claim: proven, an estimate, or refuted by a proved lower bound."""

    PROVEN = "proven"
    ESTIMATE = "estimate"
    REFUTED = "refuted"


class NeighbouringRelation(StrEnum):
    """The neighbouring relation: which pairs of datasets a guarantee compares.

    Under `replace_one` a clipped sum changes by up to 2C, so the effective noise multiplier is half
    the stated one; under the other two it changes by up to C.
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
    """One hypothesis of a method's theorem, with its source and whether it holds."""

    statement: str
    holds: bool
    source: str


@dataclass(frozen=True, slots=True)
class Interval:
    """A proved enclosure: the true value is at least `lower` and at most `upper`."""

    lower: float
    upper: float


@dataclass(frozen=True, slots=True, repr=False)
class Guarantee(Presented):
    """A claim that a mechanism is (ε, δ)-differentially private.

    Attributes:
        epsilon: ε ≥ 0: computed, or given if `solved_for` is "delta".
        delta: δ in [0, 1]: computed, or given if `solved_for` is "epsilon".
        solved_for: "epsilon" or "delta": the computed one, which the certified interval encloses.
        method: the accounting method's name.
        status: proven, estimate or refuted.
        certified: a proved interval around the true value, if one was computed.
        certified_reason: why there is no certified interval, if there is none.
        neighbouring_relation: the neighbouring relation under which the claim holds.
        sampling: the sampling of the mechanism's releases, `mixed` if they differ.
        assumptions: the hypotheses of the method's theorem, with whether each holds.
        optimal_order: the Rényi or moment order that gave the value, for methods that have one.
        mechanism_hash: the canonical hash of the mechanism.
        conversion: the theorem that turned a divergence into (ε, δ), for methods that use one.
        warnings: why the certified interval is wider than the tolerance, if it is.
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

    def __str__(self) -> str:
        """Return the claim in a line; ε and δ are rounded up."""
        epsilon, delta = map(number_format.round_up, (self.epsilon, self.delta))
        proved = f" ({found})" if (found := self._describe_interval()) else ""
        return f"ε = {epsilon} at δ = {delta}, {self.status} by {self.method}{proved}"

    def table(self) -> list[Row]:
        """Return the claim, what is proved, and the hypotheses."""
        marks = {True: "✓", False: "✗"}
        return [
            ("ε", number_format.round_up(self.epsilon)),
            ("δ", number_format.round_up(self.delta)),
            ("status", f"{self.status} by {self.method}"),
            ("proved", self._describe_interval() or self.certified_reason or "nothing"),
            ("for", f"{self.neighbouring_relation}, {self.sampling} sampling"),
            *(("assumes", f"{marks[each.holds]} {each.statement}") for each in self.assumptions),
            *(("warning", each) for each in self.warnings),
        ]

    def _describe_interval(self) -> str:
        """Return the certified interval in words; empty if there is none."""
        if self.certified is None:
            return ""
        symbol = "ε" if self.solved_for == "epsilon" else "δ"
        lower = number_format.round_down(self.certified.lower)
        return f"{lower} ≤ {symbol} ≤ {number_format.round_up(self.certified.upper)}"


def count_exposed_records(size: int, delta: float) -> Decimal:
    """Return δ times the number of records, of the decimal number that was written for δ.

    A mechanism that publishes each record with probability δ publishes so many on average.
    """
    return number_format.as_written(delta) * size


def list_weaknesses(size: int, epsilon: float, delta: float) -> dict[str, str]:
    """Return why a guarantee protects hardly anyone: a sentence for ε, for δ or for both.

    Args:
        size: the number of records.
        epsilon: ε of a budget.
        delta: δ of a budget.
    """
    found = {}
    if epsilon > WEAK_EPSILON:
        found["epsilon"] = (
            f"ε = {number_format.round_up(epsilon)} is above {WEAK_EPSILON}: an attacker may "
            "tell of almost every record whether it is in the data"
        )
    if (warning := warn_about_delta(size, delta)) is not None:
        found["delta"] = warning
    return found


def warn_about_delta(size: int | None, delta: float) -> str | None:
    """Return a warning if δ is not below one over the number of records; else None.

    Args:
        size: the number of records, if it is known.
        delta: δ of a guarantee or a budget.
    """
    if size is None or count_exposed_records(size, delta) < 1:
        return None
    return (
        f"δ = {number_format.round_up(delta)} is not below 1/{size}, one over the number of "
        "records. A mechanism that publishes one record chosen at random would be allowed. "
        "Choose a δ far below that"
    )
