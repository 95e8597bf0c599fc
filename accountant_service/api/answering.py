"""Answers off the event loop, once per question.

Each request type knows its key (the meaning of the question, by canonical hash) and its answer.
Identical questions share one computation, also while it runs; answers are kept in a bounded
cache. Computation processes do the work, that of different askers in turns. A large body is read
there as well; it is recognised by its bytes.
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

from accountant_service import calculator, solver
from accountant_service.accountants import ACCOUNTANTS
from accountant_service.api import problems, schemas, views
from accountant_service.api.schemas import Unread
from accountant_service.api.turns import Limits, Turns
from accountant_service.mechanisms import DpSgd, canonical_form
from accountant_service.metrics import Metrics
from accountant_service.processes import Processes
from accountant_service.settings import Settings

Json = dict[str, Any]
Item = tuple[str, Json | Unread]  # of a batch: a path and a body
READ_HERE_BYTES: Final = 4096  # a larger body is read by a computation process
_BATCHES: Final = 16  # answered at the same time, of one address one after another
_NICENESS: Final = 15  # strangers' questions give way to all else


@dataclass(frozen=True, slots=True)
class Call:
    """One computation endpoint: what it takes, how it is identified, how it is answered."""

    request: type[BaseModel]
    answer_model: type[BaseModel]
    key: Callable[[Any], Hashable]
    answer: Callable[[Any], Json]


def _epsilon(ask: schemas.EpsilonRequest) -> Json:
    return views.guarantee(
        calculator.epsilon(
            ask.mechanism, ask.delta, ask.method, ask.neighbouring_relation, ask.tolerance
        )
    )


def _delta(ask: schemas.DeltaRequest) -> Json:
    return views.guarantee(
        calculator.delta(
            ask.mechanism, ask.epsilon, ask.method, ask.neighbouring_relation, ask.tolerance
        )
    )


_Solver = Callable[[DpSgd, solver.Target], solver.Solution]


def _solve(solve: _Solver, ask: schemas._Run) -> Json:
    target = solver.Target(
        ACCOUNTANTS[ask.method], ask.neighbouring_relation, ask.epsilon, ask.delta
    )
    return views.solution(ask.solved_for, solve(ask.run(), target))


def _compare(ask: schemas.CompareRequest) -> Json:
    return views.comparison(
        calculator.compare(
            ask.mechanism, ask.delta, ask.methods, ask.neighbouring_relation, ask.tolerance
        )
    )


def _curve(ask: schemas.CurveRequest) -> Json:
    assert isinstance(ask.mechanism, DpSgd)
    return views.curves(
        *calculator.curve(
            ask.mechanism, ask.delta, ask.methods, ask.points, ask.neighbouring_relation
        )
    )


def _trade_off(ask: schemas.TradeOffRequest) -> Json:
    found = calculator.trade_off(ask.mechanism, ask.prior, ask.points, ask.neighbouring_relation)
    return views.trade_off(found, ask.prior)


def _meaning(ask: BaseModel) -> Hashable:
    """The question with its mechanism replaced by what it means."""
    return tuple(
        canonical_form(value).hash if name == "mechanism" else _hashable(value)
        for name, value in ask
    )


def _run_meaning(ask: schemas.CurveRequest) -> Hashable:
    """A curve also depends on how a run is cut into steps."""
    return ask.mechanism, ask.delta, tuple(ask.methods), ask.points, ask.neighbouring_relation


def _hashable(value: Any) -> Hashable:
    return tuple(value) if isinstance(value, list) else value


CALLS: Final[Mapping[str, Call]] = {
    "/v1/epsilon": Call(schemas.EpsilonRequest, schemas.GuaranteeView, _meaning, _epsilon),
    "/v1/delta": Call(schemas.DeltaRequest, schemas.GuaranteeView, _meaning, _delta),
    "/v1/noise-multiplier": Call(
        schemas.NoiseMultiplierRequest,
        schemas.NoiseMultiplierAnswer,
        _meaning,
        partial(_solve, solver.noise_multiplier),
    ),
    "/v1/steps": Call(
        schemas.StepsRequest, schemas.StepsAnswer, _meaning, partial(_solve, solver.steps)
    ),
    "/v1/sample-rate": Call(
        schemas.SampleRateRequest,
        schemas.SampleRateAnswer,
        _meaning,
        partial(_solve, solver.sample_rate),
    ),
    "/v1/compare": Call(schemas.CompareRequest, schemas.CompareAnswer, _meaning, _compare),
    "/v1/curve": Call(schemas.CurveRequest, schemas.CurveAnswer, _run_meaning, _curve),
    "/v1/trade-off": Call(schemas.TradeOffRequest, schemas.TradeOffAnswer, _meaning, _trade_off),
}


def _read(path: str, unread: Unread) -> Any:
    """The question in a body that the serving process left unread."""
    return problems.read(CALLS[path].request, unread.raw)


def compute(path: str, ask: BaseModel | Unread) -> bytes:
    """The JSON answer to one question: what a computation process runs."""
    call = CALLS[path]
    return to_json(call.answer(_read(path, ask) if isinstance(ask, Unread) else ask))


def split_batch(raw: bytes) -> list[Item]:
    """The questions of a batch, the large ones as bytes."""
    asked = problems.read(schemas.BatchRequest, raw)
    return [(item.path, _small_or_unread(item.body)) for item in asked.requests]


def _small_or_unread(body: Json) -> Json | Unread:
    text = to_json(body)
    return body if len(text) <= READ_HERE_BYTES else Unread(text)


class _Cache:
    """The latest answers, bounded in number and size."""

    def __init__(self, entries: int, size: int) -> None:
        self._entries, self._size = entries, size
        self._answers: OrderedDict[Hashable, bytes] = OrderedDict()
        self._used = 0

    def find(self, key: Hashable) -> bytes | None:
        known = self._answers.get(key)
        if known is not None:
            self._answers.move_to_end(key)
        return known

    def keep(self, key: Hashable, answer: bytes) -> None:
        self._used += len(answer) - len(self._answers.pop(key, b""))
        self._answers[key] = answer
        while len(self._answers) > self._entries or self._used > self._size:
            _, dropped = self._answers.popitem(last=False)
            self._used -= len(dropped)


class _Running:
    """A computation, and how many wait for it."""

    def __init__(self) -> None:
        self.task: asyncio.Task[bytes]
        self.waiting = 0
        self.begun = False


class Answerer:
    """The cache, and the computation processes behind it.

    Args:
        settings: how much of each.
        metrics: where the work is counted.
    """

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._metrics = metrics
        self._cache = _Cache(settings.cache_entries, settings.cache_bytes_max)
        self._running: dict[Hashable, _Running] = {}
        count, waiting = settings.computation_processes, settings.waiting_max
        self._processes = Processes(count, settings.computation_seconds_max, _NICENESS)
        limits = Limits(count, count, waiting, waiting // 2)
        self._turns = Turns(limits, "too many questions are waiting; try again")
        batches = Limits(_BATCHES, 1, _BATCHES, _BATCHES // 2)
        self.batches = Turns(batches, "too many batches are waiting; try again")

    def prepare(self) -> None:
        """Import what computations need, in the background."""
        self._processes.prepare()

    def known(self, path: str, ask: BaseModel | Unread) -> bytes | None:
        """The answer to a question that was asked before."""
        return self._known(_key(path, ask))

    def _known(self, key: tuple[str, Hashable]) -> bytes | None:
        answer = self._cache.find(key)
        if answer is not None:
            self._metrics.cache_hits.labels(key[0]).inc()
        return answer

    async def answer(self, who: str, path: str, ask: BaseModel | Unread) -> bytes:
        """The JSON answer to one question, from the cache if it was asked before.

        A computation that nobody waits for any more is not begun; once begun it is finished.

        Args:
            who: asks: questions of different askers take turns.
            path: of the endpoint.
            ask: its body.

        Raises:
            AccountingError: the question has no answer.
            Problem: 503, too many questions are waiting already.
        """
        key = _key(path, ask)
        known = self._known(key)
        if known is not None:
            return known
        running = self._running.get(key)
        if running is None:
            running = self._start(key, who, path, ask)
        else:
            self._metrics.cache_hits.labels(path).inc()
        return await self._wait(key, running)

    async def _wait(self, key: Hashable, running: _Running) -> bytes:
        running.waiting += 1
        try:
            return await asyncio.shield(running.task)
        finally:
            running.waiting -= 1
            if not running.waiting and not running.begun and not running.task.done():
                self._running.pop(key, None)
                running.task.cancel()

    def _start(self, key: Hashable, who: str, path: str, ask: BaseModel | Unread) -> _Running:
        running = self._running[key] = _Running()
        running.task = asyncio.create_task(self._compute(running, who, path, ask))
        running.task.add_done_callback(partial(self._finish, key, running))
        return running

    async def _compute(
        self, running: _Running, who: str, path: str, ask: BaseModel | Unread
    ) -> bytes:
        async with self._turns.turn(who):
            running.begun = True
            with self._metrics.computations.labels(path).time():
                answer: bytes = await self._processes.run(compute, path, ask)
        return answer

    def _finish(self, key: Hashable, running: _Running, task: asyncio.Task[bytes]) -> None:
        if self._running.get(key) is running:
            del self._running[key]
        if not task.cancelled() and task.exception() is None:
            self._cache.keep(key, task.result())

    async def split(self, who: str, raw: bytes) -> list[Item]:
        """The questions of a large batch."""
        async with self._turns.turn(who):
            found: list[Item] = await self._processes.run(split_batch, raw)
        return found

    async def read(self, who: str, model: type[BaseModel], raw: bytes) -> Any:
        """A large body, read by a computation process."""
        async with self._turns.turn(who):
            return await self._processes.run(problems.read, model, raw)

    def close(self) -> None:
        """Kill the computation processes."""
        self._processes.close()


def _key(path: str, ask: BaseModel | Unread) -> tuple[str, Hashable]:
    if isinstance(ask, Unread):
        return path, hashlib.sha256(ask.raw).digest()
    return path, CALLS[path].key(ask)
