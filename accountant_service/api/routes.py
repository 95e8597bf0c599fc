"""The computation endpoints, batch, methods and health: thin, all alike."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Annotated, Any, ClassVar, Final

from fastapi import APIRouter, Request
from fastapi.params import Depends
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from accountant_service.api import problems, schemas, views
from accountant_service.api.answering import CALLS, READ_HERE_BYTES, Answerer, Item
from accountant_service.api.problems import Problem
from accountant_service.api.schemas import Unread
from accountant_service.errors import TooExpensiveError
from accountant_service.settings import Settings

_LOG: Final = logging.getLogger(__name__)
_BATCH_SECONDS_MAX: Final = 30.0
_DRAINED_BODIES: Final = 64
_PIECE_BYTES: Final = 1 << 16
_PAUSE_SECONDS: Final = 0.005  # a batch of the largest size takes a fifth of a second longer
ROOM_BYTES: Final = 1 << 26  # for large bodies


class _StrictRequest(Request):
    """A request whose body is bounded in size and depth and holds finite numbers only.

    A large body is read by a computation process, where its work holds up no other request.
    """

    model: type[BaseModel] | None = None
    held = 0  # bytes of a large body, counted by the application's `Room`

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = await self._understood(await self._bounded_body())
        return self._json

    async def _understood(self, body: bytes) -> Any:
        if len(body) <= READ_HERE_BYTES or self.model is None:
            return problems.parse(body)
        return await _answerer(self).read(asker(self), self.model, body)

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
                self._hold(len(chunk) if size > READ_HERE_BYTES else 0)
                body += chunk
            elif size > limit * _DRAINED_BODIES:  # a client this far off gets a closed socket
                break
        if size > limit:  # read to its end, or the client could not read the answer
            raise Problem(413, f"a body may have at most {limit} bytes")
        return bytes(body)

    def _hold(self, size: int) -> None:
        self.app.state.room.take(size)
        self.held += size

    def let_go(self) -> None:
        """The body is not needed any more."""
        self.app.state.room.give_back(self.held)


class Room:
    """Memory for large bodies, however many connections send one.

    Args:
        size: bytes of all of them together.
    """

    def __init__(self, size: int) -> None:
        self._left = size

    def take(self, size: int) -> None:
        """Count bytes that have come.

        Raises:
            Problem: 503, there is no room for them.
        """
        if size > self._left:
            headers = {"Retry-After": "2", "Connection": "close"}
            raise Problem(503, "too many large bodies are coming in; try again", headers)
        self._left -= size

    def give_back(self, size: int) -> None:
        """Count bytes that are not needed any more."""
        self._left += size


class _UnreadRequest(_StrictRequest):
    """One whose large body is left to the computation process that answers it."""

    async def _understood(self, body: bytes) -> Any:
        return problems.parse(body) if len(body) <= READ_HERE_BYTES else Unread(body)


class StrictRoute(APIRoute):
    """A route that reads its body through `_StrictRequest`."""

    request_class: ClassVar[type[_StrictRequest]] = _StrictRequest

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap the request before FastAPI reads it."""
        handler = super().get_route_handler()
        model: Any = self.body_field.field_info.annotation if self.body_field else None

        async def strict(request: Request) -> Response:
            wrapped = self.request_class(request.scope, request.receive)
            wrapped.model = model
            try:
                return await handler(wrapped)
            finally:
                wrapped.let_go()

        return strict


class _ComputationRoute(StrictRoute):
    request_class = _UnreadRequest


