"""The composition root: settings in, a FastAPI application out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.openapi.utils import get_openapi

from accountant_service import __version__, mechanisms
from accountant_service.api import ledger_routes, ledger_schemas, monitoring, problems
from accountant_service.api.access import Access, AddressLimit
from accountant_service.api.answering import Answerer
from accountant_service.api.async_ledger import AsyncLedger
from accountant_service.api.limits import Limiter
from accountant_service.api.routes import ROOM_BYTES, Room, build_router
from accountant_service.api.schemas import EXAMPLES, MECHANISM_PLACEHOLDER
from accountant_service.ledger.database import open_repository
from accountant_service.ledger.housekeeping import Housekeeping
from accountant_service.ledger.keys import Keys
from accountant_service.ledger.model import Kind
from accountant_service.ledger.service import Ledger
from accountant_service.metrics import Metrics
from accountant_service.settings import Settings
from accountant_service.web import installation as web

_DESCRIPTION = """
Privacy accounting for differentially private training. Every answer is a *guarantee*: a number,
whether it is proven, an estimate or refuted, the hypotheses it rests on, and wherever possible a
proved interval around the true value.
"""


def create_app(settings: Settings | None = None) -> FastAPI:
    """The service, ready to be served.

    Args:
        settings: from the environment by default.
    """
    settings = settings or Settings()
    metrics = Metrics(settings.metrics_directory)
    answerer = Answerer(settings, metrics)
    repository = open_repository(settings.database)
    watcher = monitoring.Watcher(repository, metrics)

    ledger, keys = Ledger(repository, _counting(metrics)), Keys(repository)
    async_ledger = AsyncLedger(ledger, keys, settings)

    closing = ExitStack()  # the last first
    housekeeping = Housekeeping(repository, settings.idempotency_days)
    for each in (repository, watcher, answerer, async_ledger, housekeeping):
        closing.callback(each.close)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        with closing:
            housekeeping.start()
            yield

    app = FastAPI(
        title="Privacy accountant",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,  # those pages load scripts from elsewhere; see `web.reference_page`
        redoc_url=None,
    )
    app.state.settings, app.state.metrics = settings, metrics
    app.state.answerer, app.state.watcher = answerer, watcher
    app.state.room = Room(ROOM_BYTES)
    app.state.repository, app.state.keys = repository, keys
    app.state.ledger, app.state.async_ledger = ledger, async_ledger
    guards = [] if settings.open_computation else [Depends(ledger_routes.may_compute)]
    app.include_router(build_router(guards))
    app.include_router(ledger_routes.router)
    app.include_router(monitoring.router)
    problems.install(app)
    web.install(app)
    _surround(app, settings)
    if settings.traces_endpoint is not None:
        from accountant_service import tracing  # an extra

        closing.callback(tracing.install(app, repository.engine))
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _surround(app: FastAPI, settings: Settings) -> None:
    """What stands around every route; what is added last is outermost."""
    app.state.key_limiter = Limiter(settings.rate_limit, settings.rate_burst)
    if settings.rate_limit:
        limiter = Limiter(settings.rate_limit, settings.rate_burst)
        app.add_middleware(AddressLimit, limiter=limiter)
    app.add_middleware(Access, metrics=app.state.metrics)


def _counting(metrics: Metrics) -> Callable[[Kind, int], None]:
    """Counts the ledger's writes."""

    def written(kind: Kind, steps: int) -> None:
        metrics.writes.labels(kind.value).inc()
        metrics.steps_granted.inc(steps)

    return written


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, with the mechanism tree as components of its own."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        components = document["components"]["schemas"]
        for name, example in (EXAMPLES | ledger_schemas.EXAMPLES).items():
            components[name].setdefault("examples", [example])
        components |= mechanisms.json_schema()
        app.openapi_schema = _with_problems(_with_references(document))
    return app.openapi_schema


def _with_references(node: Any) -> Any:
    """The document with each placeholder replaced by a reference to the mechanism schema."""
    if isinstance(node, dict):
        if MECHANISM_PLACEHOLDER in node:
            return {"$ref": "#/components/schemas/Mechanism"}
        return {name: _with_references(value) for name, value in node.items()}
    return [_with_references(item) for item in node] if isinstance(node, list) else node


def _with_problems(document: dict[str, Any]) -> dict[str, Any]:
    """The document with problems under the media type they are sent with."""
    for path in document["paths"].values():
        for operation in path.values():
            for status, answer in operation["responses"].items():
                if status >= "400" and "application/json" in answer.get("content", {}):
                    content = answer["content"]
                    content[problems.MEDIA_TYPE] = content.pop("application/json")
    return document
