"""Who has spent what: datasets, one dataset, one run."""

from __future__ import annotations

import json
import uuid
from typing import Any, Final

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response

from accountant_service.api import problems
from accountant_service.api.answering import CALLS
from accountant_service.api.ledger_routes import Name, ledger_of
from accountant_service.api.ledger_schemas import DatasetRequest
from accountant_service.api.problems import Problem
from accountant_service.api.routes import StrictRoute
from accountant_service.errors import AccountingError, NameTakenError
from accountant_service.ledger import service
from accountant_service.web.access import (
    Fields,
    FormHolder,
    SentFields,
    TheLedger,
    TheSession,
    first,
)
from accountant_service.web.rendering import HEADERS, page

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
def datasets(request: Request, session: TheSession, ledger: TheLedger) -> Response:
    """Every dataset that the key may see, with its budget as a bar."""
    return _datasets_page(request, ledger.datasets(session.key))


def _datasets_page(request: Request, found: list[Json], **context: Any) -> Response:
    blank: Json = {"texts": {}, "problems": {}, "status": 200}
    items = [(dataset, _shares(dataset)) for dataset in found]
    return page(
        request, "datasets.html", items=items, once=uuid.uuid4().hex, **{**blank, **context}
    )


@router.post("/datasets")
def create_dataset(
    request: Request, holder: FormHolder, sent: SentFields, ledger: TheLedger
) -> Response:
    """Give a dataset a privacy budget, for good."""
    body = _dataset_body(sent)
    try:
        asked = DatasetRequest.model_validate(body)
        write = service.Request(holder, first(sent, "once")[:_ONCE_MAX], "POST /datasets", body)
        ledger.create_dataset(
            write, asked.name, asked.size, asked.budget.epsilon, asked.budget.delta,
            asked.neighbouring_relation, asked.privacy_unit, None,
        )  # fmt: skip
    except (ValidationError, NameTakenError) as error:
        return _datasets_page(
            request, ledger.datasets(holder), texts=_typed(sent), problems=_faults(error),
            status=422,
        )  # fmt: skip
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
def dataset(
    request: Request,
    name: Name,
    session: TheSession,
    ledger: TheLedger,
    before: str = "",
    runs: str = "",
) -> Response:
    """A dataset: its budget, its runs, ε over time, and the record, newest first."""
    found = ledger.dataset(session.key, name)
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


def _entries(ledger: TheLedger, session: TheSession, dataset: Json, before: int) -> Json:
    """A page of the record that ends before a number, newest first."""
    end = min(before, dataset["version"] + 1)
    start = max(end - 1 - _ENTRIES, 0)
    items = ledger.entries(session.key, dataset["name"], str(start))["items"]
    shown = [entry for entry in items if entry["number"] < end][:_ENTRIES]
    newer = end + _ENTRIES if end <= dataset["version"] else None
    return {"entries": shown[::-1], "older": start + 1 if start else None, "newer": newer}


@router.get("/runs/{identifier}")
async def run(request: Request, identifier: Name, session: TheSession) -> Response:
    """A run: how far it is, and what its plan costs by itself."""
    found = await run_in_threadpool(ledger_of(request).reservation, session.key, identifier)
    holder = await run_in_threadpool(ledger_of(request).dataset, session.key, found["dataset"])
    guarantee = await _of_plan(request, found, holder["budget"]["delta"])
    return page(request, "run.html", run=found, delta=holder["budget"]["delta"], claim=guarantee)


async def _of_plan(request: Request, run: Json, delta: float) -> Json:
    """The guarantee of all steps reserved, or the problem of finding it."""
    body = {
        "mechanism": run["mechanism"],
        "delta": delta,
        "neighbouring_relation": run["neighbouring_relation"],
    }
    try:
        ask = CALLS["/v1/epsilon"].request.model_validate(body)
        answer: Json = json.loads(await request.app.state.answerer.answer("/v1/epsilon", ask))
        return answer
    except (ValidationError, AccountingError, Problem) as error:
        return problems.of_error(error)


@router.get("/runs/{identifier}/certificate")
def certificate(identifier: Name, session: TheSession, ledger: TheLedger) -> Response:
    """The certificate of a run that has ended, as a file."""
    text = json.dumps(ledger.certificate(session.key, identifier), indent=2, ensure_ascii=False)
    headers = {
        **HEADERS,
        "Content-Disposition": f'attachment; filename="certificate-{identifier}.json"',
        "Cache-Control": "no-store",
    }
    return Response(text, 200, headers, media_type="application/json")
