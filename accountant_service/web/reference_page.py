"""The API reference page, built from the OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from accountant_service.api.routes import StrictRoute
from accountant_service.web.rendering import respond_with_static_page

Node = Mapping[str, Any]
_REFERENCE: Final = "#/components/schemas/"
_TITLES: Final = {"computation": "Computing", "ledger": "The ledger", "health": "Health"}

router = APIRouter(route_class=StrictRoute, include_in_schema=False)


@dataclass(frozen=True)
class Parameter:
    """A parameter of an operation, in the URL, a header or the body.

    Attributes:
        name: its name.
        kind: its type in words.
        required: True if it must be present.
        meaning: its description; empty if there is none.
    """

    name: str
    kind: str
    required: bool
    meaning: str


@dataclass(frozen=True)
class Operation:
    """An operation of the API.

    Attributes:
        method: the HTTP method.
        path: the path, with parameters in braces.
        description: what the operation does.
        parameters: parameters in the URL, the headers and the body.
        example: an example of the body as JSON; empty if there is none.
        answers: status codes and their meanings.
    """

    method: str
    path: str
    description: str
    parameters: tuple[Parameter, ...]
    example: str
    answers: tuple[tuple[str, str], ...]


@router.get("/docs")
async def reference(request: Request) -> Response:
    """Show all operations, in the order of the OpenAPI document."""
    return await respond_with_static_page(
        request, "reference.html", lambda: {"groups": operations_by_tag(request.app.openapi())}
    )


def operations_by_tag(document: Node) -> dict[str, list[Operation]]:
    """Return the operations of an OpenAPI document, grouped by tag title."""
    found: dict[str, list[Operation]] = {title: [] for title in _TITLES.values()}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            found[_TITLES[operation["tags"][0]]].append(
                _build_operation(document, method, path, operation)
            )
    return found


def _build_operation(document: Node, method: str, path: str, operation: Node) -> Operation:
    """Return an operation of an OpenAPI document, prepared for the page."""
    body = _resolve_reference(document, _get_json_schema(operation.get("requestBody", {})))
    examples = body.get("examples", [])
    return Operation(
        method.upper(),
        path,
        operation.get("description") or operation["summary"],
        (*_url_and_header_parameters(document, operation), *_body_parameters(document, body)),
        json.dumps(examples[0], indent=2, ensure_ascii=False) if examples else "",
        tuple(
            (status, _describe_response(each)) for status, each in operation["responses"].items()
        ),
    )


def _describe_response(answer: Node) -> str:
    """Return a response's description as plain text, with FastAPI's default replaced."""
    text = str(answer["description"])
    return "The answer" if text == "Successful Response" else text.replace("`", "")


def _get_json_schema(part: Node) -> Node:
    """Return the JSON schema of a request body; empty if it has none."""
    found: Node = part.get("content", {}).get("application/json", {}).get("schema", {})
    return found


def _resolve_reference(document: Node, schema: Node) -> Node:
    """Return the schema that a `$ref` names; any other schema unchanged."""
    if "$ref" not in schema:
        return schema
    found: Node = document["components"]["schemas"][schema["$ref"].removeprefix(_REFERENCE)]
    return found


def _url_and_header_parameters(document: Node, operation: Node) -> Iterator[Parameter]:
    """Yield the parameters of an operation in the path, the query and the headers."""
    for each in operation.get("parameters", []):
        where = {"path": "in the path", "query": "in the query"}.get(each["in"], "a header")
        meaning = each.get("description") or where
        yield Parameter(
            each["name"], _describe_type(document, each["schema"]), each["required"], meaning
        )


def _body_parameters(document: Node, body: Node) -> Iterator[Parameter]:
    """Yield the fields of an operation's request body."""
    required = body.get("required", ())
    for name, schema in body.get("properties", {}).items():
        yield Parameter(
            name, _describe_type(document, schema), name in required, schema.get("description", "")
        )


def _describe_type(document: Node, schema: Node) -> str:
    """Return the type of a schema in words, such as "list of number"."""
    if "enum" in _resolve_reference(document, schema):
        return " or ".join(map(str, _resolve_reference(document, schema)["enum"]))
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(_REFERENCE).removesuffix("View")
    if "const" in schema:
        return str(schema["const"])
    for several in ("anyOf", "oneOf"):
        if several in schema:
            kinds = dict.fromkeys(_describe_type(document, each) for each in schema[several])
            return " or ".join("nothing" if each == "null" else each for each in kinds)
    if schema.get("type") == "array":
        return f"list of {_describe_type(document, schema.get('items', {}))}"
    return str(schema.get("type", "anything"))
