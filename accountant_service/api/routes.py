"""The computation endpoints, batch, methods and health: thin, all alike."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.params import Depends
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json, to_json
from starlette.responses import Response

from accountant_service.api import problems, schemas, views
from accountant_service.api.answering import CALLS, Answerer
from accountant_service.api.problems import Problem
from accountant_service.errors import AccountingError, TooExpensiveError

_BATCH_SECONDS_MAX: Final = 30.0
_DRAINED_BODIES: Final = 64


class _StrictRequest(Request):
    """A request whose body is bounded in size and depth and holds finite numbers only."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = _parse(await self._bounded_body())
        return self._json

    async def body(self) -> bytes:
        return await self._bounded_body()

    async def _bounded_body(self) -> bytes:
        if not hasattr(self, "_body"):
            seconds = self.app.state.settings.body_seconds_max
            try:
                async with asyncio.timeout(seconds):
                    self._body = await self._read(self.app.state.settings.body_bytes_max)
            except TimeoutError:
                raise Problem(
                    408, f"the body took more than {seconds:g} s", {"Connection": "close"}
                ) from None
        return self._body

    async def _read(self, limit: int) -> bytes:
        body, size = bytearray(), 0
        async for chunk in self.stream():
            size += len(chunk)
            if size <= limit:
                body += chunk
            elif size > limit * _DRAINED_BODIES:  # a client this far off gets a closed socket
                break
        if size > limit:  # read to its end, or the client could not read the answer
            raise Problem(413, f"a body may have at most {limit} bytes")
        return bytes(body)


def _parse(body: bytes) -> Any:
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Problem(400, f"the body is not JSON this service reads: {error}") from None


class StrictRoute(APIRoute):
    """A route that reads its body through `_StrictRequest`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap the request before FastAPI reads it."""
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(_StrictRequest(request.scope, request.receive))

        return strict


_PROBLEMS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": schemas.ProblemView, "description": description}
    for status, description in (
        (400, "The body is not JSON"),
        (413, "The body is too large"),
        (422, "The request is malformed, or the question has no answer: see `code`"),
        (503, "Too many questions are waiting"),
    )
}


def _answerer(request: Request) -> Answerer:
    found: Answerer = request.app.state.answerer
    return found


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def build_router(guards: Sequence[Depends] = ()) -> APIRouter:
    """Every computation route.

    Args:
        guards: what must pass before anything is computed.
    """
    router = APIRouter(route_class=StrictRoute)
    for path, call in CALLS.items():
        router.add_api_route(
            path,
            _endpoint(path, call.request),
            methods=["POST"],
            response_model=None,
            responses={200: {"model": call.answer_model}, **_PROBLEMS},
            summary=(call.request.__doc__ or "").strip(),
            operation_id=path.removeprefix("/v1/").replace("-", "_"),
            tags=["computation"],
            dependencies=guards,
        )
    router.add_api_route(
        "/v1/batch",
        batch,
        methods=["POST"],
        response_model=None,
        responses={200: {"model": schemas.BatchAnswer}, **_PROBLEMS},
        tags=["computation"],
        dependencies=guards,
    )
    router.add_api_route(
        "/v1/methods",
        methods,
        methods=["GET"],
        response_model=None,
        responses={200: {"model": schemas.MethodsAnswer}},
        tags=["computation"],
    )
    for path, endpoint in (("/healthz", health), ("/readyz", ready)):
        router.add_api_route(
            path,
            endpoint,
            response_model=schemas.HealthAnswer,
            operation_id=path[1:],
            tags=["health"],
        )
    return router


def _endpoint(path: str, model: type[BaseModel]) -> Callable[..., Awaitable[Response]]:
    async def endpoint(ask: Any, request: Request) -> Response:
        return _json(await _answerer(request).answer(path, ask))

    endpoint.__annotations__ = {"ask": model, "request": Request, "return": Response}
    return endpoint


async def batch(ask: schemas.BatchRequest, request: Request) -> Response:
    """Answer many questions in order, each with its own answer or problem."""
    deadline = time.monotonic() + _BATCH_SECONDS_MAX
    answerer = _answerer(request)
    results = [await _answer_item(answerer, item, deadline) for item in ask.requests]
    return _json(to_json({"results": results}))


async def _answer_item(
    answerer: Answerer, item: schemas.BatchItem, deadline: float
) -> dict[str, Any]:
    try:
        if item.path not in CALLS:
            raise Problem(404, "a batch answers " + ", ".join(CALLS))
        if time.monotonic() > deadline:
            limit = f"the batch has used its {_BATCH_SECONDS_MAX:g} s"
            raise TooExpensiveError(f"{limit}: send the rest in another one")
        ask = CALLS[item.path].request.model_validate(item.body)
        return {"status": 200, "body": json.loads(await answerer.answer(item.path, ask))}
    except (Problem, AccountingError, ValidationError) as error:
        problem = problems.of_error(error)
        return {"status": problem["status"], "body": problem}


async def methods() -> Response:
    """Every accounting method: what it is, where it comes from, what it needs and proves."""
    return _json(to_json(views.methods()))


async def health() -> schemas.HealthAnswer:
    """Whether the process answers."""
    return schemas.HealthAnswer(status="ok")


def ready(request: Request) -> schemas.HealthAnswer:
    """Whether the database answers and takes writes as well."""
    request.app.state.repository.ping()
    return schemas.HealthAnswer(status="ok")
