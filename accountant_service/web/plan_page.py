"""The planner page: reads a budget and a compute limit from the URL, and shows the plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from accountant_service.api.routes import StrictRoute
from accountant_service.questions import problems
from accountant_service.questions.plan_models import PlanRequest
from accountant_service.web import plan_form
from accountant_service.web.calculator_page import answer_or_problem, require_computation_access
from accountant_service.web.plan_form import PlanForm
from accountant_service.web.rendering import list_parameter_faults, render_page

Json = dict[str, Any]
_NAMES: Final = {"poisson": "Poisson", "balls_in_bins": "balls in bins"}

router = APIRouter(route_class=StrictRoute, include_in_schema=False)


@router.get("/plan")
async def planner(request: Request) -> Response:
    """Show the plan for the budget in the URL."""
    await require_computation_access(request)
    query = request.query_params
    form = _check_with_api(plan_form.read_form(query))
    known = (*plan_form.FIELDS, *plan_form.CHOICES)
    faults = [*list_parameter_faults(query, known), *plan_form.list_choice_faults(query)]
    is_ready = not (form.problems or faults)
    plan = await answer_or_problem(request, "/v1/plan", form.body) if is_ready else None
    context: Json = {
        "fields": plan_form.FIELDS,
        "choices": plan_form.CHOICES,
        "plan": plan,
        "names": _NAMES,
        "plot": None if plan is None or "code" in plan else _build_plot(plan),
        "calculator_link": lambda run: _calculator_link(form, run),
    }
    return await run_in_threadpool(
        render_page,
        request,
        "plan.html",
        parameters=list(query),  # the unknown ones are faults
        form=form,
        faults=faults,
        **context,
    )


def _check_with_api(form: PlanForm) -> PlanForm:
    """Validate the form with the API's model; return it with the errors found."""
    try:
        PlanRequest.model_validate(form.body)
    except ValidationError as error:
        found: dict[str, str] = {}
        for fault in problems.of_error(error)["errors"]:
            name = fault["pointer"].strip("/")
            place = name if name in plan_form.FIELDS else "sampling"
            found.setdefault(place, plan_form.problem_sentence(name, fault["message"]))
        readable = {name: text for name, text in found.items() if name in form.values}
        return replace(form, problems={**readable, **form.problems} if form.problems else found)
    return form


@dataclass(frozen=True, slots=True)
class _PlotData:
    """The data of the plan's plot: signal-to-noise ratio, in per cent of its limit, by batch size.

    Attributes:
        lines: labels of the lines, one for each sampling.
        marks: labels of the single points: the recommended run and today's.
        rows: for each batch size, the value of each line and mark; None where there is none.
    """

    lines: tuple[str, ...]
    marks: tuple[str, ...]
    rows: tuple[tuple[float, tuple[float | None, ...]], ...]


def _build_plot(plan: Json) -> _PlotData:
    """Return the data of the plot of a plan's runs."""
    samplings = list(dict.fromkeys(run["sampling"] for run in plan["runs"]))
    marked = {"recommended": plan["recommended"], "today": plan["current"]}
    marks = [name for name, run in marked.items() if run]
    placed = [(run, samplings.index(run["sampling"])) for run in plan["runs"]]
    placed += [(marked[name], len(samplings) + at) for at, name in enumerate(marks)]
    rows: dict[float, list[float | None]] = {}
    for run, at in placed:
        row = rows.setdefault(run["batch_size"], [None] * (len(samplings) + len(marks)))
        row[at] = math.floor(1000 * run["signal_to_noise"] / plan["signal_to_noise_limit"]) / 10
    lines = tuple(_NAMES[name] for name in samplings)
    return _PlotData(
        lines, tuple(marks), tuple((at, tuple(row)) for at, row in sorted(rows.items()))
    )


def _calculator_link(form: PlanForm, run: Json) -> str:
    """Return a link to the calculator, filled in with a planned run."""
    fields = {
        "batches": "sizes",
        "dataset_size": form.texts["dataset_size"],
        "batch_size": run["batch_size"],
        "sampling": run["sampling"],
        "noise_multiplier": run["noise_multiplier"],
        "length": "steps",
        "steps": run["steps"],
        "delta": form.texts["delta"],
        "epsilon": form.texts["epsilon"],
        "neighbouring_relation": form.texts["neighbouring_relation"],
    }
    return "/?" + urlencode(fields)
