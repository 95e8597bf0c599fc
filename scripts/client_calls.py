"""Write the typed client's calls from the OpenAPI document, one for each route.

`python -m scripts.question_functions --write` writes the module, with those that are like it.
"""

from __future__ import annotations

import ast
import builtins
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from fastapi.routing import APIRoute

from accountant_service.api import export_routes, ledger_routes
from accountant_service.api.routes import build_router
from accountant_service.operations.settings import Settings
from accountant_service.server.app import create_app

CLIENT: Final = Path(__file__).parents[1] / "training_client" / "client"
WIDTH: Final = 100
_SUMMARY_MAX: Final = 88  # characters, as a line has an indent and quotes
_JSON: Final = "application/json"
_IDEMPOTENCY: Final = "Idempotency-Key"
_OTHERWISE: Final = {"reserve_jointly": "reserve"}  # the method that also calls this route
_TYPES: Final = {"number": "float", "integer": "int", "string": "str", "boolean": "bool"}
_MODULE: Final = '''"""Calls of the service, one for each route that no method is written for.

`python -m scripts.question_functions --write` writes this module from the routes of the service:
change a route in `api/ledger_routes.py` or `api/routes.py`, or its body in the schemas there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from training_client.client.urls import quote_segment

Json = Mapping[str, Any]


def _present(**arguments: Any) -> dict[str, Any]:
    """Return the arguments that were given."""
    return {name: value for name, value in arguments.items() if value is not None}


class RouteCalls(ABC):
    """Calls of the service's routes, which answer with the JSON of the HTTP API.

    An argument that is None is left out of the request, unless it is required.
    """

    @abstractmethod
    def _call(self, method: str, path: str, body: Json | None = None) -> dict[str, Any]:
        """Send a request that may be repeated; return the answer."""

    @abstractmethod
    def _call_once(self, method: str, path: str, body: Json | None = None) -> dict[str, Any]:
        """Send a request that must not be repeated; return the answer."""

    @abstractmethod
    def _call_with_key(
        self, method: str, path: str, body: Json | None, idempotency_key: str | None
    ) -> dict[str, Any]:
        """Send a write that takes effect once, however often it is sent; return the answer."""

    @abstractmethod
    def _list(self, path: str, query: Json) -> Iterator[dict[str, Any]]:
        """Yield the items of a list, page by page."""

    @abstractmethod
    def _download(self, path: str, query: Json) -> bytes:
        """Return the body of an answer in the requested format."""
'''


@dataclass(frozen=True)
class Field:
    """A parameter or a field of a request, as an argument of a method.

    Attributes:
        name: its name in the API.
        type: its type in Python.
        about: what it is, in words.
        required: whether the request must have it.
    """

    name: str
    type: str
    about: str
    required: bool

    def write_parameter(self) -> str:
        """Return the argument in a signature."""
        default = "" if self.required else " = None"
        kinds = self.type if self.required or self.type.endswith("None") else f"{self.type} | None"
        note = "  # noqa: A002 - the API's name" if hasattr(builtins, self.name) else ""
        return f"        {self.name}: {kinds}{default},{note}\n"

    def write_line(self) -> str:
        """Return the argument in a docstring."""
        text = f"{self.name}: {self.about or self.name.replace('_', ' ')}.".replace("..", ".")
        first, later = " " * 12, " " * 16
        return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=later) + "\n"


@dataclass(frozen=True)
class Route:
    """A route of the service, as the OpenAPI document describes it.

    Attributes:
        function: the name of the function that answers it.
        verb: the HTTP method.
        path: its path.
        operation: its description.
        schemas: all schemas of the document.
    """

    function: str
    verb: str
    path: str
    operation: Mapping[str, Any]
    schemas: Mapping[str, Any]

    @property
    def is_list(self) -> bool:
        """True if it answers page by page."""
        return any(each["name"] == "cursor" for each in self.operation.get("parameters", ()))

    @property
    def name(self) -> str:
        """The name of its method."""
        if self.is_list and not self.function.startswith(("list_", "export_")):
            return f"list_{self.function}"
        return self.function

    @property
    def is_document(self) -> bool:
        """True if it answers in one of several formats."""
        return len(self.operation["responses"].get("200", {}).get("content", ())) > 1

    @property
    def takes_key(self) -> bool:
        """True if it takes an idempotency key."""
        return any(each["name"] == _IDEMPOTENCY for each in self.operation.get("parameters", ()))

    @property
    def is_repeatable(self) -> bool:
        """True if a request may be sent again without an idempotency key."""
        return self.verb != "POST" or "201" not in self.operation["responses"]

    def parameters(self, place: str) -> list[Field]:
        """Return its parameters in the path or in the query."""
        left_out = {"cursor", "format"} if self.is_list else set()
        return [
            Field(
                each["name"],
                self._name_type(each["schema"]),
                each.get("description", ""),
                each["required"],
            )
            for each in self.operation.get("parameters", ())
            if each["in"] == place and each["name"] not in left_out
        ]

    @cached_property
    def body(self) -> list[Field] | None:
        """The fields of its body: a name first, then what is required; None without a body."""
        if "requestBody" not in self.operation:
            return None
        schema = self._resolve(self.operation["requestBody"]["content"][_JSON]["schema"])
        required = schema.get("required", ())
        found = [
            Field(
                name, self._name_type(each), each.get("description", ""), required=name in required
            )
            for name, each in schema.get("properties", {}).items()
        ]
        return sorted(found, key=lambda each: (not each.required, each.name != "name"))

    def _resolve(self, schema: Any) -> Any:
        if "$ref" not in schema:
            return schema
        return self.schemas[schema["$ref"].rsplit("/", 1)[1]]

    def _name_type(self, schema: Any) -> str:
        """Return the type in Python of a JSON schema; that of null is left out if others are."""
        schema = self._resolve(schema)
        choices = [self._name_type(each) for each in schema.get("anyOf", ())]
        if choices:
            return " | ".join(dict.fromkeys(choices))
        kind = schema.get("type")
        if kind == "array":
            items = self._name_type(schema.get("items", {}))
            return f"Sequence[{items}]"
        if kind == "null":
            return "None"
        return _TYPES.get(kind, "Json" if kind == "object" or "oneOf" in schema else "Any")


