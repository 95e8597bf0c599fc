"""Racing writers, and what happens without each of the two things that keep them apart.

On PostgreSQL a writer locks the dataset's row before it reads anything that a charge depends on,
and every entry's number is unique in its dataset. Either alone keeps the budget; the lock also
spares writers from being told to try again. Without both, a race overspends.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from accountant_service.api.ledger_views import encode_answer
from accountant_service.errors import CodedError
from accountant_service.guarantee import NeighbouringRelation
from accountant_service.ledger import database as opening
from accountant_service.ledger import plans
from accountant_service.ledger.api_keys import Keys, Scope
from accountant_service.ledger.errors import BudgetExhaustedError, DatabaseAwayError
from accountant_service.ledger.filters.base import add
from accountant_service.ledger.repository import KeyRecord, Repository, Transaction
from accountant_service.ledger.rules import NewDataset, State
from accountant_service.ledger.service import Ledger, WriteRequest
from accountant_service.ledger.verification import verify
from accountant_service.mechanisms import DpSgd
from tests.support.databases import database

# without sampling, for which exchanges are decided fast; five of these fit
RUN = DpSgd(20.0, sample_rate=1.0, steps=200, sampling="none")
OTHER = replace(RUN, noise_multiplier=30.0)
WRITERS = 16


@pytest.fixture
def postgresql(tmp_path: Path) -> Iterator[Repository]:
    with database("postgresql", tmp_path) as url:
        found = opening.open_repository(url)
        yield found
        found.close()


@dataclass
class Outcome:
    """The outcome of a race of reservations."""

    admitted: int
    refused: int
    turned_away: int
    overspent: bool
    faults: int


@pytest.fixture(autouse=True)
def quick_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal here does not say what would fit: to compute that takes most of a race."""
    monkeypatch.setattr(plans, "find_affordable", lambda *_: (0, None))


def race(
    repository: Repository, others: int = 0, *, planned: bool = True, granted: int = 0
) -> Outcome:
    """Sixteen writers reserve a fifth of the budget each, at the same moment.

    Args:
        repository: an empty database.
        others: the number of writers whose mechanism is not the planned one.
        planned: whether the reference is chosen at creation, and not by the fastest writer.
        granted: the number of steps after which each run that was admitted is committed.
    """
    ledger = Ledger(repository, encode_answer)
    _, key = Keys(repository).create([Scope.ADMIN])
    relation = NeighbouringRelation.ADD_OR_REMOVE_ONE
    new = NewDataset("d", 1000, 8.0, 1e-5, relation, "record", RUN if planned else None)
    ledger.create_dataset(request(key), new)
    with repository.reading() as reading:
        dataset = reading.find_dataset("d")
    for run in (RUN, OTHER):  # once, and not by all threads at the same time
        plans.compute_charge(dataset, run)
    start, results = threading.Barrier(WRITERS), []

    def writer(number: int) -> None:
        start.wait()
        try:
            run = OTHER if number < others else RUN
            answer = ledger.reserve(request(key), "d", run, 3600, "")
            if granted:
                identifier = json.loads(answer.text)["id"]
                ledger.grant(request(key), identifier, granted, 0)
                ledger.commit(request(key), identifier)
        except CodedError as error:
            results.append(type(error))
        else:
            results.append(None)

    threads = [threading.Thread(target=writer, args=(number,)) for number in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == WRITERS
    with repository.reading() as reading:
        dataset = reading.find_dataset("d")
        assert dataset is not None
        runs = reading.list_reservations(dataset)
    held = (run.held for run in runs if run.state is State.OPEN)
    taken = reduce(add, held, dataset.balance.spent)
    if not granted:
        assert not any(dataset.balance.spent)
    return Outcome(
        results.count(None),
        results.count(BudgetExhaustedError),
        results.count(DatabaseAwayError),
        not dataset.policy.admits(taken),
        len(verify(repository).faults),
    )


def request(key: KeyRecord) -> WriteRequest:
    return WriteRequest(key, uuid.uuid4().hex, "race", None)


def without_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the lock; each writer then waits, so that others read the same state before a charge.

    Else a busy machine may happen to run one writer after the other.
    """
    for name in ("find_dataset", "find_dataset_by_id"):
        genuine: Any = getattr(Transaction, name)

        def unlocked(self: Transaction, of: str, *, lock: bool = False, to: Any = genuine) -> Any:
            found = to(self, of)
            time.sleep(0.05 if lock else 0.0)
            return found

        monkeypatch.setattr(Transaction, name, unlocked)


def without_unique_numbers(repository: Repository) -> None:
    with repository.transaction() as transaction:
        transaction.connection.execute(text("ALTER TABLE entry DROP CONSTRAINT entry_pkey"))


@pytest.mark.parametrize(
    ("others", "planned", "granted"),
    [
        (0, True, 0),
        pytest.param(8, True, 0, marks=pytest.mark.nightly),  # up to 20 CPU seconds each
        pytest.param(8, False, 0, marks=pytest.mark.nightly),
        pytest.param(8, False, 70, marks=pytest.mark.slow),
    ],
)
def test_racing_writers_are_all_answered_and_never_overspend(
    others: int, planned: bool, granted: int, repository: Repository
) -> None:
    outcome = race(repository, others, planned=planned, granted=granted)
    assert outcome.admitted > 1
    assert outcome.admitted + outcome.refused == WRITERS
    assert not outcome.overspent
    assert outcome.faults == 0


def test_the_lock_alone_keeps_the_budget(postgresql: Repository) -> None:
    without_unique_numbers(postgresql)
    outcome = race(postgresql)
    assert outcome.admitted + outcome.refused == WRITERS
    assert not outcome.overspent
    assert outcome.faults == 0


def test_unique_numbers_alone_keep_the_budget_but_turn_writers_away(
    postgresql: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_lock(monkeypatch)
    outcome = race(postgresql)
    assert outcome.turned_away > 0  # which the first test here does not allow
    assert not outcome.overspent
    assert outcome.faults == 0


def test_without_either_a_race_overspends(
    postgresql: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_lock(monkeypatch)
    without_unique_numbers(postgresql)
    outcome = race(postgresql)
    assert outcome.overspent
    assert outcome.faults > 0


def test_a_reader_waits_for_nobody_and_nobody_for_a_reader(repository: Repository) -> None:
    _, key = Keys(repository).create([Scope.ADMIN])
    relation = NeighbouringRelation.ADD_OR_REMOVE_ONE
    ledger = Ledger(repository, encode_answer)
    ledger.create_dataset(request(key), NewDataset("d", 1000, 8.0, 1e-5, relation, "record"))
    started = time.monotonic()
    with repository.transaction() as writing:
        writing.find_dataset("d", lock=True)
        writing.record_audit_event("someone", "waits", "d")
        with repository.reading() as reading:
            assert reading.find_dataset("d") is not None
            assert not any(event["action"] == "waits" for event in reading.list_audit_events())
    with repository.reading() as reading:
        assert reading.find_dataset("d") is not None
        ledger.reserve(request(key), "d", RUN, 3600, "")
    assert time.monotonic() - started < 5.0


def test_a_secret_is_made_once_whoever_asks_first(repository: Repository) -> None:
    start, found = threading.Barrier(8), []

    def ask() -> None:
        start.wait()
        with repository.transaction() as transaction:
            found.append(transaction.get_or_create_secret("certificates"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
