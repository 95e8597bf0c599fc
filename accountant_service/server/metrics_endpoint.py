"""The `/metrics` endpoint: metrics of the service, and budgets that the key may see."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as AnswerTimeoutError
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Header, Request
from prometheus_client import CONTENT_TYPE_LATEST, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from sqlalchemy import event
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import State
from starlette.responses import Response

from accountant_service.api.ledger_routes import authenticate
from accountant_service.api.shared_call import SharedCall
from accountant_service.ledger.api_keys import Scope, is_visible, require_scope
from accountant_service.ledger.errors import DatabaseAwayError, StoredRowError
from accountant_service.ledger.key_record import KeyRecord
from accountant_service.ledger.repository import Repository, now
from accountant_service.ledger.rules import Dataset
from accountant_service.operations.metrics import Metrics
from accountant_service.operations.settings import parse_shares

_DATASETS_MAX: Final = 1000
_KEYS_MAX: Final = 1000
_SECONDS_MAX: Final = 3.0  # well below the 10 s timeout of Prometheus

router = APIRouter(tags=["health"])


@router.get("/metrics", response_class=Response, include_in_schema=False)
async def metrics(
    request: Request, authorization: Annotated[str | None, Header(include_in_schema=False)] = None
) -> Response:
    """Return all metrics; with a key of scope `monitor` or `owner`, also the budgets."""
    if authorization is None:  # anyone may ask, so those who ask at the same time share an answer
        text = await request.app.state.public_metrics()
    else:
        key = await authenticate(request, authorization)
        require_scope(key, Scope.MONITOR, Scope.OWNER)
        text = await run_in_threadpool(_expose_metrics, request.app.state, key)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def share_public_metrics(state: State) -> SharedCall[bytes]:
    """Return the call that writes the metrics for all who ask without a key."""
    return SharedCall(partial(run_in_threadpool, _expose_metrics, state, None))


def _expose_metrics(state: State, key: KeyRecord | None) -> bytes:
    """Return the metrics as text, with the budgets that a key may see."""
    shares = parse_shares(state.settings.budget_shares)
    found: bytes = state.metrics.exposition(_LedgerCollector(state.ledger_probe, key, shares))
    return found


@dataclass(frozen=True, slots=True)
class _LedgerState:
    """The datasets and API keys of the ledger at one moment.

    Attributes:
        datasets: the first by name; none if nobody may see them.
        keys: the oldest with a quota that are not revoked.
        events_waiting: the number of events not delivered to their webhook.
    """

    datasets: list[Dataset]
    keys: list[KeyRecord]
    events_waiting: int


class LedgerProbe:
    """Reads the ledger's state for a metrics scrape, within a time limit.

    Args:
        repository: the ledger's database.
        metrics: counts the connections of the database from now on.
    """

    def __init__(self, repository: Repository, metrics: Metrics) -> None:
        self._repository = repository
        self._thread = ThreadPoolExecutor(1, "scrape")
        self._pending: dict[bool, Future[_LedgerState]] = {}
        _count_connections(repository, metrics)

    def read_state(self, *, has_key: bool) -> _LedgerState | None:
        """Return the ledger's state, or None if the database is slow, read-only or damaged.

        Args:
            has_key: whether budgets may be shown. Without a key no dataset is read, so that anyone
                may ask.
        """
        pending = self._pending.get(has_key)
        if pending is None or pending.done():  # at most one query of each at a time
            pending = self._pending[has_key] = self._thread.submit(self._query_state, has_key)
        try:
            return pending.result(_SECONDS_MAX)
        except (AnswerTimeoutError, DatabaseAwayError, StoredRowError):
            return None

    def _query_state(self, has_key: bool) -> _LedgerState:
        """Check that the database accepts writes; read the ledger's state for the metrics."""
        self._repository.ping()
        if not has_key:
            return _LedgerState([], [], 0)
        with self._repository.reading() as reading:
            datasets = reading.list_datasets(limit=_DATASETS_MAX)
            keys, waiting = reading.list_limited_keys(_KEYS_MAX), reading.count_waiting_events()
            return _LedgerState(datasets, keys, waiting)

    def close(self) -> None:
        """Stop the thread that reads the ledger."""
        self._thread.shutdown(wait=False, cancel_futures=True)


