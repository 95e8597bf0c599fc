"""The composition root: builds the FastAPI application from the settings."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any, Final

from fastapi import Depends, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from accountant_service import mechanisms
from accountant_service.api import error_responses, export_routes, ledger_routes, ledger_schemas
from accountant_service.api.async_ledger import AsyncLedger
from accountant_service.api.ledger_views import ANSWERS
from accountant_service.api.routes import BODY_MEMORY_BYTES, BodyMemory, build_router
from accountant_service.api.shared_call import SharedCall
from accountant_service.api.static_documents import StaticDocument, StaticDocuments
from accountant_service.ledger.api_keys import Keys
from accountant_service.ledger.caps import Caps
from accountant_service.ledger.database import open_repository
from accountant_service.ledger.entry_columns import EntryColumns
from accountant_service.ledger.idempotency_cleanup import IdempotencyCleanup
from accountant_service.ledger.quotas import RunQuota
from accountant_service.ledger.rules import EntryKind
from accountant_service.ledger.series_catalog import SeriesCatalog
from accountant_service.ledger.service import Ledger
from accountant_service.ledger.webhook_delivery import WebhookDelivery
from accountant_service.operations.metrics import Metrics
from accountant_service.operations.rate_limit import RateLimiter
from accountant_service.operations.settings import Settings
from accountant_service.questions.answer_cache import ComputationCache
from accountant_service.questions.models import EXAMPLES, MECHANISM_PLACEHOLDER
from accountant_service.server import metrics_endpoint
from accountant_service.server.middleware import AccessLog, AddressRateLimit, KeylessTurns
from accountant_service.version import __version__
from accountant_service.web import routing as web
from accountant_service.web.sessions import COOKIE

# a page with its files begins at once; more would keep the requests of keys waiting
_KEYLESS_BURST: Final = 10
_DESCRIPTION: Final = """
Privacy accounting for differentially private training. Every answer is a *guarantee*: a number,
whether it is proven, an estimate or refuted, the hypotheses it rests on, and wherever possible a
proved interval around the true value.
"""


_MECHANISM = "what is released: a run of DP-SGD, or a mechanism of another kind"


def create_app(settings: Settings | None = None) -> FastAPI:
    """Create the FastAPI application of the service.

    Args:
        settings: read from the environment by default.
    """
    settings = settings or Settings()
    metrics = Metrics(settings.metrics_directory)
    computations = ComputationCache(settings, metrics)
    repository = open_repository(settings.database)
    ledger_probe = metrics_endpoint.LedgerProbe(repository, metrics)

    run_quota = RunQuota(settings.open_runs_max, settings.unspent_runs_max)
    ledger = Ledger(repository, ANSWERS, _make_write_counter(metrics), run_quota)
    keys = Keys(repository)
    caps = Caps(repository)
    series = SeriesCatalog(repository)
    async_ledger = AsyncLedger(ledger, keys, caps, series, settings)

    closing = ExitStack()  # closes in reverse order
    housekeeping = IdempotencyCleanup(repository, settings.idempotency_days)
    columns = EntryColumns(repository)
    webhooks = WebhookDelivery(repository, _make_delivery_counter(metrics))
    for resource in (
        repository,
        ledger_probe,
        computations,
        async_ledger,
        housekeeping,
        columns,
        webhooks,
    ):
        closing.callback(resource.close)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        """Start background work with the application, and stop it at the end."""
        with closing:
            housekeeping.start()
            columns.start()
            webhooks.start()
            yield

    app = FastAPI(
        title="Privacy accountant",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=lifespan,
        openapi_url=None,  # encoded once: see `_add_openapi_document`
        docs_url=None,  # these pages load scripts from other hosts; see `web.reference_page`
        redoc_url=None,
    )
    app.state.settings, app.state.metrics = settings, metrics
    app.state.computations, app.state.ledger_probe = computations, ledger_probe
    app.state.body_memory = BodyMemory(BODY_MEMORY_BYTES)
    app.state.static_documents = StaticDocuments()
    app.state.repository, app.state.keys = repository, keys
    app.state.public_metrics = metrics_endpoint.share_public_metrics(app.state)
    app.state.database_check = SharedCall(lambda: run_in_threadpool(repository.ping))
    app.state.ledger, app.state.async_ledger, app.state.caps = ledger, async_ledger, caps
    dependencies = [] if settings.open_computation else [Depends(ledger_routes.require_any_scope)]
    app.include_router(build_router(dependencies))
    app.include_router(ledger_routes.router)
    app.include_router(export_routes.router)
    app.include_router(metrics_endpoint.router)
    error_responses.install(app)
    web.install(app)
    _add_middleware(app, settings)
    if settings.traces_endpoint is not None:
        from accountant_service.operations import tracing

        closing.callback(tracing.install(app, repository.engine))
    _add_openapi_document(app)
    return app


def _add_openapi_document(app: FastAPI) -> None:
    """Serve the OpenAPI document at `/openapi.json`."""
    app.openapi = lambda: _build_openapi(app)  # type: ignore[method-assign]

    def encode() -> StaticDocument:
        """Encode the document as JSON."""
        text = json.dumps(app.openapi(), ensure_ascii=False, separators=(",", ":"))
        return StaticDocument(text.encode(), "application/json")

    async def answer(request: Request) -> Response:
        """Answer with the OpenAPI document."""
        documents: StaticDocuments = app.state.static_documents
        return await documents.respond(request, request.url.path, encode)

    app.add_route("/openapi.json", answer, include_in_schema=False)


def _add_middleware(app: FastAPI, settings: Settings) -> None:
    """Add rate limits and the access log, with the outermost middleware last."""
    app.state.key_limiter = RateLimiter(settings.rate_limit, settings.rate_burst)
    if settings.rate_limit:
        limiter = RateLimiter(settings.rate_limit, settings.rate_burst)
        app.add_middleware(AddressRateLimit, limiter=limiter)
    app.add_middleware(AccessLog, metrics=app.state.metrics)
    rates = RateLimiter(settings.keyless_rate, _KEYLESS_BURST)
    app.add_middleware(KeylessTurns, rates=rates, metrics=app.state.metrics, cookie=COOKIE)


def _make_write_counter(metrics: Metrics) -> Callable[[EntryKind, int], None]:
    """Return a function that counts writes to the ledger and granted steps."""

    def count_write(kind: EntryKind, steps: int) -> None:
        """Count one write to the ledger, and the steps that it grants."""
        metrics.writes.labels(kind.value).inc()
        metrics.steps_granted.inc(steps)

    return count_write


def _make_delivery_counter(metrics: Metrics) -> Callable[[bool], None]:
    """Return a function that counts delivered and failed attempts to post events to webhooks."""

    def count_delivery(succeeded: bool) -> None:
        """Count one attempt to post an event, as delivered or failed."""
        metrics.webhook_attempts.labels("delivered" if succeeded else "failed").inc()

    return count_delivery


def _build_openapi(app: FastAPI) -> dict[str, Any]:
    """Build the OpenAPI document once, with examples and the schemas of mechanisms."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        components = document["components"]["schemas"]
        for name, example in (EXAMPLES | ledger_schemas.EXAMPLES).items():
            components[name].setdefault("examples", [example])
        components |= mechanisms.json_schema()
        components["Mechanism"].setdefault("description", _MECHANISM)
        app.openapi_schema = _set_problem_media_type(_resolve_placeholders(document))
    return app.openapi_schema


def _resolve_placeholders(node: Any) -> Any:
    """Replace placeholders for mechanisms in the OpenAPI document by schema references."""
    if isinstance(node, dict):
        if MECHANISM_PLACEHOLDER in node:
            return {"$ref": "#/components/schemas/Mechanism"}
        return {name: _resolve_placeholders(value) for name, value in node.items()}
    return [_resolve_placeholders(item) for item in node] if isinstance(node, list) else node


def _set_problem_media_type(document: dict[str, Any]) -> dict[str, Any]:
    """Set the media type of error responses in the OpenAPI document to problem+json."""
    for path in document["paths"].values():
        for operation in path.values():
            for status, answer in operation["responses"].items():
                if status >= "400" and "application/json" in answer.get("content", {}):
                    content = answer["content"]
                    content[error_responses.MEDIA_TYPE] = content.pop("application/json")
    return document
