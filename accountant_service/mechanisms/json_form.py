"""Read mechanisms from JSON, write them, and describe them as a JSON schema.

All of it follows from the classes of `kinds.py`. Limits of size are checked on the raw document
before any recursion, so that no input can exhaust the stack or the memory.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_origin, get_type_hints

from accountant_service.mechanisms.field_types import Cost, FieldType, Json, MechanismError, choice
from accountant_service.mechanisms.kinds import (
    COUNT_MAX,
    KINDS,
    Description,
    Mechanism,
    inner_fields,
)
from accountant_service.writing.canonical_json import escape_pointer

DEPTH_MAX: Final = 32  # nested mechanisms
NODES_MAX: Final = 10_000  # mechanisms in one tree
_KIND_NAMES: Final = ", ".join(KINDS)
_INNER_FIELDS: Final = frozenset(name for kind in KINDS.values() for name in inner_fields(kind))
_REFERENCE: Final = {"$ref": "#/components/schemas/Mechanism"}
_FIELDS: Final[dict[type, Mapping[str, Field]]] = {}  # of each class, once they were asked for
_Described = TypeVar("_Described", bound=Description)


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a kind of mechanism, or of an object in one.

    Attributes:
        name: its name in JSON.
        type: its schema, and how it is read.
        default: its value if it is left out; `MISSING` if it is required.
        cost: how the mechanism's cost changes with it, if that is known.
        about: what it is, in words; "" if its name says it.
    """

    name: str
    type: FieldType
    default: Any
    cost: Cost | None
    about: str

    @property
    def schema(self) -> dict[str, Json]:
        """Its JSON schema, with title, description and default; a `$ref` has none of them."""
        found = dict(self.type.schema)
        if "$ref" not in found:
            about = {"description": self.about} if self.about else {}
            found = {"title": _title(self.name), **about, **found}
        return found if self.default in (MISSING, None) else found | {"default": self.default}

    @property
    def range(self) -> tuple[float, float, bool]:
        """The least and the greatest number that it allows, and whether it must be whole."""
        schema = self.type.schema
        return float(schema["minimum"]), float(schema["maximum"]), schema["type"] == "integer"


def fields_of(described: type[Description]) -> Mapping[str, Field]:
    """Return the fields of a kind of mechanism, or of an object in one, by name."""
    if described not in _FIELDS:
        hints = get_type_hints(described, include_extras=True)
        _FIELDS[described] = {
            each.name: _field(each, hints[each.name]) for each in fields(described)
        }
    return _FIELDS[described]


def _field(field: dataclasses.Field[Any], hint: Any) -> Field:
    """Return a field with what its annotation says about it."""
    said = list(_list_annotations(hint))
    (type_,) = (each for each in said if isinstance(each, FieldType))
    cost = next((each for each in said if isinstance(each, Cost)), None)
    about = " ".join(each for each in said if isinstance(each, str))
    return Field(field.name, type_, field.default, cost, about)


def _list_annotations(hint: Any) -> Iterator[Any]:
    """Yield what a field's annotation says about it: its type, and how the cost changes with it."""
    arguments = get_args(hint)
    if get_origin(hint) is Annotated:
        yield from hint.__metadata__
        yield from _list_annotations(hint.__origin__)
    elif get_origin(hint) is Literal:
        yield choice(*arguments)
    elif hint is Mechanism:
        yield FieldType(_REFERENCE, _read_mechanism)
    elif get_origin(hint) is tuple and arguments[0] is Mechanism:
        yield FieldType(
            {"type": "array", "items": _REFERENCE, "maxItems": NODES_MAX}, _read_mechanisms
        )
    elif isinstance(hint, type) and issubclass(hint, Description):
        yield FieldType(_object_schema(hint), lambda value, at: _read_part(hint, value, at))
    elif get_origin(hint) is not tuple:  # of numbers, whose list has a type
        for each in arguments:
            yield from _list_annotations(each)


def from_json(document: Json) -> Mechanism:
    """Read a mechanism from a parsed JSON document.

    Raises:
        MechanismError: the description is invalid; the error lists the faults found.
    """
    _require_bounded_size(document)
    mechanism = _read_mechanism(document, "")
    if mechanism.release_count() > COUNT_MAX:
        raise MechanismError(("", f"must make at most {COUNT_MAX} releases in all"))
    return mechanism


def to_json(mechanism: Mechanism) -> dict[str, Json]:
    """Return the JSON form of a mechanism; `from_json` reads it back as an equal mechanism."""
    return {"kind": mechanism.kind} | _write_fields(mechanism)


def _write_fields(described: Description) -> dict[str, Json]:
    """Return the fields of a mechanism, or of an object in one, that have a value."""
    return {
        name: _write(value)
        for name in fields_of(type(described))
        if (value := getattr(described, name)) is not None
    }


def _write(value: Any) -> Json:
    """Return the JSON form of a field's value."""
    if isinstance(value, tuple):
        return [_write(item) for item in value]
    if isinstance(value, Mechanism):
        return to_json(value)
    return _write_fields(value) if isinstance(value, Description) else value


