"""Pages of the ledger: all datasets, one dataset, one run."""

from __future__ import annotations

import json
import math
import uuid
from functools import partial
from typing import Any, Final

from fastapi import APIRouter, Request
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response

from accountant_service import mechanisms
from accountant_service.api import ledger_views, problems
from accountant_service.api.ledger_routes import Name, Wanted, report_response
from accountant_service.api.ledger_schemas import DatasetRequest
from accountant_service.api.routes import StrictRoute
from accountant_service.api.schemas import UnreadBody
from accountant_service.disclosure.rendering import Format
from accountant_service.ledger.errors import NameTakenError
from accountant_service.ledger.plans import BudgetPreview, StepsLeft
from accountant_service.ledger.service import Ledger, WriteRequest
from accountant_service.mechanisms import describe_step
from accountant_service.web.calculator_page import answer_or_problem
from accountant_service.web.rendering import HEADERS, render_page
from accountant_service.web.session_checks import (
    Fields,
    FormKey,
    SentFields,
    TheLedger,
    TheSession,
    first_value,
)
from accountant_service.web.sessions import Session

Json = dict[str, Any]
_WARN_FROM: Final = 0.8  # share of the budget taken
_ENTRIES: Final = 25
_RUNS: Final = 20
_POINTS: Final = 120  # of the plot of ε over time
_SEE_OTHER: Final = 303
_IDEMPOTENCY_KEY_MAX: Final = 200

router = APIRouter(route_class=StrictRoute, include_in_schema=False)


def _compute_budget_shares(dataset: Json) -> Json:
    """Return the percentages of a budget spent, spent or held, and left, and whether to warn."""
    spent, taken = dataset["spent"]["share"], 1 - dataset["remaining"]["share"]
    return {
        "spent": 100 * spent,
        "taken": 100 * taken,
        "left": math.floor(100 * dataset["remaining"]["share"]),
        "warn": taken >= _WARN_FROM,
    }


def _describe_reference(dataset: Json) -> str | None:
    """Describe in words the mechanism in whose steps a budget is counted; None without one."""
    reference = dataset["accounting"].get("reference")
    return None if reference is None else describe_step(mechanisms.from_json(reference))


def _describe_steps_left(left: StepsLeft | None, *, is_complete: bool) -> Json:
    """Return the template variables that say how many more steps fit the budget.

    Args:
        left: the steps that fit; None before the first run.
        is_complete: whether all was computed; otherwise the browser asks again.
    """
    step = None if left is None else describe_step(left.step)
    return {"left": left, "left_step": step, "is_complete": is_complete}


def _describe_entry(entry: Json) -> Json:
    """Add the spent and held amounts to an entry as lists, for display."""
    spent, held = (
        entry.get(f"{part}_reference_steps", entry.get(f"{part}_micronats"))
        for part in ("spent", "held")
    )
    return entry | {
        "spent": spent if isinstance(spent, list) else [spent],
        "held": held if isinstance(held, list) else [held],
    }


@router.get("/datasets")
async def datasets(request: Request, session: TheSession, ledger: TheLedger) -> Response:
    """Show the datasets that the key may see, with their budgets."""
    found = await ledger.list_datasets(session.key)
    return await run_in_threadpool(_render_datasets_page, request, found)


def _render_datasets_page(request: Request, listed: list[Json], **context: Any) -> Response:
    """Render the page of all datasets, with the form for a new one."""
    blank: Json = {"texts": {}, "problems": {}, "status": 200}
    items = [
        (dataset, _compute_budget_shares(dataset), _describe_reference(dataset))
        for dataset in listed
    ]
    return render_page(
        request, "datasets.html", items=items, once=uuid.uuid4().hex, **{**blank, **context}
    )


@router.post("/datasets")
async def create_dataset(
    request: Request, holder: FormKey, sent: SentFields, ledger: TheLedger
) -> Response:
    """Create a dataset with a privacy budget."""
    body = _build_dataset_body(sent)
    try:
        asked = DatasetRequest.model_validate(body)
        write = WriteRequest(
            holder, first_value(sent, "once")[:_IDEMPOTENCY_KEY_MAX], "POST /datasets", body
        )
        await ledger.create_dataset(write, asked.to_new_dataset())
    except (ValidationError, NameTakenError) as error:
        found = await ledger.list_datasets(holder)
        typed, faults = _get_typed_texts(sent), _get_problem_sentences(error)
        return await run_in_threadpool(
            _render_datasets_page, request, found, texts=typed, problems=faults, status=422
        )
    return RedirectResponse(f"/datasets/{asked.name}", _SEE_OTHER)


def _build_dataset_body(sent: Fields) -> Json:
    """Return the form for a new dataset as a request body of the API."""
    unit = first_value(sent, "privacy_unit")
    budget = {name: _number_or_text(first_value(sent, name)) for name in ("epsilon", "delta")}
    body = {
        "name": first_value(sent, "name"),
        "size": _number_or_text(first_value(sent, "size")),
        "budget": budget,
    }
    return body | ({"privacy_unit": unit} if unit else {})


def _number_or_text(text: str) -> float | str:
    """Return a text as a number; one that is not a number is returned for the API to refuse."""
    try:
        value = float(text)
    except ValueError:
        return text
    return int(value) if value.is_integer() else value


def _get_typed_texts(sent: Fields) -> dict[str, str]:
    """Return the form's texts as typed, so that the form shows them again."""
    return {name: first_value(sent, name) for name in sent}


_FIELD_PROBLEMS: Final = {
    "name": "Begin with a letter or digit; use letters, digits, dots, dashes and underscores.",
    "size": "Enter a whole number of records, at least 1.",
    "epsilon": "Enter a number above 0 and up to 1000.",
    "delta": "Enter a number from 1e-50 to below 1, such as 1e-5.",
    "privacy_unit": "Use at most 1000 characters.",
}


