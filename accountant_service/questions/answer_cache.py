"""The computation endpoints' cache and the computation processes behind it.

A question is the body of one request. Its cache key is its meaning: the canonical hash of its
mechanism and its other fields. Identical questions share one computation, even while it runs, and
the answers are kept in a bounded cache. Computation processes do the work; clients take turns.
They also parse large bodies, whose cache key is the hash of their bytes.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable
from functools import partial
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import to_json

from accountant_service.computing.fair_queue import FairQueue, QueueLimits
from accountant_service.computing.fork_server import FORK_SERVER
from accountant_service.computing.processes import ProcessPool
from accountant_service.operations.metrics import Metrics
from accountant_service.operations.settings import Settings
from accountant_service.questions import PRELOADING, problems
from accountant_service.questions import models as schemas
from accountant_service.questions.models import UnreadBody
from accountant_service.questions.registry import compute, make_cache_key

Json = dict[str, Any]
BatchedRequest = tuple[str, Json | UnreadBody]  # path and body
PARSED_HERE_BYTES_MAX: Final = 4096  # computation processes parse larger bodies
_CONCURRENT_BATCHES: Final = 16  # at most one of each client address
_NICENESS: Final = 15  # computations give way to everything else


def split_batch(raw: bytes) -> list[BatchedRequest]:
    """Parse a batch's JSON into its requests; leave large bodies as bytes to parse later."""
    batch = problems.read_body(schemas.BatchRequest, raw)
    return [(item.path, _leave_unread_if_large(item.body)) for item in batch.requests]


def _leave_unread_if_large(body: Json) -> Json | UnreadBody:
    """Return a small JSON body unchanged, and a large one as bytes to parse later."""
    text = to_json(body)
    return body if len(text) <= PARSED_HERE_BYTES_MAX else UnreadBody(text)


class _AnswerCache:
    """A least-recently-used cache of answers, with limits on their number and total bytes."""

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
        """Store an answer; drop the least recently used ones beyond the limits."""
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
    """A cache of API answers; it computes missing answers in computation processes.

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
        FORK_SERVER.preload = PRELOADING
        self._processes.preload()

    def find_cached(self, path: str, question: BaseModel | UnreadBody) -> bytes | None:
        """Return the cached answer to a request, or None."""
        return self._find_by_key(make_cache_key(path, question))

    def _find_by_key(self, key: tuple[str, Hashable]) -> bytes | None:
        """Return the answer stored for a key, or None, and count a cache hit."""
        answer = self._cache.find(key)
        if answer is not None:
            self._metrics.cache_hits.labels(key[0]).inc()
        return answer

    async def answer(self, client: str, path: str, question: BaseModel | UnreadBody) -> bytes:
        """Return the JSON answer to one request, from the cache if it is there.

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
        key = make_cache_key(path, question)
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
        """Wait for a shared computation; cancel it if no other request waits for it."""
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
        """Compute an answer in another process, once the fair queue gives the client a turn."""
        async with self._turns.turn(client):
            running.started = True
            with self._metrics.computations.labels(path).time():
                answer: bytes = await self._processes.run(compute, path, question)
        return answer

    def _keep_finished_answer(
        self, key: Hashable, running: _RunningComputation, task: asyncio.Task[bytes]
    ) -> None:
        """Cache the answer of a computation that ended, if it succeeded."""
        if self._running.get(key) is running:
            del self._running[key]
        if not task.cancelled() and task.exception() is None:
            self._cache.keep(key, task.result())

    async def split_batch(self, client: str, raw: bytes) -> list[BatchedRequest]:
        """Parse a large batch of requests in a computation process."""
        async with self._turns.turn(client):
            found: list[BatchedRequest] = await self._processes.run(split_batch, raw)
        return found

    async def read_body(self, client: str, model: type[BaseModel], raw: bytes) -> Any:
        """Parse and validate a large body in a computation process."""
        async with self._turns.turn(client):
            return await self._processes.run(problems.read_body, model, raw)

    def close(self) -> None:
        """Kill the computation processes."""
        self._processes.close()
