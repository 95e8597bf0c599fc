"""The fields of any kind of mechanism in a form, generated from the JSON schemas of the kinds.

A mechanism is a tree of texts with the shape of its JSON: what is typed is kept as it is. The name
of a field in the form is its path in that tree, such as `release_mechanism_noise_multiplier`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from accountant_service import mechanisms
from accountant_service.web.choices import Choice
from accountant_service.web.number_fields import NumberField, parse_number
from accountant_service.writing.number_format import round_nearest

Json = dict[str, Any]
Texts = dict[str, Any]  # a mechanism: its kind, texts of fields, and trees of inner mechanisms

ROOT: Final = "release"  # names of all generated fields start with it
NEW: Final = "_new"  # ends the name of the list from which another kind is chosen
FIRST: Final = "gaussian"  # the kind that is chosen at first
PARTS_MAX: Final = 8  # mechanisms in one list
DEPTH_MAX: Final = 5  # nested mechanisms
LIST_MAX: Final = 1000  # characters of a list of numbers: the text is part of the URL


def _list_schemas() -> dict[str, Json]:
    """Return the schema of each kind of mechanism, by kind."""
    components = mechanisms.json_schema().values()
    kinds = [each for each in components if "properties" in each]
    return {each["properties"]["kind"]["const"]: each for each in kinds}


SCHEMAS: Final[Mapping[str, Json]] = _list_schemas()
EXAMPLES: Final[Mapping[str, Json]] = {
    kind: schema["examples"][0] for kind, schema in SCHEMAS.items()
}


@dataclass(frozen=True, slots=True)
class KindField:
    """A field on the page: a text with a label, or a choice.

    Attributes:
        name: its name in the form, without the number of the run.
        shape: "number", "numbers" or "choice".
        label: its label and hint, or its options.
        text: what is typed or chosen.
    """

    name: str
    shape: str
    label: NumberField | Choice
    text: str


@dataclass(frozen=True, slots=True)
class KindGroup:
    """The fields of one mechanism on the page, or of one object within it.

    Attributes:
        name: its path, without the number of the run.
        title: its title; empty for the outermost mechanism.
        kind: the kind of mechanism; None if none is chosen yet, or if it is no mechanism.
        kinds: the titles of the kinds to choose from, by kind; empty if it is no mechanism.
        about: the first sentence of the kind's description.
        entries: its fields and groups.
    """

    name: str
    title: str
    kind: str | None
    kinds: Mapping[str, str]
    about: str
    entries: tuple[KindField | KindGroup, ...]


def _list_kinds(depth: int) -> dict[str, str]:
    """Return the kinds that can be chosen at a nesting depth, with their titles.

    A DP-SGD run has its own fields, so it is offered within other kinds only.
    """
    return {
        kind: schema["title"]
        for kind, schema in SCHEMAS.items()
        if (depth > 1 or kind != "dp_sgd") and (depth < DEPTH_MAX or not _holds_mechanisms(schema))
    }


def _holds_mechanisms(schema: Json) -> bool:
    """Return whether a kind is made of other mechanisms."""
    shapes = {_shape(each) for name, each in schema["properties"].items() if name != "kind"}
    return not shapes.isdisjoint({"mechanism", "mechanisms"})


def write_texts(value: Any) -> Any:
    """Return a mechanism of the API, or a value within it, as the texts of form fields."""
    if isinstance(value, dict):
        return {name: write_texts(each) for name, each in value.items()}
    if isinstance(value, list):
        parts = [write_texts(each) for each in value]
        return parts if parts and isinstance(parts[0], dict) else ", ".join(parts)
    return value if isinstance(value, str) else json.dumps(value)


def read_texts(
    query: Mapping[str, str], at: str = ROOT, default: Texts | None = None, depth: int = 1
) -> Texts:
    """Return the typed texts of a mechanism in a form; missing fields have an example's text.

    Args:
        query: the form's fields by name.
        at: the path of the mechanism.
        default: its texts in the example of the outer mechanism.
        depth: the number of mechanisms that it lies in, and itself.
    """
    initial: Texts = default or write_texts(EXAMPLES[FIRST])
    sent = query.get(f"{at}_kind", "")
    kind = str(sent if sent in SCHEMAS else initial["kind"])
    if depth >= DEPTH_MAX and kind not in _list_kinds(depth):
        kind = FIRST
    if kind != initial["kind"]:
        initial = write_texts(EXAMPLES[kind])
    return {"kind": kind} | {
        name: _read_entry(query, f"{at}_{name}", schema, initial.get(name), depth)
        for name, schema in _properties(kind).items()
    }


def _read_entry(query: Mapping[str, str], at: str, schema: Json, initial: Any, depth: int) -> Any:
    """Return the typed text, or tree of texts, of one field of a mechanism."""
    match _shape(schema):
        case "mechanism":
            return read_texts(query, at, initial, depth + 1)
        case "mechanisms":
            sent = [i for i in range(PARTS_MAX) if f"{at}_{i}_kind" in query]
            parts = [None] * len(sent) if sent else initial
            return [read_texts(query, f"{at}_{i}", each, depth + 1) for i, each in enumerate(parts)]
        case "object":
            names = schema["properties"]
            return {
                name: query.get(f"{at}_{name}", initial.get(name, "")).strip() for name in names
            }
        case _:
            start = initial if initial is not None else str(schema.get("default", ""))
            return query.get(at, start).strip()


def flatten(texts: Any, at: str = ROOT) -> dict[str, str]:
    """Return a tree of typed texts as form fields: each field's text, by name."""
    if isinstance(texts, str):
        return {at: texts}
    entries = texts.items() if isinstance(texts, dict) else enumerate(texts)
    found: dict[str, str] = {}
    for name, each in entries:
        found |= flatten(each, f"{at}_{name}")
    return found


