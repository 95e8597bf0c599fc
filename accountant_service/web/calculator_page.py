"""The calculator page: reads a run from the URL and shows all answers about it."""

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
from accountant_service.api.computation_cache import ComputationCache
from accountant_service.api.questions import ENDPOINTS
from accountant_service.api.routes import StrictRoute, client_address
from accountant_service.api.schemas import UnreadBody
from accountant_service.errors import AccountingError
from accountant_service.web import calculator_form, snippets
from accountant_service.web.calculator_form import CalculatorForm
from accountant_service.web.rendering import render_page
from accountant_service.web.session_checks import optional_session, required_session

Json = dict[str, Any]
_TITLES: Final = {name: each.title for name, each in ACCOUNTANTS.items()}

router = APIRouter(route_class=StrictRoute, include_in_schema=False)


@router.get("/")
async def calculator(request: Request) -> Response:
    """Show the calculator for the run in the URL."""
    is_open = request.app.state.settings.open_computation
    await run_in_threadpool(optional_session if is_open else required_session, request)
    form = _check_with_api(calculator_form.read_form(request.query_params))
    ready = set(form.problems) <= {"epsilon"}  # a wrong target still allows answers about the run
    answers = await _request_answers(request, form) if ready else {}
    context = _template_context(request, form, answers)
    return await run_in_threadpool(render_page, request, "calculator.html", form=form, **context)


def _template_context(request: Request, form: CalculatorForm, answers: Json) -> Json:
    """Return the variables of the calculator's template, without the form."""
    return {
        "fields": calculator_form.FIELDS,
        "choices": calculator_form.CHOICES,
        "titles": _TITLES,
        "answers": _key_by_template_name(answers) if answers else None,
        "snippets": _snippets(request, form) if answers else {},
        "with_values": lambda **changes: "/?" + urlencode({**form.texts, **changes}),
    }


def _check_with_api(form: CalculatorForm) -> CalculatorForm:
    """Validate the form with the API's models; return it with the problems found."""
    found = calculator_form.problem_sentences(
        problem
        for path, body in form.bodies.items()
        if (problem := _find_problem(path, body)) is not None
    )
    readable = {name: text for name, text in found.items() if name in form.values}
    return replace(form, problems={**readable, **form.problems} if form.problems else found)


def _find_problem(path: str, body: Json) -> Json | None:
    """Return the problem with which the API would refuse a body, or None."""
    try:
        ENDPOINTS[path].request.model_validate(body)
    except ValidationError as error:
        return problems.of_error(error)
    return None


def _key_by_template_name(answers: Json) -> Json:
    """Return the answers by endpoint name, such as `trade_off`, instead of by path."""
    return {path.removeprefix("/v1/").replace("-", "_"): each for path, each in answers.items()}


def _snippets(request: Request, form: CalculatorForm) -> Json:
    """Return code that repeats the comparison: for curl, the command line and Python."""
    body, relation = form.bodies[calculator_form.COMPARE], form.texts["neighbouring_relation"]
    return {
        "curl": snippets.curl(str(request.base_url), calculator_form.COMPARE, body),
        "command line": snippets.command(body),
        "Python": snippets.python(body, relation),
    }


async def _request_answers(request: Request, form: CalculatorForm) -> Json:
    """Request all answers of the page; return each answer or problem, by path."""
    bodies = form.bodies
    found = await asyncio.gather(
        *(answer_or_problem(request, path, body) for path, body in bodies.items())
    )
    return dict(zip(bodies, found, strict=True))


async def answer_or_problem(request: Request, path: str, body: Json | UnreadBody) -> Json:
    """Request an answer from the API; return it, or the problem document."""
    computations: ComputationCache = request.app.state.computations
    try:
        question = (
            body if isinstance(body, UnreadBody) else ENDPOINTS[path].request.model_validate(body)
        )
        answer: Json = json.loads(
            await computations.answer(client_address(request), path, question)
        )
        return answer
    except (ValidationError, AccountingError, HTTPException) as error:
        return problems.of_error(error)
