"""The calculator page: reads one or several runs from the URL and shows all answers about them."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from typing import Any, Final
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from accountant_service.accounting.methods import ACCOUNTANTS
from accountant_service.api.routes import StrictRoute, client_address
from accountant_service.errors import AccountingError
from accountant_service.numerics.floats import rounding
from accountant_service.questions import problems
from accountant_service.questions.answer_cache import ComputationCache
from accountant_service.questions.models import UnreadBody
from accountant_service.questions.registry import ENDPOINTS
from accountant_service.web import calculator_form, run_form, snippets
from accountant_service.web.calculator_form import ALONE, FIRST_STEP, CalculatorForm
from accountant_service.web.rendering import list_parameter_faults, render_page
from accountant_service.web.session_checks import optional_session, required_session
from accountant_service.writing.number_format import group_digits

Json = dict[str, Any]
_TITLES: Final = {name: each.title for name, each in ACCOUNTANTS.items()}
_CHANGES: Final = ("add", "remove", "choose")  # parameters that change the runs
_LOOSE_FROM: Final = 2.0  # an ε this many times the proved one is of little use
_FALSE_ALARMS: Final = 0.001  # the rate at which the page says in words what an attacker finds
_SEE_OTHER: Final = 303

router = APIRouter(route_class=StrictRoute, include_in_schema=False)


async def require_computation_access(request: Request) -> None:
    """Read the session; raise if there is none and computations need an API key.

    Raises:
        UnauthenticatedError: only keys may compute, and nobody is signed in.
    """
    if request.app.state.settings.open_computation:
        await optional_session(request)
    else:
        await run_in_threadpool(required_session, request)


@router.get("/")
async def calculator(request: Request) -> Response:
    """Show the calculator for the runs in the URL."""
    await require_computation_access(request)
    query = request.query_params
    form = calculator_form.read_form(query)
    faults = [*list_parameter_faults(query, _list_parameters(form)), *form.faults]
    changed = None if faults else calculator_form.change_runs(form, query)
    if changed is not None:
        return RedirectResponse(f"/?{urlencode(changed)}#{_new_place(form, query)}", _SEE_OTHER)
    form = _check_with_api(form)
    # a wrong target still allows answers about the runs
    ready = set(form.problems) <= {"epsilon"} and not faults
    answers = await _request_answers(request, form) if ready else {}
    context = _template_context(request, form, answers)
    return await run_in_threadpool(
        render_page,
        request,
        "calculator.html",
        parameters=list(query),  # the unknown ones are faults
        form=form,
        faults=faults,
        **context,
    )


def _new_place(form: CalculatorForm, query: Any) -> str:
    """Return the place on the page to show after a run was added, removed or changed."""
    if "choose" in query:
        return f"run-{query['choose']}"
    return f"run-{len(form.runs) + 1}" if "add" in query else "run-1"


def _list_parameters(form: CalculatorForm) -> list[str]:
    """Return the names of the URL parameters that the page reads."""
    shared = (*calculator_form.SHARED_FIELDS, *calculator_form.SHARED_CHOICES)
    return [*run_form.list_parameters(form.runs), *shared, *_CHANGES]


def _template_context(request: Request, form: CalculatorForm, answers: Json) -> Json:
    """Return the variables of the calculator's template, without the form."""
    return {
        "fields": calculator_form.FIELDS,
        "choices": calculator_form.CHOICES,
        "runs_max": run_form.RUNS_MAX,
        "titles": _TITLES,
        "answers": answers or None,
        "alone": [answers.get(f"{ALONE}-{run.number}") for run in form.runs],
        "curve": _begin_at_zero(answers.get(calculator_form.CURVE), answers.get(FIRST_STEP)),
        "attack": _describe_attack(answers.get(calculator_form.TRADE_OFF)),
        "methods": _sort_methods(answers[calculator_form.COMPARE]) if answers else {},
        "snippets": _snippets(request, form) if answers else {},
        "with_values": lambda **changes: _link_with_values(form, changes),
    }


