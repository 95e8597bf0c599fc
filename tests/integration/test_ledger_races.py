"""Racing writers, and what happens without each of the two things that keep them apart.

On PostgreSQL a writer locks the dataset's row before it reads anything that a charge depends on,
and every entry's number is unique in its dataset. Either alone keeps the budget; the lock also
spares writers from being told to try again. Without both, a race overspends.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import pytest

from accountant_service.ledger import plans
from accountant_service.ledger.filters.base import add
from accountant_service.ledger.repository import Transaction
from accountant_service.ledger.rules import State
from accountant_service.mechanisms import DpSgd
from tests.support.ledger_scenarios import (
    ON_POSTGRESQL,
    SQL_MATTERS,
    Scenario,
    race,
    refusals,
)

# without sampling, for which exchanges are decided fast; five of these fit
RUN = DpSgd(20.0, sample_rate=1.0, steps=200, sampling="none")
OTHER = replace(RUN, noise_multiplier=30.0)
WRITERS = 16


@pytest.fixture(autouse=True)
def quick_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal here does not say what would fit: to compute that takes most of a race."""
    monkeypatch.setattr(plans, "find_affordable", lambda *_: (0, None))


@dataclass
class Outcome:
    """The outcome of a race of reservations."""

    refused: Counter[str]
    overspent: bool

    @property
    def admitted(self) -> int:
        """The number of writers that got what they asked for."""
        return WRITERS - self.refused.total()


def race_for_the_budget(
    scenario: Scenario, others: int = 0, *, planned: bool = True, granted: int = 0
) -> Outcome:
    """Sixteen writers reserve a fifth of the budget each, at the same moment.

    Args:
        scenario: an empty ledger.
        others: the number of writers whose mechanism is not the planned one.
        planned: whether the reference is chosen at creation, and not by the fastest writer.
        granted: the number of steps after which each run that was admitted is committed.
    """
    admin = scenario.admin
    admin.create(by="reference", epsilon=8.0, plan=RUN if planned else None)
    for run in (RUN, OTHER):  # once, and not by all threads at the same time
        plans.compute_charge(scenario.dataset(), run)

    def write(plan: DpSgd) -> None:
        run = admin.reserve(plan)
        if granted:
            admin.grant(run, granted)
            admin.commit(run)

    chosen = [OTHER if number < others else RUN for number in range(WRITERS)]
    refused = refusals(race(*(lambda plan=plan: write(plan) for plan in chosen)))
    dataset = scenario.dataset()
    held = (run.held for run in scenario.runs() if run.state is State.OPEN)
    taken = reduce(add, held, dataset.balance.spent)
    assert granted or not any(dataset.balance.spent)
    return Outcome(Counter(refused), not dataset.policy.admits(taken))


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


def without_unique_numbers(scenario: Scenario) -> None:
    scenario.execute("ALTER TABLE entry DROP CONSTRAINT entry_pkey")


@SQL_MATTERS
@pytest.mark.parametrize(
    ("others", "planned", "granted"),
    [
        pytest.param(0, True, 0, marks=pytest.mark.slow),
        pytest.param(8, True, 0, marks=pytest.mark.nightly),  # up to 20 CPU seconds each
        pytest.param(8, False, 0, marks=pytest.mark.nightly),
        pytest.param(8, False, 70, marks=pytest.mark.slow),
    ],
)
def test_racing_writers_are_all_answered_and_never_overspend(
    others: int, planned: bool, granted: int, scenario: Scenario
) -> None:
    outcome = race_for_the_budget(scenario, others, planned=planned, granted=granted)
    assert outcome.admitted > 1
    assert set(outcome.refused) == {"budget-exhausted"}
    assert not outcome.overspent


@ON_POSTGRESQL
def test_the_lock_alone_keeps_the_budget(scenario: Scenario) -> None:
    without_unique_numbers(scenario)
    outcome = race_for_the_budget(scenario)
    assert set(outcome.refused) == {"budget-exhausted"}
    assert not outcome.overspent


@ON_POSTGRESQL
def test_unique_numbers_alone_keep_the_budget_but_turn_writers_away(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_lock(monkeypatch)
    outcome = race_for_the_budget(scenario)
    assert outcome.refused["database-away"] > 0  # which the first test here does not allow
    assert not outcome.overspent


@ON_POSTGRESQL
def test_without_either_a_race_overspends(
    scenario: Scenario, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_lock(monkeypatch)
    without_unique_numbers(scenario)
    assert race_for_the_budget(scenario).overspent
    assert scenario.forge()


@SQL_MATTERS
def test_a_reader_waits_for_nobody_and_nobody_for_a_reader(scenario: Scenario) -> None:
    scenario.admin.create()
    started = time.monotonic()
    with scenario.repository.transaction() as writing:
        writing.find_dataset("d", lock=True)
        writing.record_audit_event("someone", "waits", "d")
        with scenario.repository.reading() as reading:
            assert reading.find_dataset("d") is not None
            assert not any(event["action"] == "waits" for event in reading.list_audit_events())
    with scenario.repository.reading() as reading:
        assert reading.find_dataset("d") is not None
        scenario.admin.reserve()
    assert time.monotonic() - started < 5.0


@SQL_MATTERS
def test_a_secret_is_made_once_whoever_asks_first(scenario: Scenario) -> None:
    def ask() -> bytes:
        with scenario.repository.transaction() as transaction:
            return transaction.get_or_create_secret("certificates")

    assert len(set(race(*[ask] * 8))) == 1
