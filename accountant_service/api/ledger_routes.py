"""The ledger's endpoints: read the body, ask the ledger, answer."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Header, Path, Request
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from accountant_service import mechanisms
from accountant_service.api import ledger_schemas as bodies
from accountant_service.api import problems, schemas, views
from accountant_service.api.async_ledger import AsyncLedger
from accountant_service.api.routes import StrictRoute
from accountant_service.errors import UnknownSubjectError
from accountant_service.ledger import service
from accountant_service.ledger.keys import Keys, Scope, require, require_unbound
from accountant_service.ledger.repository import KeyRecord, Remembered, now

_PROBLEMS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": schemas.ProblemView, "description": description}
    for status, description in (
        (400, "The body is not JSON, or a write has no Idempotency-Key"),
        (401, "No valid API key"),
        (403, "The key lacks the scope"),
        (404, "There is no such thing, for this key"),
        (409, "The ledger says no: see `code`"),
        (413, "The body is too large"),
        (422, "The request is malformed, or cannot be accounted for"),
        (503, "The database does not answer or takes no writes; nothing was charged"),
    )
}

router = APIRouter(route_class=StrictRoute, tags=["ledger"], responses=_PROBLEMS)


def keys_of(request: Request) -> Keys:
    """The application's keys."""
    found: Keys = request.app.state.keys
    return found


def ledger_of(request: Request) -> AsyncLedger:
    """The application's ledger."""
    found: AsyncLedger = request.app.state.async_ledger
    return found


async def authenticated(
    request: Request, authorization: Annotated[str | None, Header(include_in_schema=False)] = None
) -> KeyRecord:
    """Whose request this is."""
    scheme, _, token = (authorization or "").partition(" ")
    key = await ledger_of(request).authenticate(token if scheme.lower() == "bearer" else None)
    request.app.state.key_limiter.admit(key.identifier)
    return key


async def may_compute(key: Annotated[KeyRecord, Depends(authenticated)]) -> None:
    """For computations that are not left open: a key of any scope."""
    require(key, *Scope)


Key = Annotated[KeyRecord, Depends(authenticated)]
Name = Annotated[str, Path(max_length=200, pattern=bodies.NAME_PATTERN)]
TheLedger = Annotated[AsyncLedger, Depends(ledger_of)]
Idempotency = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key", max_length=200, description="a new random value for each write"
    ),
]


def _write(request: Request, key: KeyRecord, idempotency: str | None, body: Any) -> service.Request:
    call = f"{request.method} {request.url.path}"
    return service.Request(key, idempotency, call, body)


async def _large_write(
    request: Request, key: KeyRecord, idempotency: str | None, body: BaseModel
) -> service.Request:
    """A write whose body may hold a large mechanism."""
    return _write(request, key, idempotency, await run_in_threadpool(_raw, body))


def _answer(answer: Remembered) -> Response:
    return Response(answer.answer, answer.status, media_type="application/json")


def _json(view: Any, status: int = 200) -> Response:
    return Response(to_json(view), status, media_type="application/json")


def _raw(body: BaseModel) -> Any:
    """A body as JSON, for the fingerprint of a repeat."""
    trees = {name for name in type(body).model_fields if "mechanism" in name}
    plain = body.model_dump(mode="json", exclude=trees)
    present = {name: tree for name in trees if (tree := getattr(body, name)) is not None}
    return plain | {name: mechanisms.to_json(tree) for name, tree in present.items()}


@router.post("/v1/datasets", status_code=201, response_model=bodies.DatasetView)
async def create_dataset(
    body: bodies.DatasetRequest,
    request: Request,
    key: Key,
    ledger: TheLedger,
    idempotency_key: Idempotency = None,
) -> Response:
    """Give a dataset a privacy budget, for good."""
    write = await _large_write(request, key, idempotency_key, body)
    return _answer(
        await ledger.create_dataset(
            write, body.name, body.size, body.budget.epsilon, body.budget.delta,
            body.neighbouring_relation, body.privacy_unit, body.planned_mechanism,
        )
    )  # fmt: skip


@router.get("/v1/datasets", response_model=bodies.DatasetsView)
async def datasets(key: Key, ledger: TheLedger) -> Response:
    """The datasets this key may see."""
    return _json({"items": await ledger.datasets(key)})


@router.get("/v1/datasets/{name}", response_model=bodies.DatasetView)
async def dataset(name: Name, key: Key, ledger: TheLedger) -> Response:
    """A dataset: its budget, what is spent, held and left."""
    return _json(await ledger.dataset(key, name))


@router.post("/v1/datasets/{name}/quotes", response_model=bodies.QuoteView)
async def quote(name: Name, body: bodies.QuoteRequest, key: Key, ledger: TheLedger) -> Response:
    """Whether a plan would fit, and what would; charges nothing."""
    return _json(_quote_view(await ledger.quote(key, name, body.mechanism)))


@router.post("/v1/datasets/{name}/quotes/batch", response_model=bodies.QuotesView)
async def quotes(name: Name, body: bodies.QuotesRequest, key: Key, ledger: TheLedger) -> Response:
    """Quotes of several plans, each by itself and all together; charges nothing."""
    found, together = await ledger.quotes(key, name, body.mechanisms)
    items = [
        _quote_view(each)
        if isinstance(each, service.Quote)
        else {"problem": problems.of_accounting_error(each, f"/mechanisms/{at}")}
        for at, each in enumerate(found)
    ]
    return _json({"items": items, "together": together})


