"""Routes of the ledger and of API keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Header, Path, Query, Request
from pydantic import BaseModel, BeforeValidator, TypeAdapter, ValidationError
from pydantic_core import to_json
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from accountant_service import mechanisms
from accountant_service.api import error_responses, ledger_views
from accountant_service.api import ledger_schemas as bodies
from accountant_service.api.async_ledger import AsyncLedger
from accountant_service.api.routes import StrictRoute
from accountant_service.disclosure.formats import MEDIA_TYPES, Format
from accountant_service.ledger.api_keys import Keys, Scope, require_scope, require_unbound
from accountant_service.ledger.errors import (
    ForbiddenError,
    UnauthenticatedError,
    UnknownSubjectError,
)
from accountant_service.ledger.key_record import KeyRecord
from accountant_service.ledger.plans import Quote
from accountant_service.ledger.repository import StoredAnswer, now
from accountant_service.ledger.rules import Cap, HolderKind
from accountant_service.ledger.service import WriteRequest
from accountant_service.operations.problem import Problem
from accountant_service.questions import models as schemas
from accountant_service.questions import problems, views

PROBLEMS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": schemas.ProblemView, "description": description}
    for status, description in (
        (400, "The body is not JSON, or a write has no Idempotency-Key"),
        (401, "No valid API key"),
        (403, "The key lacks the scope"),
        (404, "It does not exist, or not for this key"),
        (409, "The ledger refuses: see `code`"),
        (413, "The body is too large"),
        (422, "The request is malformed or cannot be accounted for"),
        (429, "The key or address sends more requests than it may"),
        (503, "The database does not answer or accepts no writes; nothing was charged"),
    )
}

router = APIRouter(route_class=StrictRoute, tags=["ledger"], responses=PROBLEMS)


def keys_of(request: Request) -> Keys:
    """Return the application's store of API keys."""
    found: Keys = request.app.state.keys
    return found


async def ledger_of(request: Request) -> AsyncLedger:
    """Return the application's ledger; FastAPI would call a plain function in a thread."""
    found: AsyncLedger = request.app.state.async_ledger
    return found


async def authenticate(
    request: Request, authorization: Annotated[str | None, Header(include_in_schema=False)] = None
) -> KeyRecord:
    """Return the API key of a request, and count the request against its rate limit."""
    ledger = await ledger_of(request)
    key = await ledger.authenticate(_token_of(authorization))
    _admit_key(request, key)
    return key


def _admit_key(request: Request, key: KeyRecord) -> None:
    request.scope[error_responses.NOTES].has_key = True
    request.app.state.key_limiter.admit(key.identifier)


def _token_of(authorization: str | None) -> str | None:
    """Return the API key's token in an Authorization header, or None."""
    scheme, _, token = (authorization or "").partition(" ")
    return token if scheme.lower() == "bearer" else None


async def require_any_scope(key: Annotated[KeyRecord, Depends(authenticate)]) -> None:
    """Require an API key of any scope, for computations that are not open to all."""
    require_scope(key, *Scope)


_IDEMPOTENCY_LENGTH_MAX: Final = 200
Key = Annotated[KeyRecord, Depends(authenticate)]


def _name_in_path(description: str) -> Any:
    """Return the declaration of a name in a path."""
    return Path(max_length=200, pattern=bodies.NAME_PATTERN, description=description)


