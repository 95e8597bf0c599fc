"""A document of another tool: its text, and its values with their JSON pointers.

Text is JSON, TOML, YAML or a Python expression of constructors and literals, such as a `repr`. The
expression is parsed and never evaluated. Sizes are checked before anything else is.
"""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import yaml

from accountant_service.mechanisms import MechanismError
from accountant_service.writing.number_format import round_nearest as shown

Json = Any  # a parsed JSON document

TEXT_MAX: Final = 4_000_000  # characters of a document
YAML_TEXT_MAX: Final = 500_000  # characters; YAML takes some microseconds for each
DEPTH_MAX: Final = 64  # nested values
VALUES_MAX: Final = 100_000  # values in one document
CLASS_NAME: Final = "class_name"  # the field that names the constructor of an object


class DocumentError(MechanismError):
    """A document that cannot be imported, with the JSON pointer of each fault."""


def parse_text(text: str) -> Json:
    """Parse a text as JSON, TOML, a Python expression or YAML, whichever succeeds first.

    `Name(first=1)` becomes `{"class_name": "Name", "first": 1}`.

    Raises:
        DocumentError: the text is in no known form, names a key twice, or is too large.
    """
    if len(text) > TEXT_MAX:
        raise DocumentError(("", f"must be at most {TEXT_MAX} characters long"))
    if text.startswith(("PK\x03\x04", "\x80")):
        raise DocumentError(("", _BINARY))
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_read_pairs)
    except DocumentError:
        raise
    except (ValueError, RecursionError):
        pass
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _parse_yaml(text)
    return _convert(tree.body, "", DEPTH_MAX)


_BINARY: Final = (
    "is a binary checkpoint, which is not read because it could run code. Save the accountant as "
    'JSON: python -c "import json, torch; print(json.dumps(torch.load('
    "'checkpoint.pt', weights_only=True)['privacy_accountant_state_dict']))\" > history.json"
)


def _refuse_constant(name: str) -> None:
    """Raise ValueError for NaN and infinities, which JSON does not have."""
    raise ValueError(f"{name} is not JSON")


def _read_pairs(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """Return the fields of an object; raise DocumentError if a name is there twice."""
    found: dict[str, Json] = {}
    for name, value in pairs:
        if name in found:
            raise DocumentError(("", f"has {shorten(name)} twice in one object: leave one out"))
        found[name] = value
    return found


class _YamlLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """YAML with the numbers of version 1.2: 1e-5 is a number, and 010, 1:30 and dates are text.

    Keys are text as written, and a key that stands twice in a mapping is refused.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Json]:
        """Return a mapping, with the keys of `<<` behind its own."""
        if not isinstance(node, yaml.MappingNode):
            raise yaml.YAMLError("must be a mapping")
        if not all(isinstance(key, yaml.ScalarNode) for key, _ in node.value):
            raise yaml.YAMLError("must have strings as keys")
        own, merged = [], []
        for key, value in node.value:
            is_merge = key.tag == "tag:yaml.org,2002:merge"
            part = self.construct_object(value, deep=deep or is_merge)
            if not is_merge:
                own.append((key.value, part))
            else:
                merged += part if isinstance(part, list) else [part]
        found = _read_pairs(own)
        for mapping in merged:
            if not isinstance(mapping, dict):
                raise yaml.YAMLError("must merge mappings")
            found = {**mapping, **found}
        return found


for _tag, _pattern, _first in (
    ("bool", r"(?i:true|false|yes|no|on|off)", "tTfFyYnNoO"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    ("float", r"[-+]?(?:\d[\d_]*\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?", "-+.0123456789"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    _YamlLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first)
    )


def _parse_yaml(text: str) -> Json:
    """Parse a text as one YAML document that is a mapping or a list.

    Raises:
        DocumentError: the text is no such document.
    """
    expected = "must be JSON, TOML, YAML, or a Python expression such as a repr"
    if len(text) > YAML_TEXT_MAX:
        too_long = f"{expected}; as YAML at most {YAML_TEXT_MAX} characters long"
        raise DocumentError(("", too_long))
    try:
        found = yaml.load(text, Loader=_YamlLoader)  # a safe loader: it runs no code
    except DocumentError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError):
        raise DocumentError(("", expected)) from None
    if not isinstance(found, dict | list):
        raise DocumentError(("", expected))
    return found


def _convert(node: ast.expr, pointer: str, depth: int) -> Json:
    """Convert one node of a Python expression to JSON; `pointer` locates it in error messages.

    Raises:
        DocumentError: the part is neither a literal nor a constructor, or nested too deep.
    """
    if depth == 0:
        raise DocumentError((pointer, f"must be nested at most {DEPTH_MAX} deep"))

    def inner(child: ast.expr, step: str | int) -> Json:
        """Convert a child of the expression, one level deeper."""
        return _convert(child, f"{pointer}/{step}", depth - 1)

    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [inner(item, i) for i, item in enumerate(items)]
        case ast.Dict(keys=keys, values=values):
            names = [_key(key, pointer) for key in keys]
            return _read_pairs(
                [(n, inner(value, n)) for n, value in zip(names, values, strict=True)]
            )
        case ast.Call(func=func, args=args, keywords=keywords):
            return _convert_call(_constructor(func, pointer), args, keywords, inner)
        case ast.Constant(value=value) if value is ...:
            raise DocumentError((pointer, "is cut off: write out what ... stands for"))
        case ast.Attribute(attr=name) | ast.Name(id=name) if _is_constant(node):
            return name
        case _:
            raise DocumentError((pointer, "must be a literal or a constructor; no code is run"))


def _is_constant(node: ast.expr) -> bool:
    """Return whether a name stands for itself: of an enumeration, ∞, or a measure of OpenDP."""
    return not isinstance(node, ast.Name) or node.id == "inf" or node.id.endswith("Divergence")


def _convert_call(name: str, args: list[ast.expr], keywords: list[ast.keyword], inner: Any) -> Json:
    """Convert a constructor call to JSON; containers such as `array` become their content."""
    if name in {"array", "asarray", "OrderedDict", "dict", "deque"} and args:
        found = inner(args[0], 0)
        is_pairs = name in {"OrderedDict", "dict"} and isinstance(found, list)
        return {str(pair[0]): pair[1] for pair in found if _is_pair(pair)} if is_pairs else found
    named = [(str(keyword.arg), inner(keyword.value, str(keyword.arg))) for keyword in keywords]
    values = _read_pairs(named)
    positional = {str(i): inner(arg, i) for i, arg in enumerate(args)}
    return {CLASS_NAME: name} | positional | values


def _is_pair(value: Json) -> bool:
    """Return whether a value is a list of two items."""
    return isinstance(value, list) and len(value) == 2


def _constructor(func: ast.expr, pointer: str) -> str:
    """Return a called constructor's name without its module path; `pointer` is for errors."""
    match func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            raise DocumentError((pointer, "must be a constructor with a name"))


def _key(node: ast.expr | None, pointer: str) -> str:
    """Return a dictionary key; raise an error at `pointer` unless it is a string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise DocumentError((pointer, "must have strings as keys"))


def require_bounded(document: Json) -> None:
    """Raise DocumentError if a document has too many values or is nested too deep."""
    waiting, values = [(document, 1)], 0
    while waiting:
        value, depth = waiting.pop()
        values += 1
        if depth > DEPTH_MAX or values + len(waiting) > VALUES_MAX:
            limit = f"must hold at most {VALUES_MAX} values, nested at most {DEPTH_MAX} deep"
            raise DocumentError(("", limit))
        if isinstance(value, dict):
            waiting += [(child, depth + 1) for child in value.values()]
        elif isinstance(value, list | tuple):
            waiting += [(child, depth + 1) for child in value]


def shorten(value: Json) -> str:
    """Return a value as text for a message: JSON, of at most 60 characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:59] + "…"