def _quote_view(quote: service.Quote) -> dict[str, Any]:
    found = quote.guarantee
    guarantee = None if found is None else views.guarantee(found) | {"scope": "fixed_plan"}
    return quote.view | {"guarantee": guarantee}


@router.get("/v1/datasets/{name}/running-total", response_model=dict[str, Any])
async def running_total(name: Name, key: Key, ledger: TheLedger) -> Response:
    """All that was granted so far, accounted as one plan: informative, not a guarantee."""
    found = views.guarantee(await ledger.running_total(key, name))
    return _json(found | {"scope": "running_total"})


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
    """Hold budget for a whole plan."""
    write = await _large_write(request, key, idempotency_key, body)
    return _answer(
        await ledger.reserve(write, name, body.mechanism, body.lease_seconds, body.purpose)
    )


@router.get("/v1/reservations/{identifier}", response_model=bodies.ReservationView)
async def reservation(identifier: Name, key: Key, ledger: TheLedger) -> Response:
    """A reservation as it stands."""
    return _json(await ledger.reservation(key, identifier))


@router.get("/v1/reservations/{identifier}/certificate", response_model=dict[str, Any])
async def certificate(identifier: Name, key: Key, ledger: TheLedger) -> Response:
    """What may be published about a run that has ended; check it with `accountant verify FILE`."""
    return _json(await ledger.certificate(key, identifier))


@router.post("/v1/reservations/{identifier}/grants", response_model=bodies.ReservationView)
async def grant(
    identifier: Name,
    body: bodies.GrantRequest,
    request: Request,
    key: Key,
    ledger: TheLedger,
    idempotency_key: Idempotency = None,
) -> Response:
    """Charge the next steps, before their noise is drawn."""
    write = _write(request, key, idempotency_key, _raw(body))
    return _answer(await ledger.grant(write, identifier, body.steps, body.sequence))


@router.post("/v1/reservations/{identifier}/commit", response_model=bodies.ReservationView)
async def commit(
    identifier: Name,
    body: bodies.NothingRequest,
    request: Request,
    key: Key,
    ledger: TheLedger,
    idempotency_key: Idempotency = None,
) -> Response:
    """The run is done; what was never granted is free again."""
    return _answer(
        await ledger.commit(_write(request, key, idempotency_key, _raw(body)), identifier)
    )


@router.post("/v1/reservations/{identifier}/release", response_model=bodies.ReservationView)
async def release(
    identifier: Name,
    body: bodies.NothingRequest,
    request: Request,
    key: Key,
    ledger: TheLedger,
    idempotency_key: Idempotency = None,
) -> Response:
    """The run is given up; what was never granted is free again."""
    return _answer(
        await ledger.release(_write(request, key, idempotency_key, _raw(body)), identifier)
    )


@router.post("/v1/reservations/{identifier}/renew", response_model=bodies.ReservationView)
async def renew(
    identifier: Name,
    body: bodies.RenewRequest,
    request: Request,
    key: Key,
    ledger: TheLedger,
    idempotency_key: Idempotency = None,
) -> Response:
    """Extend the lease."""
    write = _write(request, key, idempotency_key, _raw(body))
    return _answer(await ledger.renew(write, identifier, body.lease_seconds))


@router.get("/v1/datasets/{name}/entries", response_model=bodies.EntriesView)
async def entries(name: Name, key: Key, ledger: TheLedger, cursor: str = "") -> Response:
    """The append-only record, page by page."""
    return _json(await ledger.entries(key, name, cursor))


@router.post("/v1/keys", status_code=201, response_model=bodies.NewKeyView, tags=["keys"])
def create_key(body: bodies.KeyRequest, request: Request, key: Key) -> Response:
    """A new API key, shown this once."""
    require_unbound(key)
    expires = body.expires_in_seconds
    token, record = keys_of(request).create(
        body.scopes,
        body.name,
        None if body.datasets is None else tuple(body.datasets),
        None if expires is None else now() + int(1e6 * expires),
    )
    return _json(_key_view(record) | {"key": token}, 201)


@router.get("/v1/keys", response_model=bodies.KeysView, tags=["keys"])
def list_keys(request: Request, key: Key) -> Response:
    """All keys, without what only their owners know."""
    require_unbound(key)
    return _json({"items": [_key_view(record) for record in keys_of(request).all()]})


@router.delete("/v1/keys/{identifier}", response_model=bodies.KeyView, tags=["keys"])
def revoke_key(identifier: Name, request: Request, key: Key) -> Response:
    """Make a key useless from now on."""
    require_unbound(key)
    record = keys_of(request).revoke(identifier, by=key.identifier)
    if record is None:
        raise UnknownSubjectError(f"there is no key {identifier!r}")
    return _json(_key_view(record))


def _key_view(record: KeyRecord) -> dict[str, Any]:
    def seconds(at: int | None) -> float | None:
        return None if at is None else at / 1e6

    return {
        "id": record.identifier,
        "name": record.name,
        "scopes": sorted(record.scopes),
        "datasets": None if record.datasets is None else list(record.datasets),
        "created_at": seconds(record.created_at),
        "expires_at": seconds(record.expires_at),
        "revoked_at": seconds(record.revoked_at),
        "last_used_at": seconds(record.last_used_at),
    }
