"""The calls of the API as a page, written from its OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from accountant_service.api.routes import StrictRoute
from accountant_service.web.rendering import page

Node = Mapping[str, Any]
_REFERENCE: Final = "#/components/schemas/"
_TITLES: Final = {"computation": "Computing", "ledger": "The ledger", "health": "Health"}

router = APIRouter(route_class=StrictRoute, include_in_schema=False)


@dataclass(frozen=True)
class Field:
    """What a body or an address may hold.

    Attributes:
        name: of it.
        kind: its type, in words.
        required: whether it must be there.
        meaning: what it is, if that is said.
    """

    name: str
    kind: str
    required: bool
    meaning: str


@dataclass(frozen=True)
class Call:
    """A call of the API.

    Attributes:
        method: of HTTP.
        path: with the names of its parts in braces.
        says: what it does.
        fields: of its address, its headers and its body.
        example: a body, as JSON.
        answers: what each status means.
    """

    method: str
    path: str
    says: str
    fields: tuple[Field, ...]
    example: str
    answers: tuple[tuple[str, str], ...]


@router.get("/docs")
def reference(request: Request) -> Response:
    """All calls, in the order of the OpenAPI document."""
    return page(request, "reference.html", groups=groups(request.app.openapi()))


def groups(document: Node) -> dict[str, list[Call]]:
    """The calls of an OpenAPI document by what they are about."""
    found: dict[str, list[Call]] = {title: [] for title in _TITLES.values()}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            found[_TITLES[operation["tags"][0]]].append(_call(document, method, path, operation))
    return found


def _call(document: Node, method: str, path: str, operation: Node) -> Call:
    body = _resolved(document, _content(operation.get("requestBody", {})))
    examples = body.get("examples", [])
    return Call(
        method.upper(),
        path,
        operation.get("description") or operation["summary"],
        (*_parameters(document, operation), *_properties(document, body)),
        json.dumps(examples[0], indent=2, ensure_ascii=False) if examples else "",
        tuple((status, _meaning(each)) for status, each in operation["responses"].items()),
    )


def _meaning(answer: Node) -> str:
    """What a status means; FastAPI's word for what went well says nothing."""
    text = str(answer["description"])
    return "The answer" if text == "Successful Response" else text.replace("`", "")


def _content(part: Node) -> Node:
    found: Node = part.get("content", {}).get("application/json", {}).get("schema", {})
    return found


def _resolved(document: Node, schema: Node) -> Node:
    if "$ref" not in schema:
        return schema
    found: Node = document["components"]["schemas"][schema["$ref"].removeprefix(_REFERENCE)]
    return found


def _parameters(document: Node, operation: Node) -> Iterator[Field]:
    for each in operation.get("parameters", []):
        where = {"path": "in the address", "query": "in the query"}.get(each["in"], "a header")
        meaning = each.get("description") or where
        yield Field(each["name"], _kind(document, each["schema"]), each["required"], meaning)


def _properties(document: Node, body: Node) -> Iterator[Field]:
    required = body.get("required", ())
    for name, schema in body.get("properties", {}).items():
        yield Field(name, _kind(document, schema), name in required, schema.get("description", ""))


def _kind(document: Node, schema: Node) -> str:
    """The type of a value in words."""
    if "enum" in _resolved(document, schema):
        return " or ".join(_resolved(document, schema)["enum"])
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(_REFERENCE).removesuffix("View")
    if "const" in schema:
        return str(schema["const"])
    for several in ("anyOf", "oneOf"):
        if several in schema:
            kinds = dict.fromkeys(_kind(document, each) for each in schema[several])
            return " or ".join("nothing" if each == "null" else each for each in kinds)
    if schema.get("type") == "array":
        return f"list of {_kind(document, schema.get('items', {}))}"
    return str(schema.get("type", "anything"))
