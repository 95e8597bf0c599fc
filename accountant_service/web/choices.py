"""Choices of forms: the options of each, their labels, and sentences about unknown options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel

from accountant_service.importing import FORMATS
from accountant_service.questions.models import RelationRequest
from accountant_service.questions.question_fields import list_fields
from command_words.names import find_value

_SHOWN_MAX: Final = 40  # characters of an unknown option that a sentence repeats
_UNDECIDED: Final = {"format": "found from the text"}
_WORDS: Final[Mapping[str, str]] = {  # of values that their name with spaces does not explain
    "poisson": "Poisson",
    "both": "Poisson or balls in bins",
    "none": "none: the whole dataset",
    "add_or_remove_one": "one record added or removed",
    "replace_one": "one record replaced",
    "zero_out_one": "one record zeroed out",
    **{name: each.title for name, each in FORMATS.items()},
}


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice between options in a form, with their labels.

    Attributes:
        label: its name on the page.
        options: the label of each option, by its value; the first is chosen at first.
    """

    label: str
    options: Mapping[str, str]

    @property
    def initial(self) -> str:
        """The option that is selected at first."""
        return next(iter(self.options))

    def read(self, text: str | None) -> str:
        """Return the option with this value, or the first option."""
        return text if text is not None and text in self.options else self.initial

    def find_fault(self, name: str, text: str | None) -> str | None:
        """Return a sentence if a URL's value for this choice is no option; else None."""
        if text is None or text in self.options:
            return None
        shown = text if len(text) <= _SHOWN_MAX else text[:_SHOWN_MAX] + "…"
        meant = find_value(shown, self.options)
        advice = f" Did you mean {meant}?" if meant else ""
        return f"“{shown}” is no value of {name}: it may be {', '.join(self.options)}.{advice}"


def describe_choices(model: type[BaseModel]) -> dict[str, Choice]:
    """Return the choices of a question that a form shows, by name; the default is chosen at first.

    Without a default, at first nothing is chosen.
    """
    found = {}
    for name, field in list_fields(model).items():
        if field.on_page and field.choices:
            label = field.on_page.label or name.replace("_", " ").capitalize()
            options = {each: _WORDS.get(each, each.replace("_", " ")) for each in field.choices}
            undecided = {"": _UNDECIDED.get(name, "as the document says")}
            found[name] = Choice(label, options if field.default else undecided | options)
    return found


RELATION: Final = describe_choices(RelationRequest)["neighbouring_relation"]
