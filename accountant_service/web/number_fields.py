"""Fields of forms: their labels and limits, and how a typed text is read.

Those of a question follow from its model: `OnPage` says there that a form shows a field.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import BaseModel

from accountant_service.questions.question_fields import OnPage, QuestionField, list_fields
from accountant_service.writing.number_format import TOO_MANY_DIGITS, is_exact

_TEXT_MAX: Final = 40


@dataclass(frozen=True, slots=True)
class NumberField:
    """A field of a form in which a number is typed, or a text, with its label and limits.

    Attributes:
        label: its name on the page.
        symbol: its symbol in formulas.
        initial: the text it has at first.
        hint: a short explanation.
        exponents: the smallest and largest power of ten of its slider, if it has one.
        whole: True if only whole numbers make sense.
        required: True if it may not be empty.
        is_text: True if any text makes sense.
    """

    label: str
    symbol: str
    initial: str
    hint: str
    exponents: tuple[float, float] | None = None
    whole: bool = False
    required: bool = field(default=True, repr=False)
    is_text: bool = field(default=False, repr=False)

    def sentence(self, message: str) -> str:
        """Return a sentence that tells the user of an error in this field."""
        return f"{self.label} {message.replace('_', ' ')}."

    def read(self, text: str) -> Any:
        """Return the value of a typed text for the API; None if it may be empty, and is.

        Raises:
            ValueError: it has none; the message continues the field's name.
        """
        if not text and not self.required:
            return None
        return text if self.is_text else parse_number(text, self.whole)


def describe_fields(
    model: type[BaseModel], required: Container[str] = ()
) -> dict[str, NumberField]:
    """Return the fields of a question that a form shows and that are no choices, by name.

    Args:
        model: the question.
        required: fields that the form requires, though the question does not.
    """
    return {
        name: _describe_field(field, field.on_page, field.required or name in required)
        for name, field in list_fields(model).items()
        if field.on_page and not field.choices
    }


def _describe_field(field: QuestionField, shown: OnPage, required: bool) -> NumberField:
    has_symbol = field.about[1:3] == ": "
    symbol, text = (field.about[0], field.about[3:]) if has_symbol else ("", field.about)
    hint = shown.hint or text.partition(";")[0] + ("" if required else "; may be empty")
    return NumberField(
        shown.label or field.name.replace("_", " ").capitalize(),
        shown.symbol or symbol,
        shown.initial,
        hint,
        shown.slider,
        field.schemas[0]["type"] == "integer",
        required,
        field.schemas[0]["type"] == "string",
    )


def read_values(
    fields: Mapping[str, NumberField], texts: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of typed texts, and a sentence for each field that is wrong, by name."""
    values: dict[str, Any] = {}
    problems: dict[str, str] = {}
    for name, each in fields.items():
        try:
            value = each.read(texts[name])
        except ValueError as error:
            problems[name] = each.sentence(str(error))
        else:
            values |= {} if value is None else {name: value}
    return values, problems


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
    if not is_exact(text):
        raise ValueError(TOO_MANY_DIGITS)
    return int(value) if whole and value.is_integer() else value
