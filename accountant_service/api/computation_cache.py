"""The computation endpoints' cache and the computation processes behind it.

A question is the body of one request. Its cache key is its meaning: the canonical hash of its
mechanism and its other fields. Identical questions share one computation, even while it runs, and
the answers are kept in a bounded cache. Computation processes do the work; clients take turns.
They also parse large bodies, whose cache key is the hash of their bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import to_json

from accountant_service import calculator, importing, planner, solver
from accountant_service.api import plan_schemas, problems, schemas, views
from accountant_service.api.fair_queue import FairQueue, QueueLimits
from accountant_service.api.schemas import UnreadBody
from accountant_service.computation_processes import ProcessPool
from accountant_service.mechanisms import DpSgd, canonical_form
from accountant_service.metrics import Metrics
from accountant_service.settings import Settings

Json = dict[str, Any]
BatchedRequest = tuple[str, Json | UnreadBody]  # path and body
PARSED_HERE_BYTES_MAX: Final = 4096  # computation processes parse larger bodies
_CONCURRENT_BATCHES: Final = 16  # at most one of each client address
_NICENESS: Final = 15  # computations give way to everything else


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A computation endpoint: its request and answer models, its cache key and its function.

    Attributes:
        request: the model of its questions.
        answer_model: the model of its answers.
        key: returns the cache key of a question.
        answer: computes the answer to a question.
    """

    request: type[BaseModel]
    answer_model: type[BaseModel]
    key: Callable[[Any], Hashable]
    answer: Callable[[Any], BaseModel]


def _compute_epsilon(question: schemas.EpsilonRequest) -> schemas.GuaranteeView:
    """Answer a request for ε at a given δ."""
    return views.guarantee(
        calculator.epsilon(
            question.mechanism,
            question.delta,
            question.method,
            question.neighbouring_relation,
            question.tolerance,
        )
    )


def _compute_delta(question: schemas.DeltaRequest) -> schemas.GuaranteeView:
    """Answer a request for δ at a given ε."""
    return views.guarantee(
        calculator.delta(
            question.mechanism,
            question.epsilon,
            question.method,
            question.neighbouring_relation,
            question.tolerance,
        )
    )


def _solve(
    solve: Callable[[DpSgd, solver.SolverTarget], solver.Solution],
    view: Callable[[solver.Solution], BaseModel],
    question: schemas._RunRequest,
) -> BaseModel:
    """Solve for the unknown parameter of a run, and return the solution as an API answer."""
    return view(solve(question.run(), question.target()))


def _compare(question: schemas.CompareRequest) -> schemas.CompareAnswer:
    """Answer a request to compare accounting methods."""
    return views.comparison(
        calculator.compare(
            question.mechanism,
            question.delta,
            question.methods,
            question.neighbouring_relation,
            question.tolerance,
        )
    )


def _compute_curve(question: schemas.CurveRequest) -> schemas.CurveAnswer:
    """Answer a request for ε after each of several step counts."""
    assert isinstance(question.mechanism, DpSgd)
    return views.curves(
        *calculator.curve(
            question.mechanism,
            question.delta,
            question.methods,
            question.points,
            question.neighbouring_relation,
        )
    )


def _compute_trade_off(question: schemas.TradeOffRequest) -> schemas.TradeOffAnswer:
    """Answer a request for the trade-off curve of the best membership attacker."""
    found = calculator.trade_off(
        question.mechanism, question.prior, question.points, question.neighbouring_relation
    )
    return views.trade_off(found, question.prior)


def _plan(question: plan_schemas.PlanRequest) -> plan_schemas.PlanAnswer:
    """Answer a request to plan a run within a budget and a compute limit."""
    goal = question.goal()
    found = planner.plan(goal, question.samplings(), question.batches(), question.current())
    return views.plan(found, goal)


def _import(question: schemas.ImportRequest) -> schemas.ImportAnswer:
    """Answer a request to import a document of another tool."""
    return views.imported(importing.account_for(question.read()))


def _import_cache_key(question: schemas.ImportRequest) -> Hashable:
    """Return the cache key of an imported document: the hash of the request."""
    return hashlib.sha256(to_json(question)).digest()


def _cache_key(question: BaseModel) -> Hashable:
    """Return the cache key of a request: its fields, with the mechanism's canonical hash."""
    return tuple(
        canonical_form(value).hash if name == "mechanism" else _to_hashable(value)
        for name, value in question
    )


