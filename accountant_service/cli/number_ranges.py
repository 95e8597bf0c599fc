"""Ranges of number options, for commands that ask no endpoint of the API."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from accountant_service.cli.problems import advise_on_number, exit_with_faults
from accountant_service.writing import number_format


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that an option allows.

    Attributes:
        least: the smallest allowed number, or the limit below it if `open_` is True.
        most: the largest allowed number, or the limit above it if `open_` is True.
        is_whole: True if only whole numbers are allowed.
        open_: True if the limits themselves are not allowed.
    """

    least: float
    most: float
    is_whole: bool = False
    open_: bool = False

    def find_fault(self, value: Any) -> str | None:
        """Return what is wrong with a value, or None if it is allowed."""
        is_number = isinstance(value, int | float) and math.isfinite(value)
        if is_number and self._contains(value):
            return None
        kind = "a whole number" if self.is_whole else "a number"
        low, high = (number_format.round_nearest(each, 12) for each in (self.least, self.most))
        limits = f"between {low} and {high}" if self.open_ else f"from {low} to {high}"
        shown = number_format.round_nearest(value, 12) if is_number else repr(value)
        return f"must be {kind} {limits}, not {shown}"

    def _contains(self, value: float) -> bool:
        """Return whether a finite number is in the range."""
        if self.is_whole and not isinstance(value, int):
            return False
        if self.open_:
            return self.least < value < self.most
        return self.least <= value <= self.most


def require_in_range(*given: tuple[str, Any, Range]) -> None:
    """Exit with code 2 if numbers are outside their ranges; the message names all of them.

    Args:
        given: an option, its value and its range. The value None, or an empty list, was not given;
            a list has the values of an option that was repeated.
    """
    faults = [
        {"option": option, "message": f"{fault}: {advice}" if advice else fault}
        for option, value, allowed in given
        if value is not None
        for each in (value if isinstance(value, list) else [value])
        if (fault := allowed.find_fault(each))
        for advice in [advise_on_number(option.lstrip("-"), each)]
    ]
    if faults:
        exit_with_faults(faults)
