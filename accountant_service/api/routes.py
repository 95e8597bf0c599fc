"""Routes of the computation endpoints, of batches, methods and health checks."""

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

from accountant_service.api.client_networks import client_network
from accountant_service.api.static_documents import StaticDocument, StaticDocuments
from accountant_service.errors import TooExpensiveError
from accountant_service.operations.problem import Problem
from accountant_service.operations.settings import Settings
from accountant_service.questions import models as schemas
from accountant_service.questions import problems, views
from accountant_service.questions.answer_cache import (
    PARSED_HERE_BYTES_MAX,
    BatchedRequest,
    ComputationCache,
)
from accountant_service.questions.models import UnreadBody
from accountant_service.questions.registry import ENDPOINTS

_LOG: Final = logging.getLogger(__name__)
_BATCH_SECONDS_MAX: Final = 30.0
_DRAIN_FACTOR: Final = 16  # of the limit; a larger body's client may see a reset and no answer
_CHUNK_BYTES: Final = 1 << 16
_PAUSE_SECONDS: Final = 0.005  # adds a fifth of a second to a batch of the largest size
BODY_MEMORY_BYTES: Final = 1 << 26  # for all large bodies together


class _StrictRequest(Request):
    """A request whose body is JSON of limited size with finite numbers only.

    A computation process parses large bodies, so that they delay no other request.
    """

    model: type[BaseModel] | None = None
    held_bytes = 0  # of a large body, taken from the application's `BodyMemory`

    async def json(self) -> Any:
        """Return the parsed body."""
        if not hasattr(self, "_json"):
            self._json = await self._parse(await self._read_body())
        return self._json

    async def _parse(self, body: bytes) -> Any:
        """Parse a body as JSON, in a computation process if it is large."""
        if len(body) <= PARSED_HERE_BYTES_MAX or self.model is None:
            return problems.parse_json(body)
        return await computations_of(self).read_body(client_address(self), self.model, body)

    async def body(self) -> bytes:
        """Return the bytes of the body."""
        return await self._read_body()

    async def _read_body(self) -> bytes:
        """Read the body once, within the time limit."""
        if not hasattr(self, "_body"):
            seconds = self.app.state.settings.body_seconds_max
            try:
                async with asyncio.timeout(seconds):
                    self._body = await self._read_stream(self.app.state.settings.body_bytes_max)
            except TimeoutError:
                raise Problem(
                    408,
                    f"the body took longer than {seconds:g} s to arrive",
                    {"Connection": "close"},
                ) from None
        return self._body

    async def _read_stream(self, limit: int) -> bytes:
        """Read the body up to a limit of bytes; raise if it is larger."""
        body, size = bytearray(), 0
        async for chunk in self.stream():
            size += len(chunk)
            if size <= limit:
                self._reserve_memory(len(chunk) if size > PARSED_HERE_BYTES_MAX else 0)
                body += chunk
            elif size > limit * _DRAIN_FACTOR:  # the client gets a closed socket
                break
        if size > limit:  # the body was read to its end, so the client can read the answer
            raise Problem(413, f"the body is larger than {limit} bytes")
        return bytes(body)

    def _reserve_memory(self, size: int) -> None:
        """Reserve memory for this body, out of the shared limit, until the request ends."""
        self.app.state.body_memory.take(size)
        self.held_bytes += size

    def release_memory(self) -> None:
        """Return the memory of this request's body to the shared limit."""
        self.app.state.body_memory.give_back(self.held_bytes)


class BodyMemory:
    """A limit on the memory that all large request bodies use together.

    Args:
        size: bytes.
    """

    def __init__(self, size: int) -> None:
        self._left = size

    def take(self, size: int) -> None:
        """Reserve memory for received bytes; raise if the limit is reached.

        Raises:
            Problem: 503, the limit is reached.
        """
        if size > self._left:
            headers = {"Retry-After": "2", "Connection": "close"}
            raise Problem(
                503, "too many large request bodies are arriving; try again later", headers
            )
        self._left -= size

    def give_back(self, size: int) -> None:
        """Release reserved memory."""
        self._left += size


class _UnreadRequest(_StrictRequest):
    """A request whose large body stays unparsed until a computation process answers it."""

    async def _parse(self, body: bytes) -> Any:
        """Parse a small body as JSON, and return a large one unparsed."""
        return problems.parse_json(body) if len(body) <= PARSED_HERE_BYTES_MAX else UnreadBody(body)