def json_schema() -> dict[str, Json]:
    """Return JSON schemas by name: one per kind of mechanism, and `Mechanism`, their union."""
    names = {kind: f"{cls.__name__}Mechanism" for kind, cls in KINDS.items()}
    references = {kind: f"#/components/schemas/{name}" for kind, name in names.items()}
    union = {
        "oneOf": [{"$ref": reference} for reference in references.values()],
        "discriminator": {"propertyName": "kind", "mapping": references},
        "examples": [_example(KINDS["dp_sgd"])],
    }
    schemas = {names[kind]: _kind_schema(cls) for kind, cls in KINDS.items()}
    return schemas | {"Mechanism": union}


def _kind_schema(cls: type[Mechanism]) -> dict[str, Json]:
    """Return the JSON schema of one kind of mechanism, with titles and defaults for forms."""
    schema = _object_schema(cls)
    kind = {"kind": {"const": cls.kind, "title": "Kind"}}
    about = {"title": _title(cls.kind), "description": inspect.getdoc(cls)}
    changed = {
        "properties": kind | schema["properties"],
        "required": ["kind", *schema["required"]],
        "examples": [_example(cls)],
    }
    return {"type": "object"} | about | schema | changed


def _example(cls: type[Mechanism]) -> dict[str, Json]:
    """Return the example of a kind of mechanism."""
    return {"kind": cls.kind, **cls.example}


def _object_schema(described: type[Description]) -> dict[str, Json]:
    """Return the JSON schema of the fields of a mechanism, or of an object in one."""
    known = fields_of(described)
    return {
        "type": "object",
        "properties": {name: field.schema for name, field in known.items()},
        "required": [name for name, field in known.items() if field.default is MISSING],
        "additionalProperties": False,
    }


# words of names that titles of kinds and fields write differently
_WORDS: Final = {
    "dp": "DP",
    "gaussian": "Gaussian",
    "gdp": "GDP",
    "laplace": "Laplace",
    "max": "at most",
    "min": "minimum",
    "poisson": "Poisson",
    "rdp": "RDP",
    "sgd": "SGD",
    "std": "standard deviation",
    "stds": "standard deviations",
    "zcdp": "zCDP",
}


def _title(name: str) -> str:
    """Return a kind's or field's name as a form shows it, such as "Noise multiplier"."""
    first, *others = name.split("_")
    start = _WORDS.get(first, first)
    start = start.capitalize() if start.islower() else start
    return " ".join([start, *(_WORDS.get(word, word) for word in others)])


def _require_bounded_size(document: Json) -> None:
    """Raise MechanismError if the document is too deep or has too many nodes."""
    waiting, nodes = [(document, 1)], 0
    while waiting:
        node, depth = waiting.pop()
        nodes += 1
        if depth > DEPTH_MAX or nodes > NODES_MAX:
            limit = f"must hold at most {NODES_MAX} mechanisms, nested at most {DEPTH_MAX} deep"
            raise MechanismError(("", limit))
        for name in _INNER_FIELDS if isinstance(node, dict) else ():
            inner = node.get(name, [])
            children = inner if isinstance(inner, list) else [inner]
            waiting += [(child, depth + 1) for child in children]


def _read_mechanism(document: Json, pointer: str) -> Mechanism:
    """Read one mechanism of any kind; `pointer` locates it in error messages."""
    if not isinstance(document, dict):
        raise MechanismError((pointer, f"must be an object with a `kind`: one of {_KIND_NAMES}"))
    kind = document.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        raise MechanismError((f"{pointer}/kind", f"must be one of {_KIND_NAMES}"))
    given = {name: value for name, value in document.items() if name != "kind"}
    return _read_fields(KINDS[kind], given, pointer, kind)


def _read_mechanisms(document: Json, pointer: str) -> tuple[Mechanism, ...]:
    """Read a list of mechanisms; `pointer` locates it in error messages."""
    if not isinstance(document, list):
        raise MechanismError((pointer, "must be a list of mechanisms"))
    return tuple(_read_mechanism(item, f"{pointer}/{i}") for i, item in enumerate(document))


def _read_part(cls: type[Description], document: Json, pointer: str) -> Description:
    """Read an object in a mechanism; `pointer` locates it in error messages."""
    if not isinstance(document, dict):
        required = [f.name for f in fields_of(cls).values() if f.default is MISSING]
        raise MechanismError((pointer, f"must be an object with {' and '.join(required)}"))
    return _read_fields(cls, document, pointer, cls.__name__.lower())


def _read_fields(
    cls: type[_Described], document: Mapping[str, Json], pointer: str, name: str
) -> _Described:
    """Read the fields of a mechanism or of an object in one; raise an error with every fault."""
    known, values = fields_of(cls), {}
    faults = [
        (f"{pointer}/{escape_pointer(each)}", f"is not a field of {name}")
        for each in document.keys() - known.keys()
    ]
    for field in known.values():
        if field.name not in document:
            if field.default is MISSING:
                faults.append((f"{pointer}/{field.name}", "is required"))
            continue
        try:
            values[field.name] = field.type.read(document[field.name], f"{pointer}/{field.name}")
        except MechanismError as error:
            faults += error.faults
    if faults:
        raise MechanismError(*sorted(faults))
    found = cls(**values)
    try:
        found.check()
    except MechanismError as error:
        raise error.below(pointer) from None
    return found
