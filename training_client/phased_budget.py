"""A dataset's budget for a run with scheduled noise: each stretch of steps has its reservation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Self

from training_client.answers import Guarantee
from training_client.budget import Allowance, LedgerBudget, add_step_counts, prove_guarantee
from training_client.client import AccountingService, Json, Reservation
from training_client.errors import BudgetExhaustedError, NoGuaranteeError, TrainingStoppedError
from training_client.plan import Plan


class PhasedLedgerBudget(Allowance):
    """A run's budget in the ledger when its noise is scheduled: one reservation per noise level.

    The steps with the same noise are one phase, with one reservation: the ledger charges each step
    as what it is, a block at a time, before it is made. All phases are reserved before the first
    step, so that the whole run fits.

    Attributes:
        plan: the plan of the whole run.
        phases: the budget of each phase, in their order.
        delta: δ of the run's guarantee; that of the dataset's budget.
        spent: ε of the run's granted steps.

    Args:
        plan: see above.
        phases: see above.

    Raises:
        NoGuaranteeError: the phases are not those of the plan.
    """

    def __init__(self, plan: Plan, phases: Sequence[LedgerBudget]) -> None:
        self.plan, self.phases = plan, tuple(phases)
        steps = sum(phase.reserved for phase in phases)
        planned = [(count, part.mechanism(count)) for count, part in plan.phases(steps)]
        held = [(phase.reserved, phase.plan.mechanism(phase.reserved)) for phase in phases]
        if not phases or planned != held:
            raise NoGuaranteeError(
                f"the reservations are for {held}, but {steps} steps of the plan are {planned}: "
                "reserve budget for the plan that is run"
            )
        first = self.phases[0]
        self._service, self._dataset, self.delta = first.service, first.dataset, first.delta
        self._proved: tuple[int, float] = (0, 0.0)  # steps granted, and their ε

    @classmethod
    def reserve(
        cls,
        service: AccountingService,
        plan: Plan,
        dataset: str,
        steps: int,
        *,
        purpose: str = "",
        block: int = 50,
    ) -> Self:
        """Reserve budget for a whole run; if any phase does not fit, reserve nothing.

        Args:
            service: the accounting service, connected with an API key.
            plan: the plan of the run.
            dataset: the dataset's name in the ledger.
            steps: the number of steps.
            purpose: a note that the ledger keeps.
            block: the number of steps charged at once.

        Raises:
            BudgetExhaustedError: the run does not fit the remaining budget.
        """
        held: list[Reservation] = []
        try:
            for count, part in plan.phases(steps):
                held.append(service.reserve(dataset, part.mechanism(count), purpose))
        except TrainingStoppedError:
            with suppress(TrainingStoppedError):  # their leases expire anyway
                for each in held:
                    service.release(each)
            raise
        return cls._of_reservations(service, plan, dataset, held, block)

    @classmethod
    def resume(
        cls,
        service: AccountingService,
        plan: Plan,
        dataset: str,
        reservations: Sequence[str],
        *,
        block: int = 50,
    ) -> Self:
        """Continue a run after its last granted step, given its reservations' identifiers.

        Args:
            service: the accounting service, connected with an API key.
            plan: the plan of the run.
            dataset: the dataset's name in the ledger.
            reservations: the identifiers of the run's reservations, in their order.
            block: the number of steps charged at once.
        """
        held = [service.reservation(each) for each in reservations]
        return cls._of_reservations(service, plan, dataset, held, block)

    @classmethod
    def _of_reservations(
        cls,
        service: AccountingService,
        plan: Plan,
        dataset: str,
        held: Sequence[Reservation],
        block: int,
    ) -> Self:
        """Build the budget from the reservations of a run's phases."""
        delta = float(service.dataset(dataset)["budget"]["delta"])
        steps = sum(each.steps_reserved for each in held) * plan.steps_per_charge
        parts = [part for _, part in plan.phases(steps)]
        if len(parts) != len(held):
            raise NoGuaranteeError(
                f"there are {len(held)} reservations, and {steps} steps of the plan have "
                f"{len(parts)} phases: reserve budget for the plan that is run"
            )
        return cls(
            plan,
            [
                LedgerBudget(service, part, dataset, delta, each, block=block)
                for part, each in zip(parts, held, strict=True)
            ],
        )

    @property
    def reservations(self) -> list[str]:
        """The identifiers of the run's reservations, with which it can be resumed."""
        return [phase.reservation.identifier for phase in self.phases]

    @property
    def made(self) -> int:
        """The number of steps granted so far."""
        return sum(phase.made for phase in self.phases)

    @property
    def taken(self) -> int:
        """The number of the last step that was allowed; a guarantee must cover all up to it."""
        return sum(phase.taken for phase in self.phases)

    @property
    def reserved(self) -> int:
        """The number of steps that budget is reserved for."""
        return sum(phase.reserved for phase in self.phases)

    @property
    def spent(self) -> float:  # type: ignore[override]
        """ε of the run's granted steps, which the service computes after each grant."""
        if self._proved[0] != self.made:
            self._proved = self.made, self._prove(self.made).epsilon
        return self._proved[1]

    def begin(self) -> list[Json]:
        """Return an empty list: nothing is released before the first step."""
        return []

    def give_up(self) -> None:
        """Release the budget of steps not granted; if that fails, the lease's end frees it."""
        for phase in self.phases:
            phase.give_up()

    def count_resumed(self, steps: int) -> int:  # noqa: ARG002
        """Return 0: the ledger's count of steps is used, not the checkpoint's."""
        return 0

    def allow(self, step: int) -> None:
        """Raise unless the budget covers a step, without taking it."""
        phase, own_step = self._locate(step)
        phase.allow(own_step)

    def take(self, step: int) -> None:
        """Take a step, which can be taken only once; raise if the budget does not cover it."""
        phase, own_step = self._locate(step)
        phase.take(own_step)

    def guarantee(self, steps: int) -> Guarantee:
        """Return the guarantee of all reserved steps."""
        return add_step_counts(self._prove(self.reserved), steps, self.reserved)

    def commit(self, model_sha256: str | None = None) -> Json:
        """End the run in the ledger, and return `{"certificates": […]}`, one for each phase."""
        return {"certificates": [phase.commit(model_sha256) for phase in self.phases]}

    def _prove(self, steps: int) -> Guarantee:
        """Return the proven guarantee of the run's first `steps` steps."""
        return prove_guarantee(
            self._service, self.plan.mechanism(steps), self.delta, self.phases[0].relation
        )

    def _require_allowed(self, step: int) -> None:
        """Raise if the budget does not cover the step."""
        self.allow(step)

    def _locate(self, step: int) -> tuple[LedgerBudget, int]:
        """Return a step's phase and the step's number within it; renew later phases' leases.

        Raises:
            BudgetExhaustedError: the step is beyond the last phase.
        """
        left = step
        for phase in self.phases:
            if left <= phase.reserved:
                self._renew_after(phase)
                return phase, left
            left -= phase.reserved
        raise BudgetExhaustedError(f"all {self.reserved} steps of the run are made")

    def _renew_after(self, current: LedgerBudget) -> None:
        """Renew the leases of the phases after the current one, when they are due."""
        for phase in self.phases[self.phases.index(current) + 1 :]:
            phase.renew_if_due()