@dataclass(frozen=True, slots=True)
class Part:
    """A value in an imported document, with its JSON pointer.

    Attributes:
        value: parsed JSON.
        pointer: where it is in the document.
    """

    value: Json
    pointer: str = ""

    def fault(self, message: str) -> DocumentError:
        """Return an error with this message that points to the value."""
        return DocumentError((self.pointer, message))

    @property
    def class_name(self) -> str | None:
        """The constructor's name, if the value is an object that has one."""
        name = self.value.get(CLASS_NAME) if isinstance(self.value, dict) else None
        return name if isinstance(name, str) else None

    def find(self, *names: str) -> Part | None:
        """Return the first of these fields that is present and not null, or None."""
        value = self.fields()
        for name in names:
            if value.get(name) is not None:
                return self._inside(name)
        return None

    def _inside(self, name: str) -> Part:
        """Return the value of a field of an object."""
        escaped = name.replace("~", "~0").replace("/", "~1")
        return Part(self.value[name], f"{self.pointer}/{escaped}")

    def entries(self) -> Iterator[tuple[str, Part]]:
        """Yield the names and values of an object's fields."""
        for name in self.fields():
            yield name, self._inside(name)

    def field(self, *names: str) -> Part:
        """Return the first of these fields that is present; raise DocumentError if none is.

        Raises:
            DocumentError: there is none.
        """
        found = self.find(*names)
        if found is None:
            raise DocumentError((f"{self.pointer}/{names[0]}", "is required"))
        return found

    def fields(self) -> dict[str, Json]:
        """Return the fields of an object; raise DocumentError if the value is no object."""
        if not isinstance(self.value, dict):
            raise self.fault("must be an object")
        return self.value

    def items(self) -> list[Part]:
        """Return the items of a list; raise DocumentError if the value is no list."""
        if not isinstance(self.value, list | tuple):
            raise self.fault("must be a list")
        return [Part(item, f"{self.pointer}/{i}") for i, item in enumerate(self.value)]

    def number(self, low: float, high: float, *, above: bool = False) -> float:
        """Return the value as a number from `low` to `high`; `above` excludes `low` itself."""
        value, sign = self.value, ">" if above else "≥"
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (above and value == low):
            raise self.fault(f"must be a number {sign} {shown(low)} and ≤ {shown(high)}")
        return float(value)

    def whole(self, low: int, high: int) -> int:
        """Return the value as a whole number from `low` to `high`."""
        value = self.value
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or value % 1:
            raise self.fault(f"must be a whole number ≥ {low} and ≤ {shown(high)}")
        return int(value)

    def choice(self, options: Iterable[str]) -> str:
        """Return the value as a string; raise DocumentError unless it is one of the options."""
        allowed = list(options)
        if self.value not in allowed:
            raise self.fault("must be one of " + ", ".join(allowed))
        return str(self.value)

    def flag(self) -> bool:
        """Return the value as true or false."""
        if not isinstance(self.value, bool):
            raise self.fault("must be true or false")
        return self.value

    def named_arguments(self, names: Iterable[str]) -> Part:
        """Return the constructor call with positional arguments stored under these names.

        Raises:
            DocumentError: it has more positional arguments than names, or one of them twice.
        """
        value = dict(self.fields())
        for i, name in enumerate(names):
            if (argument := value.pop(str(i), None)) is not None:
                if name in value:
                    raise DocumentError((f"{self.pointer}/{name}", "is given twice"))
                value[name] = argument
        return Part(value, self.pointer)
