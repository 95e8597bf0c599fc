"""The planner's form: reads it from the URL, and turns it into the body of `POST /v1/plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from accountant_service.questions.plan_models import PlanRequest
from accountant_service.web.choices import describe_choices
from accountant_service.web.number_fields import describe_fields, read_values

Json = dict[str, Any]

FIELDS: Final = describe_fields(PlanRequest, required=("epochs",))
CHOICES: Final = describe_choices(PlanRequest)


@dataclass(frozen=True, slots=True)
class PlanForm:
    """The planner's form: typed texts, their values, and errors found.

    Attributes:
        texts: the text of every field and choice, by name.
        values: the values of the fields that have one, by name.
        problems: a sentence for each field that is wrong, by name.
        filled: the names of required fields that the address lacks, if it has others.
    """

    texts: Mapping[str, str]
    values: Mapping[str, Any]
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
    texts = {
        name: query.get(name, field.initial if field.required or not query else "").strip()
        for name, field in FIELDS.items()
    }
    texts |= {name: choice.read(query.get(name)) for name, choice in CHOICES.items()}
    values, problems = read_values(FIELDS, texts)
    filled = [name for name, field in FIELDS.items() if field.required and name not in query]
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