async def while_connected(request: Request, answer: Coroutine[Any, Any, bytes]) -> bytes:
    """Wait for an answer, unless the client goes away.

    Raises:
        Problem: 499, it has gone; nobody reads this.
    """
    answered = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({answered, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            raise Problem(499, "the client has gone")
        return answered.result()
    finally:
        answered.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    """Return when the client has closed the connection; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def asker(request: Request) -> str:
    """Who asks, for taking turns: the address."""
    return request.client.host if request.client else "unknown"


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
    router = APIRouter(route_class=_ComputationRoute)
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
        answerer = _answerer(request)
        known = answerer.known(path, ask)
        if known is None:
            known = await while_connected(request, answerer.answer(asker(request), path, ask))
        return _json(known)

    question = Annotated[model, schemas.UNREAD_PASSES]  # type: ignore[valid-type]
    endpoint.__annotations__ = {"ask": question, "request": Request, "return": Response}
    return endpoint


async def batch(
    ask: Annotated[schemas.BatchRequest, schemas.UNREAD_PASSES], request: Request
) -> Response:
    """Answer many questions in order, each with its own answer or problem."""
    return _BatchResponse(_answerer(request), asker(request), ask, request.app.state.settings)


class _BatchResponse(StreamingResponse):
    """The answer to a batch, made while it is sent, once it is the asker's turn."""

    def __init__(
        self, answerer: Answerer, who: str, ask: schemas.BatchRequest | Unread, settings: Settings
    ) -> None:
        super().__init__((), media_type="application/json")
        self._answerer, self._who, self._ask = answerer, who, ask
        self._ahead, self._bytes_max = settings.computation_processes, settings.batch_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._answerer.batches.turn(self._who):
            items = await self._items()
            async with aclosing(self._results(items)) as results:
                self.body_iterator = _pieces(results)
                await super().__call__(scope, receive, send)

    async def _items(self) -> Sequence[Item]:
        if isinstance(self._ask, Unread):
            return await self._answerer.split(self._who, self._ask.raw)
        return [(item.path, item.body) for item in self._ask.requests]

    async def _results(self, items: Sequence[Item]) -> AsyncGenerator[bytes]:
        """Each item's result, until the time or the bytes of a batch are used up.

        Some items are answered ahead, as many as there are computation processes.
        """
        deadline, left = time.monotonic() + _BATCH_SECONDS_MAX, self._bytes_max
        missing = len(items)
        async with aclosing(self._answers(items)) as answers:
            async for answer in answers:
                left -= len(answer)
                missing -= 1
                yield answer
                if left <= 0 or time.monotonic() > deadline:
                    break
        limit = f"{_BATCH_SECONDS_MAX:g} s" if left > 0 else f"{self._bytes_max} bytes"
        error = TooExpensiveError(f"the batch has used its {limit}: send the rest in another one")
        refusal = _result_of(error)
        for _ in range(missing):
            yield refusal

    async def _answers(self, items: Sequence[Item]) -> AsyncGenerator[bytes]:
        """Each item's result."""
        running: deque[asyncio.Task[bytes]] = deque()
        try:
            for path, body in items:
                answer = _answer_item(self._answerer, self._who, path, body)
                running.append(asyncio.create_task(answer))
                if len(running) > self._ahead:
                    yield await running.popleft()
            while running:
                yield await running.popleft()
        finally:
            for task in running:
                task.cancel()


async def _pieces(answers: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The answer to a batch in pieces, each sent before the next is made.

    So no more than a piece waits in memory for a client that reads slowly or not at all. A pause
    after each leaves most of the event loop to others, also where all answers are known.
    """
    piece, separator = bytearray(b'{"results":['), b""
    async for answer in answers:
        piece += separator + answer
        separator = b","
        if len(piece) >= _PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
            await asyncio.sleep(_PAUSE_SECONDS)
    yield bytes(piece + b"]}")


async def _answer_item(answerer: Answerer, who: str, path: str, body: Any) -> bytes:
    try:
        if path not in CALLS:
            raise Problem(404, "a batch answers " + ", ".join(CALLS))
        ask = body if isinstance(body, Unread) else CALLS[path].request.model_validate(body)
        return b'{"status":200,"body":%b}' % await answerer.answer(who, path, ask)
    except Exception as error:
        return _result_of(error)


def _result_of(error: Exception) -> bytes:
    problem = problems.of_error(error)
    if problem["status"] == 500:
        _LOG.error("unexpected failure", exc_info=error)
    return to_json({"status": problem["status"], "body": problem})


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