def _get_problem_sentences(error: ValidationError | NameTakenError) -> dict[str, str]:
    """Return a sentence for each field of the form that is not valid."""
    if isinstance(error, NameTakenError):
        return {"name": "A dataset of this name exists; choose another name."}
    pointers = [fault["pointer"] for fault in problems.of_error(error)["errors"]]
    names = [pointer.rpartition("/")[2] for pointer in pointers]
    return {name: _FIELD_PROBLEMS.get(name, "This value is not valid.") for name in names}


@router.get("/datasets/{name}")
async def dataset(
    request: Request,
    name: Name,
    session: TheSession,
    ledger: TheLedger,
    before: str = "",
    runs: str = "",
) -> Response:
    """Show a dataset: budget, runs, ε over time, and entries with the newest first."""
    found = await ledger.get_dataset(session.key, name)
    left = await ledger.count_steps_left(session.key, name, allow_slow=False)
    preview = await ledger.preview_budget(session.key, name) if left is None else BudgetPreview()
    budget = {
        "dataset": found,
        "shares": _compute_budget_shares(found),
        "reference": _describe_reference(found),
        **_describe_steps_left(left, is_complete=False),
        "admits": [(describe_step(each.step), each.steps) for each in preview.runs],
        "warnings": preview.warnings,
    }
    return await run_in_threadpool(_render_dataset_page, request, session, budget, before, runs)


@router.get("/datasets/{name}/report")
async def dataset_report(
    name: Name, session: TheSession, ledger: TheLedger, wanted: Wanted = Format.HTML
) -> Response:
    """Show the report of a dataset, or download it in another format."""
    return report_response(await ledger.report_on_dataset(session.key, name, wanted, 3), wanted)


@router.get("/datasets/{name}/steps-left")
async def steps_left(
    request: Request, name: Name, session: TheSession, ledger: TheLedger
) -> Response:
    """Return the part of a dataset's page that says how many more steps fit."""
    found = await ledger.get_dataset(session.key, name)
    left = await ledger.count_steps_left(session.key, name)
    context = {"dataset": found, **_describe_steps_left(left, is_complete=True)}
    return await run_in_threadpool(partial(render_page, request, "steps_left.html", **context))


def _render_dataset_page(
    request: Request, session: Session, budget: Json, before: str, runs: str
) -> Response:
    """Render the page of one dataset, with pages of its runs and entries."""
    found = budget["dataset"]
    ledger: Ledger = request.app.state.ledger
    name = found["name"]
    first_run = _parse_count(runs, 0)
    owner, shown = ledger.list_reservations(session.key, name, first_run, _RUNS + 1)
    views = [ledger_views.reservation_view(owner, run) for run in shown]
    return render_page(
        request,
        "dataset.html",
        **budget,
        runs=views[:_RUNS],
        runs_before=max(first_run - _RUNS, 0) if first_run else None,
        runs_after=first_run + _RUNS if len(shown) > _RUNS else None,
        points=ledger_views.burn_down_view(ledger.compute_burn_down(session.key, name, _POINTS)),
        **_read_entries_page(ledger, session, found, _parse_count(before, found["version"] + 1)),
    )


def _parse_count(text: str, default: int) -> int:
    """Parse a count from a URL; return a default if it is not valid."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else default


def _read_entries_page(ledger: Ledger, session: Session, dataset: Json, before: int) -> Json:
    """Return a page of ledger entries that precede an entry's number, newest first."""
    end = min(before, dataset["version"] + 1)
    start = max(end - 1 - _ENTRIES, 0)
    page = ledger.list_entries(session.key, dataset["name"], start)
    shown = [entry for entry in page.entries if entry["number"] < end][:_ENTRIES]
    newer = end + _ENTRIES if end <= dataset["version"] else None
    entries = [_describe_entry(entry) for entry in shown[::-1]]
    return {"entries": entries, "older": start + 1 if start else None, "newer": newer}


@router.get("/runs/{identifier}")
async def run(
    request: Request, identifier: Name, session: TheSession, ledger: TheLedger
) -> Response:
    """Show a run: its progress, and the guarantee of its plan alone."""
    found = await ledger.get_reservation(session.key, identifier)
    delta = (await ledger.get_dataset(session.key, found["dataset"]))["budget"]["delta"]
    claim = await answer_or_problem(
        request, "/v1/epsilon", await run_in_threadpool(_build_plan_request, found, delta)
    )
    return await run_in_threadpool(
        render_page, request, "run.html", run=found, delta=delta, claim=claim
    )


def _build_plan_request(run: Json, delta: float) -> UnreadBody:
    """Return the API request for the guarantee of a run's whole plan."""
    body = {
        "mechanism": run["mechanism"],
        "delta": delta,
        "neighbouring_relation": run["neighbouring_relation"],
    }
    return UnreadBody(to_json(body))


@router.get("/runs/{identifier}/report")
async def run_report(
    identifier: Name, session: TheSession, ledger: TheLedger, wanted: Wanted = Format.HTML
) -> Response:
    """Show the report of a run that has ended, or download it in another format."""
    return report_response(await ledger.report_on_run(session.key, identifier, wanted, 3), wanted)


@router.get("/runs/{identifier}/certificate")
async def certificate(identifier: Name, session: TheSession, ledger: TheLedger) -> Response:
    """Download the certificate of a run that has ended."""
    found = await ledger.issue_certificate(session.key, identifier)
    text = json.dumps(found, indent=2, ensure_ascii=False)
    headers = {
        **HEADERS,
        "Content-Disposition": f'attachment; filename="certificate-{identifier}.json"',
        "Cache-Control": "no-store",
    }
    return Response(text, 200, headers, media_type="application/json")
