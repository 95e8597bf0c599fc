"""The API reference page, built from the OpenAPI document."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from accountant_service.api.routes import StrictRoute
from accountant_service.web.rendering import respond_with_static_page
from accountant_service.writing.number_format import shorten_exponents

Node = Mapping[str, Any]
_REFERENCE: Final = "#/components/schemas/"
_EXAMPLES: Final = {"string": "…", "integer": 1, "number": 0.5, "boolean": True, "null": None}
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
        request: a curl command that makes an example of the request.
        example: an example of the answer as JSON; empty if it is not JSON.
        answers: status codes and their meanings.
    """

    method: str
    path: str
    description: str
    parameters: tuple[Parameter, ...]
    request: str
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
    success = next(each for code, each in operation["responses"].items() if code < "300")
    answer = _get_json_schema(success)
    return Operation(
        method.upper(),
        path,
        operation.get("description") or operation["summary"],
        (*_url_and_header_parameters(document, operation), *_body_parameters(document, body)),
        _write_request(document, method, path, operation, body),
        _dump(make_example(document, answer)) if answer else "",
        tuple(
            (status, _describe_response(each)) for status, each in operation["responses"].items()
        ),
    )


def _write_request(document: Node, method: str, path: str, operation: Node, body: Node) -> str:
    """Return a curl command for an operation; names in capitals are to be replaced."""
    address = re.sub(r"\{(\w+)\}", lambda found: found[1].upper(), path)
    verb = "" if method in ("get", "post") else f" -X {method.upper()}"
    words = [f'curl -s{verb} "$ACCOUNTANT_URL{address}"']
    if operation["tags"][0] == "ledger":
        words.append('-H "Authorization: Bearer $ACCOUNTANT_API_KEY"')
    if any(each["name"] == "Idempotency-Key" for each in operation.get("parameters", ())):
        words.append('-H "Idempotency-Key: $(uuidgen)"')
    if body:
        words.append("-H 'Content-Type: application/json'")
        words.append(f"-d {shlex.quote(_dump(make_example(document, body)))}")
    return " \\\n  ".join(words)


def _dump(example: Any) -> str:
    """Return an example as JSON text."""
    return shorten_exponents(json.dumps(example, indent=2, ensure_ascii=False))


def make_example(document: Node, schema: Node, depth: int = 6) -> Any:
    """Return an example of a schema: its own one, or its fields with a value of each type."""
    schema = _resolve_reference(document, schema)
    if "examples" in schema:
        return schema["examples"][0]
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    if schema.get("default") is not None:
        return schema["default"]
    several = schema.get("anyOf") or schema.get("oneOf")
    if several:
        return make_example(document, several[0], depth)
    if schema.get("type") == "array":
        return [make_example(document, schema["items"], depth - 1)] if depth else []
    if "properties" in schema and depth:
        fields = schema["properties"].items()
        return {name: make_example(document, each, depth - 1) for name, each in fields}
    return _EXAMPLES.get(schema.get("type", ""), {})


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
    """Yield the fields of an operation's request body, those that are required first."""
    required = body.get("required", ())
    properties = body.get("properties", {})
    for name in sorted(properties, key=lambda each: each not in required):
        schema = properties[name]
        meaning = schema.get("description") or _find_meaning(document, name, schema)
        yield Parameter(name, _describe_type(document, schema), name in required, meaning)


def _find_meaning(document: Node, name: str, schema: Node) -> str:
    """Return what a field without a description means: what the schema or a run says of it."""
    of_each = _resolve_reference(document, schema.get("items", schema))
    described: str = of_each.get("description", "")
    run = document["components"]["schemas"]["DpSgdMechanism"]["properties"]
    return described.partition("\n")[0] or run.get(name, {}).get("description", "")


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
