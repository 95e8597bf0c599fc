"""Write the functions `epsilon`, `delta` and `compare` from the models of the API's questions.

python -m scripts.question_functions           # prints the module
python -m scripts.question_functions --write   # writes it into the package
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_type_hints

from pydantic import BaseModel

from accountant_service.api.questions import ENDPOINTS
from accountant_service.mechanisms.json_form import fields_of
from accountant_service.mechanisms.kinds import DpSgd
from accountant_service.questions import arguments

MODULE: Final = Path(__file__).parents[1] / "accountant_service" / "questions" / "functions.py"
_NAMES: Final = ("epsilon", "delta", "compare")
_CHOICES_MAX: Final = 6  # of which a docstring names each
_TYPES: Final = {"number": "float", "integer": "int", "string": "str", "array": "Sequence[str]"}
_HEAD: Final = '''"""The functions that ask for ε, for δ, and for a comparison of methods.

`python -m scripts.question_functions --write` writes this module from the models in
`api/schemas.py`: change a question there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accountant_service.questions.arguments import answer
from accountant_service.questions.arrays import for_each_element

if TYPE_CHECKING:
'''
_RAISES: Final = """
    Raises:
        InvalidArgumentError: an argument is missing or out of range; the message names it.
        AccountingError: the question has no answer, such as no finite ε, or takes more time.
"""


@dataclass(frozen=True)
class Argument:
    """An argument of a function.

    Attributes:
        name: its name.
        type: its type, in Python.
        about: what it is, in words.
        required: whether it has no default.
    """

    name: str
    type: str
    about: str
    required: bool

    @classmethod
    def of_schema(cls, name: str, schema: Any, required: bool) -> Argument:
        """Return the argument that a field's JSON schema describes."""
        several = schema.get("anyOf", [schema])
        given = next(each for each in several if each.get("type") != "null")
        about, default = schema.get("description", ""), schema.get("default")
        choices = given.get("enum", ())
        if choices and len(choices) <= _CHOICES_MAX:
            *most, last = (f'"{each}"{" (default)" * (each == default)}' for each in choices)
            about += f": {', '.join(most)} or {last}"
        elif default is not None:
            about += f'; "{default}" by default' if "enum" in given else f"; {default} by default"
        return cls(name, _TYPES[given["type"]], about, required)

    def write_parameter(self) -> str:
        """Return the argument in the signature."""
        return f"    {self.name}: {self.type}{'' if self.required else ' | None = None'},\n"

    def write_line(self) -> str:
        """Return the argument in the docstring."""
        text = f"{self.name}: {self.about}."
        return textwrap.fill(text, 100, initial_indent=" " * 8, subsequent_indent=" " * 12) + "\n"


def list_arguments(model: type[BaseModel]) -> Iterator[Argument]:
    """Yield a question's arguments: what is required, a run or mechanism, and the other fields."""
    document = model.model_json_schema()
    definitions, schemas = document.get("$defs", {}), document["properties"]
    own = [name for name in schemas if name in model.__annotations__]
    names = [*own, *(name for name in schemas if name not in own)]
    fields = []
    for name in names:
        schema = dict(schemas[name])
        schema |= definitions.get(schema.pop("$ref", "").rsplit("/", 1)[-1], {}) | schema
        if name != "mechanism":
            required = name in document["required"]
            fields.append(Argument.of_schema(name, schema, required))
    yield from (each for each in fields if each.required)
    run = fields_of(DpSgd)
    yield from (Argument.of_schema(name, run[name].schema, False) for name in arguments.RUN)
    about = "any mechanism as JSON, instead of a run"
    yield Argument("mechanism", "Mapping[str, Any]", about, False)
    yield from (each for each in fields if not each.required)
    about = "most CPU seconds that the computation may take; none by default"
    yield Argument("time_limit", "float", about, False)


def render() -> str:
    """Return the text of the module."""
    imports, functions = set(), []
    for name in _NAMES:
        endpoint = ENDPOINTS[f"/v1/{name}"]
        answer = get_type_hints(endpoint.compute)["return"]
        imports.add(f"    from {answer.__module__} import {answer.__name__}\n")
        found = list(list_arguments(endpoint.request))
        first, *others = (each.write_parameter() for each in found)
        signature = "".join([first, "    *,\n", *others])
        described = "".join(each.write_line() for each in found)
        functions.append(
            f"\n\n@for_each_element\ndef {name}(\n{signature}) -> {answer.__name__}:\n"
            f'    """{endpoint.request.__doc__}\n\n    Args:\n{described}{_RAISES}    """\n'
            f'    found: {answer.__name__} = answer("/v1/{name}", locals())\n    return found\n'
        )
    return _HEAD + "".join(sorted(imports)) + "".join(functions)


def main() -> None:
    """Print the module, or write it."""
    if "--write" in sys.argv:
        MODULE.write_text(render(), encoding="utf-8")
    else:
        print(render(), end="")


if __name__ == "__main__":
    main()