class StrictRoute(APIRoute):
    """A route that reads request bodies through `_StrictRequest`."""

    request_class: ClassVar[type[_StrictRequest]] = _StrictRequest

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a handler that converts each request to `request_class`, which checks its body."""
        handler = super().get_route_handler()
        model: Any = self.body_field.field_info.annotation if self.body_field else None

        async def handle_strict_request(request: Request) -> Response:
            """Convert the request to `request_class`, which checks its body, and handle it."""
            wrapped = self.request_class(request.scope, request.receive)
            wrapped.model = model
            try:
                return await self.answer_directly(wrapped) or await handler(wrapped)
            finally:
                wrapped.release_memory()

        return handle_strict_request

    async def answer_directly(self, request: Request) -> Response | None:  # noqa: ARG002
        """Return the response to an ordinary request, where FastAPI takes too long to read it.

        None: FastAPI reads the request, and words what is wrong with it.
        """
        return None


class _ComputationRoute(StrictRoute):
    """A route of a computation endpoint; its large bodies stay unparsed."""

    request_class = _UnreadRequest


async def cancel_on_disconnect(request: Request, answer: Coroutine[Any, Any, bytes]) -> bytes:
    """Wait for an answer, and cancel it if the client disconnects.

    Raises:
        Problem: 499, the client has disconnected; nobody reads this.
    """
    answered = asyncio.ensure_future(answer)
    disconnected = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({answered, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not answered.done():
            raise Problem(499, "the client has disconnected")
        return answered.result()
    finally:
        answered.cancel()
        disconnected.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    """Return once the client has closed the connection. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def client_address(request: Request) -> str:
    """Return the client's address or network, which identifies the client in the fair queues."""
    return client_network(request.client.host) if request.client else "unknown"


_PROBLEMS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": schemas.ProblemView, "description": description}
    for status, description in (
        (400, "The body is not JSON"),
        (413, "The body is too large"),
        (422, "The request is malformed or has no answer: see `code`"),
        (503, "Too many requests are waiting"),
    )
}


def computations_of(request: Request) -> ComputationCache:
    """Return the application's computation cache."""
    found: ComputationCache = request.app.state.computations
    return found


def _json_response(body: bytes) -> Response:
    """Return a response that holds encoded JSON."""
    return Response(body, media_type="application/json")


def build_router(dependencies: Sequence[Depends] = ()) -> APIRouter:
    """Build the routes of computations, batches, methods and health checks.

    Args:
        dependencies: run before a computation; they raise to refuse it.
    """
    router = APIRouter(route_class=_ComputationRoute)
    for path, endpoint in ENDPOINTS.items():
        router.add_api_route(
            path,
            _make_handler(path, endpoint.request),
            methods=["POST"],
            response_model=None,
            responses={200: {"model": endpoint.answer_model}, **_PROBLEMS},
            summary=(endpoint.request.__doc__ or "").strip(),
            operation_id=path.removeprefix("/v1/").replace("-", "_"),
            tags=["computation"],
            dependencies=dependencies,
        )
    router.add_api_route(
        "/v1/batch",
        batch,
        methods=["POST"],
        response_model=None,
        responses={200: {"model": schemas.BatchAnswer}, **_PROBLEMS},
        tags=["computation"],
        dependencies=dependencies,
    )
    router.add_api_route(
        "/v1/methods",
        methods,
        methods=["GET"],
        response_model=None,
        responses={200: {"model": schemas.MethodsAnswer}},
        tags=["computation"],
    )
    for path, check in (("/healthz", health), ("/readyz", ready)):
        router.add_api_route(
            path,
            check,
            response_model=schemas.HealthAnswer,
            operation_id=path[1:],
            tags=["health"],
        )
    return router


def _make_handler(path: str, model: type[BaseModel]) -> Callable[..., Awaitable[Response]]:
    """Return the handler of a computation endpoint, which validates bodies with `model`."""

    async def answer_question(question: Any, request: Request) -> Response:
        computations = computations_of(request)
        answer = computations.find_cached(path, question)
        if answer is None:
            answer = await cancel_on_disconnect(
                request, computations.answer(client_address(request), path, question)
            )
        return _json_response(answer)

    body = Annotated[model, schemas.ALLOW_UNREAD_BODY]  # type: ignore[valid-type]
    answer_question.__annotations__ = {"question": body, "request": Request, "return": Response}
    return answer_question


async def batch(
    body: Annotated[schemas.BatchRequest, schemas.ALLOW_UNREAD_BODY], request: Request
) -> Response:
    """Answer up to 1 000 requests in order, each with its own answer or problem."""
    return _BatchResponse(
        computations_of(request), client_address(request), body, request.app.state.settings
    )


