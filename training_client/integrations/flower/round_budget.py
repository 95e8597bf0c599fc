"""Budget of one participant of federated training: the ledger grants one round at a time.

A framework may run each round in a new process, so nothing is kept in memory from one round to the
next. The reservation is made with an idempotency key derived from the job: a participant that lost
its own state finds the same reservation again, as long as the ledger keeps the key. After that the
participant makes a second reservation, which costs budget again.

The participant records each granted round in a file. Before the next round it compares the record
with the ledger, which may have been restored from a backup and know fewer rounds.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from training_client.budget import Allowance, LedgerBudget, StepCounter
from training_client.client import AccountingService, Reservation
from training_client.client.answers import Guarantee
from training_client.errors import (
    BudgetExhaustedError,
    DataError,
    NoGuaranteeError,
    ServiceRefusedError,
)
from training_client.plan import Plan
from training_client.run_report import settle

RECORD: Final = "rounds.jsonl"
_OPEN: Final = "open"
_NOT_FOUND: Final = "not-found"
_GRANTED: Final = "steps_granted"  # the key in the record
_SEEN: Final[dict[tuple[str, str], int]] = {}  # steps granted, by service and earlier reservation


class GrantedRound(Allowance):
    """The steps of one round that the ledger has granted; no other step is allowed.

    Args:
        budget: the run's budget, after the grant.
        steps: the number of steps in the round; they end with the last step granted.
    """

    def __init__(self, budget: LedgerBudget, steps: int) -> None:
        self.plan, self.delta, self._budget = budget.plan, budget.delta, budget
        self.last = budget.made
        self.first = self.last - steps + 1
        self._counter = StepCounter(self.first - 1)

    @cached_property
    def spent(self) -> float:  # type: ignore[override]  # only on demand: it takes a computation
        """ε of all steps granted so far."""
        return self._budget.planned_guarantee(self.last).epsilon

    @property
    def is_used(self) -> bool:
        """Return whether a step of the round was taken."""
        return self.taken >= self.first

    def guarantee(self, steps: int) -> Guarantee:
        """Return the guarantee of the whole plan, for a run that stopped after `steps` steps."""
        return self._budget.guarantee(steps)

    def checkpoint_keys(self) -> dict[str, Any]:
        """Return what a checkpoint must name of its steps."""
        return self._budget.checkpoint_keys()

    def _require_allowed(self, step: int) -> None:
        """Raise if the step is not one of this round."""
        if step > self.last:
            raise BudgetExhaustedError(
                f"the ledger granted this round the steps {self.first} to {self.last}, "
                f"not step {step}"
            )


@dataclass(frozen=True)
class RoundBudget:
    """A participant's side of a federated run: its dataset in the ledger, and its own plan.

    The participant sets all of it; the server of the federation sets nothing.

    Attributes:
        service: the accounting service, connected with the participant's own API key.
        dataset: the dataset's name in the ledger.
        delta: δ of the dataset's budget.
        plan: the plan of every step, with constant noise and clip norm.
        rounds: the number of rounds that budget is reserved for.
        steps_per_round: the number of steps in a round; whole epochs with balls-in-bins sampling.
        folder: where each granted round is recorded (`rounds.jsonl`), and where the guarantee and
            the certificate are written at the end. Keep it from run to run: without the record a
            participant cannot notice that the ledger was restored from a backup.

    Raises:
        DataError: the plan changes from step to step, or a round has no whole number of charges.
    """

    service: AccountingService
    dataset: str
    delta: float
    plan: Plan
    rounds: int
    steps_per_round: int = 1
    folder: Path = field(kw_only=True)

    def __post_init__(self) -> None:
        """Raise if the plan has schedules, or a round is not a whole number of charges."""
        if self.plan.varies:
            raise DataError(
                "noise or clip norm of the plan change from step to step, and a round begins "
                "without memory of the earlier ones: use a plan without schedules"
            )
        if self.rounds < 1 or self.steps_per_round < 1:
            raise DataError(
                f"expected at least one round and one step in each, got {self.rounds} and "
                f"{self.steps_per_round}"
            )
        if self.steps_per_round % self.plan.steps_per_charge:
            raise DataError(
                f"a round of {self.steps_per_round} steps is no whole number of epochs of "
                f"{self.plan.steps_per_charge}, which {self.plan.sampling} sampling charges as one"
            )

    def find_reservation(self, job: str, known: str | None = None) -> Reservation:
        """Return the job's reservation in its current state; make it if there is none.

        Args:
            job: the job's name, the same for all its rounds and restarts.
            known: the reservation's identifier, if it is known.

        Raises:
            BudgetExhaustedError: the whole run does not fit the dataset's budget.
            NoGuaranteeError: the ledger does not know all rounds that the participant recorded;
                nothing is reserved.
            ServiceError: the service gave no usable answer.
        """
        if known is None:
            self._require_recorded_rounds(None)
            mechanism = self.plan.mechanism(self.rounds * self.steps_per_round)
            key = hashlib.sha256(json.dumps([self.dataset, job]).encode()).hexdigest()
            known = self.service.reserve(
                self.dataset, mechanism, f"federated job {job}"[:200], key
            ).identifier
        return self.service.reservation(known)

    def grant_round(self, reservation: Reservation) -> GrantedRound:
        """Charge the next round and record it; call it before the round's batch is drawn.

        Args:
            reservation: the job's reservation in its current state.

        Raises:
            BudgetExhaustedError: all rounds are made, or the reservation has ended.
            NoGuaranteeError: the reservation is not for this plan, or the ledger has granted fewer
                rounds, of this or an earlier reservation, than the participant recorded.
            ServiceError: the service gave no usable answer; the round must not be made.
        """
        self._budget(reservation)  # compares it with the plan, before any charge
        self._require_recorded_rounds(reservation)
        charges = self.plan.charges(self.steps_per_round)
        left = reservation.steps_reserved - reservation.steps_granted
        if reservation.state != _OPEN or left < charges:
            raise BudgetExhaustedError(
                f"all {self.rounds_granted(reservation)} rounds of the run are made"
            )
        renewed = self.service.renew(reservation)  # a round may be as far from the last as a lease
        if renewed.steps_granted != reservation.steps_granted:
            raise NoGuaranteeError("another process uses the same reservation at the same time")
        granted = self.service.grant(renewed, charges)
        self._record(granted)
        return GrantedRound(self._budget(granted), self.steps_per_round)

    def rounds_granted(self, reservation: Reservation) -> int:
        """Return the number of rounds that the ledger has granted of a reservation."""
        steps = reservation.steps_granted * self.plan.steps_per_charge
        return steps // self.steps_per_round

    def end(self, reservation: Reservation) -> None:
        """Commit the run; write its guarantee and certificate to the folder.

        Raises:
            NoGuaranteeError: the ledger has granted fewer rounds than the participant recorded; the
                run is not ended, as that would free the budget of rounds that were made.
            ServiceError: the service gave no usable answer.
        """
        self._require_recorded_rounds(reservation)
        budget = self._budget(reservation)
        settle(budget, budget.made, self.folder)

    def _require_recorded_rounds(self, current: Reservation | None) -> None:
        """Raise unless the ledger has granted all rounds in the participant's own record.

        It is asked about each earlier reservation once in a process, and each time if no
        reservation is known yet: the ledger may have been restored since it was asked.

        Raises:
            NoGuaranteeError: a recorded reservation is unknown, or fewer of its steps are granted.
        """
        for identifier, steps in self._read_record().items():
            known = 0
            if current is not None:
                is_current = identifier == current.identifier
                seen = _SEEN.get((self.service.url, identifier), 0)
                known = current.steps_granted if is_current else seen
            if known >= steps:
                continue
            granted = self._granted_steps(identifier)
            if granted is None or granted < steps:
                raise NoGuaranteeError(
                    _describe_lost_rounds(self.folder, identifier, steps, granted)
                )
            _SEEN[self.service.url, identifier] = granted

    def _granted_steps(self, identifier: str) -> int | None:
        """Return how many steps of a reservation are granted; None if it does not exist."""
        try:
            return self.service.reservation(identifier).steps_granted
        except ServiceRefusedError as error:
            if error.code != _NOT_FOUND:
                raise
            return None

    def _read_record(self) -> dict[str, int]:
        """Return the steps granted to each of the dataset's reservations, counted as by the ledger.

        In a record of an earlier version, which has no such number, each line is one round.
        """
        found: dict[str, int] = {}
        for entry in _read_entries(self.folder / RECORD):
            if entry.get("dataset") == self.dataset:
                identifier = str(entry["reservation"])
                before = found.get(identifier, 0)
                counted = before + self.plan.charges(self.steps_per_round)
                found[identifier] = max(before, int(entry.get(_GRANTED, counted)))
        return found

    def _budget(self, reservation: Reservation) -> LedgerBudget:
        """Return the budget of all rounds; raise if the reservation is not for the plan."""
        return LedgerBudget(self.service, self.plan, self.dataset, self.delta, reservation)

    def _record(self, reservation: Reservation) -> None:
        """Append the round just granted to the participant's own record, and flush it to disk."""
        self.folder.mkdir(parents=True, exist_ok=True)
        entry = {
            "round": self.rounds_granted(reservation),
            "dataset": self.dataset,
            "reservation": reservation.identifier,
            _GRANTED: reservation.steps_granted,
        }
        with (self.folder / RECORD).open("a") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _read_entries(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a record of rounds, without those that a crash cut.

    A cut entry may have the next one behind it, in the same line.
    """
    for line in file.read_text().splitlines() if file.exists() else []:
        with suppress(json.JSONDecodeError):
            entry = json.loads(line[max(line.rfind("{"), 0) :])
            if isinstance(entry, dict):
                yield entry


def _describe_lost_rounds(folder: Path, identifier: str, steps: int, granted: int | None) -> str:
    """Say that a ledger lacks recorded rounds of a reservation, and what to do about it."""
    lacks = "does not know it" if granted is None else f"has granted only {granted} of them"
    return (
        f"{folder / RECORD} records that {steps} steps of reservation {identifier} were granted, "
        f"but the ledger {lacks}. It is an older copy, restored from a backup: enter the missing "
        "steps first; see docs/how-to/backup.md. If you enter them with another reservation, then "
        f"remove the lines that name {identifier} from the record"
    )
