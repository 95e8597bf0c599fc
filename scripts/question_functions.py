"""Write the package's functions and the client's arguments from the models of the API's questions.

python -m scripts.question_functions           # prints the modules
python -m scripts.question_functions --write   # writes them into the packages
"""

from __future__ import annotations

import ast
import builtins
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_type_hints

from pydantic import BaseModel

from accountant_service.questions.models import (
    MECHANISM_PLACEHOLDER,
    QUALIFIERS,
    RUN_FIELDS,
    TARGETS,
    Question,
)
from accountant_service.questions.question_fields import QuestionField, list_fields
from accountant_service.questions.registry import ENDPOINTS, Endpoint
from scripts.client_calls import CLIENT, WIDTH, write_calls

_ROOT: Final = Path(__file__).parents[1]
_INVALID: Final = "an argument is missing or out of range"
_CHOICES_MAX: Final = 6  # of which a docstring names each
_TYPES: Final = {
    "number": "float",
    "integer": "int",
    "string": "str",
    "object": "Mapping[str, Any]",
    "array": "Sequence[Any]",
}
_FUNCTIONS: Final = '''"""The functions of the package, one for each question.

Each imports what it needs when it is called. The target or the claim may be the first argument
without its name. A number may be an array (a list, a tuple, NumPy's or pandas'): the result then is
`Answers`, with an answer for each element; several arrays are read in parallel.

`python -m scripts.question_functions --write` writes this module from the models in
`models.py` and `plan_models.py`: change a question there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accountant_service.questions.arguments import answer
from accountant_service.questions.arrays import for_each_element

if TYPE_CHECKING:
'''
_ARGUMENTS: Final = '''"""Keyword arguments of the typed client, one class for each question.

`python -m scripts.question_functions --write` writes this module from the models of the service.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Required, TypedDict
'''


def _name_type(schema: Any) -> str:
    """Return the type in Python of a JSON schema."""
    is_of_texts = schema.get("items", {}).get("type") == "string"
    return "Sequence[str]" if is_of_texts else _TYPES[schema["type"]]


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
    required: bool = False

    @classmethod
    def of_field(cls, field: QuestionField) -> Argument:
        """Return the argument that is a field of a question."""
        about, choices, default = field.about, field.choices, field.default
        if choices and len(choices) <= _CHOICES_MAX:
            *most, last = (f'"{each}"{" (default)" * (each == default)}' for each in choices)
            about += f": {', '.join(most)} or {last}"
        elif default is not None:
            about += f'; "{default}" by default' if choices else f"; {default} by default"
        types = " | ".join(map(_name_type, field.schemas))
        return cls(field.name, types, about, field.required)

    def write_parameter(self) -> str:
        """Return the argument in a signature."""
        default = "" if self.required else " | None = None"
        note = "  # noqa: A002 - the API's name" if hasattr(builtins, self.name) else ""
        return f"    {self.name}: {self.type}{default},{note}\n"

    def write_line(self) -> str:
        """Return the argument in a docstring."""
        text = f"{self.name}: {self.about}."
        return textwrap.fill(text, WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 12) + "\n"


_RUN: Final = [
    Argument.of_field(
        QuestionField(name, each.about, (each.schema,), each.schema.get("default"), required=False)
    )
    for name, each in RUN_FIELDS.items()
]
_LAST: Final = Argument(
    "time_limit", "float", "most CPU seconds that the computation may take; none by default"
)


def list_arguments(model: type[Question]) -> list[Argument]:
    """Return the arguments of a question.

    What is required or a target comes first, then a run or mechanism, then what else there is.
    """
    fields = list_fields(model)
    found = {name: Argument.of_field(field) for name, field in fields.items()}
    if "mechanism" in fields and MECHANISM_PLACEHOLDER in fields["mechanism"].schemas[0]:
        about = "any mechanism as JSON, instead of a run"
        found |= {each.name: each for each in _RUN}
        found["mechanism"] = Argument("mechanism", "Mapping[str, Any]", about)  # or a run
    elif hasattr(model, "solved_for"):
        for name in (model.solved_for, *model.left_out):
            found.pop(name, None)
    elif "mechanism" not in found:
        return sorted(found.values(), key=lambda each: not each.required)
    first = [name for name in found if found[name].required or name in (*TARGETS, *QUALIFIERS)]
    first = [name for name in first if name not in RUN_FIELDS]
    then = [name for name in (*RUN_FIELDS, "mechanism", "earlier", "method") if name in found]
    return [found[name] for name in dict.fromkeys([*first, *then, *found])]


