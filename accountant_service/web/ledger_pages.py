"""Pages of the ledger: all datasets, one dataset, series of datasets, one run."""

from __future__ import annotations

import json
import math
import re
from functools import partial
from typing import Any, Final
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Request
from pydantic_core import to_json
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from accountant_service import mechanisms
from accountant_service.api import ledger_views
from accountant_service.api.ledger_routes import (
    DatasetCursor,
    Name,
    SeriesName,
    Wanted,
    report_response,
)
from accountant_service.api.ledger_schemas import DATASETS_MAX
from accountant_service.api.routes import StrictRoute
from accountant_service.api.schemas import UnreadBody
from accountant_service.disclosure.formats import Format
from accountant_service.ledger.plans import BudgetPreview, StepsLeft
from accountant_service.ledger.service import Ledger
from accountant_service.web import run_form
from accountant_service.web.calculator_page import answer_or_problem
from accountant_service.web.rendering import HEADERS, render_page
from accountant_service.web.session_checks import TheLedger, TheSession
from accountant_service.web.sessions import Session

Json = dict[str, Any]
_WARN_FROM: Final = 0.8  # share of the budget taken
_ALARM_FROM: Final = 0.95
_ENTRIES: Final = 25
_RUNS: Final = 20
_WINDOW: Final = 12  # datasets of a series
_POINTS: Final = 120  # of the plot of ε over time

router = APIRouter(route_class=StrictRoute, include_in_schema=False)


def _compute_budget_shares(dataset: Json) -> Json:
    """Return a budget's percentages: spent, spent or reserved, remaining; and whether to warn."""
    spent, taken = dataset["spent"]["share"], 1 - dataset["remaining"]["share"]
    return {
        "spent": 100 * spent,
        "taken": 100 * taken,
        "left": math.floor(100 * dataset["remaining"]["share"]),
        "warn": taken >= _WARN_FROM,
        "alarm": taken >= _ALARM_FROM,
    }


def _describe_reference(dataset: Json) -> str | None:
    """Describe in words a budget's reference mechanism; None if it has none."""
    reference = dataset["accounting"].get("reference")
    return None if reference is None else mechanisms.from_json(reference).describe_step()


def _describe_steps_left(left: StepsLeft | None, *, is_complete: bool) -> Json:
    """Return template variables that say how many more steps and runs fit the budget.

    Args:
        left: the steps that fit; None before the first run.
        is_complete: whether all was computed; otherwise the browser asks again.
    """
    if left is None:
        return {"left": None, "is_complete": is_complete}
    steps = left.run_steps
    return {
        "left": left,
        "left_step": left.step.describe_step(),
        "run_steps": steps,
        "runs_left": None if left.steps is None or not steps else left.steps // steps,
        "is_complete": is_complete,
    }


def _describe_entry(entry: Json) -> Json:
    """Return a ledger entry with its spent and held amounts as lists, for display."""
    shown: Json = {}
    for part in ("spent", "held"):
        amount = entry.get(f"{part}_reference_steps", entry.get(f"{part}_micronats", []))
        shown[part] = amount if isinstance(amount, list) else [amount]
        shown[f"{part}_added"] = entry.get(f"{part}_epsilon", "0")
    return entry | shown


@router.get("/datasets")
async def datasets(
    request: Request, session: TheSession, ledger: TheLedger, after: DatasetCursor = ""
) -> Response:
    """Show a page of the datasets that the key may see, with their budgets."""
    found = await ledger.list_datasets(session.key, after)
    items = [
        (dataset, _compute_budget_shares(dataset), _describe_reference(dataset))
        for dataset in found["items"]
    ]
    context = {"items": items, "after": after, "following": found["next_cursor"]}
    return await run_in_threadpool(
        partial(render_page, request, "datasets.html", parameters=("after",), **context)
    )


@router.get("/series")
async def series_list(
    request: Request, session: TheSession, ledger: TheLedger, after: DatasetCursor = ""
) -> Response:
    """Show a page of the series that the key may see."""
    found = await ledger.list_series(session.key, after)
    context = {"items": found["items"], "after": after, "following": found["next_cursor"]}
    return await run_in_threadpool(
        partial(render_page, request, "series_list.html", parameters=("after",), **context)
    )