CURSOR: Final = "`next_cursor` of the page before; empty for the first page"
Name = Annotated[str, _name_in_path("name of the dataset")]
RunIdentifier = Annotated[str, _name_in_path("identifier of the reservation")]
KeyIdentifier = Annotated[str, _name_in_path("identifier of the API key")]
SeriesName = Annotated[
    str,
    Path(
        max_length=bodies.SERIES_NAME_LENGTH_MAX,
        pattern=bodies.NAME_PATTERN,
        description="name of the series",
    ),
]
Label = Annotated[
    str,
    Path(
        max_length=bodies.LABEL_LENGTH_MAX,
        pattern=bodies.NAME_PATTERN,
        description="label of the dataset within its series",
    ),
]
Team = Annotated[str, _name_in_path("name of the team")]
DatasetCursor = Annotated[
    str, Query(max_length=200, pattern=f"({bodies.NAME_PATTERN})|^$", description=CURSOR)
]
CapCursor = Annotated[
    str, Query(max_length=205, pattern=r"^((key|team):[A-Za-z0-9._-]+)?$", description=CURSOR)
]
RunCursor = Annotated[str, Query(pattern=ledger_views.RUN_CURSOR, description=CURSOR)]
EntryCursor = Annotated[str, Query(pattern=r"^\d{0,18}$", description=CURSOR)]
KeyCursor = Annotated[str, Query(pattern=r"^(\d{1,18}:[0-9a-f]{1,32})?$", description=CURSOR)]
_NAME: Final[TypeAdapter[str]] = TypeAdapter(RunIdentifier)
TheLedger = Annotated[AsyncLedger, Depends(ledger_of)]
Idempotency = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        max_length=_IDEMPOTENCY_LENGTH_MAX,
        description="a new random value for each write; the same value when it is repeated",
    ),
]


