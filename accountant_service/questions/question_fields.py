"""The fields of a question's model, as functions, forms and the typed client are made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class OnPage:
    """The looks of a question's field in a form, which shows only fields that have this.

    Attributes:
        initial: the text that the field has at first.
        label: its name; that of the API by default.
        symbol: its symbol in formulas; that before the colon of its description by default.
        hint: a short explanation; the beginning of its description by default.
        slider: the smallest and largest power of ten of its slider, if it has one.
    """

    initial: str = ""
    label: str = ""
    symbol: str = ""
    hint: str = ""
    slider: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class QuestionField:
    """A field of a question.

    Attributes:
        name: its name in the API.
        about: what it is, in words.
        schemas: the JSON schemas of its values, besides null.
        default: its value if it is left out.
        required: whether it may not be left out.
        on_page: how a form shows it; None if none does.
    """

    name: str
    about: str
    schemas: tuple[Json, ...]
    default: Any
    required: bool
    on_page: OnPage | None = None

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts to choose from, the default first; empty if it is no choice."""
        choices = self.schemas[0].get("enum", ())
        return tuple(sorted(choices, key=lambda each: each != self.default))


def list_fields(model: type[BaseModel]) -> Mapping[str, QuestionField]:
    """Return the fields of a question's model by name, those of its base classes last."""
    document = model.model_json_schema()
    definitions, schemas = document.get("$defs", {}), document["properties"]
    own = [name for name in schemas if name in model.__annotations__]
    found = {}
    for name in dict.fromkeys([*own, *schemas]):
        schema, field = schemas[name], model.model_fields[name]
        several = [
            definitions.get(each.get("$ref", "").rpartition("/")[2], {}) | each
            for each in schema.get("anyOf", [schema])
        ]
        found[name] = QuestionField(
            name,
            schema.get("description", ""),
            tuple(each for each in several if each.get("type") != "null"),
            schema.get("default"),
            field.is_required(),
            next((each for each in field.metadata if isinstance(each, OnPage)), None),
        )
    return found