@router.get("/series/{name}")
async def series(
    request: Request, name: SeriesName, session: TheSession, ledger: TheLedger, last: str = ""
) -> Response:
    """Show a series: its template, its last datasets, and what they prove together."""
    found = await ledger.get_series(session.key, name)
    wanted = int(last) if re.fullmatch(r"[1-9]\d?", last) else _WINDOW
    count = min(wanted, DATASETS_MAX, found["dataset_count"])
    window = await ledger.find_window(session.key, name, count) if count else None
    context = {"series": found, "window": window, "count": count}
    return await run_in_threadpool(
        partial(render_page, request, "series.html", parameters=("last",), **context)
    )


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
    left, preview = await _measure_what_fits(session, ledger, found)
    budget = {
        "dataset": found,
        "shares": _compute_budget_shares(found),
        "reference": _describe_reference(found),
        **_describe_steps_left(left, is_complete=False),
        "admits": [(each.step.describe_step(), each.steps) for each in preview.runs],
        "warnings": preview.warnings,
    }
    return await run_in_threadpool(_render_dataset_page, request, session, budget, before, runs)


async def _measure_what_fits(
    session: Session, ledger: TheLedger, dataset: Json
) -> tuple[StepsLeft | None, BudgetPreview]:
    """Return how many more steps fit or, before the first run, the steps of example runs."""
    if dataset["state"] == "closed":
        return None, BudgetPreview()
    left = await ledger.count_steps_left(session.key, dataset["name"], allow_slow=False)
    if left is not None:
        return left, BudgetPreview()
    return None, await ledger.preview_budget(session.key, dataset["name"])


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
    described = _describe_steps_left(left, is_complete=True)
    context = {"dataset": found, **described}
    return await run_in_threadpool(partial(render_page, request, "steps_left.html", **context))


def _render_dataset_page(
    request: Request, session: Session, budget: Json, before: str, runs: str
) -> Response:
    """Render the page of one dataset, with pages of its runs and entries."""
    found = budget["dataset"]
    ledger: Ledger = request.app.state.ledger
    name = found["name"]
    after = ledger_views.parse_run_cursor(
        runs if re.fullmatch(ledger_views.RUN_CURSOR, runs) else ""
    )
    owner, shown, following = ledger.list_reservations(session.key, name, after, _RUNS)
    views = [ledger_views.reservation_view(owner, run) for run in shown]
    return render_page(
        request,
        "dataset.html",
        parameters=("before", "runs"),
        **budget,
        quote_link=_quote_link(name, views),
        runs=views,
        has_runs_before=after is not None,
        runs_after=ledger_views.write_run_cursor(following),
        points=ledger_views.burn_down_view(ledger.compute_burn_down(session.key, name, _POINTS)),
        **_read_entries_page(ledger, session, found, _parse_count(before, found["version"] + 1)),
    )


def _quote_link(name: str, runs: list[Json]) -> str:
    """Return the quote page's address for a run like the dataset's last one."""
    like = urlencode(run_form.write_mechanism(runs[0]["mechanism"])) if runs else ""
    return f"/datasets/{quote(name)}/quote" + (f"?{like}" if like else "")


def _parse_count(text: str, default: int) -> int:
    """Parse a count in a URL; return the default if it is not valid."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else default


def _read_entries_page(ledger: Ledger, session: Session, dataset: Json, before: int) -> Json:
    """Return a page of the ledger entries with numbers below `before`, newest first."""
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
    names = found.get("datasets") or [found["dataset"]]
    budgets = [(await ledger.get_dataset(session.key, name))["budget"] for name in names]
    delta = min(budget["delta"] for budget in budgets)
    claim = await answer_or_problem(
        request, "/v1/epsilon", await run_in_threadpool(_build_plan_request, found, delta)
    )
    return await run_in_threadpool(
        partial(
            render_page,
            request,
            "run.html",
            run=found,
            charges=found.get("charges") or {found["dataset"]: found["charge"]},
            delta=delta,
            claim=claim,
        )
    )


def _build_plan_request(run: Json, delta: float) -> UnreadBody:
    """Build the API request for the ε of a run with all its planned steps."""
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