def list_routes() -> Iterator[Route]:
    """Yield all routes of the API, without those that only say that the service is up."""
    with TemporaryDirectory() as folder:
        app = create_app(Settings(database_url=f"sqlite:///{folder}/ledger.db"))
        app.state.repository.close()
    document = app.openapi()
    routers = (build_router(), ledger_routes.router, export_routes.router)
    functions = {
        (verb, route.path): route.operation_id or route.name
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute)
        for verb in route.methods
    }
    for path, operations in document["paths"].items():
        for verb, operation in operations.items():
            if "health" not in operation["tags"]:
                function = functions[verb.upper(), path]
                yield Route(
                    function, verb.upper(), path, operation, document["components"]["schemas"]
                )


def list_methods_by_hand() -> set[str]:
    """Return the names of the client's methods that are written by hand."""
    tree = ast.parse((CLIENT / "__init__.py").read_text(encoding="utf-8"))
    return {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}


def method_of(route: Route) -> str:
    """Return the name of the client's method that calls a route."""
    if route.function == "import":
        return "import_document"
    return _OTHERWISE.get(route.function, route.name)


def write_calls() -> str:
    """Return the text of the module of calls."""
    by_hand = list_methods_by_hand()
    routes = [each for each in list_routes() if method_of(each) not in by_hand]
    text = _MODULE + "".join(map(_write_method, routes))
    formatter = [sys.executable, "-m", "ruff", "format", "-"]
    return subprocess.run(
        formatter, input=text, capture_output=True, text=True, check=True, cwd=CLIENT
    ).stdout


def _write_method(route: Route) -> str:
    """Return the method that calls a route."""
    path, query = route.parameters("path"), route.parameters("query")
    inside = [*(route.body or ()), *query]
    positional = [*path, *(each for each in inside if each.required)]
    optional = [each for each in inside if not each.required]
    if route.takes_key:
        about = "a write with the key of an earlier one is a repeat of it; random by default"
        optional.append(Field("idempotency_key", "str", about, required=False))
    signature = [each.write_parameter() for each in positional]
    if optional:
        signature += ["        *,\n", *(each.write_parameter() for each in optional)]
    given = f"\n        self,\n{''.join(signature)}    " if signature else "self"
    described = [*positional, *optional]
    returned, call = _write_call(route, query)
    return (
        f"\n    def {route.name}({given}) -> {returned}:\n"
        f"{_write_docstring(route, described)}        {call}\n"
    )


def _write_call(route: Route, query: list[Field]) -> tuple[str, str]:
    """Return what a method returns, and its statement."""
    place = route.path
    for each in route.parameters("path"):
        place = place.replace(f"{{{each.name}}}", f"{{quote_segment({each.name})}}")
    where = f'f"{place}"' if "{" in place else f'"{place}"'
    if route.is_list:
        return "Iterator[dict[str, Any]]", f"return self._list({where}, {_write_dict(query)})"
    if route.is_document:
        return "bytes", f"return self._download({where}, {_write_dict(query)})"
    body = "None" if route.body is None else _write_dict(route.body)
    if route.takes_key:
        call = f'self._call_with_key("{route.verb}", {where}, {body}, idempotency_key)'
    else:
        name = "_call" if route.is_repeatable else "_call_once"
        call = f'self.{name}("{route.verb}", {where}' + f", {body}" * (body != "None") + ")"
    if "204" in route.operation["responses"]:
        return "None", call
    return "dict[str, Any]", f"return {call}"


def _write_dict(fields: list[Field]) -> str:
    """Return a dict of the arguments of these names; optional ones only if they are given."""
    required = ", ".join(f'"{each.name}": {each.name}' for each in fields if each.required)
    optional = ", ".join(f"{each.name}={each.name}" for each in fields if not each.required)
    if not optional:
        return f"{{{required}}}"
    return f"{{{required}, **_present({optional})}}" if required else f"_present({optional})"


def _write_docstring(route: Route, arguments: list[Field]) -> str:
    """Return the docstring of a method."""
    text = route.operation.get("description") or route.operation["summary"]
    first, *others = text.strip().split("\n\n")
    first = " ".join(first.split())
    if len(first) > _SUMMARY_MAX:
        summary, _, rest = first.partition(". ")
        first, others = f"{summary}.", [rest, *others]
    lines = [f'        """{first}']
    for each in others:
        lines += ["", textwrap.indent(textwrap.fill(" ".join(each.split()), WIDTH - 8), " " * 8)]
    if not arguments:
        single = len(lines) == 1
        return lines[0] + '"""\n' if single else "\n".join(lines) + '\n        """\n'
    listed = "".join(each.write_line() for each in arguments)
    return "\n".join(lines) + f'\n\n        Args:\n{listed}        """\n'
