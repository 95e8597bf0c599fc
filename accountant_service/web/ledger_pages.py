"""Who has spent what: datasets, one dataset, one run."""

from __future__ import annotations

import json
import uuid
from typing import Any, Final

from fastapi import APIRouter, Request
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response

from accountant_service.api import problems
from accountant_service.api.ledger_routes import Name
from accountant_service.api.ledger_schemas import DatasetRequest
from accountant_service.api.routes import StrictRoute
from accountant_service.api.schemas import Unread
from accountant_service.errors import NameTakenError
from accountant_service.ledger import service
from accountant_service.ledger.service import Ledger
from accountant_service.web.access import (
    Fields,
    FormHolder,
    SentFields,
    TheLedger,
    TheSession,
    first,
)
from accountant_service.web.calculator_page import ask
from accountant_service.web.rendering import HEADERS, page
from accountant_service.web.sessions import Session

Json = dict[str, Any]
_WARN_FROM: Final = 0.8  # of the budget
_ENTRIES: Final = 25
_RUNS: Final = 20
_POINTS: Final = 120  # of a burn-down
_SEE_OTHER: Final = 303
_ONCE_MAX: Final = 200

router = APIRouter(route_class=StrictRoute, include_in_schema=False)


def _shares(dataset: Json) -> Json:
    """What is spent and held of a budget, in hundredths, and whether to warn."""
    budget = dataset["budget"]["epsilon"]
    spent, held = (dataset[part]["epsilon"] / budget for part in ("spent", "held"))
    left = dataset["remaining"]["micronats"] / max(dataset["accounting"]["budget_micronats"], 1)
    return {
        "spent": 100 * spent,
        "held": 100 * held,
        "taken": 100 * (spent + held),
        "charges_left": 100 * left,
        "warn": spent + held >= _WARN_FROM,
    }


@router.get("/datasets")
async def datasets(request: Request, session: TheSession, ledger: TheLedger) -> Response:
    """Every dataset that the key may see, with its budget as a bar."""
    found = await ledger.datasets(session.key)
    return await run_in_threadpool(_datasets_page, request, found)


def _datasets_page(request: Request, found: list[Json], **context: Any) -> Response:
    blank: Json = {"texts": {}, "problems": {}, "status": 200}
    items = [(dataset, _shares(dataset)) for dataset in found]
    return page(
        request, "datasets.html", items=items, once=uuid.uuid4().hex, **{**blank, **context}
    )


@router.post("/datasets")
async def create_dataset(
    request: Request, holder: FormHolder, sent: SentFields, ledger: TheLedger
) -> Response:
    """Give a dataset a privacy budget, for good."""
    body = _dataset_body(sent)
    try:
        asked = DatasetRequest.model_validate(body)
        write = service.Request(holder, first(sent, "once")[:_ONCE_MAX], "POST /datasets", body)
        await ledger.create_dataset(
            write, asked.name, asked.size, asked.budget.epsilon, asked.budget.delta,
            asked.neighbouring_relation, asked.privacy_unit, None,
        )  # fmt: skip
    except (ValidationError, NameTakenError) as error:
        found = await ledger.datasets(holder)
        typed, faults = _typed(sent), _faults(error)
        return await run_in_threadpool(
            _datasets_page, request, found, texts=typed, problems=faults, status=422
        )
    return RedirectResponse(f"/datasets/{asked.name}", _SEE_OTHER)


def _dataset_body(sent: Fields) -> Json:
    unit = first(sent, "privacy_unit")
    budget = {name: _number(first(sent, name)) for name in ("epsilon", "delta")}
    body = {"name": first(sent, "name"), "size": _number(first(sent, "size")), "budget": budget}
    return body | ({"privacy_unit": unit} if unit else {})


def _number(text: str) -> float | str:
    """A number where it is one; else what the API will refuse."""
    try:
        value = float(text)
    except ValueError:
        return text
    return int(value) if value.is_integer() else value


def _typed(sent: Fields) -> dict[str, str]:
    return {name: first(sent, name) for name in sent}


