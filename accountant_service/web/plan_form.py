"""The planner's form: reads it from the URL, and turns it into the body of `POST /v1/plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from accountant_service.web.choices import RELATION, Choice
from accountant_service.web.number_fields import DELTA, RECORDS, NumberField, parse_number

Json = dict[str, Any]

FIELDS: Final[Mapping[str, NumberField]] = {
    "epsilon": NumberField("Budget", "ε", "2", "the run must not exceed it", (-1, 1.3)),
    "delta": DELTA,
    "dataset_size": RECORDS,
    "epochs": NumberField(
        "Epoch limit", "E", "20", "passes over the dataset that you can afford", (-1, 3)
    ),
    "batch_size": NumberField(
        "Batch size today", "B", "256", "to compare with; may be empty", whole=True
    ),
    "steps": NumberField("Steps today", "T", "", "empty: as many as the epochs allow", whole=True),
}
CHOICES: Final[Mapping[str, Choice]] = {
    "sampling": Choice(
        "Sampling",
        {
            "both": "Poisson or balls in bins",
            "poisson": "Poisson",
            "balls_in_bins": "balls in bins",
        },
    ),
    "neighbouring_relation": RELATION,
}
_OPTIONAL: Final = {"batch_size", "steps"}


@dataclass(frozen=True, slots=True)
class PlanForm:
    """The planner's form: typed texts, their values, and errors found.

    Attributes:
        texts: the text of every field and choice, by name.
        values: the numbers of the fields that have one, by name.
        problems: a sentence for each field that is wrong, by name.
        filled: the names of required fields that the address lacks, if it has others.
    """

    texts: Mapping[str, str]
    values: Mapping[str, float]
    problems: Mapping[str, str]
    filled: tuple[str, ...] = ()

    @property
    def body(self) -> Json:
        """The form as a request body for the API's `POST /v1/plan`."""
        return dict(self.values) | {name: self.texts[name] for name in CHOICES}


def read_form(query: Mapping[str, str]) -> PlanForm:
    """Return the form for a URL's query; missing fields have their initial text.

    If the query has other fields, a missing one that may be empty is so: today's choice, which the
    initial form has as an example, is nobody's.
    """
    empty = _OPTIONAL if query else ()
    texts = {
        name: query.get(name, "" if name in empty else field.initial).strip()
        for name, field in FIELDS.items()
    }
    texts |= {name: choice.read(query.get(name)) for name, choice in CHOICES.items()}
    values: dict[str, float] = {}
    problems: dict[str, str] = {}
    for name, field in FIELDS.items():
        if not texts[name] and name in _OPTIONAL:
            continue
        try:
            values[name] = parse_number(texts[name], field.whole)
        except ValueError as error:
            problems[name] = problem_sentence(name, str(error))
    filled = [name for name in FIELDS if name not in query and name not in _OPTIONAL]
    return PlanForm(texts, values, problems, tuple(filled) if query else ())


def problem_sentence(name: str, message: str) -> str:
    """Return a sentence for the user about an error in a field."""
    if name in FIELDS:
        return FIELDS[name].sentence(message)
    return f"The plan {message.replace('_', ' ')}."


def list_choice_faults(query: Mapping[str, str]) -> list[str]:
    """Return a sentence for each choice in the URL that has an unknown value."""
    found = (choice.find_fault(name, query.get(name)) for name, choice in CHOICES.items())
    return [fault for fault in found if fault is not None]