def _curve_cache_key(question: schemas.CurveRequest) -> Hashable:
    """Return the cache key of a curve: the mechanism's hash, and how it divides into steps."""
    return (
        question.mechanism,
        question.delta,
        tuple(question.methods),
        question.points,
        question.neighbouring_relation,
    )


def _to_hashable(value: Any) -> Hashable:
    """Return a list as a tuple, and any other value as it is."""
    return tuple(value) if isinstance(value, list) else value


ENDPOINTS: Final[Mapping[str, Endpoint]] = {
    "/v1/epsilon": Endpoint(
        schemas.EpsilonRequest, schemas.GuaranteeView, _cache_key, _compute_epsilon
    ),
    "/v1/delta": Endpoint(schemas.DeltaRequest, schemas.GuaranteeView, _cache_key, _compute_delta),
    "/v1/noise-multiplier": Endpoint(
        schemas.NoiseMultiplierRequest,
        schemas.NoiseMultiplierAnswer,
        _cache_key,
        partial(_solve, solver.noise_multiplier, views.noise_multiplier),
    ),
    "/v1/steps": Endpoint(
        schemas.StepsRequest,
        schemas.StepsAnswer,
        _cache_key,
        partial(_solve, solver.steps, views.steps),
    ),
    "/v1/sample-rate": Endpoint(
        schemas.SampleRateRequest,
        schemas.SampleRateAnswer,
        _cache_key,
        partial(_solve, solver.sample_rate, views.sample_rate),
    ),
    "/v1/compare": Endpoint(schemas.CompareRequest, schemas.CompareAnswer, _cache_key, _compare),
    "/v1/curve": Endpoint(
        schemas.CurveRequest, schemas.CurveAnswer, _curve_cache_key, _compute_curve
    ),
    "/v1/trade-off": Endpoint(
        schemas.TradeOffRequest, schemas.TradeOffAnswer, _cache_key, _compute_trade_off
    ),
    "/v1/plan": Endpoint(plan_schemas.PlanRequest, plan_schemas.PlanAnswer, _cache_key, _plan),
    "/v1/import": Endpoint(schemas.ImportRequest, schemas.ImportAnswer, _import_cache_key, _import),
}


def compute(path: str, question: BaseModel | UnreadBody) -> bytes:
    """Return the JSON answer to a question; it runs in a computation process."""
    endpoint = ENDPOINTS[path]
    if isinstance(question, UnreadBody):
        question = problems.read_body(endpoint.request, question.raw)
    return to_json(endpoint.answer(question))


def split_batch(raw: bytes) -> list[BatchedRequest]:
    """Return the requests of a batch, large bodies unparsed; it runs in a computation process."""
    batch = problems.read_body(schemas.BatchRequest, raw)
    return [(item.path, _leave_unread_if_large(item.body)) for item in batch.requests]


def _leave_unread_if_large(body: Json) -> Json | UnreadBody:
    """Return a small JSON body unchanged, and a large one as bytes to parse later."""
    text = to_json(body)
    return body if len(text) <= PARSED_HERE_BYTES_MAX else UnreadBody(text)


class _AnswerCache:
    """A least-recently-used cache of answers, limited in number and in bytes."""

    def __init__(self, entries: int, size: int) -> None:
        self._entries, self._size = entries, size
        self._answers: OrderedDict[Hashable, bytes] = OrderedDict()
        self._used = 0

    def find(self, key: Hashable) -> bytes | None:
        """Return the answer stored for a key, or None."""
        known = self._answers.get(key)
        if known is not None:
            self._answers.move_to_end(key)
        return known

    def keep(self, key: Hashable, answer: bytes) -> None:
        """Store an answer; drop the least recently used answers beyond the limits."""
        self._used += len(answer) - len(self._answers.pop(key, b""))
        self._answers[key] = answer
        while len(self._answers) > self._entries or self._used > self._size:
            _, dropped = self._answers.popitem(last=False)
            self._used -= len(dropped)


class _RunningComputation:
    """A computation in progress and the number of requests that wait for it."""

    def __init__(self) -> None:
        self.task: asyncio.Task[bytes]
        self.waiting = 0
        self.started = False


