"""Results of the package's solvers: a value and its guarantee."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accountant_service.accounting.guarantee import Guarantee, Interval
from accountant_service.writing import number_format
from accountant_service.writing.presentation import Presented, Row


class Solved(Presented):
    """Base class of a solver's results.

    Attributes:
        guarantee: the guarantee at what was found.
        risk: bounds of the risk, if the target is a risk: proved if the guarantee is proven.
    """

    __slots__ = ()
    guarantee: Guarantee
    risk: Interval | None

    def __str__(self) -> str:
        """Return the result in a line."""
        return f"{' '.join(self._describe())}: {self.guarantee}"

    def table(self) -> list[Row]:
        """Return what was solved for, and the guarantee."""
        return [self._describe(), *self.guarantee.table()]

    def _describe(self) -> Row:
        """Return the name and the value of what was solved for, rounded to the safe side."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, repr=False)
class SolvedNoiseMultiplier(Solved):
    """The least noise multiplier that meets a target.

    Attributes:
        noise_multiplier: σ, rounded up.
        guarantee: the guarantee at that noise multiplier.
        risk: bounds of the risk, if the target is a risk: proved if the guarantee is proven.
    """

    noise_multiplier: float
    guarantee: Guarantee
    risk: Interval | None = None

    def _describe(self) -> Row:
        return "noise multiplier", number_format.round_up(self.noise_multiplier)


@dataclass(frozen=True, slots=True, repr=False)
class SolvedSteps(Solved):
    """The largest number of steps that meets a target.

    Attributes:
        steps: the number of steps.
        guarantee: the guarantee after these steps.
        next: the guarantee after one step more, which is not proved to meet the target.
        undecided: how far the true ε, or risk, of one step more may be from the target, if its
            proved interval contains the target; None if one step more is proved to miss it.
        risk: bounds of the risk, if the target is a risk: proved if the guarantee is proven.
    """

    steps: int
    guarantee: Guarantee
    next: Guarantee
    undecided: float | None = None
    risk: Interval | None = None

    def _describe(self) -> Row:
        return "steps", str(self.steps)


@dataclass(frozen=True, slots=True, repr=False)
class SolvedSampleRate(Solved):
    """The largest sample rate that meets a target.

    Attributes:
        sample_rate: q, rounded down.
        guarantee: the guarantee at that sample rate.
        risk: bounds of the risk, if the target is a risk: proved if the guarantee is proven.
    """

    sample_rate: float
    guarantee: Guarantee
    risk: Interval | None = None

    def _describe(self) -> Row:
        return "sample rate", number_format.round_down(self.sample_rate)


@dataclass(frozen=True, slots=True, repr=False)
class SolvedParameter(Solved):
    """The value of a mechanism's free parameter that costs most within a target.

    Attributes:
        value: of the parameter, rounded to the safe side.
        mechanism: the mechanism as JSON, with this value.
        guarantee: the guarantee at that value.
        next: of a whole number: the guarantee of one more, which is not proved to meet the target.
        undecided: as in `SolvedSteps`, of a whole number.
        risk: bounds of the risk, if the target is a risk: proved if the guarantee is proven.
    """

    value: float
    mechanism: Mapping[str, Any]
    guarantee: Guarantee
    next: Guarantee | None = None
    undecided: float | None = None
    risk: Interval | None = None

    def _describe(self) -> Row:
        return "value", number_format.exactly(self.value)
