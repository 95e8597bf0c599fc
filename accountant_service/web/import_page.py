"""The import page: a document of another tool, what it costs, and what is wrong in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from pydantic_core import to_json
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from accountant_service.api.routes import StrictRoute
from accountant_service.importing import CODES
from accountant_service.questions.models import ImportRequest, UnreadBody
from accountant_service.web import run_form
from accountant_service.web.calculator_page import answer_or_problem, require_computation_access
from accountant_service.web.choices import describe_choices
from accountant_service.web.number_fields import describe_fields, read_values
from accountant_service.web.rendering import render_page
from accountant_service.web.session_checks import Fields, SentFields, first_value

Json = dict[str, Any]
FIELDS: Final = describe_fields(ImportRequest)
CHOICES: Final = describe_choices(ImportRequest)
DOCUMENT: Final = "document"
EXAMPLE: Final = '{"history": [[1.1, 0.01, 1000]], "mechanism": "rdp"}'

router = APIRouter(route_class=StrictRoute, include_in_schema=False)


@router.get("/import")
async def show_import(request: Request) -> Response:
    """Show the form with an example, and what is proved about it."""
    await require_computation_access(request)
    return await _render_import_page(request, {})


@router.post("/import")
async def import_document(request: Request, sent: SentFields) -> Response:
    """Show what a pasted document costs. Nothing is stored."""
    await require_computation_access(request)
    return await _render_import_page(request, sent)


async def _render_import_page(request: Request, sent: Fields) -> Response:
    """Render the page for the fields of the form; missing ones have their initial text."""
    texts = _read_texts(sent)
    body, problems = _build_body(texts)
    answer = None
    if not problems:
        answer = await answer_or_problem(request, "/v1/import", UnreadBody(to_json(body)))
        problems = _place_problems(answer)
    return await run_in_threadpool(
        render_page,
        request,
        "import.html",
        fields=FIELDS,
        choices=CHOICES,
        titles={code: title for code, (_, title) in CODES.items()},
        texts=texts,
        problems=problems,
        answer=None if problems else answer,
        calculator_link=_calculator_link(answer),
    )


def _read_texts(sent: Fields) -> dict[str, str]:
    """Return the form's texts; fields that were not sent have their initial texts."""
    texts = {
        name: first_value(sent, name) if name in sent else field.initial
        for name, field in FIELDS.items()
    }
    texts |= {name: choice.read(first_value(sent, name)) for name, choice in CHOICES.items()}
    return texts | {DOCUMENT: first_value(sent, DOCUMENT) if DOCUMENT in sent else EXAMPLE}


def _build_body(texts: Mapping[str, str]) -> tuple[Json, dict[str, str]]:
    """Return the form as a request body of the API, and a sentence for each wrong field."""
    body: Json = {DOCUMENT: texts[DOCUMENT]}
    body |= {name: texts[name] for name in CHOICES if texts[name]}
    values, problems = read_values(FIELDS, texts)
    return body | values, problems | ({} if texts[DOCUMENT] else {DOCUMENT: "Paste a document."})


def _place_problems(answer: Json) -> dict[str, str]:
    """Return a sentence for each field that the API refuses; empty for an answer."""
    found: dict[str, str] = {}
    for error in answer.get("errors", []):
        name, _, inner = error["pointer"].strip("/").partition("/")
        if name in FIELDS:
            found.setdefault(name, FIELDS[name].sentence(error["message"]))
        else:
            subject = f"/{inner}" if inner else "The document"
            found.setdefault(DOCUMENT, f"{subject} {error['message']}.")
    return found


def _calculator_link(answer: Json | None) -> str | None:
    """Return the address of the calculator with the imported mechanism; None if it is too long."""
    mechanism = (answer or {}).get("mechanism")
    guarantee = (answer or {}).get("guarantee")
    if mechanism is None or guarantee is None:
        return None
    parameters = run_form.write_mechanism(mechanism)
    shared = {
        "delta": repr(guarantee["delta"]),
        "neighbouring_relation": guarantee["neighbouring_relation"],
    }
    return "/?" + urlencode(parameters | shared) if parameters else None
