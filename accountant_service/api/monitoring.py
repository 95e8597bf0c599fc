"""What Prometheus reads: the metrics, and what is left of each budget for a key that may see it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as AnswerTimeoutError
from typing import Annotated, Any, Final

from fastapi import APIRouter, Header, Request
from prometheus_client import CONTENT_TYPE_LATEST, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from sqlalchemy import event
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from accountant_service.api.ledger_routes import authenticated
from accountant_service.errors import DatabaseAwayError
from accountant_service.ledger.keys import Scope, require, sees
from accountant_service.ledger.model import Dataset
from accountant_service.ledger.repository import KeyRecord, Repository
from accountant_service.metrics import Metrics

_DATASETS_MAX: Final = 1000
_SECONDS_MAX: Final = 3.0  # well below the ten after which Prometheus gives up

router = APIRouter(tags=["health"])


@router.get("/metrics", response_class=Response, include_in_schema=False)
async def metrics(
    request: Request, authorization: Annotated[str | None, Header(include_in_schema=False)] = None
) -> Response:
    """Every metric; with a key of scope `monitor` or `owner`, also what is left of each budget."""
    state = request.app.state
    key = None if authorization is None else await authenticated(request, authorization)
    if key is not None:
        require(key, Scope.MONITOR, Scope.OWNER)
    budgets = _Budgets(state.watcher, key)
    text = await run_in_threadpool(state.metrics.exposition, budgets)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


class Watcher:
    """Looks into the ledger for a scrape, and waits for no answer longer than a scrape may take.

    Args:
        repository: the ledger's.
        metrics: where its connections are counted from now on.
    """

    def __init__(self, repository: Repository, metrics: Metrics) -> None:
        self._repository = repository
        self._thread = ThreadPoolExecutor(1, "scrape")
        self._asked: Future[list[Dataset]] | None = None
        _count_connections(repository, metrics)

    def datasets(self) -> list[Dataset] | None:
        """The first datasets by name; None if the database takes no writes, or none in time."""
        if self._asked is None or self._asked.done():  # one question at a time, however often asked
            self._asked = self._thread.submit(self._look)
        try:
            return self._asked.result(_SECONDS_MAX)
        except (AnswerTimeoutError, DatabaseAwayError):
            return None

    def _look(self) -> list[Dataset]:
        self._repository.ping()
        with self._repository.reading() as reading:
            return reading.datasets(_DATASETS_MAX)

    def close(self) -> None:
        """Ask no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class _Budgets(Collector):
    """Whether the ledger can grant, and the budgets that a key may see."""

    def __init__(self, watcher: Watcher, key: KeyRecord | None) -> None:
        self._watcher, self._key = watcher, key

    def collect(self) -> Iterator[Metric]:
        datasets, key = self._watcher.datasets(), self._key
        yield GaugeMetricFamily(
            "accountant_ledger_up",
            "Whether the database answers and takes writes",
            value=float(datasets is not None),
        )
        if key is not None:
            yield from _families([each for each in datasets or [] if sees(key, each.name)])


def _families(datasets: list[Dataset]) -> Iterator[Metric]:
    epsilon = GaugeMetricFamily(
        "accountant_budget_epsilon", "The whole privacy budget of a dataset", labels=["dataset"]
    )
    taken = GaugeMetricFamily(
        "accountant_budget_taken_epsilon", "What is spent or held of it", labels=["dataset"]
    )
    left = GaugeMetricFamily(
        "accountant_budget_remaining_ratio",
        "The share of a budget that is neither spent nor held",
        labels=["dataset"],
    )
    for each in datasets:
        policy, balance = each.policy, each.balance
        epsilon.add_metric([each.name], policy.epsilon)
        taken.add_metric([each.name], policy.epsilon_of(balance.taken))
        left.add_metric([each.name], 1 - balance.taken / policy.budget if policy.budget else 0.0)
    yield from (epsilon, taken, left)


def _count_connections(repository: Repository, metrics: Metrics) -> None:
    """Follow the pool. A connection that is found dead comes back without having gone out."""
    engine = repository.engine
    out: set[Any] = set()

    def gone(_: Any, record: Any, __: Any) -> None:
        out.add(record)
        metrics.connections.inc()

    def back(_: Any, record: Any) -> None:
        if record in out:
            out.discard(record)
            metrics.connections.dec()

    event.listen(engine, "connect", lambda *_: metrics.connects.inc())
    event.listen(engine, "checkout", gone)
    event.listen(engine, "checkin", back)
