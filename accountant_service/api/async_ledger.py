"""The ledger's asynchronous interface, so that no call blocks the event loop.

SQL statements run in threads, and calculations in computation processes of the ledger's own. A
statement that waits for a dataset's row holds a thread and a connection, so only few may wait for
one dataset; the others queue here, and the datasets take turns. API keys take turns at the
calculations.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from anyio import CapacityLimiter, to_thread

from accountant_service.accounting.guarantee import Guarantee
from accountant_service.api.ledger_views import (
    LIST_PAGE_SIZE,
    Json,
    cap_view,
    dataset_view,
    entries_view,
    joint_quote_view,
    page_view,
    parse_run_cursor,
    preview_view,
    reservation_view,
    run_view,
    series_view,
    window_view,
    write_run_cursor,
)
from accountant_service.computing.fair_queue import FairQueue, QueueLimits
from accountant_service.computing.processes import ProcessPool
from accountant_service.disclosure.deployments_registry import Tier
from accountant_service.disclosure.facts import RUNS_MAX, facts_of_dataset
from accountant_service.disclosure.formats import Format
from accountant_service.disclosure.rendering import render, render_certificate
from accountant_service.errors import CodedError, TooExpensiveError
from accountant_service.ledger import certificate, plans, service
from accountant_service.ledger.api_keys import Keys, Scope, require_unbound
from accountant_service.ledger.caps import Caps
from accountant_service.ledger.errors import BudgetExhaustedError, ChargeOutdatedError
from accountant_service.ledger.filters import PrivacyFilter
from accountant_service.ledger.filters.base import Amounts
from accountant_service.ledger.key_record import KeyRecord
from accountant_service.ledger.plans import (
    BudgetPreview,
    CombinedQuote,
    PlannedCharge,
    PlansTogether,
    Quote,
    ReferenceChoice,
    StepsLeft,
)
from accountant_service.ledger.repository import StoredAnswer, now
from accountant_service.ledger.rules import (
    NOTHING_DECLARED,
    Cap,
    CapUse,
    Dataset,
    Declaration,
    EntryKind,
    HolderKind,
    NewDataset,
    Reservation,
    require_dataset_open,
)
from accountant_service.ledger.series import Template
from accountant_service.ledger.series_catalog import SeriesCatalog
from accountant_service.ledger.service import Ledger, Refunds, WriteRequest
from accountant_service.mechanisms import Mechanism
from accountant_service.operations.settings import Settings

_QUOTES_SECONDS_MAX: Final = 15.0  # for each plan alone, and as much for all together
_RETURNS_SECONDS_MAX: Final = 5.0  # after it no further ended lease is looked at
_NICENESS: Final = 5  # below the server, above the computation endpoints
_READERS: Final = 8  # of the pool's 24 connections; the rest are for pages, probes and scrapes
_WRITERS: Final = 12
_WRITERS_EACH: Final = 2  # one writes, the next waits for its row
_WRITES_WAITING_MAX: Final = 1024
_WRITE_WAIT_SECONDS_MAX: Final = 10.0
_KEYS_WAITING_SHARE: Final = 2
_REMEMBERED_MAX: Final = 1000  # previews of budgets, steps left of datasets, refused plans
Result = TypeVar("Result")


class AsyncLedger:
    """The ledger for asynchronous callers, which runs database calls in threads.

    Args:
        ledger: the ledger.
        keys: the API keys.
        caps: of keys and teams.
        series: of datasets.
        settings: limits of concurrent calculations.
    """

    def __init__(
        self, ledger: Ledger, keys: Keys, caps: Caps, series: SeriesCatalog, settings: Settings
    ) -> None:
        self._ledger, self._keys, self._caps, self._series = ledger, keys, caps, series
        count = max(2, settings.computation_processes)  # one key leaves at least one to other keys
        self._processes = ProcessPool(count, settings.computation_seconds_max, _NICENESS)
        waiting = settings.waiting_max
        self._calculations = FairQueue(
            QueueLimits(count, count - 1, waiting, waiting // _KEYS_WAITING_SHARE),
            "too many calculations are waiting; nothing was charged. Try again later",
        )
        self._writes = FairQueue(
            QueueLimits(
                _WRITERS,
                _WRITERS_EACH,
                _WRITES_WAITING_MAX,
                _WRITES_WAITING_MAX // 2,
                _WRITE_WAIT_SECONDS_MAX,
            ),
            "too many writes are waiting for this dataset; nothing was charged. Try again with the "
            "same Idempotency-Key",
        )
        self._readers, self._writers = CapacityLimiter(_READERS), CapacityLimiter(_WRITERS)
        self._previews: dict[tuple[PrivacyFilter, Mechanism | None], BudgetPreview] = {}
        self._steps_left: dict[str, tuple[int, StepsLeft]] = {}  # by dataset, with its version
        self._affordable: dict[Any, asyncio.Future[tuple[int | None, float | None]]] = {}

    def close(self) -> None:
        """Kill the computation processes; the ledger itself stays open."""
        self._processes.close()

    # --- threads and processes

    async def _read(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """Run a database read in a thread; only a limited number of reads run at once."""
        return await to_thread.run_sync(partial(call, *arguments), limiter=self._readers)

    async def _write(self, dataset: str, call: Callable[..., Result], *arguments: Any) -> Result:
        """Run a transaction in a thread, once earlier writes to the same dataset are done."""
        async with self._writes.turn(dataset):
            return await to_thread.run_sync(partial(call, *arguments), limiter=self._writers)

    async def _calculate(
        self, key: KeyRecord, function: Callable[..., Result], *arguments: Any
    ) -> Result:
        """Run a function in a computation process, once the fair queue gives the API key a turn."""
        async with self._calculations.turn(key.identifier):
            found: Result = await self._processes.run(function, *arguments)
        return found

    # --- keys

    async def authenticate(self, token: str | None) -> KeyRecord:
        """Return the API key that a token belongs to, or raise an error."""
        return await self._read(self._keys.authenticate, token)

    def remembered_key(self, token: str) -> KeyRecord | None:
        """Return a key that was authenticated within a minute, if a write may rely on it."""
        return self._keys.remembered(token)

    # --- datasets

    async def create_dataset(self, request: WriteRequest, new: NewDataset) -> StoredAnswer:
        """Create a dataset with a fixed privacy filter."""
        require_unbound(request.key, Scope.OWNER)
        policy = await self._calculate(request.key, plans.choose_policy, new)
        preview = await self._preview_filter(request.key, policy, new.planned_mechanism)
        return await self._write(new.name, self._ledger.add_dataset, request, new, policy, preview)

    async def close_dataset(self, request: WriteRequest, name: str) -> StoredAnswer:
        """Close a dataset for good: it takes no further reservation."""
        require_unbound(request.key, Scope.OWNER)
        dataset = await self._read(self._ledger.find_dataset, request.key, name, Scope.OWNER)
        return await self._write(dataset.identifier, self._ledger.close_dataset, request, name)

    async def set_reference(
        self, request: WriteRequest, name: str, mechanism: Mechanism
    ) -> StoredAnswer:
        """Set or confirm the reference in whose steps a dataset's budget is counted."""
        for attempt in range(service.ATTEMPTS):
            find = partial(self._ledger.find_dataset, request.key, name, Scope.OWNER)
            dataset = await self._read(find)
            try:
                choice = await self._calculate(
                    request.key, plans.choose_reference, dataset, mechanism
                )
                store = self._ledger.store_reference
                return await self._write(dataset.identifier, store, request, dataset, choice)
            except CodedError as error:
                known = await self._read(self._ledger.find_stored_answer, request)
                if known is not None:
                    return known
                if attempt == service.ATTEMPTS - 1 or not isinstance(error, ChargeOutdatedError):
                    raise
        raise AssertionError  # the last attempt returns or raises

    async def quote_reference(
        self, key: KeyRecord, name: str, mechanism: Mechanism
    ) -> ReferenceChoice:
        """Return what would still fit with another reference, and what fits now; set nothing."""
        dataset = await self._read(self._ledger.find_dataset, key, name, Scope.OWNER)
        return await self._calculate(key, plans.choose_reference, dataset, mechanism)

    async def delete_dataset(self, request: WriteRequest, name: str) -> StoredAnswer:
        """Delete a dataset that was never used."""
        return await self._write(name, self._ledger.delete_dataset, request, name)

    async def preview_budget(self, key: KeyRecord, name: str) -> BudgetPreview:
        """Return how many steps of typical runs a dataset's whole budget covers."""
        dataset = await self._read(self._ledger.find_dataset, key, name)
        policy = dataset.policy
        counted = policy.reference_part
        planned = None if counted is None else counted.reference
        return await self._preview_filter(key, policy, planned)

    async def _preview_filter(
        self, key: KeyRecord, policy: PrivacyFilter, planned: Mechanism | None
    ) -> BudgetPreview:
        """Return how many steps a filter admits; an empty preview if that takes too long."""
        known = self._previews.get((policy, planned))
        if known is not None:
            return known
        try:
            found = await self._calculate(key, plans.preview_budget, policy, planned)
        except TooExpensiveError:
            return BudgetPreview()
        _remember(self._previews, (policy, planned), found)
        return found

    async def list_datasets(self, key: KeyRecord, cursor: str = "") -> Json:
        """Return a page of the datasets that the key may see; the cursor is the last name."""
        return await self._read(self._read_datasets, key, cursor)

    def _read_datasets(self, key: KeyRecord, cursor: str) -> Json:
        """Read a page of the datasets that the key may see; return it as JSON."""
        found = self._ledger.list_datasets(key, cursor, LIST_PAGE_SIZE + 1)
        return page_view(found, dataset_view, lambda last: last.name)

    async def get_dataset(self, key: KeyRecord, name: str) -> Json:
        """Return a dataset as JSON, after ending the reservations whose lease has ended."""
        dataset, overdue = await self._read(self._ledger.read_dataset, key, name)
        if overdue:
            dataset = await self._expire_leases(key, dataset, overdue) or dataset
        return await self._read(dataset_view, dataset)

    async def _expire_leases(
        self, key: KeyRecord, dataset: Dataset, overdue: Sequence[Reservation]
    ) -> Dataset | None:
        """End reservations whose lease has ended; return the changed dataset, or None.

        What they give back is computed before the transaction. Those for which the time does not
        suffice are ended by a later request; until then their budget is held.
        """
        deadline, name = time.monotonic() + _RETURNS_SECONDS_MAX, dataset.name
        refunds: Refunds = {}
        for run in overdue:
            if refunds and time.monotonic() > deadline:
                break
            refunds[run.identifier] = await self._compute_refund(key, dataset, run)
        return await self._write(dataset.identifier, self._ledger.expire_leases, name, refunds)

    async def _compute_refund(
        self, key: KeyRecord, dataset: Dataset, run: Reservation
    ) -> tuple[int, Amounts]:
        """Return a run's number of granted steps, and the budget that it frees if it ends now."""
        refund = run.refund_if_ended
        if refund is None:
            try:
                refund = await self._calculate(key, plans.compute_refund, dataset.policy, run)
            except TooExpensiveError:  # the run ends all the same
                refund = run.charge.least_refund(run.steps_granted)
        return run.steps_granted, refund

    async def count_steps_left(
        self, key: KeyRecord, name: str, *, allow_slow: bool = True
    ) -> StepsLeft | None:
        """Return how many more steps like those of the last run fit; None if there was no run.

        Args:
            key: the caller's API key.
            name: the dataset's.
            allow_slow: whether to count steps other than the reference step, which takes seconds.
        """
        dataset, run = await self._read(self._ledger.find_last_run, key, name)
        if run is None:
            return None
        version, known = self._steps_left.get(dataset.identifier, (-1, None))
        if known is not None and version == dataset.version:
            return known
        count = partial(plans.count_steps_left, allow_slow=allow_slow)
        try:
            found = await self._calculate(key, count, dataset, run)
        except TooExpensiveError:
            found = plans.count_steps_left(dataset, run, allow_slow=False)
        if not (found.is_exact or allow_slow):
            return found
        _remember(self._steps_left, dataset.identifier, (dataset.version, found))
        return found

    async def report_on_dataset(
        self, key: KeyRecord, name: str, wanted: Format, tier: Tier
    ) -> bytes:
        """Return a dataset's report in a file format; `tier` limits a registry record's fields."""
        await self.get_dataset(key, name)  # expires ended leases
        found = await self._read(self._ledger.read_runs, key, name, RUNS_MAX)
        return await self._calculate(key, _render_dataset, *found, now(), wanted, tier)

    async def report_on_run(
        self, key: KeyRecord, identifier: str, wanted: Format, tier: Tier
    ) -> bytes:
        """Return a run's report in a file format; `tier` limits a registry record's fields."""
        document = await self.issue_certificate(key, identifier)
        return await self._calculate(key, render_certificate, document, wanted, tier)

    async def list_runs(self, key: KeyRecord, name: str, cursor: str) -> Json:
        """Return a page of a dataset's runs, sorted: open ones first, latest lease end first."""
        dataset, found, following = await self._read(
            self._ledger.list_reservations, key, name, parse_run_cursor(cursor), RUNS_MAX
        )
        items = [reservation_view(dataset, run) for run in found]
        return {"items": items, "next_cursor": write_run_cursor(following)}

    async def list_entries(self, key: KeyRecord, name: str, cursor: str) -> Json:
        """Return a page of the ledger's entries for a dataset."""
        after = int(cursor or 0)
        return entries_view(await self._read(self._ledger.list_entries, key, name, after))

    # --- series

    async def create_series(
        self, key: KeyRecord, name: str, template: Template
    ) -> tuple[Json, bool]:
        """Create a series unless it is there; return it as JSON, and whether it is new."""
        require_unbound(key, Scope.OWNER)
        await self._calculate(key, plans.choose_policy, template.example)
        found, is_new = await self._write(name, self._series.create, key, name, template)
        return series_view(found), is_new

    async def list_series(self, key: KeyRecord, cursor: str = "") -> Json:
        """Return a page of the series that the key may see; the cursor is the last name."""
        found = await self._read(self._series.list_series, key, cursor, LIST_PAGE_SIZE + 1)
        return page_view(found, series_view, lambda last: last.series.name)

    async def get_series(self, key: KeyRecord, name: str) -> Json:
        """Return a series as JSON."""
        return series_view(await self._read(self._series.get, key, name))

    async def add_to_series(
        self, key: KeyRecord, name: str, label: str, size: int
    ) -> tuple[Json, bool]:
        """Create a series' dataset unless it is there; return it as JSON, and whether it is new."""
        found = await self._read(self._series.get, key, name, Scope.OWNER)
        template = found.series.template
        policy = await self._calculate(key, plans.choose_policy, template.example)
        preview = await self._preview_filter(key, policy, template.planned_mechanism)
        dataset, is_new = await self._write(
            name, self._series.add_dataset, key, name, label, size, policy
        )
        told = preview_view(plans.warn_of_size(preview, size, template.delta)) if is_new else {}
        return dataset_view(dataset) | told, is_new

    async def find_window(self, key: KeyRecord, name: str, count: int) -> Json:
        """Return the last datasets of a series as JSON, after ending leases that have ended."""
        names = await self._read(self._series.find_window, key, name, count)
        return window_view(name, [await self.get_dataset(key, each) for each in names])

    async def set_series_cap(self, key: KeyRecord, name: str, cap: Cap) -> Json:
        """Set a cap on each dataset of a series, and on those to come; return the series."""
        return series_view(await self._write(name, self._series.set_cap, key, name, cap))

    async def remove_series_cap(
        self, key: KeyRecord, name: str, kind: HolderKind, holder: str
    ) -> None:
        """Remove a cap from a series and from all of its datasets."""
        await self._write(name, self._series.remove_cap, key, name, kind, holder)

    # --- caps

    async def list_caps(self, key: KeyRecord, name: str, cursor: str = "") -> Json:
        """Return a page of a dataset's caps, each with the budget that its holder has taken."""
        await self._read(self._ledger.find_dataset, key, name)
        kind, _, holder = cursor.partition(":")
        after, limit = (kind, holder), LIST_PAGE_SIZE + 1
        dataset, uses = await self._read(self._caps.list_uses, name, after, limit)
        return page_view(
            uses,
            lambda use: cap_view(dataset.policy, use),
            lambda last: f"{last.cap.kind}:{last.cap.holder}",
        )

    async def set_cap(self, key: KeyRecord, name: str, cap: Cap) -> Json:
        """Set the cap of a key or team; return it as JSON, with the budget taken under it."""
        dataset = await self._read(self._ledger.find_dataset, key, name, Scope.OWNER)
        by = key.identifier
        dataset, use = await self._write(dataset.identifier, self._caps.set, name, cap, by)
        return cap_view(dataset.policy, use)

    async def remove_cap(self, key: KeyRecord, name: str, kind: HolderKind, holder: str) -> None:
        """Remove the cap of a key or team."""
        dataset = await self._read(self._ledger.find_dataset, key, name, Scope.OWNER)
        by = key.identifier
        await self._write(dataset.identifier, self._caps.remove, name, kind, holder, by)

    # --- plans

    async def _find_dataset_and_caps(
        self, key: KeyRecord, name: str
    ) -> tuple[Dataset, list[CapUse]]:
        """Return a dataset, and the caps that limit the key and its team."""
        dataset = await self._read(self._ledger.find_dataset, key, name)
        return dataset, await self._read(self._ledger.find_cap_uses, key, dataset)

    async def quote(self, key: KeyRecord, name: str, mechanism: Mechanism) -> Quote:
        """Quote a plan: whether it fits, and what would fit; no budget is spent or held."""
        dataset, caps = await self._find_dataset_and_caps(key, name)
        return await self._calculate(key, plans.quote_plan, dataset, mechanism, caps)

    async def quote_window(
        self, key: KeyRecord, name: str, count: int, mechanism: Mechanism
    ) -> Json:
        """Quote one run on the last datasets of a series, as JSON."""
        names = await self._read(self._series.find_window, key, name, count)
        try:
            return await self.quote_jointly(key, names, mechanism)
        except CodedError as error:
            if (error.pointer or "").startswith("/datasets/"):
                error.pointer = "/last"
            raise

    async def quote_jointly(
        self, key: KeyRecord, names: Sequence[str], mechanism: Mechanism
    ) -> Json:
        """Quote one run on several datasets: what it takes of each, and what fits all, as JSON.

        Datasets of equal budgets in equal states share one computation.

        Raises:
            TooExpensiveError: the time for all of them does not suffice.
        """
        find = partial(self._ledger.find_datasets, is_joint=True)
        datasets = await self._read(find, key, names)
        deadline = time.monotonic() + _QUOTES_SECONDS_MAX
        records = sum(dataset.size for dataset in datasets)
        known: dict[Hashable, Quote] = {}
        parts: list[tuple[Dataset, Quote]] = []
        for at, dataset in enumerate(datasets):
            left = deadline - time.monotonic()
            if at and left < 0:
                raise TooExpensiveError(
                    f"the quotes of {at} datasets took {_QUOTES_SECONDS_MAX:g} s: name fewer"
                )
            caps = await self._read(self._ledger.find_cap_uses, key, dataset)
            state = plans.state_of(dataset, caps)
            if state not in known:
                noise_seconds = min(left / (len(names) - at) / 2, plans.NOISE_SECONDS_MAX)
                with service.naming_dataset(at, is_joint=True):
                    known[state] = await self._calculate(
                        key, plans.quote_plan, dataset, mechanism, caps, noise_seconds, records
                    )
            parts.append((dataset, known[state]))
        return joint_quote_view(parts)

    async def quote_several(
        self, key: KeyRecord, name: str, mechanisms: Sequence[Mechanism]
    ) -> tuple[list[Quote | CodedError], CombinedQuote]:
        """Quote several plans, each alone and all together.

        A plan that cannot be charged at all has an error instead of a quote.
        """
        dataset, caps = await self._find_dataset_and_caps(key, name)
        require_dataset_open(dataset)
        deadline = time.monotonic() + _QUOTES_SECONDS_MAX
        items: list[Quote | CodedError] = []
        for index, mechanism in enumerate(mechanisms):
            left = deadline - time.monotonic()
            # half of this plan's share of the time; its other numbers need the rest
            noise_seconds = min(left / (len(mechanisms) - index) / 2, plans.NOISE_SECONDS_MAX)
            try:
                if left < 0:
                    raise TooExpensiveError(
                        f"the quotes before it took {_QUOTES_SECONDS_MAX:g} s: send fewer plans"
                    )
                items.append(
                    await self._calculate(
                        key, plans.quote_plan, dataset, mechanism, caps, noise_seconds
                    )
                )
            except CodedError as error:
                items.append(error)
        return items, await self._quote_together(key, dataset, mechanisms, caps)

    async def _quote_together(
        self,
        key: KeyRecord,
        dataset: Dataset,
        mechanisms: Sequence[Mechanism],
        caps: Sequence[CapUse],
    ) -> CombinedQuote:
        """Quote several plans that are charged one after the other.

        They do not fit if one cannot be charged, or if the time does not suffice.
        """
        deadline = time.monotonic() + _QUOTES_SECONDS_MAX
        together: PlansTogether | None = None
        try:
            for mechanism in mechanisms:
                if time.monotonic() > deadline:
                    return CombinedQuote(False, None)
                together = await self._calculate(
                    key, plans.charge_next, dataset, mechanism, together, caps
                )
                if not together.policy.admits(together.taken):
                    return CombinedQuote(False, None)
        except CodedError:
            return CombinedQuote(False, None)
        return await self._calculate(key, plans.combine_quotes, dataset, together, caps)

    async def estimate_running_total(self, key: KeyRecord, name: str) -> Guarantee:
        """Estimate ε of all steps granted so far, as if they were one plan."""
        policy, runs = await self._read(self._ledger.list_granted_reservations, key, name)
        return await self._calculate(key, plans.estimate_running_total, policy, runs)

    async def reserve(
        self, request: WriteRequest, name: str, mechanism: Mechanism, lease: float, purpose: str
    ) -> StoredAnswer:
        """Reserve budget for a whole plan; if it does not fit, the error says what would fit."""
        return await self._reserve(request, [name], mechanism, lease, purpose, is_joint=False)

    async def reserve_jointly(
        self,
        request: WriteRequest,
        names: Sequence[str],
        mechanism: Mechanism,
        lease: float,
        purpose: str,
    ) -> StoredAnswer:
        """Reserve budget of each of several datasets for one plan, or of none of them."""
        return await self._reserve(request, names, mechanism, lease, purpose, is_joint=True)

    async def _reserve(
        self,
        request: WriteRequest,
        names: Sequence[str],
        mechanism: Mechanism,
        lease: float,
        purpose: str,
        *,
        is_joint: bool,
    ) -> StoredAnswer:
        """Reserve budget for a plan on one dataset, or jointly on several."""
        find = partial(self._ledger.find_datasets, is_joint=is_joint)
        for attempt in range(service.ATTEMPTS):
            datasets = await self._read(find, request.key, names, Scope.RUN)
            try:
                planned = await self._charge_all(
                    request.key, datasets, mechanism, is_joint=is_joint
                )
                hold = partial(self._ledger.hold_budget, is_joint=is_joint)
                turn = min(dataset.identifier for dataset in datasets)
                return await self._write(turn, hold, request, planned, lease, purpose)
            except CodedError as error:
                known = await self._read(self._ledger.find_stored_answer, request)
                if known is not None:
                    return known
                again = [await self._prepare_retry(error, request.key, each) for each in datasets]
                if attempt == service.ATTEMPTS - 1 or not any(again):
                    await self._explain_refusal(error, request.key, names, mechanism)
                    raise
        raise AssertionError  # the last attempt returns or raises

    async def _charge_all(
        self, key: KeyRecord, datasets: Sequence[Dataset], mechanism: Mechanism, *, is_joint: bool
    ) -> list[tuple[Dataset, PlannedCharge]]:
        """Return a plan's cost in the budget of each of its datasets.

        Raises:
            TooExpensiveError: the time for all of them does not suffice.
        """
        deadline = time.monotonic() + _QUOTES_SECONDS_MAX
        records = sum(dataset.size for dataset in datasets)
        known: dict[Hashable, PlannedCharge] = {}
        planned = []
        for at, dataset in enumerate(datasets):
            if at and time.monotonic() > deadline:
                raise TooExpensiveError(
                    f"the charges of {at} datasets took {_QUOTES_SECONDS_MAX:g} s: name fewer"
                )
            caps = await self._read(self._ledger.find_cap_uses, key, dataset)
            state = plans.state_of(dataset, caps)
            if state not in known:
                with service.naming_dataset(at, is_joint=is_joint):
                    known[state] = await self._calculate(
                        key, plans.compute_charge, dataset, mechanism, caps, records
                    )
            planned.append((dataset, known[state]))
        return planned

    async def _prepare_retry(self, error: CodedError, key: KeyRecord, before: Dataset) -> bool:
        """Expire ended leases; return whether a refused reservation is then worth retrying."""
        current, overdue = await self._read(self._ledger.read_dataset, key, before.name)
        if overdue:
            await self._expire_leases(key, current, overdue)
        return service.is_worth_retrying(error, before, current, overdue)

    async def _explain_refusal(
        self, error: CodedError, key: KeyRecord, names: Sequence[str], mechanism: Mechanism
    ) -> None:
        """Add to the error how many steps, or how much noise, would fit every budget."""
        if not isinstance(error, BudgetExhaustedError):
            return
        with suppress(CodedError):  # too expensive, or too many wait: the refusal stands without it
            found = [await self._find_affordable(key, name, mechanism) for name in names]
            error.explain(*plans.fit_all(found))

    async def _find_affordable(
        self, key: KeyRecord, name: str, mechanism: Mechanism
    ) -> tuple[int | None, float | None]:
        """Return how many steps of a plan, or which noise, would fit a budget.

        Equal refusals share one computation, which takes most of a second: otherwise jobs that try
        again and again would keep their key's other requests waiting.
        """
        current, caps = await self._find_dataset_and_caps(key, name)
        question = (current.identifier, current.version, mechanism, tuple(caps))
        found = self._affordable.get(question)
        if found is None:
            find = self._calculate(key, plans.find_affordable, current, mechanism, caps)
            found = asyncio.ensure_future(find)
            _remember(self._affordable, question, found)
        try:
            return await asyncio.shield(found)
        finally:
            if found.done() and (found.cancelled() or found.exception() is not None):
                self._affordable.pop(question, None)

    # --- runs

    async def get_reservation(self, key: KeyRecord, identifier: str) -> Json:
        """Return a reservation as JSON, ended first if its lease has ended."""
        parts = await self._read(self._ledger.find_run, key, identifier)
        overdue = [(dataset, run) for dataset, run in parts if service.is_overdue(run)]
        for dataset, run in overdue:
            await self._expire_leases(key, dataset, [run])
        if overdue:
            parts = await self._read(self._ledger.find_run, key, identifier)
        return run_view(parts)

    async def grant(
        self, request: WriteRequest, identifier: str, steps: int, sequence: int
    ) -> StoredAnswer:
        """Grant the next steps of a reservation: spend their part of the budget."""
        return await self._write_to_run(self._ledger.grant, request, identifier, steps, sequence)

    async def commit(
        self, request: WriteRequest, identifier: str, declared: Declaration = NOTHING_DECLARED
    ) -> StoredAnswer:
        """End a finished run, with facts that its program declares; granted steps stay spent."""
        return await self._end_run(request, identifier, EntryKind.COMMIT, declared)

    async def release(self, request: WriteRequest, identifier: str) -> StoredAnswer:
        """End an abandoned run; the budget of steps that were not granted is freed."""
        return await self._end_run(request, identifier, EntryKind.RELEASE)

    async def _end_run(
        self,
        request: WriteRequest,
        identifier: str,
        kind: EntryKind,
        declared: Declaration = NOTHING_DECLARED,
    ) -> StoredAnswer:
        """End a run; if the budget that it frees is not known yet, compute it and try again."""
        refunds: Refunds = {}
        for _ in range(service.ATTEMPTS):
            try:
                return await self._write_to_run(
                    self._ledger.close_run, request, identifier, kind, refunds, declared
                )
            except ChargeOutdatedError:
                parts = await self._read(self._ledger.find_run, request.key, identifier)
                refunds = {
                    run.identifier: await self._compute_refund(request.key, dataset, run)
                    for dataset, run in parts
                }
        raise ChargeOutdatedError(
            "further steps were granted meanwhile; the run has not ended. Try again"
        )

    async def renew(self, request: WriteRequest, identifier: str, lease: float) -> StoredAnswer:
        """Extend a reservation's lease to `lease` seconds from now."""
        return await self._write_to_run(self._ledger.renew, request, identifier, lease)

    async def _write_to_run(
        self,
        call: Callable[..., StoredAnswer],
        request: WriteRequest,
        identifier: str,
        *arguments: Any,
    ) -> StoredAnswer:
        """Run a transaction on a reservation, once earlier writes to its dataset are done.

        A key that may not change the reservation takes no turn.
        """
        service.require_scope_of_runs(request.key)
        subject = self._ledger.cached_run_subject(identifier)
        if subject is None:
            subject = await self._read(self._ledger.find_run_subject, identifier)
        service.require_access(request.key, subject, identifier)
        return await self._write(subject.dataset, call, request, identifier, *arguments)

    async def issue_certificate(self, key: KeyRecord, identifier: str) -> certificate.Document:
        """Return the signed certificate of a run that has ended."""
        await self.get_reservation(key, identifier)  # expires an ended lease
        ended = await self._read(self._ledger.read_ended_run, key, identifier)
        return await self._calculate(key, certificate.issue, *ended, now())


def _render_dataset(
    dataset: Dataset,
    runs: Sequence[Reservation],
    runs_in_all: int,
    at: int,
    wanted: Format,
    tier: Tier,
) -> bytes:
    """Return the report of a dataset in a file format; it lists `runs`, out of `runs_in_all`."""
    return render(facts_of_dataset(dataset, runs, runs_in_all, at), wanted, tier)


def _remember(memory: dict[Any, Any], name: Any, found: Any) -> None:
    """Store a result in a bounded dictionary; drop the oldest result if it is full."""
    memory.pop(name, None)
    if len(memory) >= _REMEMBERED_MAX:
        del memory[next(iter(memory))]
    memory[name] = found
