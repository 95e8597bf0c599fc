"""Choices of forms: the options of each, their labels, and sentences about unknown options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from accountant_service.common_names import find_value

_SHOWN_MAX: Final = 40  # characters of an unknown option that a sentence repeats


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


RELATION: Final = Choice(
    "Neighbouring datasets",
    {
        "add_or_remove_one": "one record added or removed",
        "replace_one": "one record replaced",
        "zero_out_one": "one record zeroed out",
    },
)
