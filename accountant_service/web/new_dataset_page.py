"""The pages that create a dataset with its privacy budget, and delete one that was never used."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, Final

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response

from accountant_service.accounting.guarantee import count_exposed_records, list_weaknesses
from accountant_service.api.ledger_routes import Name
from accountant_service.api.ledger_schemas import DatasetRequest
from accountant_service.api.routes import StrictRoute
from accountant_service.disclosure.attack_rates import bound_attacks_by_epsilon, count_per_thousand
from accountant_service.errors import CodedError
from accountant_service.ledger.api_keys import Scope, require_unbound
from accountant_service.ledger.errors import NameTakenError, WeakGuaranteeError
from accountant_service.ledger.filter_names import FILTERS
from accountant_service.questions import problems
from accountant_service.web import run_form
from accountant_service.web.choices import RELATION, Choice
from accountant_service.web.rendering import render_page
from accountant_service.web.run_form import RunForm
from accountant_service.web.session_checks import (
    Fields,
    FormKey,
    SentFields,
    TheLedger,
    TheSession,
    first_value,
    write_request,
)
from accountant_service.writing.number_format import is_exact

Json = dict[str, Any]
PLANNED: Final = Choice(
    "Counted in steps of", {"first": "the first run", "planned": "a run that I plan"}
)
FILTER: Final = Choice("Privacy filter", FILTERS)
CHOICES: Final[Mapping[str, Choice]] = {
    "neighbouring_relation": RELATION,
    "planned": PLANNED,
    "filter": FILTER,
}
_SEE_OTHER: Final = 303
_NUMBERS: Final = ("size", "epsilon", "delta")
_FALSE_POSITIVE_RATE: Final = 0.01  # of the attack in the explanation of a budget

router = APIRouter(route_class=StrictRoute, include_in_schema=False)


@router.get("/new-dataset")
def show_new_dataset(request: Request, session: TheSession) -> Response:
    """Show the form for a new dataset; the URL may fill in the numbers of its budget."""
    require_unbound(session.key, Scope.OWNER)
    query = request.query_params
    given = {name: [query[name]] for name in _NUMBERS if name in query}
    return _render_new_dataset_page(request, given)


def _render_new_dataset_page(
    request: Request, sent: Fields, faults: Mapping[str, str] | None = None, status: int = 200
) -> Response:
    """Render the form for a new dataset, with the texts that were sent."""
    texts = {name: first_value(sent, name) for name in sent}
    meaning = _explain_budget(sent)
    weak = {} if meaning is None or "accept_weak" in sent else meaning["weaknesses"]
    return render_page(
        request,
        "new_dataset.html",
        status,
        parameters=_NUMBERS,
        meaning=meaning,
        texts=texts | {name: choice.read(texts.get(name)) for name, choice in CHOICES.items()},
        choices=CHOICES,
        run=_read_planned_run(sent),
        problems={name: f"{each}." for name, each in weak.items()} | dict(faults or {}),
        once=uuid.uuid4().hex,
    )


def _explain_budget(sent: Fields) -> Json | None:
    """Return what the numbers of a budget allow; None if they cannot be read."""
    body = _build_dataset_body(sent)
    try:
        asked = DatasetRequest(name="unnamed", size=body["size"], budget=body["budget"])
    except ValidationError:
        return None
    size, budget = asked.size, asked.budget
    attack = bound_attacks_by_epsilon(budget.epsilon, budget.delta).detection(_FALSE_POSITIVE_RATE)
    return {
        "epsilon": budget.epsilon,
        "size": size,
        "found": count_per_thousand(attack.true_positive_rate),
        "blind": count_per_thousand(_FALSE_POSITIVE_RATE),
        "exposed": count_exposed_records(size, budget.delta),
        "weaknesses": list_weaknesses(size, budget.epsilon, budget.delta),
    }


@router.post("/datasets")
async def create_dataset(
    request: Request, holder: FormKey, sent: SentFields, ledger: TheLedger
) -> Response:
    """Create a dataset with a privacy budget."""
    body, faults = _build_dataset_body(sent), _list_planned_faults(sent)
    try:
        asked = DatasetRequest.model_validate(body)
        new = asked.to_new_dataset()
        if not faults:
            await ledger.create_dataset(write_request(holder, sent, "POST /datasets", body), new)
            return RedirectResponse(f"/datasets/{asked.name}", _SEE_OTHER)
    except (ValidationError, NameTakenError) as error:
        faults = _get_problem_sentences(error, sent) | faults
    except WeakGuaranteeError:
        pass  # the page says why, beside the numbers
    except CodedError as error:
        if error.mechanism_at != "/planned_mechanism":
            raise
        place = "sampling" if _read_planned_run(sent).is_dp_sgd else run_form.MECHANISM
        faults = {place: f"{error.detail[:1].upper()}{error.detail[1:]}."}
    return await run_in_threadpool(_render_new_dataset_page, request, sent, faults, 422)


@router.get("/datasets/{name}/delete")
async def ask_to_delete(
    request: Request, name: Name, session: TheSession, ledger: TheLedger
) -> Response:
    """Ask whether to delete a dataset, and show the consequences."""
    require_unbound(session.key, Scope.OWNER)
    found = await ledger.get_dataset(session.key, name)
    return await run_in_threadpool(
        render_page, request, "delete_dataset.html", dataset=found, once=uuid.uuid4().hex
    )


@router.post("/datasets/{name}/delete")
async def delete_dataset(
    name: Name, holder: FormKey, sent: SentFields, ledger: TheLedger
) -> Response:
    """Delete a dataset that was never used."""
    write = write_request(holder, sent, f"POST /datasets/{name}/delete")
    await ledger.delete_dataset(write, name)
    return RedirectResponse("/datasets", _SEE_OTHER)


def _read_planned_run(sent: Fields) -> RunForm:
    """Return the run in the form that is planned for the new dataset."""
    counted = {"batches": "rate", "length": "steps"}  # at first: the form has the size elsewhere
    return run_form.read_run(counted | {name: first_value(sent, name) for name in sent})


def _is_planned(sent: Fields) -> bool:
    """Return whether the form describes a planned run."""
    return first_value(sent, "planned") == "planned"


def _list_planned_faults(sent: Fields) -> dict[str, str]:
    """Return a sentence for each unreadable field of the planned run."""
    if not _is_planned(sent):
        return {}
    run = _read_planned_run(sent)
    return dict(run.problems) | ({"sampling": " ".join(run.faults)} if run.faults else {})


def _build_dataset_body(sent: Fields) -> Json:
    """Return the form for a new dataset as a request body of the API."""
    unit = first_value(sent, "privacy_unit")
    budget = {name: _number_or_text(first_value(sent, name)) for name in ("epsilon", "delta")}
    body = {
        "name": first_value(sent, "name"),
        "size": _number_or_text(first_value(sent, "size")),
        "budget": budget,
    }
    chosen = {
        name: value
        for name in ("neighbouring_relation", "filter")
        if (value := first_value(sent, name))
    }
    planned = {"planned_mechanism": _read_planned_run(sent).mechanism} if _is_planned(sent) else {}
    accepted = {"accept_weak": True} if first_value(sent, "accept_weak") else {}
    return body | ({"privacy_unit": unit} if unit else {}) | chosen | planned | accepted


def _number_or_text(text: str) -> float | str:
    """Parse a number; return other text unchanged, for the API to refuse."""
    try:
        value = float(text)
    except ValueError:
        return text
    if not is_exact(text):
        return text
    return int(value) if value.is_integer() else value


_FIELD_PROBLEMS: Final = {
    "name": "Begin with a letter or digit; use letters, digits, dots, dashes and underscores.",
    "size": "Enter a whole number of records, at least 1.",
    "epsilon": "Enter a number above 0 and up to 1000.",
    "delta": "Enter 0, or a number from 1e-50 to below 1, such as 1e-5.",
    "privacy_unit": "Use at most 1000 characters.",
}


def _get_problem_sentences(error: ValidationError | NameTakenError, sent: Fields) -> dict[str, str]:
    """Return a sentence for each invalid field of the form."""
    if isinstance(error, NameTakenError):
        return {"name": "A dataset of this name exists; choose another name."}
    found: dict[str, str] = {}
    for fault in problems.of_error(error)["errors"]:
        first, *rest = fault["pointer"].strip("/").split("/")
        if first == "planned_mechanism":
            field, sentence = _read_planned_run(sent).place_problem(rest, fault["message"])
        else:
            field = [first, *rest][-1]
            sentence = _FIELD_PROBLEMS.get(field, "This value is not valid.")
        found.setdefault(field, sentence)
    return found
