"""The planner's form: reads it from the URL, and turns it into the body of `POST /v1/plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from accountant_service.web.calculator_form import NumberField, parse_number

Json = dict[str, Any]

FIELDS: Final[Mapping[str, NumberField]] = {
    "epsilon": NumberField("Budget", "ε", "2", "the run must not exceed it", (-1, 1.3)),
    "delta": NumberField(
        "Failure probability", "δ", "1e-5", "well below 1 ÷ number of records", (-10, -2)
    ),
    "dataset_size": NumberField("Records", "N", "60000", "number of records in the dataset"),
    "epochs": NumberField(
        "Epoch limit", "E", "20", "passes over the dataset that you can afford", (-1, 3)
    ),
    "batch_size": NumberField("Batch size today", "B", "256", "to compare with; may be empty"),
    "steps": NumberField("Steps today", "T", "", "empty: as many as the epochs allow"),
}
CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "sampling": ("both", "poisson", "balls_in_bins"),
    "neighbouring_relation": ("add_or_remove_one", "replace_one", "zero_out_one"),
}
_WHOLE: Final = {"dataset_size", "batch_size", "steps"}
_OPTIONAL: Final = {"batch_size", "steps"}


@dataclass(frozen=True, slots=True)
class PlanForm:
    """The planner's form: typed texts, their values, and the problems found.

    Attributes:
        texts: the text of every field and choice, by name.
        values: the numbers of the fields that have one, by name.
        problems: a sentence for each field that is wrong, by name.
    """

    texts: Mapping[str, str]
    values: Mapping[str, float]
    problems: Mapping[str, str]

    @property
    def body(self) -> Json:
        """The request body for the API."""
        return dict(self.values) | {name: self.texts[name] for name in CHOICES}


def read_form(query: Mapping[str, str]) -> PlanForm:
    """Return the form for a URL's query; missing fields have their initial text."""
    texts = {name: query.get(name, field.initial).strip() for name, field in FIELDS.items()}
    texts |= {
        name: query[name] if query.get(name) in options else options[0]
        for name, options in CHOICES.items()
    }
    values: dict[str, float] = {}
    problems: dict[str, str] = {}
    for name in FIELDS:
        if not texts[name] and name in _OPTIONAL:
            continue
        try:
            values[name] = parse_number(texts[name], name in _WHOLE)
        except ValueError as error:
            problems[name] = problem_sentence(name, str(error))
    return PlanForm(texts, values, problems)


def problem_sentence(name: str, message: str) -> str:
    """Return a sentence for the user about a problem with a field."""
    text = message.replace("_", " ")
    return f"{FIELDS[name].label} {text}." if name in FIELDS else f"The plan {text}."