def choose_kinds(texts: Texts, query: Mapping[str, str], at: str = ROOT) -> Texts:
    """Return the typed texts after the user changed kinds; a new kind starts with its example."""
    chosen = query.get(f"{at}_kind{NEW}", "")
    if chosen in SCHEMAS and chosen != texts.get("kind"):
        found: Texts = write_texts(EXAMPLES[chosen])
        return found
    return {name: _choose_within(each, query, f"{at}_{name}") for name, each in texts.items()}


def _choose_within(entry: Any, query: Mapping[str, str], at: str) -> Any:
    """Apply the user's changes of kind in one field; add or remove mechanisms of a list."""
    if isinstance(entry, dict) and "kind" in entry:
        return choose_kinds(entry, query, at)
    if not isinstance(entry, list):
        return entry
    kept = [
        choose_kinds(each, query, f"{at}_{i}")
        for i, each in enumerate(entry)
        if query.get(f"{at}_{i}_kind{NEW}") != ""
    ]
    added = query.get(f"{at}_{len(entry)}_kind{NEW}", "")
    more = [write_texts(EXAMPLES[added])] if added in SCHEMAS else []
    return [*kept, *more][:PARTS_MAX]


def read_values(texts: Texts, at: str = ROOT) -> tuple[Json, dict[str, str]]:
    """Return the mechanism that typed texts describe, and a sentence for each wrong field."""
    found: Json = {"kind": texts["kind"]}
    schema = SCHEMAS[texts["kind"]]
    problems = _read_object(texts, schema, at, found)
    return found, problems


def _read_object(texts: Texts, schema: Json, at: str, found: Json) -> dict[str, str]:
    """Put the values of an object's fields into `found`; return a sentence for each wrong field."""
    problems: dict[str, str] = {}
    for name, each in schema["properties"].items():
        if name == "kind":
            continue
        required = name in schema["required"]
        value, wrong = _read_value(texts[name], each, f"{at}_{name}", required)
        problems |= wrong
        if value is not None:
            found[name] = value
    return problems


