"""The ledger's calls for the event loop: each part of a call where it holds up no other.

Statements run in threads, calculations in computation processes of the ledger's own. A statement
that waits for a dataset's row holds a thread and a connection, so only few may wait for one
dataset; the others queue here, and the datasets take turns. Keys take turns at the calculations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from anyio import CapacityLimiter, to_thread

from accountant_service.api.turns import Limits, Turns
from accountant_service.errors import AccountingError, BudgetExhaustedError, TooExpensiveError
from accountant_service.guarantee import Guarantee, NeighbouringRelation
from accountant_service.ledger import certificate, service
from accountant_service.ledger.keys import Keys, Scope, require, require_unbound
from accountant_service.ledger.repository import KeyRecord, Remembered, now
from accountant_service.ledger.service import Ledger, Quote, Request, View
from accountant_service.mechanisms import Mechanism
from accountant_service.processes import Processes
from accountant_service.settings import Settings

_QUOTES_SECONDS_MAX: Final = 20.0
_NICENESS: Final = 5  # grants come first, strangers' questions last
_READERS: Final = 8  # of the 24 connections of a pool; others are for pages, probes and scrapes
_WRITERS: Final = 12
_WRITERS_EACH: Final = 2  # one writes, the next is ready
_WRITES_WAITING_MAX: Final = 1024
_WRITE_WAIT_SECONDS_MAX: Final = 10.0
_KEYS_WAITING_SHARE: Final = 2
Found = TypeVar("Found")


class AsyncLedger:
    """The ledger, for the event loop.

    Args:
        ledger: whose calls these are.
        keys: who may make them.
        settings: how much is computed at once.
    """

    def __init__(self, ledger: Ledger, keys: Keys, settings: Settings) -> None:
        self._ledger, self._keys = ledger, keys
        count = max(2, settings.computation_processes)  # one key leaves at least one to the others
        self._processes = Processes(count, settings.computation_seconds_max, _NICENESS)
        waiting = settings.waiting_max
        self._calculations = Turns(
            Limits(count, count - 1, waiting, waiting // _KEYS_WAITING_SHARE),
            "too many calculations are waiting; nothing was charged. Try again",
        )
        self._writes = Turns(
            Limits(
                _WRITERS,
                _WRITERS_EACH,
                _WRITES_WAITING_MAX,
                _WRITES_WAITING_MAX // 2,
                _WRITE_WAIT_SECONDS_MAX,
            ),
            "too many writes wait for this dataset; nothing was charged. Try again with the same "
            "Idempotency-Key",
        )
        self._readers, self._writers = CapacityLimiter(_READERS), CapacityLimiter(_WRITERS)

    def close(self) -> None:
        """Kill the computation processes."""
        self._processes.close()

    # --- where work is done

    async def _read(self, call: Callable[..., Found], *arguments: Any) -> Found:
        """Statements that wait for no lock."""
        return await to_thread.run_sync(partial(call, *arguments), limiter=self._readers)

    async def _write(self, dataset: str, call: Callable[..., Found], *arguments: Any) -> Found:
        """A transaction that may wait for a dataset's row."""
        async with self._writes.turn(dataset):
            return await to_thread.run_sync(partial(call, *arguments), limiter=self._writers)

    async def _calculate(
        self, key: KeyRecord, function: Callable[..., Found], *arguments: Any
    ) -> Found:
        async with self._calculations.turn(key.identifier):
            found: Found = await self._processes.run(function, *arguments)
        return found

    # --- keys

    async def authenticate(self, token: str | None) -> KeyRecord:
        """Whose token this is; see `Keys.authenticate`."""
        return await self._read(self._keys.authenticate, token)

    # --- datasets

    async def create_dataset(
        self,
        request: Request,
        name: str,
        size: int,
        epsilon: float,
        delta: float,
        relation: NeighbouringRelation,
        privacy_unit: str,
        planned: Mechanism | None,
    ) -> Remembered:
        """A new dataset, its policy frozen."""
        require_unbound(request.key, Scope.OWNER)
        policy = await self._calculate(
            request.key, service.choose_policy, size, epsilon, delta, relation, planned
        )
        return await self._write(
            name, self._ledger.add_dataset, request, name, size, privacy_unit, policy
        )

    async def datasets(self, key: KeyRecord) -> list[View]:
        """Return the datasets that the key may see."""
        return await self._read(self._ledger.datasets, key)

    async def dataset(self, key: KeyRecord, name: str) -> View:
        """One of them, with what is due expired."""
        found, due = await self._read(self._ledger.look, key, name)
        return await self._write(name, self._ledger.expire, name) if due else found

    async def entries(self, key: KeyRecord, name: str, cursor: str) -> View:
        """A page of the append-only record."""
        return await self._read(self._ledger.entries, key, name, cursor)

    # --- plans

    async def quote(self, key: KeyRecord, name: str, mechanism: Mechanism) -> Quote:
        """Quote a plan: whether it fits, and what would fit. Nothing is charged."""
        dataset = await self._read(self._ledger.seen, key, name)
        return await self._calculate(key, service.quote, dataset, mechanism)

    async def quotes(
        self, key: KeyRecord, name: str, plans: Sequence[Mechanism]
    ) -> tuple[list[Quote | AccountingError], View]:
        """Quotes of several plans, each as if it were the only one; and of all of them together.

        A plan that cannot be charged at all has its error in its place.
        """
        dataset = await self._read(self._ledger.seen, key, name)
        deadline = time.monotonic() + _QUOTES_SECONDS_MAX
        items: list[Quote | AccountingError] = []
        for mechanism in plans:
            try:
                if time.monotonic() > deadline:
                    raise TooExpensiveError(
                        f"the quotes before this took {_QUOTES_SECONDS_MAX:g} s: send fewer at once"
                    )
                items.append(await self._calculate(key, service.quote, dataset, mechanism))
            except AccountingError as error:
                items.append(error)
        return items, service.together(dataset, items)

    async def running_total(self, key: KeyRecord, name: str) -> Guarantee:
        """Estimate ε of all steps granted so far; see `service.running_total`."""
        policy, runs = await self._read(self._ledger.released, key, name)
        return await self._calculate(key, service.running_total, policy, runs)

    async def reserve(
        self, request: Request, name: str, mechanism: Mechanism, lease: float, purpose: str
    ) -> Remembered:
        """Hold the whole plan, or say what would fit."""
        key, ledger = request.key, self._ledger
        seen = await self._read(ledger.seen, key, name, Scope.RUN)
        charge = await self._calculate(key, service.charge_of, seen, mechanism)
        try:
            return await self._write(
                seen.identifier, ledger.hold, request, seen, charge, lease, purpose
            )
        except BudgetExhaustedError as error:
            current = await self._read(ledger.seen, key, name, Scope.RUN)
            error.affordable = await self._calculate(
                key, service.what_fits, current, mechanism, charge.unit
            )
            raise

    # --- runs

    async def reservation(self, key: KeyRecord, identifier: str) -> View:
        """A reservation as it stands."""
        dataset, reservation = await self._read(self._ledger.found, key, identifier)
        if service.is_due(reservation):
            return await self._write(dataset.identifier, self._ledger.reservation, key, identifier)
        return service.reservation_view(reservation, dataset)

    async def grant(
        self, request: Request, identifier: str, steps: int, sequence: int
    ) -> Remembered:
        """Charge the next steps, before their noise is drawn."""
        return await self._change(self._ledger.grant, request, identifier, steps, sequence)

    async def commit(self, request: Request, identifier: str) -> Remembered:
        """The run is done: what was granted is spent."""
        return await self._change(self._ledger.commit, request, identifier)

    async def release(self, request: Request, identifier: str) -> Remembered:
        """The run is given up: what was never granted is free again."""
        return await self._change(self._ledger.release, request, identifier)

    async def renew(self, request: Request, identifier: str, lease: float) -> Remembered:
        """The lease begins anew."""
        return await self._change(self._ledger.renew, request, identifier, lease)

    async def _change(
        self,
        call: Callable[..., Remembered],
        request: Request,
        identifier: str,
        *arguments: Any,
    ) -> Remembered:
        require(request.key, Scope.RUN)
        owner = self._ledger.known_owner(identifier)
        if owner is None:
            owner = await self._read(self._ledger.owner, identifier)
        return await self._write(owner, call, request, identifier, *arguments)

    async def certificate(self, key: KeyRecord, identifier: str) -> View:
        """Return the signed certificate of a run that has ended."""
        await self.reservation(key, identifier)  # expires what is due
        ended = await self._read(self._ledger.ended, key, identifier)
        return await self._calculate(key, certificate.issue, *ended, now())