class ComputationCache:
    """Answers questions from the cache, or by a computation process.

    Args:
        settings: sizes of the cache, the queue and the process pool.
        metrics: counts cache hits and computations.
    """

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._metrics = metrics
        self._cache = _AnswerCache(settings.cache_entries, settings.cache_bytes_max)
        self._running: dict[Hashable, _RunningComputation] = {}
        count, waiting = settings.computation_processes, settings.waiting_max
        self._processes = ProcessPool(count, settings.computation_seconds_max, _NICENESS)
        limits = QueueLimits(count, count, waiting, waiting // 2)
        self._turns = FairQueue(limits, "too many requests are waiting; try again later")
        batches = QueueLimits(_CONCURRENT_BATCHES, 1, _CONCURRENT_BATCHES, _CONCURRENT_BATCHES // 2)
        self.batches = FairQueue(batches, "too many batches are waiting; try again later")

    def preload(self) -> None:
        """Start importing the modules that computations need, in the background."""
        self._processes.preload()

    def find_cached(self, path: str, question: BaseModel | UnreadBody) -> bytes | None:
        """Return the cached answer to a question, or None."""
        return self._find_by_key(_make_cache_key(path, question))

    def _find_by_key(self, key: tuple[str, Hashable]) -> bytes | None:
        """Return the answer stored for a key, or None, and count a cache hit."""
        answer = self._cache.find(key)
        if answer is not None:
            self._metrics.cache_hits.labels(key[0]).inc()
        return answer

    async def answer(self, client: str, path: str, question: BaseModel | UnreadBody) -> bytes:
        """Return the JSON answer to one question, from the cache if it is there.

        A computation that no request waits for any more is not started. Once started it is
        finished.

        Args:
            client: who asks; the questions of different clients take turns.
            path: the path of the endpoint.
            question: the body of the request.

        Raises:
            AccountingError: the question has no answer.
            Problem: 503, too many questions are waiting.
        """
        key = _make_cache_key(path, question)
        cached = self._find_by_key(key)
        if cached is not None:
            return cached
        running = self._running.get(key)
        if running is None:
            running = self._start_computation(key, client, path, question)
        else:
            self._metrics.cache_hits.labels(path).inc()
        return await self._wait_for(key, running)

    async def _wait_for(self, key: Hashable, running: _RunningComputation) -> bytes:
        """Wait for a shared computation; cancel it if no one else waits and it has not started."""
        running.waiting += 1
        try:
            return await asyncio.shield(running.task)
        finally:
            running.waiting -= 1
            if not running.waiting and not running.started and not running.task.done():
                self._running.pop(key, None)
                running.task.cancel()

    def _start_computation(
        self, key: Hashable, client: str, path: str, question: BaseModel | UnreadBody
    ) -> _RunningComputation:
        """Start a computation that all requests with the same key share."""
        running = self._running[key] = _RunningComputation()
        running.task = asyncio.create_task(self._compute(running, client, path, question))
        running.task.add_done_callback(partial(self._keep_finished_answer, key, running))
        return running

    async def _compute(
        self, running: _RunningComputation, client: str, path: str, question: BaseModel | UnreadBody
    ) -> bytes:
        """Compute an answer in a computation process when it is the client's turn."""
        async with self._turns.turn(client):
            running.started = True
            with self._metrics.computations.labels(path).time():
                answer: bytes = await self._processes.run(compute, path, question)
        return answer

    def _keep_finished_answer(
        self, key: Hashable, running: _RunningComputation, task: asyncio.Task[bytes]
    ) -> None:
        """Remove an ended computation, and cache its answer if it succeeded."""
        if self._running.get(key) is running:
            del self._running[key]
        if not task.cancelled() and task.exception() is None:
            self._cache.keep(key, task.result())

    async def split_batch(self, client: str, raw: bytes) -> list[BatchedRequest]:
        """Parse a large batch in a computation process."""
        async with self._turns.turn(client):
            found: list[BatchedRequest] = await self._processes.run(split_batch, raw)
        return found

    async def read_body(self, client: str, model: type[BaseModel], raw: bytes) -> Any:
        """Parse a large body in a computation process."""
        async with self._turns.turn(client):
            return await self._processes.run(problems.read_body, model, raw)

    def close(self) -> None:
        """Kill the computation processes."""
        self._processes.close()


def _make_cache_key(path: str, question: BaseModel | UnreadBody) -> tuple[str, Hashable]:
    """Return the cache key of a question at an endpoint; an unparsed body is hashed."""
    if isinstance(question, UnreadBody):
        return path, hashlib.sha256(question.raw).digest()
    return path, ENDPOINTS[path].key(question)
