"""Pages of the ledger: all datasets, one dataset, series of datasets, one run."""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Request
from pydantic_core import to_json
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response

from accountant_service import mechanisms
from accountant_service.api import ledger_views
from accountant_service.api.ledger_routes import (
    DatasetCursor,
    Name,
    SeriesName,
    Wanted,
    report_response,
)
from accountant_service.api.ledger_schemas import DATASETS_MAX, NAME_PATTERN
from accountant_service.api.routes import StrictRoute
from accountant_service.disclosure.formats import Format
from accountant_service.ledger.api_keys import Scope, may_control, require_unbound
from accountant_service.ledger.errors import UnknownSubjectError
from accountant_service.ledger.filters.base import subtract
from accountant_service.ledger.plans import BudgetPreview, StepsLeft
from accountant_service.ledger.repository import now
from accountant_service.ledger.rules import Cap, Dataset, HolderKind, Reservation
from accountant_service.ledger.service import Ledger, RunOrigin
from accountant_service.questions.models import UnreadBody
from accountant_service.web import run_form
from accountant_service.web.calculator_page import answer_or_problem
from accountant_service.web.choices import Choice
from accountant_service.web.rendering import HEADERS, render_page
from accountant_service.web.session_checks import (
    FormKey,
    SentFields,
    TheLedger,
    TheSession,
    first_value,
    write_request,
)
from accountant_service.web.sessions import Session

Json = dict[str, Any]
_WARN_FROM: Final = 0.8  # share of the budget taken
_ALARM_FROM: Final = 0.95
_ENTRIES: Final = 25
_RUNS: Final = 20
_WINDOW: Final = 12  # datasets of a series
_POINTS: Final = 120  # of the plot of ε over time
_KEYS_OFFERED: Final = 500  # in the list of whom a cap may limit
_PAGES_MAX: Final = 5  # of the API's list that one page of datasets searches and sorts
_SEE_OTHER: Final = 303
SORT: Final = Choice(
    "Order", {"name": "by name", "left": "least left first", "budget": "largest ε first"}
)
_ORDERS: Final[Mapping[str, Callable[[Json], Any]]] = {
    "name": lambda dataset: dataset["name"],
    "left": lambda dataset: (dataset["state"] == "closed", dataset["remaining"]["share"]),
    "budget": lambda dataset: -dataset["budget"]["epsilon"],
}

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
    if "side_amounts" in entry:  # those of the first side
        entry = entry | entry["side_amounts"][0]
    shown: Json = {}
    for part in ("spent", "held"):
        amount = entry.get(f"{part}_reference_steps", entry.get(f"{part}_micronats", []))
        shown[part] = amount if isinstance(amount, list) else [amount]
        shown[f"{part}_added"] = entry.get(f"{part}_epsilon", "0")
    return entry | shown


@router.get("/datasets")
async def datasets(
    request: Request,
    session: TheSession,
    ledger: TheLedger,
    after: DatasetCursor = "",
    find: str = "",
    sort: str = "",
) -> Response:
    """Show the datasets that the key may see, with their budgets: searched, sorted and counted."""
    sort, find = SORT.read(sort), find.strip()
    pages = _PAGES_MAX if find or sort != SORT.initial else 1
    found, following = await _read_datasets(ledger, session, after, pages)
    shown = [each for each in found if find.lower() in each["name"].lower()]
    items = [
        (dataset, _compute_budget_shares(dataset)) for dataset in sorted(shown, key=_ORDERS[sort])
    ]
    totals = {
        "all": len(shown),
        "records": sum(dataset["size"] for dataset in shown),
        "closed": sum(dataset["state"] == "closed" for dataset in shown),
        "low": sum(shares["warn"] for dataset, shares in items if dataset["state"] == "open"),
    }
    context: Json = {
        "items": items,
        "totals": totals,
        "any": bool(found),
        "after": after,
        "following": following,
        "find": find,
        "sort": sort,
        "sort_choice": SORT,
        "asked": urlencode({"find": find, "sort": sort}) if pages > 1 else "",
    }
    parameters = ("after", "find", "sort")
    return await run_in_threadpool(
        partial(render_page, request, "datasets.html", parameters=parameters, **context)
    )


async def _read_datasets(
    ledger: TheLedger, session: Session, after: str, pages: int
) -> tuple[list[Json], str | None]:
    """Return the datasets after a name on some pages of the API, and the cursor of the next one."""
    found: list[Json] = []
    cursor: str | None = after
    for _ in range(pages):
        page = await ledger.list_datasets(session.key, cursor or "")
        found += page["items"]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    return found, cursor


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
    return await _show_dataset(request, session, ledger, name, before, runs)


