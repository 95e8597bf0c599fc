"""Answers off the event loop, once per question.

Each request type knows its key (the meaning of the question, by canonical hash) and its answer.
Identical questions share one computation, also while it runs; answers are kept in a bounded
cache. Threads do the work: numpy releases the interpreter in its array loops, and the event loop
stays free.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from pydantic import BaseModel
from pydantic_core import to_json

from accountant_service import calculator, solver
from accountant_service.accountants import ACCOUNTANTS
from accountant_service.api import schemas, views
from accountant_service.api.problems import Problem
from accountant_service.mechanisms import DpSgd, canonical_form
from accountant_service.metrics import Metrics
from accountant_service.settings import Settings

Json = dict[str, Any]


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


class Answerer:
    """The cache, and the threads behind it.

    Args:
        settings: how much of each.
        metrics: where the work is counted.
    """

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._metrics = metrics
        self._cache: OrderedDict[Hashable, bytes] = OrderedDict()
        self._running: dict[Hashable, asyncio.Future[bytes]] = {}
        self._entries = settings.cache_entries
        self._waiting_max = settings.waiting_max
        self._threads = ThreadPoolExecutor(settings.worker_threads, "accounting")

    async def answer(self, path: str, ask: BaseModel) -> bytes:
        """The JSON answer to one question, from the cache if it was asked before.

        Raises:
            AccountingError: the question has no answer.
            Problem: 503, too many questions are waiting already.
        """
        key = (path, CALLS[path].key(ask))
        known = self._cache.get(key)
        if known is not None:
            self._metrics.cache_hits.labels(path).inc()
            self._cache.move_to_end(key)
            return known
        running = self._running.get(key)
        if running is None:
            running = self._start(key, partial(self._compute, path, ask))
        else:
            self._metrics.cache_hits.labels(path).inc()
        return await asyncio.shield(running)

    def _compute(self, path: str, ask: BaseModel) -> bytes:
        with self._metrics.computations.labels(path).time():
            return to_json(CALLS[path].answer(ask))

    def _start(self, key: Hashable, compute: Callable[[], bytes]) -> asyncio.Future[bytes]:
        if len(self._running) >= self._waiting_max:
            raise Problem(503, "too many questions are waiting; try again", {"Retry-After": "2"})
        loop = asyncio.get_running_loop()
        future = loop.run_in_executor(self._threads, compute)
        self._running[key] = future
        future.add_done_callback(partial(self._finish, key))
        return future

    def _finish(self, key: Hashable, future: asyncio.Future[bytes]) -> None:
        self._running.pop(key, None)
        if future.cancelled() or future.exception() is not None:
            return
        self._cache[key] = future.result()
        if len(self._cache) > self._entries:
            self._cache.popitem(last=False)

    def close(self) -> None:
        """Let running computations finish, start no more."""
        self._threads.shutdown(wait=True, cancel_futures=True)