def _link_with_values(form: CalculatorForm, changes: Json) -> str:
    """Return the page's address with other values for the run that is solved for."""
    texts = [{**run.texts, **changes} if run is form.solved_run else run.texts for run in form.runs]
    return "/?" + urlencode(run_form.write_runs(texts) | dict(form.texts))


def _sort_methods(comparison: Json) -> Json:
    """Return methods' answers in two lists: the useful ones, and the loose or inapplicable.

    The others are proved, but far above the proved interval, or do not apply.
    """
    certified = (comparison.get("certified") or {}).get("certified")
    limit = _LOOSE_FROM * certified["epsilon_upper"] if certified else float("inf")
    found: Json = {"near": [], "loose": []}
    for claim in comparison.get("guarantees", []):
        is_loose = "epsilon" not in claim or (
            claim["status"] == "proven" and claim["epsilon"] > limit
        )
        found["loose" if is_loose else "near"].append(claim)
    return found


def _begin_at_zero(curve: Json | None, first: Json | None) -> Json | None:
    """Return a curve's answer with ε = 0 before the first step, and ε after it if it is known.

    A line drawn from 0 to the first of a few points would lie below the bound between them.
    """
    if curve is None or "steps" not in curve:
        return curve
    starts = {each["method"]: each.get("epsilon") for each in (first or {}).get("curves", [])}
    known = curve["steps"][0] > 1 and bool(starts)
    lines = [
        each | {"epsilon": [0.0, *(starts[each["method"]] or [None] if known else []), *values]}
        if (values := each.get("epsilon")) is not None
        else each
        for each in curve["curves"]
    ]
    return curve | {"steps": [0, *([1] if known else []), *curve["steps"]], "curves": lines}


def _describe_attack(trade_off: Json | None) -> Json | None:
    """Return a trade-off's answer with its rates as rows, and one of them in words."""
    if trade_off is None or "code" in trade_off:
        return trade_off
    rows = [
        (rate, min(1.0, rounding.up(1.0 - lower)), max(0.0, rounding.down(1.0 - upper)))
        for rate, lower, upper in zip(
            trade_off["false_positive_rates"],
            trade_off["false_negative_rates_lower"],
            trade_off["false_negative_rates_upper"],
            strict=True,
        )
    ]
    found = next(most for rate, most, _ in rows if rate == _FALSE_ALARMS)
    return trade_off | {"rows": rows, "found": describe_rate_rounded_up(found)}


def describe_rate_rounded_up(rate: float) -> str:
    """Return a rate in words, never less than it is: "1 in 90", or "35 in 100" if it is large."""
    if rate > 0.1:
        return f"{math.ceil(100 * rate)} in 100"
    return f"1 in {group_digits(math.floor(1 / rate))}" if rate else "none"


def _check_with_api(form: CalculatorForm) -> CalculatorForm:
    """Validate the form with the API's models; return it with the errors found."""
    found = calculator_form.problem_sentences(
        form,
        [
            (name, problem)
            for name, (path, body) in form.questions.items()
            if (problem := find_problem(path, body)) is not None
        ],
    )
    readable = {name: text for name, text in found.items() if form.has_value(name)}
    return replace(form, problems={**readable, **form.problems} if form.problems else found)


def find_problem(path: str, body: Json) -> Json | None:
    """Return the error answer with which the API would refuse a request body, or None."""
    try:
        ENDPOINTS[path].request.model_validate(body)
    except ValidationError as error:
        return problems.of_error(error)
    return None


def _snippets(request: Request, form: CalculatorForm) -> Json:
    """Return code that repeats the comparison with curl, the command line and Python."""
    path, body = form.questions[calculator_form.COMPARE]
    return {
        "curl": snippets.curl(str(request.base_url), path, body),
        "command line": snippets.command(body),
        "Python": snippets.python(body),
    }


async def _request_answers(request: Request, form: CalculatorForm) -> Json:
    """Request all answers of the page from the API; return answers or error answers by name."""
    questions = form.questions
    found = await asyncio.gather(
        *(answer_or_problem(request, path, body) for path, body in questions.values())
    )
    return dict(zip(questions, found, strict=True))


async def answer_or_problem(request: Request, path: str, body: Json | UnreadBody) -> Json:
    """Request an answer from the API; return it, or the error answer."""
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
