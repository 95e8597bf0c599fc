"""Pages about a plan: whether it fits a dataset's budget, and as the reference of that budget."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final
from urllib.parse import quote as quote_path
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response

from accountant_service import mechanisms
from accountant_service.api import ledger_views
from accountant_service.api.ledger_routes import Name
from accountant_service.api.ledger_schemas import QuoteRequest
from accountant_service.api.routes import StrictRoute
from accountant_service.errors import CodedError
from accountant_service.ledger.step_plan import StepPlan
from accountant_service.questions import problems
from accountant_service.web import run_form
from accountant_service.web.rendering import list_parameter_faults, render_page
from accountant_service.web.run_form import RunForm
from accountant_service.web.session_checks import (
    FormKey,
    SentFields,
    TheLedger,
    TheSession,
    first_value,
    write_request,
)

Json = dict[str, Any]
_SEE_OTHER: Final = 303
_REFUSALS: Final = (409, 422)  # the plan cannot be charged, whatever is left

router = APIRouter(route_class=StrictRoute, include_in_schema=False)


@router.get("/datasets/{name}/quote")
async def show_quote(
    request: Request, name: Name, session: TheSession, ledger: TheLedger
) -> Response:
    """Quote the run in the URL on a dataset. Nothing is charged."""
    dataset = await ledger.get_dataset(session.key, name)
    query = _fill_sizes(request.query_params, dataset["size"])
    sent = run_form.read_run(query)
    if not request.query_params:
        sent = replace(sent, filled=())  # an address without a run has nothing to complete
    known = [*run_form.list_parameters([sent]), "choose"]
    faults = [*list_parameter_faults(request.query_params, known), *sent.faults]
    if "choose" in request.query_params and not faults:
        chosen = run_form.choose_kinds(sent, request.query_params)
        return RedirectResponse(_link(name, "quote", chosen), _SEE_OTHER)
    run, mechanism = _check_with_api(sent)
    is_ready = not (run.problems or faults)
    answer = await _request_quote(session, ledger, name, mechanism) if is_ready else None
    find = request.app.state.ledger.find_dataset
    owned = await run_in_threadpool(find, session.key, name) if session.is_owner else None
    context: Json = {
        "dataset": dataset,
        "may_choose": owned is not None
        and owned.closed_at is None
        and owned.policy.allows_owner_reference(owned.balance.taken),
        "reference_link": _link(name, "reference", run.texts),
        "run": run,
        "faults": faults,
        "filled": run.filled,
        "answer": answer,
        "with_values": lambda **changes: _link(name, "quote", {**run.texts, **changes}),
    }
    return await run_in_threadpool(
        render_page,
        request,
        "quote.html",
        parameters=list(request.query_params),  # the unknown ones are faults
        **context,
    )


@router.get("/datasets/{name}/reference")
async def ask_for_reference(
    request: Request, name: Name, session: TheSession, ledger: TheLedger
) -> Response:
    """Ask whether the run in the URL is to be the reference, and show what would fit then.

    What is wrong with the run shows on the quote page.
    """
    dataset = await ledger.get_dataset(session.key, name)
    sent = run_form.read_run(_fill_sizes(request.query_params, dataset["size"]))
    run, mechanism = _check_with_api(sent)
    unknown = set(request.query_params) - {*run_form.list_parameters([sent])}
    if run.problems or sent.faults or unknown:
        return RedirectResponse(_link(name, "quote", run.texts), _SEE_OTHER)
    runs, problem = [], None
    try:
        choice = await ledger.quote_reference(session.key, name, mechanism)
        pairs = zip(choice.before.runs, choice.after.runs, strict=True)
        runs = [(now.step.describe_step(), now.steps, then.steps) for now, then in pairs]
    except CodedError as error:
        if error.status not in _REFUSALS:
            raise
        problem = problems.of_error(error)
    return await run_in_threadpool(
        render_page,
        request,
        "choose_reference.html",
        parameters=list(request.query_params),
        dataset=dataset,
        runs=runs,
        problem=problem,
        step=StepPlan.of(mechanism).step_mechanism.describe_step(),
        mechanism=json.dumps(mechanisms.to_json(mechanism)),
        quote_link=_link(name, "quote", run.texts),
        once=uuid.uuid4().hex,
    )


@router.post("/datasets/{name}/reference")
async def set_reference(
    name: Name, holder: FormKey, sent: SentFields, ledger: TheLedger
) -> Response:
    """Set the reference; if that is refused, go to the page that tells why."""
    text = first_value(sent, "mechanism")
    texts = {"kind": "json", run_form.MECHANISM: text}
    run, mechanism = _check_with_api(run_form.read_run(texts))
    if run.problems:
        return RedirectResponse(_link(name, "quote", run.texts), _SEE_OTHER)
    try:
        body = {"mechanism": mechanisms.to_json(mechanism)}
        write = write_request(holder, sent, f"POST /datasets/{name}/reference", body)
        await ledger.set_reference(write, name, mechanism)
    except CodedError as error:
        if error.status not in _REFUSALS:
            raise
        back = f"/datasets/{quote_path(name)}/reference?{urlencode(texts)}"
        return RedirectResponse(back, _SEE_OTHER)
    return RedirectResponse(f"/datasets/{quote_path(name)}", _SEE_OTHER)


def _fill_sizes(query: Mapping[str, str], size: int) -> Mapping[str, str]:
    """Return a run's fields with the dataset's size where they do not say it.

    Where they say nothing of batches, and have no other kind of mechanism, a batch has a hundredth
    of it.
    """
    said = {"batches", "dataset_size", "batch_size", "sample_rate", "kind", run_form.MECHANISM}
    known = {"dataset_size": str(size)}
    if "batch_size" in query:
        return known | {**query}
    if said & query.keys() or any(run_form.is_generated(name) for name in query):
        return query
    return {**query, **known, "batch_size": str(max(1, size // 100))}


def _check_with_api(run: RunForm) -> tuple[RunForm, Any]:
    """Return the run with the errors that the API's models find, and its mechanism."""
    try:
        return run, QuoteRequest.model_validate({"mechanism": run.mechanism}).mechanism
    except ValidationError as error:
        found: dict[str, str] = {}
        for fault in problems.of_error(error)["errors"]:
            names = fault["pointer"].strip("/").split("/")[1:]
            found.setdefault(*run.place_problem(names, fault["message"]))
        readable = {name: text for name, text in found.items() if name in run.values}
        return replace(run, problems={**readable, **run.problems} if run.problems else found), None


async def _request_quote(session: Any, ledger: Any, name: str, mechanism: Any) -> Json:
    """Return the quote of a mechanism, or the error answer if its cost is unknown."""
    try:
        return ledger_views.quote_view(await ledger.quote(session.key, name, mechanism))
    except CodedError as error:
        if error.status not in _REFUSALS:
            raise
        return problems.of_error(error)


def _link(name: str, page: str, texts: Mapping[str, str]) -> str:
    """Return the address of a dataset's page, with a run's form fields as the query."""
    return f"/datasets/{quote_path(name)}/{page}?{urlencode(run_form.write_runs([texts]))}"