async def _show_dataset(
    request: Request,
    session: Session,
    ledger: TheLedger,
    name: str,
    before: str = "",
    runs: str = "",
    cap: Json | None = None,
) -> Response:
    """Show a dataset's page; `cap` has the texts and the problem of a cap that was refused."""
    found = await ledger.get_dataset(session.key, name)
    left, preview = await _measure_what_fits(session, ledger, found)
    caps = (await ledger.list_caps(session.key, name))["items"]
    budget = {
        "caps": caps,
        "cap": cap or {},
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
    report = await ledger.report_on_dataset(session.key, name, wanted, 3)
    return _respond_with_report(report, wanted, f"/datasets/{quote(name)}", name)


def _respond_with_report(report: bytes, wanted: Format, back: str, title: str) -> Response:
    """Answer with a report; one that a browser shows leads back to the page it came from."""
    if wanted is Format.HTML:
        link = f'<nav class="back" aria-label="Back"><a href="{back}">Back to {title}</a></nav>'
        report = report.replace(b"<main>", link.encode() + b"<main>", 1)
    return report_response(report, wanted)


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
    origins = ledger.read_run_origins(owner, shown)
    views = [
        ledger_views.reservation_view(owner, run)
        | _describe_origin(session, owner, run, origins[run.identifier])
        for run in shown
    ]
    keys = request.app.state.keys.list_keys(limit=_KEYS_OFFERED) if session.is_admin else []
    return render_page(
        request,
        "dataset.html",
        422 if budget["cap"] else 200,
        key_names={key.identifier: key.name for key in keys},
        teams=sorted({key.team for key in keys if key.team}),
        valid_keys=[key for key in keys if key.revoked_at is None],
        parameters=("before", "runs"),
        **budget,
        paged=bool(before),
        quote_link=_quote_link(name, views),
        may_choose_reference=owner.policy.allows_owner_reference(owner.balance.taken),
        reference_link=_reference_link(owner),
        runs=views,
        has_runs_before=after is not None,
        runs_after=ledger_views.write_run_cursor(following),
        points=ledger_views.burn_down_view(ledger.compute_burn_down(session.key, name, _POINTS)),
        **_read_entries_page(ledger, session, found, _parse_count(before, found["version"] + 1)),
    )


def _describe_origin(
    session: Session, dataset: Dataset, run: Reservation, origin: RunOrigin
) -> Json:
    """Return who reserved a run, when, how long it ran, and an upper bound on its ε so far."""
    end = origin.ended_at or min(now(), run.expires_at)
    spent = subtract(run.taken, run.held) if run.ended_entry is None else run.taken
    epsilon = min(dataset.policy.epsilon_of(spent), dataset.policy.epsilon)
    began = origin.reserved_at
    return {
        "holder": _name_holder(session, run, origin),
        "reserved_at": None if began is None else began / 1e6,
        "seconds": None if began is None else max(end - began, 0) / 1e6,
        "epsilon": epsilon,
    }


def _name_holder(session: Session, run: Reservation, origin: RunOrigin) -> str:
    """Name who reserved a run: only owners see the names of other keys."""
    if session.is_owner:
        name = (origin.holder.name if origin.holder else "") or run.key
        return f"{name}, team {run.team}" if run.team else name
    if run.key == session.key.identifier:
        return "this key"
    return f"team {run.team}" if run.team and run.team == session.key.team else "another key"


def _quote_link(name: str, runs: list[Json]) -> str:
    """Return the quote page's address for a run like the dataset's last one."""
    like = urlencode(run_form.write_mechanism(runs[0]["mechanism"])) if runs else ""
    return f"/datasets/{quote(name)}/quote" + (f"?{like}" if like else "")


def _reference_link(dataset: Dataset) -> str:
    """Return the address of the page that chooses a reference: that of a run, if there is one."""
    part = dataset.policy.reference_part
    reference = None if part is None else part.reference
    page = f"/datasets/{quote(dataset.name)}/reference"
    if reference is None:
        return page
    return f"{page}?{urlencode(run_form.write_mechanism(mechanisms.to_json(reference)))}"


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
    origin = await run_in_threadpool(_read_origin, request.app.state.ledger, session, identifier)
    return await run_in_threadpool(
        partial(
            render_page,
            request,
            "run.html",
            run=found | origin,
            charges=found.get("charges") or {found["dataset"]: found["charge"]},
            delta=delta,
            claim=claim,
        )
    )


def _read_origin(ledger: Ledger, session: Session, identifier: str) -> Json:
    """Return who reserved a run and when, its ε so far, and whether this session may end it."""
    dataset, run = ledger.find_run(session.key, identifier)[0]
    origin = ledger.read_run_origins(dataset, [run])[run.identifier]
    shown = _describe_origin(session, dataset, run, origin)
    return shown | {"may_end": may_control(session.key, run)}


def _build_plan_request(run: Json, delta: float) -> UnreadBody:
    """Build the API request for the ε of a run with all its planned steps."""
    body = {
        "mechanism": run["mechanism"],
        "delta": delta,
        "neighbouring_relation": run["neighbouring_relation"],
    }
    return UnreadBody(to_json(body))


@router.get("/datasets/{name}/close")
async def ask_to_close(
    request: Request, name: Name, session: TheSession, ledger: TheLedger
) -> Response:
    """Ask whether to close a dataset, and show the consequences."""
    require_unbound(session.key, Scope.OWNER)
    found = await ledger.get_dataset(session.key, name)
    return await run_in_threadpool(
        partial(render_page, request, "close_dataset.html", dataset=found, once=uuid.uuid4().hex)
    )


@router.post("/datasets/{name}/close")
async def close_dataset(
    name: Name, holder: FormKey, sent: SentFields, ledger: TheLedger
) -> Response:
    """Close a dataset for good."""
    await ledger.close_dataset(
        write_request(holder, sent, f"POST /datasets/{name}/close", {}), name
    )
    return RedirectResponse(f"/datasets/{quote(name)}", _SEE_OTHER)


@router.post("/datasets/{name}/caps")
async def change_cap(
    request: Request,
    name: Name,
    session: TheSession,
    holder: FormKey,
    sent: SentFields,
    ledger: TheLedger,
) -> Response:
    """Set the cap of a key or team, or remove it if the form says so."""
    limited = first_value(sent, "holder")
    kind = HolderKind.TEAM if first_value(sent, "kind") == "team" else HolderKind.KEY
    back = RedirectResponse(f"/datasets/{quote(name)}#caps", _SEE_OTHER)
    if "remove" in sent:
        await ledger.remove_cap(holder, name, kind, limited)
        return back
    text = first_value(sent, "percent")
    problems = _find_cap_problems(limited, text)
    if not problems:
        try:
            await ledger.set_cap(holder, name, Cap(kind, limited, float(text) / 100))
            return back
        except UnknownSubjectError as error:
            problems = {"holder": f"{error.detail[:1].upper()}{error.detail[1:]}."}
    typed = {"kind": kind.value, "holder": limited, "percent": text, "problems": problems}
    return await _show_dataset(request, session, ledger, name, cap=typed)


def _find_cap_problems(holder: str, percent: str) -> dict[str, str]:
    """Return a sentence about each field of a cap's form that is wrong."""
    found = {}
    if not re.fullmatch(NAME_PATTERN, holder):
        found["holder"] = "Enter the identifier of a key, or the name of a team."
    try:
        is_share = 0 <= float(percent) <= 100
    except ValueError:
        is_share = False
    if not is_share:
        found["percent"] = "Enter a number from 0 to 100."
    return found


@router.get("/runs/{identifier}/release")
async def ask_to_release(
    request: Request, identifier: Name, session: TheSession, ledger: TheLedger
) -> Response:
    """Ask whether to release a run, and show the consequences."""
    found = await ledger.get_reservation(session.key, identifier)
    return await run_in_threadpool(
        partial(render_page, request, "release_run.html", run=found, once=uuid.uuid4().hex)
    )


@router.post("/runs/{identifier}/release")
async def release_run(
    identifier: Name, holder: FormKey, sent: SentFields, ledger: TheLedger
) -> Response:
    """End a run; what it has not used returns to the budget."""
    write = write_request(holder, sent, f"POST /runs/{identifier}/release", {})
    await ledger.release(write, identifier)
    return RedirectResponse(f"/runs/{identifier}", _SEE_OTHER)


@router.get("/runs/{identifier}/report")
async def run_report(
    identifier: Name, session: TheSession, ledger: TheLedger, wanted: Wanted = Format.HTML
) -> Response:
    """Show the report of a run that has ended, or download it in another format."""
    report = await ledger.report_on_run(session.key, identifier, wanted, 3)
    return _respond_with_report(report, wanted, f"/runs/{identifier}", f"run {identifier[:8]}")


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