class _LedgerCollector(Collector):
    """Prometheus collector of the ledger's state, and of the budgets that a key may see."""

    def __init__(
        self, ledger_probe: LedgerProbe, key: KeyRecord | None, shares: tuple[float, ...]
    ) -> None:
        self._probe, self._key, self._shares = ledger_probe, key, shares

    def collect(self) -> Iterator[Metric]:
        """Yield metrics: whether the database is up, and budgets that the caller's key may see."""
        key = self._key
        state = self._probe.read_state(has_key=key is not None)
        yield GaugeMetricFamily(
            "accountant_ledger_up",
            "1 if the database answers and accepts writes",
            value=float(state is not None),
        )
        if key is not None and state is not None:
            visible = [each for each in state.datasets if is_visible(key, each.name)]
            yield from _collect_budget_metrics(visible)
            yield _collect_passed_shares(visible, self._shares)
            if key.datasets is None:
                yield from _collect_quota_metrics(state.keys)
                yield GaugeMetricFamily(
                    "accountant_webhook_events_waiting",
                    "Events that are not delivered to their webhook yet",
                    value=float(state.events_waiting),
                )


def _collect_passed_shares(datasets: list[Dataset], shares: tuple[float, ...]) -> Metric:
    """Return a gauge for each dataset and share: 1 if that share of the budget is used, else 0."""
    passed = GaugeMetricFamily(
        "accountant_budget_share_passed",
        "1 if this share of a budget, or more, is spent or held",
        labels=["dataset", "share"],
    )
    for each in datasets:
        taken = each.balance.taken
        share_taken = each.policy.share_of(taken) if any(taken) else 0.0
        for share in shares:
            passed.add_metric([each.name, f"{share:g}"], float(share_taken >= share))
    return passed


def _collect_quota_metrics(keys: list[KeyRecord]) -> Iterator[Metric]:
    """Yield gauges of each API key's request quota, and of the share of it in use."""
    quotas = GaugeMetricFamily(
        "accountant_key_quota_requests_per_minute",
        "The quota of requests of an API key, over all servers; only of keys that have one",
        labels=["key", "name"],
    )
    used = GaugeMetricFamily(
        "accountant_key_quota_used_ratio",
        "The share of the quota of an API key that is used now; at 1 requests are refused",
        labels=["key", "name"],
    )
    at = now()
    for key in keys:
        if key.quota is not None:
            quotas.add_metric([key.identifier, key.name], key.quota.requests_per_minute)
            used.add_metric(
                [key.identifier, key.name], key.quota.used_share(key.quota_empty_at, at)
            )
    yield from (quotas, used)


def _collect_budget_metrics(datasets: list[Dataset]) -> Iterator[Metric]:
    """Yield gauges of each dataset's budget: ε, used and left, and whether it is closed."""
    epsilon = GaugeMetricFamily(
        "accountant_budget_epsilon", "The whole privacy budget of a dataset", labels=["dataset"]
    )
    taken = GaugeMetricFamily(
        "accountant_budget_taken_epsilon",
        "What is spent or held of a budget",
        labels=["dataset"],
    )
    left = GaugeMetricFamily(
        "accountant_budget_remaining_ratio",
        "The share of a budget that is neither spent nor held",
        labels=["dataset"],
    )
    steps = GaugeMetricFamily(
        "accountant_budget_remaining_reference_steps",
        "Steps of the reference that a budget has left; only of datasets that have one",
        labels=["dataset"],
    )
    closed = GaugeMetricFamily(
        "accountant_budget_closed",
        "1 if the dataset is closed and takes no further reservation",
        labels=["dataset"],
    )
    for each in datasets:
        policy, balance = each.policy, each.balance
        count = policy.count_reference_steps_left(balance.taken)
        if count is not None:
            steps.add_metric([each.name], count)
        epsilon.add_metric([each.name], policy.epsilon)
        taken.add_metric([each.name], policy.epsilon_of(balance.taken))
        left.add_metric([each.name], max(1 - policy.share_of(balance.taken), 0.0))
        closed.add_metric([each.name], float(each.closed_at is not None))
    yield from (epsilon, taken, left, steps, closed)


def _count_connections(repository: Repository, metrics: Metrics) -> None:
    """Count new database connections, and track how many are in use.

    The pool also returns dead connections that were never taken; these are not counted.
    """
    engine = repository.engine
    in_use: set[Any] = set()

    def count_checkout(_: Any, record: Any, __: Any) -> None:
        """Count a connection as in use."""
        in_use.add(record)
        metrics.connections.inc()

    def count_checkin(_: Any, record: Any) -> None:
        """Count a connection as free again; ignore one that was never in use."""
        if record in in_use:
            in_use.discard(record)
            metrics.connections.dec()

    event.listen(engine, "connect", lambda *_: metrics.connects.inc())
    event.listen(engine, "checkout", count_checkout)
    event.listen(engine, "checkin", count_checkin)