def _list_functions() -> Iterator[tuple[str, str, Endpoint, type]]:
    """Yield of each question its function's name, its path, its endpoint and what it returns."""
    for path, endpoint in ENDPOINTS.items():
        name = path.removeprefix("/v1/").replace("-", "_").replace("import", "import_document")
        answer = get_type_hints(endpoint.compute)["return"]
        if not issubclass(answer, BaseModel):  # the others have no function
            yield name, path, endpoint, answer


def write_functions() -> str:
    """Return the text of the module of functions."""
    functions: list[str] = []
    imports: dict[str, list[str]] = {}
    for name, path, endpoint, answer in _list_functions():
        model: Any = endpoint.request
        imports.setdefault(answer.__module__, []).append(answer.__name__)
        arguments = [*list_arguments(model), _LAST]
        first, *others = (each.write_parameter() for each in arguments)
        functions.append(
            f"\n\n@for_each_element\ndef {name}(\n{first}    *,\n{''.join(others)})"
            f' -> {answer.__name__}:\n    """{model.__doc__}\n\n    Args:\n'
            f"{''.join(each.write_line() for each in arguments)}\n    Raises:\n"
            f'{"".join(each.write_line() for each in _list_errors(model))}    """\n'
            f'    found: {answer.__name__} = answer("{path}", locals())\n    return found\n'
        )
    lines = [_write_import(module, sorted({*imports[module]})) for module in sorted(imports)]
    return _FUNCTIONS + "".join([*lines, *functions])


def _write_import(module: str, names: list[str]) -> str:
    """Return the import of some names."""
    line = f"    from {module} import {', '.join(names)}\n"
    if len(line) <= WIDTH:
        return line
    return f"    from {module} import (\n        " + ",\n        ".join(names) + ",\n    )\n"


def _list_errors(model: type[Question]) -> list[Argument]:
    """Return the errors of a question's function."""
    about = f"the question has no answer, such as {model.no_answer}, or takes more time"
    return [
        Argument("InvalidArgumentError", "", f"{_INVALID}; the message names it"),
        Argument("AccountingError", "", about),
    ]


def write_arguments() -> str:
    """Return the text of the module of the client's arguments: those that no method names."""
    about = "Keyword arguments that describe a DP-SGD run; used where no mechanism is given."
    methods = {
        each.name: {argument.arg for argument in each.args.args}
        for each in ast.walk(ast.parse((CLIENT / "__init__.py").read_text(encoding="utf-8")))
        if isinstance(each, ast.FunctionDef)
    }
    classes = [_write_class("RunArguments", "TypedDict", about, _RUN)]
    for name, _, endpoint, _ in _list_functions():
        model: Any = endpoint.request
        found = [each for each in list_arguments(model) if each.name not in methods[name]]
        base = "TypedDict"
        if {each.name for each in found} >= RUN_FIELDS.keys():
            base, found = "RunArguments", [each for each in found if each.name not in RUN_FIELDS]
        title = "".join(word.capitalize() for word in name.split("_")) + "Arguments"
        about = f"Keyword arguments of `AccountingService.{name}`."
        classes.append(_write_class(title, base, about, found))
    return _ARGUMENTS + "".join(classes)


def _write_class(name: str, base: str, about: str, arguments: list[Argument]) -> str:
    """Return the class of some keyword arguments."""
    described = "".join(each.write_line() for each in arguments)
    fields = "".join(
        f"    {each.name}: {f'Required[{each.type}]' if each.required else each.type}\n"
        for each in arguments
    )
    return (
        f'\n\nclass {name}({base}, total=False):\n    """{about}\n\n    Attributes:\n{described}'
        f'    """\n\n{fields}'
    )


MODULES: Final[Mapping[Path, Any]] = {
    _ROOT / "accountant_service" / "questions" / "functions.py": write_functions,
    CLIENT / "arguments.py": write_arguments,
    CLIENT / "calls.py": write_calls,
}


def main() -> None:
    """Print the modules, or write them."""
    for file, write in MODULES.items():
        if "--write" in sys.argv:
            file.write_text(write(), encoding="utf-8")
        else:
            print(write(), end="")


if __name__ == "__main__":
    main()