_FIELD_PROBLEMS: Final = {
    "name": "A name begins with a letter or digit and has letters, digits, dots, dashes and "
    "underscores.",
    "size": "The number of records must be a whole number from 1.",
    "epsilon": "ε must be a number above 0 and up to 1000.",
    "delta": "δ must be a number from 1e-50 to below 1.",
    "privacy_unit": "What one record stands for has at most 1000 characters.",
}


def _faults(error: ValidationError | NameTakenError) -> dict[str, str]:
    if isinstance(error, NameTakenError):
        return {"name": "There is a dataset of this name; choose another."}
    pointers = [fault["pointer"] for fault in problems.of_error(error)["errors"]]
    names = [pointer.rpartition("/")[2] for pointer in pointers]
    return {name: _FIELD_PROBLEMS.get(name, "This cannot be understood.") for name in names}


@router.get("/datasets/{name}")
async def dataset(
    request: Request,
    name: Name,
    session: TheSession,
    ledger: TheLedger,
    before: str = "",
    runs: str = "",
) -> Response:
    """A dataset: its budget, its runs, ε over time, and the record, newest first."""
    found = await ledger.dataset(session.key, name)
    return await run_in_threadpool(_dataset_page, request, session, found, before, runs)


def _dataset_page(
    request: Request, session: Session, found: Json, before: str, runs: str
) -> Response:
    ledger: Ledger = request.app.state.ledger
    name = found["name"]
    first_run = _whole(runs, 0)
    shown = ledger.runs(session.key, name, first_run, _RUNS + 1)
    return page(
        request,
        "dataset.html",
        dataset=found,
        shares=_shares(found),
        runs=shown[:_RUNS],
        runs_before=max(first_run - _RUNS, 0) if first_run else None,
        runs_after=first_run + _RUNS if len(shown) > _RUNS else None,
        points=ledger.burn_down(session.key, name, _POINTS),
        **_entries(ledger, session, found, _whole(before, found["version"] + 1)),
    )


def _whole(text: str, otherwise: int) -> int:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else otherwise


def _entries(ledger: Ledger, session: Session, dataset: Json, before: int) -> Json:
    """A page of the record that ends before a number, newest first."""
    end = min(before, dataset["version"] + 1)
    start = max(end - 1 - _ENTRIES, 0)
    items = ledger.entries(session.key, dataset["name"], str(start))["items"]
    shown = [entry for entry in items if entry["number"] < end][:_ENTRIES]
    newer = end + _ENTRIES if end <= dataset["version"] else None
    return {"entries": shown[::-1], "older": start + 1 if start else None, "newer": newer}


@router.get("/runs/{identifier}")
async def run(
    request: Request, identifier: Name, session: TheSession, ledger: TheLedger
) -> Response:
    """A run: how far it is, and what its plan costs by itself."""
    found = await ledger.reservation(session.key, identifier)
    delta = (await ledger.dataset(session.key, found["dataset"]))["budget"]["delta"]
    claim = await ask(request, "/v1/epsilon", await run_in_threadpool(_of_plan, found, delta))
    return await run_in_threadpool(page, request, "run.html", run=found, delta=delta, claim=claim)


def _of_plan(run: Json, delta: float) -> Unread:
    """The question that asks for the guarantee of all steps reserved."""
    body = {
        "mechanism": run["mechanism"],
        "delta": delta,
        "neighbouring_relation": run["neighbouring_relation"],
    }
    return Unread(to_json(body))


@router.get("/runs/{identifier}/certificate")
async def certificate(identifier: Name, session: TheSession, ledger: TheLedger) -> Response:
    """The certificate of a run that has ended, as a file."""
    found = await ledger.certificate(session.key, identifier)
    text = json.dumps(found, indent=2, ensure_ascii=False)
    headers = {
        **HEADERS,
        "Content-Disposition": f'attachment; filename="certificate-{identifier}.json"',
        "Cache-Control": "no-store",
    }
    return Response(text, 200, headers, media_type="application/json")
