"""Budget of one participant of federated training: the ledger grants one round at a time.

A framework may run each round in a new process, so nothing is kept in memory from one round to the
next. The reservation is made with an idempotency key derived from the job: a participant that lost
its own state finds the same reservation again, as long as the ledger keeps the key. After that the
participant makes a second reservation, which costs budget again.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from training_client.answers import Guarantee
from training_client.budget import Allowance, LedgerBudget, StepCounter, require_granted
from training_client.client import AccountingService, Reservation
from training_client.errors import BudgetExhaustedError, DataError, NoGuaranteeError
from training_client.plan import Plan
from training_client.run_report import settle

RECORD: Final = "rounds.jsonl"
_OPEN: Final = "open"


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
            the certificate are written at the end; nothing is written without it.

    Raises:
        DataError: the plan changes from step to step, or a round has no whole number of charges.
    """

    service: AccountingService
    dataset: str
    delta: float
    plan: Plan
    rounds: int
    steps_per_round: int = 1
    folder: Path | None = None

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
                f"{self.plan.steps_per_charge}, which balls-in-bins sampling charges as one"
            )

    def find_reservation(self, job: str, known: str | None = None) -> Reservation:
        """Return the job's reservation in its current state; make it if there is none.

        Args:
            job: the job's name, the same for all its rounds and restarts.
            known: the reservation's identifier, if it is known.

        Raises:
            BudgetExhaustedError: the whole run does not fit the dataset's budget.
            ServiceError: the service gave no usable answer.
        """
        if known is None:
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
                rounds of it than the participant recorded.
            ServiceError: the service gave no usable answer; the round must not be made.
        """
        budget = self._budget(reservation)  # compares it with the plan, before any charge
        require_granted(self._rounds_recorded(reservation) * self.steps_per_round, budget.made)
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

    def _rounds_recorded(self, reservation: Reservation) -> int:
        """Return the number of a reservation's rounds in the participant's own record."""
        if self.folder is None or not (self.folder / RECORD).exists():
            return 0
        lines = (self.folder / RECORD).read_text().splitlines()  # a crash may have cut one
        return sum(reservation.identifier in line for line in lines)

    def end(self, reservation: Reservation) -> None:
        """Commit the run; write its guarantee and certificate if there is a folder for them."""
        if self.folder is not None:
            budget = self._budget(reservation)
            settle(budget, budget.made, self.folder)
        elif reservation.state == _OPEN:
            self.service.commit(reservation, self.plan.constant_clip_norm)

    def _budget(self, reservation: Reservation) -> LedgerBudget:
        """Return the budget of all rounds; raise if the reservation is not for the plan."""
        return LedgerBudget(self.service, self.plan, self.dataset, self.delta, reservation)

    def _record(self, reservation: Reservation) -> None:
        """Append the round just granted to the participant's own record, and flush it to disk."""
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        entry = {
            "round": self.rounds_granted(reservation),
            "dataset": self.dataset,
            "reservation": reservation.identifier,
        }
        with (self.folder / RECORD).open("a") as file:
            file.write(json.dumps(entry) + "\n")
            file.flush()
            os.fsync(file.fileno())
