"""The page of a quote: whether a plan fits a dataset's budget, and what would fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final
from urllib.parse import quote as quote_path
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response

from accountant_service.api import ledger_views
from accountant_service.api.ledger_routes import Name
from accountant_service.api.ledger_schemas import QuoteRequest
from accountant_service.api.routes import StrictRoute
from accountant_service.errors import CodedError
from accountant_service.questions import problems
from accountant_service.web import run_form
from accountant_service.web.rendering import list_parameter_faults, render_page
from accountant_service.web.run_form import RunForm
from accountant_service.web.session_checks import TheLedger, TheSession

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
        return RedirectResponse(_link_to_quote(name, chosen), _SEE_OTHER)
    run, mechanism = _check_with_api(sent)
    is_ready = not (run.problems or faults)
    answer = await _request_quote(session, ledger, name, mechanism) if is_ready else None
    context: Json = {
        "dataset": dataset,
        "run": run,
        "faults": faults,
        "filled": run.filled,
        "answer": answer,
        "with_values": lambda **changes: _link_to_quote(name, {**run.texts, **changes}),
    }
    return await run_in_threadpool(
        render_page,
        request,
        "quote.html",
        parameters=list(request.query_params),  # the unknown ones are faults
        **context,
    )


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


def _link_to_quote(name: str, texts: Mapping[str, str]) -> str:
    """Return the address of the quote page, with a run's form fields as the query."""
    return f"/datasets/{quote_path(name)}/quote?{urlencode(run_form.write_runs([texts]))}"