class _BatchResponse(StreamingResponse):
    """The streamed response to a batch, computed while it is sent."""

    def __init__(
        self,
        computations: ComputationCache,
        client: str,
        batch: schemas.BatchRequest | UnreadBody,
        settings: Settings,
    ) -> None:
        super().__init__((), media_type="application/json")
        self._computations, self._client, self._batch = computations, client, batch
        self._concurrent, self._bytes_max = settings.computation_processes, settings.batch_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, once the fair queue gives the client a turn."""
        async with self._computations.batches.turn(self._client):
            items = await self._items()
            async with aclosing(self._limited_results(items)) as results:
                self.body_iterator = _chunks(results)
                await super().__call__(scope, receive, send)

    async def _items(self) -> Sequence[BatchedRequest]:
        """Return the path and body of each request in the batch."""
        if isinstance(self._batch, UnreadBody):
            return await self._computations.split_batch(self._client, self._batch.raw)
        return [(item.path, item.body) for item in self._batch.requests]

    async def _limited_results(self, items: Sequence[BatchedRequest]) -> AsyncGenerator[bytes]:
        """Yield each request's result; past the batch's limits, an error answer for each.

        The limits are the seconds and the bytes of a batch.
        """
        deadline, bytes_left = time.monotonic() + _BATCH_SECONDS_MAX, self._bytes_max
        missing = len(items)
        async with aclosing(self._answers(items)) as answers:
            async for answer in answers:
                bytes_left -= len(answer)
                missing -= 1
                yield answer
                if bytes_left <= 0 or time.monotonic() > deadline:
                    break
        limit = f"{_BATCH_SECONDS_MAX:g} s" if bytes_left > 0 else f"{self._bytes_max} bytes"
        error = TooExpensiveError(
            f"the batch has reached its limit of {limit}: send the rest in another batch"
        )
        refusal = _encode_problem(error)
        for _ in range(missing):
            yield refusal

    async def _answers(self, items: Sequence[BatchedRequest]) -> AsyncGenerator[bytes]:
        """Yield each request's JSON result in order, while later ones are computed."""
        running: deque[asyncio.Task[bytes]] = deque()
        try:
            for path, body in items:
                answer = _encode_answer(self._computations, self._client, path, body)
                running.append(asyncio.create_task(answer))
                if len(running) > self._concurrent:
                    yield await running.popleft()
            while running:
                yield await running.popleft()
        finally:
            for task in running:
                task.cancel()


async def _chunks(answers: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield a batch's results in chunks of JSON; build a chunk only when the last one was sent.

    At most one chunk waits in memory for a client that reads slowly or not at all. A pause after
    each chunk leaves the event loop to other requests, even if all answers are cached.
    """
    chunk, separator = bytearray(b'{"results":['), b""
    async for answer in answers:
        chunk += separator + answer
        separator = b","
        if len(chunk) >= _CHUNK_BYTES:
            yield bytes(chunk)
            chunk.clear()
            await asyncio.sleep(_PAUSE_SECONDS)
    yield bytes(chunk + b"]}")


async def _encode_answer(
    computations: ComputationCache, client: str, path: str, body: Any
) -> bytes:
    """Return the answer to one request of a batch, or an error answer, as JSON."""
    try:
        if path not in ENDPOINTS:
            raise Problem(404, "a batch can hold requests to " + ", ".join(ENDPOINTS))
        question = (
            body if isinstance(body, UnreadBody) else ENDPOINTS[path].request.model_validate(body)
        )
        return b'{"status":200,"body":%b}' % await computations.answer(client, path, question)
    except Exception as error:
        return _encode_problem(error)


def _encode_problem(error: Exception) -> bytes:
    """Return an error as the JSON result of one request of a batch."""
    problem = problems.of_error(error)
    if problem["status"] == 500:
        _LOG.error("unexpected failure", exc_info=error)
    return to_json(schemas.BatchResult.model_construct(status=problem["status"], body=problem))


async def methods(request: Request) -> Response:
    """List the accounting methods: title, source, what each needs and what it proves."""
    documents: StaticDocuments = request.app.state.static_documents
    return await documents.respond(
        request,
        request.url.path,
        lambda: StaticDocument(to_json(views.methods()), "application/json"),
    )


async def health() -> schemas.HealthAnswer:
    """Check that the process answers."""
    return schemas.HealthAnswer(status="ok")


async def ready(request: Request) -> schemas.HealthAnswer:
    """Check that the database answers and accepts writes."""
    await request.app.state.database_check()  # shared: with SQLite it takes the writer's lock
    return schemas.HealthAnswer(status="ok")