def _read_value(texts: Any, schema: Json, at: str, required: bool) -> tuple[Any, dict[str, str]]:
    """Return the value of one field, or None, and a sentence for each text that is wrong."""
    match _shape(schema):
        case "mechanism":
            return read_values(texts, at)
        case "mechanisms":
            read = [read_values(each, f"{at}_{i}") for i, each in enumerate(texts)]
            return [value for value, _ in read], {
                k: v for _, wrong in read for k, v in wrong.items()
            }
        case "object":
            inner: Json = {}
            return inner, _read_object(texts, schema, at, inner)
    if not texts and not required:
        return None, {}
    try:
        return _parse(texts, schema), {}
    except ValueError as error:
        return None, {at: f"{schema['title']} {error}."}


def _parse(text: str, schema: Json) -> Any:
    """Return the value of a typed text or a chosen option.

    Raises:
        ValueError: it has none; the message continues the field's label.
    """
    match _shape(schema):
        case "choice":
            return text
        case "numbers":
            return _parse_list(text)
        case _:
            return parse_number(text, schema["type"] == "integer")


def _parse_list(text: str) -> list[float]:
    """Return the numbers of a text that separates them by commas or spaces.

    Raises:
        ValueError: they cannot be read; the message continues the field's label.
    """
    if len(text) > LIST_MAX:
        raise ValueError(f"must be at most {LIST_MAX} characters long; send longer ones to the API")
    numbers = re.split(r"[\s,;]+", text.strip(" ,;"))
    try:
        return [parse_number(each, whole=False) for each in numbers]
    except ValueError:
        raise ValueError("must be numbers separated by commas, such as 1, 0.5") from None


def place_problem(texts: Texts, names: list[str], message: str) -> tuple[str, str]:
    """Return the field where the page shows a problem, and a sentence about it.

    Args:
        texts: the texts of the mechanism.
        names: the path to the faulty value within the mechanism.
        message: continues the name of the value.
    """
    at, here = ROOT, texts
    schema: Json = {"properties": {}}
    for place, name in enumerate(names):
        schema = _schema_within(here, schema, name)
        here, at = _within(here, name), f"{at}_{name}"
        if isinstance(here, str) and name != "kind":
            return at, _sentence(schema, names[place + 1 :], message)
        if here is None or name == "kind":
            break
    known = flatten(texts) | {f"{ROOT}_kind": ""}
    while f"{at}_kind" not in known:
        at = at.rpartition("_")[0]
    text = message.replace("_", " ")
    subject = "The mechanism " if text.startswith(("must", "is ")) else ""
    return f"{at}_kind", f"{subject}{text if subject else text[:1].upper() + text[1:]}."


def _schema_within(texts: Any, schema: Json, name: str) -> Json:
    """Return the JSON schema of a named field; empty if there is none."""
    if isinstance(texts, dict) and "kind" in texts:
        schema = SCHEMAS[texts["kind"]]
    found: Json = schema.get("properties", {}).get(name, {})
    return found


def _within(texts: Any, name: str) -> Any:
    """Return the named part of a mechanism's tree of typed texts; None if there is none."""
    if isinstance(texts, list):
        return texts[int(name)] if name.isdecimal() and int(name) < len(texts) else None
    return texts.get(name)


def _sentence(schema: Json, rest: list[str], message: str) -> str:
    """Return a sentence about a problem with a field, or with one number of a list."""
    which = f", entry {int(rest[0]) + 1} of the list," if rest and rest[0].isdecimal() else ""
    return f"{schema['title']}{which} {message.replace('_', ' ')}."


def describe(texts: Texts, at: str = ROOT, title: str = "", depth: int = 1) -> KindGroup:
    """Return the fields of a mechanism as the page shows them."""
    schema, kinds = SCHEMAS[texts["kind"]], _list_kinds(depth)
    entries = [
        _describe_entry(texts[name], each, f"{at}_{name}", name in schema["required"], depth)
        for name, each in _properties(texts["kind"]).items()
    ]
    about = _format_about(schema["description"])
    return KindGroup(at, title, texts["kind"], kinds, about, _chain(entries))


