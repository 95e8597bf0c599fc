"""Number fields of forms: their labels and limits, and how a typed number is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

_TEXT_MAX: Final = 40


@dataclass(frozen=True, slots=True)
class NumberField:
    """A number field of a form, with its label and limits.

    Attributes:
        label: its name on the page.
        symbol: its symbol in formulas.
        initial: the text it has at first.
        hint: a short explanation.
        exponents: the smallest and largest power of ten of its slider, if it has one.
        whole: True if only whole numbers make sense.
    """

    label: str
    symbol: str
    initial: str
    hint: str
    exponents: tuple[float, float] | None = None
    whole: bool = False

    def sentence(self, message: str) -> str:
        """Return a sentence that tells the user of a problem with this field."""
        return f"{self.label} {message.replace('_', ' ')}."


DELTA: Final = NumberField(
    "Failure probability", "δ", "1e-5", "well below 1 ÷ number of records", (-10, -2)
)
RECORDS: Final = NumberField(
    "Records", "N", "60000", "number of records in the dataset", whole=True
)


def parse_number(text: str, whole: bool) -> float:
    """Parse a typed number for the API; raise ValueError unless it is a finite number.

    Raises:
        ValueError: the text is no such number; the message continues the field's name.
    """
    if not text:
        raise ValueError("is required")
    try:
        value = float(text) if len(text) <= _TEXT_MAX else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        expected = "a whole number" if whole else "a number, such as 0.01 or 1e-5"
        raise ValueError(f"must be {expected}")
    return int(value) if whole and value.is_integer() else value
