"""The calculator: one question in the URL, every answer beside it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlencode

from fastapi import APIRouter, HTTPException, Request
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from accountant_service.accountants import ACCOUNTANTS
from accountant_service.api import problems
from accountant_service.api.answering import CALLS, Answerer
from accountant_service.api.routes import StrictRoute, asker
from accountant_service.api.schemas import Unread
from accountant_service.errors import AccountingError
from accountant_service.web import questions, snippets
from accountant_service.web.access import optional_session, required_session
from accountant_service.web.questions import Form
from accountant_service.web.rendering import page

Json = dict[str, Any]
_TITLES: Final = {name: each.title for name, each in ACCOUNTANTS.items()}

router = APIRouter(route_class=StrictRoute, include_in_schema=False)


@router.get("/")
async def calculator(request: Request) -> Response:
    """The question of the URL, and its answers."""
    is_open = request.app.state.settings.open_computation
    await run_in_threadpool(optional_session if is_open else required_session, request)
    form = _checked(questions.read(request.query_params))
    ready = set(form.problems) <= {"epsilon"}  # a wrong target leaves the run's own answers
    answers = await _answers(request, form) if ready else {}
    context = _context(request, form, answers)
    return await run_in_threadpool(page, request, "calculator.html", form=form, **context)


def _context(request: Request, form: Form, answers: Json) -> Json:
    """What the template needs beside the form."""
    return {
        "fields": questions.FIELDS,
        "choices": questions.CHOICES,
        "titles": _TITLES,
        "answers": _named(answers) if answers else None,
        "snippets": _snippets(request, form) if answers else {},
        "with_values": lambda **changes: "/?" + urlencode({**form.texts, **changes}),
    }


def _checked(form: Form) -> Form:
    """The form with what the API would refuse, also where some of it cannot be read."""
    found = questions.problems_of(
        problem
        for path, body in form.bodies.items()
        if (problem := _malformed(path, body)) is not None
    )
    readable = {name: text for name, text in found.items() if name in form.values}
    return replace(form, problems={**readable, **form.problems} if form.problems else found)


def _malformed(path: str, body: Json) -> Json | None:
    try:
        CALLS[path].request.model_validate(body)
    except ValidationError as error:
        return problems.of_error(error)
    return None


def _named(answers: Json) -> Json:
    return {path.removeprefix("/v1/").replace("-", "_"): each for path, each in answers.items()}


def _snippets(request: Request, form: Form) -> Json:
    body, relation = form.bodies[questions.COMPARE], form.texts["neighbouring_relation"]
    return {
        "curl": snippets.curl(str(request.base_url), questions.COMPARE, body),
        "command line": snippets.command(body),
        "Python": snippets.python(body, relation),
    }


async def _answers(request: Request, form: Form) -> Json:
    """Every question of the page, asked at once, with its answer or its problem."""
    bodies = form.bodies
    found = await asyncio.gather(*(ask(request, path, body) for path, body in bodies.items()))
    return dict(zip(bodies, found, strict=True))


async def ask(request: Request, path: str, body: Json | Unread) -> Json:
    """The answer to a question, or its problem."""
    answerer: Answerer = request.app.state.answerer
    try:
        question = body if isinstance(body, Unread) else CALLS[path].request.model_validate(body)
        answer: Json = json.loads(await answerer.answer(asker(request), path, question))
        return answer
    except (ValidationError, AccountingError, HTTPException) as error:
        return problems.of_error(error)