def _describe_entry(
    texts: Any, schema: Json, at: str, required: bool, depth: int
) -> list[KindField | KindGroup]:
    """Return how the page shows one field; a list of mechanisms gives several entries."""
    match _shape(schema):
        case "mechanism":
            return [describe(texts, at, "Mechanism", depth + 1)]
        case "mechanisms":
            return _describe_parts(texts, at, depth + 1)
        case "object":
            inner = [
                _describe_entry(
                    texts[name], each, f"{at}_{name}", name in schema["required"], depth
                )
                for name, each in schema["properties"].items()
            ]
            return [KindGroup(at, schema["title"], None, {}, "", _chain(inner))]
        case shape:
            return [KindField(at, shape, _describe_field(schema, shape, required), texts)]


def _describe_parts(parts: list[Texts], at: str, depth: int) -> list[KindField | KindGroup]:
    """Return form groups for the mechanisms of a list, each removable, and one to add another."""
    none = {"": "none: take it out"} if len(parts) > 1 else {}
    found: list[KindField | KindGroup] = []
    for i, each in enumerate(parts):
        group = describe(each, f"{at}_{i}", f"Mechanism {i + 1}", depth)
        kinds = {**none, **group.kinds}
        found.append(
            KindGroup(group.name, group.title, group.kind, kinds, group.about, group.entries)
        )
    if len(parts) < PARTS_MAX:
        kinds = {"": "none", **_list_kinds(depth)}
        found.append(KindGroup(f"{at}_{len(parts)}", "One more mechanism", None, kinds, "", ()))
    return found


NO_KIND: Final = KindGroup(ROOT, "", None, {"": "choose one", **_list_kinds(1)}, "", ())


def list_new_names(group: KindGroup) -> list[str]:
    """Return the names of the selection lists that change a mechanism's kind."""
    own = [f"{group.name}_kind{NEW}"] if group.kinds else []
    inner = [list_new_names(each) for each in group.entries if isinstance(each, KindGroup)]
    return [*own, *_chain(inner)]


def _chain(lists: list[list[Any]]) -> tuple[Any, ...]:
    """Return the items of several lists as one tuple."""
    return tuple(each for several in lists for each in several)


def _describe_field(schema: Json, shape: str, required: bool) -> NumberField | Choice:
    """Return a field's label and hint or, for a choice, its label and options."""
    if shape == "choice":
        return Choice(schema["title"], {each: each.replace("_", " ") for each in schema["enum"]})
    limits = _format_limits(schema["items"] if shape == "numbers" else schema)
    plural = f"numbers {limits}, separated by commas" if shape == "numbers" else ""
    singular = f"a {'whole ' if schema['type'] == 'integer' else ''}number {limits}"
    hint = (plural or singular) + ("" if required else "; may be empty")
    return NumberField(schema["title"], "", "", hint)


def _format_limits(schema: Json) -> str:
    """Return the limits of a number in words."""
    low = f"> {round_nearest(schema['exclusiveMinimum'])}" if "exclusiveMinimum" in schema else ""
    low = low or f"≥ {round_nearest(schema['minimum'])}"
    return f"{low} and ≤ {round_nearest(schema['maximum'])}"


def _format_about(description: str) -> str:
    """Return the first line of a kind's description, without Markdown code marks."""
    first = description.partition("\n")[0]
    return re.sub("`([^`]*)`", lambda found: found[1].replace("_", " "), first)


def _properties(kind: str) -> dict[str, Json]:
    """Return the schema of each field of a kind, by name."""
    return {name: each for name, each in SCHEMAS[kind]["properties"].items() if name != "kind"}


def _shape(schema: Json) -> str:
    """Return the kind of form field that a schema needs, such as `number` or `choice`."""
    if "$ref" in schema:
        return "mechanism"
    if "enum" in schema:
        return "choice"
    if schema["type"] == "array":
        return "mechanisms" if "$ref" in schema["items"] else "numbers"
    return "object" if schema["type"] == "object" else "number"
