"""A dataset's budget for a run with scheduled noise: each stretch of steps has its reservation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TypeAlias

from training_client.budget import (
    RELEASE_PATIENCE_SECONDS,
    RESERVATIONS,
    Allowance,
    LedgerBudget,
    add_step_counts,
    prove_guarantee,
    require_granted,
)
from training_client.client import AccountingService, Json, Reservation
from training_client.client.answers import Guarantee
from training_client.errors import BudgetExhaustedError, NoGuaranteeError, TrainingStoppedError
from training_client.plan import Mechanism, Plan, compose


class PhasedLedgerBudget(Allowance):
    """A run's budget in the ledger when its noise is scheduled: one reservation per noise level.

    The steps with the same noise are one phase, with one reservation: the ledger charges each step
    as what it is, a block at a time, before it is made. All phases are reserved before the first
    step, so that the whole run fits. The first phase's budget also holds the releases that precede
    training.

    Attributes:
        plan: the plan of the whole run.
        phases: the budget of each phase, in their order.
        dataset: the dataset's name in the ledger.
        delta: δ of the run's guarantee; that of the dataset's budget.
        spent: ε of the run's granted steps.

    Args:
        plan: see above.
        phases: see above.

    Raises:
        NoGuaranteeError: the phases are not those of the plan, or on several datasets.
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
        if len(names := {phase.dataset for phase in phases}) > 1:
            raise NoGuaranteeError(
                f"the phases are on several datasets, {', '.join(sorted(names))}: reserve the "
                "whole run on one"
            )
        first = self.phases[0]
        self._service, self.dataset, self.delta = first.service, first.dataset, first.delta
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
        before: tuple[Mechanism, ...] = (),
        releases: tuple[Reservation, ...] = (),
        record: str | Path | None = None,
    ) -> Self:
        """Reserve budget for a whole run; if any phase does not fit, reserve nothing.

        Args:
            service: the accounting service, connected with an API key.
            plan: the plan of the run.
            dataset: the dataset's name in the ledger.
            steps: the number of steps.
            purpose: a note that the ledger keeps.
            block: the number of steps charged at once.
            before: mechanisms released before the first step; the run's guarantee covers them too.
            releases: a reservation for each mechanism of `before`, in the same order. If the steps
                cannot be reserved, the caller releases them.
            record: a file where each grant is recorded, as of `LedgerBudget`.

        Raises:
            BudgetExhaustedError: the run does not fit the remaining budget.
        """
        held: list[Reservation] = []
        phases = plan.phases(steps)
        try:
            for count, part in phases:
                with _name_phase(len(held) + 1, len(phases), count, part):
                    held.append(service.reserve(dataset, part.mechanism(count), purpose))
            return cls._of_reservations(
                service, plan, dataset, held, block, before, releases, record
            )
        except BaseException:  # an interrupt too: nobody else knows the reservations
            with suppress(TrainingStoppedError):  # their leases expire anyway
                for each in held:
                    service.release(each, RELEASE_PATIENCE_SECONDS)
            raise

    @classmethod
    def resume(
        cls,
        service: AccountingService,
        plan: Plan,
        dataset: str,
        reservations: Sequence[str],
        *,
        block: int = 50,
        before: tuple[Mechanism, ...] = (),
        releases: tuple[Reservation, ...] = (),
        record: str | Path | None = None,
    ) -> Self:
        """Continue a run after its last granted step, given its reservations' identifiers.

        Args:
            service: the accounting service, connected with an API key.
            plan: the plan of the run.
            dataset: the dataset's name in the ledger.
            reservations: the identifiers of the run's reservations, in their order.
            block: the number of steps charged at once.
            before: mechanisms that were released, and charged, before the first step.
            releases: their reservations; only a run without granted steps needs them.
            record: the file where earlier processes recorded each grant, as of `LedgerBudget`.
        """
        held = [service.reservation(each) for each in reservations]
        return cls._of_reservations(service, plan, dataset, held, block, before, releases, record)

    @classmethod
    def _of_reservations(
        cls,
        service: AccountingService,
        plan: Plan,
        dataset: str,
        held: Sequence[Reservation],
        block: int,
        before: tuple[Mechanism, ...],
        releases: tuple[Reservation, ...] = (),
        record: str | Path | None = None,
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
        phases = [
            LedgerBudget(
                service, part, dataset, delta, each,
                () if phase else before, () if phase else releases, block=block, record=record,
            )
            for phase, (part, each) in enumerate(zip(parts, held, strict=True))
        ]  # fmt: skip
        return cls(plan, phases)

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

    @property
    def current_phase(self) -> LedgerBudget:
        """The budget of the phase that the next step is in; the last one after the last step."""
        unfinished = (phase for phase in self.phases if phase.made < phase.reserved)
        return next(unfinished, self.phases[-1])

    def begin(self) -> list[Json]:
        """Spend budget on the releases that precede training; return a certificate of each.

        Raises:
            NoGuaranteeError: they are not those that the run claims; nothing is spent.
            ServiceError: the service gave no usable answer; nothing may be released.
        """
        return self.phases[0].begin()

    def give_up(self) -> None:
        """Release the budget of steps not granted; if that fails, the lease's end frees it."""
        for phase in self.phases:
            phase.give_up()

    @property
    def claim(self) -> str:
        """The dataset whose ledger is charged, and δ of its budget."""
        return self.phases[0].claim

    @property
    def privacy_unit(self) -> str:
        """The word for one record of the ledger's dataset."""
        return self.phases[0].privacy_unit

    def checkpoint_keys(self) -> dict[str, Any]:
        """Return what a checkpoint must name of its steps."""
        first = self.phases[0].checkpoint_keys()
        return first | super().checkpoint_keys() | {RESERVATIONS: self.reservations}

    def count_resumed(self, steps: int) -> int:
        """Return 0: the ledger counts the steps; it has granted all of a checkpoint's.

        Raises:
            NoGuaranteeError: it has granted fewer, as it was restored from a backup.
        """
        require_granted(steps, self.made)
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
        """Return the guarantee of all reserved steps and of the releases that precede training."""
        return add_step_counts(self._prove(self.reserved), steps, self.reserved)

    def commit(self, model_sha256: str | None = None) -> Json:  # noqa: ARG002
        """End the run in the ledger, and return `{"certificates": […]}`, one for each phase.

        No certificate names the model: it covers one phase, and the model's ε is that of all.
        """
        return {"certificates": [phase.commit() for phase in self.phases]}

    def _prove(self, steps: int) -> Guarantee:
        """Return the proven guarantee of the releases before training and of `steps` steps."""
        first = self.phases[0]
        whole = compose(first.before, self.plan.mechanism(steps))
        return prove_guarantee(self._service, whole, self.delta, first.relation)

    def _require_allowed(self, step: int) -> None:
        """Raise if the budget does not cover the step."""
        self.allow(step)

    def _locate(self, step: int) -> tuple[LedgerBudget, int]:
        """Return a step's phase and the step's number within it; renew other phases' leases.

        Raises:
            BudgetExhaustedError: the step is beyond the last phase.
        """
        left = step
        for phase in self.phases:
            if left <= phase.reserved:
                self._renew_others(phase)
                return phase, left
            left -= phase.reserved
        raise BudgetExhaustedError(f"all {self.reserved} steps of the run are made")

    def _renew_others(self, current: LedgerBudget) -> None:
        """Renew the leases of the other phases, when they are due.

        Those of past phases too: a reservation that expires before the commit has a certificate
        without the clip norm.
        """
        for phase in self.phases:
            if phase is not current:
                phase.renew_if_due()


ChargedBudget: TypeAlias = LedgerBudget | PhasedLedgerBudget  # a run's budget in the ledger


@contextmanager
def _name_phase(number: int, phases: int, steps: int, part: Plan) -> Iterator[None]:
    """Context manager: say in a refusal for lack of budget which phase does not fit."""
    try:
        yield
    except BudgetExhaustedError as error:
        raise BudgetExhaustedError(
            f"phase {number} of {phases}, {steps} steps with σ = {part.noise_multiplier:g}, does "
            f"not fit: {error}"
        ) from None