Wanted = Annotated[
    Format,
    Query(
        alias="format",
        description="`json` has all facts; `registry` is the YAML record of the OpenDP deployments "
        "registry, `model-card` and `nist` are Markdown",
    ),
]
RegistryTier = Annotated[
    Literal[1, 2, 3],
    BeforeValidator(lambda text: int(text) if text in ("1", "2", "3") else text),
    Query(
        description="how detailed the record for the deployments registry is, from 1 to 3; other "
        "formats ignore it"
    ),
]
_FORMATS: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "The report in the requested format",
        "content": {kind.partition(";")[0]: {} for kind in MEDIA_TYPES.values()},
    }
}
_REPORT_HEADERS: Final = {  # a report has its styles inside and loads nothing
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def parse_key_cursor(cursor: str) -> tuple[int, str]:
    """Return the time and the identifier of the key after which a page of keys begins."""
    at, _, identifier = cursor.partition(":")
    return (int(at), identifier) if cursor else (-1, "")


def write_key_cursor(last: KeyRecord) -> str:
    """Return the cursor of the page of keys after a key."""
    return f"{last.created_at}:{last.identifier}"


def report_response(report: bytes, wanted: Format) -> Response:
    """Return the response that holds a report in a format."""
    return Response(report, 200, dict(_REPORT_HEADERS), media_type=MEDIA_TYPES[wanted])


def _build_write_request(
    request: Request, key: KeyRecord, idempotency: str | None, body: Any
) -> WriteRequest:
    """Return a ledger write with the request's key, idempotency key and body."""
    call = f"{request.method} {request.url.path}"
    return WriteRequest(key, idempotency, call, body)


async def _build_large_write_request(
    request: Request, key: KeyRecord, idempotency: str | None, body: BaseModel
) -> WriteRequest:
    """Build a write request; convert the body in a thread, as its mechanism may be large."""
    return _build_write_request(
        request, key, idempotency, await run_in_threadpool(_body_as_json, body)
    )


def _stored_response(answer: StoredAnswer) -> Response:
    """Return the response with the answer to a write, which the ledger stores for retries."""
    return Response(answer.text, answer.status, media_type="application/json")


def _json_response(view: Any, status: int = 200) -> Response:
    """Return a response that holds a value as JSON."""
    return Response(to_json(view), status, media_type="application/json")


def _body_as_json(body: BaseModel) -> Any:
    """Return a request body as JSON; it is compared to recognise a retried write."""
    trees = {name for name in type(body).model_fields if "mechanism" in name}
    newer = {"accept_weak"} - body.model_fields_set  # earlier versions did not hash it
    plain = body.model_dump(mode="json", exclude=trees | newer)
    present = {name: tree for name in trees if (tree := getattr(body, name)) is not None}
    return plain | {name: mechanisms.to_json(tree) for name, tree in present.items()}


@router.post("/v1/datasets", status_code=201, response_model=bodies.NewDatasetView)
async def create_dataset(
    body: bodies.DatasetRequest,
    request: Request,
    key: Key,
    ledger: TheLedger,
    idempotency_key: Idempotency = None,
) -> Response:
    """Create a dataset with a privacy budget. The budget cannot be changed.

    The answer says how many steps of ordinary runs the budget admits, and warns if that is none.
    """
    write = await _build_large_write_request(request, key, idempotency_key, body)
    return _stored_response(await ledger.create_dataset(write, body.to_new_dataset()))


@router.get("/v1/datasets", response_model=bodies.DatasetsView)
async def datasets(key: Key, ledger: TheLedger, cursor: DatasetCursor = "") -> Response:
    """List the datasets that this key may see page by page, sorted by name."""
    return _json_response(await ledger.list_datasets(key, cursor))


@router.get("/v1/datasets/{name}", response_model=bodies.DatasetView)
async def dataset(name: Name, key: Key, ledger: TheLedger) -> Response:
    """Get a dataset: its budget, and what is spent, held and remaining."""
    return _json_response(await ledger.get_dataset(key, name))


@router.post("/v1/datasets/{name}/close", response_model=bodies.DatasetView)
async def close_dataset(
    name: Name,
    body: bodies.NothingRequest,
    request: Request,
    key: Key,
    ledger: TheLedger,
    idempotency_key: Idempotency = None,
) -> Response:
    """Close a dataset for good: it takes no further reservation. Open runs may go on to their end.

    Anyone who may create a budget may close it. A repeat changes nothing.
    """
    write = _build_write_request(request, key, idempotency_key, _body_as_json(body))
    return _stored_response(await ledger.close_dataset(write, name))


@router.post("/v1/datasets/{name}/reference", response_model=bodies.NewDatasetView)
async def set_reference(
    name: Name,
    body: bodies.ReferenceRequest,
    request: Request,
    key: Key,
    ledger: TheLedger,
    idempotency_key: Idempotency = None,
) -> Response:
    """Choose or confirm the reference in whose steps the rest of the budget is counted.

    The key needs scope `owner`. No run replaces the reference afterwards. Once steps of a reference
    are spent or held, it can only be confirmed.
    """
    write = await _build_large_write_request(request, key, idempotency_key, body)
    return _stored_response(await ledger.set_reference(write, name, body.mechanism))


@router.post("/v1/datasets/{name}/reference/quotes", response_model=bodies.ReferenceQuoteView)
async def quote_reference(
    name: Name, body: bodies.ReferenceRequest, key: Key, ledger: TheLedger
) -> Response:
    """Tell what would still fit with a reference, and what fits now. Sets nothing."""
    found = await ledger.quote_reference(key, name, body.mechanism)
    return _json_response(ledger_views.reference_quote_view(found))


@router.delete("/v1/datasets/{name}", response_model=bodies.DatasetView)
async def delete_dataset(
    name: Name, request: Request, key: Key, ledger: TheLedger, idempotency_key: Idempotency = None
) -> Response:
    """Delete a dataset that was never used: its only entry is its creation.

    An audit event records who did, and the hash of that entry. The name may be used again. Anyone
    who may create a budget may delete it.
    """
    write = _build_write_request(request, key, idempotency_key, None)
    return _stored_response(await ledger.delete_dataset(write, name))


@router.get("/v1/datasets/{name}/report", response_model=dict[str, Any], responses=_FORMATS)
async def dataset_report(
    name: Name, key: Key, ledger: TheLedger, wanted: Wanted = Format.JSON, tier: RegistryTier = 3
) -> Response:
    """Get the report of a dataset: what is promised to its people, and what attackers achieve."""
    return report_response(await ledger.report_on_dataset(key, name, wanted, tier), wanted)


@router.post("/v1/datasets/{name}/quotes", response_model=bodies.QuoteView)
async def quote(name: Name, body: bodies.QuoteRequest, key: Key, ledger: TheLedger) -> Response:
    """Quote a plan: whether it fits the remaining budget, and what would fit. Charges nothing."""
    return _json_response(ledger_views.quote_view(await ledger.quote(key, name, body.mechanism)))


@router.post("/v1/datasets/{name}/quotes/batch", response_model=bodies.QuotesView)
async def quotes(name: Name, body: bodies.QuotesRequest, key: Key, ledger: TheLedger) -> Response:
    """Quote several plans, each alone and all together. Charges nothing."""
    found, together = await ledger.quote_several(key, name, body.mechanisms)
    items = [
        ledger_views.quote_view(each)
        if isinstance(each, Quote)
        else {"problem": problems.of_accounting_error(each, f"/mechanisms/{at}")}
        for at, each in enumerate(found)
    ]
    return _json_response({"items": items, "together": ledger_views.combined_quote_view(together)})


@router.get("/v1/datasets/{name}/running-total", response_model=dict[str, Any])
async def running_total(name: Name, key: Key, ledger: TheLedger) -> Response:
    """Get the ε of all granted steps, accounted as one plan. It is an estimate, not a guarantee."""
    found = views.guarantee(await ledger.estimate_running_total(key, name)).model_dump()
    return _json_response(found | {"scope": "running_total"})


@router.get("/v1/datasets/{name}/reservations", response_model=bodies.ReservationsView)
async def reservations(name: Name, key: Key, ledger: TheLedger, cursor: RunCursor = "") -> Response:
    """List the reservations of a dataset page by page: open ones first, then the latest lease."""
    return _json_response(await ledger.list_runs(key, name, cursor))


@router.post(
    "/v1/datasets/{name}/reservations", status_code=201, response_model=bodies.ReservationView
)
async def reserve(
    name: Name,
    body: bodies.ReservationRequest,
    request: Request,
    key: Key,
    ledger: TheLedger,
    idempotency_key: Idempotency = None,
) -> Response:
    """Reserve budget for a whole plan."""
    write = await _build_large_write_request(request, key, idempotency_key, body)
    return _stored_response(
        await ledger.reserve(write, name, body.mechanism, body.lease_seconds, body.purpose)
    )


@router.post("/v1/reservations", status_code=201, response_model=bodies.ReservationView)
async def reserve_jointly(
    body: bodies.JointReservationRequest,
    request: Request,
    key: Key,
    ledger: TheLedger,
    idempotency_key: Idempotency = None,
) -> Response:
    """Reserve budget of several datasets for one run on all their records: of all, or of none.

    Grants, renewals and the end of the run are the same on every dataset. A person with records in
    several of them is charged in each.
    """
    write = await _build_large_write_request(request, key, idempotency_key, body)
    return _stored_response(
        await ledger.reserve_jointly(
            write, body.datasets, body.mechanism, body.lease_seconds, body.purpose
        )
    )


@router.get("/v1/reservations/{identifier}", response_model=bodies.ReservationView)
async def reservation(identifier: RunIdentifier, key: Key, ledger: TheLedger) -> Response:
    """Get a reservation."""
    return _json_response(await ledger.get_reservation(key, identifier))


@router.get("/v1/reservations/{identifier}/certificate", response_model=dict[str, Any])
async def certificate(identifier: RunIdentifier, key: Key, ledger: TheLedger) -> Response:
    """Get the certificate of a run that has ended; check it with `accountant verify FILE`."""
    return _json_response(await ledger.issue_certificate(key, identifier))


@router.get(
    "/v1/reservations/{identifier}/report", response_model=dict[str, Any], responses=_FORMATS
)
async def run_report(
    identifier: RunIdentifier,
    key: Key,
    ledger: TheLedger,
    wanted: Wanted = Format.JSON,
    tier: RegistryTier = 3,
) -> Response:
    """Get the report of a run that has ended, written from its certificate."""
    return report_response(await ledger.report_on_run(key, identifier, wanted, tier), wanted)


async def grant(
    identifier: RunIdentifier,
    body: bodies.GrantRequest,
    request: Request,
    key: Key,
    ledger: TheLedger,
    idempotency_key: Idempotency = None,
) -> Response:
    """Charge the next steps. Call it before their noise is drawn."""
    write = _build_write_request(request, key, idempotency_key, _body_as_json(body))
    return _stored_response(await ledger.grant(write, identifier, body.steps, body.sequence))


class _GrantRoute(StrictRoute):
    """The route of grants, which training jobs call at every step."""

    async def answer_directly(self, request: Request) -> Response | None:
        """Answer a well-formed grant: FastAPI reads the parameters of a request slowly."""
        idempotency = request.headers.get("idempotency-key")
        await request.body()  # a problem of its size or time is not one of its content
        if request.headers.get("content-type") != "application/json":
            return None
        try:
            identifier = _NAME.validate_python(request.path_params["identifier"])
            body = bodies.GrantRequest.model_validate(await request.json())
        except (ValidationError, Problem, problems.RefusedError):
            return None
        if len(idempotency or "") > _IDEMPOTENCY_LENGTH_MAX:
            return None
        ledger, authorization = await ledger_of(request), request.headers.get("authorization")
        remembered = ledger.remembered_key(_token_of(authorization) or "")
        if remembered is None or not idempotency:
            key = await authenticate(request, authorization)
            return await grant(identifier, body, request, key, ledger, idempotency)
        _admit_key(request, remembered)
        write = _build_write_request(request, remembered, idempotency, _body_as_json(body))
        unread = replace(write, is_authenticated=False)
        try:
            answer = await ledger.grant(unread, identifier, body.steps, body.sequence)
        except (UnauthenticatedError, ForbiddenError, UnknownSubjectError):
            read = replace(write, key=await ledger.authenticate(_token_of(authorization)))
            answer = await ledger.grant(read, identifier, body.steps, body.sequence)
        return _stored_response(answer)


router.add_api_route(
    "/v1/reservations/{identifier}/grants",
    grant,
    methods=["POST"],
    response_model=bodies.ReservationView,
    route_class_override=_GrantRoute,
)


@router.post("/v1/reservations/{identifier}/commit", response_model=bodies.ReservationView)
async def commit(
    identifier: RunIdentifier,
    body: bodies.CommitRequest,
    request: Request,
    key: Key,
    ledger: TheLedger,
    idempotency_key: Idempotency = None,
) -> Response:
    """End a finished run; the cost of steps not granted returns to the budget."""
    stated = body.model_dump(mode="json", exclude_none=True)
    write = _build_write_request(request, key, idempotency_key, stated)
    return _stored_response(await ledger.commit(write, identifier, body.to_declaration()))


@router.post("/v1/reservations/{identifier}/release", response_model=bodies.ReservationView)
async def release(
    identifier: RunIdentifier,
    body: bodies.NothingRequest,
    request: Request,
    key: Key,
    ledger: TheLedger,
    idempotency_key: Idempotency = None,
) -> Response:
    """End an abandoned run; the cost of steps not granted returns to the budget."""
    return _stored_response(
        await ledger.release(
            _build_write_request(request, key, idempotency_key, _body_as_json(body)), identifier
        )
    )


@router.post("/v1/reservations/{identifier}/renew", response_model=bodies.ReservationView)
async def renew(
    identifier: RunIdentifier,
    body: bodies.RenewRequest,
    request: Request,
    key: Key,
    ledger: TheLedger,
    idempotency_key: Idempotency = None,
) -> Response:
    """Extend the lease of a reservation, from now on."""
    write = _build_write_request(request, key, idempotency_key, _body_as_json(body))
    return _stored_response(await ledger.renew(write, identifier, body.lease_seconds))


@router.get("/v1/datasets/{name}/entries", response_model=bodies.EntriesView)
async def entries(name: Name, key: Key, ledger: TheLedger, cursor: EntryCursor = "") -> Response:
    """List the ledger's entries for a dataset, page by page."""
    return _json_response(await ledger.list_entries(key, name, cursor))


@router.get("/v1/datasets/{name}/caps", response_model=bodies.CapsView)
async def caps(name: Name, key: Key, ledger: TheLedger, cursor: CapCursor = "") -> Response:
    """List the caps of a dataset page by page, with what each holder has taken."""
    return _json_response(await ledger.list_caps(key, name, cursor))


@router.put("/v1/datasets/{name}/caps/teams/{team}", response_model=bodies.CapView)
async def set_team_cap(
    name: Name, team: Team, body: bodies.CapRequest, key: Key, ledger: TheLedger
) -> Response:
    """Limit what the keys of a team may take together. Replaces the team's earlier cap."""
    cap = Cap(HolderKind.TEAM, team, float(body.share))
    return _json_response(await ledger.set_cap(key, name, cap))


@router.put("/v1/datasets/{name}/caps/keys/{key_id}", response_model=bodies.CapView)
async def set_key_cap(
    name: Name, key_id: KeyIdentifier, body: bodies.CapRequest, key: Key, ledger: TheLedger
) -> Response:
    """Limit what an API key may take. Replaces the key's earlier cap."""
    cap = Cap(HolderKind.KEY, key_id, float(body.share))
    return _json_response(await ledger.set_cap(key, name, cap))


@router.delete("/v1/datasets/{name}/caps/teams/{team}", status_code=204)
async def remove_team_cap(name: Name, team: Team, key: Key, ledger: TheLedger) -> Response:
    """Remove the cap of a team."""
    await ledger.remove_cap(key, name, HolderKind.TEAM, team)
    return Response(status_code=204)


@router.delete("/v1/datasets/{name}/caps/keys/{key_id}", status_code=204)
async def remove_key_cap(
    name: Name, key_id: KeyIdentifier, key: Key, ledger: TheLedger
) -> Response:
    """Remove the cap of an API key."""
    await ledger.remove_cap(key, name, HolderKind.KEY, key_id)
    return Response(status_code=204)


@router.put(
    "/v1/series/{series}",
    response_model=bodies.SeriesView,
    responses={201: {"model": bodies.SeriesView, "description": "It is new"}},
)
async def create_series(
    series: SeriesName, body: bodies.SeriesRequest, key: Key, ledger: TheLedger
) -> Response:
    """Create a series of datasets from a template, which cannot be changed.

    A repeat changes nothing. A key that names the series among its `datasets` may use all of its
    datasets, also later ones.
    """
    found, is_new = await ledger.create_series(key, series, body.to_template())
    return _json_response(found, 201 if is_new else 200)


@router.get("/v1/series", response_model=bodies.SeriesListView)
async def list_series(key: Key, ledger: TheLedger, cursor: DatasetCursor = "") -> Response:
    """List the series that this key may see page by page, sorted by name."""
    return _json_response(await ledger.list_series(key, cursor))


@router.get("/v1/series/{series}", response_model=bodies.SeriesView)
async def get_series(series: SeriesName, key: Key, ledger: TheLedger) -> Response:
    """Get a series: its template, the number of its datasets, and its caps."""
    return _json_response(await ledger.get_series(key, series))


@router.put(
    "/v1/series/{series}/datasets/{label}",
    response_model=bodies.DatasetView,
    responses={201: {"model": bodies.NewDatasetView, "description": "It is new"}},
)
async def add_to_series(
    series: SeriesName,
    label: Label,
    body: bodies.SeriesDatasetRequest,
    key: Key,
    ledger: TheLedger,
) -> Response:
    """Create the dataset NAME-LABEL of a series, with the budget and the caps of the series.

    A repeat with the same size changes nothing. All labels of a series have the same length; the
    datasets are in the order of their labels as texts. It needs scope `owner`; the key may be
    bound to the series.
    """
    found, is_new = await ledger.add_to_series(key, series, label, body.size)
    return _json_response(found, 201 if is_new else 200)


@router.get("/v1/series/{series}/window", response_model=bodies.WindowView)
async def window(
    series: SeriesName,
    key: Key,
    ledger: TheLedger,
    last: Annotated[int, Query(ge=1, le=bodies.DATASETS_MAX, description="how many datasets")] = 12,
) -> Response:
    """Get the last datasets of a series, what is left of each, and what they prove together."""
    return _json_response(await ledger.find_window(key, series, last))


@router.post("/v1/series/{series}/quotes", response_model=bodies.JointQuoteView)
async def quote_window(
    series: SeriesName, body: bodies.WindowQuoteRequest, key: Key, ledger: TheLedger
) -> Response:
    """Quote one run on the last datasets of a series: what it takes of each. Charges nothing."""
    return _json_response(await ledger.quote_window(key, series, body.last, body.mechanism))


@router.post("/v1/quotes", response_model=bodies.JointQuoteView)
async def quote_jointly(body: bodies.JointQuoteRequest, key: Key, ledger: TheLedger) -> Response:
    """Quote one run on several datasets: what it takes of each, what fits all. Charges nothing."""
    return _json_response(await ledger.quote_jointly(key, body.datasets, body.mechanism))


@router.put("/v1/series/{series}/caps/teams/{team}", response_model=bodies.SeriesView)
async def set_series_team_cap(
    series: SeriesName, team: Team, body: bodies.CapRequest, key: Key, ledger: TheLedger
) -> Response:
    """Limit what a team may take of each dataset of a series, also of later ones."""
    cap = Cap(HolderKind.TEAM, team, float(body.share))
    return _json_response(await ledger.set_series_cap(key, series, cap))


@router.put("/v1/series/{series}/caps/keys/{key_id}", response_model=bodies.SeriesView)
async def set_series_key_cap(
    series: SeriesName, key_id: KeyIdentifier, body: bodies.CapRequest, key: Key, ledger: TheLedger
) -> Response:
    """Limit what an API key may take of each dataset of a series, also of later ones."""
    cap = Cap(HolderKind.KEY, key_id, float(body.share))
    return _json_response(await ledger.set_series_cap(key, series, cap))


@router.delete("/v1/series/{series}/caps/teams/{team}", status_code=204)
async def remove_series_team_cap(
    series: SeriesName, team: Team, key: Key, ledger: TheLedger
) -> Response:
    """Remove the cap of a team from a series and from all of its datasets."""
    await ledger.remove_series_cap(key, series, HolderKind.TEAM, team)
    return Response(status_code=204)


@router.delete("/v1/series/{series}/caps/keys/{key_id}", status_code=204)
async def remove_series_key_cap(
    series: SeriesName, key_id: KeyIdentifier, key: Key, ledger: TheLedger
) -> Response:
    """Remove the cap of an API key from a series and from all of its datasets."""
    await ledger.remove_series_cap(key, series, HolderKind.KEY, key_id)
    return Response(status_code=204)


@router.post("/v1/keys", status_code=201, response_model=bodies.NewKeyView, tags=["keys"])
def create_key(body: bodies.KeyRequest, request: Request, key: Key) -> Response:
    """Create an API key. Its secret is shown only once."""
    require_unbound(key)
    expires = body.expires_in_seconds
    token, record = keys_of(request).create(
        body.scopes,
        body.name,
        None if body.datasets is None else tuple(body.datasets),
        None if expires is None else now() + int(1e6 * expires),
        body.team,
        requests_per_minute=body.requests_per_minute,
        by=key.identifier,
    )
    warnings = keys_of(request).warn_of_missing_datasets(record.datasets or ())
    view = ledger_views.key_view(record) | {"key": token, "warnings": warnings}
    return _json_response(view, 201)


@router.get("/v1/keys", response_model=bodies.KeysView, tags=["keys"])
def list_keys(request: Request, key: Key, cursor: KeyCursor = "") -> Response:
    """List the API keys page by page, the oldest first, without their secrets."""
    require_unbound(key)
    found = keys_of(request).list_keys(parse_key_cursor(cursor), ledger_views.LIST_PAGE_SIZE + 1)
    return _json_response(ledger_views.page_view(found, ledger_views.key_view, write_key_cursor))


@router.patch("/v1/keys/{identifier}", response_model=bodies.KeyView, tags=["keys"])
def change_key(
    identifier: KeyIdentifier, body: bodies.KeyChange, request: Request, key: Key
) -> Response:
    """Set or remove the quota of an API key. It counts from now on."""
    require_unbound(key)
    record = keys_of(request).set_quota(identifier, body.requests_per_minute, by=key.identifier)
    return _json_response(ledger_views.key_view(record))


@router.delete("/v1/keys/{identifier}", response_model=bodies.KeyView, tags=["keys"])
def revoke_key(identifier: KeyIdentifier, request: Request, key: Key) -> Response:
    """Revoke an API key."""
    require_unbound(key)
    record = keys_of(request).revoke(identifier, by=key.identifier)
    if record is None:
        raise UnknownSubjectError(f"there is no key {identifier!r}")
    return _json_response(ledger_views.key_view(record))
